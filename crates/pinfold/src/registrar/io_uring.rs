//! Registered buffers of an io_uring ring.
//!
//! # What it costs
//!
//! Register and deregister together, small pages, on a machine where an empty system call takes
//! 0.21 µs: 2.5 µs for 4 KiB, 3.8 µs for 64 KiB, 25 µs for 1 MiB, 0.37 ms for 16 MiB. One
//! microsecond of each is for making sure, twice, that the descriptor still leads to the same ring.
//!
//! **The ring's lock.** The kernel holds the ring's one mutex (`uring_lock`) from the beginning to
//! the end of a registration, pinning included. Other threads that submit to the same ring, or
//! register with it, wait that long: some 10 µs for 1 MiB, tens of milliseconds for 1 GiB, and
//! without end if a program has to serve the page faults. Other rings go on, and so does reaping
//! completions from the mapped queue. Registering in pieces of 2 MiB keeps the waits short, and
//! rings of their own keep threads apart.
//!
//! **Huge pages.** A page of a transparent huge page, or of any larger folio, is charged as the
//! whole folio, once per ring. A cache registers the whole huge page then, and serves the rest of it
//! from there ([`Registrar::widened`]): its books say what the kernel counts, and a hundred small
//! buffers of one huge page are one registration. It takes Linux 6.7, which says what is huge, and Linux 6.11 for
//! pages of 1 GiB, whose registration takes 10 to 20 ms: one of those is registered whole under a memlock limit alone. Not
//! seen are huge pages whose mapping was split (by `mprotect` or `munmap` of a part) while the pages
//! were not. To find out whether that has happened already, the kernel looks
//! through every slot of the table and every page of every buffer in it, under the same lock. With
//! 16384 empty slots, registering a huge page took 35 µs; with 512 MiB of small pages in the table,
//! 0.4 ms. Make the table no larger than the budget needs.
//!
//! # What a registration promises
//!
//! A request looks its slot up when the kernel takes it from the submission queue (or later, behind
//! a link or a drain) and then holds on to what it found until it completes. Emptying or refilling
//! the slot does not touch a request in flight; its pages stay pinned until it ends. Before Linux
//! 6.13, an emptied slot's pages stay pinned until *every* request with fixed buffers or files that
//! was in flight on the ring at that moment has ended; and before 6.4 (measured on 6.1) for a second longer in any case,
//! charged to the user all the while.
//!
//! # Suspending
//!
//! A ring has nothing to stop: a request names a slot, and to name it takes a lease, which a
//! suspended region does not give. So no connections are passed. What is renewed keeps its index.
//! A lease that is *handed over* to a suspension may have requests in flight, which go on with
//! the old pages; a registrar made by [`IoUring::with_tags`] knows when the last one has ended and
//! lets the memory be moved then. Without tags that is the program's word: hand over only leases
//! whose requests have completed. A slot that the kernel does not empty, because the registrar's descriptor was
//! closed for one, keeps its memory from being moved until it is filled anew.
//!
//! # Forks, threads, descriptors
//!
//! - The registrar has a descriptor of its own. The ring lives on, its registrations with it, until
//!   the registrar is dropped too. If the descriptor is closed behind its back (`close_range`), the
//!   next call says [`DeviceGone`](RegisterError::DeviceGone); if its number belongs to another
//!   ring by then, that ring is left alone.
//! - A forked child shares the ring with its parent, table included. There the registrar refuses
//!   to register and deregisters nothing.
//! - Cached registrations are given back by whichever thread notices that they must be. A ring that
//!   takes calls from a single thread (`IORING_SETUP_SINGLE_ISSUER`, hence also
//!   `IORING_SETUP_DEFER_TASKRUN`) is refused when it is opened. So is one that has not been enabled yet
//!   (`IORING_SETUP_R_DISABLED`): the single thread is the one that enables it, and until then each thread's calls are taken.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare [`Registrar::register`] and what suspends, to fill and empty the slots that are
//! the registrar's own, and to close a descriptor in a destructor.

#![allow(unsafe_code)]

mod tags;

use crate::descriptor::Maker;
use crate::fork_mark::{FORKED, ForkMark};
use crate::huge_pages::HugePages;
use crate::limits::{Limits, pinned_limit};
use crate::mappings;
use pinfold_core::{
    Access, AddressRange, BadAddress, DeregisterError, RegisterError, Registrar, RegistrarLimits,
    Renewed, Suspend, Unsupported,
};
use pinfold_kernel::{
    Errno,
    descriptor::{self, Identity},
    io_uring,
    process::page_bytes,
    thread::spawn_scoped,
};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use tags::Tags;

/// The longest buffer that the kernel takes, in bytes.
pub const MAX_BUFFER_BYTES: usize = 1 << 30;

/// The most slots that a ring's table can have.
pub const MAX_SLOTS: u32 = 1 << 14;

/// Where a registered buffer stands in its ring's table: what a request's `buf_index` takes.
///
/// It means something in the ring that the registrar was made from, and only until the
/// registration is given back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BufferIndex(u16);

impl BufferIndex {
    /// The number for `READ_FIXED`, `WRITE_FIXED`, `SEND_ZC` and their like.
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// Registers memory as fixed buffers of one ring, whichever process made it.
///
/// ```
/// use pinfold::registrar::IoUring;
/// use pinfold::{Access, AddressRange, Registrar};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let Ok(ring) = io_uring::IoUring::new(8) else { return Ok(()) };
/// // SAFETY: the ring's table of buffers is left to the registrar.
/// let registrar = unsafe { IoUring::new(&ring, 1024) }?;
/// # let buffer = vec![0_u8; 4096];
/// let range = AddressRange::new(buffer.as_ptr().addr(), buffer.len())?;
/// // SAFETY: nothing else relies on the buffer while the ring may write to it.
/// let index = unsafe { registrar.register(range, Access::READ_WRITE) }?;
/// // ... submit READ_FIXED or WRITE_FIXED with buf_index = index.get() ...
/// // SAFETY: registered above, and no request names it any more.
/// unsafe { registrar.deregister(index, range) }?;
/// # Ok(())
/// # }
/// ```
pub struct IoUring {
    ring: Ring,
    slots: Slots,
    /// Absent where completions belong to the program alone.
    tags: Option<Tags>,
    /// Absent where the kernel does not say.
    huge: Option<HugePages>,
    fork_mark: ForkMark,
    page_bytes: usize,
}

/// One short line.
impl fmt::Debug for IoUring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoUring")
            .field("fd", &self.ring.fd.as_raw_fd())
            .field("slots", &self.slots.capacity)
            .field("tags", &self.tags.is_some())
            .field("sees_huge_pages", &self.sees_huge_pages())
            .finish_non_exhaustive()
    }
}

impl IoUring {
    /// Whether this process may use io_uring at all; makes no ring.
    ///
    /// # Errors
    ///
    /// [`IoUringError::Forbidden`] says who refuses and what to do.
    pub fn is_available() -> Result<(), IoUringError> {
        match io_uring::setup_refusal() {
            // A null pointer is the first thing that a willing kernel objects to.
            Errno(libc::EFAULT | libc::EINVAL | 0) => Ok(()),
            Errno(errno) => Err(IoUringError::Forbidden { errno }),
        }
    }

    /// Gives `ring` a table of `slots` empty slots, and registers with it. Linux 5.19.
    ///
    /// `ring` is anything with a ring's descriptor: the `io-uring` crate's ring (its feature
    /// `io_safety` is not needed), an [`OwnedFd`], a `BorrowedFd`. The descriptor is duplicated.
    ///
    /// `slots` is from 1 to [`MAX_SLOTS`] and bounds how many registrations there may be at once;
    /// it costs 8 bytes of kernel memory each. The table stays with the ring when the registrar is
    /// dropped, emptied: removing it would wait, on kernels before 6.13, for requests of others.
    /// [`adopt`](Self::adopt) takes it up again.
    ///
    /// Costs some 50 µs: a thread is started to see that the ring takes calls from any thread.
    ///
    /// # Errors
    ///
    /// [`IoUringError`]; the ring is as it was.
    ///
    /// # Safety
    ///
    /// From now on the table is the registrar's: no other code removes or replaces it, or copies another ring's
    /// buffers into it, in this process or another that has the ring, though the `io-uring` crate has safe calls
    /// for that (`Submitter::unregister_buffers`, `register_buffers_clone`). A slot would have two owners, or name the
    /// pages that were mapped at its addresses once, into which the device would write. Nor is a registration copied out of
    /// it, into another ring's table (`IORING_REGISTER_CLONE_BUFFERS`, Linux 6.12): the copy stays when the slot is
    /// emptied, and requests of the other ring go on with the old pages, pinned and counted by no budget.
    ///
    /// ```compile_fail,E0133
    /// # let ring = io_uring::IoUring::new(8).unwrap();
    /// let registrar = pinfold::registrar::IoUring::new(&ring, 8).unwrap();
    /// ```
    pub unsafe fn new(ring: &impl AsRawFd, slots: u32) -> Result<Self, IoUringError> {
        if !(1..=MAX_SLOTS).contains(&slots) {
            return Err(IoUringError::TableSize { asked: slots });
        }
        Self::open(ring, 0..slots, |ring| {
            io_uring::make_table(ring.fd.as_fd(), slots).map_err(IoUringError::of_new_table)
        })
    }

    /// Registers with some of the slots of a table that `ring` has already.
    ///
    /// The slots are emptied now, and again when the registrar is dropped. From now on they belong
    /// to the registrar; the rest of the table remains the program's.
    ///
    /// # Errors
    ///
    /// [`IoUringError`]; some of the slots may have been emptied.
    ///
    /// # Safety
    ///
    /// Nothing else fills, empties or names these slots from now on, in this process or another that has
    /// the ring: above all, they are no other registrar's. Two owners of a slot would each have the device
    /// write into the other's memory. Nor are they copied into another ring's table, as with [`new`](Self::new).
    ///
    /// ```compile_fail,E0133
    /// # let ring = io_uring::IoUring::new(8).unwrap();
    /// let first = unsafe { pinfold::registrar::IoUring::new(&ring, 8) }.unwrap();
    /// let second = pinfold::registrar::IoUring::adopt(&ring, 0..8).unwrap();
    /// ```
    pub unsafe fn adopt(ring: &impl AsRawFd, slots: Range<u32>) -> Result<Self, IoUringError> {
        if slots.is_empty() || slots.end > MAX_SLOTS {
            return Err(IoUringError::TableSize { asked: slots.end });
        }
        let (first, end) = (slots.start, slots.end);
        Self::open(ring, slots, |ring| {
            // SAFETY: the caller's promise: the slots are this registrar's from now on.
            unsafe { io_uring::clear_slots(ring.fd.as_fd(), first, end) }
                .map_err(|errno| IoUringError::of_old_table(errno, end))
        })
    }

    /// Has the ring say when the last request that uses a registration has ended.
    ///
    /// Each registration that is made from now on posts one completion to the ring when it has
    /// ended, whose `user_data` is out of `values`: pass every completion to [`ended`](Self::ended) of each of the ring's
    /// registrars, until one of them says that it was its own, and use the values for nothing else. In return a suspension waits for requests in flight
    /// on leases that were handed over to it. Ask for it before the first registration.
    ///
    /// Costs a lock for each registration and its end. The caller that suspends takes completions
    /// meanwhile (on another thread, or between polls), or the suspension waits until its deadline; so does
    /// one whose ring cannot be reached any more, because the registrar's descriptor was closed.
    ///
    /// # Errors
    ///
    /// [`IoUringError::Tags`] if `values` contains zero, which is no tag, or has fewer than 2^48
    /// values, so that none comes round while the process lives.
    ///
    /// # Safety
    ///
    /// No request on the ring has one of the values for its `user_data`: neither one of the program's, nor a
    /// registration of another process that has the ring (registrars of this process never use a value twice,
    /// whatever their ranges). A completion with the value of a registration is taken for the end of all requests
    /// that used it, and their memory is moved then. So no other ring has a copy of it (`IORING_REGISTER_CLONE_BUFFERS`):
    /// no completion says when the requests with that have ended.
    ///
    /// ```compile_fail,E0133
    /// # let ring = io_uring::IoUring::new(8).unwrap();
    /// let registrar = unsafe { pinfold::registrar::IoUring::new(&ring, 8) }.unwrap();
    /// let tagged = registrar.with_tags(1 << 63..u64::MAX);
    /// ```
    pub unsafe fn with_tags(mut self, values: Range<u64>) -> Result<Self, IoUringError> {
        self.tags = Some(Tags::new(values).ok_or(IoUringError::Tags)?);
        Ok(self)
    }

    /// Whether the kernel says which pages are huge, so that a cache's books say what the kernel counts
    /// of those (Linux 6.7, and a `/proc` that this process may read).
    pub const fn sees_huge_pages(&self) -> bool {
        self.huge.is_some()
    }

    /// Takes note of a completion that the program found in the ring. True if it was the end of one of this registrar's
    /// registrations; false if it is the program's own, or another registrar's: where several have one ring, ask each until
    /// one says yes (`a.ended(x) || b.ended(x)`). A registrar that is dropped ends its registrations, and none knows those
    /// numbers any longer: they are out of its `values`. In a forked child, where nothing ends, true for all `values`.
    ///
    /// ```
    /// # use pinfold::registrar::IoUring;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let Ok(mut ring) = io_uring::IoUring::new(8) else { return Ok(()) };
    /// let tags = 1 << 63..u64::MAX;
    /// // SAFETY: the ring's table of buffers is left to the registrar, and so are these values.
    /// let registrar = unsafe { IoUring::new(&ring, 16)?.with_tags(tags.clone()) }?;
    /// for completion in ring.completion() {
    ///     let value = completion.user_data();
    ///     // SAFETY: the completion is of the ring that the registrar registers in.
    ///     let is_tag = unsafe { registrar.ended(value) };
    ///     // One among the tags that is not known is of a registrar that was dropped.
    ///     if !is_tag && !tags.contains(&value) {
    ///         // ... a request of ours ...
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    ///
    /// The number is that of a completion which this registrar's own ring has posted since the registrar
    /// was made: memory is taken to be left alone by the ring's requests from then on. Of another ring's,
    /// which may have the same values, it would be taken too early.
    pub unsafe fn ended(&self, user_data: u64) -> bool {
        let Some(tags) = &self.tags else { return false };
        // In a forked child a thread that is not there may hold the tags' lock, and nothing ends.
        if self.fork_mark.forked() { tags.is_one(user_data) } else { tags.ended(user_data) }
    }

    fn fill(&self, slot: u16, range: AddressRange) -> Result<(), Errno> {
        let Some(tags) = &self.tags else {
            self.ring.fill(slot, range, 0)?;
            // The kernel has replaced what was in it.
            self.slots.forget_uncleared(slot);
            return Ok(());
        };
        let tag = tags.draw();
        self.ring.fill(slot, range, tag)?;
        tags.put(slot, tag);
        Ok(())
    }

    /// Empties a slot that may hold a registration of `range`.
    fn clear(&self, slot: u16, range: AddressRange) -> Result<(), Errno> {
        let Some(tags) = &self.tags else {
            // A slot that was not emptied holds what it held until it is filled anew, or emptied by another try.
            let cleared = self.ring.clear(slot);
            match cleared {
                Ok(()) => self.slots.forget_uncleared(slot),
                Err(_) => self.slots.note_uncleared(slot, range),
            }
            return cleared;
        };
        // Before the call: the completion may be found while the call is still on its way back.
        let _ending = tags.begin_end(slot, range);
        // Whatever comes of it, only the ring says the end. One that cannot be reached any more may live on,
        // with requests in flight; a slot that was not emptied holds what it held until it is filled anew.
        self.ring.clear(slot)
    }

    fn open(
        ring: &impl AsRawFd,
        slots: Range<u32>,
        prepare: impl FnOnce(&Ring) -> Result<(), IoUringError> + Send,
    ) -> Result<Self, IoUringError> {
        let fork_mark = ForkMark::new(1).map_err(|e| IoUringError::os("madvise", e))?;
        let ring = Ring::duplicate(ring)?;
        // Before the other thread's call: a ring that is enabled has its single issuer, if any, and stays so.
        if io_uring::is_disabled(ring.fd.as_fd()) {
            return Err(IoUringError::Disabled);
        }
        on_another_thread(|| prepare(&ring))?;
        let slots = Slots::new(slots);
        // A page of 1 GiB takes long to register, so it is registered whole only where it is counted.
        let huge = HugePages::open(pinned_limit().is_some());
        Ok(Self { ring, slots, tags: None, huge, fork_mark, page_bytes: page_bytes() })
    }

    fn check_request(&self, range: AddressRange, access: Access) -> Result<(), RegisterError> {
        if self.fork_mark.forked() {
            return Err(RegisterError::DeviceGone { errno: FORKED });
        }
        if access.is_remote() {
            return Err(RegisterError::UnsupportedAccess { access });
        }
        if range.len() > MAX_BUFFER_BYTES {
            return Err(RegisterError::TooLarge { range, max_bytes: MAX_BUFFER_BYTES });
        }
        Ok(())
    }

    /// What the kernel's refusal to register means.
    fn explain(&self, range: AddressRange, errno: Errno) -> RegisterError {
        match errno {
            Errno(libc::EFAULT | libc::EOVERFLOW) => bad_address(range, errno),
            // The descriptor leads to something else, or, before Linux 6.5 and for DAX, the memory
            // belongs to a file.
            Errno(libc::EOPNOTSUPP) if self.ring.is_there().is_ok() => bad_address(range, errno),
            Errno(libc::ENOMEM) => no_memory(errno),
            Errno(errno) if is_gone(errno) => RegisterError::DeviceGone { errno },
            Errno(errno) => RegisterError::Os { operation: operation(errno), errno },
        }
    }
}

// SAFETY: a slot of the ring's table reaches the buffer that the kernel pinned for it; it is in one registration's hands
// until it was emptied, because nothing else changes the table (`IoUring::new`).
unsafe impl Registrar for IoUring {
    type Handle = BufferIndex;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits {
            page_bytes: self.page_bytes,
            max_region_bytes: MAX_BUFFER_BYTES,
            max_regions: self.slots.capacity,
        }
    }

    /// `RLIMIT_MEMLOCK`, where the kernel applies it to this process.
    fn pinned_limit(&self) -> Option<usize> {
        pinned_limit()
    }

    /// Reading and writing, whatever was asked: the kernel pins every buffer to be written.
    fn granted(&self, wanted: Access) -> Access {
        wanted | Access::READ_WRITE
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        self.huge.as_ref().map_or(range, |huge| huge.around(range))
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<BufferIndex, RegisterError> {
        self.check_request(range, access)?;
        let slot =
            self.slots.take().ok_or(RegisterError::TableFull { capacity: self.slots.capacity })?;
        self.fill(slot, range).map(|()| BufferIndex(slot)).map_err(|errno| {
            self.slots.give_back(slot);
            self.explain(range, errno)
        })
    }

    unsafe fn deregister(
        &self,
        handle: BufferIndex,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        if self.fork_mark.forked() {
            return Err(DeregisterError::DeviceGone { errno: FORKED });
        }
        let cleared = self.clear(handle.0, range);
        // Also after a failure: filling the slot anew replaces what is in it.
        self.slots.give_back(handle.0);
        cleared.map_err(refused)
    }
}

// SAFETY: there is no connection; with tags, a slot that is emptied is quiet when the kernel has posted its tag, behind
// the last request that named it. Without, requests on leases that were handed over are what the trait leaves to the
// program: every other lease has ended, and its requests with it.
unsafe impl Suspend for IoUring {
    // What uses a slot holds a lease.
    pinfold_core::no_connections!();

    fn can_suspend(
        &self,
        _range: AddressRange,
        _none: &[Self::Connection],
    ) -> Result<(), Unsupported> {
        Ok(())
    }

    /// Empties the slot and keeps it. Requests in flight go on with what they have.
    unsafe fn withdraw(
        &self,
        handle: BufferIndex,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        if self.fork_mark.forked() {
            return Err(DeregisterError::DeviceGone { errno: FORKED });
        }
        self.clear(handle.0, range).map_err(refused)
    }

    /// With tags: no request in flight uses what the slots held. Without, no slot holds it, and the end of requests is the
    /// program's word. In a forked child, whose memory the parent's ring does not touch, always.
    fn quiet(&self, range: AddressRange) -> bool {
        let has_ended = || self.tags.as_ref().is_none_or(|tags| tags.quiet(range));
        self.fork_mark.forked() || self.slots.are_clear_of(range) && has_ended()
    }

    unsafe fn renew(
        &self,
        handle: BufferIndex,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<BufferIndex>, RegisterError> {
        self.check_request(range, access)?;
        if let Some(tags) = &self.tags {
            // What was not withdrawn is replaced now, and ends.
            let _replaced = tags.begin_end(handle.0, range);
        }
        self.fill(handle.0, range).map(|()| Renewed::Same).map_err(|errno| {
            let error = self.explain(range, errno);
            // The kernel takes the new before it ends the old: what was not withdrawn is there still.
            let _noted = self.clear(handle.0, range);
            self.slots.give_back(handle.0);
            error
        })
    }
}

impl Drop for IoUring {
    /// Empties every slot, so that nothing stays pinned, except in a forked child, where the slots
    /// are the parent's. Waits for no request in flight.
    fn drop(&mut self) {
        if !self.fork_mark.forked() {
            // A ring that is gone has released everything already.
            let _ = self.ring.clear_all(&self.slots.range);
        }
    }
}

fn bad_address(range: AddressRange, Errno(errno): Errno) -> RegisterError {
    let reason = match mappings::diagnose(range, Access::READ_WRITE) {
        BadAddress::Unknown if errno == libc::EOPNOTSUPP => {
            BadAddress::UnsupportedMapping { at: range.start() }
        }
        reason => reason,
    };
    RegisterError::BadAddress { range, reason, errno }
}

/// The kernel says the same when the limit is reached and when it has no memory itself, so ask
/// whether there is a limit to reach.
///
/// What counts is the privilege of the ring's maker; that is this process's own, unless the
/// ring was handed over or the privilege given up since.
fn no_memory(Errno(errno): Errno) -> RegisterError {
    match Limits::read().limit_in_force() {
        Some(limit) => RegisterError::PinnedMemoryLimit { limit_bytes: Some(limit), errno },
        None => RegisterError::Os { operation: UPDATE, errno },
    }
}

/// What the kernel's refusal to empty a slot means.
const fn refused(Errno(errno): Errno) -> DeregisterError {
    if is_gone(errno) {
        DeregisterError::DeviceGone { errno }
    } else {
        DeregisterError::Os { operation: operation(errno), errno }
    }
}

/// Whether the descriptor no longer leads to the ring (`EBADF`, `EOPNOTSUPP`), or the ring has lost
/// its table (`ENXIO`) or has a shorter one (`EINVAL`).
const fn is_gone(errno: i32) -> bool {
    matches!(errno, libc::EBADF | libc::EOPNOTSUPP | libc::ENXIO | libc::EINVAL)
}

const UPDATE: &str = "io_uring_register(IORING_REGISTER_BUFFERS_UPDATE)";

const fn operation(errno: i32) -> &'static str {
    match errno {
        libc::EEXIST => {
            "io_uring_register from a thread that is not the ring's only issuer (make the ring \
             without IORING_SETUP_SINGLE_ISSUER)"
        }
        _ => UPDATE,
    }
}

/// A ring's descriptor that is the registrar's own, and how to know the ring again.
struct Ring {
    fd: ManuallyDrop<OwnedFd>,
    identity: Identity,
    maker: Maker,
    /// Set once the descriptor was found to lead elsewhere; then nothing is done through it.
    lost: AtomicBool,
}

impl Ring {
    /// A descriptor of our own: the program may close its own, and its number may come to mean
    /// another ring, without harm.
    fn duplicate(ring: &impl AsRawFd) -> Result<Self, IoUringError> {
        // SAFETY: the program names its own ring; nothing is read from it here.
        let fd = unsafe { descriptor::duplicate(ring.as_raw_fd()) }
            .map_err(|e| IoUringError::os("fcntl(F_DUPFD)", e))?;
        let identity =
            descriptor::identity(fd.as_raw_fd()).map_err(|e| IoUringError::os("fstat", e))?;
        let fd = ManuallyDrop::new(fd);
        Ok(Self { fd, identity, maker: Maker::this(), lost: AtomicBool::new(false) })
    }

    /// Whether the descriptor still leads to the ring.
    ///
    /// A program that closes descriptors which are not its own, and opens a ring under the old
    /// number, would otherwise have its buffer registered there, and the index handed out would
    /// mean whatever the first ring had in that slot. What happens between this look and the
    /// registration is not seen.
    fn is_there(&self) -> Result<(), Errno> {
        match descriptor::identity(self.fd.as_raw_fd()) {
            Ok(identity) if identity == self.identity => Ok(()),
            Ok(_) => Err(self.lose(Errno(libc::EBADF))),
            Err(errno) => Err(self.lose(errno)),
        }
    }

    fn lose(&self, errno: Errno) -> Errno {
        // Relaxed: the flag publishes nothing else, and a thread that misses it looks for itself.
        self.lost.store(true, Ordering::Relaxed);
        errno
    }

    fn fill(&self, slot: u16, range: AddressRange, tag: u64) -> Result<(), Errno> {
        self.is_there()?;
        // SAFETY: the slot is one of the registrar's own; the bytes are on the word given to `register`
        // or `renew`, which alone fill slots.
        unsafe { io_uring::fill_slot(self.fd.as_fd(), slot, range, tag) }
    }

    fn clear(&self, slot: u16) -> Result<(), Errno> {
        self.is_there()?;
        // SAFETY: the slot is one of the registrar's own, and its registration ends on the caller's word.
        unsafe { io_uring::clear_slot(self.fd.as_fd(), slot) }
    }

    fn clear_all(&self, slots: &Range<u32>) -> Result<(), Errno> {
        self.is_there()?;
        // SAFETY: all are the registrar's own, which is being dropped.
        unsafe { io_uring::clear_slots(self.fd.as_fd(), slots.start, slots.end) }
    }
}

impl Drop for Ring {
    /// Closes the descriptor if it is still ours, and not also that of the process that opened it.
    fn drop(&mut self) {
        // Relaxed: see `lose`. A loss that was noticed stays one, even if the number should lead
        // to the same ring again: then it has another owner.
        let is_known = !self.lost.load(Ordering::Relaxed) && self.is_there().is_ok();
        if is_known && !self.maker.is_another_with_our_table() {
            close(&mut self.fd);
        }
    }
}

fn close(fd: &mut ManuallyDrop<OwnedFd>) {
    // SAFETY: called by `Ring::drop` alone, so the descriptor is not used again.
    unsafe { ManuallyDrop::drop(fd) }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("fd", &*self.fd).field("identity", &self.identity).finish()
    }
}

/// The slots that are the registrar's, and which of them are free.
struct Slots {
    range: Range<u32>,
    capacity: usize,
    /// Guards the list of free slots, for one push or pop; never held across a system call. It has
    /// room for all of them from the start, so nothing is allocated under the lock. Last in, first
    /// out: the kernel's own memory of a slot is warm.
    free: Mutex<Vec<u16>>,
    /// Guards the slots that could not be emptied, free or not, and the memory that they hold, for one look-up; never held
    /// across a system call. Taken with nothing else held, and nothing is taken under it. With tags there is none: their
    /// completions tell.
    uncleared: Mutex<Vec<(u16, AddressRange)>>,
    /// Whether there are any, so that a slot is filled without the lock. A thread that fills one has it from the thread that could not
    /// empty it, by way of the lock of those that are free or of the cache's own.
    has_uncleared: AtomicBool,
}

impl Slots {
    fn new(range: Range<u32>) -> Self {
        // Lossless: a range ends at MAX_SLOTS at most.
        let free: Vec<u16> = range.clone().rev().filter_map(|s| u16::try_from(s).ok()).collect();
        Self {
            range,
            capacity: free.len(),
            free: Mutex::new(free),
            uncleared: Mutex::default(),
            has_uncleared: AtomicBool::new(false),
        }
    }

    fn take(&self) -> Option<u16> {
        self.list().pop()
    }

    fn give_back(&self, slot: u16) {
        self.list().push(slot);
    }

    fn list(&self) -> MutexGuard<'_, Vec<u16>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Not in a forked child, where a thread that is not there may hold the lock.
    fn uncleared(&self) -> MutexGuard<'_, Vec<(u16, AddressRange)>> {
        self.uncleared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_uncleared(&self, slot: u16, range: AddressRange) {
        let mut uncleared = self.uncleared();
        uncleared.retain(|&(other, _)| other != slot);
        uncleared.push((slot, range));
        // Relaxed: the slot changes hands by a lock.
        self.has_uncleared.store(true, Ordering::Relaxed);
    }

    /// The slot was filled anew, or emptied.
    fn forget_uncleared(&self, slot: u16) {
        // Relaxed: as above.
        if self.has_uncleared.load(Ordering::Relaxed) {
            self.uncleared().retain(|&(other, _)| other != slot);
        }
    }

    /// Whether none of those that could not be emptied holds memory of `range`.
    fn are_clear_of(&self, range: AddressRange) -> bool {
        !self.uncleared().iter().any(|(_, held)| held.overlaps(&range))
    }
}

/// Runs `call` on a thread that has never used the ring: a ring with a single issuer refuses it.
fn on_another_thread(
    call: impl FnOnce() -> Result<(), IoUringError> + Send,
) -> Result<(), IoUringError> {
    thread::scope(|scope| {
        let thread = spawn_scoped(scope, "pinfold-ring", call).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            IoUringError::Os { operation: "starting a thread", errno }
        })?;
        // `call` cannot panic; were it to, nothing is known of the ring.
        thread.join().unwrap_or(Err(IoUringError::Os { operation: "a thread", errno: libc::EIO }))
    })
}

/// Why a ring cannot be registered with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoUringError {
    /// The descriptor is not a ring's.
    #[error("the descriptor is not an io_uring ring's (errno {errno})")]
    NotARing {
        /// The kernel's error number.
        errno: i32,
    },
    /// The ring takes calls from one thread only.
    #[error(
        "the ring takes calls from one thread only, and registrations are given back by others: \
         make it without IORING_SETUP_SINGLE_ISSUER and IORING_SETUP_DEFER_TASKRUN"
    )]
    SingleIssuer,
    /// The ring has not been enabled yet: which thread's calls it takes is not known.
    #[error(
        "the ring has not been enabled, so it does not show yet whether it takes calls from any thread: enable it first \
         (IORING_REGISTER_ENABLE_RINGS)"
    )]
    Disabled,
    /// The ring has a table of buffers already.
    #[error(
        "the ring has a table of buffers already: adopt slots of it (a registrar that was dropped \
         leaves its table, emptied), or unregister it"
    )]
    TableExists,
    /// The ring has no table of buffers to adopt.
    #[error("the ring has no table of buffers to adopt: make one")]
    NoTable,
    /// No table has that many slots, or none at all.
    #[error("{asked} slots: a table has 1 to {MAX_SLOTS}, and an adopted one its own")]
    TableSize {
        /// How many slots there were to be, or the end of those to be adopted.
        asked: u32,
    },
    /// The values are too few for tags, or zero is among them.
    #[error("tags need a range of at least 2^48 values without zero: 1 << 63.. has")]
    Tags,
    /// The kernel knows no tables with empty slots.
    #[error("the kernel knows no tables with empty slots: use Linux 5.19 or later")]
    NoSparseTables,
    /// io_uring, or this call, is refused to this process.
    #[error(
        "io_uring is refused to this process (errno {errno}): look at the sysctl \
         kernel.io_uring_disabled, at the container runtime's seccomp profile, and at restrictions \
         of the ring itself"
    )]
    Forbidden {
        /// The kernel's error number.
        errno: i32,
    },
    /// Something else went wrong.
    #[error("{operation} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

impl IoUringError {
    const fn os(operation: &'static str, Errno(errno): Errno) -> Self {
        Self::Os { operation, errno }
    }

    fn of_new_table(errno: Errno) -> Self {
        match errno {
            Errno(libc::EBUSY) => Self::TableExists,
            Errno(libc::EINVAL) => Self::NoSparseTables,
            other => Self::of_any_table(other),
        }
    }

    fn of_old_table(errno: Errno, end: u32) -> Self {
        match errno {
            Errno(libc::ENXIO) => Self::NoTable,
            Errno(libc::EINVAL) => Self::TableSize { asked: end },
            other => Self::of_any_table(other),
        }
    }

    fn of_any_table(Errno(errno): Errno) -> Self {
        match errno {
            libc::EEXIST => Self::SingleIssuer,
            libc::EOPNOTSUPP | libc::EBADF => Self::NotARing { errno },
            libc::EPERM | libc::EACCES | libc::ENOSYS => Self::Forbidden { errno },
            errno => Self::Os { operation: "io_uring_register", errno },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_core::Suspend;

    #[test]
    fn slots_come_back() {
        let slots = Slots::new(3..6);
        assert_eq!(slots.capacity, 3);
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(3), Some(4), Some(5)]);
        assert_eq!(slots.take(), None);
        slots.give_back(4);
        assert_eq!(slots.take(), Some(4));
    }

    /// The ring has the pages of a slot that was not emptied, so they are not to be moved.
    #[test]
    fn what_is_in_a_slot_that_was_not_emptied_is_not_quiet() {
        let (Ok(ring), Ok(other)) = (::io_uring::IoUring::new(8), ::io_uring::IoUring::new(8))
        else {
            println!("skipped: no ring is to be had here");
            return;
        };
        // SAFETY: the ring is this test's.
        let registrar = unsafe { IoUring::new(&ring, 8) }.unwrap();
        let memory = vec![0_u8; 4096];
        let range = AddressRange::new(memory.as_ptr().expose_provenance(), memory.len()).unwrap();
        let elsewhere = AddressRange::new(4096, 4096).unwrap();
        let lead_to = |ring: &::io_uring::IoUring| {
            let fd = registrar.ring.fd.as_raw_fd();
            // SAFETY: the number is the registrar's, and leads to a ring before as after.
            assert_eq!(unsafe { libc::dup2(ring.as_raw_fd(), fd) }, fd);
        };
        // SAFETY: no request is on the ring, and each registration is live until it is said to have ended.
        unsafe {
            let index = registrar.register(range, Access::READ_WRITE).unwrap();
            lead_to(&other);
            registrar.withdraw(index, range).unwrap_err();
            assert!(!registrar.quiet(range) && registrar.quiet(elsewhere));
            registrar.renew(index, range, Access::READ_WRITE).unwrap_err();
            assert!(!registrar.quiet(range), "it has what it had");
            lead_to(&ring);
            let again = registrar.register(range, Access::READ_WRITE).unwrap();
            assert!(again == index && registrar.quiet(range), "filled anew");
            lead_to(&other);
            registrar.deregister(again, range).unwrap_err();
            assert!(!registrar.quiet(range));
            lead_to(&ring);
            let last = registrar.register(range, Access::READ_WRITE).unwrap();
            registrar.deregister(last, range).unwrap();
            assert!(last == index && registrar.quiet(range));
            // One that is refused once may go the next time.
            let refused_once = registrar.register(range, Access::READ_WRITE).unwrap();
            lead_to(&other);
            registrar.withdraw(refused_once, range).unwrap_err();
            assert!(!registrar.quiet(range));
            lead_to(&ring);
            registrar.deregister(refused_once, range).unwrap();
            assert!(registrar.quiet(range), "the slot is empty");
        }
    }

    /// The lock of the tags is held, as by another thread of the parent's that the child does not have.
    #[test]
    fn a_forked_child_takes_note_of_a_completion_without_the_lock_of_its_parents_tags() {
        let Ok(ring) = ::io_uring::IoUring::new(8) else {
            println!("skipped: no ring is to be had here");
            return;
        };
        // SAFETY: the ring is this test's, and no request is on it.
        let registrar = unsafe { IoUring::new(&ring, 8).unwrap().with_tags(1 << 63..u64::MAX) };
        let registrar = registrar.unwrap();
        let range = AddressRange::new(4096, 4096).unwrap();
        let tags = registrar.tags.as_ref().unwrap().state();
        // SAFETY: the child looks at memory that it has, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: one that waits for the lock is ended by the signal; no completion is taken note of in a child.
            let (ours, theirs) = unsafe {
                libc::alarm(300);
                (registrar.ended(u64::MAX - 1), registrar.ended(1))
            };
            let right = ours && !theirs && registrar.quiet(range);
            // SAFETY: the child's end.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        drop(tags);
        let mut status = 0;
        // SAFETY: the child is ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "ended by the signal, or a wrong answer");
    }

    #[test]
    fn every_refusal_names_its_way_out() {
        assert_eq!(IoUringError::of_new_table(Errno(libc::EINVAL)), IoUringError::NoSparseTables);
        assert_eq!(IoUringError::of_old_table(Errno(libc::ENXIO), 8), IoUringError::NoTable);
        for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES] {
            let error = IoUringError::of_new_table(Errno(errno));
            assert_eq!(error, IoUringError::Forbidden { errno });
            assert!(error.to_string().contains("kernel.io_uring_disabled"));
        }
        assert!(
            IoUringError::of_any_table(Errno(libc::EEXIST)).to_string().contains("SINGLE_ISSUER")
        );
        assert!(operation(libc::EEXIST).contains("SINGLE_ISSUER"));
    }
}
