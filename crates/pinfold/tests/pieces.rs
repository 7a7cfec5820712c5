//! Long ranges through a real ring and a real monitor: what arrives is what was there, the errors
//! name their piece, nothing is left leased.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the methods that take an address: every address is in memory of
//! the test's own, which lives until the call has returned.

#![allow(unsafe_code, missing_docs)]
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::panic)]

mod registrar_support;

use io_uring::{IoUring, opcode, types};
use pinfold::monitor::{NoMonitor, Userfaultfd};
use pinfold::pieces::{
    Completion, Mover, Options, Plan, PrefaultError, Progress, Reason, RegisterAllError, Request,
    prefault, register_all, transfer,
};
use pinfold::registrar::{self, BufferIndex};
use pinfold::{
    Access, AddressRange, Cache, Config, DeregisterError, GetError, Limit, RegisterError,
    Registrar, RegistrarLimits,
};
use registrar_support::{Memory, PAGE, alone, memory_file, ring_with_registrar};
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const PIECE: usize = 64 << 10;

type TheCache = Cache<registrar::IoUring, Arc<Userfaultfd>>;

/// Moves into a file, or out of it, at the offset of each address from `base`.
struct Ring {
    ring: IoUring,
    file: File,
    base: usize,
    receive: bool,
    /// Requests whose number this is fail.
    failing: Option<usize>,
    most_under_way: usize,
    under_way: usize,
    ranges: Vec<(usize, usize)>,
}

// SAFETY: a request has ended when its completion is in the ring.
unsafe impl Mover<BufferIndex> for Ring {
    type Error = io::Error;

    unsafe fn begin(&mut self, request: Request<BufferIndex>) -> io::Result<()> {
        assert_eq!(request.number, self.ranges.len(), "numbers have no gaps");
        let (range, index) = (request.range, request.handle.get());
        let offset = (range.start() - self.base) as u64;
        let length = u32::try_from(range.len()).unwrap();
        // A descriptor that is none makes the request fail when it is taken.
        let failing = self.failing == Some(request.number);
        let file = types::Fd(if failing { -1 } else { self.file.as_raw_fd() });
        let address = std::ptr::with_exposed_provenance_mut(range.start());
        let entry = if self.receive {
            opcode::ReadFixed::new(file, address, length, index).offset(offset).build()
        } else {
            opcode::WriteFixed::new(file, address, length, index).offset(offset).build()
        };
        // SAFETY: the registration and the memory stay until the completion, by the caller's promise.
        unsafe { self.ring.submission().push(&entry.user_data(request.number as u64)) }.unwrap();
        self.ring.submit()?;
        self.ranges.push((range.start(), range.len()));
        self.under_way += 1;
        self.most_under_way = self.most_under_way.max(self.under_way);
        Ok(())
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        assert!(self.under_way > 0, "complete without a request");
        self.ring.submit_and_wait(1)?;
        let entry = self.ring.completion().next().unwrap();
        self.under_way -= 1;
        let number = usize::try_from(entry.user_data()).unwrap();
        let outcome = match entry.result() {
            error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
            bytes => {
                assert_eq!(usize::try_from(bytes).unwrap(), self.ranges[number].1);
                Ok(())
            }
        };
        Ok(Completion { number, outcome })
    }
}

/// Keeps its first request back until a helper has been refused a registration.
struct AfterARefusal<'a> {
    ring: &'a mut Ring,
    cache: &'a TheCache,
}

impl AfterARefusal<'_> {
    /// Two misses without a registration: one helper makes one at a time, so the other has ended in an error.
    fn is_refused(&self) -> bool {
        let statistics = self.cache.statistics();
        statistics.misses >= statistics.registrations + 2
    }
}

// SAFETY: as the ring, which has every request.
unsafe impl Mover<BufferIndex> for AfterARefusal<'_> {
    type Error = io::Error;

    unsafe fn begin(&mut self, request: Request<BufferIndex>) -> io::Result<()> {
        let patience = Instant::now() + Duration::from_secs(120);
        while request.number == 0 && !self.is_refused() {
            assert!(
                Instant::now() < patience,
                "no helper was refused: {:?}",
                self.cache.statistics()
            );
            thread::yield_now();
        }
        // SAFETY: the caller's promise.
        unsafe { self.ring.begin(request) }
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        self.ring.complete()
    }
}

/// A cache over a ring, and what moves through that ring; `None` where the machine lacks either.
fn rig(bytes: usize, base: usize, slots: u32, config: Config) -> Option<(TheCache, Ring)> {
    let (ring, registrar) = ring_with_registrar(64, slots)?;
    let monitor = match Userfaultfd::shared() {
        Ok(monitor) => monitor,
        Err(error) => {
            eprintln!("skipped: no userfaultfd: {error}");
            return None;
        }
    };
    let cache = pinfold::cache(registrar, monitor, config).unwrap();
    let file = memory_file();
    file.set_len(bytes as u64).unwrap();
    let mover = Ring {
        ring,
        file,
        base,
        receive: false,
        failing: None,
        most_under_way: 0,
        under_way: 0,
        ranges: Vec::new(),
    };
    Some((cache, mover))
}

fn in_pieces(piece_bytes: usize) -> Config {
    Config { piece_bytes, ..Config::keeping_all() }
}

fn options(threads: usize) -> Options {
    let threads = NonZeroUsize::new(threads).unwrap();
    Options { threads, ahead: 4, in_flight: 3, prefault: true, to_keep: false }
}

// A discard anywhere in the process keeps others of its memory from being cached for a moment, so
// tests that count what is cached run in processes of their own.

/// Bytes that are nowhere the same.
fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state.to_be_bytes()
    };
    let mut all: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|_| next()).collect();
    all.truncate(bytes);
    all
}

fn content(file: &File, bytes: usize) -> Vec<u8> {
    let mut all = vec![0; bytes];
    file.read_exact_at(&mut all, 0).unwrap();
    all
}

fn no_lease_is_left(cache: &TheCache) {
    cache.evict_idle();
    let statistics = cache.statistics();
    assert_eq!((statistics.regions, statistics.pinned_bytes), (0, 0), "{statistics:?}");
}

#[test]
fn a_long_range_arrives_whole_whatever_the_helpers_are() {
    for (threads, skip, bytes) in [(1, 0, 1 << 20), (1, 1234, 3 << 20), (3, 777, 3 << 20)] {
        let sent = pattern(bytes, bytes as u64);
        let sent = &sent[skip..];
        let base = sent.as_ptr().addr();
        let Some((cache, mut ring)) = rig(sent.len(), base, 64, in_pieces(PIECE)) else { return };
        let progress = Progress::new();
        let (start, length) = (sent.as_ptr(), sent.len());
        // SAFETY: see the file's header.
        let moved = unsafe {
            transfer(&cache, start, length, Access::READ, &options(threads), &progress, &mut ring)
        }
        .unwrap();
        assert!(content(&ring.file, length) == sent, "{threads} helpers, from {skip}");
        // The pages are there, so more would not help.
        assert_eq!((moved.helpers, moved.found_at_once), (1, 0));
        assert_eq!((progress.moved_bytes(), progress.registered_bytes()), (length, length));
        assert!(ring.most_under_way <= 3);
        let plan = Plan::new(&cache, start, length).unwrap();
        assert_eq!(moved.requests, plan.pieces());
        assert_eq!(cache.statistics().registrations, plan.pieces() as u64);
        no_lease_is_left(&cache);
    }
}

#[test]
fn what_is_cached_moves_without_a_helper() {
    alone("what_is_cached_moves_without_a_helper", || {
        let sent = pattern(1 << 20, 5);
        let base = sent.as_ptr().addr();
        let Some((cache, mut ring)) = rig(sent.len(), base, 64, in_pieces(PIECE)) else { return };
        let mut send = || {
            ring.ranges.clear();
            let progress = Progress::new();
            let (start, length) = (sent.as_ptr(), sent.len());
            // SAFETY: see the file's header.
            unsafe {
                transfer(&cache, start, length, Access::READ, &options(1), &progress, &mut ring)
            }
            .unwrap()
        };
        let first = send();
        let again = send();
        assert_eq!((first.helpers, again.helpers, again.found_at_once), (1, 0, first.requests));
        assert_eq!(cache.statistics().registrations, first.requests as u64);
    });
}

#[test]
fn registrations_side_by_side_serve_a_piece_around_them() {
    alone("registrations_side_by_side_serve_a_piece_around_them", || {
        let mut memory = Memory::new(4 * PIECE);
        memory.fill(9);
        let base = memory.range().start().next_multiple_of(PIECE);
        let Some((cache, mut ring)) = rig(PIECE, base, 64, in_pieces(PIECE)) else { return };
        let part = |offset: usize, length: usize| {
            let start = std::ptr::with_exposed_provenance(base + offset);
            // SAFETY: see the file's header.
            drop(unsafe { cache.get(start, length, Access::READ) }.unwrap());
        };
        part(0, PIECE / 2);
        part(PIECE / 2, PIECE / 4);
        part(PIECE / 4 * 3, PIECE / 4);
        let progress = Progress::new();
        let start = std::ptr::with_exposed_provenance(base + 100);
        // SAFETY: see the file's header.
        let moved = unsafe {
            transfer(&cache, start, PIECE - 100, Access::READ, &options(1), &progress, &mut ring)
        }
        .unwrap();
        assert_eq!((moved.requests, moved.helpers, cache.statistics().registrations), (3, 0, 3));
        let lengths: Vec<usize> = ring.ranges.iter().map(|&(_, length)| length).collect();
        assert_eq!(lengths, [PIECE / 2 - 100, PIECE / 4, PIECE / 4]);
        assert_eq!(content(&ring.file, PIECE)[100..], vec![9; PIECE - 100]);
    });
}

#[test]
fn memory_that_was_never_touched_is_received_into() {
    let memory = Memory::new(2 << 20);
    let base = memory.range().start();
    let Some((cache, mut ring)) = rig(2 << 20, base, 64, in_pieces(PIECE)) else { return };
    let arriving = pattern(2 << 20, 77);
    ring.file.write_all_at(&arriving, 0).unwrap();
    ring.receive = true;
    let progress = Progress::new();
    let (start, length) = (memory.pointer().cast_const(), 2 << 20);
    // SAFETY: see the file's header.
    let moved = unsafe {
        transfer(&cache, start, length, Access::WRITE, &options(2), &progress, &mut ring)
    }
    .unwrap();
    assert!(memory.bytes() == arriving);
    assert_eq!(moved.helpers, 2);
}

#[test]
fn a_range_longer_than_the_budget_goes_through_it() {
    let sent = pattern(2 << 20, 3);
    let base = sent.as_ptr().addr();
    // Room for two pieces and the pages at their ends; less than are wanted in advance.
    let config = Config { max_bytes: 2 * PIECE, ..in_pieces(PIECE) };
    let Some((cache, mut ring)) = rig(sent.len(), base, 64, config) else { return };
    let progress = Progress::new();
    let (start, length) = (sent.as_ptr(), sent.len());
    let mut mover = AfterARefusal { ring: &mut ring, cache: &cache };
    // SAFETY: see the file's header.
    let moved = unsafe {
        transfer(&cache, start, length, Access::READ, &options(1), &progress, &mut mover)
    }
    .unwrap();
    assert_eq!((moved.helpers, moved.short_of_room), (1, true), "{moved:?}");
    assert_eq!((progress.moved_bytes(), progress.registered_bytes()), (length, length));
    assert!(content(&ring.file, length) == sent);
    no_lease_is_left(&cache);
}

/// Takes the piece at `late` only when it has taken so many others.
struct Reluctant {
    late: usize,
    taken: AtomicUsize,
}

impl Reluctant {
    const OTHERS: usize = 3;

    fn has_taken_others(&self) -> bool {
        self.taken.load(Ordering::Relaxed) >= Self::OTHERS // a count alone
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Reluctant {
    type Handle = usize;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits::new(4096, 1 << 30, 1024)
    }

    unsafe fn register(&self, range: AddressRange, _: Access) -> Result<usize, RegisterError> {
        if range.start() == self.late && !self.has_taken_others() {
            return Err(RegisterError::PinnedMemoryLimit { limit_bytes: None, errno: 12 });
        }
        Ok(self.taken.fetch_add(1, Ordering::Relaxed)) // a number that is given once
    }

    unsafe fn deregister(&self, _: usize, _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

/// Moves nothing, and begins when those behind the late piece stand in the line.
struct Patient<'a>(&'a Reluctant, Vec<usize>);

// SAFETY: nothing is ever under way.
unsafe impl Mover<usize> for Patient<'_> {
    type Error = io::Error;

    unsafe fn begin(&mut self, request: Request<usize>) -> io::Result<()> {
        let patience = Instant::now() + Duration::from_secs(120);
        while !self.0.has_taken_others() {
            assert!(Instant::now() < patience, "no helper came");
            thread::yield_now();
        }
        self.1.push(request.number);
        Ok(())
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        Ok(Completion { number: self.1.remove(0), outcome: Ok(()) })
    }
}

/// Those that were registered in advance, and given up for the room, are not counted twice.
#[test]
fn what_is_registered_a_second_time_is_counted_once() {
    let memory = Memory::new(9 * PIECE);
    let start = memory.range().start().next_multiple_of(PIECE);
    let device = Arc::new(Reluctant { late: start + PIECE, taken: AtomicUsize::new(0) });
    let monitor = NoMonitor::new().unwrap();
    let cache = pinfold::cache(Arc::clone(&device), monitor, in_pieces(PIECE)).unwrap();
    let (progress, mut mover) = (Progress::new(), Patient(&device, Vec::new()));
    let (start, length) = (std::ptr::with_exposed_provenance(start), 8 * PIECE);
    // SAFETY: see the file's header.
    let moved = unsafe {
        transfer(&cache, start, length, Access::READ, &options(1), &progress, &mut mover)
    }
    .unwrap();
    assert!(moved.short_of_room);
    assert_eq!((progress.moved_bytes(), progress.registered_bytes()), (length, length));
}

#[test]
fn a_piece_that_cannot_be_registered_is_named_and_what_came_before_it_is_moved() {
    alone("a_piece_that_cannot_be_registered_is_named_and_what_came_before_it_is_moved", || {
        let mut memory = Memory::new(16 * PIECE);
        memory.fill(3);
        let base = memory.range().start().next_multiple_of(PIECE);
        let Some((cache, mut ring)) = rig(16 * PIECE, base, 64, in_pieces(PIECE)) else { return };
        memory.unmap(base - memory.range().start() + 5 * PIECE, PAGE);
        let progress = Progress::new();
        let (start, length) = (std::ptr::with_exposed_provenance(base), 10 * PIECE);
        // SAFETY: see the file's header; what is unmapped is refused by the kernel.
        let error = unsafe {
            transfer(&cache, start, length, Access::READ, &options(2), &progress, &mut ring)
        }
        .unwrap_err();
        let Reason::Register { range, error: GetError::Register(why) } = error.reason else {
            panic!("{error:?}")
        };
        assert_eq!((range.start(), range.len()), (base + 5 * PIECE, PIECE));
        assert!(matches!(why, RegisterError::BadAddress { .. }), "{why:?}");
        assert_eq!((error.moved_bytes, ring.under_way), (5 * PIECE, 0));
        assert_eq!(content(&ring.file, 5 * PIECE), vec![3; 5 * PIECE]);
        no_lease_is_left(&cache);

        // SAFETY: as above.
        let all =
            unsafe { register_all(&cache, start, length, Access::READ, &options(2), &progress) };
        let Err(RegisterAllError::Incomplete(rest)) = all else { panic!("{all:?}") };
        assert_eq!(rest.failed[0].piece, 5);
        assert_eq!(rest.leases.len() + rest.failed.len() + rest.not_tried, 10);
        assert!(rest.leases.len() >= 5 && !rest.cancelled);
        drop(rest);
        no_lease_is_left(&cache);
    });
}

#[test]
fn a_request_that_fails_ends_the_transfer_with_nothing_under_way() {
    let sent = pattern(1 << 20, 8);
    let base = sent.as_ptr().addr();
    let Some((cache, mut ring)) = rig(sent.len(), base, 64, in_pieces(PIECE)) else { return };
    ring.failing = Some(4);
    let progress = Progress::new();
    let (start, length) = (sent.as_ptr(), sent.len());
    // SAFETY: see the file's header.
    let error =
        unsafe { transfer(&cache, start, length, Access::READ, &options(1), &progress, &mut ring) }
            .unwrap_err();
    let Reason::Move { range, .. } = error.reason else { panic!("{error:?}") };
    assert_eq!(range.start(), ring.ranges[4].0);
    assert_eq!((error.moved_bytes, ring.under_way), (range.start() - base, 0));
    no_lease_is_left(&cache);
}

#[test]
fn a_cancelled_transfer_says_how_far_it_came() {
    let sent = pattern(1 << 20, 8);
    let Some((cache, mut ring)) = rig(sent.len(), sent.as_ptr().addr(), 64, in_pieces(PIECE))
    else {
        return;
    };
    let progress = Progress::new();
    progress.cancel();
    let (start, length) = (sent.as_ptr(), sent.len());
    // SAFETY: see the file's header.
    let error =
        unsafe { transfer(&cache, start, length, Access::READ, &options(1), &progress, &mut ring) }
            .unwrap_err();
    assert!(matches!(error.reason, Reason::Cancelled));
    assert!(error.moved_bytes == 0 && ring.ranges.is_empty());
    // SAFETY: as above.
    let all = unsafe { register_all(&cache, start, length, Access::READ, &options(2), &progress) };
    let Err(RegisterAllError::Incomplete(rest)) = all else { panic!("{all:?}") };
    assert!(rest.cancelled && rest.leases.is_empty() && rest.failed.is_empty());
}

#[test]
fn everything_is_registered_by_several_threads_and_found_by_address() {
    alone("everything_is_registered_by_several_threads_and_found_by_address", || {
        let memory = Memory::new(8 << 20);
        let Some((cache, _ring)) = rig(0, 0, 256, in_pieces(PIECE)) else { return };
        let progress = Progress::new();
        let (start, length) = (memory.pointer().cast_const(), 8 << 20);
        // SAFETY: see the file's header.
        let all = unsafe {
            register_all(&cache, start, length, Access::READ_WRITE, &options(3), &progress)
        }
        .unwrap();
        assert_eq!(progress.registered_bytes(), length);
        let mut next = start.addr();
        for lease in all.leases() {
            assert_eq!(lease.range().start(), next);
            next = lease.range().end();
        }
        assert_eq!(next, start.addr() + length);
        for address in [start.addr(), start.addr() + 12345, next - 1] {
            let lease = all.find(address).unwrap();
            assert!(lease.range().start() <= address && address < lease.range().end());
        }
        assert!(all.find(next).is_none() && all.find(start.addr() - 1).is_none());
        let made = cache.statistics().registrations;
        // SAFETY: as above.
        let again =
            unsafe { register_all(&cache, start, length, Access::READ, &options(3), &progress) }
                .unwrap();
        assert_eq!(again.leases().len(), all.leases().len());
        assert_eq!(cache.statistics().registrations, made);
        drop((all, again));
        no_lease_is_left(&cache);
    });
}

#[test]
fn what_can_never_fit_is_refused_before_anything_is_registered() {
    let Some((cache, _ring)) = rig(0, 0, 4, in_pieces(PIECE)) else { return };
    let memory = Memory::new(8 * PIECE);
    let progress = Progress::new();
    // SAFETY: see the file's header.
    let all = unsafe {
        let start = memory.pointer().cast_const();
        register_all(&cache, start, 8 * PIECE, Access::READ, &options(2), &progress)
    };
    let Err(RegisterAllError::DoesNotFit(error)) = all else { panic!("{all:?}") };
    assert_eq!((error.limit, error.allowed), (Limit::Regions, 4));
    assert_eq!(cache.statistics().registrations, 0);
    // SAFETY: refused before it is looked at.
    let none =
        unsafe { register_all(&cache, std::ptr::null(), 8, Access::READ, &options(2), &progress) };
    assert!(matches!(none, Err(RegisterAllError::Arguments(GetError::Range(_)))));
}

/// A cache that was asked for pieces longer than the device takes says what they became.
#[test]
fn pieces_are_made_to_fit_the_device_and_the_plan_tells() {
    let Some((cache, _ring)) = rig(0, 0, 4, in_pieces(1 << 34)) else { return };
    let plan = Plan::new(&cache, std::ptr::without_provenance(1 << 40), 5 << 30).unwrap();
    assert_eq!((plan.piece_bytes(), plan.device_max_bytes()), (1 << 30, 1 << 30));
    assert_eq!(plan.pieces(), 5);
}

#[test]
fn pages_are_made_in_advance_without_being_written() {
    let (kept, bytes) = (1 << 20, 4 << 20);
    let mut memory = Memory::new(bytes);
    memory.fill(7);
    // SAFETY: the test's own pages.
    unsafe { libc::madvise(memory.pointer().add(kept).cast(), bytes - kept, libc::MADV_DONTNEED) };
    let progress = Progress::new();
    match prefault(memory.range(), Access::READ_WRITE, &options(2), &progress) {
        Err(PrefaultError::Unsupported) => {
            eprintln!("skipped: no MADV_POPULATE_WRITE");
            return;
        }
        outcome => outcome.unwrap(),
    }
    let mut there = vec![0_u8; bytes / PAGE];
    // SAFETY: one byte for each page.
    unsafe { libc::mincore(memory.pointer().cast(), bytes, there.as_mut_ptr()) };
    assert!(there.iter().all(|page| page & 1 == 1));
    let content = memory.bytes();
    assert!(content[..kept].iter().all(|&byte| byte == 7));
    assert!(content[kept..].iter().all(|&byte| byte == 0));
    progress.cancel();
    let cancelled = prefault(memory.range(), Access::READ_WRITE, &options(2), &progress);
    assert_eq!(cancelled, Err(PrefaultError::Cancelled));
}

#[test]
fn pages_that_cannot_be_made_are_named() {
    let memory = Memory::with_protection(4 * PAGE, libc::PROT_READ);
    let outcome = prefault(memory.range(), Access::WRITE, &options(1), &Progress::new());
    match outcome {
        Err(PrefaultError::BadAddress { range, .. }) => assert!(memory.range().contains(&range)),
        Err(PrefaultError::Unsupported) => {}
        other => panic!("{other:?}"),
    }
}

/// As many threads as there are numbers are as many as there can be.
#[test]
fn threads_without_a_bound_are_bounded() {
    let options = Options { threads: NonZeroUsize::MAX, ..Options::for_register_all() };
    let everything = AddressRange::between(1 << 21, usize::MAX).unwrap();
    assert!(prefault(everything, Access::WRITE, &options, &Progress::new()).is_err());
}
