//! What the caches of this process have done, in words and in numbers.

use crate::complaint::complain;
use crate::settings::Destination;
use pinfold::monitor::hooks::Hooks;
use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// What was done in a process.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Totals {
    /// Registrations that were found idle.
    pub(crate) hits: u64,
    /// Those that were not, and were to be kept.
    pub(crate) misses: u64,
    /// Registrations by libibverbs among those.
    pub(crate) regs: u64,
    /// Deregistrations of what was kept.
    pub(crate) deregs: u64,
    /// Kept ones whose bytes changed.
    pub(crate) invalidations: u64,
    /// Those that were to be kept, and could not be.
    pub(crate) per_use: u64,
    /// Deregistrations for want of room.
    pub(crate) evictions: u64,
    /// Registrations that libibverbs made as it was asked, with nothing kept.
    pub(crate) passed: u64,
}

impl Totals {
    /// Registrations that the keeper was asked for.
    pub(crate) const fn gets(&self) -> u64 {
        self.hits + self.misses
    }

    /// One line of JSON.
    pub(crate) fn json(&self, process: u32, hooks: &Hooks) -> String {
        let gets = self.gets();
        let Self { hits, misses, regs, deregs, invalidations, per_use, evictions, passed } = self;
        format!(
            "{{\"pid\":{process},\"gets\":{gets},\"hits\":{hits},\"misses\":{misses},\
             \"regs\":{regs},\"deregs\":{deregs},\"invalidations\":{invalidations},\
             \"per_use\":{per_use},\"evictions\":{evictions},\"passed\":{passed},\
             \"hooks\":\"{}\"}}\n",
            hooks.word()
        )
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gets = self.gets();
        let Self { hits, misses, regs, deregs, invalidations, per_use, evictions, passed } = self;
        write!(
            f,
            "{gets} gets: {hits} hits, {misses} misses ({per_use} not kept); {regs} registrations, \
             {deregs} given back ({invalidations} invalidated, {evictions} evicted); {passed} passed \
             through"
        )
    }
}

/// Writes to where the program's user wants it. Files get one line of JSON for each report.
///
/// # Errors
///
/// The file cannot be made or written.
pub(crate) fn write(to: &Destination, process: u32, totals: &Totals) -> io::Result<()> {
    let hooks = Hooks::of_process();
    match to {
        Destination::StandardError => {
            complain(&format!("pinfold: {process}: {totals}; {hooks}\n"));
            Ok(())
        }
        Destination::File(path) => {
            append(&for_process(path, process), &totals.json(process, &hooks))
        }
    }
}

/// In one write, so that processes with one file do not mix their lines.
pub(crate) fn append(path: &Path, line: &str) -> io::Result<()> {
    OpenOptions::new().append(true).create(true).open(path)?.write_all(line.as_bytes())
}

/// The path with the process's number for `%p`.
fn for_process(path: &Path, process: u32) -> PathBuf {
    let mut filled = Vec::new();
    let mut rest = path.as_os_str().as_bytes();
    while let Some(position) = rest.windows(2).position(|two| two == b"%p") {
        filled.extend_from_slice(&rest[..position]);
        filled.extend_from_slice(process.to_string().as_bytes());
        rest = &rest[position + 2..];
    }
    filled.extend_from_slice(rest);
    PathBuf::from(std::ffi::OsString::from_vec(filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_may_name_the_process() {
        assert_eq!(for_process(Path::new("/tmp/a.%p.%p%"), 12), Path::new("/tmp/a.12.12%"));
        assert_eq!(for_process(Path::new("plain"), 12), Path::new("plain"));
    }

    #[test]
    fn a_report_has_every_count() {
        let totals = Totals {
            hits: 1,
            misses: 2,
            regs: 2,
            deregs: 2,
            invalidations: 1,
            ..Totals::default()
        };
        let json = totals.json(7, &Hooks::Active { told: 0 });
        assert!(
            json.starts_with("{\"pid\":7,\"gets\":3,\"hits\":1,\"misses\":2,\"regs\":2,"),
            "{json}"
        );
        assert!(
            json.contains("\"deregs\":2,\"invalidations\":1,")
                && json.ends_with("\"hooks\":\"active\"}\n")
        );
        assert!(totals.to_string().starts_with("3 gets: 1 hits"));
    }
}
