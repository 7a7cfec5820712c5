//! What all threads share of a pool: its blocks, its slabs as they come and go, and the lock over them.
//!
//! One lock guards it all, taken for a handful of blocks at a time; it is never held while memory
//! is mapped or registered, and what is allocated under it is the books' own memory: lists, the record of a slab, a seat.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to reach into the magazines of threads, by the lock's leave
//! ([`Magazines`]), and because a slab finds its pool by address.

#![allow(unsafe_code)]

use super::allowance::{Denied, ForEachPin};
use super::classes::{CLASSES, Class, UNIT};
use super::config::Bounds;
use super::devices::{Devices, Handles};
use super::error::{AllocateError, PoolError, PoolExhausted};
use super::map;
use super::memory::{Memory, prepare_for_forks};
use super::queue::{Queue, Seat};
use super::slab::{self, Kind};
use super::space::{Put, Space};
use super::statistics::PoolStatistics;
use crate::fork_mark::ForkMark;
use pinfold_core::foreign::{self, ForeignPart, Panicked};
use pinfold_core::magazines::{Gate, MAGAZINE_BLOCKS, Magazines};
use pinfold_core::{Amount, Barriers, DeregisterError, Lender};
use pinfold_kernel::{membarrier, thread};
use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// One thread's cache of one pool.
pub(super) type Hand = Magazines<CLASSES>;

/// The name of a pool, by which a thread knows whose magazines its table has; odd, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PoolId(u64);

impl PoolId {
    pub(super) const NONE: Self = Self(0);

    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: uniqueness is all that is asked.
        Self(NEXT.fetch_add(2, Ordering::Relaxed))
    }

    /// A number that pools made one after another do not share.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // its low bits are what is asked for
    pub(super) const fn low_bits(self) -> usize {
        (self.0 >> 1) as usize
    }
}

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Want {
    Block(Class),
    /// A run of units that begins at a multiple of so many.
    Long {
        units: u32,
        align: usize,
        /// In place of a span of blocks: a slab for it is no longer than it.
        is_last_resort: bool,
    },
}

impl Want {
    pub(super) const fn kind(self) -> Kind {
        match self {
            Self::Block(class) => Kind::block(class),
            Self::Long { units, .. } => Kind::long(units),
        }
    }

    /// How much of a slab it takes at least: a block, its whole span.
    pub(super) fn slab_bytes(self) -> usize {
        match self {
            Self::Block(class) => class.span_units() * UNIT,
            Self::Long { units, .. } => units as usize * UNIT,
        }
    }
}

/// A slab of a pool. The only kind that is published.
pub(super) type Slab = slab::Slab<Depot>;

/// The slab that the address lies in, if it is one's; dangling if the slab has gone since.
#[inline(always)]
pub(super) fn slab_at(address: usize) -> Option<NonNull<Slab>> {
    map::find(address).map(NonNull::cast)
}

/// A pool without its registrars' types.
pub(super) struct Depot {
    id: PoolId,
    /// The gate's word: a forked child finds it wiped.
    mark: ForkMark,
    barriers: Barriers,
    bounds: Bounds,
    devices: ForeignPart<Arc<dyn Devices>>,
    pub(super) allowance: ForEachPin,
    /// Rank 1, alone: nothing else is locked and no device called under it.
    state: Mutex<State>,
    /// A slab came or did not, or one is gone or may go. A thread that waits for a buffer that some slab can
    /// hold sleeps in the [`Queue`].
    pub(super) changed: Condvar,
    lost_bytes: AtomicUsize,
    me: Weak<Depot>,
}

pub(super) struct State {
    space: Space,
    slabs: Vec<Option<Arc<Slab>>>,
    /// Bytes of slabs, those that are being made or given back included.
    registered: usize,
    /// Slabs in no list any more that are still to be deregistered, and unmapped.
    leaving: usize,
    /// Whether a thread is making a slab; others that want one wait for it.
    pub(super) growing: bool,
    /// Threads that wait for a buffer that some slab can hold. As long as any does, the gate is closed.
    pub(super) queue: Queue,
    /// Threads that wait until there is a slab that can hold the buffer; they delay no other.
    pub(super) apart: usize,
    /// Those of them that would make it. As long as there are any, the gate is closed: what is put
    /// back may make room for it.
    pub(super) makers: usize,
    /// Whether a slab became empty, or was not lent because of those in the queue, since other drawers were last told.
    untold: bool,
    /// Whether a thread was refused a slab because what is empty was kept for those in the queue.
    withheld: bool,
    /// How often there has been more room for a slab than before.
    pub(super) room_made: u64,
    /// How often that was the pool's own.
    pub(super) own_room_made: u64,
    /// Whether the pool's handle is gone.
    closed: bool,
    /// The magazines of all threads, and those that no thread owns.
    hands: Vec<Arc<Hand>>,
    unowned: Vec<Arc<Hand>>,
    counts: Counts,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    grown: u64,
    trimmed: u64,
    refused: u64,
    visits: u64,
    raids: u64,
    failed_deregistrations: u64,
    refused_puts: u64,
    panics_kept_back: u64,
}

pub(super) type Guard<'d> = MutexGuard<'d, State>;

/// This process is a forked child by now: a thread that does not exist here may hold the pool's lock, and what was
/// being made or given back is the parent's.
pub(super) struct Forked;

impl From<Forked> for AllocateError {
    fn from(Forked: Forked) -> Self {
        Self::Forked
    }
}

/// What was found, with the pool's lock; or nothing, because a device or the budget has forked.
pub(super) type Found<'d, T> = Result<(Guard<'d>, T), Forked>;

impl Depot {
    pub(super) fn new(
        bounds: Bounds,
        devices: Arc<dyn Devices>,
        allowance: ForEachPin,
    ) -> Result<Arc<Self>, PoolError> {
        let devices = ForeignPart::new(devices);
        let id = PoolId::next();
        let mark = ForkMark::new(id.0).map_err(|errno| PoolError::ForkMark { errno: errno.0 })?;
        prepare_for_forks(bounds.config.pages);
        let depot = Arc::new_cyclic(|me| Self {
            id,
            mark,
            barriers: membarrier::barriers(),
            bounds,
            devices,
            allowance,
            state: Mutex::new(State::new()),
            changed: Condvar::new(),
            lost_bytes: AtomicUsize::new(0),
            me: Weak::clone(me),
        });
        depot.allowance.attach(depot.weak());
        Ok(depot)
    }

    #[inline(always)]
    pub(super) const fn id(&self) -> PoolId {
        self.id
    }

    #[inline(always)]
    pub(super) fn gate(&self) -> Gate<'_> {
        Gate::new(self.mark.word(), self.id.0, self.barriers)
    }

    pub(super) fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    pub(super) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.me)
    }

    /// Not in a forked child.
    pub(super) fn lock(&self) -> Guard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`lock`](Self::lock), behind calls of devices and the budget, any of which may fork.
    pub(super) fn lock_again(&self) -> Result<Guard<'_>, Forked> {
        if self.is_forked() { Err(Forked) } else { Ok(self.lock()) }
    }

    pub(super) fn is_forked(&self) -> bool {
        self.gate().is_wiped()
    }

    // --- magazines -------------------------------------------------------------------------------

    /// Magazines for a thread; `None` in a forked child, where the lock may be held for ever.
    pub(super) fn adopt_hand(&self) -> Option<Arc<Hand>> {
        if self.is_forked() {
            return None;
        }
        let unowned = self.lock().unowned.pop();
        Some(unowned.unwrap_or_else(|| {
            let hand = Arc::new(Hand::new());
            self.lock().hands.push(Arc::clone(&hand));
            hand
        }))
    }

    /// Takes back the magazines of a thread that ends, and what is in them.
    pub(super) fn retire_hand(&self, hand: &Arc<Hand>) {
        if self.is_forked() {
            return;
        }
        let mut state = self.lock();
        let emptied = state.empty_hand(hand);
        (0..CLASSES).for_each(|size| hand.allow(size, 0));
        state.unowned.push(Arc::clone(hand));
        self.after_puts(state, emptied);
    }

    /// Gives what a raid has left in these magazines, because it found their owner busy, to those that wait. Called by the
    /// owner. An empty slab waits for the next put to be noticed, because nothing that may panic is called here while
    /// the owner has a block; of a pool whose handle is gone no thread takes any.
    pub(super) fn hand_over(&self, hand: &Hand) {
        if self.is_forked() {
            return;
        }
        let mut state = self.lock();
        hand.end_recall();
        if state.closed {
            let emptied = state.empty_hand(hand);
            self.after_puts(state, emptied);
        } else if state.has_waiters() {
            state.empty_hand(hand);
            self.wake(&state);
        }
    }

    /// Counts a panic that has nowhere to go.
    pub(super) fn keep_panic_back(&self) {
        if !self.is_forked() {
            self.lock().counts.panics_kept_back += 1;
        }
    }

    /// Has every thread's magazines emptied; how many blocks that gave.
    ///
    /// The gate stays closed if a thread waits.
    pub(super) fn raid(&self, state: &mut State) -> usize {
        let worth_it = state.hands.iter().any(|hand| hand_bytes(hand) > 0);
        if !worth_it && !state.has_waiters() {
            return 0;
        }
        let emptied = self.empty_hands(state);
        state.counts.raids += u64::from(emptied.is_some());
        let moved = emptied.unwrap_or(0);
        self.open_unless_awaited(state);
        if moved > 0 {
            self.wake(state);
        }
        moved
    }

    /// Closes the gate and takes all back of the magazines of every thread that is not in the middle of them; how many
    /// blocks. The others hand over what they have. `None` if the system had no barrier to offer.
    fn empty_hands(&self, state: &mut State) -> Option<usize> {
        let hands = state.hands.clone();
        hands.iter().for_each(|hand| hand.recall());
        self.gate().close().then(|| {
            let mut moved = 0;
            for hand in hands.iter().filter(|hand| is_quiet(hand)) {
                hand.end_recall();
                moved += (0..CLASSES).map(|size| hand.count(size)).sum::<usize>();
                state.empty_hand(hand);
            }
            moved
        })
    }

    /// Not that of a pool whose handle is gone, where every buffer that comes back has to be seen.
    pub(super) fn open_unless_awaited(&self, state: &State) {
        if !state.has_waiters() && !state.closed {
            self.gate().open();
        }
    }

    /// Has those look again for whom it may be that something has come back.
    pub(super) fn wake(&self, state: &State) {
        state.queue.wake_first();
        if state.makers > 0 {
            self.changed.notify_all();
        }
    }

    /// Fills half of what a thread may cache of a size, and allows it more from visit to
    /// visit. While a thread waits none hoards.
    pub(super) fn fill_hand(&self, state: &mut State, class: Class, hand: &Hand) {
        if state.has_waiters() {
            return;
        }
        self.allow_more(state, class, hand);
        let size = class.index();
        for _ in hand.count(size)..hand.allowed(size) as usize / 2 {
            let Some(block) = state.take(Want::Block(class)) else { return };
            // SAFETY: the owner calls, with the lock held.
            if !unsafe { hand.put_locked(size, block) } {
                state.put(block);
                return;
            }
        }
    }

    /// Doubles what a thread may cache of a size, as long as all sizes together stay
    /// within the thread's bytes; else takes it from the size that has the most.
    fn allow_more(&self, state: &mut State, class: Class, hand: &Hand) {
        let size = class.index();
        let allowed = hand.allowed(size);
        let wanted = (allowed * 2).clamp(2, MAGAZINE_BLOCKS);
        let mut room = self.hand_room(hand) / class.bytes();
        if room == 0 && allowed == 0 {
            halve_largest(state, hand);
            room = self.hand_room(hand) / class.bytes();
        }
        let more = wanted.saturating_sub(allowed).min(u32::try_from(room).unwrap_or(u32::MAX));
        hand.allow(size, allowed + more);
    }

    /// How many more bytes a thread could be allowed to cache.
    fn hand_room(&self, hand: &Hand) -> usize {
        let allowed = |class: Class| hand.allowed(class.index()) as usize * class.bytes();
        let all: usize = classes().map(allowed).sum();
        self.bounds.config.thread_cache_bytes.saturating_sub(all)
    }

    // --- putting ---------------------------------------------------------------------------------

    /// Takes a buffer back by the slow way, with half of the thread's magazine if that is full.
    ///
    /// In a forked child nothing happens: the buffer is the parent's.
    pub(super) fn put(&self, block: NonNull<u8>, kind: Kind, hand: Option<&Hand>) {
        if self.is_forked() {
            return;
        }
        let mut state = self.lock();
        state.note_visit();
        let emptied = match (kind.class(), hand) {
            (Some(class), Some(hand)) if !state.has_waiters() && !state.closed => {
                self.put_at_hand(&mut state, block, class, hand)
            }
            // What the thread has cached of a pool that is gone, and was in the midst of when it went.
            (_, Some(hand)) if state.closed => state.empty_hand(hand) | state.put(block),
            _ => state.put(block),
        };
        self.after_puts(state, emptied);
    }

    /// Makes room in a full magazine; whether a slab became empty.
    fn put_at_hand(
        &self,
        state: &mut State,
        block: NonNull<u8>,
        class: Class,
        hand: &Hand,
    ) -> bool {
        self.allow_more(state, class, hand);
        let (size, allowed) = (class.index(), hand.allowed(class.index()) as usize);
        let mut emptied = false;
        if hand.count(size) >= allowed {
            emptied = state.shorten(hand, size, allowed / 2);
        }
        // SAFETY: the owner calls, with the lock held; the block is the caller's.
        let kept = unsafe { hand.put_locked(size, block) };
        emptied | (!kept && state.put(block))
    }

    /// Wakes who waits first, and gives back empty slabs that are too many.
    pub(super) fn after_puts(&self, mut state: Guard<'_>, emptied: bool) {
        self.wake(&state);
        let surplus = if emptied { self.surplus(&mut state) } else { Vec::new() };
        let idle = self.take_untold_idle(&mut state);
        drop(state);
        self.note_idle(idle);
        self.give_back(surplus);
    }

    /// What there is to tell the budget of. Slabs are not counted where no other drawer waits.
    pub(super) fn take_untold_idle(&self, state: &mut State) -> Option<Amount> {
        if self.allowance.is_awaited() { state.take_untold_idle() } else { None }
    }

    /// Tells the budget of slabs that are empty, if there are any that it was not told of.
    pub(super) fn note_idle(&self, idle: Option<Amount>) {
        if let Some(idle) = idle {
            self.allowance.note_idle(idle);
        }
    }

    /// Takes empty slabs that are too many out of all lists, unless one may be what a thread waits
    /// for.
    pub(super) fn surplus(&self, state: &mut State) -> Vec<Arc<Slab>> {
        let keep = if state.closed { 0 } else { self.bounds.config.idle_bytes };
        if state.queue.is_empty() { state.remove_empty(keep, 0) } else { Vec::new() }
    }

    // --- growing and trimming --------------------------------------------------------------------

    /// Makes the slab that suits, or else the largest that can be had and holds what is wanted. Where a device has no
    /// room for one, other drawers of the budget are asked first. Before the shortest is refused for want of room, empty
    /// slabs go, as in [`reserve`](Self::reserve). A block of it.
    pub(super) fn grow(
        &self,
        want: Want,
        seat: Option<&Seat>,
        tries: &mut Tries,
    ) -> Result<Option<NonNull<u8>>, AllocateError> {
        let mut reserved = match self.reserve(want, seat)? {
            Room::Reserved(reserved) => reserved,
            Room::NotNeeded(block) => return Ok(Some(block)),
        };
        let mut recalls = 0..RECALLS;
        loop {
            let error = match self.make_slab(reserved.bytes, want) {
                Ok(block) => {
                    reserved.keep();
                    return Ok(block);
                }
                Err(error) => error,
            };
            tries.gave_back += u32::from(!matches!(error, AllocateError::Denied { .. }));
            self.lock_again()?.counts.refused += 1;
            if !error.is_about_room() {
                return Err(error);
            }
            if recalls.next().is_some()
                && self.make_room_on_device(&error, reserved.bytes, tries)?
            {
                continue;
            }
            let smaller = self.bounds.smaller(reserved.bytes, want.slab_bytes());
            match smaller.filter(|_| error.is_about_bytes()) {
                Some(smaller) => reserved.shrink(smaller),
                None => match self.give_empty_back(want, seat)? {
                    Emptied::Took(block) => return Ok(Some(block)),
                    Emptied::GaveBack => {}
                    Emptied::Nothing => return Err(error),
                },
            }
        }
    }

    /// The budget hears of each refusal of a device: it may have to adapt. Its listeners hear of the first, because they
    /// may have buffers of this pool, and what they put back would have it tried again, and told again. True if other drawers
    /// gave something back for a slab of `bytes`. No lock is held, and its grant has come back.
    fn make_room_on_device(
        &self,
        error: &AllocateError,
        bytes: usize,
        tries: &mut Tries,
    ) -> Result<bool, Forked> {
        let &AllocateError::Register(error) = error else { return Ok(false) };
        let is_first = !std::mem::replace(&mut tries.told, true);
        let gave = self.allowance.make_room_on_device(error, bytes, is_first);
        // Forked by what gave something back.
        if self.is_forked() { Err(Forked) } else { Ok(gave) }
    }

    /// Takes a block of what threads cache, or gives all empty slabs back, which do not do then. Not if another thread
    /// waits, which may have been woken for one. The caller settles, behind its growth.
    fn give_empty_back(&self, want: Want, seat: Option<&Seat>) -> Result<Emptied, Forked> {
        let mut state = self.lock_again()?;
        if !state.none_is_ahead_of(seat) {
            state.withheld = true;
            return Ok(Emptied::Nothing);
        }
        self.raid(&mut state);
        if let Some(block) = state.take(want) {
            return Ok(Emptied::Took(block));
        }
        let empty = state.remove_empty(0, 0);
        drop(state);
        let were_any = !empty.is_empty();
        if let Err(panicked) = self.give_back_unsettled(empty) {
            panicked.resume_unless_unwinding();
        }
        Ok(if were_any { Emptied::GaveBack } else { Emptied::Nothing })
    }

    /// Reserves the bytes of the next slab within the pool's own budget; where they lack, empty
    /// slabs, none of which is long enough, go first.
    fn reserve(&self, want: Want, seat: Option<&Seat>) -> Result<Room<'_>, AllocateError> {
        let mut state = self.lock_again()?;
        if self.next_slab(&state, want).is_none() {
            drop(state);
            if let Emptied::Took(block) = self.give_empty_back(want, seat)? {
                return Ok(Room::NotNeeded(block));
            }
            state = self.lock_again()?;
        }
        let next = self.next_slab(&state, want);
        let bytes = next.ok_or_else(|| AllocateError::Exhausted(self.standing(&state, want)))?;
        state.registered += bytes;
        Ok(Room::Reserved(Reserved { depot: self, bytes }))
    }

    fn next_slab(&self, state: &State, want: Want) -> Option<usize> {
        self.next_slab_beside(state.registered, want)
    }

    fn next_slab_beside(&self, registered: usize, want: Want) -> Option<usize> {
        let room = self.bounds.config.max_bytes.saturating_sub(registered);
        match want {
            Want::Long { is_last_resort: true, .. } => {
                let least = self.bounds.slab_holding(want.slab_bytes());
                (least <= room).then_some(least)
            }
            _ => self.bounds.next_slab(want.slab_bytes(), registered, room),
        }
    }

    pub(super) fn standing(&self, state: &State, want: Want) -> PoolExhausted {
        let wanted = want.kind().bytes();
        let max_bytes = self.bounds.config.max_bytes;
        PoolExhausted { wanted, registered: state.registered, max_bytes }
    }

    /// Whether the pool's own budget allows a slab once those that are empty have gone.
    pub(super) fn could_grow(&self, state: &State, want: Want) -> bool {
        let remaining = state.registered - state.idle_bytes();
        self.next_slab_beside(remaining, want).is_some()
    }

    /// Maps and registers a slab of reserved bytes, and takes a block. Nothing is left behind when that fails.
    fn make_slab(&self, bytes: usize, want: Want) -> Result<Option<NonNull<u8>>, AllocateError> {
        // There is one: every depot is used through a reference that counts.
        let me = self.me.upgrade().ok_or(AllocateError::Denied { bytes, available: 0 })?;
        let grant = Grant::of(self, bytes)?;
        let memory = Memory::new(bytes, self.bounds.config.pages).map_err(|error| {
            AllocateError::Memory { operation: error.operation, bytes, errno: error.errno }
        })?;
        let handles = self.devices.register(&memory, self.bounds.config.access);
        if self.is_forked() {
            std::mem::forget((memory, handles));
            return Err(Forked.into());
        }
        let block = self.install(me, memory, handles.map_err(AllocateError::Register)?, want)?;
        grant.keep();
        Ok(block)
    }

    /// Adds a slab and takes a block, with the lock held from one to the other: a slab that were empty for a moment
    /// might be trimmed, recalled or given back behind another thread's put, again and again.
    fn install(
        &self,
        me: Arc<Self>,
        memory: Memory,
        handles: Handles,
        want: Want,
    ) -> Result<Option<NonNull<u8>>, AllocateError> {
        let mut state = self.lock();
        let free = state.slabs.iter().position(Option::is_none);
        let index = free.unwrap_or(state.slabs.len());
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        let slab = Slab::new(number, memory, handles, me);
        if !slab.publish() {
            drop(state);
            // It was refused for its address; that the device refuses too changes nothing.
            // SAFETY: it was never found, so nothing of it was handed out, and it goes here.
            let _ = unsafe { self.deregister(&slab) };
            let bytes = slab.bytes();
            if self.is_forked() {
                std::mem::forget(slab);
                return Err(Forked.into());
            }
            return Err(AllocateError::Memory { operation: "mmap", bytes, errno: libc::EFAULT });
        }
        state.space.add(number, slab.units());
        if index == state.slabs.len() {
            state.slabs.push(None);
        }
        state.slabs[index] = Some(slab);
        state.counts.grown += 1;
        // It may be left empty: what came back meanwhile is taken before.
        state.untold = true;
        Ok(state.take(want))
    }

    /// Empties all magazines, then gives empty slabs back while more than `down_to` bytes are
    /// registered, and no thread waits for what is in them. How many bytes that were.
    pub(super) fn trim(&self, down_to: usize) -> usize {
        if self.is_forked() {
            return 0;
        }
        let mut state = self.lock();
        self.raid(&mut state);
        let unawaited = state.queue.is_empty();
        let empty = if unawaited { state.remove_empty(0, down_to) } else { Vec::new() };
        let idle = self.take_untold_idle(&mut state);
        drop(state);
        self.note_idle(idle);
        let bytes = empty.iter().map(|slab| slab.bytes()).sum();
        self.give_back(empty);
        bytes
    }

    /// Deregisters slabs that are in no list any more, without the lock.
    ///
    /// Others may wait for a slab to be gone, so until all are, nothing is called but their devices, and
    /// the budget, which calls no other code: a listener may ask this pool for something, and must not
    /// wait for its own thread. Whichever of them panics, all slabs go and the books are kept; then the panic goes
    /// on.
    ///
    /// The caller holds the depot by a reference that counts: the last slab takes its own along.
    pub(super) fn give_back(&self, slabs: Vec<Arc<Slab>>) {
        if slabs.is_empty() {
            return;
        }
        let given_back = self.give_back_unsettled(slabs);
        if let Err(panicked) = given_back.and(self.settle()) {
            panicked.resume_unless_unwinding();
        }
    }

    /// Has the budget call its listeners. Not in a forked child.
    fn settle(&self) -> Result<(), Panicked> {
        if self.is_forked() { Ok(()) } else { foreign::call(|| self.allowance.settle()) }
    }

    /// As [`give_back`](Self::give_back), and no listener is called. The first panic, when all have gone.
    fn give_back_unsettled(&self, slabs: Vec<Arc<Slab>>) -> Result<(), Panicked> {
        let before = LEAVING.get();
        LEAVING.set(before + slabs.len());
        let mut panicked = None;
        let mut slabs = slabs.into_iter();
        for slab in slabs.by_ref() {
            panicked = panicked.or(self.give_one_back(slab).err());
            if self.is_forked() {
                break;
            }
        }
        // In a child that was forked in between the rest is the parent's.
        slabs.for_each(std::mem::forget);
        LEAVING.set(before);
        panicked.map_or(Ok(()), Err)
    }

    /// As far as this process goes on: in a child that is forked meanwhile nothing more happens.
    fn give_one_back(&self, slab: Arc<Slab>) -> Result<(), Panicked> {
        let bytes = slab.bytes();
        // SAFETY: it is in no list any more, which only an empty slab leaves, once.
        let deregistered = foreign::call(|| unsafe { self.deregister(&slab) });
        if self.is_forked() {
            std::mem::forget(slab);
            return deregistered.map(drop);
        }
        drop(slab);
        // Before any listener is called, so that a thread that waited finds it granted back.
        let granted_back = foreign::call(|| self.allowance.give_back(bytes));
        if !self.is_forked() {
            self.has_left(bytes, !matches!(deregistered, Ok(Ok(()))));
        }
        deregistered.map(drop).and(granted_back)
    }

    /// Ends a slab's registrations; its memory goes when the slab is dropped.
    ///
    /// # Safety
    ///
    /// Nothing of the slab is handed out, or will be, and this is called once.
    unsafe fn deregister(&self, slab: &Slab) -> Result<(), DeregisterError> {
        match slab.range() {
            // SAFETY: these devices gave the handles for this range; the rest is the caller's promise.
            Some(range) => unsafe { self.devices.deregister(slab.handles(), range) },
            None => Ok(()),
        }
    }

    /// A slab is gone.
    fn has_left(&self, bytes: usize, failed: bool) {
        LEAVING.set(LEAVING.get() - 1);
        let mut state = self.lock();
        state.registered -= bytes;
        state.leaving -= 1;
        state.counts.trimmed += 1;
        state.note_own_room();
        state.queue.wake_first();
        state.counts.failed_deregistrations += u64::from(failed);
        self.changed.notify_all();
    }

    /// Waits until a slab is gone that another thread is giving back; false if there is none.
    fn watch_one_leave(&self, state: Guard<'_>) -> bool {
        let before = state.counts.trimmed;
        if state.leaving == 0 || LEAVING.get() > 0 {
            return false;
        }
        let still = |state: &mut State| state.leaving > 0 && state.counts.trimmed == before;
        drop(self.changed.wait_while(state, still));
        true
    }

    /// The pool's handle is gone: no thread takes any more, and each slab goes with its last buffer, the
    /// depot, its registrar and its budget with the last slab.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        // The gate stays closed. A buffer may be coming back by its bare address on another thread; what
        // that has cached, if it is in the midst of it now, it hands over.
        self.empty_hands(&mut state);
        let empty = state.remove_empty(0, 0);
        drop(state);
        let given_back = foreign::call(|| self.give_back(empty));
        while self.lock_again().is_ok_and(|state| self.watch_one_leave(state)) {}
        if let Err(panicked) = given_back {
            panicked.resume_unless_unwinding();
        }
    }

    // --- figures ---------------------------------------------------------------------------------

    /// Counts a buffer that will not come back.
    pub(super) fn lose(&self, kind: Kind) {
        // Relaxed: a counter.
        self.lost_bytes.fetch_add(kind.bytes(), Ordering::Relaxed);
    }

    pub(super) fn statistics(&self) -> PoolStatistics {
        if self.is_forked() {
            return PoolStatistics::default();
        }
        let state = self.lock();
        let mut statistics = state.statistics();
        // Relaxed: a counter.
        statistics.lost_bytes = self.lost_bytes.load(Ordering::Relaxed);
        statistics
    }
}

/// What is unused goes to the drawer that it is due to: empty slabs, the shortest that suffices first, and if
/// they do not suffice those that become empty when threads give up what they cache.
///
/// A pool for whose buffers a thread waits lends nothing. Called by other drawers of a shared
/// budget with no lock held; the pool's own lock is held to take slabs out of its lists, never while
/// they are deregistered.
impl Lender for Depot {
    fn give_back(&self, missing: Amount) -> bool {
        if self.is_forked() {
            return false;
        }
        let mut state = self.lock();
        let lends = state.queue.is_empty();
        state.untold |= !lends;
        let missing = self.allowance.in_slabs(missing);
        let lent = if lends { self.take_out(&mut state, missing) } else { Vec::new() };
        if lent.is_empty() {
            return self.watch_one_leave(state);
        }
        drop(state);
        self.give_back(lent);
        true
    }

    /// A thread that waits to make a slab tries again.
    fn room_made(&self) {
        if self.is_forked() {
            return;
        }
        let mut state = self.lock();
        state.room_made += 1;
        self.wake(&state);
    }
}

impl Depot {
    fn take_out(&self, state: &mut State, missing: Amount) -> Vec<Arc<Slab>> {
        let (mut lent, rest) = state.remove_for(missing);
        if rest != Amount::ZERO && self.raid(state) > 0 {
            lent.extend(state.remove_for(rest).0);
        }
        lent
    }
}

impl fmt::Debug for Depot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Depot").field("id", &self.id).field("bounds", &self.bounds).finish()
    }
}

/// Whether the pool grows, and the calling thread makes a slab, of this pool or another: what that calls does not
/// wait for this pool.
pub(super) fn grows_on_this_thread(state: &State) -> bool {
    state.growing && MAKING.get() > 0
}

/// What a request may have besides what it wants, and what has come of its tries.
pub(super) struct Tries {
    /// A run that does as well, for one that waits: where no span of blocks is free, one buffer may be.
    pub(super) run: Option<Want>,
    /// It has the run, not what it wants.
    pub(super) took_run: bool,
    /// So many times what was granted came back unused.
    pub(super) gave_back: u32,
    /// Listeners of the budget were told that a device has refused one. They hear it once for a request.
    told: bool,
}

impl Tries {
    pub(super) const fn of(run: Option<Want>) -> Self {
        Self { run, took_run: false, gave_back: 0, told: false }
    }
}

/// How often others are asked to give back for a slab that a device refuses: what they give may be of another device, and
/// each try maps a slab anew.
const RECALLS: u32 = 64;

/// A thread is making a slab; dropped when it is done, however that ends.
pub(super) struct Growth<'d>(&'d Depot);

thread_local! {
    /// How many slabs this thread is making, each asked for by what the one before has called.
    static MAKING: Cell<u32> = const { Cell::new(0) };
    /// How many slabs this thread is giving back, for which it cannot wait.
    static LEAVING: Cell<usize> = const { Cell::new(0) };
}

impl<'d> Growth<'d> {
    pub(super) fn begin(depot: &'d Depot) -> Self {
        MAKING.set(MAKING.get() + 1);
        Self(depot)
    }
}

impl Drop for Growth<'_> {
    fn drop(&mut self) {
        MAKING.set(MAKING.get() - 1);
        let Ok(mut state) = self.0.lock_again() else { return };
        state.growing = false;
        state.queue.wake_first();
        self.0.changed.notify_all();
    }
}

/// Has the budget call its listeners when it is dropped, however what came before has ended.
pub(super) struct Settles<'d>(pub(super) &'d Depot);

impl Drop for Settles<'_> {
    fn drop(&mut self) {
        if let Err(panicked) = self.0.settle() {
            panicked.resume_unless_unwinding();
        }
    }
}

/// What became of the empty slabs that a thread found in its way as it was to make one.
enum Emptied {
    /// What threads had cached made one of them do: a block of it.
    Took(NonNull<u8>),
    GaveBack,
    /// There were none, or another thread waits for them.
    Nothing,
}

/// What there is for a slab within the pool's own budget.
enum Room<'d> {
    Reserved(Reserved<'d>),
    /// A block came back.
    NotNeeded(NonNull<u8>),
}

/// Bytes that count as registered while a slab of them is made; no longer, unless they are kept.
struct Reserved<'d> {
    depot: &'d Depot,
    bytes: usize,
}

impl Reserved<'_> {
    /// To fewer bytes than before.
    fn shrink(&mut self, bytes: usize) {
        self.depot.lock().registered -= self.bytes - bytes;
        self.bytes = bytes;
    }

    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if let Ok(mut state) = self.depot.lock_again() {
            state.registered -= self.bytes;
        }
    }
}

/// Bytes granted, given back unless they are kept. A forked child gives nothing back. The growth settles.
struct Grant<'d> {
    depot: &'d Depot,
    bytes: usize,
}

impl<'d> Grant<'d> {
    fn of(depot: &'d Depot, bytes: usize) -> Result<Self, AllocateError> {
        // Forked in what was given back for it: the allowance is the parent's.
        if depot.is_forked() {
            return Err(Forked.into());
        }
        let granted = depot.allowance.grant(bytes);
        if depot.is_forked() {
            return Err(Forked.into());
        }
        match granted {
            Ok(()) => Ok(Self { depot, bytes }),
            Err(Denied { available }) => Err(AllocateError::Denied { bytes, available }),
        }
    }

    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        if self.depot.is_forked() {
            return;
        }
        let allowance = &self.depot.allowance;
        if let Err(panicked) = foreign::call(|| allowance.give_back_unused(self.bytes)) {
            panicked.resume_unless_unwinding();
        }
    }
}

impl State {
    fn new() -> Self {
        Self {
            space: Space::new(),
            slabs: Vec::new(),
            registered: 0,
            leaving: 0,
            growing: false,
            queue: Queue::new(),
            apart: 0,
            makers: 0,
            untold: false,
            withheld: false,
            room_made: 0,
            own_room_made: 0,
            closed: false,
            hands: Vec::new(),
            unowned: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// A thread has come for something that it could not have without the lock.
    pub(super) fn note_visit(&mut self) {
        self.counts.visits += 1;
    }

    pub(super) fn take(&mut self, want: Want) -> Option<NonNull<u8>> {
        let place = match want {
            Want::Block(class) => self.space.take(class),
            Want::Long { units, align, .. } => self.space.take_long(units as usize, align),
        }?;
        self.slabs.get(place.slab as usize)?.as_ref()?.hand_out(place, want.kind())
    }

    fn has_waiters(&self) -> bool {
        !self.queue.is_empty() || self.makers > 0
    }

    fn none_is_ahead_of(&self, seat: Option<&Seat>) -> bool {
        self.queue.is_empty() || seat.is_some_and(|seat| self.queue.is_first(seat))
    }

    /// Whether a slab is long enough, used or not.
    pub(super) fn can_hold(&self, want: Want) -> bool {
        self.slabs.iter().flatten().any(|slab| slab.bytes() >= want.slab_bytes())
    }

    fn idle_bytes(&self) -> usize {
        self.space.empty_slabs().map(|number| self.slab_bytes(number)).sum()
    }

    /// What is free is for the threads that wait, the first of them first.
    pub(super) fn take_if_unawaited(&mut self, want: Want) -> Option<NonNull<u8>> {
        if self.queue.is_empty() { self.take(want) } else { None }
    }

    /// Takes a block back; whether that has emptied its slab.
    pub(super) fn put(&mut self, block: NonNull<u8>) -> bool {
        let address = block.addr().get();
        // SAFETY: whatever is put was handed out of a slab, which stays as long as it is out; and
        // slabs go with the lock held. A pointer that never was a buffer is the caller's breach.
        let slab = slab_at(address).map(|slab| unsafe { slab.as_ref() });
        let put = slab.and_then(|slab| slab.place_of(address)).map(|place| self.space.put(place));
        self.counts.refused_puts += u64::from(put.is_none_or(|put| put == Put::NotInUse));
        if put == Some(Put::SlabEmpty) {
            self.untold = true;
            self.note_own_room();
        }
        put == Some(Put::SlabEmpty)
    }

    /// What was kept for the queue is room for a slab when the last thread has left that for good. (Not when one steps aside: two
    /// that try in vain would have each other try again and again.)
    pub(super) fn release_withheld(&mut self) {
        if self.withheld && self.queue.is_empty() {
            self.withheld = false;
            self.note_own_room();
        }
    }

    /// What other drawers would be lent, if there is something of which they have not been told.
    fn take_untold_idle(&mut self) -> Option<Amount> {
        if !self.queue.is_empty() || !std::mem::take(&mut self.untold) {
            return None;
        }
        let regions = self.space.empty_slabs().count();
        (regions > 0).then(|| Amount { bytes: self.idle_bytes(), regions })
    }

    /// There is more room for a slab than before, whatever the budget says.
    fn note_own_room(&mut self) {
        self.room_made += 1;
        self.own_room_made += 1;
    }

    /// Takes blocks back until `keep` are cached; whether that has emptied a slab.
    ///
    /// The owner calls, or the hand is one that [`empty_hand`](Self::empty_hand) may empty.
    fn shorten(&mut self, hand: &Hand, size: usize, keep: usize) -> bool {
        let mut emptied = false;
        while hand.count(size) > keep {
            // SAFETY: the lock is held, and the magazines are the caller's to reach into.
            let Some(block) = (unsafe { hand.take_locked(size) }) else { break };
            emptied |= self.put(block);
        }
        emptied
    }

    /// Takes all back of magazines that are the caller's own, quiet behind a closed gate, or of a
    /// pool that is not used any more.
    fn empty_hand(&mut self, hand: &Hand) -> bool {
        let emptied = (0..CLASSES).map(|size| self.shorten(hand, size, 0));
        emptied.fold(false, std::ops::BitOr::bitor)
    }

    /// Takes empty slabs out of all lists, beyond `keep` bytes of them and as long as more than
    /// `down_to` bytes are registered.
    fn remove_empty(&mut self, keep: usize, down_to: usize) -> Vec<Arc<Slab>> {
        let numbers: Vec<u32> = self.space.empty_slabs().collect();
        let mut idle = self.idle_bytes();
        let mut registered = self.registered;
        let mut removed = Vec::new();
        for number in numbers {
            let bytes = self.slab_bytes(number);
            if idle <= keep || registered <= down_to {
                break;
            }
            idle -= bytes;
            registered -= bytes;
            removed.extend(self.remove(number));
        }
        removed
    }

    /// Takes empty slabs out of all lists, to make up for what is `missing`; and what is missing
    /// still.
    fn remove_for(&mut self, mut missing: Amount) -> (Vec<Arc<Slab>>, Amount) {
        let mut removed = Vec::new();
        while missing != Amount::ZERO
            && let Some(slab) = self.best_to_give(missing.bytes).and_then(|it| self.remove(it))
        {
            missing = missing - Amount::one(slab.bytes());
            removed.push(slab);
        }
        (removed, missing)
    }

    /// The shortest empty slab of so many bytes, else the longest there is.
    fn best_to_give(&self, bytes: usize) -> Option<u32> {
        let rank = |number: &u32| match self.slab_bytes(*number) {
            enough if enough >= bytes => (0, enough),
            less => (1, usize::MAX - less),
        };
        self.space.empty_slabs().min_by_key(rank)
    }

    fn slab_bytes(&self, number: u32) -> usize {
        self.slabs.get(number as usize).and_then(Option::as_ref).map_or(0, |slab| slab.bytes())
    }

    fn remove(&mut self, number: u32) -> Option<Arc<Slab>> {
        let slab = self.slabs.get_mut(number as usize)?;
        if !self.space.remove(number) {
            return None;
        }
        let slab = slab.take()?;
        slab.hide();
        self.leaving += 1;
        Some(slab)
    }

    fn statistics(&self) -> PoolStatistics {
        let by_thread = self.hands.iter().map(|hand| hand_bytes(hand)).filter(|&bytes| bytes > 0);
        let cached_by_thread: Vec<usize> = by_thread.collect();
        let cached_bytes = cached_by_thread.iter().sum();
        let out: usize = classes().map(|class| self.space.blocks_out(class) * class.bytes()).sum();
        let Counts { grown, trimmed, refused, visits, raids, .. } = self.counts;
        let Counts { failed_deregistrations, refused_puts, panics_kept_back, .. } = self.counts;
        let mut statistics = PoolStatistics {
            waiting: self.queue.len() + self.apart,
            in_use_bytes: (out + self.space.long_bytes()).saturating_sub(cached_bytes),
            cached_bytes,
            cached_by_thread,
            grown,
            trimmed,
            refused,
            visits,
            raids,
            failed_deregistrations,
            refused_puts,
            panics_kept_back,
            ..PoolStatistics::default()
        };
        for slab in self.slabs.iter().flatten() {
            statistics.slabs += 1;
            statistics.registered_bytes += slab.bytes();
            slab.page_kinds()
                .into_iter()
                .for_each(|(kind, bytes)| statistics.add_pages(kind, bytes));
        }
        let taken = statistics.in_use_bytes + statistics.cached_bytes;
        statistics.free_bytes = statistics.registered_bytes.saturating_sub(taken);
        statistics
    }
}

/// Every size.
fn classes() -> impl Iterator<Item = Class> {
    (0..CLASSES).filter_map(Class::of_index)
}

fn hand_bytes(hand: &Hand) -> usize {
    classes().map(|class| hand.count(class.index()) * class.bytes()).sum()
}

/// Halves what a thread may cache of the size that may have the most bytes.
fn halve_largest(state: &mut State, hand: &Hand) {
    let bytes = |class: &Class| hand.allowed(class.index()) as usize * class.bytes();
    if let Some(class) = classes().max_by_key(bytes) {
        let (size, half) = (class.index(), hand.allowed(class.index()) / 2);
        // An empty slab waits for the next put to be noticed.
        state.shorten(hand, size, half as usize);
        hand.allow(size, half);
    }
}

/// How often a raid looks for a thread to come out of its magazines before it leaves them alone, and their owner
/// [hands over](Depot::hand_over) what they hold: the thread may have lost its processor there, but it needs it for
/// some nanoseconds only.
const LOOKS: usize = 1000;

fn is_quiet(hand: &Hand) -> bool {
    (0..LOOKS).any(|_| {
        let quiet = hand.are_quiet();
        if !quiet {
            thread::yield_now();
        }
        quiet
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Pool, PoolConfig};
    use crate::registrar::Mlock;

    /// Whatever raids it then: a lender's call, or a thread that ends.
    #[test]
    fn the_gate_of_a_pool_that_is_gone_stays_closed() {
        let pool = Pool::new(Mlock::new().unwrap(), PoolConfig::default()).unwrap();
        let depot = pool.depot().weak().upgrade().unwrap();
        // Relaxed: one thread.
        let is_open = || depot.mark.word().load(Ordering::Relaxed) == depot.id.0;
        depot.open_unless_awaited(&depot.lock());
        assert!(is_open());
        drop(pool);
        assert!(!is_open());
        depot.open_unless_awaited(&depot.lock());
        assert!(!is_open());
    }
}
