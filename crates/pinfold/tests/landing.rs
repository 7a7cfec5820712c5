//! Messages that a real ring writes into landing pages, on their way to their targets: what arrives,
//! what it leaves alone, and what becomes of registrations.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to give targets out and to change their mappings while data is on
//! its way. Every target is memory of the test's own, which is not borrowed; a transfer is complete
//! before [`Place::arrived`](pinfold::landing::Place::arrived) is said.

#![allow(unsafe_code, missing_docs)]
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::panic)]

mod registrar_support;

use io_uring::{IoUring, opcode, types};
use pinfold::budget::{Amount, Budget, Reserve};
use pinfold::landing::{
    Arrived, AskError, Crossover, LandError, Landed, Measured, Method, Place, RemapRefused,
    Remapped, Slab, SlabPages, Zone, ZoneError, ZoneOptions,
};
use pinfold::monitor::{Feed, NoMonitor, Userfaultfd, WithFeed};
use pinfold::pool::{Pool, PoolConfig};
use pinfold::registrar::{self, BufferIndex};
use pinfold::{Access, AddressRange, Cache, Config, Monitor, Watch};
use pinfold_sim::{Calm, Fake, Willing};
use registrar_support::{Memory, PAGE, alone, memory_file, ring_with_registrar};
use std::fmt::Debug;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

type TheCache<M> = Cache<registrar::IoUring, M>;

/// A cache over a ring, the ring, and a file in memory.
struct Rig<M: Monitor> {
    // Before the ring: its registrations end first.
    cache: TheCache<M>,
    ring: Mutex<IoUring>,
    file: File,
}

fn rig<M: Monitor>(monitor: M, piece_bytes: usize) -> Option<Rig<M>> {
    rig_by(pinfold::cache, monitor, piece_bytes)
}

fn rig_by<M: Monitor, E: Debug>(
    start: fn(registrar::IoUring, M, Config) -> Result<TheCache<M>, E>,
    monitor: M,
    piece_bytes: usize,
) -> Option<Rig<M>> {
    let (ring, registrar) = ring_with_registrar(64, 64)?;
    let config = Config { piece_bytes, ..Config::keeping_all() };
    let cache = start(registrar, monitor, config).unwrap();
    Some(Rig { cache, ring: Mutex::new(ring), file: memory_file() })
}

/// With the real monitor.
fn watched_rig(piece_bytes: usize) -> Option<Rig<Arc<Userfaultfd>>> {
    match Userfaultfd::shared() {
        Ok(monitor) => rig(monitor, piece_bytes),
        Err(error) => {
            eprintln!("skipped: no userfaultfd: {error}");
            None
        }
    }
}

impl<M: Monitor> Rig<M> {
    fn zone(&self, message: usize, slots: usize) -> Zone<'_, registrar::IoUring, M, Slab> {
        let slab = Slab::new(message, slots, false).unwrap();
        Zone::new(&self.cache, slab, ZoneOptions::default()).unwrap()
    }

    /// Has the device write `data` to `place`.
    fn receive(&self, data: &[u8], place: AddressRange, handle: BufferIndex) {
        let mut ring = self.ring.lock().unwrap();
        self.file.write_all_at(data, 0).unwrap();
        begin(&mut ring, self.file.as_raw_fd(), place, handle, true);
        assert_eq!(complete(&mut ring), data.len());
    }

    /// What the device reads from `range`.
    fn send(&self, range: AddressRange, handle: BufferIndex) -> Vec<u8> {
        let mut ring = self.ring.lock().unwrap();
        begin(&mut ring, self.file.as_raw_fd(), range, handle, false);
        assert_eq!(complete(&mut ring), range.len());
        let mut sent = vec![0; range.len()];
        self.file.read_exact_at(&mut sent, 0).unwrap();
        sent
    }
}

fn begin(ring: &mut IoUring, file: RawFd, range: AddressRange, index: BufferIndex, into: bool) {
    let (file, length) = (types::Fd(file), u32::try_from(range.len()).unwrap());
    let at = std::ptr::with_exposed_provenance_mut(range.start());
    let entry = if into {
        opcode::ReadFixed::new(file, at, length, index.get()).build()
    } else {
        opcode::WriteFixed::new(file, at, length, index.get()).build()
    };
    // SAFETY: the memory is leased.
    unsafe { ring.submission().push(&entry) }.unwrap();
    ring.submit().unwrap();
}

fn complete(ring: &mut IoUring) -> usize {
    ring.submit_and_wait(1).unwrap();
    let result = ring.completion().next().unwrap().result();
    usize::try_from(result).unwrap_or_else(|_| panic!("errno {}", -result))
}

/// Data that flies until it is told to arrive: a read from a pipe.
struct Flight {
    writer: File,
    reader: File,
    place: AddressRange,
    handle: BufferIndex,
}

impl Flight {
    fn begin<M: Monitor>(rig: &Rig<M>, place: AddressRange, handle: BufferIndex) -> Self {
        let mut ends = [0; 2];
        // SAFETY: two new descriptors without another owner.
        let [reader, writer] = unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            ends.map(|end| File::from_raw_fd(end))
        };
        begin(&mut rig.ring.lock().unwrap(), reader.as_raw_fd(), place, handle, true);
        Self { writer, reader, place, handle }
    }

    /// A pipe gives what it has, so the rest is asked for again.
    fn end<M: Monitor>(mut self, rig: &Rig<M>, data: &[u8]) {
        let mut ring = rig.ring.lock().unwrap();
        thread::scope(|scope| {
            scope.spawn(move || self.writer.write_all(data).unwrap());
            let mut done = complete(&mut ring);
            while done < data.len() {
                let rest =
                    AddressRange::between(self.place.start() + done, self.place.end()).unwrap();
                begin(&mut ring, self.reader.as_raw_fd(), rest, self.handle, true);
                done += complete(&mut ring);
            }
        });
    }
}

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    let byte =
        |at: usize| (at.wrapping_mul(31) ^ (at >> 8) ^ seed.wrapping_mul(97)).to_le_bytes()[0];
    (0..bytes).map(byte).collect()
}

/// A target of `length` bytes, `offset` bytes from the beginning of `memory`.
fn target(memory: &Memory, offset: usize) -> *mut u8 {
    memory.pointer().wrapping_add(offset)
}

type ThePlace<'z, 'c, M> = Place<'z, 'c, registrar::IoUring, M, Slab>;
type TheArrived<'z, 'c, M> = Arrived<'z, 'c, registrar::IoUring, M, Slab>;
type TheRemapped<'z, 'c, M> = Remapped<'z, 'c, registrar::IoUring, M, Slab>;

// A monitor may say of anything that it has changed, and does on a machine that is overloaded. These
// three are for targets that have not: refused for that reason, they are vouched for.

fn land<M: Monitor>(arrived: TheArrived<'_, '_, M>, method: Method) -> Landed {
    match arrived.land_by(method) {
        Err(RemapRefused { state, error: LandError::TargetChanged }) => {
            // SAFETY: the test has not changed the target.
            unsafe { state.vouch() }.land_by(method).unwrap()
        }
        outcome => outcome.unwrap(),
    }
}

fn remap<'z, 'c, M: Monitor>(place: ThePlace<'z, 'c, M>) -> TheRemapped<'z, 'c, M> {
    match place.remap() {
        Err(RemapRefused { state, error: LandError::TargetChanged }) => {
            // SAFETY: as above.
            unsafe { state.vouch() }.remap().unwrap()
        }
        outcome => outcome.unwrap(),
    }
}

fn end<M: Monitor>(remapped: TheRemapped<'_, '_, M>) -> Landed {
    // SAFETY: the caller's transfer is complete.
    match unsafe { remapped.arrived() } {
        // SAFETY: as above.
        Err(refused) => unsafe { refused.state.vouch().arrived() }.unwrap(),
        Ok(landed) => landed,
    }
}

const METHODS: [Method; 3] = [Method::Copy, Method::Exchange, Method::Replace];

#[test]
fn whatever_the_method_and_the_edges_the_target_has_the_data_and_nothing_else_changes() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let zone = rig.zone(256 << 10, 1);
    let mut seed = 0;
    for method in METHODS {
        for (offset, length) in [
            (PAGE, PAGE),
            (PAGE, 16 * PAGE),
            (PAGE + 1, 2 * PAGE - 1),
            (PAGE + 100, 5 * PAGE),
            (PAGE - 1, 3 * PAGE + 2),
            (PAGE + 4000, 60 * PAGE + 7),
        ] {
            // Three through one slot: the pages that the first leaves carry the second.
            let mut memories = [(); 3].map(|()| Memory::new(70 * PAGE));
            for memory in &mut memories {
                memory.fill(0xee);
                seed += 1;
                let data = pattern(length, seed);
                // SAFETY: see the file's header.
                let place = unsafe { zone.ask(target(memory, offset), length) }.unwrap();
                rig.receive(&data, place.range(), place.handle());
                // SAFETY: the transfer is complete.
                let arrived = unsafe { place.arrived() };
                assert!(arrived.bytes() == data);
                let landed = land(arrived, method);
                assert_eq!(landed.moved_bytes + landed.copied_bytes, length);
                assert_eq!(landed.moved_bytes > 0, method != Method::Copy);
                let mut expected = vec![0xee; 70 * PAGE];
                expected[offset..offset + length].copy_from_slice(&data);
                assert!(memory.bytes() == expected, "{method:?} {offset} {length}");
            }
            // None of them is changed by what came later.
            for (memory, seed) in memories.iter().zip(seed - 2..) {
                assert!(memory.bytes()[offset..offset + length] == pattern(length, seed));
            }
        }
    }
}

#[test]
fn a_target_without_a_whole_page_is_copied_and_so_is_one_that_cannot_be_exchanged() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let slab = Slab::new(64 << 10, 1, false).unwrap();
    let options = ZoneOptions { crossover: Crossover::exchange_from(1), ..ZoneOptions::default() };
    let zone = Zone::new(&rig.cache, slab, options).unwrap();
    rig.file.set_len(64 << 10).unwrap();
    let private = Memory::new(8 * PAGE);
    let shared = Memory::shared_file(rig.file.as_raw_fd(), 8 * PAGE);
    for (memory, offset, length, why) in [
        (&private, 10, PAGE, LandError::NoWholePage),
        (&shared, 0, 4 * PAGE, LandError::UnsuitableMapping),
    ] {
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(target(memory, offset), length) }.unwrap();
        assert_eq!(place.method(), Method::Exchange);
        // The shared target is the file that the device reads, so it has its own data already;
        // what counts is the way.
        let data = pattern(length, 5);
        rig.receive(&data, place.range(), place.handle());
        // SAFETY: the transfer is complete.
        let landed = unsafe { place.arrived().vouch() }.land().unwrap();
        assert_eq!((landed.copied_because, landed.moved_bytes), (Some(why), 0));
        assert!(memory.bytes()[offset..offset + length] == data);
    }
}

#[test]
fn the_target_has_the_pages_while_the_device_still_writes_to_them() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let zone = rig.zone(256 << 10, 1);
    for (round, offset) in [PAGE, PAGE + 123, PAGE - 5].into_iter().enumerate() {
        let (length, mut memory) = (40 * PAGE + 77, Memory::new(50 * PAGE));
        memory.fill(0xee);
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(target(&memory, offset), length) }.unwrap();
        let flight = Flight::begin(&rig, place.range(), place.handle());
        let remapped = remap(place);
        let data = pattern(length, round);
        flight.end(&rig, &data);
        let landed = end(remapped);
        assert!(landed.moved_bytes >= 39 * PAGE && landed.copied_because.is_none());
        let mut expected = vec![0xee; 50 * PAGE];
        expected[offset..offset + length].copy_from_slice(&data);
        assert!(memory.bytes() == expected, "from {offset}");
    }
}

#[test]
fn a_target_that_changed_while_the_data_flew_is_refused_and_what_stands_there_is_left_alone() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let zone = rig.zone(64 << 10, 1);
    for method in METHODS {
        let mut memory = Memory::new(8 * PAGE);
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(target(&memory, 100), 5 * PAGE) }.unwrap();
        let flight = Flight::begin(&rig, place.range(), place.handle());
        memory.replace();
        memory.fill(0xaa);
        let data = pattern(5 * PAGE, 3);
        flight.end(&rig, &data);
        // SAFETY: the transfer is complete.
        let refused = unsafe { place.arrived() }.land_by(method).unwrap_err();
        assert_eq!(refused.error, LandError::TargetChanged, "{method:?}");
        assert!(refused.state.bytes() == data, "the data is still there");
        assert!(memory.bytes().iter().all(|&byte| byte == 0xaa));
        drop(refused);
        assert_eq!(zone.free_slots(), 1);
    }
}

#[test]
fn a_target_that_is_gone_while_the_data_flies_is_refused() {
    alone("a_target_that_is_gone_while_the_data_flies_is_refused", || {
        let Some(rig) = watched_rig(1 << 20) else { return };
        let zone = rig.zone(64 << 10, 1);
        let mut memory = Memory::new(8 * PAGE);
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(target(&memory, 0), 6 * PAGE) }.unwrap();
        memory.unmap(2 * PAGE, PAGE);
        let refused = place.remap().unwrap_err();
        assert_eq!(refused.error, LandError::TargetChanged);
        // SAFETY: no transfer was begun.
        let refused = unsafe { refused.state.arrived() }.land().unwrap_err();
        assert_eq!(refused.error, LandError::TargetChanged);
    });
}

/// What the device writes is in pages that have no other use; the new mapping keeps its own.
#[test]
fn a_target_replaced_behind_the_remapping_loses_the_data_and_nothing_else_is_written() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let zone = rig.zone(64 << 10, 1);
    let (mut memory, length) = (Memory::new(8 * PAGE), 4 * PAGE + 50);
    // SAFETY: see the file's header.
    let place = unsafe { zone.ask(target(&memory, 10), length) }.unwrap();
    let flight = Flight::begin(&rig, place.range(), place.handle());
    let remapped = remap(place);
    memory.replace();
    memory.fill(0xaa);
    flight.end(&rig, &pattern(length, 1));
    // SAFETY: the transfer is complete.
    let refused = unsafe { remapped.arrived() }.unwrap_err();
    assert_eq!(refused.error, LandError::TargetChanged);
    drop(refused);
    assert!(memory.bytes().iter().all(|&byte| byte == 0xaa));
    // The slot is as good as before.
    // SAFETY: see the file's header.
    let place = unsafe { zone.ask(target(&memory, 10), length) }.unwrap();
    let data = pattern(length, 2);
    rig.receive(&data, place.range(), place.handle());
    // SAFETY: the transfer is complete.
    land(unsafe { place.arrived() }, Method::Exchange);
    assert!(memory.bytes()[10..10 + length] == data);
}

/// A program that moves the target's pages finds the data where it moved them.
#[test]
fn data_follows_pages_that_are_moved_behind_the_remapping() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let zone = rig.zone(64 << 10, 1);
    let (from, to) = (Memory::new(4 * PAGE), Memory::new(4 * PAGE));
    // SAFETY: see the file's header.
    let place = unsafe { zone.ask(from.pointer(), 4 * PAGE) }.unwrap();
    let flight = Flight::begin(&rig, place.range(), place.handle());
    let remapped = remap(place);
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: both are the test's own memory.
    let moved = unsafe {
        let (from, to) = (from.pointer().cast(), to.pointer().cast::<libc::c_void>());
        libc::mremap(from, 4 * PAGE, 4 * PAGE, how, to)
    };
    assert_eq!(moved, to.pointer().cast());
    let data = pattern(4 * PAGE, 4);
    flight.end(&rig, &data);
    // SAFETY: the transfer is complete.
    assert!(unsafe { remapped.arrived() }.is_err());
    assert!(to.bytes() == data);
    assert!(from.bytes().iter().all(|&byte| byte == 0));
}

#[test]
fn a_place_dropped_while_data_flies_does_not_spoil_the_next_message() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let zone = rig.zone(64 << 10, 1);
    let (memory, length) = (Memory::new(8 * PAGE), 6 * PAGE);
    for early in [false, true] {
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(memory.pointer(), length) }.unwrap();
        let late = Flight::begin(&rig, place.range(), place.handle());
        if early {
            drop(remap(place));
        } else {
            drop(place);
        }
        // SAFETY: the other half of the memory.
        let next = unsafe { zone.ask(memory.pointer(), length) }.unwrap();
        let data = pattern(length, 6);
        rig.file.write_all_at(&data, 0).unwrap();
        begin(
            &mut rig.ring.lock().unwrap(),
            rig.file.as_raw_fd(),
            next.range(),
            next.handle(),
            true,
        );
        assert_eq!(complete(&mut rig.ring.lock().unwrap()), length);
        // Now the late data comes, as much as one read takes.
        let mut writer = &late.writer;
        writer.write_all(&[0xdd; PAGE]).unwrap();
        assert_eq!(complete(&mut rig.ring.lock().unwrap()), PAGE);
        // SAFETY: the transfer is complete.
        let arrived = unsafe { next.arrived() };
        assert!(arrived.bytes() == data, "remapped before it was dropped: {early}");
        land(arrived, Method::Copy);
    }
}

/// The target is its owner's again when the guard is gone, and the device writes on elsewhere.
#[test]
fn a_remapped_place_dropped_while_data_flies_leaves_its_target_to_the_owner() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let zone = rig.zone(64 << 10, 1);
    for locked in [false, true] {
        let (mut memory, length) = (Memory::new(8 * PAGE), 6 * PAGE);
        memory.fill(1);
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(memory.pointer(), length) }.unwrap();
        let late = Flight::begin(&rig, place.range(), place.handle());
        let remapped = remap(place);
        if locked {
            // What is locked cannot be discarded.
            // SAFETY: the test's own memory.
            assert_eq!(unsafe { libc::mlock(memory.pointer().cast(), length) }, 0);
        }
        drop(remapped);
        memory.fill(7);
        let mut writer = &late.writer;
        writer.write_all(&[0xee; PAGE]).unwrap();
        assert_eq!(complete(&mut rig.ring.lock().unwrap()), PAGE);
        assert!(memory.bytes().iter().all(|&byte| byte == 7), "locked: {locked}");
    }
}

/// More changes than the monitor's log has entries.
const LAPPING: usize = 5_000;

/// Who makes the changes that are reported while a target is remapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reporter {
    Kernel,
    Feed,
}

/// `LAPPING` changes of other memory in a row, while nothing reads the log.
fn lap(monitor: &WithFeed<Arc<Userfaultfd>>, reporter: Reporter) {
    let other = Memory::new(PAGE);
    assert_eq!(monitor.watch(other.range()), Watch::Covered);
    // SAFETY: the test's own memory.
    let discard = || unsafe { libc::madvise(other.pointer().cast(), PAGE, libc::MADV_DONTNEED) };
    for _ in 0..LAPPING {
        match reporter {
            Reporter::Feed => monitor.feed().changed(other.range()),
            Reporter::Kernel => assert_eq!(discard(), 0),
        }
    }
}

/// A cache without a thread of its own: no call reads the log between the remapping and its end.
fn unread_rig() -> Option<Rig<WithFeed<Arc<Userfaultfd>>>> {
    match Userfaultfd::shared() {
        Ok(monitor) => {
            static FEED: Feed = Feed::new();
            rig_by(Cache::new, WithFeed::new(monitor, &FEED), 1 << 20)
        }
        Err(error) => {
            eprintln!("skipped: no userfaultfd: {error}");
            None
        }
    }
}

/// The process was aborted, because the entries that would have said so were overwritten before they were read.
#[test]
fn a_remapped_place_behind_a_lapped_log_still_knows_its_target() {
    alone("a_remapped_place_behind_a_lapped_log_still_knows_its_target", || {
        let Some(rig) = unread_rig() else { return };
        let zone = rig.zone(64 << 10, 1);
        for reporter in [Reporter::Kernel, Reporter::Feed] {
            for is_changed in [false, true] {
                let (mut memory, length) = (Memory::new(4 * PAGE), 4 * PAGE);
                // SAFETY: see the file's header.
                let place = unsafe { zone.ask(memory.pointer(), length) }.unwrap();
                let remapped = remap(place);
                memory.fill(3);
                if is_changed {
                    // SAFETY: as above.
                    let done = unsafe {
                        libc::madvise(memory.pointer().cast(), PAGE, libc::MADV_DONTNEED)
                    };
                    assert_eq!(done, 0);
                    memory.fill(5);
                }
                lap(rig.cache.monitor(), reporter);
                drop(remapped);
                let expected = if is_changed { 5 } else { 0 };
                assert!(
                    memory.bytes().iter().all(|&byte| byte == expected),
                    "{reporter:?}, changed: {is_changed}"
                );
            }
        }
    });
}

/// Watched memory that threads discard over and over while this is told to, so that the monitor finds no moment at which no
/// change is under way.
struct Discarding {
    goes_on: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Discarding {
    fn new(monitor: &Userfaultfd, threads: usize) -> Self {
        let [goes_on, is_over] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let discards = |()| {
            let memory = Memory::new(64 * PAGE);
            assert_eq!(monitor.watch(memory.range()), Watch::Covered);
            let (start, length) = (memory.range().start(), memory.range().len());
            std::mem::forget(memory);
            let (goes_on, is_over) = (Arc::clone(&goes_on), Arc::clone(&is_over));
            thread::spawn(move || {
                while !is_over.load(SeqCst) {
                    if goes_on.load(SeqCst) {
                        let start = std::ptr::with_exposed_provenance_mut(start);
                        // SAFETY: the test's own memory, which stays.
                        let done = unsafe { libc::madvise(start, length, libc::MADV_DONTNEED) };
                        assert_eq!(done, 0);
                    } else {
                        thread::yield_now();
                    }
                }
            })
        };
        let threads = std::iter::repeat_n((), threads).map(discards).collect();
        Self { goes_on, is_over, threads }
    }

    fn goes_on(&self, goes_on: bool) {
        self.goes_on.store(goes_on, SeqCst);
    }
}

impl Drop for Discarding {
    fn drop(&mut self) {
        self.is_over.store(true, SeqCst);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

/// Whether the device's late data came into `memory`, which was filled with 7 since.
fn is_spoilt<M: Monitor>(rig: &Rig<M>, late: &Flight, memory: &Memory) -> bool {
    let mut writer = &late.writer;
    writer.write_all(&[0xee; PAGE]).unwrap();
    assert_eq!(complete(&mut rig.ring.lock().unwrap()), PAGE);
    !memory.bytes().iter().all(|&byte| byte == 7)
}

/// The monitor says that everything has changed where changes follow one another. That was taken for a change of the target,
/// which kept its pages, and the device wrote what its owner had.
#[test]
fn changes_of_other_memory_leave_no_pages_in_a_target_behind_a_dropped_place() {
    let name = "changes_of_other_memory_leave_no_pages_in_a_target_behind_a_dropped_place";
    alone(name, || {
        let Some(rig) = watched_rig(1 << 20) else { return };
        let zone = rig.zone(64 << 10, 4);
        for (threads, ragged) in [(1, 0), (4, 0), (4, 100)] {
            let discarding = Discarding::new(rig.cache.monitor(), threads);
            let remapped = [(); 4].map(|()| {
                let memory = Memory::new(8 * PAGE);
                // SAFETY: see the file's header.
                let place = unsafe { zone.ask(target(&memory, ragged), 6 * PAGE) }.unwrap();
                let whole = place.range().start().next_multiple_of(PAGE);
                let page = AddressRange::new(whole, PAGE).unwrap();
                let late = Flight::begin(&rig, page, place.handle());
                let remapped = remap(place);
                assert!(remapped.is_watched());
                (memory, remapped, late)
            });
            discarding.goes_on(true);
            for (mut memory, remapped, late) in remapped {
                drop(remapped);
                memory.fill(7);
                assert!(!is_spoilt(&rig, &late, &memory), "{threads} {ragged}");
            }
        }
    });
}

/// It says that it watches everything, and knows nothing of the target's mapping.
#[test]
fn a_simulated_monitor_watches_no_target() {
    let cache = Cache::new(Fake(Willing), Fake(Calm), Config::keeping_all()).unwrap();
    let slab = Slab::new(PAGE, 1, false).unwrap();
    let zone = Zone::new(&cache, slab, ZoneOptions::default()).unwrap();
    let mut target = vec![0_u8; PAGE];
    // SAFETY: the target is this test's own, and no device writes anything.
    let place = unsafe { zone.ask(target.as_mut_ptr(), PAGE) }.unwrap();
    assert!(!place.is_watched());
}

/// Discards of other memory begin as a place is remapped: it is remapped and watched, or the place has its pages again. Dropping
/// what was remapped ended the process.
#[test]
fn a_place_that_is_remapped_beside_discards_is_watched_or_given_back() {
    alone("a_place_that_is_remapped_beside_discards_is_watched_or_given_back", || {
        let Some(rig) = watched_rig(1 << 20) else { return };
        let zone = rig.zone(64 << 10, 4);
        let discarding = Discarding::new(rig.cache.monitor(), 3);
        for round in 0..6 {
            let mut memory = Memory::new(8 * PAGE);
            // SAFETY: see the file's header.
            let place = unsafe { zone.ask(memory.pointer(), 6 * PAGE) }.unwrap();
            assert!(place.is_watched());
            let late = Flight::begin(&rig, place.range(), place.handle());
            discarding.goes_on(true);
            let remapped = place.remap();
            match remapped {
                Ok(remapped) => {
                    assert!(remapped.is_watched());
                    drop(remapped);
                    memory.fill(7);
                    assert!(!is_spoilt(&rig, &late, &memory), "{round}");
                }
                Err(RemapRefused { state: place, error }) => {
                    // Behind the second of them nothing was moved.
                    let errors = [LandError::TargetUnwatched, LandError::TargetChanged];
                    assert!(errors.contains(&error), "{error}");
                    memory.fill(7);
                    assert!(!is_spoilt(&rig, &late, &memory), "{round}");
                    // SAFETY: as much as was asked for is there.
                    let arrived = unsafe { place.arrived() };
                    assert_eq!(arrived.bytes()[..PAGE], [0xee; PAGE]);
                }
            }
            discarding.goes_on(false);
        }
    });
}

/// What the feed reports of a remapped target is known as long after it.
#[test]
fn a_report_to_the_feed_behind_a_lapped_log_leaves_the_target_alone() {
    alone("a_report_to_the_feed_behind_a_lapped_log_leaves_the_target_alone", || {
        let Some(rig) = unread_rig() else { return };
        let zone = rig.zone(64 << 10, 1);
        let mut memory = Memory::new(4 * PAGE);
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(memory.pointer(), 4 * PAGE) }.unwrap();
        let remapped = remap(place);
        rig.cache.monitor().feed().changed(memory.part(PAGE, PAGE));
        memory.fill(5);
        lap(rig.cache.monitor(), Reporter::Feed);
        drop(remapped);
        assert!(memory.bytes().iter().all(|&byte| byte == 5));
    });
}

/// The next zone of the cache, at the same address or not, receives into its own pages.
#[test]
fn a_forgotten_place_spoils_no_message_of_the_next_zone() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let (memory, length) = (Memory::new(8 * PAGE), 6 * PAGE);
    for _ in 0..4 {
        let zone = rig.zone(64 << 10, 1);
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(memory.pointer(), length) }.unwrap();
        let data = pattern(length, 6);
        rig.receive(&data, place.range(), place.handle());
        // SAFETY: the transfer is complete.
        let arrived = unsafe { place.arrived() };
        assert!(arrived.bytes() == data);
        land(arrived, Method::Copy);
        // SAFETY: as above.
        std::mem::forget(unsafe { zone.ask(memory.pointer(), length) }.unwrap());
    }
}

/// The target had been sent from before, so its old pages are registered; what is sent afterwards is
/// what has landed.
fn registrations_of_the_target_are_given_up<M: Monitor>(rig: &Rig<M>, vouched: bool) {
    let zone = rig.zone(64 << 10, 2);
    let mut memory = Memory::new(8 * PAGE);
    let get = |memory: &Memory| {
        let start = memory.pointer().cast_const();
        // SAFETY: see the file's header; the zone tells the cache of its changes.
        let lease = unsafe {
            if vouched {
                rig.cache.request(start, 8 * PAGE, Access::READ).vouched().get()
            } else {
                rig.cache.get(start, 8 * PAGE, Access::READ)
            }
        };
        lease.unwrap()
    };
    for (round, early) in [false, true].into_iter().enumerate() {
        memory.fill(0x11);
        drop(get(&memory));
        let (offset, length) = (PAGE / 2, 6 * PAGE);
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(target(&memory, offset), length) }.unwrap();
        let data = pattern(length, round);
        if early {
            let flight = Flight::begin(rig, place.range(), place.handle());
            let remapped = remap(place);
            flight.end(rig, &data);
            end(remapped);
        } else {
            rig.receive(&data, place.range(), place.handle());
            // SAFETY: the transfer is complete.
            land(unsafe { place.arrived() }, Method::Exchange);
        }
        let lease = get(&memory);
        let sent = rig.send(memory.range(), lease.handle());
        assert!(sent == memory.bytes(), "remapped early: {early}");
        assert!(sent[offset..offset + length] == data);
    }
}

#[test]
fn the_monitor_sees_what_landing_does_to_a_registered_target() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    registrations_of_the_target_are_given_up(&rig, false);
}

#[test]
fn without_a_monitor_the_zone_tells_the_cache_itself() {
    let Some(rig) = rig(NoMonitor::new().unwrap(), 1 << 20) else { return };
    registrations_of_the_target_are_given_up(&rig, true);
}

#[test]
fn places_are_lent_as_long_as_there_are_any() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let zone = rig.zone(64 << 10, 2);
    let memory = Memory::new(64 << 10);
    let ask = |length| {
        // SAFETY: see the file's header; no two of these ever land.
        unsafe { zone.ask(memory.pointer(), length) }
    };
    assert!(matches!(ask(0), Err(AskError::Range(_))));
    assert!(matches!(ask(1 << 20), Err(AskError::NoSlot { free: 2, .. })));
    let (first, second) = (ask(PAGE).unwrap(), ask(64 << 10).unwrap());
    assert!(!first.range().overlaps(&second.range()));
    assert!(matches!(ask(1), Err(AskError::NoSlot { free: 0, .. })));
    drop(first);
    let again = ask(1).unwrap();
    drop((again, second));
    assert_eq!(zone.refill().unwrap(), 2, "what was dropped has lost its registration");
    assert_eq!(zone.refill().unwrap(), 0);
    drop(zone);
    // Waits for what the reclaimer's thread is giving back as well.
    rig.cache.evict_idle();
    let left = rig.cache.statistics().regions;
    assert_eq!(left, 3, "a request that waits in a queue may name what was dropped");
}

#[test]
fn a_slot_that_no_registration_can_hold_is_refused() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let slab = Slab::new(1 << 30, 1, false).unwrap();
    let refused = Zone::new(&rig.cache, slab, ZoneOptions::default()).unwrap_err();
    assert!(matches!(refused, ZoneError::SlotTooLong { max_region_bytes: 0x4000_0000, .. }));
    assert!(Slab::new(0, 1, false).is_err() && Slab::new(1, 0, false).is_err());
    assert!(Slab::new(usize::MAX, 1, false).is_err() && Slab::new(8, usize::MAX, false).is_err());
}

#[test]
fn huge_pages_change_places_too() {
    let Some(rig) = watched_rig(16 << 20) else { return };
    let slab = Slab::new(8 << 20, 1, true).unwrap();
    let zone = Zone::new(&rig.cache, slab, ZoneOptions::default()).unwrap();
    let memory = Memory::new(16 << 20);
    // SAFETY: the test's own memory.
    unsafe { libc::madvise(memory.pointer().cast(), 16 << 20, libc::MADV_HUGEPAGE) };
    for (round, offset) in [0, 12345, 2 << 20].into_iter().enumerate() {
        let (length, data) = (6 << 20, pattern(6 << 20, round));
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(target(&memory, offset), length) }.unwrap();
        rig.receive(&data, place.range(), place.handle());
        // SAFETY: the transfer is complete.
        land(unsafe { place.arrived() }, Method::Exchange);
        assert!(memory.bytes()[offset..offset + length] == data, "from {offset}");
    }
}

/// Threads that share a zone, each with targets of its own, at random and again by the seed.
#[test]
fn many_threads_land_in_one_zone_and_every_byte_is_right() {
    let Some(rig) = watched_rig(1 << 20) else { return };
    let seed = std::env::var("PINFOLD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("seed {seed} (PINFOLD_SEED)");
    let zone = rig.zone(128 << 10, 3);
    thread::scope(|scope| {
        for number in 0..3 {
            let (rig, zone) = (&rig, &zone);
            scope.spawn(move || land_at_random(rig, zone, seed.wrapping_mul(3) + number));
        }
    });
}

fn land_at_random(
    rig: &Rig<Arc<Userfaultfd>>,
    zone: &Zone<'_, registrar::IoUring, Arc<Userfaultfd>, Slab>,
    seed: u64,
) {
    let mut state = seed;
    let mut below = |limit: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % limit
    };
    let mut memory = Memory::new(48 * PAGE);
    for round in 0..150 {
        let (offset, length) = (below(8 * PAGE), 1 + below(32 * PAGE));
        let data = pattern(length, round);
        let mut expected = memory.bytes();
        expected[offset..offset + length].copy_from_slice(&data);
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(target(&memory, offset), length) }.unwrap();
        // Beside other threads' changes a target may not be watched, and then its changes are not found out.
        let changed = below(8) == 0 && place.is_watched();
        if changed {
            memory.replace();
            expected = vec![0; 48 * PAGE];
        }
        let place = match below(3) {
            0 => match place.remap() {
                Ok(remapped) => {
                    assert!(!changed, "seed {seed}");
                    rig.receive(&data, remapped.range(), remapped.handle());
                    end(remapped);
                    assert!(memory.bytes() == expected, "seed {seed}, round {round}");
                    continue;
                }
                Err(refused) => refused.state,
            },
            _ => place,
        };
        rig.receive(&data, place.range(), place.handle());
        // SAFETY: the transfer is complete.
        let arrived = unsafe { place.arrived() };
        let landed = match METHODS[below(3)] {
            Method::Copy => arrived.land(),
            method => arrived.land_by(method),
        };
        match landed {
            Ok(_) => assert!(!changed, "seed {seed}, round {round}"),
            Err(refused) if changed => assert_eq!(refused.error, LandError::TargetChanged),
            Err(refused) => {
                let known =
                    [LandError::NoWholePage, LandError::TooManyMappings, LandError::TargetChanged];
                assert!(known.contains(&refused.error), "{refused:?}, seed {seed}");
                // SAFETY: the target has not changed, though others' changes may have the monitor say that all has.
                unsafe { refused.state.vouch() }.land_by(Method::Copy).unwrap();
            }
        }
        assert!(memory.bytes() == expected, "seed {seed}, round {round}");
    }
}

#[test]
fn a_crossover_is_measured_written_down_and_read_again() {
    let Some(rig) = watched_rig(8 << 20) else { return };
    let measured = Crossover::measure(&rig.cache, false, true).unwrap();
    let sizes: Vec<usize> = measured.iter().map(|each| each.bytes).collect();
    assert_eq!(sizes, [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]);
    let there = |Measured { copy, exchange, replace, .. }: &Measured| {
        [copy, exchange, replace].iter().all(|&&time| time > Duration::ZERO)
    };
    assert!(measured.iter().all(there), "{measured:?}");
    let crossover = Crossover::of(&measured);
    let directory = std::env::temp_dir().join(format!("pinfold-landing-{}", std::process::id()));
    let file = directory.join("a").join("landing-io_uring");
    crossover.store(&file).unwrap();
    assert_eq!(Crossover::load(&file).unwrap(), crossover);
    std::fs::write(&file, "something else").unwrap();
    assert!(Crossover::load(&file).is_err());
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(Crossover::load(&file).is_err());
    rig.cache.evict_idle();
    assert_eq!(rig.cache.statistics().regions, 0);
}

/// As of a pool's: the registration of a reserved buffer names the pages that it has.
#[test]
fn a_reserved_buffer_keeps_its_pages() {
    let (Some(rig), Ok(ring)) = (watched_rig(2 << 20), IoUring::new(8)) else { return };
    // SAFETY: the ring's table of buffers is left to the registrar.
    let registrar = Arc::new(unsafe { registrar::IoUring::new(&ring, 8) }.unwrap());
    let budget = Budget::new(Amount { bytes: 1 << 20, regions: 8 }).unwrap();
    let (buffers, buffer_bytes, access) = (1, 16 * PAGE, Access::READ_WRITE);
    let reserved = budget.reserve(&registrar, Reserve { buffers, buffer_bytes, access }).unwrap();
    let buffer = reserved.take().unwrap();
    let target = std::ptr::with_exposed_provenance_mut(buffer.range().start());
    let zone = rig.zone(64 * PAGE, 1);
    let data = pattern(buffer_bytes, 5);
    // SAFETY: the buffer is this test's alone.
    let place = unsafe { zone.ask(target, data.len()) }.unwrap();
    rig.receive(&data, place.range(), place.handle());
    let RemapRefused { state: place, error } = place.remap().unwrap_err();
    assert_eq!(error, LandError::PoolMemory);
    // SAFETY: the transfer has ended, and the target has not changed.
    let arrived = unsafe { place.vouch().arrived() };
    assert_eq!(arrived.land_by(Method::Copy).unwrap().copied_bytes, data.len());
}

/// A pool's slab is registered with the pages that it has: were they exchanged, the buffer would go on
/// sending what was there before.
#[test]
fn what_lands_in_a_pools_buffer_is_what_its_registration_sends() {
    let (Some(rig), Ok(ring)) = (watched_rig(2 << 20), IoUring::new(8)) else { return };
    let (ring, registrar) = {
        // SAFETY: the ring's table of buffers is left to the registrar.
        let registrar = unsafe { registrar::IoUring::new(&ring, 8) }.unwrap();
        (Mutex::new(ring), registrar)
    };
    let pool = Pool::new(registrar, PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() });
    let pool = pool.unwrap();
    let zone = rig.zone(64 * PAGE, 1);
    let data = pattern(16 * PAGE, 5);
    let buffer = pool.get(data.len()).unwrap();
    let (handle, range) = (buffer.handle(), buffer.range().unwrap());
    let target = buffer.into_raw();
    // SAFETY: the buffer is out, as a bare address, and this test's alone.
    let place = unsafe { zone.ask(target.as_ptr(), data.len()) }.unwrap();
    rig.receive(&data, place.range(), place.handle());
    let RemapRefused { state: place, error } = place.remap().unwrap_err();
    assert_eq!(error, LandError::PoolMemory);
    // SAFETY: the transfer has ended, and the target has not changed.
    let arrived = unsafe { place.vouch().arrived() };
    let RemapRefused { state: arrived, error } = arrived.land_by(Method::Exchange).unwrap_err();
    assert_eq!(error, LandError::PoolMemory);
    assert_eq!(arrived.land_by(Method::Copy).unwrap().copied_bytes, data.len());
    let sent = {
        let mut ring = ring.lock().unwrap();
        begin(&mut ring, rig.file.as_raw_fd(), range, handle, false);
        assert_eq!(complete(&mut ring), data.len());
        let mut sent = vec![0; data.len()];
        rig.file.read_exact_at(&mut sent, 0).unwrap();
        sent
    };
    assert!(sent == data);
    // SAFETY: the address came from `into_raw`, and no device uses it any more.
    assert!(unsafe { pool.from_raw(target) }.is_some());
}

/// Pages that panic as they are asked, once.
struct Moody(Slab, Arc<AtomicBool>);

// SAFETY: the slab's promise.
unsafe impl SlabPages for Moody {
    fn slots(&self) -> Vec<AddressRange> {
        self.0.slots()
    }

    fn aside(&self) -> AddressRange {
        self.0.aside()
    }

    fn granule(&self) -> usize {
        self.0.granule()
    }

    fn huge(&self) -> bool {
        assert!(!self.1.swap(false, SeqCst), "as told");
        false
    }
}

/// The registration of the target is of the pages that it had.
#[test]
fn slab_pages_that_panic_in_an_exchange_leave_no_stale_registration_of_the_target() {
    let Some(rig) = rig(NoMonitor::new().unwrap(), 1 << 20) else { return };
    let armed = Arc::new(AtomicBool::new(false));
    let pages = Moody(Slab::new(64 << 10, 1, false).unwrap(), Arc::clone(&armed));
    let zone = Zone::new(&rig.cache, pages, ZoneOptions::default()).unwrap();
    let mut memory = Memory::new(8 * PAGE);
    memory.fill(0x11);
    let request = |start: *const u8| rig.cache.request(start, 8 * PAGE, Access::WRITE).vouched();
    // SAFETY: see the file's header; the zone tells the cache of its changes.
    drop(unsafe { request(memory.pointer()).get() }.unwrap());
    // SAFETY: see the file's header.
    let place = unsafe { zone.ask(memory.pointer(), 8 * PAGE) }.unwrap();
    rig.receive(&pattern(8 * PAGE, 3), place.range(), place.handle());
    armed.store(true, SeqCst);
    // SAFETY: the transfer is complete.
    let arrived = unsafe { place.arrived() };
    let land = || arrived.land_by(Method::Exchange).map(drop).map_err(drop);
    let _panicked_or_not = std::panic::catch_unwind(std::panic::AssertUnwindSafe(land));
    // SAFETY: as above.
    let lease = unsafe { request(memory.pointer()).get() }.unwrap();
    let data = pattern(8 * PAGE, 9);
    rig.receive(&data, memory.range(), lease.handle());
    assert!(memory.bytes() == data, "the device wrote into pages that the target has no more");
}
