//! How two sides are compared on a machine that is never quiet: in short rounds that take turns,
//! by the median of the rounds.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What one round gave: ours, and the peer's if there is one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    pub(crate) ours: f64,
    pub(crate) peer: Option<f64>,
}

/// What all rounds gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    /// The median of ours.
    pub(crate) value: f64,
    /// The median of the peer's.
    pub(crate) peer_value: Option<f64>,
    /// The median of the rounds' own ratios, ours to the peer's.
    pub(crate) ratio: Option<f64>,
}

/// Runs `round` once to warm up and `rounds` times to be counted.
pub(crate) fn compare(
    rounds: usize,
    mut round: impl FnMut() -> Result<Round, String>,
) -> Result<Comparison, String> {
    round()?;
    let rounds: Vec<Round> = (0..rounds.max(1)).map(|_| round()).collect::<Result<_, _>>()?;
    let peers = rounds.iter().filter_map(|round| round.peer);
    let ratios = rounds.iter().filter_map(|round| Some(round.ours / round.peer?));
    Ok(Comparison {
        value: median(rounds.iter().map(|round| round.ours)).unwrap_or(f64::NAN),
        peer_value: median(peers),
        ratio: median(ratios),
    })
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// The nanoseconds that each of `count` things done by `work` took.
pub(crate) fn nanoseconds_each(
    count: usize,
    work: impl FnOnce() -> Result<(), String>,
) -> Result<f64, String> {
    let began = Instant::now();
    work()?;
    Ok(nanoseconds(began.elapsed()) / count as f64)
}

/// A duration in nanoseconds.
pub(crate) fn nanoseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e9
}

/// How many addresses a thread works on between two looks at the clock.
const CHUNK: usize = 500;

/// How many addresses a second all threads together work on, one for each order, in a window of
/// time in which all of them run.
pub(crate) fn throughput(
    orders: &[Vec<u64>],
    window: Duration,
    work: &(impl Fn(&[u64]) -> Result<(), String> + Sync),
) -> Result<f64, String> {
    let (line, over) = (Barrier::new(orders.len() + 1), AtomicBool::new(false));
    thread::scope(|scope| {
        let workers: Vec<_> = orders
            .iter()
            .map(|order| scope.spawn(|| work_until(&line, &over, order, work)))
            .collect();
        line.wait();
        let began = Instant::now();
        thread::sleep(window);
        // Relaxed: the threads are joined below.
        over.store(true, Ordering::Relaxed);
        let elapsed = began.elapsed();
        let done = workers
            .into_iter()
            .map(|worker| worker.join().map_err(|_| "a measuring thread panicked".to_string())?);
        let done: usize = done.sum::<Result<_, _>>()?;
        Ok(done as f64 / elapsed.as_secs_f64())
    })
}

/// Works on `order` again and again until it is over; how many addresses that were.
fn work_until(
    line: &Barrier,
    over: &AtomicBool,
    order: &[u64],
    work: &impl Fn(&[u64]) -> Result<(), String>,
) -> Result<usize, String> {
    // Once before the line, so that everybody is warm.
    work(order.get(..CHUNK).unwrap_or(order))?;
    line.wait();
    let mut done = 0;
    for chunk in order.chunks(CHUNK).cycle() {
        // Relaxed: a chunk more or less.
        if over.load(Ordering::Relaxed) {
            break;
        }
        work(chunk)?;
        done += chunk.len();
    }
    Ok(done)
}
