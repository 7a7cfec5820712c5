//! What forked children do to registrations that they inherited.
//!
//! A child has its parent's descriptors of devices, so a registration that it ends is its parent's
//! too, and the kernel may give its number to the next one. What has such a number must not be ended a second
//! time, or be handed out. Words in memory that a child shares with its parent prevent that.
//!
//! **What is idle** is ended by one side alone. The word counts the parent's changes of what it keeps idle:
//! before it hands out, gets back or ends something, it counts. A child has the count of the moment at which
//! it was forked in its copy of the parent's memory, and may end what it inherited if it has the devices of all of it
//! still, and can change the word from that count to the same count with [`EMPTIED`]. Each side changes the word by
//! a compare-exchange from a count that it knows, so of the two one comes first, and the other learns of it:
//!
//! - the child first: the parent's next change fails, and the parent forgets everything that was idle;
//!   it was the same for both, and the child ends all of it;
//! - the parent first: the count is another for ever, and the child ends nothing;
//! - two children of one fork: the second finds the mark, and ends nothing.
//!
//! **What the program has** is ended by whom the program lets. A child notes and counts that before it does, by the
//! device and the kernel's number. The parent forgets what the program had when it sees another count, and of what is idle,
//! what was noted: the program may have given back in the parent, since the fork, what the child still had. Where more were
//! counted than are noted it forgets all that is idle. A program that ends one handle in two processes without waiting in
//! one for the other has a race of its own, with or without this library.

use crate::sync::{AtomicU64, Ordering};
use pinfold_kernel::mapping::AtomicPage;
use std::ops::Range;

/// In the word of changes: a child ends what was idle.
const EMPTIED: u64 = 1 << 63;

/// How many of the latest ends are noted. With the two words before they are a page of the smallest; a model has few.
const NAMES: usize = if cfg!(loom) { 2 } else { 510 };

/// See the module. In memory that children share: how many handles children ended, the word of changes, and their names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Children(&'static [AtomicU64; 2 + NAMES]);

/// A registration as parent and child know it: 24 bits of its device's address, without those that are 0 in each, and 24 of
/// the kernel's number. Another has the same seldom, and is forgotten with it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Name(u64);

impl Name {
    const BITS: u64 = (1 << 48) - 1;

    pub(crate) const fn of(device: usize, number: u32) -> Self {
        const HALF: u64 = (1 << 24) - 1;
        Self((device as u64 >> 4 & HALF) << 24 | number as u64 & HALF)
    }
}

/// What children have ended since a moment.
#[derive(Debug)]
pub(crate) struct Ends {
    /// Sorted.
    names: Vec<Name>,
    /// More than are noted, or than there is memory for.
    is_everything: bool,
}

impl Ends {
    pub(crate) fn has(&self, name: Name) -> bool {
        self.is_everything || self.names.binary_search(&name).is_ok()
    }
}

/// The parent's changes of what is idle, as it counts them in its own memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Moves(u64);

impl Children {
    /// `None` without memory. Never given back: a page.
    pub(crate) fn new() -> Option<Self> {
        AtomicPage::shared().ok().map(|page| Self(page.leak()))
    }

    /// How many handles that the program had were ended by children.
    pub(crate) fn ended(&self) -> u64 {
        // Acquire: what a child did before it counted is done.
        self.0[0].load(Ordering::Acquire)
    }

    /// Before a child ends a handle that it inherited. The name is there before it is counted, and a child that finds one
    /// not counted yet counts it for the other: the parent misses none, though a child is killed in between.
    pub(crate) fn note_ended(&self, name: Name) {
        let count = &self.0[0];
        loop {
            // Acquire: the word is read behind it.
            let end = count.load(Ordering::Acquire);
            let (word, mark) = (self.name_word(end), mark_of(end));
            // Acquire: the child that counts a name has it. And if it is a later end's, the count below is that one's.
            let before = word.load(Ordering::Acquire);
            if count.load(Ordering::Relaxed) != end {
                continue;
            }
            // Release on success and acquire on failure: as above.
            let (order, failed) = (Ordering::Release, Ordering::Acquire);
            let is_noted = before & !Name::BITS != mark
                && word.compare_exchange(before, mark | name.0, order, failed).is_ok();
            // AcqRel: pairs with the load of `ended`, which has the name with the count. Fails if another child counts it.
            let _ = count.compare_exchange(end, end + 1, Ordering::AcqRel, Ordering::Relaxed);
            if is_noted {
                return;
            }
        }
    }

    /// The names of these ends, which are counted, in turns; `None` for one whose place a later one has.
    pub(crate) fn names(&self, ends: Range<u64>) -> impl Iterator<Item = Option<Name>> {
        ends.map(|end| {
            // Relaxed: all is in the word, and the count was acquired.
            let word = self.name_word(end).load(Ordering::Relaxed);
            (word & !Name::BITS == mark_of(end)).then_some(Name(word & Name::BITS))
        })
    }

    /// What these ends, which are counted, have ended.
    pub(crate) fn ends(&self, ends: Range<u64>) -> Ends {
        let mut ended = Ends { names: Vec::new(), is_everything: false };
        for name in self.names(ends) {
            match name.filter(|_| ended.names.try_reserve(1).is_ok()) {
                Some(name) => ended.names.push(name),
                None => return Ends { is_everything: true, ..ended },
            }
        }
        ended.names.sort_unstable();
        ended
    }

    /// How often the parent changed what is idle, when it begins to count.
    pub(crate) fn moves(&self) -> Moves {
        // Relaxed: the parent's own, and no child is there yet.
        Moves(self.moves_word().load(Ordering::Relaxed))
    }

    /// The parent changes what is idle: no child that was forked before ends any of it from here on.
    ///
    /// False if a child has begun to: then nothing that was idle is the parent's any more.
    pub(crate) fn take_over(&self, moves: &mut Moves) -> bool {
        let (before, after) = (moves.0, moves.0 + 1);
        moves.0 = after;
        // AcqRel on success and acquire on failure: what is read of the registrations is read after the
        // other side's claim. The claims themselves are ordered by the word alone.
        let word = self.moves_word();
        match word.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(_) => {
                // Release: pairs with the acquire of a child. The mark is the only change that a child
                // makes, and only from the count before, so nothing changes the word in between.
                word.store(after, Ordering::Release);
                false
            }
        }
    }

    /// Whether a child ends what was idle at the parent's latest change.
    pub(crate) fn is_emptied(&self) -> bool {
        // Acquire: as above.
        self.moves_word().load(Ordering::Acquire) & EMPTIED != 0
    }

    /// In a child: whether its parent changed nothing that is idle since it was forked, nor another child. It may at any moment.
    pub(crate) fn stand_at(&self, moves: Moves) -> bool {
        // Relaxed: a hint; `empty` decides.
        self.moves_word().load(Ordering::Relaxed) == moves.0
    }

    /// In a child: whether it is the one to end what was idle when it was forked, all of it.
    pub(crate) fn empty(&self, moves: Moves) -> bool {
        let (from, marked) = (moves.0, moves.0 | EMPTIED);
        // As in `take_over`.
        self.moves_word()
            .compare_exchange(from, marked, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn moves_word(&self) -> &AtomicU64 {
        &self.0[1]
    }

    #[allow(clippy::cast_possible_truncation)] // less than the divisor
    fn name_word(&self, end: u64) -> &AtomicU64 {
        &self.0[2 + (end % NAMES as u64) as usize]
    }
}

/// What the word of an end has above the name, 16 bits: which end it is. 0 stands in a word that has none yet, so the first
/// is 1.
const fn mark_of(end: u64) -> u64 {
    (end + 1) << Name::BITS.count_ones()
}

#[cfg(test)]
#[cfg(not(loom))]
#[allow(clippy::unwrap_used)] // only tests use it
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::thread;

    #[test]
    fn a_child_ends_nothing_once_the_parent_went_on() {
        let children = Children::new().unwrap();
        let mut moves = children.moves();
        let forked = moves;
        assert!(children.take_over(&mut moves));
        assert!(!children.empty(forked) && !children.is_emptied());
        assert!(children.take_over(&mut moves));
    }

    #[test]
    fn what_one_child_ends_is_no_other_child_s() {
        let children = Children::new().unwrap();
        let mut moves = children.moves();
        let forked = moves;
        assert!(children.empty(forked) && children.is_emptied());
        assert!(!children.empty(forked), "another child, or the same once more");
        assert!(!children.take_over(&mut moves) && !children.is_emptied());
        assert!(children.empty(moves), "a child that was forked since");
    }

    #[test]
    fn the_parent_sees_what_children_end() {
        let children = Children::new().unwrap();
        let name = |number| Name::of(0x7f00_1234_5670, number);
        let names = |ends| children.names(ends).collect::<Vec<_>>();
        (7..).take(NAMES).for_each(|number| children.note_ended(name(number)));
        let ended = children.ended();
        assert_eq!((ended, names(0..2)), (NAMES as u64, vec![Some(name(7)), Some(name(8))]));
        assert!(name(7) != name(8) && name(7) != Name::of(0x7f00_1234_5680, 7));
        children.note_ended(name(u32::MAX));
        assert_eq!(names(0..2), [None, Some(name(8))], "a later one has its place");
        assert_eq!(names(ended..ended + 1), [Some(name(u32::MAX))]);
    }

    #[test]
    fn what_children_end_at_once_is_noted_once_each() {
        const ENDS: u32 = 200;
        let children = Children::new().unwrap();
        let mut seen = Vec::new();
        thread::scope(|scope| {
            let child = |first| {
                let children = &children;
                move || (first..first + ENDS).for_each(|it| children.note_ended(Name::of(0, it)))
            };
            _ = [0, 1000].map(|first| scope.spawn(child(first)));
            while seen.len() < 2 * ENDS as usize {
                let from = seen.len() as u64;
                seen.extend(children.names(from..children.ended()).map(|name| name.unwrap().0));
            }
        });
        seen.sort_unstable();
        let ended = (0..ENDS).chain(1000..1000 + ENDS).map(u64::from);
        assert_eq!(seen, ended.collect::<Vec<_>>());
    }

    #[test]
    fn of_parent_and_children_one_has_what_is_idle() {
        const ROUNDS: usize = 20_000;
        let children = Children::new().unwrap();
        let mut moves = children.moves();
        let (begin, end) = (Barrier::new(3), Barrier::new(3));
        let forked = AtomicU64::new(0);
        let child = || {
            let mut won = Vec::with_capacity(ROUNDS);
            for _ in 0..ROUNDS {
                begin.wait();
                // Relaxed, here and below: ordered by the barriers.
                won.push(children.empty(Moves(forked.load(Ordering::Relaxed))));
                end.wait();
            }
            won
        };
        let (parent, first, second) = thread::scope(|scope| {
            let others = [scope.spawn(child), scope.spawn(child)];
            let mut won = Vec::with_capacity(ROUNDS);
            for _ in 0..ROUNDS {
                forked.store(moves.0, Ordering::Relaxed);
                begin.wait();
                won.push(children.take_over(&mut moves));
                end.wait();
            }
            let [first, second] = others.map(|other| other.join().unwrap());
            (won, first, second)
        });
        for round in 0..ROUNDS {
            let winners = [parent[round], first[round], second[round]];
            assert_eq!(winners.iter().filter(|&&won| won).count(), 1, "{round}: {winners:?}");
        }
    }
}
