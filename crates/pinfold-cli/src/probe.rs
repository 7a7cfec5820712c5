//! `pinfold probe`: what this machine offers, found out by really using it, and what it lacks.

use crate::bench::{landing, strategies};
use crate::block::{Block, Origin, PAGE};
use crate::device::{AnyRegistrar, Device, Kind, Transfer};
use crate::output::{self, Failure, Output, Tone, Verdict};
use crate::run::library;
use pinfold::allocator;
use pinfold::budget::{Discovery, Figure, Kind as Pinned, Privilege};
use pinfold::limits::Limits;
use pinfold::monitor::hooks::Hooks;
use pinfold::monitor::{Best, Choice, Feed, best};
use pinfold::registrar::Mlock;
use pinfold::registrar::verbs::{self, Attributes};
use pinfold::{Access, Change, Cover, MappingKind, Monitor};
use serde::Serialize;
use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// Options of `pinfold probe`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {}

/// What hooks are called in the report.
const HOOKS: &str = "hooks";

/// The probe's JSON object.
#[derive(Debug, Serialize)]
struct Report {
    monitors: Vec<Part>,
    registrars: Vec<Part>,
    rdma_devices: Vec<RdmaDevice>,
    limits: LimitsReport,
    advice: Vec<String>,
    /// The monitor that `best()` picks here.
    #[serde(skip_serializing_if = "Option::is_none")]
    active: Option<&'static str>,
    /// What it claims to see.
    coverage: Vec<Coverage>,
    /// How data that arrives in registered pages gets to its target.
    landing: Vec<landing::Known>,
    /// Which way transfers of each length should take, and why.
    strategies: Vec<strategies::Known>,
}

/// An RDMA device, asked what it can do.
#[derive(Debug, Serialize)]
struct RdmaDevice {
    name: String,
    /// Why it cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
    max_regions: Option<usize>,
    max_region_bytes: Option<u64>,
    atomics: Option<bool>,
    /// What it claims to do without pinned pages.
    on_demand: Option<String>,
}

/// A monitor or registrar, tried.
#[derive(Debug, Serialize)]
struct Part {
    name: &'static str,
    available: bool,
    /// What it does here, or why it does nothing.
    detail: String,
    /// How long it took to start, in microseconds.
    start_us: f64,
}

/// [`Limits`] in JSON's words; `null` is no limit, or not told.
#[derive(Debug, Serialize)]
struct LimitsReport {
    memlock_soft_bytes: Option<u64>,
    memlock_hard_bytes: Option<u64>,
    /// What the kernel really applies to this process.
    enforced_bytes: Option<u64>,
    ipc_lock: &'static str,
    locked_bytes: Option<u64>,
    pinned_bytes: Option<u64>,
    max_map_count: Option<u64>,
    page_bytes: usize,
    io_uring_disabled: Option<u8>,
    unprivileged_userfaultfd: Option<bool>,
    /// What serves `malloc`, and so decides whether what is freed stays registered.
    allocator: String,
    /// How many mappings this process has.
    mappings: Option<u64>,
    /// What bounds pinned memory, for each kind of registrar, the tightest first.
    bounds: Vec<BoundReport>,
    /// Every figure with its source, those that could not be read included.
    figures: Vec<FigureReport>,
}

/// One bound on what a kind of registrar may pin.
#[derive(Debug, Serialize)]
struct BoundReport {
    registrar: &'static str,
    bytes: u64,
    source: String,
    beyond: String,
    shared_with: String,
}

/// A number that bounds or uses up what may be pinned.
#[derive(Debug, Serialize)]
struct FigureReport {
    source: String,
    /// Bytes, or a count; `null` is no limit.
    value: Option<u64>,
    /// Why it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    unread: Option<String>,
    shared_with: String,
}

impl FigureReport {
    fn of(figure: &Figure<u64>) -> Self {
        Self::of_limit(&Figure {
            value: figure.value.map(Some),
            source: figure.source.clone(),
            shared_with: figure.shared_with,
        })
    }

    fn of_limit(figure: &Figure<Option<u64>>) -> Self {
        Self {
            source: figure.source.clone(),
            value: figure.get().flatten(),
            unread: figure.value.err().map(text),
            shared_with: text(figure.shared_with),
        }
    }
}

/// What the active monitor says of one kind of mapping.
#[derive(Debug, Serialize)]
struct Coverage {
    mapping: &'static str,
    changes: Vec<Claim>,
}

#[derive(Debug, Serialize)]
struct Claim {
    change: &'static str,
    cover: String,
}

/// Tries everything; it holds if a cache can run here.
pub(crate) fn run(_arguments: &Arguments, output: &Output) -> Result<Verdict, Failure> {
    let (limits, discovery) = (Limits::read(), Discovery::read());
    let mut monitors: Vec<Part> = Choice::ALL.into_iter().map(monitor).collect();
    monitors.insert(Choice::ALL.len() - 1, hooks());
    let active = best().ok();
    let coverage = active.as_ref().map(coverage_of).unwrap_or_default();
    let caches = active.as_ref().is_some_and(|active| active.chosen() != Choice::NoMonitor);
    let registrars = vec![
        try_part(Kind::IoUring.name(), || sends(Kind::IoUring)),
        try_part(Kind::Verbs.name(), || sends(Kind::Verbs)),
        try_part(Kind::VerbsOnDemand.name(), || sends(Kind::VerbsOnDemand)),
        try_part("mlock", mlock),
    ];
    let rdma_devices = rdma_devices();
    let advice = advice(&limits, &discovery, &monitors, &registrars);
    let held = caches && registrars.iter().any(|registrar| registrar.available);
    let active = active.map(|active| active.name());
    let strategies = strategies::known(active.unwrap_or("none"));
    let limits = LimitsReport::new(&limits, &discovery);
    let landing = landing::known();
    let report = Report {
        monitors,
        registrars,
        rdma_devices,
        limits,
        advice,
        active,
        coverage,
        landing,
        strategies,
    };
    output.report(&report, || for_people(&report));
    Ok(Verdict::of(held))
}

fn try_part(name: &'static str, run: impl FnOnce() -> Result<String, String>) -> Part {
    let start = Instant::now();
    let outcome = run();
    let start_us = start.elapsed().as_secs_f64() * 1e6;
    let available = outcome.is_ok();
    let (Ok(detail) | Err(detail)) = outcome;
    Part { name, available, detail, start_us }
}

fn monitor(choice: Choice) -> Part {
    try_part(choice.name(), || {
        let monitor = Best::only(choice).map_err(|refused| refused.reason.to_string())?;
        monitor.check().map_err(text)?;
        Ok(match choice {
            Choice::Ebpf => "tells of every change of every kind of memory",
            Choice::Userfaultfd => "tells of changes of private memory, without a privilege",
            _ => "registers each use, caches nothing",
        }
        .into())
    })
}

/// Hooks tell what no other source without a privilege can; they are in programs that
/// `pinfold run` starts, and so as a rule not in this one.
fn hooks() -> Part {
    try_part(HOOKS, || {
        let told: Vec<_> =
            Change::ALL.into_iter().filter(|&it| Feed::of_process().claims(it)).collect();
        match told.as_slice() {
            [] if matches!(Hooks::of_process(), Hooks::Withdrawn { .. }) => {
                Err(Hooks::of_process().to_string())
            }
            [] => Err(format!(
                "not in this process: `pinfold run -- PROGRAM` starts a program with them{}",
                library::find().err().map(|missing| format!(", but {missing}")).unwrap_or_default()
            )),
            told => {
                let names: Vec<_> = told.iter().map(|change| change.name()).collect();
                Ok(format!("tell of {} made through the C library", names.join(", ")))
            }
        }
    })
}

/// Registers a page, sends it and compares.
fn sends(kind: Kind) -> Result<String, String> {
    let device = Device::open(kind, PAGE as u64).map_err(text)?;
    let registrar = device.registrar(8).map_err(text)?;
    let mut page = Block::new(Origin::Mapping, PAGE).map_err(text)?;
    page.write(0, &[0xa5; PAGE]);
    page.registered(&registrar, Access::READ, |handle| {
        let transfer =
            Transfer { key: handle.key(), address: page.address(), length: PAGE, offset: 0 };
        device.send(&[transfer]).map_err(text)
    })?;
    let mut arrived = [0; PAGE];
    device.channel().read_exact_at(&mut arrived, 0).map_err(text)?;
    match arrived == [0xa5; PAGE] {
        true => Ok(format!("a page was registered and sent{}", about_huge_pages(&registrar))),
        false => Err("other bytes arrived than were sent".into()),
    }
}

/// What the device's pins count as in huge pages, where that is not what was registered.
const fn about_huge_pages(registrar: &AnyRegistrar) -> &'static str {
    match registrar {
        AnyRegistrar::IoUring(ring) if ring.sees_huge_pages() => {
            "; a huge page counts as a whole, and is registered as one"
        }
        AnyRegistrar::IoUring(_) => {
            "; a huge page counts as a whole, and here (it takes Linux 6.7 and /proc/self/pagemap) is \
             not seen: budgets count too little of it"
        }
        _ => "",
    }
}

/// Every RDMA device that is listed, one by one.
fn rdma_devices() -> Vec<RdmaDevice> {
    verbs::device_names().unwrap_or_default().into_iter().map(RdmaDevice::ask).collect()
}

impl RdmaDevice {
    fn ask(name: String) -> Self {
        match verbs::Device::open(Some(&name)) {
            Ok(device) => Self::of(name, Some(device.attributes()), None),
            Err(error) => Self::of(name, None, Some(error.to_string())),
        }
    }

    fn of(name: String, attributes: Option<&Attributes>, refusal: Option<String>) -> Self {
        Self {
            name,
            refusal,
            max_regions: attributes.map(|found| found.max_regions),
            max_region_bytes: attributes.map(|found| found.max_region_bytes),
            atomics: attributes.map(|found| found.atomics),
            on_demand: attributes
                .and_then(|found| found.on_demand)
                .map(|paging| paging.to_string()),
        }
    }

    fn for_people(&self) -> String {
        let Some(regions) = self.max_regions else {
            return format!(
                "RDMA device {}: {}\n",
                self.name,
                self.refusal.as_deref().unwrap_or("")
            );
        };
        let bytes = match self.max_region_bytes {
            Some(u64::MAX) | None => "any length".into(),
            Some(bytes) => format!("up to {} MiB", bytes >> 20),
        };
        format!(
            "RDMA device {}: {regions} regions of {bytes}; on-demand paging: {}\n",
            self.name,
            self.on_demand.as_deref().unwrap_or("none")
        )
    }
}

/// Locks a page.
fn mlock() -> Result<String, String> {
    let registrar = Mlock::new().map_err(text)?;
    let page = Block::new(Origin::Mapping, PAGE).map_err(text)?;
    page.registered(&registrar, Access::READ, |_| Ok(()))?;
    Ok("a page was locked and released".into())
}

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

fn coverage_of(monitor: &impl Monitor) -> Vec<Coverage> {
    let claims = |mapping| {
        let claim = |change: Change| Claim {
            change: change.name(),
            cover: monitor.coverage(mapping, change).to_string(),
        };
        Change::ALL.into_iter().map(claim).collect()
    };
    MappingKind::ALL
        .into_iter()
        .map(|mapping| Coverage { mapping: mapping.name(), changes: claims(mapping) })
        .collect()
}

impl LimitsReport {
    fn new(limits: &Limits, discovery: &Discovery) -> Self {
        Self {
            memlock_soft_bytes: limits.memlock_soft.bytes(),
            memlock_hard_bytes: limits.memlock_hard.bytes(),
            enforced_bytes: limits.enforced().bytes(),
            ipc_lock: match limits.ipc_lock {
                Some(Privilege::Effective) => "effective",
                Some(Privilege::Inert) => "inert",
                Some(Privilege::Lowered) => "lowered",
                Some(Privilege::Absent { .. }) => "absent",
                None => "unknown",
            },
            locked_bytes: limits.locked_bytes,
            pinned_bytes: limits.pinned_bytes,
            max_map_count: limits.max_map_count,
            page_bytes: limits.page_bytes,
            io_uring_disabled: limits.io_uring_disabled,
            unprivileged_userfaultfd: limits.unprivileged_userfaultfd,
            allocator: allocator::serving_malloc().to_string(),
            mappings: discovery.mappings.get(),
            bounds: bounds(discovery),
            figures: figures(discovery),
        }
    }
}

fn bounds(discovery: &Discovery) -> Vec<BoundReport> {
    let kinds = [("io_uring", Pinned::IoUring), ("verbs", Pinned::Verbs), ("mlock", Pinned::Mlock)];
    let of_kind = |(registrar, kind)| {
        discovery.bounds(kind).into_iter().map(move |bound| BoundReport {
            registrar,
            bytes: bound.bytes,
            source: bound.source,
            beyond: bound.beyond.to_string(),
            shared_with: bound.shared_with.to_string(),
        })
    };
    kinds.into_iter().flat_map(of_kind).collect()
}

fn figures(discovery: &Discovery) -> Vec<FigureReport> {
    let Discovery { locked, pinned, rings, pinned_by_others, memory, available, .. } = discovery;
    let single = [locked, pinned, rings, pinned_by_others, memory, available];
    let counts = [&discovery.mappings, &discovery.max_mappings];
    let mut figures: Vec<FigureReport> =
        single.into_iter().chain(counts).map(FigureReport::of).collect();
    for group in &discovery.groups {
        figures.extend([&group.max, &group.high].map(FigureReport::of_limit));
        figures.push(FigureReport::of(&group.current));
    }
    for pool in &discovery.huge_pages {
        figures.extend([&pool.total, &pool.free, &pool.reserved].map(FigureReport::of));
    }
    figures
}

/// What the reader can do about what is missing; empty where nothing is.
fn advice(
    limits: &Limits,
    discovery: &Discovery,
    monitors: &[Part],
    registrars: &[Part],
) -> Vec<String> {
    let missing: Vec<&Part> =
        monitors.iter().chain(registrars).filter(|part| !part.available).collect();
    let is_missing = |name: &str| missing.iter().any(|part| part.name == name);
    let mut advice = about_parts(&missing);
    if (is_missing("userfaultfd") || is_missing(Kind::IoUring.name())) && in_container() {
        advice.push(
            "this looks like a container: its seccomp profile may refuse io_uring and \
             userfaultfd; allow io_uring_setup, io_uring_enter, io_uring_register and userfaultfd \
             in it"
                .into(),
        );
    }
    advice.extend(discovery.advice().iter().map(text));
    advice.extend(about_io_uring(limits));
    advice
}

/// Each reason once, with the names of all parts that it holds for.
fn about_parts(missing: &[&Part]) -> Vec<String> {
    let mut reasons: Vec<(Vec<&str>, &str)> = Vec::new();
    // Without an RDMA device there is none that pages on demand, whatever the words are.
    let (verbs, on_demand) = (Kind::Verbs.name(), Kind::VerbsOnDemand.name());
    let no_device = missing.iter().find(|part| part.name == verbs).map(|part| part.detail.as_str());
    for part in missing {
        let same = no_device.filter(|_| part.name == on_demand);
        let detail = same.unwrap_or(&part.detail);
        match reasons.iter_mut().find(|(_, reason)| *reason == detail) {
            Some((names, _)) => names.push(part.name),
            None => reasons.push((vec![part.name], detail)),
        }
    }
    reasons.into_iter().map(|(names, why)| format!("{}: {why}", names.join(", "))).collect()
}

fn in_container() -> bool {
    ["/.dockerenv", "/run/.containerenv"].iter().any(|path| Path::new(path).exists())
}

fn about_io_uring(limits: &Limits) -> Option<String> {
    let who = match limits.io_uring_disabled? {
        0 => return None,
        1 => "to all users but root and the members of kernel.io_uring_group",
        _ => "to all users",
    };
    Some(format!("kernel.io_uring_disabled refuses io_uring {who}: set it to 0 to allow it"))
}

fn for_people(report: &Report) -> String {
    let coverage = match report.coverage.as_slice() {
        [] => String::new(),
        rows => {
            let active = report.active.unwrap_or_default();
            format!("what {active} detects:\n{}\n", coverage_table(rows))
        }
    };
    let lines = |text: String| {
        let lines = text.lines().map(|line| output::wrapped(line, 4) + "\n");
        lines.collect::<String>()
    };
    format!(
        "{}\n{}{}{}{}\n{coverage}{}",
        parts_table(report),
        lines(report.rdma_devices.iter().map(RdmaDevice::for_people).collect()),
        lines(about_limits(&report.limits)),
        lines(report.landing.iter().map(|known| known.line() + "\n").collect()),
        strategies::known_for_people(&report.strategies),
        advice_for_people(&report.advice)
    )
}

fn advice_for_people(advice: &[String]) -> String {
    let item = |(number, text): (usize, &String)| {
        format!("\n{}", output::wrapped(&format!("{}. {text}", number + 1), 3))
    };
    match advice {
        [] => "advice: nothing is missing".into(),
        some => format!("advice:{}", some.iter().enumerate().map(item).collect::<String>()),
    }
}

/// What is missing is explained once, by the advice of the number that stands here.
fn parts_table(report: &Report) -> comfy_table::Table {
    let mut table = output::table(&["", "name", "here", "detail"]);
    for (kind, parts) in [("monitor", &report.monitors), ("registrar", &report.registrars)] {
        for part in parts {
            let (here, detail) = match part.available {
                true => (output::cell("yes", Tone::Good), part.detail.clone()),
                false => (output::cell("no", Tone::Bad), part.see(&report.advice)),
            };
            table.add_row(vec![kind.into(), part.name.into(), here, detail.into()]);
        }
    }
    table
}

impl Part {
    /// Which advice says why it is not available.
    fn see(&self, advice: &[String]) -> String {
        let names_it = |text: &String| {
            text.split_once(": ")
                .is_some_and(|(names, _)| names.split(", ").any(|it| it == self.name))
        };
        match advice.iter().position(names_it) {
            Some(number) => format!("see advice {}", number + 1),
            None => self.detail.clone(),
        }
    }
}

fn about_limits(limits: &LimitsReport) -> String {
    let bytes = |limit: Option<u64>| match limit {
        Some(bytes) => format!("{} KiB", bytes / 1024),
        None => "unlimited".into(),
    };
    let tightest = limits.bounds.iter().map(|bound| {
        let BoundReport { registrar, bytes, source, beyond, shared_with } = bound;
        let bytes = bytes / 1024;
        (registrar, format!("{bytes} KiB by {source}, for {shared_with}; beyond it: {beyond}"))
    });
    let mut text = format!(
        "RLIMIT_MEMLOCK: {} (hard {}), CAP_IPC_LOCK {}, so pinned memory is limited to: {}\n",
        bytes(limits.memlock_soft_bytes),
        bytes(limits.memlock_hard_bytes),
        limits.ipc_lock,
        bytes(limits.enforced_bytes)
    );
    let mut before = None;
    for (registrar, bound) in tightest {
        if before.replace(registrar) != Some(registrar) {
            text += &format!("{registrar} may pin {bound}\n");
        }
    }
    for figure in limits.figures.iter().filter(|figure| figure.unread.is_some()) {
        let why = figure.unread.as_deref().unwrap_or_default();
        text += &format!("{}: {why}\n", figure.source);
    }
    text + &format!("malloc is {}'s\n", limits.allocator)
}

/// A row for each kind of change, because there are more of these than kinds of mappings.
fn coverage_table(mappings: &[Coverage]) -> String {
    let heads: Vec<&str> = mappings.iter().map(|each| each.mapping).collect();
    let row = |(index, change): (usize, Change)| {
        let claim = |each: &Coverage| {
            let cover = &each.changes.get(index)?.cover;
            Some((cover.clone(), tone(cover)))
        };
        (change.name().to_owned(), mappings.iter().map(claim).collect())
    };
    let rows: Vec<output::Row> = Change::ALL.into_iter().enumerate().map(row).collect();
    output::matrix("change", &heads, &rows)
}

fn tone(cover: &str) -> Tone {
    let is = |covers: &[Cover]| covers.iter().any(|each| each.to_string() == cover);
    match () {
        () if is(&[Cover::Undetected, Cover::Reported]) => Tone::Warning,
        () if is(&[Cover::NotCached]) => Tone::Plain,
        () => Tone::Good,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(name: &'static str, why: &str) -> Part {
        Part { name, available: false, detail: why.into(), start_us: 0.0 }
    }

    #[test]
    fn each_reason_is_said_once_and_the_table_leads_to_it() {
        let parts = [
            missing("ebpf", "no privilege"),
            missing("verbs", "no device"),
            missing("verbs-on-demand", "no device either"),
        ];
        let advice = about_parts(&parts.iter().collect::<Vec<_>>());
        assert_eq!(advice, ["ebpf: no privilege", "verbs, verbs-on-demand: no device"]);
        assert_eq!(parts[2].see(&advice), "see advice 2");
        assert_eq!(missing("mlock", "no room").see(&advice), "no room");
    }

    #[test]
    fn memory_that_is_not_cached_is_neither_good_nor_bad() {
        assert_eq!(tone(&Cover::NotCached.to_string()), Tone::Plain);
        assert_eq!(tone(&Cover::Detected.to_string()), Tone::Good);
        assert_eq!(tone(&Cover::Undetected.to_string()), Tone::Warning);
    }

    #[test]
    fn a_forbidden_ring_comes_with_advice() {
        let mut limits = Limits::read();
        limits.io_uring_disabled = Some(2);
        assert!(about_io_uring(&limits).is_some());
        limits.io_uring_disabled = Some(0);
        assert_eq!(about_io_uring(&limits), None);
    }
}
