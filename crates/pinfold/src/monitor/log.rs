//! The log of changes and the sequence word that tells how far it has come.
//!
//! The word counts entries: `2 * (entries + 1)` when nothing is being read, one more while the
//! reader may hold an event that is not in the log yet. It is never zero, except in a forked
//! child, where its page is wiped.

use crate::fork_mark::ForkMark;
use crate::sync::Ordering;
use crate::{AddressRange, Position, Replay, Sequence};
use pinfold_core::{Found, StampedSlot};
use pinfold_kernel::Errno;
use pinfold_kernel::zeroed::zeros;

#[derive(Debug)]
pub(super) struct Log {
    word: ForkMark,
    /// Entry `index` lies in slot `index % slots`; see [`pinfold_core::stamped`].
    slots: Box<[StampedSlot]>,
}

/// The word of an empty log.
const EMPTY: u64 = 2;
/// Set in the word while the reader may hold an event.
const PENDING: u64 = 1;

/// A range that the kernel reported, as it stands in a log: no report is left out.
///
/// It may begin at 0: `munmap(NULL, n)` is legal and reported as the program wrote it. No registration begins in
/// page 0's first byte, so nothing is lost by leaving that out. What makes no sense stands for everything.
pub(super) fn from_kernel(start: usize, end: usize) -> AddressRange {
    AddressRange::between(start.max(1), end).unwrap_or(AddressRange::EVERYTHING)
}

impl Log {
    pub(super) fn new(capacity: usize) -> Result<Self, Errno> {
        Ok(Self { word: ForkMark::new(EMPTY)?, slots: zeros(capacity.max(1)) })
    }

    pub(super) fn forked(&self) -> bool {
        self.word.forked()
    }

    /// The word as it is.
    pub(super) fn word(&self) -> u64 {
        // Acquire: entries counted by the word (stored with release order) can be read.
        self.word.word().load(Ordering::Acquire)
    }

    /// How far the log has come, everything included that the reader held when `first` was read
    /// from [`word`](Self::word); `None` if `now`, read later, does not tell that yet.
    ///
    /// An even `now` means that the reader holds nothing then. An odd `first` means that it may
    /// hold something, which is logged before the word becomes even; so if `now` is higher, be it
    /// odd again, the word was even in between and counts it.
    pub(super) fn includes(first: u64, now: u64) -> Option<Sequence> {
        let told = now & PENDING == 0 || now > first;
        told.then_some(Sequence(now & !PENDING))
    }

    /// The ranges that changed after `from`, `most` of them, in order, as far as they are still there.
    pub(super) fn replay(
        &self,
        from: Position,
        most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        let all = self.word() & !PENDING;
        let kept = self.slots.len() as u64 * 2;
        let readable = from.0 >= EMPTY && from.0 <= all && all - from.0 <= kept;
        let cut = all.min(from.0.saturating_add((most as u64).saturating_mul(2)));
        if !(readable && self.visit_all(from.0 / 2 - 1, cut / 2 - 1, visit)) {
            return Replay {
                up_to: Position(all, 0),
                sequence: Sequence(all),
                complete: false,
                may_repeat: false,
            };
        }
        let sequence = if cut < all { Sequence::CUT } else { Sequence(all) };
        Replay { up_to: Position(cut, 0), sequence, complete: true, may_repeat: false }
    }

    fn visit_all(&self, first: u64, end: u64, visit: &mut dyn FnMut(AddressRange)) -> bool {
        (first..end).all(|index| match self.slot(index).map(|slot| slot.read(index)) {
            Some(Found::Entry(range)) => {
                visit(range);
                true
            }
            _ => false,
        })
    }

    fn slot(&self, index: u64) -> Option<&StampedSlot> {
        let place = index % self.slots.len() as u64;
        self.slots.get(usize::try_from(place).ok()?)
    }
}

/// The one who writes the log: the reader of the events. There is one per log.
#[derive(Debug)]
pub(super) struct Writer<'a> {
    log: &'a Log,
    entries: u64,
}

impl<'a> Writer<'a> {
    pub(super) fn new(log: &'a Log) -> Self {
        Self { log, entries: 0 }
    }

    /// Says that an event may be in our hands from now on. Called before every read.
    pub(super) fn raise_pending(&self) {
        let odd = EMPTY + 2 * self.entries + PENDING;
        // SeqCst, though release would do: the read that follows takes and releases the event
        // queue's lock inside the kernel, and the changing thread takes that lock after us before
        // it goes on. A thread that knows that it went on therefore sees this store.
        self.log.word.word().store(odd, Ordering::SeqCst);
    }

    pub(super) fn append(&mut self, range: AddressRange) {
        // True: this is the only writer, and writes one entry after the other.
        let _written = self.log.slot(self.entries).is_some_and(|it| it.write(self.entries, range));
        self.entries += 1;
    }

    /// Says that everything that was in our hands is in the log.
    pub(super) fn publish(&self) {
        let even = EMPTY + 2 * self.entries;
        // Release: a thread that reads this word can read the entries it counts.
        self.log.word.word().store(even, Ordering::Release);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn range(start: usize) -> AddressRange {
        AddressRange::new(start, 1).unwrap()
    }

    fn replayed(log: &Log, from: Position) -> (Vec<AddressRange>, Replay) {
        let mut ranges = Vec::new();
        let replay = log.replay(from, usize::MAX, &mut |range| ranges.push(range));
        (ranges, replay)
    }

    #[test]
    fn no_report_of_the_kernel_is_left_out() {
        assert_eq!(from_kernel(0x1000, 0x2000), AddressRange::new(0x1000, 0x1000).unwrap());
        assert_eq!(from_kernel(0, 0x1000), AddressRange::between(1, 0x1000).unwrap());
        for (start, end) in [(0, 0), (0, 1), (0x1000, 0x1000), (0x2000, 0x1000), (usize::MAX, 0)] {
            assert_eq!(from_kernel(start, end), AddressRange::EVERYTHING, "{start:#x}..{end:#x}");
        }
    }

    #[test]
    fn entries_come_in_order_and_once() {
        let log = Log::new(8).unwrap();
        let mut writer = Writer::new(&log);
        let from = Position(log.word(), 0);
        writer.raise_pending();
        writer.append(range(1));
        writer.append(range(2));
        let nothing =
            Replay { up_to: from, sequence: Sequence(from.0), complete: true, may_repeat: false };
        assert_eq!(replayed(&log, from), (vec![], nothing));
        writer.publish();
        let (ranges, replay) = replayed(&log, from);
        assert_eq!((ranges, replay.complete), (vec![range(1), range(2)], true));
        assert_eq!(replayed(&log, replay.up_to), (vec![], replay));
    }

    #[test]
    fn a_reader_left_behind_is_told() {
        let log = Log::new(4).unwrap();
        let mut writer = Writer::new(&log);
        let from = Position(log.word(), 0);
        for start in 1..=5 {
            writer.append(range(start));
        }
        writer.publish();
        let (ranges, replay) = replayed(&log, from);
        assert_eq!((ranges, replay.complete), (vec![], false));
        assert_eq!(replay.up_to, Position(log.word(), 0));
        let (ranges, replay) = replayed(&log, Position(from.0 + 2, 0));
        assert_eq!((ranges.len(), replay.complete), (4, true));
    }

    #[test]
    fn a_place_in_another_log_is_not_believed() {
        let log = Log::new(4).unwrap();
        for foreign in [0, 1, EMPTY + 2, Position::NOWHERE.0] {
            assert!(!replayed(&log, Position(foreign, 0)).1.complete);
        }
    }

    #[test]
    fn what_was_pending_is_included_once_the_word_went_on() {
        assert_eq!(Log::includes(4, 4), Some(Sequence(4)));
        assert_eq!(Log::includes(5, 5), None, "still pending");
        assert_eq!(Log::includes(5, 6), Some(Sequence(6)));
        assert_eq!(Log::includes(5, 4), Some(Sequence(4)), "nothing was read");
        assert_eq!(Log::includes(5, 7), Some(Sequence(6)), "logged, and pending again");
    }
}
