//! Whether hits of one thread wait while another registers for a millisecond at a time.
//!
//! Every hit is timed alone. The same without the other thread shows what the machine itself
//! does to a hit.

use crate::Options;
use crate::null;
use crate::peer;
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
/// How long hits are made in one turn.
const WINDOW: Duration = Duration::from_millis(75);
/// New regions for one turn: more than can be registered meanwhile.
const NEW: usize = 100;

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

/// With the other thread and without, both sides in turns.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let cached = adjacent(REGIONS);
    let order = random_order(&cached, 100_000, &mut options.random());
    let (cache, theirs) = (null::unlimited()?, peer::unlimited()?);
    null::get_put(&cache, &cached, LENGTH)?;
    theirs.as_ref().map_or(Ok(()), |theirs| theirs.get_put(&cached, LENGTH))?;
    cache.registrar().set_pause(pause());
    theirs.as_ref().inspect(|theirs| theirs.set_pause(pause()));

    let window = options.window(WINDOW);
    let new = elsewhere(NEW * options.rounds);
    for registering in [true, false] {
        let (mut ours, mut peers) = (Waits::default(), Waits::default());
        for new in new.chunks(NEW) {
            let new = if registering { new } else { &[] };
            beside(&order, new, window, &mut ours, &|some| null::get_put(&cache, some, LENGTH))?;
            if let Some(theirs) = &theirs {
                beside(&order, new, window, &mut peers, &|some| theirs.get_put(some, LENGTH))?;
            }
        }
        enter(report, registering, &ours, theirs.as_ref().map(|_| &peers));
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
        let params = json!({"what": what, "another_registers": registering, "regions": REGIONS});
        report.add("blocked", params, unit, Comparison::of(value, peer_value));
    }
}

/// Hits in `order` for a while, concurrently with a thread that registers `new`. Both run where the scheduler
/// finds room, as a program's threads do.
fn beside(
    order: &[u64],
    new: &[u64],
    window: Duration,
    waits: &mut Waits,
    get_put: &(impl Fn(&[u64]) -> Result<(), String> + Sync),
) -> Result<(), String> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Relaxed: one registration more or less.
        let mut rest = new.chunks(1).take_while(|_| !over.load(Ordering::Relaxed));
        let other = scope.spawn(move || rest.try_for_each(get_put));
        let hits = hits(order, window, waits, get_put);
        over.store(true, Ordering::Relaxed);
        other.join().map_err(|_| "the registering thread panicked".to_string())??;
        hits
    })
}

/// Times every hit alone.
fn hits(
    order: &[u64],
    window: Duration,
    waits: &mut Waits,
    get_put: impl Fn(&[u64]) -> Result<(), String>,
) -> Result<(), String> {
    let end = Instant::now() + window;
    for address in order.chunks(1).cycle() {
        let began = Instant::now();
        if began >= end {
            break;
        }
        get_put(address)?;
        waits.note(began.elapsed());
    }
    Ok(())
}
