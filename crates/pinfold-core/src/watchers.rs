//! The program's callbacks: kept under the writer's lock, run outside it.

use crate::callbacks::{Callback, Callbacks};
use crate::chunked::Chunked;
use crate::foreign::{discard, discard_all, runs_through};
use crate::queue::Queue;
use crate::unapplied::ChangeCount;
use crate::waits::{Released, Waits};
use std::sync::{Arc, Mutex, PoisonError};

/// How many bits of a callback's name say its place; above them stand the lowest bits of its serial number.
const PLACE_BITS: u32 = u32::BITS;

/// What a callback's name may use: the rest of a lease's word says something else.
const NAME_BITS: u32 = u64::BITS - 1;

/// Callbacks that wait for something to happen to a region, by the region's number.
#[derive(Default)]
pub(crate) struct Watchers {
    /// To be run when the region is invalidated.
    on_invalidate: Chunked<Option<Box<Callbacks>>>,
    /// How many regions have such.
    watched: usize,
    /// To be run when the last of several regions is deregistered that were registered before a change.
    on_deregister: Waits<Arc<Completion>>,
    last_serial: u64,
    due: Due,
}

/// Callbacks whose moment has come. None, nearly always: so it is a pointer's length that each way out of the lock moves.
#[derive(Default)]
#[must_use = "the program waits for its callbacks"]
pub(crate) struct Due(Option<Box<DueQueues>>);

#[derive(Default)]
struct DueQueues {
    callbacks: Queue<Box<Callbacks>>,
    completions: Queue<Arc<Completion>>,
    /// More completions than one hold of the lock takes out of their table.
    released: Queue<Released>,
}

/// How many completions are taken out of their table under one hold of the lock.
const AT_ONCE: usize = if cfg!(any(loom, shuttle)) { 2 } else { 64 };

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
    /// Keeps `callback` until region `number` is invalidated. A name by which its lease takes it back, never 0
    /// and of 63 bits.
    pub(crate) fn watch(&mut self, number: u32, callback: Callback) -> u64 {
        self.last_serial += 1;
        let of_region = self.on_invalidate.made(number as usize, || None);
        self.watched += usize::from(of_region.is_none());
        let place = of_region.get_or_insert_default().insert(self.last_serial, callback);
        name(place, self.last_serial)
    }

    /// Takes a callback back: its lease ended. The callbacks of its region with it if it was the last of them, to
    /// be freed where no lock is held.
    pub(crate) fn forget(
        &mut self,
        number: u32,
        id: u64,
    ) -> Option<(Callback, Option<Box<Callbacks>>)> {
        let of_region = self.on_invalidate.get_mut(number as usize)?;
        let callbacks = of_region.as_mut()?;
        let place = place_of(id)?;
        let callback = callbacks.remove(place, |serial| name(place, serial) == id)?;
        let emptied = of_region.take_if(|callbacks| callbacks.is_empty());
        self.watched -= usize::from(emptied.is_some());
        Some((callback, emptied))
    }

    /// Whether a callback waits for any region to be invalidated.
    #[inline]
    pub(crate) fn has_callbacks(&self) -> bool {
        self.watched > 0
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
        let callbacks = self.on_invalidate.get_mut(number as usize).and_then(Option::take);
        self.watched -= usize::from(callbacks.is_some());
        callbacks.into_iter().for_each(|callbacks| _ = self.due.queues().callbacks.push(callbacks));
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
            self.release_on_deregister(number);
        }
    }

    #[cold]
    fn release_on_deregister(&mut self, number: u32) {
        let released = self.on_deregister.release(number);
        let rest = released.and_then(|released| self.hand_out(released));
        rest.into_iter().for_each(|rest| _ = self.due.queues().released.push(rest));
    }

    /// Makes some of what was released due, as much as one hold of the lock has room for. The rest.
    pub(crate) fn hand_out(&mut self, released: Released) -> Option<Released> {
        let due = &mut self.due.queues().completions;
        let room = AT_ONCE.saturating_sub(due.len());
        self.on_deregister.hand_out(released, room, |completion| _ = due.push(completion))
    }

    /// What was to wait for a change up to `latest`.
    #[cold]
    fn complete_on_deregister(&mut self, number: u32, latest: ChangeCount) {
        let due = &mut self.due.queues().completions;
        self.on_deregister.complete(number, latest, |completion| _ = due.push(completion));
    }

    /// Lets go of `completion` as soon as no lock is held.
    pub(crate) fn complete(&mut self, completion: Arc<Completion>) {
        self.due.queues().completions.push(completion);
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
        let Some(due) = due else { return };
        let mut later = std::mem::replace(&mut self.due, due);
        let released = later.take_released();
        let (callbacks, completions) = later.take();
        callbacks.for_each(|it| _ = self.due.queues().callbacks.push(it));
        completions.for_each(|it| _ = self.due.queues().completions.push(it));
        released.for_each(|it| _ = self.due.queues().released.push(it));
    }
}

impl Due {
    /// One callback, due now.
    pub(crate) fn one(callback: Callback) -> Self {
        let (mut due, mut callbacks) = (Self::default(), Box::<Callbacks>::default());
        callbacks.insert(0, callback);
        due.queues().callbacks.push(callbacks);
        due
    }

    fn queues(&mut self) -> &mut DueQueues {
        self.0.get_or_insert_default()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0
            .as_ref()
            .is_none_or(|it| it.callbacks.len() + it.completions.len() + it.released.len() == 0)
    }

    /// What is to be [handed out](Watchers::hand_out), to run behind the rest of this.
    pub(crate) fn take_released(&mut self) -> impl Iterator<Item = Released> + use<> {
        let released = self.0.as_mut().map(|it| std::mem::take(&mut it.released));
        released.into_iter().flat_map(Queue::into_items)
    }

    /// Runs what is due, and says how many callbacks panicked. `is_forked` is asked before each: one may
    /// fork, and the rest are the parent's then.
    pub(crate) fn run(mut self, is_forked: impl Fn() -> bool) -> u64 {
        let (callbacks, completions) = self.take();
        let completed = completions.filter_map(Completion::into_callback);
        let mut panics = 0;
        let callbacks = callbacks.flat_map(|callbacks| callbacks.into_ordered());
        for callback in callbacks.chain(completed) {
            if is_forked() {
                discard(callback);
            } else {
                panics += u64::from(!runs_through(callback));
            }
        }
        panics
    }

    fn take(
        &mut self,
    ) -> (impl Iterator<Item = Box<Callbacks>> + use<>, impl Iterator<Item = Arc<Completion>> + use<>)
    {
        let DueQueues { callbacks, completions, .. } =
            self.0.take().map(|it| *it).unwrap_or_default();
        (callbacks.into_items(), completions.into_items())
    }
}

/// The name of the callback at `place` with this serial number. What is in the region's callbacks is its own
/// lease's, as long as the lease lives and the region was not invalidated since; and behind an invalidation the place has
/// another serial number, of which these are enough bits not to be met by chance.
const fn name(place: u32, serial: u64) -> u64 {
    ((serial << PLACE_BITS) | (place as u64 + 1)) & ((1 << NAME_BITS) - 1)
}

/// The place that stands in a name.
fn place_of(name: u64) -> Option<u32> {
    u32::try_from(name & ((1 << PLACE_BITS) - 1)).ok()?.checked_sub(1)
}

/// What is never run is dropped one by one: each may panic.
impl Drop for Due {
    fn drop(&mut self) {
        let (callbacks, completions) = self.take();
        discard_all(callbacks.flat_map(|callbacks| callbacks.into_ordered()));
        discard_all(completions);
    }
}

/// As for [`Due`]: those of leases that were forgotten go with the cache.
impl Drop for Watchers {
    fn drop(&mut self) {
        let callbacks = self.on_invalidate.iter_mut().filter_map(Option::take);
        discard_all(callbacks.flat_map(|callbacks| callbacks.into_ordered()));
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
        let mut callbacks = Box::<Callbacks>::default();
        [first, second]
            .into_iter()
            .zip(1..)
            .for_each(|(it, serial)| _ = callbacks.insert(serial, it));
        FUSE.set(3);
        let mut due = Due::default();
        due.queues().callbacks.push(callbacks);
        assert_eq!(due.run(|| false), 1);
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
            let due = watchers.take_due().map_or_else(Vec::new, |mut due| due.take().1.collect());
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

    /// However many wait for one region.
    #[test]
    fn no_more_completions_are_due_at_once_than_a_hold_has_room_for() {
        let mut watchers = Watchers::default();
        for number in [7, 8] {
            for _ in 0..3 * AT_ONCE {
                let completion = Completion::new(nothing());
                watchers.await_deregistration(number, ChangeCount::from_bits(1), &completion);
            }
        }
        watchers.deregistered(7);
        watchers.deregistered(8);
        let mut due = watchers.take_due().unwrap();
        let mut released: Vec<_> = due.take_released().collect();
        let mut ran = due.queues().completions.len();
        assert_eq!((released.len(), ran), (2, AT_ONCE));
        assert_eq!(due.run(|| false), 0);
        while let Some(next) = released.pop() {
            released.extend(watchers.hand_out(next));
            let mut due = watchers.take_due().unwrap();
            assert!(due.queues().completions.len() <= AT_ONCE);
            ran += due.queues().completions.len();
            assert_eq!(due.run(|| false), 0);
        }
        assert_eq!((ran, watchers.on_deregister.is_empty()), (6 * AT_ONCE, true));
    }

    #[test]
    fn a_callback_is_told_from_one_asked_for_four_billion_ago() {
        let mut watchers = Watchers::default();
        let first = watchers.watch(7, Box::new(|| ()));
        watchers.last_serial = u32::MAX.into();
        let second = watchers.watch(7, Box::new(|| ()));
        assert_ne!(first, second);
        assert!(watchers.forget(7, second).is_some() && watchers.forget(7, second).is_none());
        assert!(watchers.forget(7, first).is_some());
    }

    fn nothing() -> Callback {
        Box::new(|| ())
    }

    #[test]
    fn callbacks_are_there_as_long_as_a_region_has_one() {
        let mut watchers = Watchers::default();
        assert!(!watchers.has_callbacks());
        let names = [7, 7, 8, 9].map(|number| (number, watchers.watch(number, nothing())));
        let mut there = names.map(|(number, name)| {
            let emptied = watchers.forget(number, name).unwrap().1.is_some();
            assert_eq!(emptied, number != 7 || name != names[0].1);
            watchers.has_callbacks()
        });
        assert_eq!(there, [true, true, true, false]);
        there = [7, 7, 8, 9].map(|number| {
            let _name = watchers.watch(number, nothing());
            watchers.has_callbacks()
        });
        assert_eq!(there, [true; 4]);
        there = [7, 8, 8, 9].map(|number| {
            watchers.invalidated(number);
            watchers.has_callbacks()
        });
        assert_eq!(there, [true, true, true, false]);
        assert_eq!(watchers.take_due().map(|due| due.run(|| false)), Some(0));
    }

    /// Panics as it is dropped.
    struct Panics;

    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    fn panics_as_it_is_dropped() -> Callback {
        let panics = Panics;
        Box::new(move || drop(panics))
    }

    #[test]
    fn callbacks_that_are_never_run_may_all_panic_as_they_are_dropped() {
        let mut watchers = Watchers::default();
        for number in [7, 7, 8, 8, 9, 9] {
            let _name = watchers.watch(number, panics_as_it_is_dropped());
        }
        for number in [5, 6] {
            let completion = Completion::new(panics_as_it_is_dropped());
            watchers.await_deregistration(number, ChangeCount::from_bits(1), &completion);
        }
        watchers.complete(Completion::new(panics_as_it_is_dropped()));
        watchers.complete(Completion::new(panics_as_it_is_dropped()));
        watchers.invalidated(8);
        let due = watchers.take_due();
        assert!(crate::foreign::call(|| drop(due)).is_ok());
        watchers.invalidated(9);
        assert!(crate::foreign::call(|| drop(watchers)).is_ok());
    }
}
