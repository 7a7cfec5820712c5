//! Who is given up first: the least recently used, at no cost to a hit.
//!
//! A hit only notes the cache's tick in its region, and the tick advances with every miss. The
//! order is a heap of ticks as they were when last looked at; whoever comes out of the heap with
//! an old tick is put back with its present one. So the order is that of least recent use, to
//! the resolution of one miss, and all its work is done by those who need room.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A region in the order: a place and the count of its fills, which tells a place's next region
/// from this one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Candidate {
    pub(crate) used: u64,
    pub(crate) number: u32,
    pub(crate) fills: u64,
}

/// The regions that may be evicted, least recently used first.
pub(crate) struct Order {
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl Order {
    pub(crate) fn new() -> Self {
        Self { heap: BinaryHeap::new() }
    }

    pub(crate) fn push(&mut self, candidate: Candidate) {
        self.heap.push(Reverse(candidate));
    }

    /// The least recently used candidate. `present` gives a candidate's tick of today, or `None`
    /// if the region is no more.
    pub(crate) fn pop(&mut self, present: impl Fn(&Candidate) -> Option<u64>) -> Option<Candidate> {
        while let Some(Reverse(candidate)) = self.heap.pop() {
            match present(&candidate) {
                Some(used) if used == candidate.used => return Some(candidate),
                Some(used) => self.push(Candidate { used, ..candidate }),
                None => {}
            }
        }
        None
    }

    /// Drops the candidates that are no more once they outnumber the `live` ones, so that the
    /// heap stays in proportion to the cache.
    pub(crate) fn prune(&mut self, live: usize, present: impl Fn(&Candidate) -> Option<u64>) {
        if self.heap.len() > 2 * live + 64 {
            self.heap.retain(|Reverse(candidate)| present(candidate).is_some());
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn candidate(used: u64, number: u32) -> Candidate {
        Candidate { used, number, fills: 1 }
    }

    #[test]
    fn the_least_recently_used_comes_first_by_its_present_tick() {
        let mut order = Order::new();
        (0..4).for_each(|number| order.push(candidate(u64::from(number), number)));
        // Region 0 was used again since it was pushed, region 1 is no more.
        let present = |candidate: &Candidate| match candidate.number {
            0 => Some(9),
            1 => None,
            _ => Some(candidate.used),
        };
        let popped: Vec<_> =
            std::iter::from_fn(|| order.pop(present)).map(|popped| popped.number).collect();
        assert_eq!(popped, [2, 3, 0]);
    }

    #[test]
    fn what_is_no_more_does_not_pile_up() {
        let mut order = Order::new();
        for number in 0..if cfg!(miri) { 500 } else { 10_000 } {
            order.push(candidate(1, number));
            order.prune(0, |_| None);
        }
        assert!(order.heap.len() <= 65);
    }
}
