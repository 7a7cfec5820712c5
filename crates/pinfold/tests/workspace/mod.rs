//! The source files of the workspace, for tests that judge the code itself.

#![allow(dead_code, clippy::unwrap_used)] // each test uses some of it; helpers fail as loudly as tests

use std::fs;
use std::path::{Path, PathBuf};

/// The source folder of each crate, with the crate's name.
pub(crate) fn crates() -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut crates = vec![("pinfold-bench".to_owned(), root.join("bench/src"))];
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        let entry = entry.unwrap();
        crates.push((entry.file_name().into_string().unwrap(), entry.path().join("src")));
    }
    crates.sort();
    crates
}

/// Every Rust file below a folder.
pub(crate) fn sources(folder: &Path) -> Vec<PathBuf> {
    files(folder, &["rs"])
}

/// Every Rust and C file and every page of the project.
pub(crate) fn texts() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let pages = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
        .map(|page| root.join(page));
    let folders = ["bench", "crates", "docs", "vm"].map(|folder| root.join(folder));
    let below = folders.iter().flat_map(|folder| files(folder, &["rs", "c", "h", "md"]));
    pages.into_iter().chain(below).collect()
}

/// The files below a folder whose names end so.
fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extensions));
        } else if extensions.iter().any(|&it| path.extension().is_some_and(|end| end == it)) {
            found.push(path);
        }
    }
    found
}
