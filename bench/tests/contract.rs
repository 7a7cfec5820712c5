//! What programs may rely on that read `pinfold-bench --json`: one object on standard output and
//! nothing else, and in its `benches` the entries that the README promises. Nothing is said here of
//! the figures: `--quick` does a hundredth of the work.

// A test may fail loudly, and says what it could not do.
#![allow(clippy::panic, clippy::print_stderr)]

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Output};

/// What the program says with one round of `what`.
fn bench(what: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pinfold-bench"))
        .args([what, "--json", "--quick", "--rounds", "1", "--seed", "7", "--rest-ms", "0"])
        .output()
        .expect("the program starts")
}

/// The entries called `name` of a run of `what`; `None`, and the reason, if this machine lacks
/// what that takes.
fn entries(what: &str, name: &str) -> Option<Vec<Value>> {
    let output = bench(what);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{what}: {words}");
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let all = object["benches"].as_array().expect("an array").clone();
    all.iter().for_each(well_formed);
    let named: Vec<Value> = all.into_iter().filter(|each| each["name"] == name).collect();
    let skipped = words.lines().find(|line| line.starts_with("skipped: "));
    match (named.is_empty(), skipped) {
        (true, Some(skipped)) => {
            eprintln!("{skipped}");
            None
        }
        (true, None) => panic!("no {name} from {what}: {words}"),
        (false, _) => Some(named),
    }
}

/// Every entry has its keys; a peer, its value and the ratio come together.
fn well_formed(entry: &Value) {
    assert!(entry["name"].is_string() && entry["unit"].is_string(), "{entry}");
    assert!(entry["params"].is_object() && entry["value"].is_number(), "{entry}");
    assert_eq!(entry["peer"].is_string(), entry["peer_value"].is_number(), "{entry}");
    // No ratio to nothing: an exact LRU may hit never.
    let comparable = entry["peer_value"].as_f64().is_some_and(|peer| peer > 0.0);
    assert_eq!(entry["ratio"].is_number(), comparable, "{entry}");
}

/// Compared with UCX if this build has it, else with no peer.
fn beside_ucx(entry: &Value) {
    if cfg!(feature = "peers") {
        assert_eq!(entry["peer"], "ucx", "{entry}");
    } else {
        assert!(entry["peer"].is_null(), "{entry}");
    }
}

fn params<'e>(entries: &'e [Value], key: &str) -> Vec<&'e Value> {
    entries.iter().map(|entry| &entry["params"][key]).collect()
}

#[test]
fn ucx_is_compared_where_this_build_has_it() {
    if !cfg!(feature = "peers") {
        eprintln!("skipped: UCX: this build is without the feature `peers`");
    }
    let Some(hits) = entries("hit", "hit") else { return };
    hits.iter().for_each(beside_ucx);
}

#[test]
fn hit_has_one_entry_for_each_number_of_regions() {
    let Some(hits) = entries("hit", "hit") else { return };
    assert_eq!(params(&hits, "regions"), [1, 1_000]);
    assert!(hits.iter().all(|hit| hit["unit"] == "ns"), "{hits:?}");
}

#[test]
fn scaling_is_a_multiple_of_one_thread() {
    let Some(scaling) = entries("scaling", "scaling") else { return };
    assert_eq!(params(&scaling, "regions"), [1, 1_000]);
    assert_eq!(params(&scaling, "threads"), [2, 2]);
    for entry in &scaling {
        assert_eq!(entry["unit"], "x", "{entry}");
        assert!(entry["value"].as_f64().is_some_and(|times| times > 0.0), "{entry}");
        beside_ucx(entry);
    }
}

#[test]
fn limits_are_compared_with_none() {
    let Some(limits) = entries("scaling", "limits") else { return };
    assert!(limits.iter().all(|entry| entry["peer"] == "limits off"), "{limits:?}");
}

#[test]
fn a_miss_is_counted_both_ways() {
    let Some(misses) = entries("miss", "miss") else { return };
    assert_eq!(params(&misses, "cached"), [0, 0]);
    assert_ne!(misses[0]["params"]["reclaim"], misses[1]["params"]["reclaim"]);
    misses.iter().for_each(beside_ucx);
}

#[test]
fn memory_is_told_of_aligned_and_unaligned_regions() {
    let Some(memory) = entries("memory", "memory") else { return };
    assert_eq!(params(&memory, "aligned"), [true, false]);
    assert!(memory.iter().all(|entry| entry["unit"] == "bytes"), "{memory:?}");
}

#[test]
fn events_are_told_as_a_burst_and_as_a_stream() {
    let Some(events) = entries("events", "events") else { return };
    assert_eq!(events[0]["params"]["what"], "first hit");
    assert_eq!(events[0]["params"]["events"], 10_000);
    let streams = &events[1..];
    assert!(streams.iter().all(|entry| entry["params"]["what"] == "steady hits"), "{events:?}");
    let monitors = params(streams, "monitor");
    assert_eq!(monitors[..2], ["one load", "none, with feed"], "{events:?}");
    // A feed says which memory changed, always.
    assert!(streams[..2].iter().all(|entry| entry["params"]["regions_taken"] == 0), "{events:?}");
}

#[test]
fn blocked_tells_how_many_hits_were_long_with_and_without_a_registering_thread() {
    let Some(blocked) = entries("blocked", "blocked") else { return };
    let long = blocked.iter().filter(|entry| entry["params"]["what"] == "hits above 20 us");
    let with: Vec<&Value> = long.map(|entry| &entry["params"]["another_registers"]).collect();
    assert_eq!(with, [true, false]);
}

#[test]
fn transfer_has_one_entry_for_each_size_compared_with_preregistered_memory() {
    let Some(transfers) = entries("transfer", "transfer") else { return };
    let sizes: Vec<u64> =
        params(&transfers, "bytes").into_iter().filter_map(Value::as_u64).collect();
    assert!(sizes.is_sorted_by(|one, next| one < next), "{sizes:?}");
    assert_eq!((sizes.len(), sizes.first()), (transfers.len(), Some(&4096)));
    for entry in &transfers {
        assert_eq!(entry["peer"], "preregistered", "{entry}");
        assert_eq!(entry["unit"], "GiB/s", "{entry}");
    }
}

#[test]
fn every_monitor_has_its_price() {
    let Some(monitors) = entries("monitors", "monitors") else { return };
    let names = params(&monitors, "monitor");
    assert!(names.contains(&&Value::from("one load")), "{names:?}");
    for each in ["none, vouched for", "none with feed, vouched for", "best, none"] {
        assert!(names.contains(&&Value::from(each)), "{names:?}");
    }
}

#[test]
fn eviction_is_compared_with_lru_and_stays_below_the_optimum() {
    let Some(evictions) = entries("eviction", "eviction") else { return };
    let beside = |peer: &'static str| evictions.iter().filter(move |entry| entry["peer"] == peer);
    assert_eq!(beside("lru").count(), beside("optimum").count());
    for entry in beside("optimum") {
        assert!(entry["value"].as_f64() <= entry["peer_value"].as_f64(), "{entry}");
    }
}

#[test]
fn pieces_are_compared_with_their_slower_part_and_two_threads_with_one() {
    let Some(pieces) = entries("pieces", "pieces") else { return };
    assert_eq!(params(&pieces, "memory"), ["written", "untouched", "untouched, huge pages"]);
    assert!(pieces.iter().all(|entry| entry["peer"] == "the slower alone"), "{pieces:?}");
    let Some(parallel) = entries("pieces", "parallel registration") else { return };
    assert!(parallel.iter().all(|entry| entry["params"]["threads"] == 2), "{parallel:?}");
}

#[test]
fn churn_is_compared_with_registering_for_each_use() {
    let Some(lives) = entries("churn", "churn") else { return };
    let (lives, beside): (Vec<_>, Vec<_>) =
        lives.into_iter().partition(|life| life["peer"] == "per_use");
    let (of_ucx, lives): (Vec<_>, Vec<_>) =
        lives.into_iter().partition(|life| life["params"]["way"] == "ucx");
    // One way that keeps from the first use for each monitor that could start.
    let ways: BTreeSet<_> = params(&lives, "way").into_iter().filter_map(Value::as_str).collect();
    let monitors = ways.iter().filter(|way| way.ends_with("kept from the first use")).count();
    assert!(ways.contains("userfaultfd") && ways.len() == 2 * monitors, "{ways:?}");
    let compared = if cfg!(feature = "peers") { monitors * 2 * 4 * 6 } else { 0 };
    assert_eq!((of_ucx.len(), beside.len()), (compared, compared), "{of_ucx:?} {beside:?}");
    assert!(beside.iter().all(|life| life["peer"] == "ucx"), "{beside:?}");
    let mut uses_of: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for life in &lives {
        let params = &life["params"];
        let case = ["memory", "threads", "busy", "bytes", "way"].map(|key| params[key].to_string());
        uses_of.entry(case.join(" ")).or_default().extend(params["uses"].as_u64());
    }
    let cases = "ways for two lengths: mapped, allocated, mapped by two threads, beside a busy one";
    assert_eq!(uses_of.len(), ways.len() * 2 * 4, "{cases}: {uses_of:?}");
    let all = uses_of.values().all(|uses| *uses == [1, 2, 8, 32, 128, 1024]);
    assert!(all, "{uses_of:?}");
}

#[test]
fn a_start_is_told_by_its_parts() {
    let Some(starts) = entries("startup", "startup") else { return };
    assert_eq!(params(&starts, "part"), ["monitor", "registrar", "cache", "all"]);
}

#[test]
fn unmapping_is_compared_with_no_library_and_with_memory_that_is_not_watched() {
    let Some(unmappings) = entries("munmap", "munmap") else { return };
    let cases = ["not watched", "watched", "watched and registered"];
    assert_eq!(params(&unmappings, "what"), [cases, cases].concat());
    assert_eq!(params(&unmappings, "bytes"), [4096, 4096, 4096, 65536, 65536, 65536]);
    for entry in &unmappings {
        let is_watched = entry["params"]["what"] != "not watched";
        let peer = if is_watched { "not watched" } else { "no library" };
        assert_eq!(entry["peer"], peer, "{entry}");
    }
}

#[test]
fn suspending_is_told_for_each_way_and_nothing_arrives_wrong() {
    let Some(entries) = entries("suspend", "suspend") else { return };
    let pauses = entries.iter().filter(|entry| entry["params"]["of"] == "stream's pause");
    let (mut ways, mut transfers) = (BTreeSet::new(), 0);
    for entry in pauses {
        let params = &entry["params"];
        assert_eq!((&params["wrong"], &params["failed"]), (&0.into(), &0.into()), "{entry}");
        assert_eq!(entry["peer"], "register", "{entry}");
        ways.insert(format!("{} {}", params["pages"], params["course"]));
        transfers += params["transfers"].as_u64().unwrap_or_default();
    }
    assert!(ways.len() == 6 && transfers > 0, "{ways:?}, {transfers} transfers");
}

#[test]
fn the_price_of_kept_memory_is_compared_with_the_allocators_default() {
    let Some(entries) = entries("allocator", "allocator") else { return };
    let of_glibc: Vec<_> =
        entries.into_iter().filter(|entry| entry["params"]["allocator"] == "glibc").collect();
    let figure = |name: &str| of_glibc.iter().find(|entry| entry["params"]["figure"] == name);
    let names = ["resident_peak", "resident_end", "pinned_peak", "budget", "registrations", "hits"];
    for entry in names.into_iter().filter_map(figure) {
        assert_eq!(entry["peer"], "default", "{entry}");
        for side in ["value", "peer_value"] {
            assert!(entry[side].as_f64().is_some_and(|value| value > 0.0), "{entry}");
        }
    }
    if cfg!(target_env = "gnu") {
        // Nothing that was registered was taken away.
        let invalidations = figure("invalidations").map(|entry| &entry["value"]);
        assert_eq!(invalidations, Some(&0.0.into()), "{of_glibc:?}");
    }
}

#[test]
fn scale_has_five_doubled_sizes_for_each_operation() {
    let output = bench("scale");
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words}");
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let entries = object["benches"].as_array().expect("an array");
    let mut sizes_of: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for entry in entries {
        well_formed(entry);
        assert_eq!(entry["unit"], "ns", "{entry}");
        let row = format!("{} beside {}", entry["name"], entry["params"]["beside"]);
        sizes_of.entry(row).or_default().extend(entry["params"]["n"].as_u64());
    }
    assert!(sizes_of.len() >= 25, "{sizes_of:?}");
    for (row, sizes) in &sizes_of {
        let doubled: Vec<u64> = (0..5).map(|doubling| sizes[0] << doubling).collect();
        assert_eq!(*sizes, doubled, "{row}");
    }
}

#[test]
fn what_cannot_be_drawn_is_refused_and_not_measured() {
    let file = std::env::temp_dir().join(format!("pinfold-bench-{}.svg", std::process::id()));
    let drawn = Command::new(env!("CARGO_BIN_EXE_pinfold-bench"))
        .args(["miss", "--quick", "--json", "--svg"])
        .arg(&file)
        .output();
    let output = drawn.expect("the program starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty() && !file.exists(), "{output:?}");
}

#[test]
fn what_was_written_as_json_can_be_shown_as_a_table() {
    let output = bench("events");
    let file = std::env::temp_dir().join(format!("pinfold-bench-{}.json", std::process::id()));
    std::fs::write(&file, &output.stdout).expect("a file in the temporary directory");
    let shown = Command::new(env!("CARGO_BIN_EXE_pinfold-bench")).arg("--show").arg(&file).output();
    let removed = std::fs::remove_file(&file);
    let table = String::from_utf8(shown.expect("the program starts").stdout).expect("text");
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let entries = object["benches"].as_array().map_or(0, Vec::len);
    assert!(entries >= 3 && table.matches("\n| events |").count() == entries, "{table}");
    removed.expect("the file was there");
}

#[test]
fn what_was_recorded_is_drawn() {
    let recorded = concat!(env!("CARGO_MANIFEST_DIR"), "/results/2026-11-21.json");
    let file = std::env::temp_dir().join(format!("pinfold-drawn-{}.svg", std::process::id()));
    let drawn = Command::new(env!("CARGO_BIN_EXE_pinfold-bench"))
        .args(["hit", "--show", recorded, "--svg"])
        .arg(&file)
        .output();
    let output = drawn.expect("the program starts");
    let picture = std::fs::read_to_string(&file).expect("a picture");
    std::fs::remove_file(&file).expect("the file was there");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    // Two lines of four sizes, two of three.
    assert_eq!(picture.matches("<circle").count(), 14, "{picture}");
}

#[test]
fn what_is_not_a_bench_is_refused_with_nothing_on_standard_output() {
    let output = bench("nonsense");
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
}
