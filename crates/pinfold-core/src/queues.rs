//! In which queue a place stands: who is evicted next, who waits to be given back.
//!
//! A place is in at most one queue, so queues are chains through one table of links: joining,
//! leaving and moving on are a few stores each and allocate nothing. The table costs 12 bytes a
//! place. All of it belongs to the holder of the writer's lock.

use std::iter;

/// A queue of places.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Queue {
    /// Live, and not used since it was registered, as far as anybody has looked.
    Young = 1,
    /// Live, and used again since it was registered.
    Proven = 2,
    /// Idle, and not to be leased without the writer's lock: the next to be evicted.
    Standby = 3,
    /// Invalidated; whether it is leased has not been looked at.
    Dead = 4,
    /// Given up for a larger region; whether it is leased has not been looked at.
    Superseded = 5,
    /// Invalidated and leased: its last lease's end is awaited.
    Leased = 6,
    /// Given up for a larger region and leased: its last lease's end is awaited.
    SupersededLeased = 7,
    /// Being deregistered.
    Leaving = 8,
    /// Registered, and in the hands of a suspension.
    Parked = 9,
}

impl Queue {
    /// As many as a tag can name, so that a queue's ends are found without a check.
    const COUNT: usize = 16;

    const fn from_tag(tag: u32) -> Option<Self> {
        Some(match tag {
            1 => Self::Young,
            2 => Self::Proven,
            3 => Self::Standby,
            4 => Self::Dead,
            5 => Self::Superseded,
            6 => Self::Leased,
            7 => Self::SupersededLeased,
            8 => Self::Leaving,
            9 => Self::Parked,
            _ => return None,
        })
    }
}

/// No place: one more than the highest number that a place can have.
const NOBODY: u32 = u32::MAX;
/// Links made at once.
const CHUNK: usize = if cfg!(any(loom, shuttle, miri)) { 8 } else { 256 };
/// How much of a tick a link keeps.
const MARK_BITS: u32 = 28;

/// A place's neighbours, its queue (bits 28-31) and the mark that the order of eviction left (bits
/// 0-27).
#[derive(Clone, Copy)]
struct Link {
    ahead: u32,
    behind: u32,
    tag: u32,
}

/// The ends of a queue.
#[derive(Clone, Copy)]
struct Ends {
    first: u32,
    last: u32,
    length: usize,
}

/// All queues.
pub(crate) struct Queues {
    /// In chunks, so that growing neither copies them nor makes twice as many.
    #[allow(clippy::vec_box)] // which is what the boxes are for
    links: Vec<Box<[Link; CHUNK]>>,
    ends: [Ends; Queue::COUNT],
}

impl Queues {
    pub(crate) fn new() -> Self {
        let ends = Ends { first: NOBODY, last: NOBODY, length: 0 };
        Self { links: Vec::new(), ends: [ends; Queue::COUNT] }
    }

    /// Makes sure that place `number` has a link.
    pub(crate) fn make(&mut self, number: u32) {
        let unlinked = Link { ahead: NOBODY, behind: NOBODY, tag: 0 };
        while self.links.len() <= number as usize / CHUNK {
            self.links.push(Box::new([unlinked; CHUNK]));
        }
    }

    #[inline]
    fn link(&self, number: u32) -> &Link {
        &self.links[number as usize / CHUNK][number as usize % CHUNK]
    }

    #[inline]
    fn link_mut(&mut self, number: u32) -> &mut Link {
        &mut self.links[number as usize / CHUNK][number as usize % CHUNK]
    }

    /// Where place `number` stands.
    #[inline]
    pub(crate) fn queue_of(&self, number: u32) -> Option<Queue> {
        Queue::from_tag(self.link(number).tag >> MARK_BITS)
    }

    #[inline]
    pub(crate) fn len(&self, queue: Queue) -> usize {
        self.ends[queue as usize].length
    }

    /// Who has been in `queue` longest.
    #[inline]
    pub(crate) fn first(&self, queue: Queue) -> Option<u32> {
        some(self.ends[queue as usize].first)
    }

    /// Who came into its queue after `number`.
    #[inline]
    pub(crate) fn after(&self, number: u32) -> Option<u32> {
        some(self.link(number).behind)
    }

    /// All of `queue`, first come first.
    pub(crate) fn iter(&self, queue: Queue) -> impl Iterator<Item = u32> {
        iter::successors(self.first(queue), |&number| self.after(number))
    }

    /// Puts place `number` last in `queue`, wherever it stood.
    #[inline]
    pub(crate) fn put(&mut self, queue: Queue, number: u32) {
        self.remove(number);
        let ends = &mut self.ends[queue as usize];
        let last = std::mem::replace(&mut ends.last, number);
        ends.length += 1;
        match last {
            NOBODY => ends.first = number,
            _ => self.link_mut(last).behind = number,
        }
        let link = self.link_mut(number);
        (link.ahead, link.behind) = (last, NOBODY);
        link.tag |= (queue as u32) << MARK_BITS;
    }

    /// Takes place `number` out of whatever queue it stands in.
    #[inline]
    pub(crate) fn remove(&mut self, number: u32) {
        let link = self.link_mut(number);
        let Link { ahead, behind, tag } = *link;
        let queue = (tag >> MARK_BITS) as usize;
        if queue == 0 {
            return;
        }
        link.tag = mark_of(u64::from(tag));
        match ahead {
            NOBODY => self.ends[queue].first = behind,
            _ => self.link_mut(ahead).behind = behind,
        }
        match behind {
            NOBODY => self.ends[queue].last = ahead,
            _ => self.link_mut(behind).ahead = ahead,
        }
        self.ends[queue].length -= 1;
    }

    /// Notes the tick at which place `number` was looked at.
    #[inline]
    pub(crate) fn set_mark(&mut self, number: u32, tick: u64) {
        let link = self.link_mut(number);
        link.tag = link.tag & !((1 << MARK_BITS) - 1) | mark_of(tick);
    }

    /// Whether `tick` is the one noted last. After a quarter of a billion ticks one may be taken
    /// for another; then a region is evicted that was in use then.
    #[inline]
    pub(crate) fn has_mark(&self, number: u32, tick: u64) -> bool {
        mark_of(u64::from(self.link(number).tag)) == mark_of(tick)
    }
}

const fn some(number: u32) -> Option<u32> {
    if number == NOBODY { None } else { Some(number) }
}

#[allow(clippy::cast_possible_truncation)] // that is the point
const fn mark_of(tick: u64) -> u32 {
    tick as u32 & ((1 << MARK_BITS) - 1)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn queues(places: u32) -> Queues {
        let mut queues = Queues::new();
        queues.make(places);
        queues
    }

    /// Random moves beside plain queues.
    #[test]
    fn agrees_with_plain_queues() {
        const PLACES: u32 = 40;
        let mut queues = queues(PLACES);
        let mut model: [VecDeque<u32>; Queue::COUNT] = std::array::from_fn(|_| VecDeque::new());
        let mut state = 0x5eed_u64;
        let mut next = |bound: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            u32::try_from(state >> 33).unwrap() % bound
        };
        for _ in 0..if cfg!(miri) { 200 } else { 20_000 } {
            let (number, tag) = (next(PLACES), next(10));
            model.iter_mut().for_each(|queue| queue.retain(|&other| other != number));
            match Queue::from_tag(tag) {
                Some(queue) => {
                    queues.put(queue, number);
                    model[queue as usize].push_back(number);
                }
                None => queues.remove(number),
            }
            assert_eq!(queues.queue_of(number), Queue::from_tag(tag));
            for queue in (1..10).filter_map(Queue::from_tag) {
                assert!(queues.iter(queue).eq(model[queue as usize].iter().copied()));
                assert_eq!(queues.len(queue), model[queue as usize].len());
            }
        }
    }

    #[test]
    fn a_mark_stays_with_its_place() {
        let mut queues = queues(2);
        queues.set_mark(1, 0x1234_5678_9abc);
        queues.put(Queue::Young, 1);
        queues.put(Queue::Leaving, 1);
        assert!(queues.has_mark(1, 0x1234_5678_9abc) && !queues.has_mark(1, 0x1234_5678_9abd));
        assert_eq!(queues.queue_of(1), Some(Queue::Leaving));
    }
}
