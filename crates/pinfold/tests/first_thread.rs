//! A process whose first thread has ended, as one whose `main` leaves by `pthread_exit`: of that thread `/proc/self` says no
//! more than that it was there.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use pinfold::budget::Discovery;
use pinfold::limits::Limits;
use pinfold::mappings::{diagnose, mappings_in};
use pinfold::monitor::Userfaultfd;
use pinfold::rearrange::ResidentPages;
use pinfold::registrar::Mlock;
use pinfold::{Access, AddressRange, BadAddress, Monitor, Watch};
use registrar_support::{Memory, alone, behind_the_first_thread, lock};

fn check_in_such_a_process(name: &str, body: impl FnOnce() + Send + 'static) {
    alone(name, move || assert!(behind_the_first_thread(body)));
}

fn is_covered(range: AddressRange) -> bool {
    let parts = mappings_in(range).unwrap();
    let parts = parts.iter().filter_map(|mapping| mapping.range.intersection(&range));
    parts.map(|part| part.len()).sum::<usize>() == range.len()
}

#[test]
fn its_memory_is_seen() {
    check_in_such_a_process("its_memory_is_seen", || {
        let mut memory = Memory::new(1 << 20);
        memory.fill(1);
        assert!(is_covered(memory.range()));
        assert_eq!(diagnose(memory.range(), Access::READ_WRITE), BadAddress::Unknown);
        assert_eq!(ResidentPages::of(memory.range()).unwrap().resident, 1 << 20);
    });
}

#[test]
fn its_limits_are_read() {
    let groups = |found: &Discovery| (found.groups.len(), found.groups_unread);
    let before = groups(&Discovery::read());
    check_in_such_a_process("its_limits_are_read", move || {
        let (registrar, memory) = (Mlock::new().unwrap(), Memory::new(1 << 16));
        lock(&registrar, memory.range(), Access::READ_WRITE).unwrap();
        let limits = Limits::read();
        assert_eq!((limits.locked_bytes, limits.pinned_bytes), (Some(1 << 16), Some(0)));
        let found = Discovery::read();
        assert_eq!((found.locked.get(), found.pinned.get()), (Some(1 << 16), Some(0)));
        assert!(found.mappings.get().is_some_and(|count| count > 8));
        assert_eq!(groups(&found), before);
    });
}

/// One that begins there.
#[test]
fn a_monitor_watches_its_memory() {
    check_in_such_a_process("a_monitor_watches_its_memory", || {
        let Ok(monitor) = Userfaultfd::new() else { return eprintln!("skipped: no userfaultfd") };
        let memory = Memory::new(1 << 20);
        assert_eq!(monitor.watch(memory.range()), Watch::Covered);
    });
}
