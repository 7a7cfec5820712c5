//! The seam to a budget that several pools and caches share.

use crate::budget::{DeviceRequest, ShareAccount};
use pinfold_core::foreign::ForeignPart;
use pinfold_core::{Account, Amount, Exhausted, Lender, Limit, RegisterError};
use std::fmt;
use std::sync::{Arc, Weak};

/// Says how many bytes a pool may pin besides its own [`max_bytes`](super::PoolConfig::max_bytes).
///
/// It is not told what a device refuses although it was granted, except that the grant comes back unused; a
/// [share](super::Pool::within) is.
///
/// Asked before a slab is mapped, on whatever thread needs one, with none of the pool's locks held;
/// told when a slab has been given back. Other threads that need a slab wait meanwhile. Every grant is given back exactly once, unless the
/// process forks: a child gives nothing back. Both may use the pool; while it grows, it has for the
/// thread that makes it grow only the buffers that it has already, and refuses a request there that would
/// [wait](super::WhenExhausted::Wait).
pub trait Allowance: fmt::Debug + Send + Sync + 'static {
    /// Grants `bytes` more: of a slab its bytes for each device that
    /// [pins](pinfold_core::Registrar::pins_per_page) it, as the system counts.
    ///
    /// # Errors
    ///
    /// [`Denied`] says what is left, so that the pool can try with less.
    fn grant(&self, bytes: usize) -> Result<(), Denied>;

    /// Takes back what was granted. Others may be waiting for that: it calls no other code.
    fn give_back(&self, bytes: usize);

    /// The same of a grant for a slab that could not be made.
    fn give_back_unused(&self, bytes: usize) {
        self.give_back(bytes);
    }

    /// How often there may have been more to grant for good, which a grant that comes back unused does not make. `None` if
    /// that is not counted: then a pool tries again each time that it is [notified](Lender::room_made).
    fn released(&self) -> Option<u64> {
        None
    }

    /// Has the pool [notified](Lender::room_made) when there is more to grant than now, as a refusal has.
    fn await_room(&self) {}

    /// Notifies listeners of what was granted and given back, which [`grant`](Self::grant) and
    /// [`give_back`](Self::give_back) do not. Called soon after them, on the same thread, with nothing held: no thread
    /// waits for the slab any more that one of them was called for, nor behind the thread that it was called on, so a
    /// listener may wait for a thread that uses the pool.
    fn settle(&self) {}

    /// Says who can be asked to give back what it does not use. Called once, before anything is
    /// granted.
    fn attach(&self, _lender: Weak<dyn Lender>) {}
}

/// A refusal to pin more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Denied {
    /// How many bytes would be granted, as far as is known.
    pub available: usize,
}

/// For pools that answer to their own limit only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Unshared;

impl Allowance for Unshared {
    fn grant(&self, _: usize) -> Result<(), Denied> {
        Ok(())
    }

    fn give_back(&self, _: usize) {}
}

/// What a pool asks before it pins.
#[derive(Debug)]
pub(super) enum Granter {
    /// The pool's own limit alone, or a budget of the program's own, which hears of no refusal of a device.
    Program(ForeignPart<Arc<dyn Allowance>>),
    /// A budget of this library.
    Share(ForeignPart<ShareAccount>),
}

impl Granter {
    fn allowance(&self) -> &dyn Allowance {
        match self {
            Self::Program(allowance) => &***allowance,
            Self::Share(account) => &**account,
        }
    }
}

/// What is granted for a slab, which each of its devices pins.
#[derive(Debug)]
pub(super) struct ForEachPin {
    granter: Granter,
    pins: usize,
}

impl ForEachPin {
    pub(super) fn new(granter: Granter, pins: usize) -> Self {
        Self { granter, pins }
    }

    pub(super) fn grant(&self, bytes: usize) -> Result<(), Denied> {
        let granted = self.granter.allowance().grant(bytes.saturating_mul(self.pins));
        granted.map_err(|denied| Denied { available: denied.available / self.pins.max(1) })
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.granter.allowance().give_back(bytes.saturating_mul(self.pins));
    }

    pub(super) fn give_back_unused(&self, bytes: usize) {
        self.granter.allowance().give_back_unused(bytes.saturating_mul(self.pins));
    }

    /// A device has refused a slab of `bytes` whose grant came back. True if another drawer of the budget gave something
    /// back, so that trying again makes sense. Listeners of the budget hear of it if it `tells`.
    pub(super) fn make_room_on_device(
        &self,
        error: RegisterError,
        bytes: usize,
        tells: bool,
    ) -> bool {
        match &self.granter {
            Granter::Program(_) => false,
            Granter::Share(account) => {
                let missing = Amount::one(bytes.saturating_mul(self.pins));
                let request = DeviceRequest { whole: Amount::one(bytes), missing };
                account.make_room_on_device(error, request, tells)
            }
        }
    }

    /// What is `missing` by the budget, as slabs have it here.
    pub(super) fn in_slabs(&self, missing: Amount) -> Amount {
        Amount { bytes: missing.bytes.div_ceil(self.pins.max(1)), ..missing }
    }

    /// Whether another drawer waits for what may be idle here.
    pub(super) fn is_awaited(&self) -> bool {
        match &self.granter {
            Granter::Program(_) => false,
            Granter::Share(account) => account.is_awaited(),
        }
    }

    /// So many bytes of so many slabs are idle now, and would be given back to another drawer. No lock is held.
    pub(super) fn note_idle(&self, idle: Amount) {
        match &self.granter {
            Granter::Program(_) => {}
            Granter::Share(account) => {
                let bytes = idle.bytes.saturating_mul(self.pins);
                account.note_idle(Amount { bytes, ..idle });
            }
        }
    }

    pub(super) fn released(&self) -> Option<u64> {
        self.granter.allowance().released()
    }

    /// The same as [`Allowance::await_room`], for a slab of so many bytes.
    pub(super) fn await_room(&self, bytes: usize) {
        match &self.granter {
            Granter::Program(allowance) => allowance.await_room(),
            Granter::Share(account) => {
                account.await_room(Amount::one(bytes.saturating_mul(self.pins)));
            }
        }
    }

    pub(super) fn settle(&self) {
        self.granter.allowance().settle();
    }

    pub(super) fn attach(&self, lender: Weak<dyn Lender>) {
        self.granter.allowance().attach(lender);
    }
}

/// A slab counts as one registration of the budget, with however many devices it is registered; its bytes
/// count for each.
impl Allowance for ShareAccount {
    fn grant(&self, bytes: usize) -> Result<(), Denied> {
        self.grow(Amount::one(bytes)).map_err(|refused| Denied { available: left(refused) })
    }

    fn give_back(&self, bytes: usize) {
        self.give(Amount::one(bytes));
    }

    fn give_back_unused(&self, bytes: usize) {
        self.give_unused(Amount::one(bytes));
    }

    fn released(&self) -> Option<u64> {
        Some(Self::released(self))
    }

    fn settle(&self) {
        Account::settle(self);
    }

    fn attach(&self, lender: Weak<dyn Lender>) {
        Account::attach(self, lender);
    }
}

/// In bytes: where registrations lack, none.
fn left(refused: Exhausted) -> usize {
    match refused.limit {
        Limit::Bytes | Limit::SharedBytes => refused.allowed.saturating_sub(refused.held),
        _ => 0,
    }
}
