//! The policy on real allocators, each in a process of its own: freed memory stays where it was, and
//! registered.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use pinfold::allocator::{self, Allocator, Kept, NotSet, Policy};
use pinfold::monitor::Userfaultfd;
use pinfold::registrar::IoUring;
use pinfold::{Cache, Config};
use registrar_support::{QuietRing, registrar_of_a_ring};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const MIB: usize = 1 << 20;

const MARK: &str = "PINFOLD_TEST_ALLOCATOR";

/// Runs the test `name` in a process of its own, with `library` before libc if there is one.
fn under(name: &str, library: Option<&str>, body: impl FnOnce()) {
    if std::env::var_os(MARK).is_some_and(|mark| mark == name) {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(MARK, name);
    if let Some(library) = library {
        if !Path::new(library).exists() {
            eprintln!("skipped: no {library}");
            return;
        }
        command.env("LD_PRELOAD", library);
    }
    let output = command.output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    eprint!("{err}");
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}", output.status);
}

fn kept(allocator: Allocator) -> Kept {
    let mut kept = allocator::keep_memory(Policy::default());
    let position = kept.iter().position(|kept| kept.allocator() == allocator);
    let kept = kept.swap_remove(position.unwrap_or_else(|| panic!("not found: {kept:?}")));
    assert!(kept.serves_malloc() && kept.holds(), "{kept}");
    kept
}

fn cache() -> Option<(QuietRing, Cache<IoUring, Arc<Userfaultfd>>)> {
    let (ring, registrar) = registrar_of_a_ring(1024)?;
    let monitor = Userfaultfd::shared().map_err(|why| eprintln!("skipped: {why}")).ok()?;
    let config = Config { piece_bytes: 4 * MIB, ..Config::keeping_all() };
    Some((ring, pinfold::cache(registrar, monitor, config).unwrap()))
}

/// How often a buffer of `length` bytes has to be registered when it is made and freed `times` times.
fn registrations(times: usize, length: usize) -> Option<u64> {
    let (_ring, cache) = cache()?;
    for time in 0..times {
        let buffer = vec![u8::try_from(time % 251).unwrap() + 1; length];
        match cache.lease_buffer(buffer) {
            Ok(lease) => drop(lease),
            Err(refused) => {
                eprintln!("skipped: {}", refused.error);
                return None;
            }
        }
    }
    Some(cache.statistics().registrations)
}

#[test]
fn glibc_keeps_what_is_freed_until_it_is_undone() {
    under("glibc_keeps_what_is_freed_until_it_is_undone", None, || {
        if cfg!(not(target_env = "gnu")) {
            return;
        }
        let policy = kept(Allocator::Glibc);
        let Some(with) = registrations(20, MIB) else { return };
        assert!(with <= 2, "{with} registrations of 20 buffers");
        let undone = policy.undo();
        assert!(undone.len() == 2 && undone.iter().all(|setting| setting.now.is_ok()));
        // A mapping of its own again for each buffer that the heap has no room for, unmapped when it
        // is freed.
        assert_eq!(registrations(20, 4 * MIB), Some(20));
    });
}

#[test]
fn one_arena_is_set_only_if_it_is_asked_for() {
    under("one_arena_is_set_only_if_it_is_asked_for", None, || {
        let names = |single_arena| -> Vec<String> {
            let kept = allocator::keep_memory(Policy { single_arena });
            kept.iter().flat_map(Kept::settings).map(|setting| setting.name.clone()).collect()
        };
        if cfg!(target_env = "gnu") {
            assert!(!names(false).contains(&"M_ARENA_MAX".to_owned()));
            assert!(names(true).contains(&"M_ARENA_MAX".to_owned()));
        }
    });
}

/// glibc reads it once, so that behind a thread's first heap nothing is undone, and no call says which it is.
#[test]
fn one_arena_is_not_said_to_be_undone() {
    under("one_arena_is_not_said_to_be_undone", None, || {
        if cfg!(not(target_env = "gnu")) {
            return;
        }
        let kept = allocator::keep_memory(Policy { single_arena: true });
        let glibc = kept.into_iter().find(|kept| kept.allocator() == Allocator::Glibc).unwrap();
        assert!(glibc.holds(), "{glibc}");
        std::thread::spawn(|| drop(vec![1_u8; MIB])).join().unwrap();
        let undone = glibc.undo();
        let arenas = undone.iter().find(|setting| setting.name == "M_ARENA_MAX").unwrap();
        assert_eq!((arenas.before, arenas.now), (Some(1), Err(NotSet::DecidedOnce)));
        assert!(arenas.to_string().contains("decided once"), "{arenas}");
        let others = undone.iter().filter(|setting| setting.name != "M_ARENA_MAX");
        assert!(others.clone().count() == 2 && others.clone().all(|other| other.now.is_ok()));
    });
}

const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
const MIMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2";

#[test]
fn jemalloc_keeps_what_is_freed_and_remembers_what_it_was() {
    under("jemalloc_keeps_what_is_freed_and_remembers_what_it_was", Some(JEMALLOC), || {
        let policy = kept(Allocator::Jemalloc);
        assert!(policy.settings().iter().any(|setting| setting.name == "arenas.dirty_decay_ms"));
        assert!(policy.settings().iter().any(|setting| setting.name == "arena.0.dirty_decay_ms"));
        let Some(with) = registrations(20, MIB) else { return };
        assert!(with <= 2, "{with} registrations of 20 buffers");
        let before: Vec<_> = policy.settings().iter().map(|setting| setting.before).collect();
        let after: Vec<_> = policy.undo().iter().map(|setting| setting.now.ok()).collect();
        assert_eq!(after[..before.len()], before);
    });
}

/// Of an arena that was made meanwhile, too, which began with what is kept.
#[test]
fn jemalloc_gives_back_what_is_freed_in_every_arena_behind_an_undo() {
    let name = "jemalloc_gives_back_what_is_freed_in_every_arena_behind_an_undo";
    under(name, Some(JEMALLOC), || {
        let policy = kept(Allocator::Jemalloc);
        drop(vec![1_u8; 16 * MIB]);
        let of_a_thread = std::thread::spawn(|| drop(vec![1_u8; MIB]));
        of_a_thread.join().unwrap();
        let settings = policy.settings().len();
        let undone = policy.undo();
        assert!(undone.len() > settings && undone.iter().all(|setting| setting.now.is_ok()));
        let again = kept(Allocator::Jemalloc);
        let decays = again.settings().iter().filter(|setting| setting.name.contains("decay"));
        let kept: Vec<_> = decays.filter(|setting| setting.before == Some(-1)).collect();
        assert!(kept.is_empty(), "{kept:?}");
    });
}

#[test]
fn mimalloc_keeps_what_is_freed_and_remembers_what_it_was() {
    under("mimalloc_keeps_what_is_freed_and_remembers_what_it_was", Some(MIMALLOC), || {
        let policy = kept(Allocator::Mimalloc);
        let before = policy.settings()[0].before;
        let Some(with) = registrations(20, MIB) else { return };
        assert!(with <= 2, "{with} registrations of 20 buffers");
        assert_eq!(policy.undo()[0].now.ok(), before);
    });
}

/// An allocator that is there but serves another caller is set, and glibc's stays what it is.
#[test]
fn what_was_set_says_so() {
    under("what_was_set_says_so", None, || {
        let kept = allocator::keep_memory(Policy::default());
        assert!(kept.iter().any(Kept::serves_malloc));
        for kept in kept {
            let text = kept.to_string();
            assert!(kept.settings().iter().all(|setting| text.contains(&setting.name)), "{text}");
        }
    });
}
