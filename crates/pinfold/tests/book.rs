//! README, ARCHITECTURE, CONTRIBUTING and the book lead nowhere that is not there: each link and each anchor has its
//! target, each path of this tree exists, each page is in the book's summary, and the README stays short.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers fail as loudly as tests

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What a README and an architecture page may have.
const LONGEST_PAGE: usize = 120;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The pages below `folder`.
fn pages_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages_below(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

fn book() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    pages_below(&root().join("docs/src"), &mut pages);
    pages
}

fn pages() -> Vec<PathBuf> {
    let mut pages = book();
    let others =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "bench/README.md", "vm/README.md"];
    pages.extend(others.map(|page| root().join(page)));
    pages
}

/// The page without its code blocks.
fn prose(page: &Path) -> String {
    let mut inside = false;
    let text = fs::read_to_string(page).unwrap();
    let lines = text.lines().filter(|line| {
        let fence = line.starts_with("```");
        inside ^= fence;
        !inside && !fence && !line.starts_with("    ")
    });
    lines.map(|line| format!("{line}\n")).collect()
}

/// The targets of `[text](target)`.
fn links(text: &str) -> Vec<&str> {
    let ends = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    ends.map(|(target, _)| target).collect()
}

/// What mdBook and code hosts call the heading's anchor.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().replace(' ', "-");
    kept.chars().filter(|&c| c.is_alphanumeric() || c == '-' || c == '_').collect()
}

fn anchors(page: &Path) -> BTreeSet<String> {
    let text = prose(page);
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

/// Why a link leads nowhere.
fn fault(page: &Path, target: &str) -> Option<String> {
    if target.starts_with("https://") {
        return None;
    }
    let (file, wanted) = target.split_once('#').unwrap_or((target, ""));
    let leads = if file.is_empty() { page.to_owned() } else { page.parent().unwrap().join(file) };
    let in_book = |path: &Path| {
        path.canonicalize().is_ok_and(|path| path.starts_with(root().join("docs/src")))
    };
    if !leads.exists() {
        return Some(format!("{}: `{target}` does not exist", page.display()));
    }
    if in_book(page) && !in_book(&leads) {
        return Some(format!("{}: `{target}` leads out of the built book", page.display()));
    }
    let there = wanted.is_empty() || anchors(&leads).contains(wanted);
    (!there).then(|| format!("{}: `{target}` has no such heading", page.display()))
}

#[test]
fn every_link_has_its_target() {
    let mut faults = Vec::new();
    for page in pages() {
        let text = prose(&page);
        faults.extend(links(&text).into_iter().filter_map(|target| fault(&page, target)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_broken_link_is_found() {
    let page = root().join("docs/src/concepts.md");
    assert!(fault(&page, "no-such-page.md").is_some());
    assert!(fault(&page, "monitors.md#no-such-heading").is_some());
    assert!(fault(&page, "../../README.md").is_some());
    assert!(fault(&page, "monitors.md").is_none());
}

/// `crates/...`, `docs/...` and the like in backticks are files or folders of this tree.
#[test]
fn every_path_that_a_page_names_exists() {
    let mut faults = Vec::new();
    for page in pages() {
        let text = prose(&page);
        for named in text.split('`').skip(1).step_by(2) {
            let ours =
                ["crates/", "docs/", "bench/", "vm/"].iter().any(|top| named.starts_with(top));
            let plain = !named.contains([' ', '*', '<', '{']) && !named.contains("NAME");
            if ours && plain && !root().join(named).exists() && !named.contains("DATE") {
                faults.push(format!("{}: `{named}`", page.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_page_is_in_the_summary_and_the_summary_names_no_other() {
    let folder = root().join("docs/src");
    let summary = fs::read_to_string(folder.join("SUMMARY.md")).unwrap();
    let named: BTreeSet<_> = links(&summary).into_iter().map(|page| folder.join(page)).collect();
    let there: BTreeSet<_> =
        book().into_iter().filter(|page| !page.ends_with("SUMMARY.md")).collect();
    assert_eq!(named, there);
}

#[test]
fn readme_and_architecture_stay_short() {
    for page in ["README.md", "ARCHITECTURE.md"] {
        let lines = fs::read_to_string(root().join(page)).unwrap().lines().count();
        assert!(lines <= LONGEST_PAGE, "{page} has {lines} lines");
    }
}
