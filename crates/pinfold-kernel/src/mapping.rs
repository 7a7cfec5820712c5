//! Mappings that one value owns.
//!
//! # Safety
//!
//! The unsafe code of this file is there because a system call is a foreign function. What is changed here is
//! memory that a value owns; code that hands out parts of it keeps the value.

use crate::errno::{Errno, done, last_errno};
use crate::fork_holes;
use crate::memory::{PRIVATE, RIGHTS};
use crate::pages::present;
use crate::process::page_bytes;
use crate::{process_page, userfaultfd};
use pinfold_core::AddressRange;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Memory that is mapped until this is dropped; readable and writable unless it was made otherwise.
#[derive(Debug)]
pub struct OwnedMapping {
    start: NonNull<u8>,
    bytes: usize,
    /// From the beginning, and all of it.
    writable: bool,
    /// The process that has it, where its forked children have nothing, or another mapping.
    only_in: Option<Process>,
}

/// Which process this is. A forked child is another, whatever its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Process(u64);

impl Process {
    fn current() -> Result<Self, Errno> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = &process_page::get_or_make()?.number;
        // Relaxed, all three: numbers that no other memory goes with. A child goes on counting where its
        // parent was, so it never gets that one's.
        let fresh = NEXT.fetch_add(1, Ordering::Relaxed);
        let had = number.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed);
        Ok(Self(had.map_or_else(|now| now, |_| fresh)))
    }

    fn is_this(self) -> bool {
        // Relaxed: as above. There is a page where there is a `Process`.
        process_page::get().is_some_and(|page| page.number.load(Ordering::Relaxed) == self.0)
    }
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for OwnedMapping {}
// SAFETY: as above; through `&OwnedMapping` its contents are reached by atomic accesses only.
unsafe impl Sync for OwnedMapping {}

impl OwnedMapping {
    /// Maps private zeros at an address of the kernel's choice; no page is there yet.
    ///
    /// # Errors
    ///
    /// `EINVAL` for no bytes, `ENOMEM` where addresses, memory or mappings are exhausted.
    pub fn new(bytes: usize) -> Result<Self, Errno> {
        Self::anywhere(bytes, RIGHTS, PRIVATE, -1, 0)
    }

    /// Maps private addresses that nothing may be read from or written to; see [`allow`](Self::allow).
    pub fn inaccessible(bytes: usize) -> Result<Self, Errno> {
        Self::anywhere(bytes, libc::PROT_NONE, PRIVATE | libc::MAP_NORESERVE, -1, 0)
    }

    /// Maps zeros that forked children share.
    pub fn shared(bytes: usize) -> Result<Self, Errno> {
        Self::anywhere(bytes, RIGHTS, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Maps what a descriptor stands for, from the byte `offset` on, shared with all who map it.
    pub fn of_file(
        file: BorrowedFd<'_>,
        bytes: usize,
        writable: bool,
        offset: usize,
    ) -> Result<Self, Errno> {
        let offset = libc::off_t::try_from(offset).map_err(|_| Errno(libc::EINVAL))?;
        let rights = if writable { RIGHTS } else { libc::PROT_READ };
        Self::anywhere(bytes, rights, libc::MAP_SHARED, file.as_raw_fd(), offset)
    }

    /// Maps private zeros in huge pages of 2 MiB that the system has set aside. `bytes` is a multiple of
    /// that, and so is the address.
    pub fn set_aside(bytes: usize) -> Result<Self, Errno> {
        let kind = PRIVATE | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        Self::anywhere(bytes, RIGHTS, kind, -1, 0)
    }

    /// Maps private zeros at a multiple of `align`, a power of two of at least a page.
    pub fn aligned(bytes: usize, align: usize) -> Result<Self, Errno> {
        Self::blocks(bytes, align).map(|(memory, _behind)| memory)
    }

    /// As [`aligned`](Self::aligned), with the addresses behind it up to the next multiple of `align`, where
    /// nothing may be read or written: as long as the second is kept, nothing else is mapped there.
    pub fn blocks(bytes: usize, align: usize) -> Result<(Self, Self), Errno> {
        let too_many = Errno(libc::ENOMEM);
        let blocks = bytes.checked_next_multiple_of(align).ok_or(too_many)?;
        let all = blocks.checked_add(align).ok_or(too_many)?;
        // The kernel counts as needed only what may be written.
        let whole = Self::anywhere(all, libc::PROT_NONE, PRIVATE, -1, 0)?;
        let before = whole.start.as_ptr().align_offset(align);
        let (_, rest) = whole.split(before);
        let (mut memory, behind) = rest.split(blocks).0.split(bytes);
        memory.allow(0, bytes)?;
        memory.writable = true;
        Ok((memory, behind))
    }

    fn anywhere(
        bytes: usize,
        rights: libc::c_int,
        kind: libc::c_int,
        file: libc::c_int,
        offset: libc::off_t,
    ) -> Result<Self, Errno> {
        // SAFETY: without MAP_FIXED the kernel picks addresses that nothing else uses.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, rights, kind, file, offset) };
        if start == libc::MAP_FAILED {
            return Err(last_errno());
        }
        // Exposed: ranges name this memory by its addresses.
        start.expose_provenance();
        let start = NonNull::new(start.cast()).ok_or(Errno(libc::ENOMEM))?;
        Ok(Self { start, bytes, writable: rights & libc::PROT_WRITE != 0, only_in: None })
    }

    /// Two that own their parts; one of them may be of no bytes.
    fn split(self, at: usize) -> (Self, Self) {
        let whole = std::mem::ManuallyDrop::new(self);
        let at = at.min(whole.bytes);
        // SAFETY: within the mapping or at its end.
        let behind = unsafe { whole.start.add(at) };
        let Self { writable, only_in, .. } = *whole;
        let part = |start, bytes| Self { start, bytes, writable, only_in };
        (part(whole.start, at), part(behind, whole.bytes - at))
    }

    /// Where it begins.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its addresses, or as many pages of them as `bytes` says; none of it has no bytes.
    pub fn range(&self) -> Option<AddressRange> {
        AddressRange::new(self.start.addr().get(), self.bytes).ok()
    }

    /// It stays as long as the process does.
    pub fn leak(self) -> NonNull<u8> {
        let start = self.start;
        std::mem::forget(self);
        start
    }

    /// Asks for huge pages, or for none.
    pub fn want_huge_pages(&self, wanted: bool) -> Result<(), Errno> {
        self.advise(if wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE })
    }

    /// From now on a forked child finds zeros here. Linux 4.14.
    pub fn wipe_on_fork(&self) -> Result<(), Errno> {
        self.advise(libc::MADV_WIPEONFORK)
    }

    /// From now on a forked child can neither read nor write here, nor comes anything that it maps here. A child that
    /// the C library did not fork (`_Fork`, or a system call by its number) finds nothing here, or what it maps here
    /// itself. Dropped in either, this value unmaps nothing. For huge pages of 2 MiB.
    ///
    /// # Errors
    ///
    /// `EINVAL` for other memory, `ENOSPC` where 4,096 mappings of this process are left out, `ENOMEM`.
    ///
    /// A fork that began before this was called for the first time, or [`prepare_to_leave_out`](Self::prepare_to_leave_out)
    /// was, and is still under way (a handler of `pthread_atfork` runs), makes such a child, too.
    pub fn leave_out_of_forks(&mut self) -> Result<(), Errno> {
        let range = self.range().ok_or(Errno(libc::EINVAL))?;
        self.only_in = Some(Process::current()?);
        fork_holes::add(range)?;
        self.advise(libc::MADV_DONTFORK)
    }

    /// For forks that are under way when the first mapping is [left out](Self::leave_out_of_forks).
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn prepare_to_leave_out() -> Result<(), Errno> {
        fork_holes::register_handler()
    }

    /// Brings every page in, to be written; unlike a first touch it fails where there is none.
    ///
    /// `EINVAL` before Linux 5.14.
    pub fn populate(&self) -> Result<(), Errno> {
        loop {
            match self.advise(libc::MADV_POPULATE_WRITE) {
                Err(Errno(libc::EINTR | libc::EAGAIN)) => {}
                done => return done,
            }
        }
    }

    fn advise(&self, advice: libc::c_int) -> Result<(), Errno> {
        // SAFETY: the memory is ours, and none of these advices unmaps it here or changes what it
        // holds here.
        done(unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, advice) })
    }

    /// Lets it be read and written from the byte `first` on, for `bytes` bytes: whole pages.
    pub fn allow(&self, first: usize, bytes: usize) -> Result<(), Errno> {
        if first.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: inside the mapping. Rights are added, which breaks no one's use of it.
        done(unsafe { libc::mprotect(self.start.add(first).as_ptr().cast(), bytes, RIGHTS) })
    }

    /// Writes `byte` over all of it, which brings every page in; nothing if it was not made to be written.
    ///
    /// Code that has given out parts of it knows that they are not in use.
    pub fn fill(&mut self, byte: u8) {
        if self.writable {
            // SAFETY: within the mapping, which is ours (`&mut`).
            unsafe { self.start.write_bytes(byte, self.bytes) };
        }
    }

    /// What it holds now, byte by byte, though other code may change it meanwhile; nothing if it was not made to be
    /// written, or is [left out](Self::leave_out_of_forks) of this process.
    pub fn contents(&self) -> Vec<u8> {
        let readable = self.writable && self.only_in.is_none_or(Process::is_this);
        // SAFETY: within the mapping, which is read by atomic accesses: it may be shared.
        let byte = |at| unsafe { self.start.cast::<AtomicU8>().add(at).as_ref() };
        // Relaxed: no other memory goes with a byte.
        (0..if readable { self.bytes } else { 0 })
            .map(|at| byte(at).load(Ordering::Relaxed))
            .collect()
    }

    /// Has the kernel reclaim its pages; what they hold stays.
    pub fn page_out(&self) -> Result<(), Errno> {
        self.advise(libc::MADV_PAGEOUT)
    }

    /// How many of its bytes lie in huge pages. `ENOTTY` before Linux 6.7.
    pub fn huge_bytes(&self) -> Result<usize, Errno> {
        Ok(present(self.range().ok_or(Errno(libc::EINVAL))?)?.huge)
    }
}

impl Drop for OwnedMapping {
    fn drop(&mut self) {
        if self.bytes > 0 && self.only_in.is_none_or(Process::is_this) {
            if let (Some(_), Some(range)) = (self.only_in, self.range()) {
                fork_holes::remove(range);
            }
            // SAFETY: the mapping is ours, and every part that was handed out has come back.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}

/// Private memory that becomes one mapping with no neighbour: the pages before it and behind it are its own, and nothing
/// may be read from or written to them.
///
/// The kernel joins what touches and has the same rights. Memory of a program's that has become one with a library's
/// is another mapping than it would be without that library, as `mremap` shows.
#[derive(Debug)]
pub struct WalledMapping(OwnedMapping);

impl WalledMapping {
    /// Maps zeros that may be read and written: `bytes`, rounded up to whole pages.
    ///
    /// # Errors
    ///
    /// `ENOMEM` where addresses, memory or mappings are exhausted.
    pub fn new(bytes: usize) -> Result<Self, Errno> {
        let walls = 2 * page_bytes();
        let inside = bytes.checked_next_multiple_of(page_bytes()).ok_or(Errno(libc::ENOMEM))?;
        let all = inside.checked_add(walls).ok_or(Errno(libc::ENOMEM))?;
        let mapping = OwnedMapping::inaccessible(all)?;
        // Rights are added, which no hook looks at.
        mapping.allow(page_bytes(), inside)?;
        Ok(Self(mapping))
    }

    /// Where what may be used begins.
    pub fn start(&self) -> NonNull<u8> {
        // SAFETY: a page into the mapping, which has two more than what may be used.
        unsafe { self.0.start.add(page_bytes()) }
    }

    /// How much may be used.
    pub fn bytes(&self) -> usize {
        self.0.bytes - 2 * page_bytes()
    }

    /// It stays as long as the process does, or until [`unmap_leaked`](Self::unmap_leaked).
    pub fn leak(self) -> NonNull<u8> {
        let start = self.start();
        std::mem::forget(self);
        start
    }

    /// Unmaps what begins at `start` and was made for `bytes`.
    ///
    /// # Safety
    ///
    /// [`leak`](Self::leak) gave `start` for one that [`new`](Self::new) made for as many bytes, and nothing uses it
    /// any more.
    pub unsafe fn unmap_leaked(start: NonNull<u8>, bytes: usize) {
        let bytes = bytes.next_multiple_of(page_bytes()) + 2 * page_bytes();
        // SAFETY: the page before it is the mapping's first.
        let start = unsafe { start.sub(page_bytes()) };
        drop(OwnedMapping { start, bytes, writable: false, only_in: None });
    }
}

/// One private anonymous page that is only ever read as atomic words.
///
/// Several of its methods change the mapping on purpose: they are how a monitor tests itself.
#[derive(Debug)]
pub struct AtomicPage {
    /// The page, and its walls where it has some.
    mapping: OwnedMapping,
    /// How many bytes of the mapping are before the page.
    before: usize,
}

impl AtomicPage {
    /// Maps a page of zeros.
    pub fn new() -> Result<Self, Errno> {
        OwnedMapping::new(page_bytes()).map(Self::whole)
    }

    /// Maps a page of zeros that forked children share.
    pub fn shared() -> Result<Self, Errno> {
        OwnedMapping::shared(page_bytes()).map(Self::whole)
    }

    /// Maps a page of zeros that becomes one mapping with no neighbour, whatever watches the two (see [`WalledMapping`]).
    ///
    /// To unmap it, or to have its changes reported no longer, splits no mapping that the page has become a part of, and so
    /// succeeds in a process that has as many mappings as it may have.
    pub fn walled() -> Result<Self, Errno> {
        let WalledMapping(mapping) = WalledMapping::new(page_bytes())?;
        Ok(Self { mapping, before: page_bytes() })
    }

    const fn whole(mapping: OwnedMapping) -> Self {
        Self { mapping, before: 0 }
    }

    /// Its first words, for as long as the process lives.
    pub fn leak<const WORDS: usize>(self) -> &'static [AtomicU64; WORDS] {
        const { assert!(size_of::<[AtomicU64; WORDS]>() <= 4096, "the smallest page") };
        let start = self.start();
        std::mem::forget(self);
        // SAFETY: as for `word`, and the page has as many: it is never unmapped now.
        unsafe { start.cast().as_ref() }
    }

    /// Has a userfaultfd report its changes no longer, and before Linux 6.18 every other one. No memory's safety may rest on what is
    /// reported of such a page, which holds words that its owner wakes threads by.
    ///
    /// # Errors
    ///
    /// As of [`userfaultfd::unregister`].
    pub fn unregister(&self, uffd: BorrowedFd<'_>) -> Result<(), Errno> {
        let start = self.address();
        // SAFETY: the page is this one's own, and no memory's safety rests on what any userfaultfd reports of it, see above.
        unsafe { userfaultfd::unregister(uffd, start, start + self.bytes()) }
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: the mapping has the page behind that many bytes.
        unsafe { self.mapping.start.add(self.before) }
    }

    /// Where it is.
    pub fn address(&self) -> usize {
        self.start().addr().get()
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        page_bytes()
    }

    /// The page's first word.
    pub fn word(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped readable and writable, aligned and zero-filled for as long as
        // `self` lives, and is accessed through this reference alone. The kernel may set it to
        // zero behind our back (in a forked child, on `discard`); an atomic read bears that.
        unsafe { self.start().cast().as_ref() }
    }

    /// From now on a forked child finds zeros here. Linux 4.14.
    pub fn wipe_on_fork(&self) -> Result<(), Errno> {
        self.advise(libc::MADV_WIPEONFORK)
    }

    fn advise(&self, advice: libc::c_int) -> Result<(), Errno> {
        // SAFETY: the page is ours, and none of these advices unmaps it; an atomic read bears that it becomes zero.
        done(unsafe { libc::madvise(self.start().as_ptr().cast(), self.bytes(), advice) })
    }

    /// Drops the contents: they read as zero again. A page that the program has locked, with all others
    /// (`mlockall`), is locked no longer before Linux 5.18.
    pub fn discard(&self) -> Result<(), Errno> {
        /// How often the program may lock the page again in between, on a kernel that does not discard it as it is.
        const TRIES: usize = 64;
        /// `MADV_DONTNEED_LOCKED` (Linux 5.18).
        const LOCKED_OR_NOT: libc::c_int = 24;
        let mut answer = self.advise(libc::MADV_DONTNEED);
        for _ in 0..TRIES {
            if answer != Err(Errno(libc::EINVAL)) {
                return answer;
            }
            answer = self.advise(LOCKED_OR_NOT);
            if answer == Err(Errno(libc::EINVAL)) {
                // SAFETY: the page is ours, and stays as it is.
                done(unsafe { libc::munlock(self.start().as_ptr().cast(), self.bytes()) })?;
                answer = self.advise(libc::MADV_DONTNEED);
            }
        }
        answer
    }

    /// Maps a fresh page over this one.
    pub fn replace(&self) -> Result<(), Errno> {
        let (start, kind) = (self.start().as_ptr().cast(), PRIVATE | libc::MAP_FIXED);
        // SAFETY: the page is ours and stays mapped: the kernel swaps it in one step.
        let start = unsafe { libc::mmap(start, self.bytes(), RIGHTS, kind, -1, 0) };
        if start == libc::MAP_FAILED { Err(last_errno()) } else { Ok(()) }
    }

    /// Moves the contents to a new page and leaves this one empty. Linux 5.7.
    pub fn move_contents(&self) -> Result<Self, Errno> {
        let to = Self::new()?;
        let range = |page: &Self| {
            AddressRange::new(page.address(), page.bytes()).map_err(|_| Errno(libc::EINVAL))
        };
        // SAFETY: both pages are ours, of one length, and stay mapped; atomic words bear the change.
        unsafe { crate::memory::move_out(range(self)?, range(&to)?)? };
        Ok(to)
    }
}

/// What may be shared with a writer outside of this process.
///
/// # Safety
///
/// Every content is a valid value, code that has a reference may find it changing, and its alignment is at most a
/// page's.
pub unsafe trait Shareable {}

// SAFETY: atomics, of eight bytes.
unsafe impl Shareable for AtomicU64 {}

/// The beginning of what a descriptor stands for, in our memory.
#[derive(Debug)]
pub struct SharedValue<T: Shareable> {
    mapping: OwnedMapping,
    shared: PhantomData<T>,
}

// SAFETY: it gives out nothing but `&T`, which bears that others write.
unsafe impl<T: Shareable> Send for SharedValue<T> {}
// SAFETY: as above.
unsafe impl<T: Shareable> Sync for SharedValue<T> {}

impl<T: Shareable> SharedValue<T> {
    /// Maps the value at the byte `offset`, whole pages, to be `writable` or only read (writing to it is a
    /// fault then). A map of the kernel's that is shorter is refused; a file of another process's making is to
    /// be sealed as long as it is.
    pub fn new(file: BorrowedFd<'_>, offset: usize, writable: bool) -> Result<Self, Errno> {
        let mapping = OwnedMapping::of_file(file, size_of::<T>(), writable, offset)?;
        Ok(Self { mapping, shared: PhantomData })
    }

    /// The value.
    pub fn get(&self) -> &T {
        // SAFETY: mapped as long as `self` lives, aligned to a page, and of a type that bears it.
        unsafe { self.mapping.start.cast().as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::status_of_child;
    use std::cell::Cell;
    use std::sync::atomic::Ordering::Relaxed; // one thread

    #[test]
    fn a_mapping_is_where_and_as_long_as_asked() {
        const ALIGN: usize = 1 << 21;
        let mut mapping = OwnedMapping::aligned(3 * page_bytes(), ALIGN).unwrap();
        let range = mapping.range().unwrap();
        assert_eq!((range.start() % ALIGN, range.len()), (0, 3 * page_bytes()));
        mapping.fill(7);
        assert_eq!(mapping.contents(), vec![7; 3 * page_bytes()]);
        let (before, behind) = (range.start() - page_bytes(), range.end());
        drop(mapping);
        for place in [range.start(), range.end() - page_bytes(), before, behind] {
            let page = AddressRange::new(place, page_bytes()).unwrap();
            assert_eq!(crate::pages::is_there(page), None, "{place:x} is unmapped");
        }
    }

    #[test]
    fn nothing_else_is_mapped_in_the_last_block() {
        const ALIGN: usize = 1 << 21;
        let (mut memory, behind) = OwnedMapping::blocks(3 * page_bytes(), ALIGN).unwrap();
        memory.fill(7);
        let rest = behind.range().unwrap();
        assert_eq!((rest.start(), rest.end() % ALIGN), (memory.range().unwrap().end(), 0));
        let last = AddressRange::new(rest.end() - page_bytes(), page_bytes()).unwrap();
        assert_eq!(crate::memory::map_if_free(last).unwrap_err(), Errno(libc::EEXIST));
        drop(behind);
        assert_eq!(crate::pages::is_there(last), None, "unmapped");
        let (_, none) = OwnedMapping::blocks(ALIGN, ALIGN).unwrap();
        assert_eq!(none.bytes(), 0);
    }

    /// What is mapped one after the other touches, mostly.
    #[test]
    fn walled_memory_joins_no_neighbour() {
        let page = page_bytes();
        let all: Vec<_> = (0..16).map(|_| WalledMapping::new(2 * page - 1).unwrap()).collect();
        let between = [0; 16].map(|_| OwnedMapping::new(2 * page).unwrap());
        let table = std::fs::read_to_string("/proc/self/maps").unwrap();
        for mapping in &all {
            // SAFETY: ours, of two pages.
            unsafe { mapping.start().write_bytes(1, mapping.bytes()) };
            let start = mapping.start().addr().get();
            let line = format!("{start:08x}-{:08x} rw-p", start + 2 * page);
            assert!(table.lines().any(|mapping| mapping.starts_with(&line)), "{line}\n{table}");
        }
        drop(between);
    }

    /// In a child, where no other test maps anything there.
    #[test]
    fn walled_memory_that_was_leaked_is_unmapped_with_its_walls() {
        let page = page_bytes();
        let start = WalledMapping::new(2 * page - 1).unwrap().leak();
        let pages = (0..4).map(|at| start.addr().get() + at * page - page);
        let mut pages = pages.map(|at| AddressRange::new(at, page).unwrap());
        // SAFETY: nothing uses it, here and in the child.
        let unmap = || unsafe { WalledMapping::unmap_leaked(start, 2 * page - 1) };
        let status = status_of_child(|| {
            let were_there = pages.clone().all(|page| crate::pages::is_there(page).is_some());
            unmap();
            let are_gone = pages.all(|page| crate::pages::is_there(page).is_none());
            i32::from(!(were_there && are_gone))
        });
        assert_eq!(status, 0);
        unmap();
    }

    #[test]
    fn rights_are_added_inside_only() {
        let mapping = OwnedMapping::inaccessible(3 * page_bytes()).unwrap();
        mapping.allow(page_bytes(), page_bytes()).unwrap();
        assert_eq!(mapping.allow(3 * page_bytes(), page_bytes()), Err(Errno(libc::EINVAL)));
        assert_eq!(mapping.allow(usize::MAX, page_bytes()), Err(Errno(libc::EINVAL)));
        // SAFETY: the page was made writable.
        unsafe { mapping.start().add(page_bytes()).write(7) };
    }

    /// What a child made by `make` has at `range` by the time that it drops its copy, and behind that: whether it could
    /// map its own there, and whether something is mapped.
    fn left_out_in(make: fn() -> i32) -> (bool, bool) {
        const HUGE: usize = 2 << 20;
        let mut mapping = OwnedMapping::aligned(HUGE, HUGE).unwrap();
        mapping.leave_out_of_forks().unwrap();
        let range = mapping.range().unwrap();
        let child = make();
        if child == 0 {
            let mapped = crate::memory::map_if_free(range).is_ok();
            drop(mapping);
            let is_there = crate::pages::is_there(range).is_some();
            // SAFETY: the child's end.
            unsafe { libc::_exit(i32::from(mapped) << 1 | i32::from(is_there)) };
        }
        let mut status = 0;
        // SAFETY: the child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        drop(mapping);
        assert_eq!(crate::pages::is_there(range), None, "unmapped here");
        (libc::WEXITSTATUS(status) & 2 != 0, libc::WEXITSTATUS(status) & 1 != 0)
    }

    #[test]
    fn what_is_left_out_of_a_fork_is_neither_mapped_over_nor_unmapped_there() {
        // SAFETY: the child makes system calls only, and ends.
        assert_eq!(left_out_in(|| unsafe { libc::fork() }), (false, true));
    }

    /// Such a child has nothing there, and may have another mapping by the time that it drops its copy.
    #[test]
    fn what_is_left_out_of_a_child_that_the_c_library_did_not_fork_is_not_unmapped_there() {
        let clone = || {
            // SAFETY: as above.
            let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
            i32::try_from(child).unwrap()
        };
        assert_eq!(left_out_in(clone), (true, true));
    }

    #[test]
    fn only_huge_pages_are_left_out_of_forks() {
        let mut mapping = OwnedMapping::new(page_bytes()).unwrap();
        assert_eq!(mapping.leave_out_of_forks(), Err(Errno(libc::EINVAL)));
    }

    /// Whether exactly this page is a mapping that can be written.
    fn is_one_mapping(page: &AtomicPage) -> bool {
        let (start, end) = (page.address(), page.address() + page.bytes());
        let line = format!("{start:08x}-{end:08x} rw-p");
        let table = std::fs::read_to_string("/proc/self/maps").unwrap();
        table.lines().any(|mapping| mapping.starts_with(&line))
    }

    /// What is mapped one after the other touches, mostly.
    #[test]
    fn a_walled_page_joins_no_neighbour_however_it_changes() {
        let pages = [(); 16].map(|()| AtomicPage::walled().unwrap());
        let between = [(); 16].map(|()| OwnedMapping::new(page_bytes()).unwrap());
        for page in &pages {
            page.word().store(7, Relaxed);
            page.discard().unwrap();
            assert_eq!((page.word().load(Relaxed), is_one_mapping(page)), (0, true));
            page.word().store(7, Relaxed);
            page.replace().unwrap();
            assert_eq!((page.word().load(Relaxed), is_one_mapping(page)), (0, true));
            page.wipe_on_fork().unwrap();
            page.word().store(7, Relaxed);
            assert!(is_one_mapping(page));
        }
        drop(between);
    }

    /// In a child, where no other test maps anything there.
    #[test]
    fn a_walled_page_is_wiped_in_a_child_and_unmapped_with_its_walls() {
        let page = AtomicPage::walled().unwrap();
        page.word().store(7, Relaxed);
        page.wipe_on_fork().unwrap();
        let start = page.address() - page_bytes();
        let mut parts =
            (0..3).map(|at| AddressRange::new(start + at * page_bytes(), page_bytes()).unwrap());
        let page = Cell::new(Some(page));
        let status = status_of_child(|| {
            let page = page.take().unwrap();
            let is_wiped = page.word().load(Relaxed) == 0;
            drop(page);
            let are_gone = parts.all(|part| crate::pages::is_there(part).is_none());
            i32::from(!(is_wiped && are_gone))
        });
        assert_eq!(status, 0);
        assert_eq!(page.take().unwrap().leak::<1>()[0].load(Relaxed), 7);
    }

    #[test]
    fn a_page_changes_and_stays_ours() {
        changes_and_stays(&AtomicPage::new().unwrap());
        changes_and_stays(&AtomicPage::walled().unwrap());
    }

    fn changes_and_stays(page: &AtomicPage) {
        page.word().store(7, Relaxed);
        let moved = page.move_contents().unwrap();
        assert_eq!((page.word().load(Relaxed), moved.word().load(Relaxed)), (0, 7));
        moved.replace().unwrap();
        assert_eq!(moved.word().load(Relaxed), 0);
        page.word().store(8, Relaxed);
        page.discard().unwrap();
        assert_eq!(page.word().load(Relaxed), 0);
    }

    #[test]
    fn a_locked_page_can_be_discarded() {
        let page = AtomicPage::new().unwrap();
        // SAFETY: the page is ours.
        if unsafe { libc::mlock(page.start().as_ptr().cast(), page.bytes()) } != 0 {
            eprintln!("skipped: no memory may be locked here");
            return;
        }
        page.word().store(7, Ordering::Relaxed);
        page.discard().unwrap();
        assert_eq!(page.word().load(Ordering::Relaxed), 0);
    }

    /// As `mlockall` in another thread does.
    #[test]
    fn a_page_that_is_locked_again_and_again_can_be_discarded() {
        use std::sync::atomic::AtomicBool;
        let (page, is_over, lockings) =
            (AtomicPage::new().unwrap(), AtomicBool::new(false), AtomicU64::new(0));
        let (start, bytes) = (page.address(), page.bytes());
        let (is_over, lockings) = (&is_over, &lockings);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while !is_over.load(Relaxed) {
                    // SAFETY: the page is ours.
                    unsafe { libc::mlock(ptr::with_exposed_provenance(start), bytes) };
                    lockings.fetch_add(1, Relaxed);
                }
            });
            let mut refused = 0;
            while lockings.load(Relaxed) < 20_000 {
                refused += u32::from(page.discard().is_err());
            }
            is_over.store(true, Relaxed);
            assert_eq!(refused, 0);
        });
    }
}
