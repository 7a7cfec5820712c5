//! A monitor whose check is one load, and whose events are made explicitly.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement a trait that promises to see every change of what
//! it covers. Nothing real is covered: the null device touches no memory. It contains no unsafe
//! block.

#![allow(unsafe_code)]

use pinfold::{
    AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Replay, Sequence, Watch,
};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How many entries the log keeps.
const CAPACITY: usize = 1 << 16;

/// One load a check; a log that [`log`](Self::log) writes.
#[derive(Debug, Default)]
pub(crate) struct LoadMonitor {
    /// How many entries were ever logged.
    sequence: AtomicU64,
    /// The last of them.
    log: Mutex<VecDeque<AddressRange>>,
    event_count: EventCount,
}

impl LoadMonitor {
    /// Logs changes of `ranges`. Notifies of none, so that the next hit pays for all of them.
    pub(crate) fn log(&self, ranges: impl Iterator<Item = AddressRange>) {
        let mut log = lock(&self.log);
        let mut sequence = self.sequence.load(Ordering::Relaxed);
        for range in ranges {
            if log.len() == CAPACITY {
                log.pop_front();
            }
            log.push_back(range);
            sequence += 1;
        }
        // Release: a thread that sees this sequence finds the entries, behind the lock.
        self.sequence.store(sequence, Ordering::Release);
    }
}

// SAFETY: `log` appends before it returns, `replay` says what it lost, and nothing real changes.
unsafe impl Monitor for LoadMonitor {
    fn name(&self) -> &'static str {
        "one load"
    }

    #[inline]
    fn check(&self) -> Result<Sequence, Lost> {
        // Acquire: pairs with the store in `log`.
        Ok(Sequence(self.sequence.load(Ordering::Acquire)))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        false
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.replay_some(from, usize::MAX, visit)
    }

    fn replay_some(
        &self,
        from: Position,
        most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        let log = lock(&self.log);
        // Relaxed: stored under the lock that is held here.
        let sequence = self.sequence.load(Ordering::Relaxed);
        let fresh = sequence.checked_sub(from.0).and_then(|fresh| usize::try_from(fresh).ok());
        let complete = fresh.is_some_and(|fresh| fresh <= log.len());
        let told = fresh.map_or(log.len(), |fresh| log.len().saturating_sub(fresh));
        log.iter().skip(told).take(most).for_each(|&range| visit(range));
        let left = (log.len() - told).saturating_sub(most) as u64;
        let told = if left > 0 { Sequence::CUT } else { Sequence(sequence) };
        Replay { up_to: Position(sequence - left, 0), sequence: told, complete, may_repeat: false }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        self.event_count.count.load(Ordering::Acquire)
    }

    fn notify(&self) {
        self.event_count.notify();
    }

    fn wait(&self, seen: u32) {
        self.event_count.wait(seen);
    }
}

/// As cheap for the ringer as the real monitors' event_count: it costs something only if a thread waits.
#[derive(Debug, Default)]
struct EventCount {
    count: AtomicU32,
    waiters: AtomicU32,
    /// Guards nothing but the moment between a waiter's look and its sleep.
    changed: Mutex<()>,
    wake: Condvar,
}

impl EventCount {
    fn notify(&self) {
        // SeqCst here and in `wait`: each side writes its word, then reads the other's; the later
        // of the two writers sees the earlier.
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) != 0 {
            drop(lock(&self.changed));
            self.wake.notify_all();
        }
    }

    fn wait(&self, seen: u32) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut changed = lock(&self.changed);
        while self.count.load(Ordering::SeqCst) == seen {
            changed = self.wake.wait(changed).unwrap_or_else(PoisonError::into_inner);
        }
        // Relaxed: a stale count costs a needless wake, nothing more.
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
