//! The settings, from the environment as it was when the library was loaded.
//!
//! | variable | value | unless set |
//! |---|---|---|
//! | `PINFOLD_CACHE` | `on`, `off` | `on` |
//! | `PINFOLD_CACHE_REMOTE` | `on`, `off`: keep registrations that a peer may use | `off` |
//! | `PINFOLD_KEEP_FROM` | which registration of the same bytes is the first to be kept; 1: each one | 2 |
//! | `PINFOLD_KEEP_MEMORY` | `on`, `off`: have the allocator keep what the program frees | `off` |
//! | `PINFOLD_LIBFABRIC` | `on`, `off`: have libfabric's own cache ask the monitor (`FI_MR_CACHE_MONITOR` and `FI_MR_CACHE_MAX_COUNT` are heeded) | `off` |
//! | `PINFOLD_MAX_BYTES` | bytes to keep registered while they are idle, in all protection domains together: `512M`, `2G` | 1 GiB, or half of the memlock limit |
//! | `PINFOLD_MAX_REGIONS` | registrations to keep, likewise | 16384, or what the device has |
//! | `PINFOLD_STATISTICS` | `stderr` or a file to append to (`%p`: the process, `%h`: the machine) | none |
//! | `PINFOLD_STATISTICS_SIGNAL` | a signal that has them written: `USR1`, `10` | none, only at exit |
//! | `PINFOLD_SUMMARY` | a file for the program's starter, as `pinfold run` does | none |
//!
//! `1`, `yes` and `true` mean `on`; `0`, `no` and `false` mean `off`.

use crate::environment::{self, LONGEST};
use crate::rank::Rank;
use libc::c_int;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// What the environment says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Settings {
    pub(crate) cache: bool,
    pub(crate) cache_remote: bool,
    pub(crate) keep_from: u16,
    pub(crate) keep_memory: bool,
    pub(crate) libfabric: bool,
    pub(crate) max_bytes: Option<usize>,
    pub(crate) max_regions: Option<usize>,
    pub(crate) statistics: Option<Destination>,
    pub(crate) signal: Option<c_int>,
    pub(crate) summary: Option<PathBuf>,
    /// Set by the launcher of a job.
    pub(crate) rank: Option<Rank>,
}

/// Where reports go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Destination {
    StandardError,
    /// A file to append a line to; `%p` in its name stands for the process, `%h` for the machine.
    File(PathBuf),
    /// The file that the program's starter reads.
    Summary(PathBuf),
}

/// A variable whose value means nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{name} is {value:?}, which is not {wanted}")]
pub(crate) struct SettingError {
    pub(crate) name: &'static str,
    value: OsString,
    wanted: &'static str,
}

impl Settings {
    /// The settings, each from the variable that `variable` looks up.
    ///
    /// An empty variable is as good as none.
    ///
    /// # Errors
    ///
    /// [`SettingError`] for the first value that means nothing.
    pub(crate) fn read(
        variable: impl Fn(&'static str) -> Option<OsString>,
    ) -> Result<Self, SettingError> {
        let variable = |name| variable(name).filter(|value| !value.is_empty());
        let look = Look(&variable);
        Ok(Self {
            cache: look.up("PINFOLD_CACHE", "on or off", switch)?.unwrap_or(true),
            cache_remote: look.up("PINFOLD_CACHE_REMOTE", "on or off", switch)?.unwrap_or(false),
            keep_from: look
                .up("PINFOLD_KEEP_FROM", "a whole number from 1 to 1000", rank)?
                .unwrap_or(2),
            keep_memory: look.up("PINFOLD_KEEP_MEMORY", "on or off", switch)?.unwrap_or(false),
            libfabric: look.up("PINFOLD_LIBFABRIC", "on or off", switch)?.unwrap_or(false),
            max_bytes: look.up(
                "PINFOLD_MAX_BYTES",
                "a number of bytes from 4096 on, such as 512M or 2G",
                size,
            )?,
            max_regions: look.up("PINFOLD_MAX_REGIONS", "a whole number from 1 on", count)?,
            statistics: look.path_up("PINFOLD_STATISTICS")?.map(destination),
            signal: look.up(
                "PINFOLD_STATISTICS_SIGNAL",
                "a signal that a program may handle, such as USR1 or 10",
                signal,
            )?,
            summary: look.path_up("PINFOLD_SUMMARY")?.map(PathBuf::from),
            rank: Rank::among(variable),
        })
    }

    /// The settings of this process.
    pub(crate) fn of_process() -> Result<Self, SettingError> {
        Self::read(environment::at_start)
    }
}

/// Looks variables up and has them parsed.
struct Look<'v>(&'v dyn Fn(&'static str) -> Option<OsString>);

impl Look<'_> {
    fn up<T>(
        &self,
        name: &'static str,
        wanted: &'static str,
        parse: fn(&str) -> Option<T>,
    ) -> Result<Option<T>, SettingError> {
        let Some(value) = (self.0)(name) else { return Ok(None) };
        let parsed = value.to_str().and_then(|text| parse(text.trim()));
        parsed.map(Some).ok_or(SettingError { name, value, wanted })
    }

    fn path_up(&self, name: &'static str) -> Result<Option<OsString>, SettingError> {
        match (self.0)(name) {
            // The rest of it is not there, and the kernel takes none as long.
            Some(value) if value.len() >= LONGEST => {
                Err(SettingError { name, value, wanted: "a path of less than 4096 bytes" })
            }
            path => Ok(path),
        }
    }
}

fn switch(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "on" | "1" | "yes" | "true" => Some(true),
        "off" | "0" | "no" | "false" => Some(false),
        _ => None,
    }
}

/// Bytes with a unit of 1024: `K`, `M`, `G`, `T`, also written `KiB`, `KB` and small.
fn size(text: &str) -> Option<usize> {
    let text = text.to_ascii_lowercase();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim_start() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    let bytes = number.parse::<usize>().ok()?.checked_mul(1 << shift)?;
    (bytes >= 4096).then_some(bytes)
}

fn count(text: &str) -> Option<usize> {
    text.parse().ok().filter(|&count| count > 0)
}

fn rank(text: &str) -> Option<u16> {
    text.parse().ok().filter(|rank| (1..=1000).contains(rank))
}

fn destination(value: OsString) -> Destination {
    if value == OsStr::new("stderr") {
        Destination::StandardError
    } else {
        Destination::File(value.into())
    }
}

/// The signals that are left to programs, or whose usual meaning one may give up.
const SIGNALS: [(&str, c_int); 7] = [
    ("USR1", libc::SIGUSR1),
    ("USR2", libc::SIGUSR2),
    ("HUP", libc::SIGHUP),
    ("WINCH", libc::SIGWINCH),
    ("URG", libc::SIGURG),
    ("PWR", libc::SIGPWR),
    ("IO", libc::SIGIO),
];

/// A signal by its name, with or without `SIG`, or by its number; the real-time ones by number.
fn signal(text: &str) -> Option<c_int> {
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    let known = SIGNALS.iter().find(|(known, _)| *known == name).map(|&(_, number)| number);
    known.or_else(|| {
        let number: c_int = text.parse().ok()?;
        let ordinary = SIGNALS.iter().any(|&(_, known)| known == number);
        (ordinary || (libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&number)).then_some(number)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, SettingError> {
        Settings::read(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn nothing_set_means_a_silent_cache_of_local_rights() {
        let settings = read(&[]).unwrap();
        assert!(settings.cache && !settings.cache_remote && !settings.keep_memory);
        assert!(!settings.libfabric);
        assert_eq!((settings.max_bytes, settings.max_regions), (None, None));
        assert_eq!((settings.statistics, settings.signal, settings.summary), (None, None, None));
        assert_eq!(read(&[("PINFOLD_CACHE", "")]), read(&[]));
    }

    #[test]
    fn every_variable_is_heard() {
        let settings = read(&[
            ("PINFOLD_CACHE", "No"),
            ("PINFOLD_CACHE_REMOTE", "1"),
            ("PINFOLD_KEEP_FROM", "1"),
            ("PINFOLD_KEEP_MEMORY", "yes"),
            ("PINFOLD_LIBFABRIC", "on"),
            ("PINFOLD_MAX_BYTES", "512M"),
            ("PINFOLD_MAX_REGIONS", "7"),
            ("PINFOLD_STATISTICS", "/tmp/x.%p"),
            ("PINFOLD_STATISTICS_SIGNAL", "SIGUSR2"),
            ("PINFOLD_SUMMARY", "/tmp/y"),
        ])
        .unwrap();
        assert!(!settings.cache && settings.cache_remote && settings.keep_memory);
        assert!(settings.libfabric);
        assert_eq!((settings.max_bytes, settings.max_regions), (Some(512 << 20), Some(7)));
        assert_eq!((settings.keep_from, read(&[]).unwrap().keep_from), (1, 2));
        assert_eq!(settings.statistics, Some(Destination::File("/tmp/x.%p".into())));
        assert_eq!(settings.signal, Some(libc::SIGUSR2));
        assert_eq!(settings.summary, Some("/tmp/y".into()));
        let settings = read(&[("PINFOLD_STATISTICS", "stderr")]).unwrap();
        assert_eq!(settings.statistics, Some(Destination::StandardError));
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64k", 64 << 10),
            ("64 KiB", 64 << 10),
            ("3MB", 3 << 20),
            ("2g", 2 << 30),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "M", "1X", "4095", "-1", "1.5G", "99999999999999999999", "16777217T"] {
            assert_eq!(size(text), None, "{text}");
        }
    }

    #[test]
    fn signals_have_names_and_numbers() {
        assert_eq!(signal("usr1"), Some(libc::SIGUSR1));
        assert_eq!(signal("10"), Some(libc::SIGUSR1));
        assert_eq!(signal("34"), Some(34));
        for text in ["KILL", "9", "SEGV", "0", "65", "", "USR3"] {
            assert_eq!(signal(text), None, "{text}");
        }
    }

    #[test]
    fn what_means_nothing_is_named_with_what_would() {
        for (name, value) in [
            ("PINFOLD_CACHE", "perhaps"),
            ("PINFOLD_CACHE_REMOTE", "2"),
            ("PINFOLD_KEEP_FROM", "0"),
            ("PINFOLD_KEEP_MEMORY", "some"),
            ("PINFOLD_LIBFABRIC", "maybe"),
            ("PINFOLD_MAX_BYTES", "lots"),
            ("PINFOLD_MAX_REGIONS", "0"),
            ("PINFOLD_STATISTICS_SIGNAL", "KILL"),
        ] {
            let text = read(&[(name, value)]).unwrap_err().to_string();
            assert!(
                text.contains(name) && text.contains(value) && text.contains("not a ")
                    || text.contains("not on"),
                "{text}"
            );
        }
    }
}
