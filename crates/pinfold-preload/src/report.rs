//! What the caches of this process have done, in words and in numbers.
//!
//! A rank of a job also leaves a line in the summary's file as it begins: from it the starter knows that a rank was there
//! whose report is missing, and which of the processes with a rank's variables the launcher has started. That is the first
//! one: the others have inherited the variables.

use crate::complaint::complain;
use crate::heap::secure_room;
use crate::rank::Rank;
use crate::reasons::Reasons;
use crate::settings::{Destination, Settings};
use crate::{apart, environment};
use pinfold::monitor::hooks::Hooks;
use pinfold_kernel::descriptor::regular_file;
use pinfold_kernel::process::effective_user;
use pinfold_kernel::thread::monotonic_time;
use pinfold_kernel::words::NotedDescriptor;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
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
    pub(crate) per_use: Reasons,
    /// Deregistrations for want of room.
    pub(crate) evictions: u64,
    /// Registrations that libibverbs made as it was asked, with nothing kept.
    pub(crate) passed: Reasons,
}

impl Totals {
    /// Registrations that the keeper was asked for.
    pub(crate) const fn gets(&self) -> u64 {
        self.hits + self.misses
    }

    /// The fields of a JSON object.
    fn json(&self) -> String {
        let gets = self.gets();
        let Self { hits, misses, regs, deregs, invalidations, per_use, evictions, passed } = self;
        let (at_once, through) = (per_use.total(), passed.total());
        format!(
            "\"gets\":{gets},\"hits\":{hits},\"misses\":{misses},\"regs\":{regs},\"deregs\":{deregs},\
             \"invalidations\":{invalidations},\"per_use\":{at_once},\"evictions\":{evictions},\
             \"passed\":{through},\"not_kept\":{}",
            passed.json(per_use)
        )
    }
}

/// What is reported of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Account {
    pub(crate) totals: Totals,
    /// What became of its monitor.
    pub(crate) monitor: &'static str,
    pub(crate) rank: Option<Rank>,
    /// Registrations by code of libibverbs that this library does not stand before.
    pub(crate) bypassed: u64,
}

impl Account {
    /// One line of JSON.
    fn json(&self, process: u32, hooks: &Hooks) -> String {
        let (Self { totals, monitor, rank, bypassed }, hooks) = (self, hooks.word());
        let rank = rank.map_or(String::new(), Rank::json);
        format!(
            "{{\"pid\":{process},{rank}{},\"bypassed\":{bypassed},\"monitor\":\"{monitor}\",\
             \"hooks\":\"{hooks}\"}}\n",
            totals.json()
        )
    }
}

/// The library is loaded. Of a process that is no rank and may cache, or whose starter wants no summary, nothing is
/// written, and nothing is allocated.
pub(crate) fn note_start() {
    let is_set = environment::is_set;
    let is_wanted =
        || is_set("PINFOLD_SUMMARY") && (is_set("PINFOLD_CACHE") || Rank::is_set(is_set));
    if is_wanted() && secure_room() {
        // A summary that lacks the line says so.
        let _ = apart::run(leave_beginning);
    }
}

/// Writes the line of a process that begins, or that is never to report because it caches nothing.
fn leave_beginning() -> io::Result<()> {
    let rank = Rank::among(environment::at_start);
    let off = match Settings::of_process() {
        Ok(settings) => (!settings.cache).then(|| "PINFOLD_CACHE=off".to_owned()),
        Err(error) => Some(format!("{} has a value that means nothing", error.name)),
    };
    let path = environment::at_start("PINFOLD_SUMMARY").filter(|_| rank.is_some() || off.is_some());
    let Some(path) = path.map(PathBuf::from) else { return Ok(()) };
    let process = std::process::id();
    let line = beginning(process, rank, off.as_deref());
    append(&for_process(&path, process), Opening::of_summary(&path), &line)
}

fn beginning(process: u32, rank: Option<Rank>, off: Option<&str>) -> String {
    let rank = rank.map_or(String::new(), Rank::json);
    let off = off.map_or(String::new(), |why| format!("\"off\":\"{why}\","));
    format!("{{\"pid\":{process},{rank}{off}\"began\":{}}}\n", monotonic_time())
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gets = self.gets();
        let Self { hits, misses, regs, deregs, invalidations, per_use, evictions, passed } = self;
        let (per_use, passed) = (per_use.total(), passed.total());
        write!(
            f,
            "{gets} gets: {hits} hits, {misses} misses ({per_use} not kept); {regs} registrations, \
             {deregs} given back ({invalidations} invalidated, {evictions} evicted); {passed} passed \
             through"
        )
    }
}

/// Where the reports of one process go. A file is opened as soon as the process registers memory: by the time of a
/// report the program may have another root, another user or no right to open anything.
#[derive(Debug)]
pub(crate) enum Report {
    StandardError,
    File {
        /// As it was asked for, which says whether a child has the same one.
        name: PathBuf,
        /// Where that is, whichever directory the thread that reports is in; `None` where the process's has no name.
        path: Option<PathBuf>,
        opening: Opening,
        opened: Option<NotedDescriptor>,
    },
}

impl Report {
    /// A forked child goes on with what its parent `had` if that is the same file. What cannot be opened is tried again
    /// by each report.
    pub(crate) fn new(to: Destination, had: Option<&Self>) -> Self {
        let (path, opening) = match to {
            Destination::StandardError => return Self::StandardError,
            Destination::File(path) => (path, Opening::AsNamed),
            Destination::Summary(path) => {
                let opening = Opening::of_summary(&path);
                (path, opening)
            }
        };
        let name = for_process(&path, std::process::id());
        match had {
            Some(Self::File { name: known, path, opened, .. }) if *known == name => {
                let (path, inherited) = (path.clone(), opened.filter(NotedDescriptor::is_still));
                let again = || opened_at(path.as_deref()?, opening);
                Self::File { name, opened: inherited.or_else(again), path, opening }
            }
            _ => {
                // By its name: above the process's directory may be one that its user may not enter.
                let (path, opened) = (std::path::absolute(&name).ok(), opened_at(&name, opening));
                Self::File { name, opened, path, opening }
            }
        }
    }

    /// Writes where the program's user wants it. Files get one line of JSON for each report, in one write, so that
    /// processes with one file do not mix their lines. No signal is left behind.
    ///
    /// # Errors
    ///
    /// The file cannot be made or written.
    pub(crate) fn write(&self, account: &Account) -> io::Result<()> {
        let (process, hooks) = (std::process::id(), Hooks::of_process());
        match self {
            Self::StandardError => {
                let Account { totals, monitor, .. } = account;
                complain(&format!("pinfold: {process}: {totals}; monitor: {monitor}; {hooks}\n"));
                Ok(())
            }
            Self::File { path, opening, opened, .. } => {
                let line = account.json(process, &hooks);
                match opened.filter(NotedDescriptor::is_still) {
                    Some(opened) => opening.write(opened, &line),
                    // The program has closed it, with all others that it does not know.
                    None => {
                        append(path.as_deref().ok_or(io::ErrorKind::NotFound)?, *opening, &line)
                    }
                }
            }
        }
    }
}

/// How a file is opened and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opening {
    /// Whatever the program's user has named, made if it is not there.
    AsNamed,
    /// The summary's, which the starter has made. In `/tmp` of another machine of the job a file or a link of this name is
    /// another user's.
    Starters,
    /// The summary's where each process has a file of its own (`%p`), in the starter's directory.
    OfProcess,
}

impl Opening {
    /// By the name, with its marks.
    fn of_summary(path: &Path) -> Self {
        let has_process = path.as_os_str().as_bytes().windows(2).any(|two| two == b"%p");
        if has_process { Self::OfProcess } else { Self::Starters }
    }

    fn open(self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.append(true).create(self != Self::Starters);
        if self == Self::AsNamed {
            return options.open(path);
        }
        // A pipe would be waited for.
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY);
        let file = options.open(path)?;
        let regular = regular_file(file.as_fd())?;
        // In a directory of the starter's the machine that has it may know its users by other numbers.
        let is_summary = regular.is_some_and(|found| {
            self == Self::OfProcess || (found.owner == effective_user() && found.names == 1)
        });
        if is_summary { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    /// In one write. What a process before has left of a line, where the disk was full, is not part of a summary's line.
    fn write(self, to: NotedDescriptor, line: &str) -> io::Result<()> {
        match self {
            Self::AsNamed => to.write_whole(line)?,
            Self::Starters | Self::OfProcess => to.write_whole(&format!("\n{line}"))?,
        }
        Ok(())
    }
}

fn opened_at(path: &Path, opening: Opening) -> Option<NotedDescriptor> {
    NotedDescriptor::keep(opening.open(path).ok()?.as_fd()).ok()
}

fn append(path: &Path, opening: Opening, line: &str) -> io::Result<()> {
    let file = opening.open(path)?;
    opening.write(NotedDescriptor::of(file.as_raw_fd()), line)
}

/// The path with the process's number for `%p`, and the machine's name for `%h`.
fn for_process(path: &Path, process: u32) -> PathBuf {
    let path = path.as_os_str().as_bytes();
    let filled = replaced(path, b"%p", || process.to_string().into_bytes());
    PathBuf::from(std::ffi::OsString::from_vec(replaced(&filled, b"%h", machine)))
}

fn replaced(text: &[u8], mark: &[u8; 2], by: impl Fn() -> Vec<u8>) -> Vec<u8> {
    let mut filled = Vec::new();
    let mut rest = text;
    while let Some(position) = rest.windows(2).position(|two| two == mark) {
        filled.extend_from_slice(&rest[..position]);
        filled.extend(by());
        rest = &rest[position + 2..];
    }
    filled.extend_from_slice(rest);
    filled
}

/// Its name, or `unknown`; no part of a path.
fn machine() -> Vec<u8> {
    let name = std::fs::read("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: Vec<u8> = name.into_iter().filter(|byte| !b"/\n".contains(byte)).collect();
    if name.is_empty() { b"unknown".to_vec() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_may_name_the_process() {
        assert_eq!(for_process(Path::new("/tmp/a.%p.%p%"), 12), Path::new("/tmp/a.12.12%"));
        assert_eq!(for_process(Path::new("plain"), 12), Path::new("plain"));
        let name = for_process(Path::new("/tmp/%h.%p"), 12).display().to_string();
        assert!(
            !name.contains("%h") && name.matches('/').count() == 2 && name.ends_with(".12"),
            "{name}"
        );
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
        let rank = Some(Rank { number: 1, of: 2 });
        let account = Account { totals, monitor: "ebpf", rank, bypassed: 3 };
        let json = account.json(7, &Hooks::Active { told: 0 });
        assert!(
            json.starts_with(
                "{\"pid\":7,\"rank\":1,\"ranks\":2,\"gets\":3,\"hits\":1,\"misses\":2,\"regs\":2,"
            ),
            "{json}"
        );
        assert!(
            json.contains("\"deregs\":2,\"invalidations\":1,")
                && json.ends_with(
                    "\"not_kept\":[],\"bypassed\":3,\"monitor\":\"ebpf\",\"hooks\":\"active\"}\n"
                )
        );
        assert!(totals.to_string().starts_with("3 gets: 1 hits"));
    }
}
