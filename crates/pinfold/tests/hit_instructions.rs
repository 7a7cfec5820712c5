//! How many instructions a hit takes, and the end of its lease: counted one by one, because time is too noisy to be
//! compared between machines. In optimised builds alone.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to fork a child and to have it make one step after the other, and to lease
//! addresses that no device uses.

#![cfg(not(debug_assertions))]
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)] // a test speaks

use libc::{SIGSTOP, WIFSTOPPED, c_int};
use pinfold::{
    Access, AddressRange, Cache, Change, Config, Cover, DeregisterError, Lost, MappingKind,
    Monitor, Position, RegisterError, Registrar, RegistrarLimits, Replay, Sequence, Watch,
};
use std::hint::black_box;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

const LENGTH: usize = 64 << 10;
const START: usize = 0x7000_0000_0000;

/// What a hit took when it was last made cheaper or dearer on purpose (x86-64, Rust 1.95): 260 instructions, the loop around
/// it included. A tenth is to spare for other compilers; what it is on other processors is printed.
const MOST: u64 = if cfg!(target_arch = "x86_64") { 286 } else { u64::MAX };

/// A device that does nothing.
struct Nowhere;

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Nowhere {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits::new(4096, 1 << 30, 1 << 20)
    }

    unsafe fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
        Ok(7)
    }

    unsafe fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

/// Its check is one load, and it answers in a child as in its parent: nothing changes, and no device is used.
#[derive(Default)]
struct OneLoad(AtomicU64);

// SAFETY: nothing changes what no program uses.
unsafe impl Monitor for OneLoad {
    fn name(&self) -> &'static str {
        "one load"
    }

    #[inline]
    fn check(&self) -> Result<Sequence, Lost> {
        // Acquire: as a monitor's that reports something.
        Ok(Sequence(self.0.load(Ordering::Acquire)))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        false
    }

    fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
        Replay { up_to: Position(0, 0), sequence: Sequence(0), complete: true }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        0
    }

    fn notify(&self) {}

    fn wait(&self, _: u32) {}
}

/// A child does `work`, one instruction after the other: how many. `None` where it may not be looked at.
fn instructions(work: impl FnOnce()) -> Option<u64> {
    // SAFETY: the child, which has one thread, uses nothing that another may have locked: it looks up what is cached.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: it asks to be looked at, waits until it is, and ends without destructors.
        unsafe {
            if libc::ptrace(libc::PTRACE_TRACEME, 0, ptr::null_mut::<u8>(), ptr::null_mut::<u8>())
                != 0
            {
                libc::_exit(77);
            }
            libc::raise(SIGSTOP);
            work();
            libc::_exit(0);
        }
    }
    assert!(child > 0);
    let mut steps = 0;
    while is_stopped(child) {
        steps += 1;
        // SAFETY: a child of this thread's that is stopped.
        let stepped = unsafe {
            libc::ptrace(
                libc::PTRACE_SINGLESTEP,
                child,
                ptr::null_mut::<u8>(),
                ptr::null_mut::<u8>(),
            )
        };
        assert_eq!(stepped, 0);
    }
    (steps > 0).then_some(steps)
}

/// Waits until the child stops, or ends.
fn is_stopped(child: c_int) -> bool {
    let mut status = 0;
    // SAFETY: the kernel fills `status`.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    WIFSTOPPED(status)
}

#[test]
fn a_hit_takes_no_more_instructions_than_it_did() {
    let config = Config { max_bytes: 1 << 30, ..Config::keeping_all() };
    let cache = Cache::new(Nowhere, OneLoad::default(), config).unwrap();
    let hit = |at: usize| {
        let start = ptr::without_provenance(START + at % 8 * LENGTH);
        // SAFETY: no device uses the bytes, and nothing ever changes there.
        let lease = unsafe { cache.get(start, LENGTH, Access::READ) };
        black_box(lease.unwrap().handle());
    };
    (0..32).for_each(hit);
    let (few, many) = (100, 400);
    let counted = [few, many].map(|count| instructions(|| (0..count).for_each(hit)));
    let [Some(less), Some(more)] = counted else {
        return eprintln!("skipped: no process may be looked at step by step");
    };
    let each = (more - less) / (many - few) as u64;
    eprintln!("{each} instructions a hit and the end of its lease");
    assert!((1..=MOST).contains(&each), "{each} instructions, at most {MOST} before");
}
