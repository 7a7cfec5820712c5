//! Pieces on their way from the helpers, which register them in any order, to the one that moves
//! them in order.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A line of places, as many as the helpers may be ahead.
///
/// In a forked child it is closed and empty, and what stands in it is leaked: a thread that is not there may have it
/// locked.
pub(super) struct Line<'l, T> {
    /// Guards the places, for a few words' worth of work; never held while a piece is registered
    /// or moved. No other lock is taken under it.
    places: Mutex<Places<T>>,
    /// A helper may claim again, or is to go home.
    room: Condvar,
    /// A place has been filled.
    filled: Condvar,
    ahead: usize,
    is_forked: &'l (dyn Fn() -> bool + Sync),
}

struct Places<T> {
    /// The number of the place at the front.
    front: usize,
    /// The number behind the last one that will be claimed.
    end: usize,
    /// Those claimed and not taken yet, from `front` on.
    claimed: VecDeque<Place<T>>,
}

enum Place<T> {
    /// A helper is at it.
    Claimed,
    Filled(T),
    /// No helper works on it: the taker does the work itself.
    Empty,
}

/// What stands at the front.
pub(super) enum Front<T> {
    /// The next one, ready.
    Ready(T),
    /// The next one is not claimed: the taker registers it itself.
    Yours,
    /// A helper is at it.
    NotYet,
}

/// A place that a helper has taken upon itself; an empty one if it drops it.
pub(super) struct Claim<'l, T> {
    line: &'l Line<'l, T>,
    number: usize,
}

impl<'l, T> Line<'l, T> {
    /// A line for the numbers from `first` up to, not including, `end`.
    pub(super) fn new(
        first: usize,
        end: usize,
        ahead: usize,
        is_forked: &'l (dyn Fn() -> bool + Sync),
    ) -> Self {
        // Grows with what is really claimed: `ahead` may be as good as no bound.
        let places = Places { front: first, end, claimed: VecDeque::new() };
        let places = Mutex::new(places);
        let (room, filled) = (Condvar::new(), Condvar::new());
        Self { places, room, filled, ahead: ahead.max(1), is_forked }
    }

    /// `None` in a forked child.
    fn lock(&self) -> Option<MutexGuard<'_, Places<T>>> {
        let lock = || self.places.lock().unwrap_or_else(PoisonError::into_inner);
        (!(self.is_forked)()).then(lock)
    }

    /// The next number, as soon as there is room; `None` when there is nothing more to do.
    pub(super) fn claim(&self) -> Option<Claim<'_, T>> {
        let mut places = self.lock()?;
        loop {
            let number = places.front + places.claimed.len();
            if number >= places.end {
                return None;
            }
            if places.claimed.len() < self.ahead {
                places.claimed.push_back(Place::Claimed);
                return Some(Claim { line: self, number });
            }
            places = self.room.wait(places).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes what stands at the front, if it is there.
    pub(super) fn try_take(&self) -> Front<T> {
        let Some(mut places) = self.lock() else { return Front::Yours };
        if matches!(places.claimed.front(), Some(Place::Claimed)) {
            return Front::NotYet;
        }
        self.take_front(&mut places)
    }

    /// Takes what stands at the front, waiting for the helper who is at it.
    pub(super) fn take(&self) -> Front<T> {
        let Some(mut places) = self.lock() else { return Front::Yours };
        while matches!(places.claimed.front(), Some(Place::Claimed)) {
            places = self.filled.wait(places).unwrap_or_else(PoisonError::into_inner);
        }
        self.take_front(&mut places)
    }

    fn take_front(&self, places: &mut Places<T>) -> Front<T> {
        places.front += 1;
        let taken = places.claimed.pop_front();
        self.room.notify_one();
        match taken {
            Some(Place::Filled(item)) => Front::Ready(item),
            _ => Front::Yours,
        }
    }

    /// Sends the helpers home; what they have in hand they still fill.
    pub(super) fn close(&self) {
        let Some(mut places) = self.lock() else { return };
        places.end = places.front;
        drop(places);
        self.room.notify_all();
    }

    /// Sends the helpers home, waits for what they are working on, and gives out everything that
    /// stands in the line, whose places are unclaimed from then on.
    pub(super) fn close_and_empty(&self) -> Vec<T> {
        self.close();
        let Some(mut places) = self.lock() else { return Vec::new() };
        while places.claimed.iter().any(|place| matches!(place, Place::Claimed)) {
            places = self.filled.wait(places).unwrap_or_else(PoisonError::into_inner);
        }
        let all = std::mem::take(&mut places.claimed);
        drop(places);
        all.into_iter().filter_map(Place::into_item).collect()
    }

    fn fill(&self, number: usize, with: Place<T>) {
        let Some(mut places) = self.lock() else { return };
        let position = number.checked_sub(places.front);
        if let Some(place) = position.and_then(|position| places.claimed.get_mut(position)) {
            *place = with;
        }
        drop(places);
        self.filled.notify_one();
    }
}

impl<T> Drop for Line<'_, T> {
    fn drop(&mut self) {
        if (self.is_forked)() {
            let places = self.places.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(&mut places.claimed));
        }
    }
}

impl<T> Place<T> {
    fn into_item(self) -> Option<T> {
        if let Self::Filled(item) = self { Some(item) } else { None }
    }
}

impl<T> Claim<'_, T> {
    /// Which piece.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Puts the piece into its place.
    pub(super) fn fill(self, item: T) {
        self.line.fill(self.number, Place::Filled(item));
        std::mem::forget(self);
    }
}

impl<T> Drop for Claim<'_, T> {
    fn drop(&mut self) {
        self.line.fill(self.number, Place::Empty);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn ready(front: &Front<usize>) -> Option<usize> {
        if let Front::Ready(number) = front { Some(*number) } else { None }
    }

    #[test]
    fn pieces_come_in_order_whatever_order_they_were_made_in() {
        let line = Line::new(3, 6, 8, &|| false);
        let claims: Vec<_> = std::iter::from_fn(|| line.claim()).collect();
        assert!(matches!(line.try_take(), Front::NotYet));
        claims.into_iter().rev().for_each(|claim| {
            let number = claim.number();
            claim.fill(number);
        });
        let taken: Vec<_> = (0..3).map_while(|_| ready(&line.take())).collect();
        assert_eq!(taken, [3, 4, 5]);
    }

    #[test]
    fn what_a_helper_drops_falls_to_the_taker() {
        let line = Line::<usize>::new(0, 2, 1, &|| false);
        drop(line.claim());
        assert!(matches!(line.take(), Front::Yours));
        // And what is not claimed.
        assert!(matches!(line.take(), Front::Yours));
        assert!(line.claim().is_none());
    }

    #[test]
    fn helpers_are_never_further_ahead_than_allowed() {
        let total = if cfg!(miri) { 40 } else { 1000 };
        let line = Line::new(0, total, 3, &|| false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some(claim) = line.claim() {
                        let number = claim.number();
                        claim.fill(number);
                    }
                });
            }
            for expected in 0..total {
                assert!(line.lock().unwrap().claimed.len() <= 3);
                match line.take() {
                    Front::Ready(number) => assert_eq!(number, expected),
                    Front::Yours => {}
                    Front::NotYet => panic!("take waits"),
                }
            }
        });
    }

    #[test]
    fn an_emptied_line_gives_out_what_stands_in_it() {
        let line = Line::new(0, 10, 4, &|| false);
        let (first, second) = (line.claim().unwrap(), line.claim().unwrap());
        second.fill(1);
        thread::scope(|scope| {
            scope.spawn(|| first.fill(0));
            assert_eq!(line.close_and_empty(), [0, 1]);
        });
        assert!(line.claim().is_none());
    }
}
