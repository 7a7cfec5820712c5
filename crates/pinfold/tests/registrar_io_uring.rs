//! Registered buffers of real rings: the right bytes, the right errors, and nothing left behind.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register memory and to submit requests for it. Memory that a
//! request uses outlives the request: every helper waits for its completion.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use io_uring::{opcode, squeue, types};
use pinfold::registrar::{BufferIndex, IoUring, IoUringError, MAX_BUFFER_BYTES, MAX_SLOTS};
use pinfold::suspend::Suspend;
use pinfold::{
    Access, AddressRange, BadAddress, CacheError, Config, ConfigError, DeregisterError,
    RegisterError, Registrar,
};
use pinfold_sim::{Calm, Fake};
use registrar_support::{
    Memory, Own, PAGE, alone, in_forked_child, live_under_a_limit, memory_file, status_bytes,
};
use std::collections::HashSet;
use std::fs::File;
use std::io::{PipeReader, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A ring, or a note why there is none.
fn ring() -> Option<io_uring::IoUring> {
    match io_uring::IoUring::new(8) {
        Ok(ring) => Some(ring),
        Err(error) => {
            eprintln!("skipped: no io_uring: {error}");
            None
        }
    }
}

/// A registrar of the test's own ring.
fn registrar_of(ring: &impl AsRawFd, slots: u32) -> Result<IoUring, IoUringError> {
    // SAFETY: the ring's table of buffers is left to the registrar, or its loss is what is tested.
    unsafe { IoUring::new(ring, slots) }
}

fn register(registrar: &IoUring, range: AddressRange) -> Result<BufferIndex, RegisterError> {
    // SAFETY: the ranges are the test's own memory, or no memory at all.
    unsafe { registrar.register(range, Access::READ_WRITE) }
}

fn submit(ring: &mut io_uring::IoUring, entry: &squeue::Entry) {
    // SAFETY: see the header.
    unsafe { ring.submission().push(entry).unwrap() };
    ring.submit().unwrap();
}

fn completion(ring: &mut io_uring::IoUring) -> i32 {
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

/// Writes the registered memory to the beginning of `file`; the kernel's result.
fn send(ring: &mut io_uring::IoUring, file: RawFd, memory: &Memory, index: u16) -> i32 {
    let length = u32::try_from(memory.range().len()).unwrap();
    submit(
        ring,
        &opcode::WriteFixed::new(types::Fd(file), memory.pointer(), length, index).build(),
    );
    completion(ring)
}

/// Reads the beginning of `file` into the registered memory; the kernel's result.
fn receive(ring: &mut io_uring::IoUring, file: RawFd, memory: &Memory, index: u16) -> i32 {
    let length = u32::try_from(memory.range().len()).unwrap();
    submit(ring, &opcode::ReadFixed::new(types::Fd(file), memory.pointer(), length, index).build());
    completion(ring)
}

fn contents(file: &File, length: usize) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn ok(length: usize) -> i32 {
    i32::try_from(length).unwrap()
}

/// The bug that everything here is about, without Pinfold: were it gone from the kernel, so were
/// the need for a cache that watches.
#[test]
fn fact_a_raw_registration_goes_stale_when_memory_is_mapped_anew() {
    let Some(mut ring) = ring() else { return };
    let mut memory = Memory::new(PAGE);
    memory.fill(b'o');
    let buffer = libc::iovec { iov_base: memory.pointer().cast(), iov_len: PAGE };
    // SAFETY: the memory lives to the end of the test.
    unsafe { ring.submitter().register_buffers(&[buffer]).unwrap() };
    memory.replace();
    memory.fill(b'n');
    let file = memory_file();
    assert_eq!(send(&mut ring, file.as_raw_fd(), &memory, 0), ok(PAGE), "no error");
    assert_eq!(contents(&file, PAGE), [b'o'; PAGE], "the old bytes");
}

#[test]
fn bytes_go_out_and_come_back() {
    let Some(mut ring) = ring() else { return };
    let registrar = registrar_of(&ring, 4).unwrap();
    for length in [1, PAGE, 3 * PAGE + 17, 1 << 20] {
        let (mut source, target) = (Memory::new(length), Memory::new(length));
        source.fill(0x5a);
        let (from, to) =
            (register(&registrar, source.range()).unwrap(), register(&registrar, target.range()));
        let to = to.unwrap();
        let file = memory_file();
        assert_eq!(send(&mut ring, file.as_raw_fd(), &source, from.get()), ok(length));
        assert_eq!(receive(&mut ring, file.as_raw_fd(), &target, to.get()), ok(length));
        assert!(target.bytes() == source.bytes(), "{length} bytes");
        registrar.deregister_own(from, source.range()).unwrap();
        registrar.deregister_own(to, target.range()).unwrap();
        let gone = send(&mut ring, file.as_raw_fd(), &source, from.get());
        assert_eq!(gone, -libc::EFAULT, "an emptied slot serves no request");
    }
}

/// What each kind of unusable memory is answered with. In a process of its own, because another
/// test might map memory where this one leaves a hole.
#[test]
fn bad_addresses_are_told_apart_and_leave_nothing_behind() {
    alone("bad_addresses_are_told_apart_and_leave_nothing_behind", bad_addresses_are_told_apart);
}

fn bad_addresses_are_told_apart() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 2).unwrap();
    let read_only = Memory::with_protection(2 * PAGE, libc::PROT_READ);
    let no_access = Memory::with_protection(PAGE, libc::PROT_NONE);
    let mut half = Memory::new(2 * PAGE);
    half.unmap(PAGE, PAGE);
    let kernel = AddressRange::new(0xffff_8880_0000_0000, PAGE).unwrap();
    let mut gone = Memory::new(PAGE);
    gone.unmap(0, PAGE);
    let cases = [
        (read_only.range(), BadAddress::NotWritable { at: read_only.range().start() }),
        (no_access.range(), BadAddress::NoAccess { at: no_access.range().start() }),
        (half.range(), BadAddress::Unmapped { at: half.range().start() + PAGE }),
        (gone.range(), BadAddress::Unmapped { at: gone.range().start() }),
        (kernel, BadAddress::Kernel { at: kernel.start() }),
    ];
    for (range, reason) in cases {
        let error = register(&registrar, range).unwrap_err();
        let errno = libc::EFAULT;
        assert_eq!(error, RegisterError::BadAddress { range, reason, errno });
        assert!(!error.is_about_room());
    }
    assert_eq!(free_slots(&registrar), 2);
}

/// How many registrations there is room for.
fn free_slots(registrar: &IoUring) -> usize {
    let memory = Memory::new(PAGE);
    let made: Vec<_> = std::iter::from_fn(|| register(registrar, memory.range()).ok()).collect();
    for index in &made {
        registrar.deregister_own(*index, memory.range()).unwrap();
    }
    made.len()
}

#[test]
fn what_no_ring_can_take_is_refused_beforehand() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 1).unwrap();
    let range = AddressRange::new(PAGE, MAX_BUFFER_BYTES + 1).unwrap();
    let max_bytes = MAX_BUFFER_BYTES;
    assert_eq!(register(&registrar, range), Err(RegisterError::TooLarge { range, max_bytes }));
    assert_eq!(registrar.limits().max_region_bytes, max_bytes);
    let memory = Memory::new(PAGE);
    let access = Access::READ | Access::REMOTE_READ;
    // SAFETY: the test's own memory.
    let remote = unsafe { registrar.register(memory.range(), access) };
    assert_eq!(remote, Err(RegisterError::UnsupportedAccess { access }));
    assert_eq!(registrar.granted(Access::READ), Access::READ_WRITE);
}

/// The longest buffer is taken; the constant is the kernel's.
#[test]
fn one_gibibyte_is_taken() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 1).unwrap();
    // One page of a file, mapped often, costs a page and not a gibibyte.
    let file = memory_file();
    file.set_len(PAGE as u64 * 512).unwrap();
    let memory = Memory::with_protection(MAX_BUFFER_BYTES, libc::PROT_NONE);
    let piece = PAGE * 512;
    for offset in (0..MAX_BUFFER_BYTES).step_by(piece) {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: within this test's own mapping.
        let mapped = unsafe {
            let at = memory.pointer().add(offset).cast();
            libc::mmap(at, piece, libc::PROT_READ | libc::PROT_WRITE, flags, file.as_raw_fd(), 0)
        };
        assert_ne!(mapped, libc::MAP_FAILED);
    }
    let index = register(&registrar, memory.range()).unwrap();
    registrar.deregister_own(index, memory.range()).unwrap();
}

#[test]
fn a_shared_file_on_disk_is_an_unsupported_mapping() {
    let Some(ring) = ring() else { return };
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("registrar-shared-file");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
    let file = file.unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(PAGE as u64).unwrap();
    if is_in_memory(&file) {
        eprintln!("skipped: {} is in memory, not on disk", env!("CARGO_TARGET_TMPDIR"));
        return;
    }
    let memory = Memory::shared_file(file.as_raw_fd(), PAGE);
    let registrar = registrar_of(&ring, 1).unwrap();
    let error = register(&registrar, memory.range()).unwrap_err();
    let at = memory.range().start();
    let RegisterError::BadAddress { reason, .. } = error else { panic!("{error:?}") };
    assert_eq!(reason, BadAddress::UnsupportedMapping { at });
}

fn is_in_memory(file: &File) -> bool {
    let mut about = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `about` has room for the answer, which is read after success only.
    unsafe {
        assert_eq!(libc::fstatfs(file.as_raw_fd(), about.as_mut_ptr()), 0);
        matches!(about.assume_init().f_type, libc::TMPFS_MAGIC)
    }
}

#[test]
fn a_full_table_says_so_and_slots_are_used_again() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 3).unwrap();
    assert_eq!(registrar.limits().max_regions, 3);
    let memory = Memory::new(PAGE);
    let made: Vec<_> = (0..3).map(|_| register(&registrar, memory.range()).unwrap()).collect();
    assert_eq!(made.iter().map(|index| index.get()).collect::<HashSet<_>>(), (0..3).collect());
    let full = register(&registrar, memory.range()).unwrap_err();
    assert_eq!(full, RegisterError::TableFull { capacity: 3 });
    assert!(full.is_about_room());
    registrar.deregister_own(made[1], memory.range()).unwrap();
    assert_eq!(register(&registrar, memory.range()), Ok(made[1]));
}

#[test]
fn no_index_is_given_to_two_threads_at_once() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 5).unwrap();
    let held = Mutex::new(HashSet::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let memory = Memory::new(PAGE);
                for _ in 0..2000 {
                    let index = register(&registrar, memory.range()).unwrap();
                    assert!(held.lock().unwrap().insert(index), "{index:?} is held by another");
                    held.lock().unwrap().remove(&index);
                    registrar.deregister_own(index, memory.range()).unwrap();
                }
            });
        }
    });
    assert_eq!(free_slots(&registrar), 5);
}

#[test]
fn two_rings_do_not_know_each_other() {
    let (Some(mut one), Some(mut two)) = (ring(), ring()) else { return };
    let (first, second) = (registrar_of(&one, 2).unwrap(), registrar_of(&two, 2).unwrap());
    let (mut ones, mut twos) = (Memory::new(PAGE), Memory::new(PAGE));
    ones.fill(1);
    twos.fill(2);
    let (a, b) =
        (register(&first, ones.range()).unwrap(), register(&second, twos.range()).unwrap());
    assert_eq!(a.get(), b.get(), "the same slot of different tables");
    drop(first);
    let file = memory_file();
    assert_eq!(send(&mut two, file.as_raw_fd(), &twos, b.get()), ok(PAGE));
    assert_eq!(contents(&file, PAGE), [2; PAGE]);
    assert_eq!(send(&mut one, file.as_raw_fd(), &ones, a.get()), -libc::EFAULT);
}

/// A request in flight holds on to what it found in its slot, whatever becomes of the slot.
#[test]
fn a_request_in_flight_keeps_its_pages() {
    let Some(mut ring) = ring() else { return };
    let registrar = registrar_of(&ring, 1).unwrap();
    let (target, other) = (Memory::new(PAGE), Memory::new(PAGE));
    let index = register(&registrar, target.range()).unwrap();
    let (reader, mut writer): (PipeReader, _) = std::io::pipe().unwrap();
    let pipe = types::Fd(reader.as_raw_fd());
    let length = u32::try_from(PAGE).unwrap();
    submit(&mut ring, &opcode::ReadFixed::new(pipe, target.pointer(), length, index.get()).build());
    assert!(ring.completion().next().is_none(), "the pipe is empty");

    registrar.deregister_own(index, target.range()).unwrap();
    assert_eq!(register(&registrar, other.range()), Ok(index), "the slot has a new owner");
    writer.write_all(&[7; PAGE]).unwrap();

    assert_eq!(completion(&mut ring), ok(PAGE));
    assert_eq!(target.bytes(), [7; PAGE]);
    assert_eq!(other.bytes(), [0; PAGE]);
}

#[test]
fn pinned_bytes_go_when_they_are_given_back_and_when_the_registrar_goes() {
    alone("pinned_bytes_go_when_they_are_given_back_and_when_the_registrar_goes", || {
        let Some(ring) = ring() else { return };
        let registrar = registrar_of(&ring, 4).unwrap();
        let memory = Memory::new(16 * PAGE);
        let before = status_bytes("VmPin:");
        let index = register(&registrar, memory.range()).unwrap();
        assert_eq!(status_bytes("VmPin:"), before + 16 * PAGE);
        registrar.deregister_own(index, memory.range()).unwrap();
        assert_eq!(status_bytes("VmPin:"), before);
        register(&registrar, memory.range()).unwrap();
        register(&registrar, memory.part(0, PAGE)).unwrap();
        assert_eq!(status_bytes("VmPin:"), before + 17 * PAGE);
        drop(registrar);
        assert_eq!(status_bytes("VmPin:"), before);
    });
}

/// The registrar keeps its ring alive by a descriptor of its own, so the order of the ends is free.
#[test]
fn a_ring_dropped_before_its_registrar_does_no_harm() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 2).unwrap();
    let memory = Memory::new(PAGE);
    let index = register(&registrar, memory.range()).unwrap();
    drop(ring);
    registrar.deregister_own(index, memory.range()).unwrap();
    register(&registrar, memory.range()).unwrap();
}

#[test]
fn a_table_taken_away_means_the_device_is_gone() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 2).unwrap();
    let memory = Memory::new(PAGE);
    let index = register(&registrar, memory.range()).unwrap();
    ring.submitter().unregister_buffers().unwrap();
    let errno = libc::ENXIO;
    assert_eq!(register(&registrar, memory.range()), Err(RegisterError::DeviceGone { errno }));
    let given_back = registrar.deregister_own(index, memory.range());
    assert_eq!(given_back, Err(DeregisterError::DeviceGone { errno }));
}

/// Closes every descriptor but the standard three, as daemons do.
fn close_everything() {
    // SAFETY: the descriptors belong to owners that this test leaks or that find out by themselves.
    assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) }, 0);
}

#[test]
fn a_closed_descriptor_is_noticed() {
    alone("a_closed_descriptor_is_noticed", || {
        let Some(ring) = ring() else { return };
        let registrar = registrar_of(&ring, 2).unwrap();
        let memory = Memory::new(PAGE);
        let index = register(&registrar, memory.range()).unwrap();
        std::mem::forget(ring);
        close_everything();
        let errno = libc::EBADF;
        assert_eq!(register(&registrar, memory.range()), Err(RegisterError::DeviceGone { errno }));
        let given_back = registrar.deregister_own(index, memory.range());
        assert_eq!(given_back, Err(DeregisterError::DeviceGone { errno }));
    });
}

/// The ring lives, and with it what is in flight: only its completions tell when that has ended.
#[test]
fn a_registration_has_not_ended_because_the_descriptor_is_lost() {
    alone("a_registration_has_not_ended_because_the_descriptor_is_lost", || {
        let Some(ring) = ring() else { return };
        let registrar = registrar_of(&ring, 2).unwrap();
        // SAFETY: no request is made.
        let registrar = unsafe { registrar.with_tags(1 << 63..u64::MAX) }.unwrap();
        let memory = Memory::new(PAGE);
        let (withdrawn, ended) = (memory.range(), Memory::new(PAGE));
        let first = register(&registrar, withdrawn).unwrap();
        let second = register(&registrar, ended.range()).unwrap();
        assert!(registrar.quiet(withdrawn) && registrar.quiet(ended.range()));
        std::mem::forget(ring);
        close_everything();
        let gone = Err(DeregisterError::DeviceGone { errno: libc::EBADF });
        assert_eq!(registrar.withdraw_own(first, withdrawn), gone);
        assert_eq!(registrar.deregister_own(second, ended.range()), gone);
        assert!(!registrar.quiet(withdrawn) && !registrar.quiet(ended.range()));
        // SAFETY: stands for the completion that the program finds in the ring's mapped queue.
        assert!(unsafe { registrar.ended(1 << 63) });
        assert!(registrar.quiet(withdrawn) && !registrar.quiet(ended.range()));
    });
}

/// Each takes what is its own, so that a completion may be offered to one after the other.
#[test]
fn registrars_of_one_ring_and_one_range_of_tags_take_their_own_completions() {
    const TAGS: std::ops::Range<u64> = 1 << 63..u64::MAX;
    let Some(mut ring) = ring() else { return };
    ring.submitter().register_buffers_sparse(8).unwrap();
    // SAFETY: the slots are left to one registrar each, and no request is made.
    let [first, second] = [0..4, 4..8]
        .map(|slots| unsafe { IoUring::adopt(&ring, slots).unwrap().with_tags(TAGS).unwrap() });
    let memory = Memory::new(PAGE);
    for registrar in [&first, &second] {
        let region = register(registrar, memory.range()).unwrap();
        registrar.deregister_own(region, memory.range()).unwrap();
    }
    let mut ends = 0;
    while ends < 2 {
        ring.submit().unwrap();
        for completion in ring.completion() {
            let number = completion.user_data();
            // SAFETY: the completion is of the ring of both.
            assert!(unsafe { first.ended(number) || second.ended(number) });
            // SAFETY: as above.
            assert!(!unsafe { first.ended(number) || second.ended(number) }, "it has ended");
            ends += 1;
        }
    }
    assert!(first.quiet(memory.range()) && second.quiet(memory.range()));
}

/// A renewal without a withdrawal replaces what the slot has: its end is the registrar's too.
#[test]
fn what_a_renewal_replaces_ends_by_its_tag() {
    let Some(mut ring) = ring() else { return };
    let registrar = registrar_of(&ring, 2).unwrap();
    // SAFETY: no request is made.
    let registrar = unsafe { registrar.with_tags(1 << 63..u64::MAX) }.unwrap();
    let memory = Memory::new(PAGE);
    let region = register(&registrar, memory.range()).unwrap();
    // SAFETY: the test's own memory.
    unsafe { registrar.renew(region, memory.range(), Access::READ_WRITE) }.unwrap();
    assert!(!registrar.quiet(memory.range()), "its end was not seen");
    let number = loop {
        ring.submit().unwrap();
        if let Some(completion) = ring.completion().next() {
            break completion.user_data();
        }
    };
    // SAFETY: the completion is of the registrar's ring.
    assert!(unsafe { registrar.ended(number) });
    assert!(registrar.quiet(memory.range()));
}

/// The kernel leaves what a slot has where it cannot have the new.
#[test]
fn a_renewal_that_is_refused_leaves_nothing_registered() {
    let Some(mut ring) = ring() else { return };
    let registrar = registrar_of(&ring, 2).unwrap();
    // SAFETY: no request is made.
    let registrar = unsafe { registrar.with_tags(1 << 63..u64::MAX) }.unwrap();
    let memory = Memory::new(PAGE);
    let region = register(&registrar, memory.range()).unwrap();
    let start = std::ptr::with_exposed_provenance_mut(memory.range().start());
    // SAFETY: the test's own memory, which is not touched any more.
    assert_eq!(unsafe { libc::mprotect(start, PAGE, libc::PROT_NONE) }, 0);
    // SAFETY: as above.
    let renewed = unsafe { registrar.renew(region, memory.range(), Access::READ_WRITE) };
    assert!(matches!(renewed, Err(RegisterError::BadAddress { .. })), "{renewed:?}");
    let deadline = Instant::now() + Duration::from_secs(60);
    let number = loop {
        ring.submit().unwrap();
        if let Some(completion) = ring.completion().next() {
            break completion.user_data();
        }
        assert!(Instant::now() < deadline, "the old registration is there still");
    };
    // SAFETY: the completion is of the registrar's ring.
    assert!(unsafe { registrar.ended(number) });
    assert!(registrar.quiet(memory.range()));
}

/// The worst that can happen to a descriptor: closed behind our back, and its number given to
/// another ring, whose table would take our buffers silently.
#[test]
fn another_ring_under_the_old_number_is_left_alone() {
    alone("another_ring_under_the_old_number_is_left_alone", || {
        let Some(mut other) = ring() else { return };
        let Some(ring) = ring() else { return };
        let registrar = registrar_of(&ring, 2).unwrap();
        let memory = Memory::new(PAGE);
        let index = register(&registrar, memory.range()).unwrap();
        let mut others = Memory::new(PAGE);
        others.fill(9);
        let buffer = libc::iovec { iov_base: others.pointer().cast(), iov_len: PAGE };
        // SAFETY: the memory lives to the end of the test.
        unsafe { other.submitter().register_buffers(&[buffer, buffer]).unwrap() };
        let number = descriptor_of(&registrar);
        // SAFETY: the number is the registrar's, which has to find out.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);

        let errno = libc::EBADF;
        assert_eq!(register(&registrar, memory.range()), Err(RegisterError::DeviceGone { errno }));
        let given_back = registrar.deregister_own(index, memory.range());
        assert_eq!(given_back, Err(DeregisterError::DeviceGone { errno }));
        drop(registrar);
        let file = memory_file();
        for slot in 0..2 {
            assert_eq!(send(&mut other, file.as_raw_fd(), &others, slot), ok(PAGE));
        }
        // SAFETY: asks whether the number is open.
        assert!(unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0, "closed another's descriptor");
    });
}

/// The number of the registrar's own descriptor, as its `Debug` output tells it.
fn descriptor_of(registrar: &IoUring) -> RawFd {
    let text = format!("{registrar:?}");
    let digits = text.split("fd: ").nth(1).unwrap();
    digits.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

#[test]
fn a_forked_child_can_do_its_parent_no_harm() {
    let Some(mut ring) = ring() else { return };
    let registrar = registrar_of(&ring, 2).unwrap();
    let mut memory = Memory::new(PAGE);
    memory.fill(3);
    let index = register(&registrar, memory.range()).unwrap();
    let mut registrar = Some(registrar);
    let held = in_forked_child(|| {
        let registrar = registrar.take().unwrap();
        let refused = matches!(
            register(&registrar, memory.range()),
            Err(RegisterError::DeviceGone { errno: libc::ESRCH })
        );
        let kept = matches!(
            registrar.deregister_own(index, memory.range()),
            Err(DeregisterError::DeviceGone { errno: libc::ESRCH })
        );
        drop(registrar);
        refused && kept
    });
    assert!(held, "the child registered or deregistered");
    let file = memory_file();
    assert_eq!(send(&mut ring, file.as_raw_fd(), &memory, index.get()), ok(PAGE));
    assert_eq!(contents(&file, PAGE), [3; PAGE]);
    registrar.unwrap().deregister_own(index, memory.range()).unwrap();
}

#[test]
fn a_forked_child_may_have_a_ring_of_its_own() {
    let Some(ring) = ring() else { return };
    let _parents = registrar_of(&ring, 2).unwrap();
    let held = in_forked_child(|| {
        let ring = io_uring::IoUring::new(2).unwrap();
        let registrar = registrar_of(&ring, 2).unwrap();
        let memory = Memory::new(PAGE);
        let index = register(&registrar, memory.range()).unwrap();
        registrar.deregister_own(index, memory.range()).is_ok()
    });
    assert!(held);
}

/// The same error number for two things: the limit, and bad memory is neither.
#[test]
fn the_limit_on_pinned_memory_is_told_apart() {
    const LIMIT: u64 = 8 << 20;
    alone("the_limit_on_pinned_memory_is_told_apart", || {
        if !live_under_a_limit(LIMIT, 54_871) {
            return;
        }
        let Some(ring) = ring() else { return };
        let registrar = registrar_of(&ring, 8).unwrap();
        let (half, whole) = (Memory::new(4 << 20), Memory::new(8 << 20));
        let first = register(&registrar, half.range()).unwrap();
        let error = register(&registrar, whole.range()).unwrap_err();
        let expected =
            RegisterError::PinnedMemoryLimit { limit_bytes: Some(LIMIT), errno: libc::ENOMEM };
        assert_eq!(error, expected);
        assert!(error.is_about_room() && error.to_string().contains("RLIMIT_MEMLOCK"));
        let kernel = AddressRange::new(0xffff_8880_0000_0000, PAGE).unwrap();
        let bad = register(&registrar, kernel).unwrap_err();
        assert!(matches!(bad, RegisterError::BadAddress { .. }), "{bad:?}");
        registrar.deregister_own(first, half.range()).unwrap();
        let again = register(&registrar, whole.part(0, 6 << 20)).unwrap();
        registrar.deregister_own(again, whole.part(0, 6 << 20)).unwrap();
        assert_eq!(free_slots(&registrar), 8);
    });
}

/// The ring's own memory counts too, so a ring can only be there if the limit fell afterwards.
#[test]
fn a_limit_of_zero_is_a_limit() {
    alone("a_limit_of_zero_is_a_limit", || {
        if !live_under_a_limit(8 << 20, 54_872) {
            return;
        }
        let Some(ring) = ring() else { return };
        let registrar = registrar_of(&ring, 2).unwrap();
        let nothing = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a system call without effect on memory.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const nothing) }, 0);
        let memory = Memory::new(PAGE);
        let error = register(&registrar, memory.range()).unwrap_err();
        let expected =
            RegisterError::PinnedMemoryLimit { limit_bytes: Some(0), errno: libc::ENOMEM };
        assert_eq!(error, expected);
    });
}

fn adopt(ring: &io_uring::IoUring, slots: std::ops::Range<u32>) -> Result<IoUring, IoUringError> {
    // SAFETY: the tests hand out each slot once.
    unsafe { IoUring::adopt(ring, slots) }
}

#[test]
fn a_table_is_made_once_and_adopted_afterwards() {
    let Some(mut ring) = ring() else { return };
    assert_eq!(adopt(&ring, 0..1).unwrap_err(), IoUringError::NoTable);
    drop(registrar_of(&ring, 8).unwrap());
    assert_eq!(registrar_of(&ring, 8).unwrap_err(), IoUringError::TableExists);
    let beyond = adopt(&ring, 4..9).unwrap_err();
    assert_eq!(beyond, IoUringError::TableSize { asked: 9 });

    let (low, high) = (adopt(&ring, 0..4).unwrap(), adopt(&ring, 4..8).unwrap());
    assert_eq!((low.limits().max_regions, high.limits().max_regions), (4, 4));
    let mut memory = Memory::new(PAGE);
    memory.fill(4);
    let index = register(&high, memory.range()).unwrap();
    assert_eq!(index.get(), 4);
    drop(low);
    let file = memory_file();
    assert_eq!(send(&mut ring, file.as_raw_fd(), &memory, index.get()), ok(PAGE));
}

#[test]
fn impossible_tables_and_descriptors_are_refused() {
    let Some(ring) = ring() else { return };
    for asked in [0, MAX_SLOTS + 1] {
        assert_eq!(registrar_of(&ring, asked).unwrap_err(), IoUringError::TableSize { asked });
    }
    let empty = adopt(&ring, 3..3).unwrap_err();
    assert_eq!(empty, IoUringError::TableSize { asked: 3 });
    let errno = libc::EOPNOTSUPP;
    assert_eq!(registrar_of(&memory_file(), 4).unwrap_err(), IoUringError::NotARing { errno });
    let largest = registrar_of(&ring, MAX_SLOTS).unwrap();
    assert_eq!(largest.limits().max_regions, 16384);
}

/// Registrations are given back by other threads, which such a ring would refuse every time.
#[test]
fn a_ring_for_one_thread_is_refused_at_once() {
    let made = <io_uring::IoUring>::builder().setup_single_issuer().build(4);
    let Ok(ring) = made else { return eprintln!("skipped: no rings with a single issuer") };
    let refused = registrar_of(&ring, 4).unwrap_err();
    assert_eq!(refused, IoUringError::SingleIssuer);
    assert!(refused.to_string().contains("IORING_SETUP_SINGLE_ISSUER"));
}

/// A ring that is not enabled yet takes calls from every thread, and only from the one that enables it afterwards.
#[test]
fn a_ring_that_is_not_enabled_yet_is_refused_at_once() {
    let single = Err(IoUringError::SingleIssuer);
    is_refused_until_enabled(|_| (), Ok(()));
    is_refused_until_enabled(|builder| _ = builder.setup_sqpoll(1), Ok(()));
    is_refused_until_enabled(|builder| _ = builder.setup_single_issuer(), single);
}

/// `afterwards` is what an enabled ring like that is answered.
fn is_refused_until_enabled(
    with: impl FnOnce(&mut io_uring::Builder),
    afterwards: Result<(), IoUringError>,
) {
    let mut builder = <io_uring::IoUring>::builder();
    with(builder.setup_r_disabled());
    let Ok(ring) = builder.build(4) else { return eprintln!("skipped: no such rings") };
    assert_eq!(registrar_of(&ring, 4).unwrap_err(), IoUringError::Disabled);
    assert_eq!(adopt(&ring, 0..4).unwrap_err(), IoUringError::Disabled);
    assert!(IoUringError::Disabled.to_string().contains("enable it first"));
    ring.submitter().register_enable_rings().unwrap();
    let registrar = registrar_of(&ring, 4);
    assert_eq!(registrar.as_ref().map(drop).map_err(|&refusal| refusal), afterwards);
    if let Ok(registrar) = registrar {
        let memory = Memory::new(PAGE);
        let range = memory.range();
        let elsewhere = || register(&registrar, range).is_ok();
        assert!(std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()));
    }
}

/// What container runtimes do: the call exists, and is refused.
#[test]
fn a_refusal_by_seccomp_is_a_typed_error() {
    alone("a_refusal_by_seccomp_is_a_typed_error", || {
        assert_eq!(IoUring::is_available().is_ok(), ring().is_some());
        let Some(ring) = ring() else { return };
        refuse_io_uring();
        let expected = IoUringError::Forbidden { errno: libc::EPERM };
        assert_eq!(IoUring::is_available(), Err(expected));
        assert_eq!(registrar_of(&ring, 4).unwrap_err(), expected);
        assert!(expected.to_string().contains("seccomp"));
    });
}

/// From now on this thread and those it starts get `EPERM` from `io_uring_setup` and
/// `io_uring_register`.
fn refuse_io_uring() {
    let refuse = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPERM).unwrap();
    let jump_if = |call: libc::c_long, skip: u8| {
        let k = u32::try_from(call).unwrap();
        filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, skip, 0, k)
    };
    let mut program = [
        filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // the call's number
        jump_if(libc::SYS_io_uring_setup, 2),
        jump_if(libc::SYS_io_uring_register, 1),
        filter(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        filter(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
    ];
    let length = u16::try_from(program.len()).unwrap();
    let program = libc::sock_fprog { len: length, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which copy it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program), 0);
    }
}

fn filter(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k }
}

/// A ring reaches memory whose changes a monitor of a test does not know.
#[test]
fn a_ring_is_not_cached_by_a_simulated_monitor() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 16).unwrap();
    let refused = pinfold::cache(registrar, Fake(Calm), Config::keeping_all());
    assert!(matches!(refused, Err(CacheError::Config(ConfigError::SimulatedMonitor))));
}

/// Prints what registering and giving back costs; asserts nothing of it.
///
/// `cargo test --release -p pinfold --test registrar_io_uring -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn measure_register_and_deregister() {
    let Some(ring) = ring() else { return };
    let registrar = registrar_of(&ring, 16).unwrap();
    for (length, rounds) in [(PAGE, 500), (64 << 10, 200), (1 << 20, 20), (16 << 20, 2)] {
        let mut memory = Memory::new(length);
        memory.fill(1);
        let range = memory.range();
        let best = best_of(rounds, || {
            let index = register(&registrar, range).unwrap();
            registrar.deregister_own(index, range).unwrap();
        });
        eprintln!("{:>6} KiB: {best:.0} ns", length >> 10);
    }
}

/// The best of many short runs, in nanoseconds per call: others use the processor too.
fn best_of(rounds: u32, mut call: impl FnMut()) -> f64 {
    let run = |call: &mut dyn FnMut()| {
        let begin = Instant::now();
        (0..rounds).for_each(|_| call());
        begin.elapsed().as_secs_f64() * 1e9 / f64::from(rounds)
    };
    (0..100).map(|_| run(&mut call)).fold(f64::INFINITY, f64::min)
}
