//! Children by fork, vfork, clone and posix_spawn, and other programs in this one's place.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to free, in a child, what its parent goes on using.

#![allow(unsafe_code)]

use crate::processes::*;
use crate::registrar_support::alone;
use crate::support::*;
use crate::world::*;
use pinfold::monitor::Userfaultfd;
use pinfold::registrar::Mlock;
use pinfold::{
    Access, AddressRange, Cache, Config, DeregisterError, GetError, Monitor, RegisterError,
    Registrar, RegistrarLimits,
};
use pinfold_kernel::thread::LeanThread;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_parent_goes_on_and_its_child_starts_afresh() {
    alone("forks::a_parent_goes_on_and_its_child_starts_afresh", || {
        let Some(world) = World::leaked() else { return };
        let at = world.with_memory(b'p');
        let leases = (world.buffer(at).unwrap(), world.lock(at).unwrap());
        let child = fork(|| {
            is_forked(world);
            // SAFETY: the child's copies, which its parent does not miss; the originals are not
            // used in this process again.
            let mine = unsafe { std::ptr::read(&raw const leases) };
            assert!(!mine.0.is_invalidated() && mine.0.is_cached());
            drop(mine);
            // SAFETY: nothing of it is used any more here.
            unsafe { free(world) };
            World::new().unwrap().works();
        });
        assert_eq!(wait_for(child), 0);
        assert!(world.still_has(at, b'p'), "the child took nothing away");
        drop(leases);
        world.works();
        // SAFETY: as above.
        unsafe { free(world) };
    });
}

/// A child may end in the orderly way, with thread-locals of the parent's cache to be destroyed.
#[test]
fn a_child_that_ends_in_an_orderly_way_waits_for_no_thread() {
    alone("forks::a_child_that_ends_in_an_orderly_way_waits_for_no_thread", || {
        let Some(world) = World::leaked() else { return };
        let at = world.with_memory(b'p');
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stops = StopsOthers(&stop);
            // Threads that begin and end take and give back their records.
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::thread::scope(|inner| {
                            inner.spawn(|| drop(world.lock(at)));
                        });
                    }
                });
            }
            for _ in 0..300 {
                // In a thread of its own, whose thread-locals the child destroys when it ends.
                let child = fork(|| exit(0));
                assert_eq!(exit_code(wait_for(child)), Some(0));
            }
        });
    });
}

/// Stops the threads beside a test's, also where the test fails.
struct StopsOthers<'a>(&'a AtomicBool);

impl Drop for StopsOthers<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_fork_among_busy_threads_leaves_a_child_that_starts_afresh() {
    alone("forks::a_fork_among_busy_threads_leaves_a_child_that_starts_afresh", || {
        let Some(world) = World::leaked() else { return };
        let (stop, have_begun) = (AtomicBool::new(false), Barrier::new(3));
        std::thread::scope(|scope| {
            let _stops = StopsOthers(&stop);
            scope.spawn(|| {
                have_begun.wait();
                while !stop.load(Ordering::Relaxed) {
                    world.is_fresh();
                }
            });
            scope.spawn(|| {
                have_begun.wait();
                while !stop.load(Ordering::Relaxed) {
                    // Not by the standard library: a new thread of that holds a lock of its own for a moment, which a child
                    // that is forked then finds taken for ever, and its first new thread waits for.
                    LeanThread::spawn(c"other", (), |()| ()).unwrap().join();
                }
            });
            have_begun.wait();
            for round in 0..100 {
                let child = fork(|| {
                    is_forked(world);
                    World::new().unwrap().works();
                });
                assert_eq!(wait_for(child), 0, "round {round}");
            }
        });
        world.works();
    });
}

/// A registrar whose `register` forks, and goes on in the child as if nothing had been.
struct Forks {
    inner: Mlock,
    armed: AtomicBool,
}

// The child's number, or that it is the child.
static CHILD: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);

impl Forks {
    fn fork_if_armed(&self) {
        if self.armed.swap(false, Ordering::Relaxed) {
            // SAFETY: the child goes on in this test alone, and leaves by `_exit`.
            let child = unsafe { libc::fork() };
            CHILD.store(child, Ordering::Relaxed);
            if child == 0 {
                alarm(300);
            }
        }
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Forks {
    type Handle = <Mlock as Registrar>::Handle;

    fn limits(&self) -> RegistrarLimits {
        self.inner.limits()
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Self::Handle, RegisterError> {
        // SAFETY: the caller's promise.
        let registered = unsafe { self.inner.register(range, access) };
        self.fork_if_armed();
        registered
    }

    unsafe fn deregister(
        &self,
        handle: Self::Handle,
        at: AddressRange,
    ) -> Result<(), DeregisterError> {
        // SAFETY: the caller's promise, passed on.
        let done = unsafe { self.inner.deregister(handle, at) };
        self.fork_if_armed();
        done
    }
}

/// The lock that the child would wait for is held by another thread when the fork happens.
#[test]
fn a_child_forked_inside_a_registrar_comes_back_from_it() {
    alone("forks::a_child_forked_inside_a_registrar_comes_back_from_it", || {
        let Some(monitor) = monitor() else { return };
        let registrar = Forks { inner: Mlock::new().unwrap(), armed: AtomicBool::new(false) };
        let cache = Cache::new(registrar, monitor, Config::keeping_all()).unwrap();
        let (stop, in_child) = (AtomicBool::new(false), || CHILD.load(Ordering::Relaxed) == 0);
        std::thread::scope(|scope| {
            let _stops = StopsOthers(&stop);
            // Keeps the cache's lock busy.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    cache.statistics();
                }
            });
            for round in 0..200 {
                let at = map(PAGES);
                cache.registrar().armed.store(true, Ordering::Relaxed);
                // SAFETY: memory of this test; locking it moves nothing.
                let got = unsafe { cache.get(at as *const u8, BYTES, Access::READ) };
                if in_child() {
                    let forked = matches!(got, Err(GetError::Forked));
                    exit_at_once(if forked { 0 } else { 1 });
                }
                assert_eq!(wait_for(CHILD.load(Ordering::Relaxed)), 0, "register, round {round}");
                drop(got.unwrap());
                cache.registrar().armed.store(true, Ordering::Relaxed);
                assert!(cache.evict_idle() == 1 || in_child());
                if in_child() {
                    exit_at_once(0);
                }
                assert_eq!(wait_for(CHILD.load(Ordering::Relaxed)), 0, "deregister, round {round}");
                assert!(munmap(at, BYTES));
            }
        });
    });
}

/// As above, by a callback; the child also panics in it, which is counted in the parent only.
#[test]
fn a_child_forked_inside_a_callback_comes_back_from_it() {
    alone("forks::a_child_forked_inside_a_callback_comes_back_from_it", || {
        let Some(world) = World::leaked() else { return };
        let at = world.with_memory(b'c');
        world.locks.invalidate_then(range(at, BYTES), || {
            // SAFETY: as in `fork_if_armed`.
            let child = unsafe { libc::fork() };
            CHILD.store(child, Ordering::Relaxed);
            if child == 0 {
                alarm(300);
                panic!("in the child");
            }
        });
        // It runs on the reclaimer's thread or here; the child of the former ends by itself.
        world.locks.reclaim();
        while CHILD.load(Ordering::Relaxed) < 0 {
            std::thread::yield_now();
        }
        if CHILD.load(Ordering::Relaxed) == 0 {
            is_forked(world);
            exit_at_once(0);
        }
        assert_eq!(wait_for(CHILD.load(Ordering::Relaxed)), 0);
        assert_eq!(world.locks.statistics().callback_panics, 0);
        world.works();
    });
}

/// Changes made by a child that shares the memory are changes of ours.
#[test]
fn children_that_share_the_memory_are_watched_like_threads() {
    alone("forks::children_that_share_the_memory_are_watched_like_threads", || {
        let Some(world) = World::leaked() else { return };
        for flags in [libc::CLONE_VFORK, 0, libc::CLONE_FILES] {
            let at = world.with_memory(b'o');
            let anew = libc::MAP_FIXED | PRIVATE;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let map_anew = [at, BYTES, rights as usize, anew as usize, usize::MAX, 0];
            assert_eq!(sharing_memory(flags, &[(libc::SYS_mmap, map_anew)]), 0);
            fill(at, PAGES, b'n');
            assert!(world.moves(at, b'n'), "flags {flags:#x}");
            let discard = [at, BYTES, libc::MADV_DONTNEED as usize, 0, 0, 0];
            assert_eq!(sharing_memory(flags, &[(libc::SYS_madvise, discard)]), 0);
            assert!(world.moves(at, 0), "flags {flags:#x}");
        }
    });
}

/// Such a child's table of descriptors is a copy, so what it closes is its own.
#[test]
fn a_child_that_shares_the_memory_may_close_its_descriptors() {
    alone("forks::a_child_that_shares_the_memory_may_close_its_descriptors", || {
        let Some(world) = World::leaked() else { return };
        let all = [3, u32::MAX as usize, 0, 0, 0, 0];
        for flags in [libc::CLONE_VFORK, 0] {
            assert_eq!(sharing_memory(flags, &[(libc::SYS_close_range, all)]), 0);
            world.works();
        }
    });
}

/// Such a child has its own memory, hence is forked, and our descriptors themselves, hence must not
/// close them.
#[test]
fn a_child_that_shares_the_descriptors_takes_none_away() {
    alone("forks::a_child_that_shares_the_descriptors_takes_none_away", || {
        let Some(world) = World::leaked() else { return };
        let at = world.with_memory(b'p');
        // One without another owner, which the shared one has.
        let own = Userfaultfd::new().ok();
        let status = cloned(libc::CLONE_FILES, || {
            is_forked(world);
            // SAFETY: nothing of it is used any more here.
            unsafe {
                free_caches(world);
                drop(std::ptr::read(&raw const own));
            }
        });
        assert_eq!(status, 0);
        assert!(own.is_none_or(|own| own.check().is_ok()), "not closed");
        assert!(world.still_has(at, b'p'));
        world.works();
    });
}

#[test]
fn spawned_programs_inherit_nothing_and_disturb_nothing() {
    alone("forks::spawned_programs_inherit_nothing_and_disturb_nothing", || {
        let Some(world) = World::leaked() else { return };
        let at = world.with_memory(b's');
        let held = world.buffer(at).unwrap();
        let mut list = Command::new("/bin/ls");
        list.args(["-l", "/proc/self/fd"]);
        // The first by posix_spawn, the second by fork.
        for by_fork in [false, true] {
            if by_fork {
                // SAFETY: the closure does nothing.
                unsafe { list.pre_exec(|| Ok(())) };
            }
            let output = list.output().unwrap();
            let listed = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && listed.contains("/proc"), "{listed}");
            let ours = ["userfaultfd", "io_uring", "maps", "bpf"];
            assert!(ours.iter().all(|name| !listed.contains(name)), "{listed}");
            assert!(world.still_has(at, b's'));
        }
        drop(held);
        world.works();
    });
}

#[test]
fn an_exec_that_fails_changes_nothing() {
    alone("forks::an_exec_that_fails_changes_nothing", || {
        let Some(world) = World::leaked() else { return };
        let at = world.with_memory(b'e');
        execute(c"/nonexistent/program", c"");
        execute(c"/proc/self/maps", c"");
        assert!(world.still_has(at, b'e'));
        world.works();
    });
}

/// Whatever was registered, held and under way, the new program begins at once.
#[test]
fn an_exec_in_the_middle_of_everything_succeeds() {
    alone("forks::an_exec_in_the_middle_of_everything_succeeds", || {
        if monitor().is_none() {
            return;
        }
        for _ in 0..20 {
            let child = fork(|| {
                let world = World::leaked().unwrap();
                let _held = world.buffer(world.with_memory(b'h')).unwrap();
                let begun = std::sync::Barrier::new(2);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        begun.wait();
                        loop {
                            let at = world.with_memory(b'x');
                            assert!(munmap(at, BYTES));
                        }
                    });
                    begun.wait();
                    execute(c"/bin/sh", c"exit 7");
                    execute(c"/bin/bash", c"exit 7");
                });
            });
            assert_eq!(exit_code(wait_for(child)), Some(7));
        }
    });
}
