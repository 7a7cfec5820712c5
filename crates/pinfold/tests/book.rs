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

/// Rows of the table in `docs/src/endings.md`, and the test of each.
const ENDINGS: [(&str, &str, &str); 36] = [
    ("`Lease`", "endings/table.rs", "lease"),
    ("`BufferLease`", "endings/table.rs", "buffer_lease"),
    ("`pieces::Registered`, `Incomplete`", "endings/table.rs", "registered"),
    ("`Cache`", "endings/table.rs", "a_cache_itself"),
    ("`Reclaimer` (of `Cache::start_reclaimer`)", "endings/table.rs", "reclaimer"),
    ("`PoolBuffer`", "endings/table.rs", "pool_buffer"),
    ("`PoolVec`", "endings/table.rs", "pool_vector"),
    ("`InFlight`", "endings/table.rs", "buffer_in_flight"),
    (
        "block of `into_raw`, `allocate`",
        "endings/pools.rs",
        "what_is_out_keeps_its_slab_and_the_last_one_back_takes_the_registrar_along",
    ),
    ("`Pool`", "endings/table.rs", "a_pool_itself"),
    ("`landing::Place`", "endings/table.rs", "landing_place"),
    ("`landing::Remapped`", "endings/table.rs", "remapped_place"),
    ("`landing::Arrived`", "endings/table.rs", "arrived_place"),
    ("`landing::Zone`", "endings/table.rs", "landing_zone"),
    ("`strategy::PlannedPlace`", "endings/table.rs", "planned_place"),
    ("`Suspending`", "endings/suspensions.rs", "suspending"),
    ("`Suspended`", "endings/suspensions.rs", "suspended"),
    ("`Notices`", "endings/suspensions.rs", "notices"),
    ("`pending_changes::Ticket`", "endings/table.rs", "ticket_of_a_change"),
    ("`RangeMark` (of `ChangeMarks`)", "endings/table.rs", "mark_of_a_range"),
    ("`monitor::Changing`", "endings/table.rs", "change_of_a_feed"),
    ("`handshake::Consent`", "endings/table.rs", "consent_of_a_peer"),
    ("`budget::Share`, `Drawn`", "endings/table.rs", "budget_share_and_what_was_drawn"),
    ("`budget::BudgetWatch`", "endings/table.rs", "budget_watch"),
    ("`Reservation`, `Reserved`", "endings/table.rs", "reservation_and_reserved_buffer"),
    ("`registrar::IoUring`", "endings/table.rs", "ring"),
    (
        "`registrar::Verbs`",
        "verbs.rs",
        "however_a_registrar_ends_what_it_pinned_goes_or_leaks_with_it",
    ),
    (
        "`verbs::Domain`, `Device`",
        "verbs.rs",
        "however_a_domain_ends_its_registrars_go_on_and_take_it_along",
    ),
    ("`monitor::Ebpf`", "ebpf.rs", "however_a_monitor_ends_its_thread_and_its_view_go_or_stay"),
    ("a registrar, a monitor of your own", "endings/table.rs", "monitor_and_registrar"),
    ("`Mlock`", "endings/table.rs", "locked_memory_of_mlock"),
    ("`Userfaultfd`", "endings/table.rs", "userfaultfd"),
    ("`verbs::Loopback`", "verbs.rs", "however_a_loopback_ends_its_queue_pairs_go_or_stay"),
    ("`verbs::Connection`", "verbs.rs", "however_a_connection_ends_its_queue_pair_goes_on"),
    (
        "`tier::TierLease`",
        "verbs.rs",
        "however_a_lease_of_a_tier_ends_its_registration_goes_or_stays",
    ),
    (
        "`pieces::transfer`, `TransferPlanner::transfer` (calls)",
        "endings/transfers.rs",
        "a_child_forked_inside_a_transfer_comes_back_from_it",
    ),
];

/// Public types with a destructor that have no row: no device here takes what the first registers, and the other is a
/// helper's client, whose unit tests drop it.
const NO_ENDINGS: [&str; 2] = ["Dmabuf", "GivesBack"];

#[test]
fn each_row_of_the_table_of_endings_has_its_test() {
    let page = prose(&root().join("docs/src/endings.md"));
    let rows = page.lines().filter(|line| line.starts_with("| ")).skip(1);
    let rows: Vec<_> = rows.map(|row| row.split('|').nth(1).unwrap().trim()).collect();
    assert_eq!(rows, ENDINGS.map(|(row, ..)| row));
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for (row, file, test) in ENDINGS {
        let text = fs::read_to_string(tests.join(file)).unwrap();
        let begins = text.find(&format!("#[test]\nfn {test}() {{"));
        let text = &text[begins.unwrap_or_else(|| panic!("{row}: no {test} in {file}"))..];
        // The calls and the address have no value that ends in several ways.
        let ends = ["endings/pools.rs", "endings/transfers.rs"].contains(&file);
        let body = &text[..text.find("\n}\n").unwrap()];
        assert!(ends || body.contains("row(") || body.contains("in ENDS"), "{row}: not each way");
    }
}

#[test]
fn each_public_type_with_a_destructor_is_in_the_table_of_endings() {
    let page = prose(&root().join("docs/src/endings.md"));
    for name in ["pinfold", "pinfold-core"] {
        let list = fs::read_to_string(root().join(format!("docs/public-api/{name}.txt"))).unwrap();
        let drops = list.lines().filter_map(|line| line.split_once("ops::drop::Drop for "));
        let types = drops.map(|(_, path)| path.split(['<', ' ']).next().unwrap());
        let types: BTreeSet<_> = types.map(|path| path.rsplit("::").next().unwrap()).collect();
        assert!(!types.is_empty(), "{name}");
        for missing in types.iter().filter(|&name| !NO_ENDINGS.contains(name)) {
            let named = |cell: &str| {
                cell.contains(&format!("`{missing}`")) || cell.contains(&format!("::{missing}`"))
            };
            let row = page.lines().filter(|line| line.starts_with("| "));
            let in_a_row = row.map(|row| row.split('|').nth(1).unwrap()).any(named);
            assert!(in_a_row, "{missing} has no row in docs/src/endings.md");
        }
    }
}
