//! What was measured on this machine, in files of the user's cache directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// `pinfold/NAME` in the user's cache directory (`XDG_CACHE_HOME`, else `.cache` at home). `None`
/// without a home.
pub(crate) fn file(name: &str) -> Option<PathBuf> {
    let set = |key| std::env::var_os(key).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(caches.join("pinfold").join(name))
}

/// Writes a file. A concurrent reader finds the old one or the new one.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let new = beside(path);
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.inspect_err(|_| {
        // What is half written is of no use; that it could not be written is what is told.
        let _ = fs::remove_file(&new);
    })
}

/// A name that no other writer of `path` has, in any thread or process of this machine.
fn beside(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Relaxed: uniqueness is all that is asked.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.{number}", std::process::id()));
    name.into()
}

/// The kernel's release and the processor's name, on one line: what a measurement holds for.
pub(crate) fn machine() -> String {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find_map(|line| line.strip_prefix("model name"));
    format!("{} {}", kernel.trim(), model.unwrap_or_default().trim_start_matches([' ', '\t', ':']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn directory(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("pinfold-stored-{name}-{}", std::process::id()))
    }

    fn names(directory: &Path) -> Vec<PathBuf> {
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn a_reader_finds_one_whole_file_during_writes() {
        let directory = directory("threads");
        // Two names that differ behind a dot alone are two files.
        let files = [directory.join("costs.first"), directory.join("costs.second")];
        let text = |writer: u8| char::from(b'a' + writer).to_string().repeat(4096);
        thread::scope(|scope| {
            for (writer, file) in (0..8_u8).flat_map(|writer| files.each_ref().map(|f| (writer, f)))
            {
                scope.spawn(move || (0..20).for_each(|_| write(file, &text(writer)).unwrap()));
            }
        });
        for file in &files {
            let found = fs::read_to_string(file).unwrap();
            assert!((0..8).any(|writer| found == text(writer)));
        }
        assert_eq!(names(&directory).len(), 2);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn what_fails_leaves_nothing() {
        let directory = directory("failure");
        // A directory that holds something takes no file's place.
        let taken = directory.join("taken");
        fs::create_dir_all(taken.join("inner")).unwrap();
        assert!(write(&taken, "text").is_err());
        assert_eq!(names(&directory), [taken]);
        fs::remove_dir_all(&directory).unwrap();
    }
}
