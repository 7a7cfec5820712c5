//! Programs that give up rights once they run: users, capabilities, roots, name spaces, system calls.

use crate::processes::{act_as, enter_name_spaces, give_up_root, refuse};
use crate::registrar_support::{alone, enter_user_namespace};
use crate::support::*;
use crate::world::*;
use pinfold::{GetError, PerUse, RegisterError, Uncovered};
use std::os::raw::{c_int, c_long};

/// `MADV_DONTNEED_LOCKED` (Linux 5.18): the memory may be locked by our own cache.
const DONTNEED_LOCKED: c_int = 24;

fn is_root() -> bool {
    if pinfold_kernel::process::effective_user() == 0 {
        return true;
    }
    eprintln!("skipped: only root can give root up");
    false
}

/// Runs `body` in a child with caches, if there can be any.
fn in_child(body: impl FnOnce(&'static World)) {
    if monitor().is_none() {
        return;
    }
    let child = fork(|| {
        let world = World::leaked().unwrap();
        world.works();
        body(world);
    });
    assert_eq!(wait_for(child), 0);
}

#[test]
fn another_user_goes_on_with_what_there_is() {
    alone("rights::another_user_goes_on_with_what_there_is", || {
        if !is_root() {
            return;
        }
        in_child(|world| {
            let at = world.with_memory(b'u');
            act_as(65534);
            assert!(world.still_has(at, b'u'));
            world.works();
            act_as(0);
            give_up_root(65534);
            assert!(world.still_has(at, b'u'));
            world.works();
        });
    });
}

/// `struct __user_cap_header_struct`, version 3, and no capability at all.
fn drop_capabilities() {
    let header = [0x2008_0522_u32, 0];
    let none = [0_u32; 6];
    let arguments = [header.as_ptr() as usize, none.as_ptr() as usize, 0, 0, 0];
    assert_eq!(raw(libc::SYS_capset, arguments), 0);
}

#[test]
fn without_capabilities_it_goes_on() {
    alone("rights::without_capabilities_it_goes_on", || {
        in_child(|world| {
            let at = world.with_memory(b'c');
            drop_capabilities();
            assert!(world.still_has(at, b'c'));
            world.works();
        });
    });
}

/// Without `/proc` nothing can prove that a discard is over, so what was discarded is registered for
/// each use; everything else goes on.
#[test]
fn in_another_root_it_goes_on() {
    alone("rights::in_another_root_it_goes_on", || {
        if !is_root() {
            return;
        }
        in_child(|world| {
            let at = world.with_memory(b'r');
            let empty = std::env::temp_dir().join(format!("pinfold-root.{}", std::process::id()));
            std::fs::create_dir(&empty).unwrap();
            std::os::unix::fs::chroot(&empty).unwrap();
            std::env::set_current_dir("/").unwrap();
            assert!(world.still_has(at, b'r'));
            world.works();
            assert!(madvise(at, BYTES, DONTNEED_LOCKED));
            fill(at, PAGES, b'R');
            assert!(world.moves(at, b'R'), "registered for this use, or else proved");
            let doubtful = world.buffer(at).unwrap().per_use();
            assert!(matches!(doubtful, None | Some(PerUse::ChangePending)), "{doubtful:?}");
        });
        let left = std::fs::read_dir(std::env::temp_dir()).unwrap();
        for entry in left.filter_map(Result::ok) {
            if entry.file_name().to_string_lossy().starts_with("pinfold-root.") {
                let _ = std::fs::remove_dir(entry.path());
            }
        }
    });
}

#[test]
fn in_other_name_spaces_it_goes_on() {
    alone("rights::in_other_name_spaces_it_goes_on", || {
        if !is_root() {
            return;
        }
        in_child(|world| {
            let at = world.with_memory(b'n');
            // A process with threads cannot: a program that wants this does it first.
            assert!(enter_user_namespace().is_err());
            if !enter_name_spaces() {
                return eprintln!("skipped: no name spaces here");
            }
            assert!(world.still_has(at, b'n'));
            world.works();
            // The first process of the new space, whose number is that of many others.
            let child = fork(|| {
                is_forked(world);
                World::new().unwrap().works();
            });
            assert_eq!(wait_for(child), 0);
        });
    });
}

/// Nothing stale, and no change that waits for ever, whatever else is refused.
fn is_truthful(world: &World, at: usize) {
    for value in b'1'..=b'5' {
        map_over(at, PAGES);
        fill(at, PAGES, value);
        match world.moved(at) {
            Ok(bytes) => assert_eq!(bytes.first(), Some(&value)),
            Err(GetError::Register(_)) => {}
            Err(error) => panic!("{error}"),
        }
        if let Ok(lease) = world.lock(at) {
            let known = [None, Some(PerUse::ChangePending)].contains(&lease.per_use());
            let lost = matches!(lease.per_use(), Some(PerUse::Uncovered(Uncovered::Lost(_))));
            assert!(known || lost, "{lease:?}");
        }
        assert!(madvise(at, BYTES, DONTNEED_LOCKED));
    }
    assert!(munmap(at, BYTES));
}

#[test]
fn whatever_a_filter_refuses_nothing_is_stale_and_no_thread_hangs() {
    alone("rights::whatever_a_filter_refuses_nothing_is_stale_and_no_thread_hangs", || {
        let filters: &[&[c_long]] = &[
            &[libc::SYS_ioctl],
            #[cfg(target_arch = "x86_64")]
            &[libc::SYS_poll, libc::SYS_ppoll],
            &[libc::SYS_membarrier],
            &[libc::SYS_fstat, libc::SYS_newfstatat],
            &[libc::SYS_fstatfs],
            &[libc::SYS_openat, libc::SYS_readlink, libc::SYS_readlinkat],
            &[libc::SYS_userfaultfd, libc::SYS_io_uring_setup, libc::SYS_clone, libc::SYS_clone3],
            &[libc::SYS_io_uring_register, libc::SYS_mlock, libc::SYS_munlock],
            &[libc::SYS_sched_yield],
            &[libc::SYS_gettid, libc::SYS_getdents64, libc::SYS_kcmp, libc::SYS_getpid],
        ];
        for calls in filters {
            for errno in [libc::EPERM, libc::ENOSYS] {
                in_child(|world| {
                    let at = world.with_memory(b'f');
                    refuse(calls, errno);
                    is_truthful(world, at);
                });
            }
        }
    });
}

/// A check that cannot be made says so, at once and for good.
#[test]
fn a_check_that_is_refused_is_a_loss() {
    alone("rights::a_check_that_is_refused_is_a_loss", || {
        in_child(|world| {
            let at = world.with_memory(b'f');
            refuse(&[libc::SYS_ioctl], libc::EPERM);
            map_over(at, PAGES);
            if world.locks.monitor().name() == "userfaultfd" {
                let why = world.lock(at).unwrap().per_use();
                let lost = pinfold::Lost::Descriptor { errno: libc::EPERM };
                assert_eq!(why, Some(PerUse::Uncovered(Uncovered::Lost(lost))));
            }
            let refused = world.buffer(at).map(drop);
            assert!(!matches!(refused, Err(GetError::Register(RegisterError::DeviceGone { .. }))));
        });
    });
}

/// The reader is woken by a change of a page. Where that is refused, the wait for it ends, and nothing is believed.
#[test]
fn a_reader_that_cannot_be_woken_is_a_loss() {
    use pinfold::monitor::{Choice, best_without_loading, notify};
    use pinfold::{AddressRange, Lost, Monitor};
    alone("rights::a_reader_that_cannot_be_woken_is_a_loss", || {
        let monitor = || {
            let monitor = best_without_loading(&notify::path()).ok();
            monitor.filter(|it| it.chosen() == Choice::Userfaultfd)
        };
        if monitor().is_none() {
            return eprintln!("skipped: no userfaultfd here");
        }
        let child = fork(|| {
            let monitor = monitor().unwrap();
            let range = AddressRange::new(map(PAGES), BYTES).unwrap();
            assert_eq!(monitor.watch(range), pinfold::Watch::Covered);
            refuse(&[libc::SYS_madvise], libc::EPERM);
            monitor.unwatch(range);
            assert_eq!(monitor.check(), Err(Lost::Descriptor { errno: libc::EPERM }));
            std::mem::forget(monitor);
        });
        assert_eq!(wait_for(child), 0);
    });
}
