//! How a buffer is had that is not at hand: by growing, by a raid, by waiting.
//!
//! The threads that wait for a buffer that some slab can hold stand in the [queue](super::queue), those that wait until
//! there is one apart.

use super::config::WhenExhausted;
use super::depot::{
    Depot, Forked, Found, Growth, Guard, Hand, Settles, State, Tries, Want, grows_on_this_thread,
};
use super::error::AllocateError;
use super::queue::Seat;
use pinfold_core::foreign;
use std::ptr::NonNull;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

impl Depot {
    /// A buffer by the slow way, and some more for the magazines of the thread.
    pub(super) fn take(
        &self,
        want: Want,
        when: WhenExhausted,
        hand: Option<&Hand>,
        tries: &mut Tries,
    ) -> Result<NonNull<u8>, AllocateError> {
        if self.is_forked() {
            return Err(AllocateError::Forked);
        }
        if want.slab_bytes() > self.bounds().longest {
            return Err(self.too_long(want));
        }
        let mut state = self.lock();
        state.note_visit();
        let block = match state.take_if_unawaited(want) {
            Some(block) => block,
            None => {
                let (again, block) = self.take_what_is_not_there(state, want, when, tries)?;
                state = again;
                block?
            }
        };
        if let (Want::Block(class), Some(hand)) = (want, hand) {
            self.fill_hand(&mut state, class, hand);
        }
        Ok(block)
    }

    fn too_long(&self, want: Want) -> AllocateError {
        let bytes = want.kind().bytes();
        AllocateError::TooLong { bytes, max_bytes: self.bounds().longest }
    }

    /// By growing, by a raid, by waiting, as far as the caller wants that.
    ///
    /// A thread tries once to make a slab before it raids and waits. It goes round only behind the slabs of others, for
    /// as long as its patience lasts.
    fn take_what_is_not_there<'d>(
        &'d self,
        mut state: Guard<'d>,
        want: Want,
        when: WhenExhausted,
        tries: &'d mut Tries,
    ) -> Found<'d, Result<NonNull<u8>, AllocateError>> {
        let (mut refused, mut watched) = (None, Duration::ZERO);
        while when.grows() && refused.is_none() {
            let began = Instant::now();
            let left = when.patience().map(|patience| patience.saturating_sub(watched));
            let (again, grown) = self.grow_or_watch(state, want, left, tries)?;
            state = again;
            // A thread that made a slab has taken from it; what others made, and what came back while it could make
            // none, is for those that wait.
            match grown {
                Grown::Made(block) => return Ok((state, Ok(block))),
                Grown::ByAnother => watched += began.elapsed(),
                Grown::Refused(error) => refused = Some(error),
            }
            if let Some(block) = state.take_if_unawaited(want) {
                return Ok((state, Ok(block)));
            }
            if when.patience().is_some_and(|patience| patience <= watched) {
                break;
            }
        }
        if state.queue.is_empty() {
            self.raid(&mut state);
        }
        let patience = when.patience().filter(|_| !grows_on_this_thread(&state));
        match (state.take_if_unawaited(want), patience) {
            (None, Some(patience)) => {
                self.wait(state, Waiter::new(self, want, when.grows(), tries), patience, watched)
            }
            (block, _) => {
                let (state, block) = self.after_wait(state, block, None)?;
                let nothing = || AllocateError::Exhausted(self.standing(&state, want));
                let block = block.ok_or_else(|| refused.unwrap_or_else(nothing));
                Ok((state, block))
            }
        }
    }

    /// Waits until those who came before have theirs, and something that fits has been put back. It has waited for
    /// slabs of others `before`.
    fn wait<'d>(
        &'d self,
        mut state: Guard<'d>,
        mut waiter: Waiter<'d>,
        patience: Duration,
        before: Duration,
    ) -> Found<'d, Result<NonNull<u8>, AllocateError>> {
        let began = Instant::now();
        let block = loop {
            let left = patience.saturating_sub(before + began.elapsed());
            waiter.take_a_place(&mut state);
            self.open_unless_awaited(&state);
            let (again, looked) = self.look(state, &mut waiter, left.is_zero())?;
            state = again;
            match looked {
                Looked::Found(block) => break Some(block),
                _ if left.is_zero() => break None,
                Looked::Again => state = self.settle_aside(state, &mut waiter)?,
                Looked::Nothing => {
                    let (again, has_told) = self.tell_of_idle(state)?;
                    state = if has_told { again } else { self.sleep(again, &waiter, left) };
                }
            }
        };
        waiter.go(&mut state);
        let (state, block) = self.after_wait(state, block, waiter.settles.take())?;
        let pool = self.standing(&state, waiter.want);
        let waited = before + began.elapsed();
        Ok((state, block.ok_or(AllocateError::TimedOut { waited, pool })))
    }

    /// What there is for a thread that waits; the lock is released only to make a slab. No listener is called: the
    /// thread has its place still.
    fn look<'d>(
        &'d self,
        mut state: Guard<'d>,
        waiter: &mut Waiter<'d>,
        is_last: bool,
    ) -> Found<'d, Looked> {
        if !waiter.is_next(&state) {
            return Ok((state, Looked::Nothing));
        }
        // The gate stays closed from here on: what is put, is put where it is found.
        self.raid(&mut state);
        if waiter.seat.is_some()
            && let Some(block) = waiter.take(&mut state)
        {
            return Ok((state, Looked::Found(block)));
        }
        let worth_it = is_last || waiter.seen != Some(state.room_made);
        if !waiter.grows || !worth_it || state.growing || !self.could_grow(&state, waiter.want) {
            return Ok((state, Looked::Nothing));
        }
        waiter.seen = Some(state.room_made);
        waiter.settles.get_or_insert(Settles(self));
        let block = self.grow_unless_in_vain(state, waiter, is_last);
        let mut state = self.lock_again()?;
        // What came back meanwhile is for the first in the queue, not for who comes first while it steps aside.
        let is_first = waiter.seat.as_ref().is_some_and(|seat| state.queue.is_first(seat));
        let block = match block {
            None if is_first => waiter.take(&mut state),
            block => block,
        };
        Ok((state, block.map_or(Looked::Again, Looked::Found)))
    }

    /// Makes a slab for a thread that waits, and takes a block of it.
    ///
    /// Not if that was tried so often in vain that only more room helps. Another pool's grant that came back unused makes none,
    /// but has this one notified, which it had kept from a grant; this one's does the same for the other, and so on.
    fn grow_unless_in_vain(
        &self,
        mut state: Guard<'_>,
        waiter: &mut Waiter<'_>,
        is_last: bool,
    ) -> Option<NonNull<u8>> {
        let own_room_made = state.own_room_made;
        state.growing = true;
        drop(state);
        let _growth = Growth::begin(self);
        // First, so that what is released behind the count has this pool notified; also one whose device refuses what it was
        // granted, which no budget knows of: what another pool gives back may make room in the device.
        self.allowance.await_room(waiter.want.slab_bytes());
        if self.is_forked() {
            return None;
        }
        let room = self.allowance.released().map(|released| (released, own_room_made));
        if room.is_none() || room != waiter.room {
            (waiter.room, waiter.in_vain) = (room, 0);
        }
        if waiter.in_vain >= IN_VAIN && !is_last {
            return None;
        }
        let gave_back = waiter.tries.gave_back;
        let block = self.grow(waiter.want, waiter.seat.as_ref(), waiter.tries);
        // One that was granted nothing has no other pool notified, and its own device was not asked.
        waiter.in_vain += u32::from(waiter.tries.gave_back != gave_back);
        block.ok().flatten()
    }

    /// Has listeners called for a slab that was tried in vain. Meanwhile others are served as if the thread did not
    /// wait: a listener may wait for one of them.
    fn settle_aside<'d>(
        &'d self,
        mut state: Guard<'d>,
        waiter: &mut Waiter<'d>,
    ) -> Result<Guard<'d>, Forked> {
        waiter.step_aside(&mut state);
        self.open_unless_awaited(&state);
        self.wake(&state);
        drop(state);
        drop(waiter.settles.take());
        self.lock_again()
    }

    /// What a look has left empty other drawers may have. Whether there was something: the lock was free then.
    fn tell_of_idle<'d>(&'d self, mut state: Guard<'d>) -> Found<'d, bool> {
        let idle = self.take_untold_idle(&mut state);
        if idle.is_none() {
            return Ok((state, false));
        }
        drop(state);
        self.note_idle(idle);
        Ok((self.lock_again()?, true))
    }

    fn sleep<'d>(&'d self, state: Guard<'d>, waiter: &Waiter<'d>, left: Duration) -> Guard<'d> {
        let woken = match &waiter.seat {
            Some(seat) => seat.woken.wait_timeout(state, left),
            None => self.changed.wait_timeout(state, left),
        };
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    /// A thread waits no more, with a `block` or without: there may be something for the next one, or
    /// no thread for which to keep what is empty. Listeners are called for a slab that it tried to make.
    ///
    /// Should any of that panic, the block is no thread's, and is put back before the panic goes on.
    fn after_wait<'d>(
        &'d self,
        mut state: Guard<'d>,
        block: Option<NonNull<u8>>,
        settles: Option<Settles<'d>>,
    ) -> Found<'d, Option<NonNull<u8>>> {
        self.open_unless_awaited(&state);
        state.release_withheld();
        self.wake(&state);
        let surplus = self.surplus(&mut state);
        let idle = self.take_untold_idle(&mut state);
        if surplus.is_empty() && settles.is_none() && idle.is_none() {
            return Ok((state, block));
        }
        drop(state);
        let given_back = foreign::call(|| {
            let _settles = settles;
            self.note_idle(idle);
            self.give_back(surplus);
        });
        let mut state = self.lock_again()?;
        let Err(panicked) = given_back else { return Ok((state, block)) };
        let emptied = block.is_some_and(|block| state.put(block));
        // A second panic has nowhere to go.
        let _again = foreign::call(|| self.after_puts(state, emptied));
        panicked.resume_unless_unwinding();
        Ok((self.lock_again()?, None))
    }

    /// Makes a slab and takes a block of it, or waits while another thread makes one, for so long at most.
    ///
    /// A registrar or an allowance may ask a pool for a buffer while one grows on its thread:
    /// it does not wait, because its own thread, or one that waits for this, is what it would wait for. A budget's
    /// listener is called when other threads wait for this growth no more: it may wait for one of them. By then the
    /// block is in use, so that what the listener gives back of this pool is not its slab. The caller has no place in
    /// the queue.
    fn grow_or_watch<'d>(
        &'d self,
        state: Guard<'d>,
        want: Want,
        patience: Option<Duration>,
        tries: &mut Tries,
    ) -> Found<'d, Grown> {
        if grows_on_this_thread(&state) {
            let error = AllocateError::Exhausted(self.standing(&state, want));
            return Ok((state, Grown::Refused(error)));
        }
        if state.growing {
            return Ok((self.watch_growth(state, patience), Grown::ByAnother));
        }
        // Dropped behind the growth, should that panic.
        let settles = Settles(self);
        let grown = self.grow_alone(state, want, tries);
        let block = grown.as_ref().ok().copied().flatten();
        let (state, block) = self.after_wait(self.lock_again()?, block, Some(settles))?;
        let nothing = || AllocateError::Exhausted(self.standing(&state, want));
        let refused = |grown: Result<_, _>| Grown::Refused(grown.err().unwrap_or_else(nothing));
        let grown = block.map_or_else(|| refused(grown), Grown::Made);
        Ok((state, grown))
    }

    /// Makes a slab while no other thread does, and takes a block of it. The caller settles.
    fn grow_alone(
        &self,
        mut state: Guard<'_>,
        want: Want,
        tries: &mut Tries,
    ) -> Result<Option<NonNull<u8>>, AllocateError> {
        state.growing = true;
        drop(state);
        let _growth = Growth::begin(self);
        self.grow(want, None, tries)
    }

    /// Waits while another thread makes a slab.
    fn watch_growth<'d>(&'d self, state: Guard<'d>, patience: Option<Duration>) -> Guard<'d> {
        let growing = |state: &mut State| state.growing;
        match patience {
            None => self.changed.wait_while(state, growing).unwrap_or_else(PoisonError::into_inner),
            Some(left) => {
                let watched = self.changed.wait_timeout_while(state, left, growing);
                watched.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

/// A thread that waits for a buffer: in the queue as long as a slab can hold that, or, if it makes none, the run that does as
/// well; apart else. It leaves its
/// place however its wait ends, also by a panic of a device or the budget, which would close the pool to all.
struct Waiter<'d> {
    depot: &'d Depot,
    want: Want,
    /// Whether it would make a slab.
    grows: bool,
    seat: Option<Seat>,
    /// The seat that it has left for a moment, and takes again.
    kept_seat: Option<Seat>,
    /// Whether it is counted among those apart.
    is_apart: bool,
    /// How often room had been made when it last tried to make a slab: without more there is no
    /// point in trying again, and two who try would wake each other for ever.
    seen: Option<u64>,
    /// How often it has given back unused what it was granted for a slab, since there was more room for good.
    in_vain: u32,
    /// What its request has tried so far.
    tries: &'d mut Tries,
    /// How often there had been, in the budget and in the pool.
    room: Option<(u64, u64)>,
    /// It has tried to make a slab. Listeners are called when it has no place: they may wait for a thread behind it.
    settles: Option<Settles<'d>>,
}

/// So often a thread that waits gives back what it was granted, and tries again although nothing was released: what the
/// device lacked may have been another pool's try.
const IN_VAIN: u32 = 4;

/// What came of a slab that was wanted.
enum Grown {
    /// The calling thread made one, and has a block.
    Made(NonNull<u8>),
    /// Another thread has made one, or tried to.
    ByAnother,
    /// The calling thread could have none.
    Refused(AllocateError),
}

/// What a waiting thread found.
enum Looked {
    Found(NonNull<u8>),
    /// The lock was released meanwhile.
    Again,
    /// Nothing, and so it will be until it is woken.
    Nothing,
}

impl Drop for Waiter<'_> {
    /// With the lock held it has no place any more, and has settled. Else it settles behind this.
    fn drop(&mut self) {
        let has_place = self.seat.is_some() || self.is_apart;
        if has_place && let Ok(mut state) = self.depot.lock_again() {
            self.go(&mut state);
            self.depot.open_unless_awaited(&state);
            state.release_withheld();
            let idle = self.depot.take_untold_idle(&mut state);
            self.depot.wake(&state);
            drop(state);
            self.depot.note_idle(idle);
        }
    }
}

impl<'d> Waiter<'d> {
    const fn new(depot: &'d Depot, want: Want, grows: bool, tries: &'d mut Tries) -> Self {
        Self {
            depot,
            want,
            grows,
            seat: None,
            kept_seat: None,
            is_apart: false,
            seen: None,
            in_vain: 0,
            tries,
            room: None,
            settles: None,
        }
    }

    /// Goes where it belongs as the slabs are now.
    fn take_a_place(&mut self, state: &mut State) {
        let kept_seat = self.kept_seat.take();
        // One that makes no slab will have no more than a run, where none is longer.
        let run = self.tries.run.filter(|_| !self.grows);
        let can_hold = state.can_hold(self.want) || run.is_some_and(|run| state.can_hold(run));
        match (can_hold, self.seat.is_some()) {
            (true, true) => {}
            (false, false) if self.is_apart => {}
            (true, false) => {
                self.go(state);
                self.seat = Some(match kept_seat {
                    Some(seat) => {
                        state.queue.rejoin(&seat);
                        seat
                    }
                    None => state.queue.join(),
                });
            }
            (false, _) => {
                self.go(state);
                state.queue.wake_first();
                self.is_apart = true;
                state.apart += 1;
                state.makers += usize::from(self.grows);
            }
        }
    }

    /// What it wants, or the run that does as well.
    fn take(&mut self, state: &mut State) -> Option<NonNull<u8>> {
        state.take(self.want).or_else(|| {
            let block = state.take(self.tries.run?)?;
            self.tries.took_run = true;
            Some(block)
        })
    }

    /// Leaves its place until it takes one again, ahead of those that came later.
    fn step_aside(&mut self, state: &mut State) {
        let seat = self.seat.clone();
        self.go(state);
        self.kept_seat = seat;
    }

    /// Leaves its place.
    fn go(&mut self, state: &mut State) {
        if let Some(seat) = self.seat.take() {
            state.queue.leave(&seat);
        }
        if std::mem::take(&mut self.is_apart) {
            state.apart -= 1;
            state.makers -= usize::from(self.grows);
        }
    }

    /// Whether no thread in the queue comes first. One that is apart looks only whether it can make a slab.
    fn is_next(&self, state: &State) -> bool {
        match &self.seat {
            Some(seat) => state.queue.is_first(seat),
            None => self.grows,
        }
    }
}
