//! Telling the program in advance: marks of a budget, and what happened to it.
//!
//! What happened is noted under the ledger's lock, as numbers; the program hears of it later, with no
//! lock held, on the thread whose get or release made the difference. Nothing is allocated for
//! that: what is told is built on the stack, and of one mark only the last crossing is told.

use pinfold_core::Amount;
use pinfold_core::foreign::ForeignList;
use std::fmt;
use std::sync::Arc;

/// A height that a budget is watched for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watermark {
    /// So many bytes are held.
    Bytes(usize),
    /// So many registrations are held.
    Regions(usize),
    /// So many percent of the budget's bytes, or of its registrations, are held. Moves with the
    /// budget.
    Percent(u8),
}

impl Watermark {
    fn is_reached(self, held: Amount, total: Amount) -> bool {
        match self {
            Self::Bytes(bytes) => held.bytes >= bytes,
            Self::Regions(regions) => held.regions >= regions,
            Self::Percent(percent) => {
                let reached = |held: usize, total: usize| {
                    held as u128 * 100 >= total as u128 * u128::from(percent)
                };
                reached(held.bytes, total.bytes) || reached(held.regions, total.regions)
            }
        }
    }
}

/// What happened to a budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BudgetNotice {
    /// As much as the watermark, or more, is held.
    Reached(Watermark),
    /// Less than the watermark is held again.
    Left(Watermark),
    /// The limit behind the budget turned out to be another than it was, and so is the budget.
    Changed {
        /// What the budget was.
        from: Amount,
    },
    /// The kernel or the device had no room for what the budget allows: another process has taken it.
    Refused,
}

/// A [`BudgetNotice`] with what is held and what there is, as they are when the program is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WatermarkEvent {
    /// What happened.
    pub notice: BudgetNotice,
    /// What all drawers together hold.
    pub held: Amount,
    /// The whole budget.
    pub total: Amount,
}

pub(super) type Listener = Arc<dyn Fn(&WatermarkEvent) + Send + Sync>;

/// Which listener it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ListenerId(u64);

struct Mark {
    id: ListenerId,
    watermark: Watermark,
    listener: Listener,
    is_reached: bool,
    was_told: bool,
}

/// Something that happened, for listeners who have heard of all before it.
#[derive(Clone, Copy, Default)]
struct Happened {
    changed_from: Option<Amount>,
    refused: bool,
}

/// The marks of a budget, and what is still to be told.
#[derive(Default)]
pub(super) struct Marks {
    /// Some are left in a forked child alone, which ends its copy.
    marks: ForeignList<Mark>,
    made: u64,
    happened: Happened,
    /// The listeners below this place in the list have been told of `happened`.
    next: usize,
}

impl Marks {
    pub(super) fn add(&mut self, watermark: Watermark, listener: Listener) -> ListenerId {
        self.made += 1;
        let id = ListenerId(self.made);
        self.marks.push(Mark { id, watermark, listener, is_reached: false, was_told: false });
        id
    }

    pub(super) fn remove(&mut self, id: ListenerId) -> Option<Listener> {
        let position = self.marks.iter().position(|mark| mark.id == id)?;
        if position < self.next {
            self.next -= 1;
        }
        Some(self.marks.remove(position).listener)
    }

    /// Notes how much is held now. True if a listener is to be called.
    pub(super) fn note(&mut self, held: Amount, total: Amount) -> bool {
        for mark in self.marks.iter_mut() {
            mark.is_reached = mark.watermark.is_reached(held, total);
        }
        self.is_due()
    }

    pub(super) fn note_change(&mut self, from: Amount) {
        self.happened.changed_from.get_or_insert(from);
        self.next = 0;
    }

    pub(super) fn note_refusal(&mut self) {
        self.happened.refused = true;
        self.next = 0;
    }

    pub(super) fn is_due(&self) -> bool {
        self.has_news() || self.marks.iter().any(|mark| mark.is_reached != mark.was_told)
    }

    /// How much is told by one change: every piece of news and each mark's crossing to every listener, and what
    /// they do then, a few times over.
    pub(super) fn most_at_once(&self) -> usize {
        (self.marks.len() + 1).saturating_mul(16)
    }

    fn has_news(&self) -> bool {
        self.happened.changed_from.is_some() || self.happened.refused
    }

    /// The next thing to tell, and whom; each once.
    pub(super) fn next_due(&mut self) -> Option<(Listener, BudgetNotice)> {
        if self.has_news() {
            return self.next_news();
        }
        let mark = self.marks.iter_mut().find(|mark| mark.is_reached != mark.was_told)?;
        mark.was_told = mark.is_reached;
        let told = if mark.is_reached { BudgetNotice::Reached } else { BudgetNotice::Left };
        Some((Arc::clone(&mark.listener), told(mark.watermark)))
    }

    /// One piece of news for one listener after the other, then the next piece.
    fn next_news(&mut self) -> Option<(Listener, BudgetNotice)> {
        let notice = match self.happened.changed_from {
            Some(from) => BudgetNotice::Changed { from },
            None => BudgetNotice::Refused,
        };
        if let Some(mark) = self.marks.get(self.next) {
            self.next += 1;
            return Some((Arc::clone(&mark.listener), notice));
        }
        self.next = 0;
        match self.happened.changed_from.take() {
            Some(_) => {}
            None => self.happened.refused = false,
        }
        self.next_due()
    }
}

impl fmt::Debug for Marks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.marks.iter().map(|mark| mark.watermark)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: Amount = Amount { bytes: 1000, regions: 10 };

    fn silent() -> Listener {
        Arc::new(|_| {})
    }

    fn told(marks: &mut Marks) -> Vec<BudgetNotice> {
        std::iter::from_fn(|| marks.next_due()).map(|(_, notice)| notice).collect()
    }

    fn held(bytes: usize, regions: usize) -> Amount {
        Amount { bytes, regions }
    }

    #[test]
    fn a_mark_is_told_once_each_way() {
        let mut marks = Marks::default();
        let mark = Watermark::Percent(80);
        marks.add(mark, silent());
        assert!(!marks.note(held(799, 7), TOTAL));
        assert!(marks.note(held(800, 7), TOTAL));
        assert_eq!(told(&mut marks), [BudgetNotice::Reached(mark)]);
        assert!(!marks.note(held(900, 9), TOTAL));
        assert!(!marks.note(held(100, 8), TOTAL), "registrations count as well");
        assert!(marks.note(held(100, 7), TOTAL));
        assert_eq!(told(&mut marks), [BudgetNotice::Left(mark)]);
    }

    #[test]
    fn what_was_over_before_it_was_told_is_not_told() {
        let mut marks = Marks::default();
        marks.add(Watermark::Bytes(500), silent());
        assert!(marks.note(held(600, 1), TOTAL));
        assert!(!marks.note(held(400, 1), TOTAL));
        assert_eq!(told(&mut marks), []);
    }

    #[test]
    fn news_reach_every_listener_once() {
        let mut marks = Marks::default();
        let first = marks.add(Watermark::Regions(99), silent());
        marks.add(Watermark::Regions(98), silent());
        marks.note_change(TOTAL);
        marks.note_change(held(5, 5));
        marks.note_refusal();
        let (changed, refused) = (BudgetNotice::Changed { from: TOTAL }, BudgetNotice::Refused);
        assert_eq!(told(&mut marks), [changed, changed, refused, refused]);
        assert!(!marks.is_due());
        marks.note_refusal();
        assert!(marks.next_due().is_some());
        assert!(marks.remove(first).is_some() && marks.remove(first).is_none());
        assert_eq!(told(&mut marks), [refused]);
    }

    #[test]
    fn a_mark_moves_with_the_budget() {
        let mut marks = Marks::default();
        marks.add(Watermark::Percent(50), silent());
        assert!(!marks.note(held(400, 1), TOTAL));
        assert!(marks.note(held(400, 1), held(700, 10)));
        // Nothing of nothing is all of it.
        assert!(Watermark::Percent(100).is_reached(Amount::ZERO, Amount::ZERO));
    }
}
