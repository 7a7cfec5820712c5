//! A log of changed ranges that any thread may write: any number of writers and readers, no lock, no
//! allocation, and a writer may be interrupted anywhere, also by one that writes from a signal
//! handler on the same thread.
//!
//! A writer reserves a number, writes the range into that number's slot, stamps the slot and then
//! adds one to the *word*, which readers compare with the one they have applied. So the word
//! counts entries that can be read, in whatever order they were finished, and an entry that is
//! reserved and not finished yet is a *hole*.
//!
//! # What a reader may believe
//!
//! Call a range *told* when a replay visits it, or says that it is not complete. Claims:
//!
//! 1. **A thread that reads a word that counts an append finds the range told by every replay that
//!    follows, unless an earlier one told it.** The append stamped its slot, or noted that the entry
//!    is lost, before it added to the word; the word is only ever added to with release order, so
//!    a reader of the sum acquires what every writer did before. A replay reads the word first, then
//!    the numbers: so it meets the entry below `reserved`. Either its slot is whole, and it is
//!    visited; or the slot was overwritten, or given up, and the replay says so.
//! 2. **A place passes an entry only if it was told.** A complete replay ends at its first hole, or at the cut that was
//!    asked for if that comes first.
//!    (Entries behind the hole are visited, and visited again the next time.) One that is not
//!    complete told everything, and ends at the last reserved number.
//! 3. **A hole is harmless.** The append has not returned, so what it announces has not happened.
//!    A replay that is not complete passes holes for good: then what they announce happens after
//!    everything was said to have changed, and a thread that announces a change before it happens says in
//!    [`PendingChanges`](crate::PendingChanges) that it is under way, before it reserves the number which that
//!    replay read. One that reports a change afterwards reports it to a reader that knows already.
//!
//! So a writer that dies between reserving and stamping leaves a hole that readers go round until
//! the ring comes round; then, once, everything counts as changed.
//!
//! The layout is `#[repr(C)]`, because two copies of this code may share one log.

use crate::AddressRange;
use crate::stamped::{Found, StampedSlot};
use crate::sync::{AtomicU64, Ordering};
use std::ops::Range;

/// The last `ENTRIES` changed ranges and the word that counts them.
#[repr(C)]
#[derive(Debug)]
pub struct ChangeLog<const ENTRIES: usize> {
    /// The word: how many appends are done.
    word: AtomicU64,
    /// How many numbers were given away.
    reserved: AtomicU64,
    /// Some entry below this number was given up.
    lost: AtomicU64,
    slots: [StampedSlot; ENTRIES],
}

/// What a replay of a [`ChangeLog`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplayEnd {
    /// Where the next replay begins.
    pub up_to: u64,
    /// The word as it was before the first entry was read.
    pub word: u64,
    /// False if entries are gone: then anything may have changed.
    pub complete: bool,
    /// Behind as many entries as were asked for there may be others.
    pub is_cut: bool,
    /// It ended before a hole: what stood behind it is visited again.
    pub may_repeat: bool,
}

impl<const ENTRIES: usize> ChangeLog<ENTRIES> {
    /// An empty log, also in a `static`.
    #[cfg(not(any(loom, shuttle)))]
    pub const fn new() -> Self {
        let slots = [const { StampedSlot::new() }; ENTRIES];
        let [word, reserved, lost] = [const { AtomicU64::new(0) }; 3];
        Self { word, reserved, lost, slots }
    }

    /// The atomics of a model cannot be made at compile time.
    #[cfg(any(loom, shuttle))]
    pub fn new() -> Self {
        let slots = std::array::from_fn(|_| StampedSlot::new());
        let [word, reserved, lost] = std::array::from_fn(|_| AtomicU64::new(0));
        Self { word, reserved, lost, slots }
    }

    /// How many appends are done. Never decreases.
    #[inline]
    pub fn word(&self) -> u64 {
        // Acquire: see the file's first claim.
        self.word.load(Ordering::Acquire)
    }

    /// Logs `range`. Safe in signal handlers and before `main`; some 10 ns.
    pub fn append(&self, range: AddressRange) {
        // AcqRel. Release: a reader that knows of this number knows of what came before, see the
        // third claim. Acquire, because a chain of releases would do, and costs the same.
        let number = self.reserved.fetch_add(1, Ordering::AcqRel);
        let written = self.slot(number).is_some_and(|slot| slot.write(number, range));
        if !written {
            // Release: carried by the word below, too.
            self.lost.fetch_max(number + 1, Ordering::Release);
        }
        // Release: see the first claim.
        self.word.fetch_add(1, Ordering::Release);
    }

    /// Calls `visit` with the entries from `from` on, where an earlier replay ended: with `most` of them, or with all
    /// where one of those is a hole.
    ///
    /// A number that no replay gave, such as `u64::MAX`, gives no entry and is not complete.
    pub fn replay(&self, from: u64, most: usize, visit: &mut dyn FnMut(AddressRange)) -> ReplayEnd {
        // The word first, see the first claim. Then, with acquire order, the numbers, which are
        // at least as many; then the losses, of which those that the word counts are all seen.
        let word = self.word();
        let reserved = self.reserved.load(Ordering::Acquire);
        let lost = self.lost.load(Ordering::Acquire);
        let fresh = reserved.checked_sub(from).is_some_and(|fresh| fresh <= ENTRIES as u64);
        let cut = from.saturating_add(most as u64);
        let ended = match fresh && lost <= from {
            true => self.visit_all(from..reserved, cut, visit),
            false => None,
        };
        let up_to = ended.unwrap_or(reserved);
        let is_cut = ended == Some(cut) && cut < reserved;
        let may_repeat = up_to < reserved && !is_cut;
        ReplayEnd { up_to, word, complete: ended.is_some(), is_cut, may_repeat }
    }

    /// The first hole, or `cut` where there is none before it, or the end; `None` if an entry is gone.
    fn visit_all(
        &self,
        numbers: Range<u64>,
        cut: u64,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Option<u64> {
        let end = numbers.end;
        let mut first_hole = end;
        for number in numbers {
            // A place passes no hole.
            if number == cut && first_hole == end {
                return Some(cut);
            }
            match self.slot(number)?.read(number) {
                Found::Entry(range) => visit(range),
                Found::Hole => first_hole = first_hole.min(number),
                Found::Overwritten => return None,
            }
        }
        Some(first_hole)
    }

    fn slot(&self, number: u64) -> Option<&StampedSlot> {
        self.slots.get(usize::try_from(number % ENTRIES.max(1) as u64).ok()?)
    }

    /// A writer that stops once it has its number.
    #[cfg(test)]
    #[cfg(not(loom))]
    pub(crate) fn begin_for_ever(&self) {
        self.reserved.fetch_add(1, Ordering::Relaxed);
    }
}

impl<const ENTRIES: usize> Default for ChangeLog<ENTRIES> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::sync::AtomicUsize;
    use std::thread;

    fn range(number: usize) -> AddressRange {
        AddressRange::new(number + 1, number + 1).unwrap()
    }

    fn replayed<const N: usize>(log: &ChangeLog<N>, from: u64) -> (Vec<AddressRange>, ReplayEnd) {
        let mut ranges = Vec::new();
        let told = log.replay(from, usize::MAX, &mut |range| ranges.push(range));
        (ranges, told)
    }

    #[test]
    fn entries_come_in_order_and_once() {
        let log = ChangeLog::<4>::new();
        log.append(range(1));
        log.append(range(2));
        let (ranges, told) = replayed(&log, 0);
        assert_eq!(ranges, [range(1), range(2)]);
        assert_eq!(
            told,
            ReplayEnd { up_to: 2, word: 2, complete: true, is_cut: false, may_repeat: false }
        );
        assert_eq!(replayed(&log, told.up_to), (vec![], told));
    }

    #[test]
    fn a_reader_left_behind_is_told() {
        let log = ChangeLog::<4>::new();
        (0..6).for_each(|number| log.append(range(number)));
        assert_eq!(
            replayed(&log, 1),
            (
                vec![],
                ReplayEnd { up_to: 6, word: 6, complete: false, is_cut: false, may_repeat: false }
            )
        );
        assert_eq!(replayed(&log, 2).0, [range(2), range(3), range(4), range(5)]);
    }

    #[test]
    fn a_place_that_no_replay_gave_is_not_believed() {
        let log = ChangeLog::<4>::new();
        for place in [1, u64::MAX] {
            assert_eq!(
                replayed(&log, place),
                (
                    vec![],
                    ReplayEnd {
                        up_to: 0,
                        word: 0,
                        complete: false,
                        is_cut: false,
                        may_repeat: false
                    }
                )
            );
        }
    }

    /// A writer that stops for ever after it has reserved a number: what others write is told all
    /// the same, again and again, until the ring comes round.
    #[test]
    fn a_hole_is_gone_round_until_the_ring_comes_round() {
        let log = ChangeLog::<4>::new();
        log.append(range(0));
        log.begin_for_ever();
        log.append(range(2));
        let (ranges, told) = replayed(&log, 0);
        assert_eq!((ranges, told.up_to, told.complete), (vec![range(0), range(2)], 1, true));
        assert!(told.may_repeat);
        log.append(range(3));
        assert_eq!(replayed(&log, told.up_to).0, [range(2), range(3)]);
        log.append(range(4));
        log.append(range(5));
        let (ranges, told) = replayed(&log, told.up_to);
        assert_eq!(
            (ranges, told),
            (
                vec![],
                ReplayEnd { up_to: 6, word: 5, complete: false, is_cut: false, may_repeat: false }
            )
        );
        log.append(range(6));
        assert_eq!(replayed(&log, told.up_to).0, [range(6)]);
    }

    /// And goes round no hole, whose entry it would leave out for good.
    #[test]
    fn a_part_ends_behind_so_many() {
        let log = ChangeLog::<8>::new();
        (0..5).for_each(|number| log.append(range(number)));
        let part = |from| {
            let mut ranges = Vec::new();
            let told = log.replay(from, 2, &mut |range| ranges.push(range));
            assert!(told.complete);
            (ranges, told.up_to, told.is_cut, told.may_repeat)
        };
        assert_eq!(part(0), (vec![range(0), range(1)], 2, true, false));
        assert_eq!(part(3), (vec![range(3), range(4)], 5, false, false));
        log.begin_for_ever();
        log.append(range(6));
        assert_eq!(part(3), (vec![range(3), range(4)], 5, true, false));
        assert_eq!(part(4), (vec![range(4), range(6)], 5, false, true));
    }

    /// A writer that stops for ever in the middle of a slot costs the entry that wants the slot a
    /// round later, and the reader knows.
    #[test]
    fn a_slot_that_is_never_finished_loses_an_entry_a_round_and_says_so() {
        let log = ChangeLog::<2>::new();
        log.begin_for_ever();
        log.slots[0].begin_for_ever();
        log.append(range(1));
        assert_eq!(replayed(&log, 0).0, [range(1)]);
        log.append(range(2));
        assert_eq!(
            replayed(&log, 1),
            (
                vec![],
                ReplayEnd { up_to: 3, word: 2, complete: false, is_cut: false, may_repeat: false }
            )
        );
        assert!(!replayed(&log, 2).1.complete, "its append has returned: it is no hole");
        log.append(range(3));
        assert!(replayed(&log, 3).1.complete);
    }

    const WRITERS: usize = 3;
    const EACH: usize = if cfg!(miri) { 100 } else { 50_000 };

    /// Every range says what it is, so a mixture of two cannot go unnoticed; and none is missing
    /// unless a replay says so.
    #[test]
    fn many_writers_lose_nothing_unsaid() {
        let log = ChangeLog::<64>::new();
        let done: [AtomicUsize; WRITERS] = std::array::from_fn(|_| AtomicUsize::new(0));
        let mut told = vec![false; WRITERS * EACH];
        thread::scope(|scope| {
            for (writer, done) in done.iter().enumerate() {
                let log = &log;
                scope.spawn(move || {
                    (0..EACH).for_each(|turn| {
                        log.append(range(turn * WRITERS + writer));
                        done.store(turn + 1, Ordering::Release);
                    });
                });
            }
            read_to_the_end(&log, &done, &mut told);
        });
        assert_eq!(log.word(), (WRITERS * EACH) as u64);
        assert_eq!(told.iter().position(|told| !told), None);
    }

    fn read_to_the_end(log: &ChangeLog<64>, done: &[AtomicUsize; WRITERS], told: &mut [bool]) {
        let mut place = 0;
        loop {
            let over = done.iter().all(|done| done.load(Ordering::Acquire) == EACH);
            let (ranges, replay) = replayed(log, place);
            for entry in ranges {
                assert_eq!(entry.len(), entry.start());
                told[entry.start() - 1] = true;
            }
            if !replay.complete {
                count_all_as_told(done, told);
            }
            assert!(replay.up_to >= place);
            place = replay.up_to;
            if over {
                return;
            }
        }
    }

    /// Everything appended so far, and what each writer is about to append: it may have its number
    /// already.
    fn count_all_as_told(done: &[AtomicUsize; WRITERS], told: &mut [bool]) {
        for (writer, done) in done.iter().enumerate() {
            let turns = (done.load(Ordering::Acquire) + 1).min(EACH);
            (0..turns).for_each(|turn| told[turn * WRITERS + writer] = true);
        }
    }
}
