//! What a program must react to, and the board where a cache tells it; [`notice`](crate::notice) has the
//! chart.

use crate::AddressRange;
use crate::budget::Amount;
use std::collections::VecDeque;
// Not loom's: no model suspends.
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One suspension of a cache; never the same twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SuspensionId(pub(crate) u64);

/// What happened that concerns more than the caller. The [module](crate::notice) has the chart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Notice<H> {
    /// Nothing uses `range` any more, and its registrations are being withdrawn.
    Suspended {
        /// Which suspension.
        suspension: SuspensionId,
        /// What is suspended, in whole pages.
        range: AddressRange,
    },
    /// A registration that was kept is known by another handle.
    Rekeyed {
        /// Which suspension.
        suspension: SuspensionId,
        /// What is registered; may reach beyond what was suspended.
        range: AddressRange,
        /// The handle that is dead.
        from: H,
        /// The one that has taken its place.
        to: H,
    },
    /// A registration that was kept is no more.
    Lost {
        /// Which suspension.
        suspension: SuspensionId,
        /// What was registered.
        range: AddressRange,
        /// The handle that is dead.
        handle: H,
    },
    /// The region is like any other again.
    Resumed {
        /// Which suspension.
        suspension: SuspensionId,
        /// What was suspended.
        range: AddressRange,
        /// Whether some handle changed.
        keys: Keys,
    },
    /// The suspension was ended with its connections.
    Revoked {
        /// Which suspension.
        suspension: SuspensionId,
        /// What was suspended, or was to be.
        range: AddressRange,
        /// By whose doing.
        by: Revocation,
    },
    /// Less can be pinned than the program was told before.
    BudgetShrank {
        /// What it was told before.
        from: Amount,
        /// What there is, as far as is known.
        to: Amount,
    },
    /// So many notices found the queue full, here in the order.
    Missed {
        /// How many.
        count: u64,
    },
}

/// What ended a suspension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Revocation {
    /// [`Suspended`](crate::Suspended) was dropped, by a panic for one.
    Dropped,
    /// [`expire_suspensions`](crate::Cache::expire_suspensions) found it overdue.
    Expired,
    /// The device panicked while it was told to stop, renew or go on.
    DevicePanicked,
}

/// The longest queue of notices there is: its room is made at once.
pub const MOST_NOTICES: usize = 1 << 20;

/// Whether the registrations that were kept are known by the same handles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keys {
    /// All of them.
    Same,
    /// Not all: tell the peers, and post anew what names them.
    Changed,
}

/// Where a cache tells.
pub(crate) struct Board<H> {
    /// Guards the queues and what was told of the budget. Rank 2: taken with the writer's lock
    /// held, or with nothing; nothing is taken under it.
    state: Mutex<State<H>>,
    told: Condvar,
}

struct State<H> {
    queues: Vec<Queue<H>>,
    last_id: u64,
    /// The least that the program was told can be pinned.
    budget: Amount,
}

struct Queue<H> {
    id: u64,
    capacity: usize,
    /// Never longer than its first capacity, so it never allocates.
    notices: VecDeque<Notice<H>>,
    /// How many came after the last in `notices` and before the next to be kept.
    missed: u64,
}

impl<H: Copy> Board<H> {
    pub(crate) fn new() -> Self {
        let state = State { queues: Vec::new(), last_id: 0, budget: Amount::EVERYTHING };
        Self { state: Mutex::new(state), told: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<H>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tell(&self, notice: Notice<H>) {
        self.put(notice);
        self.wake();
    }

    /// Tells it to those that look; those that sleep are to be [woken](Self::wake).
    pub(crate) fn put(&self, notice: Notice<H>) {
        self.lock().tell(notice);
    }

    pub(crate) fn wake(&self) {
        self.told.notify_all();
    }

    /// What was `from` is `to`. Told if that is less.
    pub(crate) fn tell_change_of_budget(&self, from: Amount, to: Amount) {
        let mut state = self.lock();
        state.budget = to;
        if !from.fits(to) {
            state.tell(Notice::BudgetShrank { from, to });
            drop(state);
            self.wake();
        }
    }

    /// There is no more than `to` to be had now. Told if the program knows of more.
    pub(crate) fn tell_bound(&self, known: Amount, to: Amount) {
        let mut state = self.lock();
        let from = state.budget.min(known);
        state.budget = from.min(to);
        let to = state.budget;
        if from != to {
            state.tell(Notice::BudgetShrank { from, to });
            drop(state);
            self.wake();
        }
    }

    pub(crate) fn subscribe(&self, capacity: usize) -> u64 {
        let capacity = capacity.clamp(1, MOST_NOTICES);
        let notices = VecDeque::with_capacity(capacity);
        let mut state = self.lock();
        state.last_id += 1;
        let id = state.last_id;
        state.queues.push(Queue { id, capacity, notices, missed: 0 });
        id
    }

    pub(crate) fn unsubscribe(&self, id: u64) {
        self.lock().queues.retain(|queue| queue.id != id);
    }

    pub(crate) fn take(&self, id: u64) -> Option<Notice<H>> {
        self.lock().queue(id)?.take()
    }

    pub(crate) fn wait(&self, id: u64, patience: Duration) -> Option<Notice<H>> {
        let until = Instant::now().checked_add(patience);
        let mut state = self.lock();
        loop {
            if let Some(notice) = state.queue(id)?.take() {
                return Some(notice);
            }
            let left =
                until.map_or(Duration::MAX, |it| it.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            let waited = self.told.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl<H: Copy> State<H> {
    fn tell(&mut self, notice: Notice<H>) {
        self.queues.iter_mut().for_each(|queue| queue.push(notice));
    }

    fn queue(&mut self, id: u64) -> Option<&mut Queue<H>> {
        self.queues.iter_mut().find(|queue| queue.id == id)
    }
}

impl<H: Copy> Queue<H> {
    fn push(&mut self, notice: Notice<H>) {
        // What comes after a gap waits until the gap was told, or it would stand before it.
        if self.missed > 0 || self.notices.len() == self.capacity {
            self.missed += 1;
        } else {
            self.notices.push_back(notice);
        }
    }

    fn take(&mut self) -> Option<Notice<H>> {
        let missed = |count| (count > 0).then_some(Notice::Missed { count });
        self.notices.pop_front().or_else(|| missed(std::mem::take(&mut self.missed)))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn shrank(bytes: usize) -> Notice<u32> {
        let to = Amount { bytes, regions: 1 };
        Notice::BudgetShrank { from: Amount { bytes: bytes + 1, regions: 1 }, to }
    }

    #[test]
    fn every_queue_hears_everything_since_it_was_made() {
        let board = Board::new();
        let first = board.subscribe(4);
        board.tell(shrank(9));
        let second = board.subscribe(4);
        board.tell(shrank(8));
        assert_eq!([board.take(first), board.take(first)], [Some(shrank(9)), Some(shrank(8))]);
        assert_eq!([board.take(second), board.take(second)], [Some(shrank(8)), None]);
        board.unsubscribe(second);
        assert_eq!(board.take(second), None);
    }

    #[test]
    fn a_full_queue_says_what_is_missing_where_it_is_missing() {
        let board = Board::new();
        let queue = board.subscribe(2);
        (0..5).for_each(|n| board.tell(shrank(n)));
        assert_eq!(board.take(queue), Some(shrank(0)));
        // There is room again, but this one comes behind the gap.
        board.tell(shrank(5));
        assert_eq!(board.take(queue), Some(shrank(1)));
        assert_eq!(board.take(queue), Some(Notice::Missed { count: 4 }));
        board.tell(shrank(6));
        assert_eq!([board.take(queue), board.take(queue)], [Some(shrank(6)), None]);
    }

    #[test]
    fn nothing_is_allocated_when_something_is_told() {
        let board = Board::new();
        let queue = board.subscribe(3);
        let room = |board: &Board<u32>| board.lock().queue(queue).unwrap().notices.capacity();
        let before = room(&board);
        (0..100).for_each(|n| board.tell(shrank(n)));
        assert_eq!(room(&board), before);
    }

    #[test]
    fn one_who_waits_is_woken() {
        let board = Board::new();
        let queue = board.subscribe(1);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| board.wait(queue, Duration::from_secs(3600)));
            board.tell(shrank(1));
            assert_eq!(waiting.join().unwrap(), Some(shrank(1)));
        });
        assert_eq!(board.wait(queue, Duration::ZERO), None);
    }

    #[test]
    fn a_budget_is_told_only_if_it_shrank() {
        let board = Board::<u32>::new();
        let queue = board.subscribe(9);
        let amount = |bytes| Amount { bytes, regions: 4 };
        for bytes in [50, 60, 50, 40] {
            board.tell_bound(amount(100), amount(bytes));
        }
        let told = |from, to| Notice::BudgetShrank { from: amount(from), to: amount(to) };
        assert_eq!(board.take(queue), Some(told(100, 50)));
        assert_eq!([board.take(queue), board.take(queue)], [Some(told(50, 40)), None]);
        // What has grown since may shrink to where it was.
        for (from, to) in [(40, 90), (90, 60), (60, 60)] {
            board.tell_change_of_budget(amount(from), amount(to));
        }
        assert_eq!([board.take(queue), board.take(queue)], [Some(told(90, 60)), None]);
    }
}
