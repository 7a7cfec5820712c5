//! What the caches of this process have done, in words and in numbers.

use crate::settings::Destination;
use crate::sys;
use pinfold::Statistics;
use pinfold::monitor::hooks::Hooks;
use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Counters of all caches of a process, those that are gone included.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Totals {
    pub(crate) gets: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) regs: u64,
    pub(crate) deregs: u64,
    pub(crate) invalidations: u64,
    pub(crate) per_use: u64,
    pub(crate) evictions: u64,
    pub(crate) passed: u64,
}

impl Totals {
    /// Adds what one cache has done.
    pub(crate) fn add(&mut self, cache: &Statistics) {
        self.gets += cache.gets;
        self.hits += cache.hits;
        self.misses += cache.misses;
        self.regs += cache.registrations;
        self.deregs += cache.deregistrations;
        self.invalidations += cache.invalidations;
        self.per_use += cache.per_use;
        self.evictions += cache.evictions;
    }

    /// One line of JSON.
    pub(crate) fn json(&self, process: u32, hooks: &Hooks) -> String {
        let Self { gets, hits, misses, regs, deregs, invalidations, per_use, evictions, passed } =
            self;
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
        let Self { gets, hits, misses, regs, deregs, invalidations, per_use, evictions, passed } =
            self;
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
            sys::complain(&format!("pinfold: {process}: {totals}; {hooks}\n"));
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
    fn caches_add_up() {
        let mut totals = Totals::default();
        let one =
            Statistics { gets: 3, hits: 1, misses: 2, registrations: 2, ..Statistics::default() };
        totals.add(&one);
        totals.add(&Statistics { deregistrations: 2, invalidations: 1, ..one });
        assert_eq!((totals.gets, totals.hits, totals.misses, totals.regs), (6, 2, 4, 4));
        let json = totals.json(7, &Hooks::Active { told: 0 });
        assert!(
            json.starts_with("{\"pid\":7,\"gets\":6,\"hits\":2,\"misses\":4,\"regs\":4,"),
            "{json}"
        );
        assert!(
            json.contains("\"deregs\":2,\"invalidations\":1,")
                && json.ends_with("\"hooks\":\"active\"}\n")
        );
        assert!(totals.to_string().starts_with("6 gets: 2 hits"));
    }
}
