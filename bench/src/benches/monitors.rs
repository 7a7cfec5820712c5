//! What each monitor adds to a hit, beside a monitor whose check is one load.

use crate::Options;
use crate::load_monitor::LoadMonitor;
use crate::null::{self, NullDevice};
use crate::report::Report;
use crate::rounds::{Round, compare, nanoseconds_each};
use crate::workload::{LENGTH, random_order};
use pinfold::monitor::{NoMonitor, Userfaultfd};
use pinfold::{Cache, Config, Monitor};
use serde_json::json;

const REGIONS: usize = 1_000;
/// Accesses in a round.
const ACCESSES: usize = 50_000;
/// Gets behind one check, where checks are shared.
const SEVERAL: usize = 16;

/// One figure for each monitor that this machine has.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    // Real memory, which is what userfaultfd watches; never touched, so it takes no room.
    let memory = vec![0_u8; (REGIONS + 1) * LENGTH];
    let addresses = within(&memory);
    let order = random_order(&addresses, ACCESSES, &mut options.random());
    let load = cache(LoadMonitor::default())?;
    let mut bench = Bench { options, order: &order, load: &load, report };
    bench.measure("one load", &mut || null::get_put(&load, &order, LENGTH))?;
    no_monitor(&mut bench)?;
    userfaultfd(&mut bench)
}

/// The regions inside of `memory`, on 64 KiB boundaries.
fn within(memory: &[u8]) -> Vec<u64> {
    let first = (memory.as_ptr() as u64).next_multiple_of(LENGTH as u64);
    (first..).step_by(LENGTH).take(REGIONS).collect()
}

fn cache<M: Monitor>(monitor: M) -> Result<Cache<NullDevice, M>, String> {
    null::over(monitor, Config::default()).map_err(|error| error.to_string())
}

fn no_monitor(bench: &mut Bench<'_>) -> Result<(), String> {
    let cache = cache(NoMonitor::new().map_err(|error| error.to_string())?)?;
    let order = bench.order;
    bench.measure("none, vouched for", &mut || null::get_put_vouched(&cache, order, LENGTH))
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
    bench.measure("userfaultfd", &mut || null::get_put(&cache, order, LENGTH))?;
    bench.measure("userfaultfd, a check for 16 gets", &mut || {
        null::get_put_checked(&cache, order, LENGTH, SEVERAL)
    })?;
    match cache.statistics().registrations {
        count if count <= REGIONS as u64 => Ok(()),
        count => Err(format!("{count} registrations of {REGIONS} regions: not hits")),
    }
}

/// What every monitor is compared with, and where that is told.
struct Bench<'b> {
    options: Options,
    order: &'b [u64],
    load: &'b Cache<NullDevice, LoadMonitor>,
    report: &'b mut Report,
}

impl Bench<'_> {
    fn measure(
        &mut self,
        monitor: &str,
        work: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), String> {
        let comparison = compare(self.options.rounds, || {
            let ours = nanoseconds_each(ACCESSES, &mut *work)?;
            let load = || null::get_put(self.load, self.order, LENGTH);
            Ok(Round { ours, peer: Some(nanoseconds_each(ACCESSES, load)?) })
        })?;
        let params = json!({"monitor": monitor, "regions": REGIONS, "seed": self.options.seed});
        self.report.add_against("one load", "monitors", params, "ns", comparison);
        Ok(())
    }
}
