//! The callbacks that wait for one region.
//!
//! They are asked for and taken back under the writer's lock, so nothing is moved to a larger place there and nothing is
//! freed: the first chunks have room for twice as many as the one before them each, because most regions have few, and all
//! of it goes at once, behind the lock. In
//! a sorted map each end of a lease freed a node now and then, and an allocator may give back all that is on top
//! with the next block that is freed: 0.18 ms under the lock beside 10^5 callbacks.

use crate::chunked::{Chunked, in_block};

/// A callback of the program.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// The end of the chain of free places.
const NONE: u32 = u32::MAX;

/// Room for a callback.
struct Place {
    serial: u64,
    callback: Option<Callback>,
    /// Of a free one, the next.
    next: u32,
}

/// How many chunks double: to as many places as go into half a block.
const DOUBLING: u32 = in_block::<Place>().ilog2();

/// How many places those have.
const FEW: u32 = (1 << DOUBLING) - 1;

/// Callbacks, each with a serial number that is larger than those of all that were there before.
pub(crate) struct Callbacks {
    /// Chunk `n` has room for 2^n, and all but the last one are full.
    few: [Vec<Place>; DOUBLING as usize],
    /// Behind those.
    many: Chunked<Place>,
    made: u32,
    free: u32,
    waiting: u32,
}

impl Default for Callbacks {
    fn default() -> Self {
        let few = std::array::from_fn(|_| Vec::new());
        Self { few, many: Chunked::new(), made: 0, free: NONE, waiting: 0 }
    }
}

impl Callbacks {
    pub(crate) const fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Keeps `callback`. Where: no other has this place as long as it is here.
    pub(crate) fn insert(&mut self, serial: u64, callback: Callback) -> u32 {
        self.waiting += 1;
        let waiting = Place { serial, callback: Some(callback), next: NONE };
        let free = self.free;
        match self.at_mut(free) {
            Some(place) => {
                let Place { next, .. } = std::mem::replace(place, waiting);
                self.free = next;
                free
            }
            None => self.append(waiting),
        }
    }

    /// Takes back the callback at `place`, if it is the one that `is_it` knows by its serial number.
    pub(crate) fn remove(
        &mut self,
        place: u32,
        is_it: impl FnOnce(u64) -> bool,
    ) -> Option<Callback> {
        let next = self.free;
        let at = self.at_mut(place).filter(|at| is_it(at.serial))?;
        let callback = at.callback.take()?;
        at.next = next;
        self.free = place;
        self.waiting -= 1;
        Some(callback)
    }

    /// All of them, first asked first.
    pub(crate) fn into_ordered(mut self) -> impl Iterator<Item = Callback> {
        let places = self.few.iter_mut().flatten().chain(self.many.iter_mut());
        let mut waiting: Vec<(u64, Callback)> =
            places.filter_map(|place| Some((place.serial, place.callback.take()?))).collect();
        waiting.sort_unstable_by_key(|(serial, _)| *serial);
        waiting.into_iter().map(|(_, callback)| callback)
    }

    fn append(&mut self, waiting: Place) -> u32 {
        match self.made.checked_sub(FEW) {
            None => {
                let chunk = chunk_of(self.made);
                let few = &mut self.few[chunk];
                few.reserve_exact((1 << chunk) - few.len());
                few.push(waiting);
            }
            Some(behind) => {
                let fresh = || Place { serial: 0, callback: None, next: NONE };
                *self.many.made(behind as usize, fresh) = waiting;
            }
        }
        self.made += 1;
        self.made - 1
    }

    /// The place of this number, if it was made; [`NONE`] never is.
    fn at_mut(&mut self, place: u32) -> Option<&mut Place> {
        if let Some(behind) = place.checked_sub(FEW) {
            return self.many.get_mut(behind as usize);
        }
        let chunk = chunk_of(place);
        // As many stand before chunk n as the chunks before it have room for: 2^n - 1.
        let before = (1_usize << chunk) - 1;
        self.few[chunk].get_mut(place as usize - before)
    }
}

const fn chunk_of(place: u32) -> usize {
    (place + 1).ilog2() as usize
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    /// Beside a sorted map, so few that places are used again and so many that chunks are made.
    #[test]
    fn agrees_with_a_sorted_map() {
        let ran = Arc::new(Mutex::new(Vec::new()));
        let (mut callbacks, mut model) = (Callbacks::default(), BTreeMap::new());
        let mut state = 0x9e37_79b9_u64;
        for serial in 1..if cfg!(miri) { 200 } else { 20_000 } {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let chance = (state >> 33) as usize;
            if chance % 5 < 3 {
                let ran = Arc::clone(&ran);
                let callback = Box::new(move || ran.lock().unwrap().push(serial));
                let place = callbacks.insert(serial, callback);
                assert!(model.values().all(|&other| other != place), "{place} is taken");
                model.insert(serial, place);
            } else if let Some((&serial, &place)) = model.iter().nth(chance % model.len().max(1)) {
                assert!(callbacks.remove(place, |found| found != serial).is_none());
                assert!(callbacks.remove(place, |found| found == serial).is_some());
                assert!(callbacks.remove(place, |found| found == serial).is_none());
                model.remove(&serial);
            }
            assert_eq!(callbacks.is_empty(), model.is_empty());
        }
        assert!(model.len() > 50, "too few are left to say anything: {}", model.len());
        callbacks.into_ordered().for_each(|callback| callback());
        assert!(ran.lock().unwrap().iter().eq(model.keys()));
    }

    #[test]
    fn places_are_used_again_and_stay_where_they_are() {
        let mut callbacks = Callbacks::default();
        let first = callbacks.insert(1, Box::new(|| ()));
        let address = std::ptr::from_ref(callbacks.at_mut(first).unwrap());
        for serial in 2..100 {
            let place = callbacks.insert(serial, Box::new(|| ()));
            assert!(callbacks.remove(place, |found| found == serial).is_some());
        }
        assert_eq!(callbacks.made, 2);
        let many: Vec<u32> = (100..1_000).map(|it| callbacks.insert(it, Box::new(|| ()))).collect();
        assert_eq!(std::ptr::from_ref(callbacks.at_mut(first).unwrap()), address);
        assert!(many.iter().all(|&place| callbacks.remove(place, |_| true).is_some()));
        assert!(callbacks.remove(NONE, |_| true).is_none() && !callbacks.is_empty());
    }
}
