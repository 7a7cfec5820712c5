//! A pool, what is asked of it, and the buffers that it hands out.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a buffer is an address in a slab, which its pool keeps
//! as long as it is out; because buffers go from thread to thread; and to say that a buffer is
//! stable memory.

#![allow(unsafe_code)]

use super::allowance::{Allowance, ForEachPin, Granter, Unshared};
use super::classes::{Class, LINE, MAX_ALIGN, UNIT};
use super::config::{Bounds, PoolConfig, WhenExhausted};
use super::depot::{Depot, Slab, Tries, Want, slab_at};
use super::error::{AllocateError, PoolError};
use super::slab::Kind;
use super::statistics::PoolStatistics;
use super::threads;
use crate::budget::{Share, ShareAccount};
use pinfold_core::foreign::ForeignPart;
use pinfold_core::{Access, AddressRange, Registrar, StableBuffer};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Registered memory, handed out in buffers. See the [module](super) for what it costs.
///
/// When a pool is dropped, everything goes back to the system, except slabs with buffers that are still
/// out by their bare address ([`into_raw`](PoolBuffer::into_raw)): they stay mapped and registered until
/// the last comes back ([`deallocate`](super::deallocate)), and then the registrar goes as well. Buffers
/// that were forgotten (`mem::forget`), or handed to a device and never said to be done, never come back:
/// their slab, its registration and the registrar are leaked, because the device may still use them.
///
/// The slabs know the registrar's handles without their type, so neither a pool nor what it hands out becomes one
/// over another registrar by subtyping:
///
/// ```compile_fail,E0308
/// # use pinfold::{Access, AddressRange, DeregisterError, RegisterError, Registrar, RegistrarLimits};
/// # use pinfold::pool::{Pool, PoolBuffer};
/// # use std::{fmt, marker::PhantomData};
/// # struct Takes<T>(fn(T));
/// # impl<T> Clone for Takes<T> { fn clone(&self) -> Self { *self } }
/// # impl<T> Copy for Takes<T> {}
/// # impl<T> fmt::Debug for Takes<T> {
/// #     fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str("Takes") }
/// # }
/// # struct Dev<T>(PhantomData<fn() -> T>);
/// # unsafe impl<T: 'static> Registrar for Dev<T> {
/// #     type Handle = Takes<T>;
/// #     fn limits(&self) -> RegistrarLimits { unimplemented!() }
/// #     unsafe fn register(&self, _: AddressRange, _: Access) -> Result<Takes<T>, RegisterError> { unimplemented!() }
/// #     unsafe fn deregister(&self, _: Takes<T>, _: AddressRange) -> Result<(), DeregisterError> { Ok(()) }
/// # }
/// type General = for<'a> fn(&'a u64);
/// type Special = fn(&'static u64);
/// fn of_another(buffer: PoolBuffer<'_, Dev<General>>) -> PoolBuffer<'_, Dev<Special>> {
///     buffer // `handle` would read another type
/// }
/// ```
///
/// ```compile_fail,E0308
/// # use pinfold::{Access, AddressRange, DeregisterError, RegisterError, Registrar, RegistrarLimits};
/// # use pinfold::pool::{Pool, PoolBuffer};
/// # use std::{fmt, marker::PhantomData};
/// # struct Takes<T>(fn(T));
/// # impl<T> Clone for Takes<T> { fn clone(&self) -> Self { *self } }
/// # impl<T> Copy for Takes<T> {}
/// # impl<T> fmt::Debug for Takes<T> {
/// #     fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str("Takes") }
/// # }
/// # struct Dev<T>(PhantomData<fn() -> T>);
/// # unsafe impl<T: 'static> Registrar for Dev<T> {
/// #     type Handle = Takes<T>;
/// #     fn limits(&self) -> RegistrarLimits { unimplemented!() }
/// #     unsafe fn register(&self, _: AddressRange, _: Access) -> Result<Takes<T>, RegisterError> { unimplemented!() }
/// #     unsafe fn deregister(&self, _: Takes<T>, _: AddressRange) -> Result<(), DeregisterError> { Ok(()) }
/// # }
/// # type General = for<'a> fn(&'a u64);
/// # type Special = fn(&'static u64);
/// fn another(pool: Pool<Dev<General>>) -> Pool<Dev<Special>> {
///     pool
/// }
/// ```
pub struct Pool<R: Registrar> {
    depot: Arc<Depot>,
    registrar: ForeignPart<Arc<R>>,
    handles: PhantomData<SameRegistrar<R>>,
}

/// Invariant in `R`: what is behind a [`Depot`] is of exactly this registrar.
type SameRegistrar<R> = fn(R) -> R;

impl<R: Registrar> Pool<R> {
    /// A pool over one registrar, or over a pair or an array of them. Registers nothing yet.
    ///
    /// # Errors
    ///
    /// [`PoolError`].
    pub fn new(registrar: R, config: PoolConfig) -> Result<Self, PoolError> {
        Self::with_allowance(registrar, config, Arc::new(Unshared))
    }

    /// A pool that draws on a budget that other caches, pools and reservations draw on as well, besides its own
    /// limit.
    ///
    /// # Errors
    ///
    /// [`PoolError`].
    pub fn within(share: Arc<Share>, registrar: R, config: PoolConfig) -> Result<Self, PoolError> {
        let account = ShareAccount::new(share);
        Self::granted_by(registrar, config, Granter::Share(ForeignPart::new(account)))
    }

    /// A pool that asks `allowance` before it pins, besides its own limit: for a budget of the program's own.
    ///
    /// # Errors
    ///
    /// [`PoolError`].
    pub fn with_allowance(
        registrar: R,
        config: PoolConfig,
        allowance: Arc<dyn Allowance>,
    ) -> Result<Self, PoolError> {
        Self::granted_by(registrar, config, Granter::Program(ForeignPart::new(allowance)))
    }

    fn granted_by(registrar: R, config: PoolConfig, granter: Granter) -> Result<Self, PoolError> {
        let registrar = ForeignPart::new(Arc::new(registrar));
        let bounds = Bounds::new(config, registrar.limits())?;
        let devices: Arc<R> = Arc::clone(&registrar);
        let allowance = ForEachPin::new(granter, registrar.pins_per_page());
        let depot = Depot::new(bounds, devices, allowance)?;
        Ok(Self { depot, registrar, handles: PhantomData })
    }

    /// A buffer of `length` bytes, aligned to 64; its contents are whatever they are.
    ///
    /// What happens when nothing is free is
    /// [`PoolConfig::when_exhausted`]'s business.
    ///
    /// # Errors
    ///
    /// [`AllocateError`].
    #[inline]
    pub fn get(&self, length: usize) -> Result<PoolBuffer<'_, R>, AllocateError> {
        // The slow way returns parts: a buffer of which one way writes memory stands in memory on
        // both ways, and is written and read there in pieces of different lengths.
        let (block, kind) = match at_hand(&self.depot, length) {
            Some(found) => found,
            None => self.take_slowly(length)?,
        };
        Ok(PoolBuffer::new(&self.depot, block, length, kind))
    }

    #[cold]
    #[inline(never)]
    fn take_slowly(&self, length: usize) -> Result<(NonNull<u8>, Kind), AllocateError> {
        self.request(length).take()
    }

    /// A buffer of `length` bytes, of which more can be asked.
    pub fn request(&self, length: usize) -> BufferRequest<'_, R> {
        let when = self.depot.bounds().config.when_exhausted;
        BufferRequest { pool: self, length, align: LINE, zeroed: false, when }
    }

    /// Has every thread's cached buffers put back, then returns empty slabs to the system
    /// while more than `down_to` bytes are registered. How many bytes that were.
    pub fn trim(&self, down_to: usize) -> usize {
        self.depot.trim(down_to)
    }

    /// How the pool stands. Takes the pool's lock; all zeros in a forked child.
    pub fn statistics(&self) -> PoolStatistics {
        self.depot.statistics()
    }

    /// The pool's registrar.
    pub fn registrar(&self) -> &R {
        &self.registrar
    }

    /// The pool's settings.
    pub fn config(&self) -> &PoolConfig {
        &self.depot.bounds().config
    }

    /// Whether this process is a forked child of the one that made the pool.
    pub(crate) fn is_forked(&self) -> bool {
        self.depot.gate().is_wiped()
    }

    pub(super) fn depot(&self) -> &Depot {
        &self.depot
    }
}

impl<R: Registrar> Drop for Pool<R> {
    fn drop(&mut self) {
        if !self.is_forked() {
            self.depot.close();
        }
        // Asked again, because what was closed may have forked.
        if self.is_forked() {
            // Another thread of the parent may have been in the midst of it: it is left as it is.
            std::mem::forget(Arc::clone(&self.depot));
        }
    }
}

impl<R: Registrar> fmt::Debug for Pool<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("config", self.config()).finish_non_exhaustive()
    }
}

/// A buffer that is about to be asked for.
#[must_use = "nothing is asked for until `get`"]
pub struct BufferRequest<'p, R: Registrar> {
    pool: &'p Pool<R>,
    length: usize,
    align: usize,
    zeroed: bool,
    when: WhenExhausted,
}

impl<'p, R: Registrar> BufferRequest<'p, R> {
    /// At a multiple of `align` bytes, a power of two up to 2 MiB. Buffers always are at one of
    /// 64.
    pub fn align(self, align: usize) -> Self {
        Self { align, ..self }
    }

    /// Of zeros, up to its length.
    pub fn zeroed(self) -> Self {
        Self { zeroed: true, ..self }
    }

    /// What to do when nothing is free.
    pub fn when_exhausted(self, when: WhenExhausted) -> Self {
        Self { when, ..self }
    }

    /// The buffer.
    ///
    /// # Errors
    ///
    /// [`AllocateError`].
    #[inline]
    pub fn get(self) -> Result<PoolBuffer<'p, R>, AllocateError> {
        let at_hand =
            if self.align == LINE { at_hand(&self.pool.depot, self.length) } else { None };
        let (block, kind) = match at_hand {
            Some(found) => found,
            None => self.take()?,
        };
        let mut buffer = PoolBuffer::new(&self.pool.depot, block, self.length, kind);
        if self.zeroed {
            buffer.fill(0);
        }
        Ok(buffer)
    }

    pub(super) fn take(&self) -> Result<(NonNull<u8>, Kind), AllocateError> {
        let want = self.want()?;
        let depot = self.pool.depot();
        let at_hand = || match want {
            Want::Block(class) => threads::take(depot, class),
            Want::Long { .. } => None,
        };
        let block = at_hand().or_else(|| {
            // Magazines that are this thread's, but not in its table, may have one.
            threads::hand(depot).and_then(|_| at_hand())
        });
        match block {
            Some(block) => Ok((block, want.kind())),
            None => self.take_from(depot, want),
        }
    }

    /// Where there is no room for a span of blocks there may be for one buffer, as a run of its own.
    fn take_from(&self, depot: &Depot, want: Want) -> Result<(NonNull<u8>, Kind), AllocateError> {
        let run = self.run().filter(|run| run.slab_bytes() < want.slab_bytes());
        let mut tries = Tries::of(run);
        let error = match depot.take(want, self.when, threads::hand(depot), &mut tries) {
            Ok(block) => {
                let has = run.filter(|_| tries.took_run).unwrap_or(want);
                return Ok((block, has.kind()));
            }
            Err(error) => error,
        };
        let last = self.last_resort(depot, want, &error).ok_or(error)?;
        // One that has waited waits no longer.
        let when = match self.when {
            WhenExhausted::GrowOrWait(_) => WhenExhausted::GrowOrWait(Duration::ZERO),
            WhenExhausted::Wait(_) => WhenExhausted::Fail,
            when => when,
        };
        match depot.take(last, when, None, &mut tries) {
            Ok(block) => Ok((block, last.kind())),
            Err(AllocateError::Forked) => Err(AllocateError::Forked),
            Err(_) => Err(error),
        }
    }

    /// A run that holds the buffer, and for which a slab is no longer than it.
    fn run(&self) -> Option<Want> {
        let Want::Long { units, align, .. } = long(self.length, self.align)? else { return None };
        Some(Want::Long { units, align, is_last_resort: true })
    }

    fn last_resort(&self, depot: &Depot, want: Want, error: &AllocateError) -> Option<Want> {
        let last = self.run()?;
        let least = |want: Want| depot.bounds().slab_holding(want.slab_bytes());
        let may_help = match error {
            // What the slabs that are there have in a row may do, or the room beside them.
            AllocateError::Exhausted(_) | AllocateError::TimedOut { .. } => {
                last.slab_bytes() < want.slab_bytes()
            }
            _ => error.is_about_bytes() && least(last) < least(want),
        };
        may_help.then_some(last)
    }

    fn want(&self) -> Result<Want, AllocateError> {
        let Self { length, align, .. } = *self;
        if length == 0 {
            return Err(AllocateError::Empty);
        }
        if !align.is_power_of_two() || align > MAX_ALIGN {
            return Err(AllocateError::Alignment { align, max_align: MAX_ALIGN });
        }
        let longest = self.pool.depot.bounds().longest;
        match Class::aligned(length, align) {
            Some(class) if class.span_units() * UNIT <= longest => Ok(Want::Block(class)),
            // In a pool that is too small for a span of blocks, each is a run of its own.
            _ => long(length, align)
                .ok_or(AllocateError::TooLong { bytes: length, max_bytes: longest }),
        }
    }
}

/// A block in the calling thread's cache.
#[inline(always)]
fn at_hand(depot: &Depot, length: usize) -> Option<(NonNull<u8>, Kind)> {
    let class = Class::holding(length)?;
    Some((threads::take(depot, class)?, Kind::block(class)))
}

/// A run of units.
fn long(length: usize, align: usize) -> Option<Want> {
    let units = u32::try_from(length.div_ceil(UNIT)).ok().filter(|&units| units < 1 << 31)?;
    Some(Want::Long { units, align: align.div_ceil(UNIT), is_last_resort: false })
}

impl<R: Registrar> fmt::Debug for BufferRequest<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("length", &self.length).field("align", &self.align).finish()
    }
}

/// A buffer in registered memory, put back into its pool when it is dropped, on any thread.
///
/// It is as long as it was asked to be and may become as long as its
/// [`capacity`](Self::capacity). All of it is initialised memory: zeros, or what an earlier user left.
///
/// It does not outlive its pool:
///
/// ```compile_fail,E0505
/// # use pinfold::{Registrar, pool::Pool};
/// # fn after_its_parent<R: Registrar>(pool: Pool<R>) {
/// let buffer = pool.get(1500).unwrap();
/// drop(pool);
/// drop(buffer);
/// # }
/// ```
#[must_use = "the buffer is put back as soon as this is dropped"]
pub struct PoolBuffer<'p, R: Registrar> {
    block: NonNull<u8>,
    length: usize,
    kind: Kind,
    depot: &'p Depot,
    registrar: PhantomData<(&'p R, SameRegistrar<R>)>,
}

// SAFETY: a buffer has one owner, and what it refers to may be used by any thread.
unsafe impl<R: Registrar> Send for PoolBuffer<'_, R> {}
// SAFETY: `&PoolBuffer` only reads.
unsafe impl<R: Registrar> Sync for PoolBuffer<'_, R> {}

impl<'p, R: Registrar> PoolBuffer<'p, R> {
    /// `block` has been handed out by `depot`, of this kind, and has no other owner.
    #[inline(always)]
    pub(super) fn new(depot: &'p Depot, block: NonNull<u8>, length: usize, kind: Kind) -> Self {
        Self { block, length, kind, depot, registrar: PhantomData }
    }

    pub(super) const fn block(&self) -> NonNull<u8> {
        self.block
    }

    /// What the registrar gave for the slab that the buffer lies in: each device's handle.
    ///
    /// Valid as long as the buffer is. It covers the whole slab: requests name the buffer's own
    /// address.
    #[inline]
    pub fn handle(&self) -> R::Handle {
        // SAFETY: the slab belongs to a pool over an `R`.
        unsafe { *self.slab().handles().get::<R::Handle>() }
    }

    #[inline]
    fn slab(&self) -> &Slab {
        let slab = slab_at(self.block.addr().get());
        // A buffer's slab is published before it is handed out and hidden after it came back.
        debug_assert!(slab.is_some());
        // SAFETY: as above; the slab lives as long as one of its buffers is out.
        unsafe { slab.unwrap_unchecked().as_ref() }
    }

    /// Where the buffer begins in its slab's registration, in bytes: for devices that count from
    /// there.
    pub fn offset(&self) -> usize {
        self.slab().place_of(self.block.addr().get()).map_or(0, |place| place.offset)
    }

    /// All that was registered together with the buffer: its slab.
    pub fn registered(&self) -> Option<AddressRange> {
        self.slab().range()
    }

    /// The addresses of the buffer's bytes; `None` if it is empty.
    pub fn range(&self) -> Option<AddressRange> {
        AddressRange::new(self.block.addr().get(), self.length).ok()
    }

    /// How many bytes it has.
    #[inline]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has been cut to nothing.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// How many bytes it can have.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.kind.bytes()
    }

    /// Makes it so long, or as long as it can be; what it has got then. What is added is whatever
    /// it is.
    pub fn set_len(&mut self, length: usize) -> usize {
        self.length = length.min(self.capacity());
        self.length
    }

    /// Gives the address out; [`Pool::from_raw`] or [`deallocate`](super::deallocate) take it
    /// back. Until then the buffer is out, and if the pool is dropped, its slab stays mapped.
    pub fn into_raw(self) -> NonNull<u8> {
        ManuallyDrop::new(self).block
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn depot(&self) -> &'p Depot {
        self.depot
    }
}

impl<R: Registrar> Drop for PoolBuffer<'_, R> {
    #[inline]
    fn drop(&mut self) {
        give_back(self.depot, self.block, self.kind);
    }
}

/// Puts a buffer back that has no user any more.
#[inline(always)]
fn give_back(depot: &Depot, block: NonNull<u8>, kind: Kind) {
    if !keep_at_hand(depot, block, kind) {
        give_back_slowly(depot, block, kind);
    }
}

/// Puts a buffer into the thread's magazine; false if that cannot be. When the block stands there the
/// depot may go: nothing of it is touched any more.
#[inline(always)]
#[must_use = "a block that was not kept is still the caller's"]
pub(super) fn keep_at_hand(depot: &Depot, block: NonNull<u8>, kind: Kind) -> bool {
    kind.class().is_some_and(|class| threads::put(depot, class, block))
}

/// Puts a buffer back through the pool's lock.
#[cold]
#[inline(never)]
pub(super) fn give_back_slowly(depot: &Depot, block: NonNull<u8>, kind: Kind) {
    let hand = threads::hand(depot);
    match kind.class() {
        // The thread's magazines may only not have been in its table.
        Some(class) if hand.is_some() && threads::put(depot, class, block) => {}
        _ => depot.put(block, kind, hand),
    }
}

impl<R: Registrar> Deref for PoolBuffer<'_, R> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the block is this value's alone, as long as its kind says, and initialised.
        unsafe { std::slice::from_raw_parts(self.block.as_ptr(), self.length) }
    }
}

impl<R: Registrar> DerefMut for PoolBuffer<'_, R> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.block.as_ptr(), self.length) }
    }
}

impl<R: Registrar> AsRef<[u8]> for PoolBuffer<'_, R> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<R: Registrar> AsMut<[u8]> for PoolBuffer<'_, R> {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

// SAFETY: the block stays where it is when the value is moved, and has one owner.
unsafe impl<R: Registrar> StableBuffer for PoolBuffer<'_, R> {
    const ACCESS: Access = Access::READ_WRITE;

    fn bytes(&self) -> &[u8] {
        self
    }
}

impl<R: Registrar> fmt::Debug for PoolBuffer<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuffer")
            .field("address", &self.block)
            .field("length", &self.length)
            .field("capacity", &self.capacity())
            .finish()
    }
}
