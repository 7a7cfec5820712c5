//! `pinfold torture`: random programs of allocations, mapping changes and transfers on many
//! threads, every byte checked.
//!
//! A thread's [program] depends on the seed and its number only, so a seed replays the same
//! program; how the threads interleave is the machine's affair. The threads share three caches
//! under one monitor: a roomy one, one with a table of eight registrations, and one with a budget
//! that is soon spent. They also share a pool, which draws on that budget too, and a landing zone
//! of the roomy cache, whose data arrives in memory that the caches have registered.
//!
//! A trial runs in a process of its own under a [supervisor], which reports a trial that died or hangs
//! from the [journal] that the threads keep.

mod arrival;
mod journal;
mod program;
mod stock;
mod supervisor;
mod tally;
mod weather;
mod worker;

use crate::change::{DirectFile, end_with_parent, keep_freed_memory};
use crate::choice;
use crate::device::Kind;
use crate::output::{self, Failure, Output, Progress, Tone, Verdict};
use crate::port::{
    self, AnyMonitor, AuditReport, LandingZone, Ledger, MakeMonitor, Port, Strategy, Wiring,
};
use comfy_table::Cell;
use journal::{Journal, Row, Stage, Who};
use pinfold::budget::{Amount, Budget, Terms};
use pinfold::{Config, Monitor, WhenFull};
use program::{Operation, PORTS, Program, replacements};
use serde::Serialize;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use stock::{BUDGET_BYTES, Passed, Stock, StockReport};
use tally::{Children, Count, LandingTally, Tally, Wrong};
use weather::WeatherReport;
use worker::Worker;

/// Options of `pinfold torture`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// How long to go on, in seconds [default: 20, unless --operations is given]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// How many threads
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// The seed of a program to run again
    #[arg(long)]
    seed: Option<u64>,
    /// How many operations, all threads together
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    operations: Option<u64>,
    /// The device that moves the data
    #[arg(long, value_enum, default_value_t)]
    registrar: Kind,
    /// The monitor to torture
    #[arg(long, value_enum, default_value_t)]
    monitor: choice::Wanted,
    /// Also compare the physical pages behind every lease, and again and again behind everything that the caches would
    /// serve, with those at registration; for root
    #[arg(long)]
    audit: bool,
    /// Have the kernel reclaim, merge, compact and migrate pages all the while; it concerns the whole
    /// machine, and takes some pages out of use for good
    #[arg(long)]
    weather: bool,
    /// Have one more thread write FILE past its pages in memory, which it has mapped shared and sends: a block device,
    /// or a file of 64 KiB on a disk, whose bytes are lost. Only verbs pin such pages
    #[arg(long, value_name = "FILE")]
    direct: Option<PathBuf>,
    /// Have one more thread spin all the while: as long as it does not sleep, no discard is proved to be over
    #[arg(long)]
    spin: bool,
    /// Leave out the forked children that run programs of their own: each makes its own monitor, which takes long
    /// where a machine is slow
    #[arg(long)]
    no_children: bool,
    /// Which cache to torture; `naive` proves that the check can fail
    #[arg(long, value_enum, default_value_t, hide = true)]
    cache: Strategy,
}

/// How many operations of each thread go into the digest of the program.
const DIGESTED: usize = 1000;

/// When a thread stops.
#[derive(Clone, Copy, Debug)]
struct Until {
    begun: Instant,
    time: Option<Duration>,
    /// How many operations each thread carries out.
    operations: Option<u64>,
}

impl Until {
    fn new(arguments: &Arguments) -> Self {
        const DEFAULT_SECONDS: u64 = 20;
        let default = arguments.operations.is_none().then_some(DEFAULT_SECONDS);
        let threads = u64::from(arguments.threads);
        Self {
            begun: Instant::now(),
            time: arguments.seconds.or(default).map(Duration::from_secs),
            operations: arguments.operations.map(|all| all.div_ceil(threads)),
        }
    }

    fn is_reached(&self, step: u64) -> bool {
        self.time.is_some_and(|time| self.begun.elapsed() >= time)
            || self.operations.is_some_and(|operations| step >= operations)
    }

    /// The length of the progress bar.
    fn ticks(&self) -> u64 {
        match (self.time, self.operations) {
            (Some(time), None) => tenths(time),
            (_, operations) => operations.unwrap_or(0),
        }
    }

    /// How far along the bar a thread is at `step`.
    fn tick(&self, step: u64) -> u64 {
        match (self.time, self.operations) {
            (Some(_), None) => tenths(self.begun.elapsed()),
            _ => step,
        }
    }
}

fn tenths(time: Duration) -> u64 {
    u64::try_from(time.as_millis() / 100).unwrap_or(u64::MAX)
}

/// What a process of a trial makes its caches of, and its forked children theirs.
#[derive(Clone, Copy, Debug)]
struct Trial {
    kind: Kind,
    audit: bool,
}

impl Trial {
    fn wiring(self, slots: u32, lanes: usize) -> Wiring {
        Wiring { kind: self.kind, slots, lanes, audit: self.audit }
    }
}

/// What all threads share besides the caches.
struct Shared {
    monitor: AnyMonitor,
    journal: Journal,
    trial: Trial,
    make_monitor: MakeMonitor,
    /// Held by the one thread that has lowered the limit on descriptors.
    starving: Mutex<()>,
    /// Held by each thread that has others begin or end; for writing during a fork. The standard library
    /// keeps a table of threads behind a lock, and a child that was forked while it was held could
    /// begin none: its own would wait for ever.
    births: RwLock<()>,
    /// Held by each thread within an operation, where there is an audit; for writing during its sweeps.
    changes: RwLock<()>,
}

/// Concurrently with others that do the same: have threads begin or end, or are within an operation.
fn beside(others: &RwLock<()>) -> RwLockReadGuard<'_, ()> {
    others.read().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn new(monitor: AnyMonitor, make_monitor: MakeMonitor, journal: Journal, trial: Trial) -> Self {
        let (starving, births, changes) = (Mutex::new(()), RwLock::new(()), RwLock::new(()));
        Self { monitor, journal, trial, make_monitor, starving, births, changes }
    }
}

/// How often the books are looked at until they agree.
const LOOKS: u32 = 100_000;

type Ports = [Port; PORTS];

/// The caches' names in a report.
const PORT_NAMES: [&str; PORTS] = ["roomy", "small table", "small budget"];

/// What a process has of its own: a forked child makes another.
struct Owned {
    ports: Ports,
    stock: Stock,
    budget: Budget,
}

impl Owned {
    fn open(trial: Trial, monitor: &AnyMonitor, threads: usize) -> Result<Self, Failure> {
        let lanes = 2 * threads;
        // One of them decides by what things take, which changes from moment to moment here.
        let small_table = Config { when_full: WhenFull::RegisterPerUse, ..Config::default() };
        let small_budget = Config { max_bytes: 1 << 20, ..Config::keeping_all() };
        let both = Amount { bytes: BUDGET_BYTES, regions: 256 };
        let budget = Budget::new(both).map_err(Failure::unavailable)?;
        let share = || budget.share(Terms::default()).map_err(Failure::unavailable);
        let ports = [
            Port::open(trial.wiring(4096, lanes), monitor.clone(), Config::keeping_all())?,
            Port::open(trial.wiring(8, lanes), monitor.clone(), small_table)?,
            Port::open_within(share()?, trial.wiring(64, lanes), monitor.clone(), small_budget)?,
        ];
        Ok(Self { ports, stock: Stock::open(trial.kind, share()?, lanes)?, budget })
    }
}

impl Owned {
    /// What was granted and is registered nowhere, once the pool has given everything back.
    ///
    /// A notifier's thread may be giving back what it has taken away: that is waited for, for so many
    /// looks, because what was lost never comes.
    fn left_budget_bytes(&self) -> usize {
        let [.., small_budget] = &self.ports;
        let left = || {
            small_budget.evict_idle();
            small_budget.reclaim();
            let pinned = small_budget.statistics().pinned_bytes;
            self.budget.held().bytes.abs_diff(usize::try_from(pinned).unwrap_or(usize::MAX))
        };
        let mut looks = (0..LOOKS).map(|_| {
            thread::yield_now();
            left()
        });
        looks.find(|&left| left == 0).unwrap_or_else(left)
    }

    fn audit(&self) -> Option<AuditReport> {
        let ledgers = self.ports.iter().filter_map(Port::ledger);
        ledgers.map(Ledger::report).reduce(AuditReport::add)
    }

    /// A device that follows the page table writes where the pages are, not where they were when
    /// they were registered: nothing lands by exchange there.
    fn grounds<'p>(
        &'p self,
        shared: &'p Shared,
        threads: usize,
        direct: Option<DirectFile>,
    ) -> Grounds<'p> {
        let [roomy, ..] = &self.ports;
        let pages = arrival::pages(threads).filter(|_| !roomy.kind().is_on_demand());
        let zone = pages.and_then(|pages| roomy.landing_zone(pages, arrival::options()).ok());
        let (ports, stock, passed) = (&self.ports, &self.stock, Passed::default());
        Grounds { shared, ports, zone, stock, passed, direct }
    }
}

/// What all threads of a process meet on.
struct Grounds<'p> {
    shared: &'p Shared,
    ports: &'p Ports,
    /// `None` where there is no room for its pages, or the device is none for it.
    zone: Option<LandingZone<'p>>,
    stock: &'p Stock,
    passed: Passed<'p>,
    /// Written past its pages by one more thread.
    direct: Option<DirectFile>,
}

#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    /// A digest of the first operations of every thread.
    program: String,
    monitor: &'static str,
    cache: &'static str,
    threads: u16,
    seconds: f64,
    operations: u64,
    transfers: u64,
    wrong: u64,
    /// Threads that panicked.
    panics: u64,
    refused: u64,
    /// Why, and how often.
    refusals: BTreeMap<String, u64>,
    kinds: BTreeMap<&'static str, Count>,
    caches: Vec<CacheReport>,
    pool: StockReport,
    landing: LandingTally,
    children: Children,
    /// What was compared with the page table, if that was asked for.
    audit: Option<AuditReport>,
    /// What the kernel was made to do meanwhile, if that was asked for.
    weather: Option<WeatherReport>,
    /// What the budget says is held beyond what the cache of the small budget has registered, in
    /// bytes, when the pool had given everything back and the cache all that was idle.
    left_budget_bytes: usize,
    wrong_transfers: Vec<Wrong>,
}

impl Report {
    fn held(&self) -> bool {
        let right = self.wrong == 0 && self.panics == 0;
        right && self.pool.is_clean() && self.left_budget_bytes == 0
    }
}

/// What one of the caches did.
#[derive(Debug, Serialize)]
struct CacheReport {
    name: &'static str,
    gets: u64,
    hits: u64,
    registrations: u64,
    registration_failures: u64,
    invalidations: u64,
    evictions: u64,
    per_use: u64,
    /// Registrations left when all memory and leases were gone.
    left: u64,
}

/// Runs a trial under a supervisor, or is the trial; the exit status.
pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<u8, Failure> {
    arguments.monitor.prepare()?;
    if arguments.audit && arguments.registrar.is_on_demand() {
        return Err(Failure::usage(
            "--audit: registrations of a device that pages on demand pin nothing",
        ));
    }
    match supervisor::trial_seed() {
        None => supervisor::supervise(arguments, output),
        Some(seed) => {
            end_with_parent();
            keep_freed_memory();
            run_trial(arguments, seed, output).map(Verdict::exit_status)
        }
    }
}

fn run_trial(arguments: &Arguments, seed: u64, output: &Output) -> Result<Verdict, Failure> {
    let journal = Journal::inherited().map_err(Failure::unavailable)?;
    let trial = Trial { kind: arguments.registrar, audit: arguments.audit };
    let threads = arguments.threads;
    output
        .note(format_args!("seed {seed}: --seed {seed} --threads {threads} replays this program"));
    match arguments.cache {
        Strategy::Naive => {
            let shared = Shared::new(port::deaf()?, port::deaf, journal, trial);
            torture(arguments, seed, output, &shared)
        }
        Strategy::Pinfold if arguments.registrar.is_on_demand() => {
            let shared = Shared::new(port::unneeded()?, port::unneeded, journal, trial);
            torture(arguments, seed, output, &shared)
        }
        Strategy::Pinfold => {
            let monitor = port::monitor(arguments.monitor)?;
            choice::tell_refusals(&monitor, output);
            // Children make the same monitor at once: what this machine has was found out here.
            let another = port::same_as(&monitor);
            torture(
                arguments,
                seed,
                output,
                &Shared::new(Arc::new(monitor), another, journal, trial),
            )
        }
    }
}

fn torture(
    arguments: &Arguments,
    seed: u64,
    output: &Output,
    shared: &Shared,
) -> Result<Verdict, Failure> {
    let threads = usize::from(arguments.threads);
    let direct = arguments.direct.as_deref().map(DirectFile::open).transpose();
    let direct = direct.map_err(|error| Failure::usage(format!("--direct: {error}")))?;
    let lanes = threads + usize::from(direct.is_some());
    let owned = Owned::open(shared.trial, &shared.monitor, lanes)?;
    let until = Until::new(arguments);
    let grounds = owned.grounds(shared, threads, direct);
    if grounds.zone.is_none() {
        output.note(format_args!("there is no landing zone: arrivals are refused"));
    }
    shared.journal.write(Who::Trial, Row { stage: Stage::Running, ..Row::default() });
    let (tally, panics) = run_threads(arguments, seed, &grounds, &until, output);
    drop(grounds);
    let report = report(arguments, seed, shared, &owned, &until, tally, panics);
    shared.journal.write(Who::Trial, Row { stage: Stage::Reporting, ..Row::default() });
    output.report(&report, || human(&report));
    drop(owned);
    shared.journal.write(Who::Trial, Row { stage: Stage::Over, ..Row::default() });
    Ok(Verdict::of(report.held()))
}

fn report(
    arguments: &Arguments,
    seed: u64,
    shared: &Shared,
    owned: &Owned,
    until: &Until,
    tally: Tally,
    panics: u64,
) -> Report {
    // The pool's memory goes first: the caches have registered some of it.
    let pool = owned.stock.report();
    let caches = PORT_NAMES.iter().zip(&owned.ports);
    Report {
        seed,
        program: Program::digest(seed, usize::from(arguments.threads), DIGESTED),
        monitor: shared.monitor.name(),
        cache: arguments.cache.name(),
        threads: arguments.threads,
        seconds: until.begun.elapsed().as_secs_f64(),
        operations: tally.operations,
        transfers: tally.transfers,
        wrong: tally.wrong,
        panics,
        refused: tally.kinds.values().map(|count| count.refused).sum(),
        refusals: tally.reasons,
        kinds: tally.kinds,
        caches: caches.map(|(name, port)| cache_report(name, port)).collect(),
        pool,
        landing: tally.landing,
        children: tally.children,
        audit: owned.audit(),
        weather: tally.weather,
        left_budget_bytes: owned.left_budget_bytes(),
        wrong_transfers: tally.described,
    }
}

/// All threads' counts, and how many threads panicked.
fn run_threads(
    arguments: &Arguments,
    seed: u64,
    grounds: &Grounds<'_>,
    until: &Until,
    output: &Output,
) -> (Tally, u64) {
    let progress = output.progress(until.ticks(), "torture");
    let progress = &progress;
    let (mut sum, mut panics) = (Tally::default(), 0);
    let (begun, begin) = mpsc::channel();
    let (over, end) = mpsc::channel();
    let leaving = &Mutex::new(());
    let calm = AtomicBool::new(false);
    thread::scope(|scope| {
        // No worker forks while others begin, nor ends while others may still fork.
        let stay = leaving.lock().unwrap_or_else(PoisonError::into_inner);
        let births = beside(&grounds.shared.births);
        let start = |(thread, program): (usize, AnyProgram)| {
            let worker = Worker::new(grounds, thread);
            let bar = (thread == 0).then_some(progress);
            let (begun, over) = (begun.clone(), over.clone());
            scope.spawn(move || {
                // The receiver may be gone.
                let _ = begun.send(());
                let children = !arguments.no_children;
                let run = AssertUnwindSafe(|| run_program(worker, program, until, children, bar));
                let tally = catch_unwind(run);
                let _ = over.send(());
                drop(leaving.lock().unwrap_or_else(PoisonError::into_inner));
                tally
            })
        };
        let threads: Vec<_> = programs(arguments, seed).enumerate().map(start).collect();
        let weather = arguments.weather.then(|| scope.spawn(|| weather::blow(seed, &calm)));
        if arguments.spin {
            scope.spawn(|| spin(&calm));
        }
        let told_by_all = |news: &mpsc::Receiver<()>| threads.iter().all(|_| news.recv().is_ok());
        told_by_all(&begin);
        drop(births);
        told_by_all(&end);
        // Relaxed: a flag that guards no data.
        calm.store(true, Ordering::Relaxed);
        sum.weather = weather.and_then(|thread| thread.join().ok());
        drop(stay);
        for thread in threads {
            match thread.join() {
                Ok(Ok(tally)) => sum.add(tally),
                _ => panics += 1,
            }
        }
    });
    (sum, panics)
}

type AnyProgram = Box<dyn Iterator<Item = Operation> + Send>;

/// What each thread does.
fn programs(arguments: &Arguments, seed: u64) -> impl Iterator<Item = AnyProgram> {
    let program = move |thread| Box::new(Program::new(seed, thread)) as AnyProgram;
    let direct = arguments.direct.iter().map(move |_| Box::new(replacements(seed)) as AnyProgram);
    (0..usize::from(arguments.threads)).map(program).chain(direct)
}

/// Uses a processor until `over`, as threads do that poll a device.
fn spin(over: &AtomicBool) {
    // Relaxed: a flag that guards no data.
    while !over.load(Ordering::Relaxed) {
        std::hint::spin_loop();
    }
}

fn run_program(
    mut worker: Worker<'_, '_>,
    program: impl Iterator<Item = Operation>,
    until: &Until,
    children: bool,
    bar: Option<&Progress>,
) -> Tally {
    let mut shown = 0;
    for (operation, step) in program.zip(0..) {
        if until.is_reached(step) {
            break;
        }
        if !children && matches!(operation, Operation::Fork { .. }) {
            continue;
        }
        worker.step(step, &operation);
        let tick = until.tick(step);
        if let Some(bar) = bar.filter(|_| tick > shown) {
            bar.advance(tick - shown);
            shown = tick;
        }
    }
    worker.enter(Stage::Over, worker.tally.operations);
    std::mem::take(&mut worker.tally)
}

fn cache_report(name: &'static str, port: &Port) -> CacheReport {
    port.reclaim();
    let statistics = port.statistics();
    CacheReport {
        name,
        gets: statistics.gets,
        hits: statistics.hits,
        registrations: statistics.registrations,
        registration_failures: statistics.registration_failures,
        invalidations: statistics.invalidations,
        evictions: statistics.evictions,
        per_use: statistics.per_use,
        left: statistics.regions,
    }
}

fn human(report: &Report) -> String {
    format!(
        "{}\n{}\n\n{}\n{}\n{}seed {}, program {}, monitor {}, cache {}: {} operations and {} \
         transfers by {} threads in {:.1} s, {} wrong\n",
        kinds(report),
        caches(report),
        report.pool,
        report.landing,
        wrongs(report),
        report.seed,
        report.program,
        report.monitor,
        report.cache,
        report.operations,
        report.transfers,
        report.threads,
        report.seconds,
        report.wrong
    )
}

fn kinds(report: &Report) -> comfy_table::Table {
    let mut table = output::table(&["operation", "done", "refused", "wrong"]);
    for (kind, count) in &report.kinds {
        let tone = if count.wrong == 0 { Tone::Good } else { Tone::Bad };
        table.add_row([
            Cell::new(kind),
            Cell::new(count.done),
            Cell::new(count.refused),
            output::cell(count.wrong, tone),
        ]);
    }
    table
}

fn caches(report: &Report) -> comfy_table::Table {
    let heads = ["cache", "gets", "hits", "registrations", "invalidations", "evictions", "per use"];
    let mut table = output::table(&heads);
    for cache in &report.caches {
        let counts = [
            cache.gets,
            cache.hits,
            cache.registrations,
            cache.invalidations,
            cache.evictions,
            cache.per_use,
        ];
        let mut row = vec![Cell::new(cache.name)];
        row.extend(counts.map(Cell::new));
        table.add_row(row);
    }
    table
}

fn wrongs(report: &Report) -> String {
    let line = |wrong: &Wrong| {
        format!(
            "wrong: thread {}, step {}, {}: {} from byte {}: {}\n",
            wrong.thread, wrong.step, wrong.operation, wrong.range, wrong.first_wrong, wrong.note
        )
    };
    report.wrong_transfers.iter().map(line).collect()
}
