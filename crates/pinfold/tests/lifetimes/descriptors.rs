//! Programs that close every descriptor they do not know.

use crate::processes::*;
use crate::registrar_support::alone;
use crate::support::*;
use crate::world::*;
use pinfold::{GetError, PerUse, RegisterError, Uncovered};

/// Whatever is left of `world` may refuse, or register for each use, but is never stale and never in
/// the way.
fn is_truthful(world: &World, at: usize) {
    assert!(munmap(at, PAGE), "no change waits for a reader");
    map_over(at, PAGES);
    match world.buffer(at).map(|lease| lease.per_use()) {
        Err(GetError::Register(RegisterError::DeviceGone { .. })) => {}
        other => panic!("the ring's descriptor is closed: {other:?}"),
    }
    let lease = world.lock(at).unwrap();
    let lost = matches!(lease.per_use(), Some(PerUse::Uncovered(Uncovered::Lost(_))));
    assert!(lost || lease.is_cached(), "{lease:?}");
    assert!(munmap(at, BYTES));
}

#[test]
fn a_program_that_closes_everything_starts_afresh() {
    alone("descriptors::a_program_that_closes_everything_starts_afresh", || {
        if monitor().is_none() {
            return;
        }
        let child = fork(|| {
            let world = World::leaked().unwrap();
            let at = world.with_memory(b'c');
            let held = world.lock(at).unwrap();
            close_from(3);
            is_truthful(world, at);
            drop(held);
            World::new().unwrap().works();
        });
        assert_eq!(wait_for(child), 0);
    });
}

/// Fork, a new session, fork again, everything closed, and only then to work.
#[test]
fn a_daemon_starts_afresh() {
    alone("descriptors::a_daemon_starts_afresh", || {
        let Some(world) = World::leaked() else { return };
        let at = world.with_memory(b'd');
        let [answer, write] = pipe();
        let child = fork(|| {
            new_session();
            let daemon = fork(|| {
                duplicate_to(write, 1);
                close_from(3);
                is_forked(world);
                assert!(munmap(at, BYTES), "and no monitor watches its memory");
                World::new().unwrap().works();
                write_byte(1, b'!');
            });
            assert!(daemon > 0);
        });
        assert_eq!(wait_for(child), 0);
        close(write);
        assert_eq!(read_byte(answer), Some(b'!'));
        assert!(world.still_has(at, b'd'));
        world.works();
    });
}

/// As above, in the order of those who begin with their libraries and become daemons later.
#[test]
fn a_daemon_s_first_process_may_end() {
    alone("descriptors::a_daemon_s_first_process_may_end", || {
        if monitor().is_none() {
            return;
        }
        let [answer, write] = pipe();
        let child = fork(|| {
            let world = World::leaked().unwrap();
            let at = world.with_memory(b'd');
            fork(|| {
                new_session();
                is_forked(world);
                assert!(munmap(at, BYTES));
                World::new().unwrap().works();
                write_byte(write, b'!');
            });
        });
        assert_eq!(wait_for(child), 0);
        close(write);
        assert_eq!(read_byte(answer), Some(b'!'));
    });
}
