//! Processes that end in every way, with leases alive and changes under way.

use crate::processes::*;
use crate::registrar_support::alone;
use crate::support::*;
use crate::world::*;
use std::os::raw::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, OnceLock};

/// The cache in a static, as programs have it: it is never dropped.
static WORLD: OnceLock<&'static World> = OnceLock::new();
static AT: AtomicUsize = AtomicUsize::new(0);

/// Runs `end` in a process that is in the middle of everything, and gives its status.
fn ends_by(end: impl FnOnce()) -> Option<c_int> {
    monitor()?;
    let child = fork(|| {
        let world = World::leaked().unwrap();
        let _held = world.buffer(world.with_memory(b'h')).unwrap();
        AT.store(world.with_memory(b'k'), Ordering::Relaxed);
        let _ = WORLD.set(world);
        let begun = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begun.wait();
                loop {
                    let at = world.with_memory(b'x');
                    assert!(munmap(at, BYTES));
                }
            });
            begun.wait();
            end();
        });
    });
    Some(wait_for(child))
}

/// What a function does that runs while the process exits: everything works as before.
extern "C" fn use_it_once_more() {
    let world = WORLD.get().unwrap();
    let at = AT.load(Ordering::Relaxed);
    let fresh = world.moves(at, b'k') && world.lock(at).is_ok_and(|lease| lease.is_cached());
    if fresh && munmap(at, BYTES) {
        exit_at_once(42);
    }
    exit_at_once(1);
}

#[test]
fn exit_with_leases_alive() {
    alone("ends::exit_with_leases_alive", || {
        for _ in 0..20 {
            let Some(status) = ends_by(|| exit(3)) else { return };
            assert_eq!(exit_code(status), Some(3));
        }
    });
}

#[test]
fn functions_at_exit_may_use_the_cache() {
    alone("ends::functions_at_exit_may_use_the_cache", || {
        let Some(status) = ends_by(|| {
            at_exit(use_it_once_more);
            exit(3);
        }) else {
            return;
        };
        assert_eq!(exit_code(status), Some(42));
        let status = ends_by(|| {
            at_exit_quickly(use_it_once_more);
            exit_quickly(3);
        });
        assert_eq!(status.and_then(exit_code), Some(42));
    });
}

/// The first thread's thread-locals are destroyed before functions at exit run.
#[test]
fn functions_at_exit_may_use_the_cache_when_the_thread_locals_are_gone() {
    alone("ends::functions_at_exit_may_use_the_cache_when_the_thread_locals_are_gone", || {
        let Some(status) = ends_by(|| {
            at_exit(use_it_once_more);
            let world = WORLD.get().unwrap();
            drop(world.lock(AT.load(Ordering::Relaxed)));
            exit(3);
        }) else {
            return;
        };
        assert_eq!(exit_code(status), Some(42));
    });
}

#[test]
fn sudden_ends() {
    alone("ends::sudden_ends", || {
        let Some(status) = ends_by(|| exit_at_once(4)) else { return };
        assert_eq!(exit_code(status), Some(4));
        assert_eq!(ends_by(|| exit_quickly(5)).and_then(exit_code), Some(5));
        assert_eq!(ends_by(|| std::process::abort()).and_then(killed_by), Some(libc::SIGABRT));
        let kill_myself = || signal(std::process::id().cast_signed(), libc::SIGKILL);
        assert_eq!(ends_by(kill_myself).and_then(killed_by), Some(libc::SIGKILL));
    });
}
