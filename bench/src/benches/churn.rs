//! Memory that does not stay: mapped (or allocated), used some times, unmapped (or freed), over and over, by
//! one thread, by one beside a thread that computes, and by two, compared with registering for each use by two calls
//! of the registrar, and with UCX's cache and its hooks over a ring; with userfaultfd, and with eBPF where it can be
//! loaded.
//!
//! A cache that is on by default must be harmless for a program that never uses a buffer again.

use crate::Options;
use crate::neighbour::Neighbour;
use crate::peer;
use crate::report::Report;
use crate::ring::{AnyMonitor, RingCache, cache_over, registrar_of};
use crate::rounds::compare;
use crate::short_lived::{Lives, ShortLived, Source};
use io_uring::IoUring as Ring;
use pinfold::Config;
use pinfold::monitor::{Ebpf, Userfaultfd};
use pinfold::registrar::IoUring;
use pinfold_cli::plot::{Axis, Line, Plot};
use serde_json::json;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
/// Those that a picture shows.
const SHOWN: [usize; 3] = [4 << 10, 64 << 10, 16 << 20];
const USES: [usize; 6] = [1, 2, 8, 32, 128, 1024];
/// What one turn of a round maps and what it uses, in bytes, and how many uses it makes, at most:
/// but one life at least.
const TURN_BYTES: usize = 64 << 20;
const TURN_USED_BYTES: usize = 1 << 30;
const TURN_USES: usize = 5_000;
const MOST_LIVES: usize = 200;
const SLOTS: u32 = 1024;

/// What a way is compared with.
const PER_USE: &str = "per_use";
/// The end of the name of a way that does not wait until keeping pays.
const KEEPING: &str = ", kept from the first use";

/// Where memory comes from, how many threads live so, and whether another one computes meanwhile.
const PROGRAMS: [(Source, usize, bool); 4] = [
    (Source::Map, 1, false),
    (Source::Malloc, 1, false),
    (Source::Map, 2, false),
    (Source::Map, 1, true),
];

/// The caches over one monitor, and how each is called.
struct Caches {
    keeping: (String, RingCache),
    by_default: (String, RingCache),
}

impl Caches {
    fn over(name: &str, monitor: AnyMonitor) -> Result<Self, String> {
        let keeping = cache(Arc::clone(&monitor), Config::keeping_all())?;
        let by_default = cache(monitor, Config::default())?;
        Ok(Self {
            keeping: (format!("{name}{KEEPING}"), keeping),
            by_default: (name.into(), by_default),
        })
    }
}

/// One figure for each way, size and number of uses. One monitor after the other: while
/// eBPF's programs are loaded they follow what the caches of another monitor do, too.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let ring = match Ring::new(8) {
        Ok(ring) => ring,
        Err(error) => {
            report.remark(&format!("skipped: churn: no io_uring: {error}"));
            return Ok(());
        }
    };
    let by_hand = registrar_of(&ring, 2).map_err(|error| error.to_string())?;
    let mut neighbour = Neighbour::start()?;
    match Userfaultfd::new() {
        Err(error) => report.remark(&format!("skipped: churn: userfaultfd: {error}")),
        Ok(monitor) => {
            let caches = Caches::over("userfaultfd", Arc::new(monitor))?;
            measure(options, report, (&caches, &by_hand), &mut neighbour)?;
        }
    }
    match Ebpf::load() {
        Err(error) => report.remark(&format!("skipped: churn: eBPF: {error}")),
        Ok(monitor) => {
            let caches = Caches::over("eBPF", Arc::new(monitor))?;
            measure(options, report, (&caches, &by_hand), &mut neighbour)?;
        }
    }
    Ok(())
}

/// One monitor's figures.
fn measure(
    options: Options,
    report: &mut Report,
    (caches, by_hand): (&Caches, &IoUring),
    neighbour: &mut Option<Neighbour>,
) -> Result<(), String> {
    for bytes in SIZES.into_iter().filter(|&bytes| !options.quick || bytes <= 64 << 10) {
        for (source, threads, is_busy) in PROGRAMS {
            let rig = Rig { caches, by_hand, bytes, source, threads, is_busy };
            beside_a_busy_thread(is_busy, || {
                USES.into_iter().try_for_each(|uses| rig.measure(options, report, neighbour, uses))
            })?;
        }
    }
    Ok(())
}

/// Does `work`, if `is_busy` beside a thread that computes without a pause.
fn beside_a_busy_thread<T>(is_busy: bool, work: impl FnOnce() -> T) -> T {
    let has_ended = AtomicBool::new(!is_busy);
    thread::scope(|scope| {
        // Relaxed: nothing is read behind it.
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let done = work();
        has_ended.store(true, Ordering::Relaxed);
        done
    })
}

/// What one thread maps, each way and length that is shown a line, in times of registering for each use.
pub(crate) fn plot(report: &Report) -> Plot {
    let mut lines: BTreeMap<(u64, &str), Vec<(f64, f64)>> = BTreeMap::new();
    for it in report.named("churn") {
        let is_of_one = it.params["threads"] == 1 && it.params["busy"] == false;
        let is_mapped = it.params["memory"] == Source::Map.name();
        let is_shown =
            is_mapped && is_of_one && SHOWN.iter().any(|&bytes| it.params["bytes"] == bytes);
        let (bytes, way) = (it.params["bytes"].as_u64(), it.params["way"].as_str());
        let (Some(bytes), Some(way), Some(ratio)) = (bytes, way, it.ratio) else { continue };
        if is_shown && it.peer.as_deref() == Some(PER_USE) && !way.ends_with(KEEPING) {
            lines.entry((bytes, way)).or_default().push((it.number("uses"), ratio));
        }
    }
    let line = |((bytes, way), points)| {
        let (number, unit) =
            if bytes < 1 << 20 { (bytes >> 10, "KiB") } else { (bytes >> 20, "MiB") };
        Line { name: format!("{number} {unit}, {way}"), points }
    };
    Plot {
        title: "Memory that is mapped, used some times and unmapped".into(),
        across: Axis {
            title: "uses of each mapping",
            base: 2.0,
            label: |uses| format!("{uses:.0}"),
        },
        up: Axis {
            title: "time, of that with two raw calls for each use",
            base: 2.0,
            label: |ratio| format!("{ratio:.2}"),
        },
        lines: lines.into_iter().map(line).collect(),
    }
}

/// A cache with a ring of its own, in which the longest range is one registration.
fn cache(monitor: AnyMonitor, config: Config) -> Result<RingCache, String> {
    let ring = Ring::new(8).map_err(|error| format!("no io_uring: {error}"))?;
    let piece_bytes = SIZES.into_iter().max().unwrap_or_default();
    cache_over(&ring, SLOTS, monitor, Config { piece_bytes, ..config })
}

/// One size.
struct Rig<'c> {
    caches: &'c Caches,
    by_hand: &'c IoUring,
    bytes: usize,
    source: Source,
    threads: usize,
    is_busy: bool,
}

impl Rig<'_> {
    fn measure(
        &self,
        options: Options,
        report: &mut Report,
        neighbour: &mut Option<Neighbour>,
        uses: usize,
    ) -> Result<(), String> {
        let lives = self.lives(options, uses);
        let params = |way| {
            let (source, threads, busy) = (self.source.name(), self.threads, self.is_busy);
            json!({
                "way": way, "bytes": self.bytes, "uses": uses, "memory": source, "threads": threads,
                "busy": busy,
            })
        };
        let mut by_hand =
            |_| lives.run(|memory| (0..uses).try_for_each(|_| memory.register_once(self.by_hand)));
        let by_get =
            |cache| move |_| lives.run(|memory| (0..uses).try_for_each(|_| get(cache, memory)));
        let Caches { keeping, by_default } = self.caches;
        for (name, cache) in [keeping, by_default] {
            let comparison = compare(options.rounds, &mut by_get(cache), Some(&mut by_hand))?;
            report.add_against(PER_USE, "churn", params(name.as_str()), "ns", comparison);
        }
        let Some(neighbour) = neighbour else { return Ok(()) };
        let (name, cache) = by_default;
        let mut by_ucx = |_| neighbour.run(lives);
        let comparison = compare(options.rounds, &mut by_get(cache), Some(&mut by_ucx))?;
        report.add("churn", params(name), "ns", comparison);
        let comparison = compare(options.rounds, &mut by_ucx, Some(&mut by_hand))?;
        report.add_against(PER_USE, "churn", params(peer::NAME), "ns", comparison);
        Ok(())
    }

    fn lives(&self, options: Options, uses: usize) -> Lives {
        let &Self { bytes, source, threads, .. } = self;
        let by_use = (TURN_USED_BYTES / bytes).min(TURN_USES) / uses;
        let count = (TURN_BYTES / bytes).min(by_use).clamp(1, MOST_LIVES);
        Lives { source, bytes, uses, count: options.scaled(count).max(1), threads }
    }
}

/// One use.
fn get(cache: &RingCache, memory: &ShortLived) -> Result<(), String> {
    memory.lease(cache).map(|lease| drop(black_box(lease))).map_err(|error| error.to_string())
}
