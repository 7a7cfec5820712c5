//! Locked memory as the kernel counts it: up and down exactly, whatever overlaps.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use pinfold::registrar::{LockedPages, Mlock};
use pinfold::{Access, AddressRange, BadAddress, DeregisterError, RegisterError};
use registrar_support::{
    Memory, Own, PAGE, alone, in_forked_child, live_under_a_limit, lock, secret_file, status_bytes,
};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{iter, thread};

/// `VmLck` is the process's, so the tests that read it take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn locked() -> usize {
    status_bytes("VmLck:")
}

fn register(registrar: &Mlock, range: AddressRange) -> Result<LockedPages, RegisterError> {
    lock(registrar, range, Access::READ_WRITE)
}

/// Whether this process may lock a little; prints why not.
fn may_lock() -> bool {
    let registrar = Mlock::new().unwrap();
    let memory = Memory::new(512 * PAGE);
    match register(&registrar, memory.range()) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    }
}

#[test]
fn locked_bytes_go_up_and_down_exactly() {
    let _turn = turn();
    if !may_lock() {
        return;
    }
    let before = locked();
    let registrar = Mlock::new().unwrap();
    let memory = Memory::new(16 * PAGE);
    let handle = register(&registrar, memory.range()).unwrap();
    assert_eq!(locked(), before + 16 * PAGE);
    registrar.deregister_own(handle, memory.range()).unwrap();
    assert_eq!(locked(), before);
    let bytes = memory.part(PAGE - 1, 2);
    let handle = register(&registrar, bytes).unwrap();
    assert_eq!(locked(), before + 2 * PAGE, "two bytes across a boundary are two pages");
    registrar.deregister_own(handle, bytes).unwrap();
    assert_eq!(locked(), before);
}

#[test]
fn only_the_last_registration_of_a_page_unlocks_it() {
    let _turn = turn();
    if !may_lock() {
        return;
    }
    let before = locked();
    let registrar = Mlock::new().unwrap();
    let memory = Memory::new(10 * PAGE);
    let (left, right) = (memory.part(0, 6 * PAGE), memory.part(4 * PAGE, 6 * PAGE));
    let handle = register(&registrar, left).unwrap();
    register(&registrar, right).unwrap();
    register(&registrar, right).unwrap();
    assert_eq!(locked(), before + 10 * PAGE);
    registrar.deregister_own(handle, right).unwrap();
    assert_eq!(locked(), before + 10 * PAGE);
    registrar.deregister_own(handle, left).unwrap();
    assert_eq!(locked(), before + 6 * PAGE, "the right ones stay");
    registrar.deregister_own(handle, right).unwrap();
    assert_eq!(locked(), before);
}

#[test]
fn a_dropped_registrar_leaves_nothing_locked() {
    let _turn = turn();
    if !may_lock() {
        return;
    }
    let before = locked();
    let memory = Memory::new(10 * PAGE);
    let registrar = Mlock::new().unwrap();
    register(&registrar, memory.part(0, 4 * PAGE)).unwrap();
    register(&registrar, memory.part(3 * PAGE, 4 * PAGE)).unwrap();
    drop(registrar);
    assert_eq!(locked(), before);
}

#[test]
fn what_was_unmapped_meanwhile_does_not_keep_the_rest_locked() {
    alone("what_was_unmapped_meanwhile_does_not_keep_the_rest_locked", || {
        if !may_lock() {
            return;
        }
        let before = locked();
        let registrar = Mlock::new().unwrap();
        for (offset, length) in [(0, 8), (0, 2), (3, 2), (7, 1)] {
            let mut memory = Memory::new(8 * PAGE);
            let handle = register(&registrar, memory.range()).unwrap();
            memory.unmap(offset * PAGE, length * PAGE);
            assert_eq!(locked(), before + (8 - length) * PAGE, "a lock goes with its mapping");
            registrar.deregister_own(handle, memory.range()).unwrap();
            assert_eq!(locked(), before, "{length} pages unmapped from page {offset}");
        }
    });
}

/// A lock belongs to a mapping. An older registration of the same addresses counts still, but the
/// next one must lock what is there now.
#[test]
fn memory_mapped_anew_is_locked_by_its_next_registration() {
    let _turn = turn();
    if !may_lock() {
        return;
    }
    let before = locked();
    let registrar = Mlock::new().unwrap();
    let mut memory = Memory::new(4 * PAGE);
    let handle = register(&registrar, memory.range()).unwrap();
    memory.replace();
    assert_eq!(locked(), before);
    register(&registrar, memory.range()).unwrap();
    assert_eq!(locked(), before + 4 * PAGE);
    registrar.deregister_own(handle, memory.range()).unwrap();
    assert_eq!(locked(), before + 4 * PAGE);
    registrar.deregister_own(handle, memory.range()).unwrap();
    assert_eq!(locked(), before);
}

/// Stated by the documentation, so shown: the kernel knows one lock per page, not whose it is.
#[test]
fn fact_the_programs_own_munlock_undoes_ours() {
    let _turn = turn();
    if !may_lock() {
        return;
    }
    let before = locked();
    let registrar = Mlock::new().unwrap();
    let memory = Memory::new(PAGE);
    let handle = register(&registrar, memory.range()).unwrap();
    assert_eq!(pinfold_kernel::memory::unlock(memory.range()), Ok(()));
    assert_eq!(locked(), before);
    registrar.deregister_own(handle, memory.range()).unwrap();
}

#[test]
fn bad_addresses_are_told_apart_and_leave_nothing_locked() {
    alone("bad_addresses_are_told_apart_and_leave_nothing_locked", bad_addresses_are_told_apart);
}

fn bad_addresses_are_told_apart() {
    if !may_lock() {
        return;
    }
    let before = locked();
    let registrar = Mlock::new().unwrap();
    let read_only = Memory::with_protection(PAGE, libc::PROT_READ);
    let no_access = Memory::with_protection(PAGE, libc::PROT_NONE);
    let mut half = Memory::new(2 * PAGE);
    half.unmap(PAGE, PAGE);
    let kernel = AddressRange::new(0xffff_8880_0000_0000, PAGE).unwrap();
    let cases = [
        (no_access.range(), BadAddress::NoAccess { at: no_access.range().start() }),
        (half.range(), BadAddress::Unmapped { at: half.range().start() + PAGE }),
        (kernel, BadAddress::Kernel { at: kernel.start() }),
    ];
    for access in [Access::READ, Access::READ_WRITE] {
        for (range, expected) in cases {
            let error = lock(&registrar, range, access).unwrap_err();
            let RegisterError::BadAddress { reason, .. } = error else { panic!("{error:?}") };
            assert_eq!(reason, expected);
            assert_eq!(locked(), before);
        }
    }
    let error = register(&registrar, read_only.range()).unwrap_err();
    let at = read_only.range().start();
    let RegisterError::BadAddress { reason, .. } = error else { panic!("{error:?}") };
    assert_eq!(reason, BadAddress::NotWritable { at });
    lock(&registrar, read_only.range(), Access::READ).unwrap();
    assert_eq!(locked(), before + PAGE, "read-only memory can be locked for reading");
}

/// A failed registration must unlock what it locked, and not a page more.
#[test]
fn a_failed_registration_leaves_its_neighbours_locked() {
    alone("a_failed_registration_leaves_its_neighbours_locked", || {
        if !may_lock() {
            return;
        }
        let before = locked();
        let registrar = Mlock::new().unwrap();
        let mut memory = Memory::new(8 * PAGE);
        memory.unmap(6 * PAGE, 2 * PAGE);
        register(&registrar, memory.part(2 * PAGE, PAGE)).unwrap();
        assert!(lock(&registrar, memory.range(), Access::READ).is_err());
        assert_eq!(locked(), before + PAGE);
    });
}

#[test]
fn remote_rights_are_no_matter_of_locking() {
    let registrar = Mlock::new().unwrap();
    let memory = Memory::new(PAGE);
    let access = Access::REMOTE_WRITE;
    let error = lock(&registrar, memory.range(), access).unwrap_err();
    assert_eq!(error, RegisterError::UnsupportedAccess { access });
}

#[test]
fn the_limit_is_told_apart() {
    const LIMIT: u64 = 1 << 20;
    alone("the_limit_is_told_apart", || {
        if !live_under_a_limit(LIMIT, 54_873) {
            return;
        }
        let registrar = Mlock::new().unwrap();
        let (most, more) = (Memory::new(768 << 10), Memory::new(512 << 10));
        let handle = register(&registrar, most.range()).unwrap();
        let error = register(&registrar, more.range()).unwrap_err();
        let expected =
            RegisterError::PinnedMemoryLimit { limit_bytes: Some(LIMIT), errno: libc::ENOMEM };
        assert_eq!(error, expected);
        registrar.deregister_own(handle, most.range()).unwrap();
        register(&registrar, more.range()).unwrap();
        assert_eq!(locked(), 512 << 10);
    });
}

/// What another thread unlocks between the kernel's refusal and the question why is not taken for room that there was.
#[test]
fn the_limit_is_told_apart_while_another_thread_unlocks() {
    const LIMIT: u64 = 1 << 20;
    alone("the_limit_is_told_apart_while_another_thread_unlocks", || {
        if !live_under_a_limit(LIMIT, 54_876) {
            return;
        }
        let registrar = Mlock::new().unwrap();
        let is_over = AtomicBool::new(false);
        let comes_and_goes = |bytes: usize| {
            let memory = Memory::new(bytes);
            while !is_over.load(Ordering::Relaxed) {
                if let Ok(handle) = register(&registrar, memory.range()) {
                    registrar.deregister_own(handle, memory.range()).unwrap();
                }
            }
        };
        let errors = thread::scope(|scope| {
            scope.spawn(|| comes_and_goes(768 << 10));
            let memory = Memory::new(512 << 10);
            let refused = || match register(&registrar, memory.range()) {
                Err(error) => Some(error),
                Ok(handle) => {
                    registrar.deregister_own(handle, memory.range()).unwrap();
                    None
                }
            };
            let began = Instant::now();
            let is_in_time = |_: &_| began.elapsed().as_secs() < 60;
            let answers = iter::repeat_with(refused).take_while(is_in_time);
            let errors: Vec<_> = answers.flatten().take(2000).collect();
            is_over.store(true, Ordering::Relaxed);
            errors
        });
        let limit =
            RegisterError::PinnedMemoryLimit { limit_bytes: Some(LIMIT), errno: libc::ENOMEM };
        assert!(!errors.is_empty(), "none was refused");
        assert!(errors.iter().all(|&error| error == limit), "{errors:?}");
    });
}

/// The kernel locks no memory of a `memfd_secret`, with as much room as one likes.
#[test]
fn memory_that_cannot_be_locked_is_not_taken_for_the_limit() {
    const LIMIT: u64 = 1 << 20;
    alone("memory_that_cannot_be_locked_is_not_taken_for_the_limit", || {
        if !live_under_a_limit(LIMIT, 54_879) {
            return;
        }
        let file = match secret_file() {
            Ok(file) => file,
            Err(error) => return eprintln!("skipped: memfd_secret: {error}"),
        };
        file.set_len(4 * PAGE as u64).unwrap();
        let memory = Memory::shared_file(file.as_raw_fd(), 4 * PAGE);
        let error = register(&Mlock::new().unwrap(), memory.range()).unwrap_err();
        let (range, reason) = (memory.range(), BadAddress::Unknown);
        assert_eq!(error, RegisterError::BadAddress { range, reason, errno: libc::ENOMEM });
    });
}

/// Evicting other registrations would not bring the pages back.
#[test]
fn pages_behind_the_end_of_a_file_are_not_taken_for_the_limit() {
    const LIMIT: u64 = 1 << 20;
    alone("pages_behind_the_end_of_a_file_are_not_taken_for_the_limit", || {
        if !live_under_a_limit(LIMIT, 54_878) {
            return;
        }
        let path = std::env::temp_dir().join(format!("pinfold-mlock.{}", std::process::id()));
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(16 * PAGE as u64).unwrap();
        let memory = Memory::shared_file(file.as_raw_fd(), 16 * PAGE);
        file.set_len(4 * PAGE as u64).unwrap();
        let registrar = Mlock::new().unwrap();
        let error = lock(&registrar, memory.range(), Access::READ).unwrap_err();
        let (range, reason) = (memory.range(), BadAddress::Unknown);
        assert_eq!(error, RegisterError::BadAddress { range, reason, errno: libc::ENOMEM });
        assert_eq!(locked(), 0);
    });
}

#[test]
fn a_limit_of_zero_is_a_limit() {
    alone("a_limit_of_zero_is_a_limit", || {
        if !live_under_a_limit(0, 54_874) {
            return;
        }
        let memory = Memory::new(PAGE);
        let error = register(&Mlock::new().unwrap(), memory.range()).unwrap_err();
        let expected =
            RegisterError::PinnedMemoryLimit { limit_bytes: Some(0), errno: libc::EPERM };
        assert_eq!(error, expected);
    });
}

#[test]
fn a_forked_child_has_nothing_locked_and_locks_nothing() {
    let _turn = turn();
    if !may_lock() {
        return;
    }
    let before = locked();
    let registrar = Mlock::new().unwrap();
    let memory = Memory::new(PAGE);
    let handle = register(&registrar, memory.range()).unwrap();
    let held = in_forked_child(|| {
        let (gone, errno) = (registrar.deregister_own(handle, memory.range()), libc::ESRCH);
        register(&registrar, memory.range()) == Err(RegisterError::DeviceGone { errno })
            && gone == Err(DeregisterError::DeviceGone { errno })
    });
    assert!(held);
    assert_eq!(locked(), before + PAGE);
}

/// Whether every mapping that touches `range` is locked, by the kernel's own flags.
fn all_locked(range: AddressRange) -> bool {
    let mut touches = false;
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        if let Some(mapping) = mapping_of(line) {
            touches = mapping.overlaps(&range);
        }
        if touches && line.starts_with("VmFlags:") && !line.split(' ').any(|flag| flag == "lo") {
            return false;
        }
    }
    true
}

/// The range of a line that begins a mapping.
fn mapping_of(line: &str) -> Option<AddressRange> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let parse = |text| usize::from_str_radix(text, 16).ok();
    AddressRange::between(parse(start)?, parse(end)?)
}

/// Threads that lock and unlock overlapping ranges: a page that any thread holds is locked, whatever
/// the others do.
#[test]
fn threads_that_overlap_never_unlock_each_other() {
    alone("threads_that_overlap_never_unlock_each_other", || {
        if !may_lock() {
            return;
        }
        let registrar = Mlock::new().unwrap();
        let memory = Memory::new(12 * PAGE);
        let before = locked();
        let kept = memory.part(4 * PAGE, 4 * PAGE);
        assert!(!all_locked(kept));
        let handle = register(&registrar, kept).unwrap();
        let ranges: Vec<_> =
            (0..4).map(|thread| memory.part(2 * thread * PAGE, 6 * PAGE)).collect();
        std::thread::scope(|scope| {
            for range in ranges {
                let registrar = &registrar;
                scope.spawn(move || {
                    for _ in 0..200 {
                        let handle = register(registrar, range).unwrap();
                        assert!(all_locked(range), "a held page was unlocked");
                        registrar.deregister_own(handle, range).unwrap();
                        assert!(all_locked(kept), "a held page was unlocked");
                    }
                });
            }
        });
        assert_eq!(locked(), before + 4 * PAGE);
        registrar.deregister_own(handle, kept).unwrap();
        assert_eq!(locked(), before);
    });
}

/// Prints what registering and giving back costs; asserts nothing of it.
///
/// `cargo test --release -p pinfold --test registrar_mlock -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn measure_register_and_deregister() {
    let registrar = Mlock::new().unwrap();
    for length in [PAGE, 64 << 10, 1 << 20] {
        for access in [Access::READ, Access::READ_WRITE] {
            let mut memory = Memory::new(length);
            memory.fill(1);
            let once = |_| {
                let begin = Instant::now();
                let handle = lock(&registrar, memory.range(), access).unwrap();
                registrar.deregister_own(handle, memory.range()).unwrap();
                begin.elapsed()
            };
            let best = (0..1000).map(once).min().unwrap();
            eprintln!("{:>6} KiB {access}: {best:?}", length >> 10);
        }
    }
}
