//! What a hit costs: get, a look at the handle, release, in random order; and what the loop around
//! it costs on either side.

use crate::Options;
use crate::null::{self, NullCache};
use crate::peer::{self, Ucx};
use crate::report::{Measurement, Report};
use crate::rounds::{Comparison, Turn, compare, nanoseconds_each};
use crate::workload::{LENGTH, adjacent, random_order, scattered};
use pinfold_cli::plot::{Axis, Line, Plot};
use serde_json::{Value, json};

/// The sizes of the cache.
const REGIONS: [usize; 4] = [1, 1_000, 100_000, 1_000_000];
/// Accesses in a round.
const ACCESSES: usize = 200_000;
/// How many orders there are: rounds that follow each other go different ways.
const ORDERS: usize = 3;

/// How many leases the pipeline of [`holding`] has in flight.
const HELD: usize = 16;

/// One figure for each size; then what programs do that are less tidy.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let sizes = REGIONS.into_iter().filter(|&regions| options.can_fill(regions));
    for regions in sizes.clone() {
        Hits::of(options, &adjacent(regions))?.one_by_one(report, "hit")?;
    }
    for regions in sizes.filter(|&regions| regions > 1) {
        let addresses = scattered(regions, &mut options.random());
        Hits::of(options, &addresses)?.one_by_one(report, "hit scattered")?;
    }
    Hits::of(options, &adjacent(1_000))?.holding(report)?;
    the_loop(options, report)
}

/// The time of a hit, ours and UCX's, next to more and more regions.
pub(crate) fn plot(report: &Report) -> Plot {
    let line = |name: &str, ours: bool| {
        let point = |it: &Measurement| {
            Some((it.number("regions"), if ours { it.value } else { it.peer_value? }))
        };
        report.named(name).filter_map(point).collect()
    };
    let lines = [
        ("UCX, random gaps", line("hit scattered", false)),
        ("UCX, no gaps", line("hit", false)),
        ("Pinfold, random gaps", line("hit scattered", true)),
        ("Pinfold, no gaps", line("hit", true)),
    ];
    Plot {
        title: "A hit and the end of its lease, in random order".into(),
        across: Axis {
            title: "regions in the cache",
            base: 10.0,
            label: |regions| format!("{regions:.0}"),
        },
        up: Axis { title: "nanoseconds", base: 10.0, label: |value| format!("{value:.0}") },
        lines: lines.map(|(name, points)| Line { name: name.into(), points }).into(),
    }
}

/// Two caches that hold the same regions, and the order in which these are asked for.
struct Hits {
    options: Options,
    regions: usize,
    ours: NullCache,
    theirs: Option<Ucx>,
    orders: Vec<Vec<u64>>,
}

impl Hits {
    fn of(options: Options, addresses: &[u64]) -> Result<Self, String> {
        let (ours, theirs) = (null::unlimited()?, peer::unlimited()?);
        null::get_put(&ours, addresses, LENGTH)?;
        theirs.as_ref().map_or(Ok(()), |theirs| theirs.get_put(addresses, LENGTH))?;
        // Every region is asked for now and then, in an order that no cache of the processor
        // knows.
        let mut random = options.random();
        let accesses = options.scaled(ACCESSES);
        let orders = (0..ORDERS).map(|_| random_order(addresses, accesses, &mut random)).collect();
        Ok(Self { options, regions: addresses.len(), ours, theirs, orders })
    }

    /// get, use, release.
    fn one_by_one(&self, report: &mut Report, name: &'static str) -> Result<(), String> {
        let comparison = self.compare(
            |order| null::get_put(&self.ours, order, LENGTH),
            |theirs, order| theirs.get_put(order, LENGTH),
        )?;
        report.add(name, self.params(), "ns", comparison);
        Ok(())
    }

    /// The same with so many leases in flight all the time.
    fn holding(&self, report: &mut Report) -> Result<(), String> {
        let comparison = self.compare(
            |order| null::get_put_held(&self.ours, order, LENGTH, HELD),
            |theirs, order| theirs.get_put_held(order, LENGTH, HELD),
        )?;
        let mut params = self.params();
        params["held"] = json!(HELD);
        report.add("hit holding", params, "ns", comparison);
        Ok(())
    }

    fn compare(
        &self,
        ours: impl Fn(&[u64]) -> Result<(), String>,
        theirs: impl Fn(&Ucx, &[u64]) -> Result<(), String>,
    ) -> Result<Comparison, String> {
        let accesses = self.options.scaled(ACCESSES);
        let order = |round: usize| &self.orders[round % ORDERS][..];
        let mut ours = |round| nanoseconds_each(accesses, || ours(order(round)));
        let mut theirs = self
            .theirs
            .as_ref()
            .map(|peer| |round| nanoseconds_each(accesses, || theirs(peer, order(round))));
        let peer = theirs.as_mut().map(|theirs| theirs as &mut Turn<'_>);
        let comparison = compare(self.options.rounds, &mut ours, peer)?;
        all_hits(self.ours.statistics().registrations, self.regions)?;
        Ok(comparison)
    }

    fn params(&self) -> Value {
        json!({"regions": self.regions, "region_bytes": LENGTH, "seed": self.options.seed})
    }
}

/// More registrations than regions mean that something else was measured.
pub(crate) fn all_hits(registrations: u64, regions: usize) -> Result<(), String> {
    match registrations {
        count if count == regions as u64 => Ok(()),
        count => Err(format!("{count} registrations of {regions} regions: not all were hits")),
    }
}

/// The measuring loops with no cache in them: what of the figures above is theirs.
fn the_loop(options: Options, report: &mut Report) -> Result<(), String> {
    let accesses = options.scaled(ACCESSES);
    let order = random_order(&adjacent(1_000), accesses, &mut options.random());
    let mut ours = |_| nanoseconds_each(accesses, || null::walk(&order));
    let mut theirs = |_| nanoseconds_each(accesses, || Ucx::walk(&order));
    let peer = peer::PRESENT.then_some(&mut theirs as &mut Turn<'_>);
    let comparison = compare(options.rounds, &mut ours, peer)?;
    report.add(
        "measuring loop",
        json!({"accesses": accesses, "seed": options.seed}),
        "ns",
        comparison,
    );
    Ok(())
}
