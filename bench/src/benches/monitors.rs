//! What each monitor adds to a hit, compared with a monitor whose check is one load; and what a check that
//! is a system call consists of.

use super::hit::all_hits;
use crate::Options;
use crate::machine;
use crate::null::LoadMonitor;
use crate::null::{self, NullDevice};
use crate::question::{Question, Uffd};
use crate::report::Report;
use crate::rounds::{Comparison, compare, nanoseconds_each, throughput};
use crate::workload::{LENGTH, random_order};
use pinfold::monitor::{Best, Choice, Feed, NoMonitor, Userfaultfd, WithFeed};
use pinfold::{Cache, Config, Monitor};
use pinfold_kernel::process::empty_call;
use serde_json::json;
use std::hint::black_box;
use std::time::Duration;

const REGIONS: usize = 1_000;
/// Accesses in a round.
const ACCESSES: usize = 50_000;
/// Gets behind one check, where checks are shared.
const SEVERAL: usize = 16;
/// How often each way to ask is tried in the moment in which it matters.
const UNMAPPINGS: usize = 1_000;
/// How long threads ask side by side.
const WINDOW: Duration = Duration::from_millis(3);

/// One figure for each monitor that this machine has.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    // Real memory, which is what userfaultfd watches; never touched, so it takes no room.
    let memory = vec![0_u8; (REGIONS + 1) * LENGTH];
    let addresses = within(&memory);
    let order = random_order(&addresses, options.scaled(ACCESSES), &mut options.random());
    let load = cache(LoadMonitor::default())?;
    null::get_put(&load, &addresses, LENGTH)?;
    let mut bench = Bench { options, addresses: &addresses, order: &order, load: &load, report };
    bench.measure("one load", &|| null::get_put(&load, &order, LENGTH))?;
    no_monitor(&mut bench)?;
    userfaultfd(&mut bench)?;
    // Last: the process's own monitor goes on watching the memory, and no other can then.
    chosen(&mut bench)
}

/// The regions inside of `memory`, on 64 KiB boundaries.
fn within(memory: &[u8]) -> Vec<u64> {
    let first = (memory.as_ptr() as u64).next_multiple_of(LENGTH as u64);
    (first..).step_by(LENGTH).take(REGIONS).collect()
}

fn cache<M: Monitor>(monitor: M) -> Result<Cache<NullDevice, M>, String> {
    null::over(monitor, Config::keeping_all()).map_err(|error| error.to_string())
}

fn no_monitor(bench: &mut Bench<'_>) -> Result<(), String> {
    let cache = cache(NoMonitor::new().map_err(|error| error.to_string())?)?;
    let order = bench.order;
    null::get_put_vouched(&cache, bench.addresses, LENGTH)?;
    bench.measure("none, vouched for", &|| null::get_put_vouched(&cache, order, LENGTH))?;
    let none = NoMonitor::new().map_err(|error| error.to_string())?;
    let cache = self::cache(WithFeed::new(none, Feed::of_process()))?;
    null::get_put_vouched(&cache, bench.addresses, LENGTH)?;
    bench.measure("none with feed, vouched for", &|| null::get_put_vouched(&cache, order, LENGTH))
}

/// Each that a program may be given by `best()`, behind its branch; what callers vouch for, where that
/// is all it keeps.
fn chosen(bench: &mut Bench<'_>) -> Result<(), String> {
    let order = bench.order;
    for choice in Choice::ALL {
        let monitor = match Best::only(choice) {
            Ok(monitor) => monitor,
            Err(refused) => {
                bench.report.remark(&format!("skipped: {refused}"));
                continue;
            }
        };
        let cache = cache(monitor)?;
        let name = format!("best, {}", choice.name());
        if choice == Choice::NoMonitor {
            null::get_put_vouched(&cache, bench.addresses, LENGTH)?;
            bench.measure(&name, &|| null::get_put_vouched(&cache, order, LENGTH))?;
        } else {
            null::get_put(&cache, bench.addresses, LENGTH)?;
            bench.measure(&name, &|| null::get_put(&cache, order, LENGTH))?;
        }
    }
    Ok(())
}

fn userfaultfd(bench: &mut Bench<'_>) -> Result<(), String> {
    let monitor = match Userfaultfd::new() {
        Ok(monitor) => monitor,
        Err(error) => {
            bench.report.remark(&format!("skipped: userfaultfd: {error}"));
            return Ok(());
        }
    };
    let cache = cache(monitor)?;
    let order = bench.order;
    null::get_put(&cache, bench.addresses, LENGTH)?;
    bench.measure("userfaultfd", &|| null::get_put(&cache, order, LENGTH))?;
    bench.measure("userfaultfd, a check for 16 gets", &|| {
        null::get_put_checked(&cache, order, LENGTH, SEVERAL)
    })?;
    all_hits(cache.statistics().registrations, REGIONS)?;
    let check = || cache.monitor().check().map(drop).map_err(|error| error.to_string());
    bench.measure("userfaultfd, its check alone", &|| order.iter().try_for_each(|_| check()))?;
    bench.measure("an empty system call", &|| {
        order.iter().for_each(|_| empty_call());
        Ok(())
    })?;
    bench.two_threads(&|some| some.iter().try_for_each(|_| check()))?;
    // The monitor's own events would be in the way.
    drop(cache);
    questions(bench.options, bench.report)
}

/// Other ways to ask than the monitor's, what they cost and what they overlook.
fn questions(options: Options, report: &mut Report) -> Result<(), String> {
    let uffd = Uffd::open()?;
    let asked = options.scaled(ACCESSES);
    let cost = |question| {
        nanoseconds_each(asked, || {
            (0..asked).for_each(|_| {
                black_box(uffd.ask(question));
            });
            Ok(())
        })
    };
    let (asks, unmappings) = (Question::WriteProtect, options.scaled(UNMAPPINGS));
    let share = |question| {
        uffd.missed(question, unmappings).map(|missed| missed as f64 / unmappings as f64)
    };
    for question in Question::OTHERS {
        let comparison =
            compare(options.rounds, &mut |_| cost(question), Some(&mut |_| cost(asks)))?;
        let params = json!({"question": question.name()});
        report.add_against(asks.name(), "question", params.clone(), "ns", comparison);
        let missed = Comparison::of(share(question)?, Some(share(asks)?));
        report.add_against(asks.name(), "question, unmappings missed", params, "share", missed);
    }
    Ok(())
}

/// What every monitor is compared with, and where that is told.
struct Bench<'b> {
    options: Options,
    addresses: &'b [u64],
    order: &'b [u64],
    load: &'b Cache<NullDevice, LoadMonitor>,
    report: &'b mut Report,
}

impl Bench<'_> {
    /// What `work` takes for each address of the order, compared with a hit of the monitor that loads.
    fn measure(
        &mut self,
        monitor: &str,
        work: &dyn Fn() -> Result<(), String>,
    ) -> Result<(), String> {
        let (load, order) = (self.load, self.order);
        let comparison = compare(
            self.options.rounds,
            &mut |_| nanoseconds_each(order.len(), work),
            Some(&mut |_| nanoseconds_each(order.len(), || null::get_put(load, order, LENGTH))),
        )?;
        let params = json!({"monitor": monitor, "regions": REGIONS, "seed": self.options.seed});
        self.report.add_against("one load", "monitors", params, "ns", comparison);
        Ok(())
    }

    /// What a check takes while another thread asks too, compared with one that asks alone: the threads
    /// share the count of the descriptor's users, in the kernel.
    fn two_threads(
        &mut self,
        check: &(impl Fn(&[u64]) -> Result<(), String> + Sync),
    ) -> Result<(), String> {
        let [first, second, ..] = *machine::processors()? else { return Ok(()) };
        let stations = [(first, self.order), (second, self.order)];
        let window = self.options.window(WINDOW);
        let each = |threads: usize| {
            throughput(&stations[..threads], window, check).map(|rate| threads as f64 / rate * 1e9)
        };
        let comparison = compare(self.options.rounds, &mut |_| each(2), Some(&mut |_| each(1)))?;
        let params = json!({"monitor": "userfaultfd, checks of two threads", "threads": 2});
        self.report.add_against("one thread", "monitors", params, "ns", comparison);
        Ok(())
    }
}
