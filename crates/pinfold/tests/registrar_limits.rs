//! What [`Limits`] says, held against what the kernel does.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use pinfold::budget::{Budget, Kind, Privilege};
use pinfold::limits::{Limits, Memlock};
use pinfold::registrar::Mlock;
use pinfold::{Access, RegisterError, Registrar};
use registrar_support::{
    Memory, alone, enter_user_namespace, in_forked_child, limit_locked_memory, live_under_a_limit,
    lock,
};

const LIMIT: u64 = 64 << 10;

/// Whether more than [`LIMIT`] can be locked.
fn locks_more_than_the_limit() -> bool {
    let (registrar, memory) = (Mlock::new().unwrap(), Memory::new(1 << 20));
    match lock(&registrar, memory.range(), Access::READ) {
        Ok(_) => true,
        Err(RegisterError::PinnedMemoryLimit { limit_bytes: Some(LIMIT), .. }) => false,
        Err(other) => unreachable!("{other}"),
    }
}

#[test]
fn what_is_enforced_is_what_the_kernel_does() {
    alone("what_is_enforced_is_what_the_kernel_does", || {
        limit_locked_memory(LIMIT);
        let limits = Limits::read();
        assert_eq!(limits.memlock_soft, Memlock::Bytes(LIMIT));
        assert_eq!(limits.enforced() == Memlock::Unlimited, locks_more_than_the_limit());
    });
}

#[test]
fn the_limit_holds_for_the_unprivileged() {
    alone("the_limit_holds_for_the_unprivileged", || {
        if live_under_a_limit(LIMIT, 54_875) {
            let limits = Limits::read();
            assert!(matches!(limits.ipc_lock, Some(Privilege::Absent { .. })));
            assert_eq!(limits.enforced(), Memlock::Bytes(LIMIT));
            assert!(!locks_more_than_the_limit());
        }
    });
}

/// Root of a rootless container has the capability, and it is worth nothing.
#[test]
fn a_capability_of_ones_own_namespace_is_inert() {
    alone("a_capability_of_ones_own_namespace_is_inert", || {
        let held = in_forked_child(|| {
            if let Err(why) = enter_user_namespace() {
                eprintln!("skipped: no user namespaces: {why}");
                return true;
            }
            limit_locked_memory(LIMIT);
            let limits = Limits::read();
            limits.ipc_lock == Some(Privilege::Inert)
                && limits.enforced() == Memlock::Bytes(LIMIT)
                && !locks_more_than_the_limit()
        });
        assert!(held);
    });
}

/// The question needs no file: a program may change its root, and give up its privilege later.
#[test]
fn without_proc_the_limit_of_the_unprivileged_is_known() {
    alone("without_proc_the_limit_of_the_unprivileged_is_known", || {
        let empty = std::env::temp_dir().join(format!("pinfold-limits.{}", std::process::id()));
        std::fs::create_dir(&empty).unwrap();
        let held = in_forked_child(|| {
            limit_locked_memory(LIMIT);
            let device = Mlock::new().unwrap().limits();
            let budget = Budget::discover(Kind::Mlock, device).unwrap();
            if let Err(why) = std::os::unix::fs::chroot(&empty) {
                eprintln!("skipped: cannot change the root here: {why}");
                return true;
            }
            if !live_under_a_limit(LIMIT, 54_877) {
                return true;
            }
            let limits = Limits::read();
            limits.locked_bytes.is_none()
                && matches!(limits.ipc_lock, Some(Privilege::Absent { .. }))
                && !locks_more_than_the_limit()
                && budget.refresh().bytes as u64 <= LIMIT
        });
        std::fs::remove_dir(&empty).unwrap();
        assert!(held);
    });
}
