//! What was measured on this machine, in files of the user's cache directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// `pinfold/NAME` in the user's cache directory (`XDG_CACHE_HOME`, else `.cache` at home). `None`
/// without a home.
pub(crate) fn file(name: &str) -> Option<PathBuf> {
    let set = |key| std::env::var_os(key).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(caches.join("pinfold").join(name))
}

/// Writes a file. Whoever reads at the same time finds the old one or the new one.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let new = path.with_extension(format!("{}", std::process::id()));
    fs::write(&new, text)?;
    fs::rename(&new, path)
}

/// The kernel's release and the processor's name, on one line: what a measurement holds for.
pub(crate) fn machine() -> String {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find_map(|line| line.strip_prefix("model name"));
    format!("{} {}", kernel.trim(), model.unwrap_or_default().trim_start_matches([' ', '\t', ':']))
}
