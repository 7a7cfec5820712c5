//! One name, one meaning: every public type of the workspace has a name of its own.

#![allow(clippy::unwrap_used)] // helpers fail as loudly as tests

mod workspace;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use workspace::{crates, sources};

/// The name that a line declares publicly: `pub struct Name`, and the like.
fn declared(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let kinds = ["struct ", "enum ", "union ", "trait ", "unsafe trait ", "type "];
    let rest = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

/// Where each name is declared. What stands for the same under two configurations is in one file.
fn names() -> BTreeMap<String, BTreeSet<PathBuf>> {
    let files = crates().into_iter().flat_map(|(_, folder)| sources(&folder));
    let mut names: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for file in files {
        for name in fs::read_to_string(&file).unwrap().lines().filter_map(declared) {
            names.entry(name.to_owned()).or_default().insert(file.clone());
        }
    }
    names
}

#[test]
fn every_public_type_has_a_name_of_its_own() {
    let names = names();
    assert!(names.len() > 100, "the workspace has more types than {}", names.len());
    let double: BTreeMap<_, _> = names.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(double.is_empty(), "these names mean two things: {double:#?}");
}

#[test]
fn a_declaration_is_recognised() {
    assert_eq!(declared("pub struct Lease<'c, R> {"), Some("Lease"));
    assert_eq!(declared("    pub type Port = (A, B);"), Some("Port"));
    assert_eq!(declared("pub unsafe trait Monitor: Send {"), Some("Monitor"));
    assert_eq!(declared("pub(crate) struct Hidden;"), None);
    assert_eq!(declared("pub fn get()"), None);
}
