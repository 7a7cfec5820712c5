//! Threads that end with leases alive, and stacks that are leased.

use crate::registrar_support::alone;
use crate::support::*;
use crate::world::*;
use pinfold::Lease;
use pinfold::registrar::Mlock;
use std::cell::RefCell;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn a_lease_outlives_its_thread() {
    alone("threads::a_lease_outlives_its_thread", || {
        let Some(world) = World::new() else { return };
        let at = world.with_memory(b't');
        let sent = std::thread::scope(|scope| {
            let sent = scope.spawn(|| world.lock(at).unwrap()).join().unwrap();
            scope.spawn(|| std::mem::forget(world.buffer(at).unwrap())).join().unwrap();
            sent
        });
        world.locks.evict_idle();
        world.buffers.evict_idle();
        let held = || (world.locks.statistics().regions, world.buffers.statistics().regions);
        assert_eq!(held(), (1, 1), "a lease sent elsewhere, and one leaked");
        assert!(munmap(at, BYTES));
        drop(sent);
        world.locks.reclaim();
        world.buffers.reclaim();
        while held().0 > 0 {
            // The reclaimer may be at it.
            std::thread::yield_now();
        }
        assert_eq!(held(), (0, 1), "the leaked one pins its region until the cache goes");
        world.works();
        drop(world);
    });
}

/// What a thread-local holds, and uses once more when the thread ends.
struct Last {
    world: &'static World,
    at: usize,
    lease: Option<Lease<'static, Mlock, AnyMonitor>>,
}

static DESTROYED: AtomicUsize = AtomicUsize::new(0);

impl Drop for Last {
    fn drop(&mut self) {
        drop(self.lease.take());
        assert!(self.world.lock(self.at).unwrap().is_cached());
        assert!(self.world.moves(self.at, b'l'));
        std::mem::forget(self.world.buffer(self.at).unwrap());
        DESTROYED.fetch_add(1, Ordering::Relaxed);
    }
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Thread-locals are destroyed in either order: before the cache's own and after.
#[test]
fn leases_end_and_begin_in_the_destructors_of_thread_locals() {
    alone("threads::leases_end_and_begin_in_the_destructors_of_thread_locals", || {
        let Some(world) = World::leaked() else { return };
        let at = world.with_memory(b'l');
        for uses_cache_first in [false, true] {
            let body = move || {
                if uses_cache_first {
                    drop(world.lock(at));
                }
                // From here on it is known that this has a destructor.
                LAST.with(|last| *last.borrow_mut() = Some(Last { world, at, lease: None }));
                let lease = world.lock(at).ok();
                LAST.with(|last| last.borrow_mut().as_mut().unwrap().lease = lease);
            };
            std::thread::spawn(body).join().unwrap();
        }
        assert_eq!(DESTROYED.load(Ordering::Relaxed), 2);
        assert!(munmap(at, BYTES));
        world.works();
    });
}

/// Fills a buffer on this thread's stack, as deep as `depth` says, and has the device move it.
#[inline(never)]
fn send_from_stack(world: &World, depth: usize, value: u8) {
    if depth > 0 {
        let mut frame = [value; 64 << 10];
        black_box(&mut frame);
        send_from_stack(world, depth - 1, value);
        black_box(&frame);
        return;
    }
    let buffer = [value; BYTES];
    let at = black_box(&buffer).as_ptr().addr();
    let bytes = world.moved(at).unwrap();
    assert!(bytes.iter().all(|&byte| byte == value), "the bytes of this thread");
}

/// The C library keeps the stacks of ended threads, drops their pages, and gives them to others;
/// large ones it unmaps.
#[test]
fn stacks_that_come_again_are_registered_again() {
    alone("threads::stacks_that_come_again_are_registered_again", || {
        let Some(world) = World::leaked() else { return };
        for round in 0..40_u8 {
            let megabytes = if round % 4 == 3 { 64 } else { 2 };
            let depth = usize::from(round % 3) * 10;
            let thread = std::thread::Builder::new().stack_size(megabytes << 20);
            let body = move || send_from_stack(world, depth, b'A' + round);
            thread.spawn(body).unwrap().join().unwrap();
        }
        world.works();
    });
}

/// The lease lives on, its registration too; what the device then moves is the old pages, as with any
/// memory that goes away under a transfer, and the next get is another's.
#[test]
fn a_stack_may_go_while_it_is_leased() {
    alone("threads::a_stack_may_go_while_it_is_leased", || {
        let Some(world) = World::leaked() else { return };
        std::thread::scope(|scope| {
            for round in 0..20_u8 {
                let thread = std::thread::Builder::new().stack_size(64 << 20);
                let body = move || {
                    let buffer = [round; BYTES];
                    let lease = world.buffer(black_box(&buffer).as_ptr().addr()).unwrap();
                    black_box(&buffer);
                    lease
                };
                let lease = thread.spawn_scoped(scope, body).unwrap().join().unwrap();
                let again = thread_that_sends(scope, world, round);
                again.join().unwrap();
                drop(lease);
            }
        });
        world.works();
    });
}

fn thread_that_sends<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    world: &'static World,
    value: u8,
) -> std::thread::ScopedJoinHandle<'scope, ()> {
    let thread = std::thread::Builder::new().stack_size(64 << 20);
    thread.spawn_scoped(scope, move || send_from_stack(world, 0, !value)).unwrap()
}
