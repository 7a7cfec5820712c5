//! The filters of system calls (seccomp) that the process was started with, and those that the program added.

use pinfold_kernel::process::sandbox_mode;
use std::sync::OnceLock;

/// The filters of system calls that a process was started with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sandbox {
    mode: i32,
    /// `None` without filters, or where the kernel does not say (before 5.9).
    filters: Option<u32>,
}

static SANDBOX_AT_START: OnceLock<Sandbox> = OnceLock::new();

impl Sandbox {
    /// Remembers it. One system call; where there are filters, three more.
    pub(crate) fn note_start() {
        SANDBOX_AT_START.get_or_init(|| {
            let mode = sandbox_mode();
            Self { mode, filters: if mode > 0 { filters() } else { None } }
        });
    }

    /// Whether the program has restricted its system calls since. Where it was started without filters this
    /// is one system call, because a filter of its own may forbid more.
    pub(crate) fn is_the_program_s() -> bool {
        SANDBOX_AT_START.get().is_some_and(|start| {
            let mode = sandbox_mode();
            mode != start.mode || mode > 0 && filters() != start.filters
        })
    }
}

fn filters() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_stays_what_it_is() {
        Sandbox::note_start();
        assert!(!Sandbox::is_the_program_s());
        assert_eq!(filters().is_some_and(|filters| filters > 0), sandbox_mode() > 0);
    }
}
