//! Monitors come and go and leave nothing behind. Alone in its process, because it counts.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod support;

use pinfold::monitor::Userfaultfd;
use pinfold::{Monitor, Watch};
use std::fs;
use support::*;

fn count(directory: &str) -> usize {
    fs::read_dir(directory).unwrap().count()
}

#[test]
fn many_monitors_leave_no_descriptor_and_no_thread() {
    drop(Userfaultfd::new().unwrap());
    let before = (count("/proc/self/fd"), count("/proc/self/task"));
    let at = map(8);
    for _ in 0..200 {
        let monitor = Userfaultfd::new().unwrap();
        assert_eq!(monitor.watch(range(at, 4 * PAGE)), Watch::Covered);
        assert!(madvise(at, PAGE, libc::MADV_DONTNEED));
        monitor.check().unwrap();
    }
    // A joined thread may still be on its way out of the kernel.
    while count("/proc/self/task") > before.1 {
        std::thread::yield_now();
    }
    assert_eq!((count("/proc/self/fd"), count("/proc/self/task")), before);
    assert!(munmap(at, 8 * PAGE));
}
