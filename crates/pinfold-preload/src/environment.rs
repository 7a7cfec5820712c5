//! The variables that this library reads, as they were when it was loaded, or when a constructor called it before that.
//!
//! Later they are the program's: it may change them on one thread while another one registers (a race with each that reads
//! them), empty its environment, have `environ` point to what is gone, or write over the strings, as programs do that show a
//! title of their own in `ps`. While the library is loaded nothing else runs. The values are copied into memory that is
//! there by then: nothing is allocated, and no system call is made.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

/// All that are read: those of `settings`, of the launchers of jobs (`rank`), the helper's, and libfabric's own.
const NAMES: [&str; 21] = [
    "PINFOLD_CACHE",
    "PINFOLD_CACHE_REMOTE",
    "PINFOLD_KEEP_FROM",
    "PINFOLD_KEEP_MEMORY",
    "PINFOLD_LIBFABRIC",
    "PINFOLD_MAX_BYTES",
    "PINFOLD_MAX_REGIONS",
    "PINFOLD_NOTIFYD",
    "PINFOLD_STATISTICS",
    "PINFOLD_STATISTICS_SIGNAL",
    "PINFOLD_SUMMARY",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "FI_MR_CACHE_MONITOR",
    "FI_MR_CACHE_MAX_COUNT",
];

/// How many bytes of a value are copied: `PATH_MAX`. A path has fewer, and so has everything else that means something.
pub(crate) const LONGEST: usize = 4096;

/// Copies of some variables. Most of it is never touched, and takes addresses only.
struct Copies {
    /// Where in `bytes` the value of each of [`NAMES`] begins; 0 for one that is not set.
    starts: [AtomicUsize; NAMES.len()],
    /// A byte that is 0, then the values, with one behind each.
    bytes: [AtomicU8; NAMES.len() * (LONGEST + 1) + 1],
}

static AT_START: Copies = Copies::new();

/// The library is loaded, with these variables.
pub(crate) fn note_start<'s>(variables: impl Iterator<Item = &'s [u8]>) {
    AT_START.note(variables);
}

/// What the process was started with.
pub(crate) fn at_start(name: &str) -> Option<OsString> {
    AT_START.value(name)
}

/// Whether the process was started with it. Allocates nothing.
pub(crate) fn is_set(name: &str) -> bool {
    AT_START.start(name).is_some()
}

/// Whether any value that is read was there. Allocates nothing.
pub(crate) fn is_any_set() -> bool {
    NAMES.into_iter().any(is_set)
}

impl Copies {
    const fn new() -> Self {
        Self {
            starts: [const { AtomicUsize::new(0) }; NAMES.len()],
            bytes: [const { AtomicU8::new(0) }; NAMES.len() * (LONGEST + 1) + 1],
        }
    }

    /// Of variables that are there twice, the first counts. Once, by one thread.
    fn note<'s>(&self, variables: impl Iterator<Item = &'s [u8]>) {
        let mut free = 1;
        for (place, value) in variables.filter_map(known) {
            // Relaxed, here and below: threads that read them are started later, or get the library from this one.
            if self.starts[place].load(Ordering::Relaxed) == 0 {
                let value = &value[..value.len().min(LONGEST)];
                let copied = self.bytes[free..].iter().zip(value);
                copied.for_each(|(to, byte)| to.store(*byte, Ordering::Relaxed));
                self.starts[place].store(free, Ordering::Relaxed);
                free += value.len() + 1;
            }
        }
    }

    fn value(&self, name: &str) -> Option<OsString> {
        let bytes = self.bytes[self.start(name)?..].iter().map(|byte| byte.load(Ordering::Relaxed));
        Some(OsString::from_vec(bytes.take_while(|byte| *byte != 0).collect()))
    }

    /// Where its value begins; `None` if it is not set.
    fn start(&self, name: &str) -> Option<usize> {
        let place = NAMES.iter().position(|known| *known == name)?;
        Some(self.starts[place].load(Ordering::Relaxed)).filter(|&start| start > 0)
    }
}

/// The place of a variable's name among those that are read, and its value.
fn known(variable: &[u8]) -> Option<(usize, &[u8])> {
    NAMES.iter().enumerate().find_map(|(place, name)| {
        let value = variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some((place, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(variables: &[&str]) -> Box<Copies> {
        let copies = Box::new(Copies::new());
        copies.note(variables.iter().map(|variable| variable.as_bytes()));
        copies
    }

    #[test]
    fn what_is_read_is_copied_and_nothing_else() {
        let copies = noted(&["PATH=/bin", "PINFOLD_CACHE", "PINFOLD_KEEP_FROM=", "PMI_RANK=3=4"]);
        let value = |name| copies.value(name);
        assert_eq!(value("PMI_RANK"), Some("3=4".into()));
        assert_eq!(value("PINFOLD_KEEP_FROM"), Some("".into()));
        assert!(copies.start("PINFOLD_KEEP_FROM").is_some() && copies.start("PMI_SIZE").is_none());
        assert_eq!((value("PATH"), value("PINFOLD_CACHE"), value("PMI_SIZE")), (None, None, None));
    }

    #[test]
    fn of_variables_that_are_there_twice_the_first_counts() {
        let copies = noted(&["PINFOLD_CACHE_REMOTE=on", "PINFOLD_CACHE=a", "PINFOLD_CACHE=b"]);
        assert_eq!(copies.value("PINFOLD_CACHE"), Some("a".into()));
        assert_eq!(copies.value("PINFOLD_CACHE_REMOTE"), Some("on".into()));
    }

    #[test]
    fn there_is_room_for_every_value() {
        let long = "x".repeat(LONGEST + 1);
        let variables = NAMES.map(|name| format!("{name}={long}"));
        let copies = noted(&variables.each_ref().map(String::as_str));
        for name in NAMES {
            assert_eq!(copies.value(name), Some(long[..LONGEST].into()), "{name}");
        }
    }
}
