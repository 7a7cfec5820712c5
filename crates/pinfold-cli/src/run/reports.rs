//! Where the program's processes leave their reports: a place that is made before the program starts, and gone with
//! the command.

use super::signals::asked_to_end;
use super::summary::Summary;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Where the program's processes leave a line each; gone with this.
pub(super) enum Reports {
    /// All of them in one file of this machine.
    File(PathBuf),
    /// Each in a file of its own, in a directory that machines share: lines that two machines append to one file may
    /// overwrite each other.
    Directory(PathBuf),
}

impl Reports {
    /// # Errors
    ///
    /// The place cannot be made, or the library takes its path for another one.
    pub(super) fn new(shared: Option<&Path>) -> io::Result<Self> {
        let name = format!("pinfold-run.{}.{:016x}", std::process::id(), fastrand::u64(..));
        let directory = shared.map_or_else(temporary, Path::to_owned);
        let named = |error| io::Error::other(format!("{}: {error}", directory.display()));
        let path = std::path::absolute(&directory).map_err(named)?.join(name);
        let marked = |mark: &[u8]| path.as_os_str().as_bytes().windows(2).any(|two| two == mark);
        if marked(b"%p") || marked(b"%h") {
            return Err(io::Error::other(format!(
                "{}: %p and %h in its path stand for a process and a machine; use another directory",
                directory.display()
            )));
        }
        if shared.is_some() {
            DirBuilder::new().mode(0o700).create(&path).map_err(named)?;
            return Ok(Self::Directory(path));
        }
        // New, so that no other file is followed or truncated; there before the program, whose processes do not make it.
        // Its user's alone, whatever the umask says: the summary believes what is in it.
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600).open(&path).map_err(named)?;
        Ok(Self::File(path))
    }

    /// For `PINFOLD_SUMMARY`.
    pub(super) fn pattern(&self) -> PathBuf {
        match self {
            Self::File(path) => path.clone(),
            Self::Directory(path) => path.join("%h.%p"),
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::File(path) => vec![path.clone()],
            Self::Directory(path) => {
                let entries = fs::read_dir(path).into_iter().flatten().flatten();
                entries.map(|entry| entry.path()).collect()
            }
        }
    }

    /// What the reports say, as far as this process was not asked to end.
    pub(super) fn summary(&self) -> Summary {
        let read = |file: PathBuf| lines_of(&file).unwrap_or_default();
        let texts: Vec<_> = self.files().into_iter().map(read).collect();
        let lines = texts.iter().flat_map(|text| text.lines());
        Summary::of(lines.take_while(|_| asked_to_end().is_none()))
    }
}

/// As programs have it, an empty variable is none.
fn temporary() -> PathBuf {
    let directory = std::env::temp_dir();
    if directory.as_os_str().is_empty() { "/tmp".into() } else { directory }
}

/// Of a regular file; what else a program leaves there may have no end.
fn lines_of(path: &Path) -> io::Result<String> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let mut bytes = Vec::new();
    if file.metadata()?.is_file() && asked_to_end().is_none() {
        file.read_to_end(&mut bytes)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Drop for Reports {
    fn drop(&mut self) {
        // A file that is left does no harm.
        let _ = match self {
            Self::File(path) => fs::remove_file(path),
            Self::Directory(path) => fs::remove_dir_all(path),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn reports_are_gone_with_their_reader() {
        let reports = Reports::new(None).unwrap();
        let path = reports.pattern();
        assert_eq!(mode(&path), 0o600);
        fs::write(&path, b"{\"gets\":2}\n\xff torn\n{\"gets\":1}\n").unwrap();
        assert_eq!(reports.summary().processes, 2);
        drop(reports);
        assert!(!path.exists());
    }

    #[test]
    fn machines_that_share_a_directory_leave_a_file_each() {
        let reports = Reports::new(Some(&std::env::temp_dir())).unwrap();
        let pattern = reports.pattern();
        let [own, others, link] =
            ["here.1", "there.1", "link"].map(|name| pattern.with_file_name(name));
        assert!(pattern.ends_with("%h.%p") && pattern.is_absolute());
        assert_eq!(mode(pattern.parent().unwrap()), 0o700);
        fs::write(&own, "{\"gets\":2}\n").unwrap();
        fs::write(&others, "{\"gets\":1}\n").unwrap();
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert_eq!(reports.summary().processes, 2, "a link is no report");
        drop(reports);
        assert!(!pattern.parent().unwrap().exists());
        assert!(Reports::new(Some(&own)).is_err(), "no directory");
    }

    #[test]
    fn a_path_that_stands_for_others_is_refused() {
        for shared in ["/tmp/%p", "/tmp/100%host"] {
            let refused = Reports::new(Some(Path::new(shared))).err().unwrap().to_string();
            assert!(refused.contains(shared) && refused.contains("another directory"), "{refused}");
        }
    }
}
