//! Whether hits of one thread wait while another registers for a millisecond at a time.
//!
//! Every hit is timed alone. The same without the other thread shows what the machine itself
//! does to a hit.

use crate::Options;
use crate::null::{self, NullCache};
use crate::peer::{self, Ucx};
use crate::report::Report;
use crate::rounds::{Comparison, nanoseconds};
use crate::workload::{LENGTH, adjacent, elsewhere, random_order};
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const REGIONS: usize = 1_000;
/// What a registration takes.
const PAUSE: Duration = Duration::from_millis(1);
/// A hit that took longer counts as one that waited.
const LONG: Duration = Duration::from_micros(20);
/// How long hits are made.
const WINDOW: Duration = Duration::from_millis(1500);
/// More new regions than can be registered meanwhile.
const NEW: usize = 10_000;

/// What became of the hits.
#[derive(Clone, Copy, Default)]
struct Waits {
    hits: u64,
    long: u64,
    spent: Duration,
    waited: Duration,
    longest: Duration,
}

impl Waits {
    fn note(&mut self, took: Duration) {
        self.hits += 1;
        self.spent += took;
        self.longest = self.longest.max(took);
        if took > LONG {
            self.long += 1;
            self.waited += took;
        }
    }

    /// The figures to report: name, unit, value.
    fn figures(&self) -> [(&'static str, &'static str, f64); 3] {
        let share = self.waited.as_secs_f64() / self.spent.as_secs_f64();
        [
            ("hits above 20 us", "share", self.long as f64 / self.hits as f64),
            ("time in them", "share", share),
            ("longest hit", "us", nanoseconds(self.longest) / 1e3),
        ]
    }
}

/// With the other thread, then without.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let (cached, new) = (adjacent(REGIONS), elsewhere(NEW));
    let order = random_order(&cached, 100_000, &mut options.random());
    let (ours, theirs) = (null::unlimited()?, peer::unlimited()?);
    null::get_put(&ours, &cached, LENGTH)?;
    theirs.as_ref().map_or(Ok(()), |theirs| theirs.get_put(&cached, LENGTH))?;
    ours.registrar().set_pause(pause());
    theirs.as_ref().inspect(|theirs| theirs.set_pause(pause()));
    for registering in [true, false] {
        let new = if registering { &new[..] } else { &[] };
        let ours = waits_of_ours(&ours, &order, new)?;
        let theirs = theirs.as_ref().map(|theirs| waits_of_theirs(theirs, &order, new));
        enter(report, registering, &ours, theirs.transpose()?.as_ref());
    }
    Ok(())
}

fn pause() -> u64 {
    u64::try_from(PAUSE.as_nanos()).unwrap_or(u64::MAX)
}

fn enter(report: &mut Report, registering: bool, ours: &Waits, theirs: Option<&Waits>) {
    let peers = theirs.map(Waits::figures);
    for (position, (what, unit, value)) in ours.figures().into_iter().enumerate() {
        let peer_value = peers.map(|figures| figures[position].2);
        let ratio = peer_value.filter(|&peer| peer > 0.0).map(|peer| value / peer);
        let params = json!({"what": what, "another_registers": registering, "regions": REGIONS});
        report.add("blocked", params, unit, Comparison { value, peer_value, ratio });
    }
}

fn waits_of_ours(cache: &NullCache, order: &[u64], new: &[u64]) -> Result<Waits, String> {
    let get_put = |addresses: &[u64]| null::get_put(cache, addresses, LENGTH);
    let waits = beside(order, new, &get_put);
    new.iter().try_for_each(|&address| {
        cache.invalidate(crate::workload::range(address)?);
        Ok::<_, String>(())
    })?;
    waits
}

fn waits_of_theirs(cache: &Ucx, order: &[u64], new: &[u64]) -> Result<Waits, String> {
    beside(order, new, &|addresses| cache.get_put(addresses, LENGTH))
}

/// Hits in `order` for a while, beside a thread that registers `new`.
fn beside(
    order: &[u64],
    new: &[u64],
    get_put: &(impl Fn(&[u64]) -> Result<(), String> + Sync),
) -> Result<Waits, String> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Relaxed: one registration more or less.
        let mut rest = new.chunks(1).take_while(|_| !over.load(Ordering::Relaxed));
        let other = scope.spawn(move || rest.try_for_each(get_put));
        let waits = hits(order, get_put);
        over.store(true, Ordering::Relaxed);
        other.join().map_err(|_| "the registering thread panicked".to_string())??;
        waits
    })
}

fn hits(order: &[u64], get_put: impl Fn(&[u64]) -> Result<(), String>) -> Result<Waits, String> {
    let mut waits = Waits::default();
    let end = Instant::now() + WINDOW;
    for address in order.chunks(1).cycle() {
        let began = Instant::now();
        if began >= end {
            break;
        }
        get_put(address)?;
        waits.note(began.elapsed());
    }
    Ok(waits)
}
