//! What registrations count, and whose budget pays for it: taking, counting anew, and making room where it is spent.

use crate::AddressRange;
use crate::budget::{Account, Amount, Recalls, Refusal};
use crate::config::WhenFull;
use crate::error::{Exhausted, GetError, Limit};
use crate::foreign::ForeignPart;
use crate::monitor::{Forked, Monitor};
use crate::reclaim::Reclaim;
use crate::region::Region;
use crate::registrar::{RegisterError, Registrar};
use crate::shared::{Writer, operations};
use std::sync::Arc;

/// Which budget is spent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// The bounds of this cache's own settings.
    Own,
    /// The one that others draw on as well.
    Shared,
}

/// A budget that refused, of which there had been so many departures then.
#[derive(Clone, Copy)]
pub(crate) struct Spent {
    refusal: Refusal,
    whose: Whose,
    departures: u64,
}

operations! {
    /// The room for registrations.
    Room
}

impl<R: Registrar, M: Monitor> Room<'_, R, M> {
    /// Takes what a registration will count, from this cache's own bounds and from the shared budget, or
    /// from neither. An account that panics has granted nothing; nothing is half done here.
    #[inline]
    pub(crate) fn take_budget(
        self,
        writer: &mut Writer,
        amount: Amount,
        past_budget: bool,
    ) -> Result<(), Spent> {
        if past_budget {
            self.0.account.iter().for_each(|account| account.overdraw(amount));
        } else {
            let departures = writer.departures;
            let spent = |whose| move |refusal| Spent { refusal, whose, departures };
            self.check_own(writer, amount).map_err(spent(Whose::Own))?;
            let shared = self.0.account.as_ref().map_or(Ok(()), |account| account.take(amount));
            shared.map_err(spent(Whose::Shared))?;
        }
        writer.held = writer.held + amount;
        Ok(())
    }

    /// A registered region is about to be registered anew, and the system may count more or less for it
    /// than it did: its memory was moved together into a huge page, or apart. Room is made for what is
    /// more; what cannot be had is taken all the same, because leases come back with the registration.
    pub(crate) fn count_anew(
        self,
        region: &Region<R::Handle>,
        range: AddressRange,
    ) -> Result<(), Forked> {
        let amount = self.counted(range);
        let mut past_budget = false;
        let mut recalls = Recalls::new();
        loop {
            let counted = self
                .0
                .locked(|writer| self.recount(writer, (region, range), amount, past_budget))?;
            let Err(spent) = counted else { return Ok(()) };
            past_budget = self.make_room(spent, &mut recalls).unwrap_or(true);
        }
    }

    /// The same behind a renewal, as [`count_behind`](crate::registering::Enlisted) says. What cannot be had at once is taken all
    /// the same, and returned: room is to be made for it where nothing waits for this renewal.
    pub(crate) fn count_renewed(
        self,
        region: &Region<R::Handle>,
        range: AddressRange,
    ) -> Result<Option<Spent>, Forked> {
        self.0.refuse_child()?;
        let amount = self.counted(range);
        self.0.locked(|writer| {
            let amount = amount.max(self.0.amount_of(writer, region));
            let spent = self.recount(writer, (region, range), amount, false).err()?;
            // Forked inside the account that refused: it is the parent's, which counts the renewal itself.
            if self.0.is_forked() {
                return None;
            }
            // Refused by none.
            let _taken = self.recount(writer, (region, range), amount, true);
            Some(spent)
        })
    }

    /// `region` of `range` counts `amount`, whatever it counted before: takes what is more, or gives back
    /// what is less.
    fn recount(
        self,
        writer: &mut Writer,
        (region, range): (&Region<R::Handle>, AddressRange),
        amount: Amount,
        past_budget: bool,
    ) -> Result<(), Spent> {
        let before = self.0.amount_of(writer, region);
        let more = amount - before;
        // What takes no more is refused by no budget, overdrawn or not.
        if more != Amount::ZERO {
            self.take_budget(writer, more, past_budget)?;
        }
        self.0.give_budget(writer, before - amount);
        self.0.note_amount(writer, (region.number, range), amount);
        Ok(())
    }

    /// What a registration of `range` counts. Asked with no lock held.
    pub(crate) fn counted(self, range: AddressRange) -> Amount {
        self.0.amount(self.widest(range))
    }

    /// What the system counts for a registration of `range`. A registrar that names something else is not
    /// believed.
    #[inline]
    pub(crate) fn widest(self, range: AddressRange) -> AddressRange {
        let widened = self.0.registrar.widened(range);
        if widened.contains(&range) { widened } else { range }
    }

    /// What is missing for `amount` within this cache's own bounds.
    fn check_own(self, writer: &Writer, amount: Amount) -> Result<(), Refusal> {
        let (held, config) = (writer.held, &self.0.config);
        let allowed = Amount { bytes: config.max_bytes, regions: config.max_regions };
        let missing = held + amount - allowed;
        let exhausted = if missing.bytes > 0 {
            let (allowed, held) = (config.max_bytes, held.bytes);
            Exhausted { limit: Limit::Bytes, allowed, held, wanted: amount.bytes }
        } else if missing.regions > 0 {
            let (allowed, held) = (config.max_regions, held.regions);
            Exhausted { limit: Limit::Regions, allowed, held, wanted: 1 }
        } else {
            return Ok(());
        };
        Err(Refusal { exhausted, missing })
    }

    /// Makes room, or says whether to go on without (true), or why not.
    ///
    /// Of a shared budget, others give back first what is due to this cache.
    pub(crate) fn make_room(
        self,
        Spent { refusal, whose, departures }: Spent,
        recalls: &mut Recalls,
    ) -> Result<bool, GetError> {
        // Forked as the account refused: it is the parent's, and so are its other drawers.
        self.0.refuse_child()?;
        let Refusal { exhausted, missing } = refusal;
        let others = self.0.account.as_ref().filter(|_| whose == Whose::Shared);
        let mut recalled = || others.is_some_and(|account| recalls.ask(|| account.recall(missing)));
        if !refusal.is_hopeless() && (recalled() || Reclaim(self.0).free_some(missing, departures))
        {
            return Ok(false);
        }
        match self.0.config.when_full {
            WhenFull::Refuse => Err(GetError::Exhausted(exhausted)),
            WhenFull::RegisterPerUse => Ok(true),
        }
    }

    /// The account hears of it in any case: it may have to adapt.
    pub(crate) fn make_room_on_device(
        self,
        missing: Amount,
        error: RegisterError,
        recalls: &mut Recalls,
    ) -> bool {
        let departures = self.0.departures();
        let refused = |account: &ForeignPart<Arc<dyn Account>>| {
            recalls.ask(|| account.refused(error, missing))
        };
        let recalled = self.0.account.as_ref().is_some_and(refused);
        if self.0.account.is_none() {
            self.note_refused_by_device(error, missing);
        }
        recalled || Reclaim(self.0).free_some(missing, departures)
    }

    /// The device had no room for `wanted` besides what is held, though the settings allow it: there is
    /// less than both, for now.
    fn note_refused_by_device(self, error: RegisterError, wanted: Amount) {
        let Ok(held) = self.0.locked(|writer| writer.held) else { return };
        let less = held + wanted - Amount::one(1);
        let most = Amount { bytes: self.0.config.max_bytes, regions: self.0.config.max_regions };
        let bound = match error {
            RegisterError::PinnedMemoryLimit { .. } => Amount { bytes: less.bytes, ..most },
            _ => Amount { regions: less.regions, ..most },
        };
        self.0.board.tell_bound(most, bound);
    }
}

/// That what is held can be told in one word with `amount` as well.
pub(crate) fn check_sum(held: Amount, amount: Amount) -> Result<(), GetError> {
    match held.bytes.checked_add(amount.bytes) {
        Some(_) => Ok(()),
        None => Err(GetError::Exhausted(Exhausted {
            limit: Limit::Bytes,
            allowed: usize::MAX,
            held: held.bytes,
            wanted: amount.bytes,
        })),
    }
}
