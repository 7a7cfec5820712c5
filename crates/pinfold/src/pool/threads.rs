//! A thread's cache of the pools that it uses.
//!
//! A thread finds its magazines without a lock and without asking whether its destructors have run:
//! what it has cached of the last four pools stands apart from what must be given back when it
//! ends. A thread that ends gives everything back; what it still takes and puts after that, in the
//! destructors of others, goes through the pool's lock.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to follow the address of a thread's own magazines.

#![allow(unsafe_code)]

use super::classes::Class;
use super::depot::{Depot, Hand, PoolId};
use pinfold_core::foreign;
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

/// How many pools a thread can use in turn before it has to look for its magazines.
const HANDS: usize = 4;

/// The magazines that the calling thread used last.
struct AtHand {
    pool: Cell<PoolId>,
    hand: Cell<NonNull<Hand>>,
}

/// All magazines that the calling thread owns, by pool.
struct Seats(Vec<Seat>);

struct Seat {
    pool: PoolId,
    /// Weak, so that a pool that is gone takes its magazines along, however many threads used it.
    depot: Weak<Depot>,
    hand: Arc<Hand>,
}

thread_local! {
    static AT_HAND: [AtHand; HANDS] = const { [const { AtHand::nothing() }; HANDS] };
    static SEATS: RefCell<Seats> = const { RefCell::new(Seats(Vec::new())) };
}

impl AtHand {
    const fn nothing() -> Self {
        Self { pool: Cell::new(PoolId::NONE), hand: Cell::new(NonNull::dangling()) }
    }

    #[inline(always)]
    fn of<'d>(&self, depot: &'d Depot) -> Option<&'d Hand> {
        if self.pool.get() != depot.id() {
            return None;
        }
        // SAFETY: `sit` got it from a seat of this thread's, which keeps the magazines as long as the
        // pool of this name lives, and until the thread ends if that is later.
        Some(unsafe { self.hand.get().as_ref() })
    }
}

/// The calling thread's magazines of this pool, if its table has them.
#[inline(always)]
fn at_hand(depot: &Depot) -> Option<&Hand> {
    AT_HAND.try_with(|hands| hands[depot.id().low_bits() % HANDS].of(depot)).ok().flatten()
}

/// A block of this size, without a lock.
#[inline(always)]
pub(super) fn take(depot: &Depot, class: Class) -> Option<NonNull<u8>> {
    let hand = at_hand(depot)?;
    // SAFETY: the magazines are this thread's, of this pool, whose gate it is.
    let block = unsafe { hand.take(class.index(), depot.gate()) };
    if hand.is_recalled() {
        hand_over(hand);
    }
    block
}

/// Puts a block back without a lock; false if that cannot be.
#[inline(always)]
#[must_use = "a block that was not kept is still the caller's"]
pub(super) fn put(depot: &Depot, class: Class, block: NonNull<u8>) -> bool {
    let Some(hand) = at_hand(depot) else { return false };
    // SAFETY: as in `take`; the block is the caller's.
    let kept = unsafe { hand.put(class.index(), block, depot.gate()) };
    // A block that was not kept is put back with the lock held, and that wakes a thread that waits. The pool may be
    // gone once it was: the magazines are not, as long as the thread's table has them.
    if kept && hand.is_recalled() {
        hand_over(hand);
    }
    kept
}

/// Hands over what is cached in the calling thread's own magazines.
#[cold]
fn hand_over(hand: &Hand) {
    let depot = SEATS.try_with(|seats| {
        let seats = seats.try_borrow().ok()?;
        let seat = seats.0.iter().find(|seat| std::ptr::eq(&*seat.hand, hand))?;
        seat.depot.upgrade()
    });
    if let Some(depot) = depot.ok().flatten() {
        depot.hand_over(hand);
        // The last reference takes the registrar and the budget along.
        foreign::discard(depot);
    }
}

/// The calling thread's magazines of this pool, looked for or made; `None` in a forked child and
/// once the thread has given everything back.
pub(super) fn hand(depot: &Depot) -> Option<&Hand> {
    at_hand(depot).or_else(|| {
        let sat = SEATS.try_with(|seats| seats.try_borrow_mut().ok()?.sit(depot));
        sat.ok().flatten()?;
        at_hand(depot)
    })
}

impl Seats {
    /// Puts the thread's magazines of this pool into its table.
    fn sit(&mut self, depot: &Depot) -> Option<()> {
        let position = self.0.iter().position(|seat| seat.pool == depot.id());
        let seat = match position {
            Some(position) => self.0.get(position)?,
            None => self.new_seat(depot)?,
        };
        let hand = NonNull::from(&*seat.hand);
        AT_HAND
            .try_with(|hands| {
                let at_hand = &hands[depot.id().low_bits() % HANDS];
                at_hand.hand.set(hand);
                at_hand.pool.set(depot.id());
            })
            .ok()
    }

    fn new_seat(&mut self, depot: &Depot) -> Option<&Seat> {
        self.0.retain(|seat| seat.depot.strong_count() > 0);
        let hand = depot.adopt_hand()?;
        self.0.push(Seat { pool: depot.id(), depot: depot.weak(), hand });
        self.0.last()
    }
}

impl Drop for Seats {
    fn drop(&mut self) {
        // Another thread may have the magazines next.
        // (Where `AT_HAND` is gone already, nothing is taken or put any more without the lock.)
        let _gone = AT_HAND.try_with(|hands| {
            hands.iter().for_each(|at_hand| at_hand.pool.set(PoolId::NONE));
        });
        for seat in &self.0 {
            let Some(depot) = seat.depot.upgrade() else { continue };
            // No panic may leave the destructor of a thread-local.
            if foreign::call(|| depot.retire_hand(&seat.hand)).is_err() {
                depot.keep_panic_back();
            }
            // The last reference takes the registrar and the budget along.
            foreign::discard(depot);
        }
    }
}
