//! The program's callbacks: kept under the writer's lock, run outside it.

use crate::foreign::{discard, discard_all, runs_through};
use crate::unapplied::ChangeCount;
use crate::waits::Waits;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A callback of the program.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// A region's callbacks, in the order in which they were asked for.
type ById = BTreeMap<u64, Callback>;

/// Callbacks that wait for something to happen to a region, by the region's number.
#[derive(Default)]
pub(crate) struct Watchers {
    /// To be run when the region is invalidated; the id lets a lease take its own back.
    ///
    /// Sorted maps, because no insertion and no look-up in them costs what is there.
    on_invalidate: BTreeMap<u32, ById>,
    /// To be run when the last of several regions is deregistered that were registered before a change.
    on_deregister: Waits<Arc<Completion>>,
    last_id: u64,
    due: Due,
}

/// Callbacks whose moment has come.
#[derive(Default)]
#[must_use = "the program waits for its callbacks"]
pub(crate) struct Due {
    callbacks: Vec<ById>,
    completions: Vec<Arc<Completion>>,
}

/// A callback shared by several regions: due when the last of them is released.
pub(crate) struct Completion(Mutex<Option<Callback>>);

impl Completion {
    pub(crate) fn new(callback: Callback) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(callback))))
    }

    /// The callback, if `self` is the last to hold it.
    fn into_callback(self: Arc<Self>) -> Option<Callback> {
        let completion = Arc::into_inner(self)?;
        completion.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watchers {
    /// Keeps `callback` until region `number` is invalidated.
    pub(crate) fn watch(&mut self, number: u32, callback: Callback) -> u64 {
        // Never reused: a lease may outlive any number of others. 0 is none.
        self.last_id += 1;
        self.on_invalidate.entry(number).or_default().insert(self.last_id, callback);
        self.last_id
    }

    /// Takes a callback back: its lease ended.
    pub(crate) fn forget(&mut self, number: u32, id: u64) -> Option<Callback> {
        let callbacks = self.on_invalidate.get_mut(&number)?;
        let callback = callbacks.remove(&id)?;
        if callbacks.is_empty() {
            self.on_invalidate.remove(&number);
        }
        Some(callback)
    }

    /// Whether a callback waits for any region to be invalidated.
    #[inline]
    pub(crate) fn has_callbacks(&self) -> bool {
        !self.on_invalidate.is_empty()
    }

    /// Region `number` was invalidated.
    #[inline]
    pub(crate) fn invalidated(&mut self, number: u32) {
        // No callback is there, as nearly always: not even a hash.
        if self.has_callbacks() {
            self.run_on_invalidate(number);
        }
    }

    #[cold]
    fn run_on_invalidate(&mut self, number: u32) {
        self.due.callbacks.extend(self.on_invalidate.remove(&number));
    }

    /// Lets `completion` wait for region `number`, registered before `change`, to be deregistered.
    pub(crate) fn await_deregistration(
        &mut self,
        number: u32,
        change: ChangeCount,
        completion: &Arc<Completion>,
    ) {
        self.on_deregister.insert(number, change, Arc::clone(completion));
    }

    /// Region `number` is registered anew since so many changes: what it was before them is gone.
    pub(crate) fn renewed(&mut self, number: u32, born: ChangeCount) {
        if !self.on_deregister.is_empty() {
            self.complete_on_deregister(number, born);
        }
    }

    /// Region `number` was deregistered.
    #[inline]
    pub(crate) fn deregistered(&mut self, number: u32) {
        if !self.on_deregister.is_empty() {
            self.complete_on_deregister(number, ChangeCount::from_bits(u64::MAX));
        }
    }

    /// What was to wait for a change up to `latest`.
    #[cold]
    fn complete_on_deregister(&mut self, number: u32, latest: ChangeCount) {
        let due = &mut self.due.completions;
        self.on_deregister.complete(number, latest, |completion| due.push(completion));
    }

    /// Lets go of `completion` as soon as no lock is held.
    pub(crate) fn complete(&mut self, completion: Arc<Completion>) {
        self.due.completions.push(completion);
    }

    #[inline]
    pub(crate) fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// What is due, if anything is.
    #[inline]
    pub(crate) fn take_due(&mut self) -> Option<Due> {
        if self.due.is_empty() { None } else { Some(std::mem::take(&mut self.due)) }
    }

    /// Makes due again what was taken.
    pub(crate) fn make_due_again(&mut self, due: Option<Due>) {
        let Some(mut due) = due else { return };
        let (callbacks, completions) = due.take();
        self.due.callbacks.splice(0..0, callbacks);
        self.due.completions.splice(0..0, completions);
    }
}

impl Due {
    /// One callback, due now.
    pub(crate) fn one(callback: Callback) -> Self {
        Self { callbacks: vec![BTreeMap::from([(0, callback)])], completions: Vec::new() }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.callbacks.is_empty() && self.completions.is_empty()
    }

    /// Runs what is due, and says how many callbacks panicked. `is_forked` is asked before each: one may
    /// fork, and the rest are the parent's then.
    pub(crate) fn run(mut self, is_forked: impl Fn() -> bool) -> u64 {
        let (callbacks, completions) = self.take();
        let completed = completions.into_iter().filter_map(Completion::into_callback);
        let mut panics = 0;
        let callbacks = callbacks.into_iter().flat_map(BTreeMap::into_values);
        for callback in callbacks.chain(completed) {
            if is_forked() {
                discard(callback);
            } else {
                panics += u64::from(!runs_through(callback));
            }
        }
        panics
    }

    fn take(&mut self) -> (Vec<ById>, Vec<Arc<Completion>>) {
        (std::mem::take(&mut self.callbacks), std::mem::take(&mut self.completions))
    }
}

/// What is never run is dropped one by one: each may panic.
impl Drop for Due {
    fn drop(&mut self) {
        let (callbacks, completions) = self.take();
        discard_all(callbacks.into_iter().flat_map(BTreeMap::into_values));
        discard_all(completions);
    }
}

/// As for [`Due`]: those of leases that were forgotten go with the cache.
impl Drop for Watchers {
    fn drop(&mut self) {
        let callbacks = std::mem::take(&mut self.on_invalidate).into_values();
        discard_all(callbacks.flat_map(BTreeMap::into_values));
        discard_all(self.on_deregister.drain());
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::foreign::tests::{Bomb, FUSE};

    #[test]
    fn a_panic_whose_payload_panics_holds_up_no_other_callback() {
        let ran = Arc::new(Mutex::new(0));
        let second = Arc::clone(&ran);
        let first: Callback = Box::new(|| std::panic::panic_any(Bomb));
        let second: Callback = Box::new(move || *second.lock().unwrap() += 1);
        let callbacks = vec![BTreeMap::from([(1, first), (2, second)])];
        FUSE.set(3);
        assert_eq!(Due { callbacks, completions: Vec::new() }.run(|| false), 1);
        assert_eq!(*ran.lock().unwrap(), 1);
        FUSE.set(0);
    }

    #[test]
    fn a_renewed_region_completes_what_was_asked_before_and_no_other() {
        let mut watchers = Watchers::default();
        let completions = [3, 1, 2].map(|change| {
            let completion = Completion::new(Box::new(|| ()));
            watchers.await_deregistration(7, ChangeCount::from_bits(change), &completion);
            watchers.await_deregistration(8, ChangeCount::from_bits(change), &completion);
            completion
        });
        let due = |watchers: &mut Watchers| {
            let due = watchers.take_due().map_or_else(Vec::new, |mut due| due.take().1);
            let place = |it: &Arc<_>| completions.iter().position(|other| Arc::ptr_eq(it, other));
            due.iter().map(|it| place(it).unwrap()).collect::<Vec<_>>()
        };
        watchers.renewed(7, ChangeCount::from_bits(2));
        assert_eq!(due(&mut watchers), [1, 2]);
        watchers.renewed(7, ChangeCount::from_bits(2));
        watchers.deregistered(6);
        assert_eq!(due(&mut watchers), []);
        watchers.deregistered(7);
        assert_eq!(due(&mut watchers), [0]);
        watchers.deregistered(8);
        assert_eq!(due(&mut watchers), [0, 1, 2]);
        assert!(watchers.on_deregister.is_empty());
    }

    #[test]
    fn a_callback_is_told_from_one_asked_for_four_billion_ago() {
        let mut watchers = Watchers::default();
        let first = watchers.watch(7, Box::new(|| ()));
        watchers.last_id = u32::MAX.into();
        let second = watchers.watch(7, Box::new(|| ()));
        assert_ne!(first, second);
        assert!(watchers.forget(7, second).is_some() && watchers.forget(7, second).is_none());
        assert!(watchers.forget(7, first).is_some());
    }
}
