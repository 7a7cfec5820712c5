//! How two sides are compared on a machine that is never quiet: in short rounds that take turns,
//! by the median of the rounds.

use crate::machine;
use pinfold_kernel::thread::processor_lost;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

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

impl Comparison {
    /// Of figures that no round gave.
    pub(crate) fn of(value: f64, peer_value: Option<f64>) -> Self {
        let ratio = peer_value.filter(|&peer| peer > 0.0).map(|peer| value / peer);
        Self { value, peer_value, ratio }
    }

    /// Of what each round gave, in order.
    pub(crate) fn of_rounds(values: Vec<f64>, peers: Vec<f64>) -> Self {
        let ratios = values.iter().zip(&peers).map(|(value, peer)| value / peer);
        let ratio = median(ratios);
        Self {
            value: median(values.into_iter()).unwrap_or(f64::NAN),
            peer_value: median(peers.into_iter()),
            ratio,
        }
    }

    /// In a unit that is `factor` times as large.
    pub(crate) fn in_units_of(self, factor: f64) -> Self {
        let peer_value = self.peer_value.map(|peer| peer / factor);
        Self { value: self.value / factor, peer_value, ..self }
    }
}

/// One side's turn in a round, whose number it is given: both sides' turns in a round do the same
/// work.
pub(crate) type Turn<'t> = dyn FnMut(usize) -> Result<f64, String> + 't;

/// Has each side take a turn to warm up and one in each of `rounds` rounds. Which goes first changes
/// from round to round, for the second may find the order of accesses in the processor's cache.
pub(crate) fn compare(
    rounds: usize,
    ours: &mut Turn<'_>,
    mut peer: Option<&mut Turn<'_>>,
) -> Result<Comparison, String> {
    let (mut values, mut peers) = (Vec::new(), Vec::new());
    for round in 0..=rounds.max(1) {
        let peer_first = round % 2 == 1;
        let first = peer.as_mut().filter(|_| peer_first).map(|peer| peer(round)).transpose()?;
        let value = ours(round)?;
        let second = peer.as_mut().filter(|_| !peer_first).map(|peer| peer(round)).transpose()?;
        if round > 0 {
            values.push(value);
            peers.extend(first.or(second));
        }
    }
    Ok(Comparison::of_rounds(values, peers))
}

/// The middle of `values`, the upper one of two.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
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

/// One thread of a measurement: where it runs, and what it works on over and over.
pub(crate) type Station<'s> = (usize, &'s [u64]);

/// How often a window is measured in which other programs took a processor away, before it counts.
const TRIES: usize = 50;

/// How many addresses a second the threads together work on.
///
/// Each thread stays on its processor and measures its own rate. They start together, and the first that
/// has worked for the length of the window ends it for all, so that none is measured alone; nothing
/// else runs meanwhile on behalf of the measurement. A window in which a thread lost its processor
/// to another program is measured again: a cache that has its threads wait for each other makes
/// them sleep or spin, which is not that.
pub(crate) fn throughput(
    stations: &[Station<'_>],
    window: Duration,
    work: &(impl Fn(&[u64]) -> Result<(), String> + Sync),
) -> Result<f64, String> {
    let mut rate = one_window(stations, window, work)?;
    for _ in 1..TRIES {
        if rate.undisturbed {
            break;
        }
        rate = one_window(stations, window, work)?;
    }
    Ok(rate.per_second)
}

/// How fast one window went.
#[derive(Clone, Copy)]
struct Rate {
    /// Addresses a second.
    per_second: f64,
    /// Whether every thread kept its processor.
    undisturbed: bool,
}

fn one_window(
    stations: &[Station<'_>],
    window: Duration,
    work: &(impl Fn(&[u64]) -> Result<(), String> + Sync),
) -> Result<Rate, String> {
    let line = Line { missing: AtomicUsize::new(stations.len()), over: AtomicBool::new(false) };
    thread::scope(|scope| {
        let workers: Vec<_> = stations
            .iter()
            .map(|station| scope.spawn(|| line.work_behind(station, window, work)))
            .collect();
        let mut all = Rate { per_second: 0.0, undisturbed: true };
        for worker in workers {
            let rate = worker.join().map_err(|_| "a measuring thread panicked".to_string())??;
            all.per_second += rate.per_second;
            all.undisturbed &= rate.undisturbed;
        }
        Ok(all)
    })
}

/// Where the threads of a window start and end together.
struct Line {
    /// How many have not come yet.
    missing: AtomicUsize,
    /// Whether a thread has finished.
    over: AtomicBool,
}

impl Line {
    /// What one thread achieves.
    fn work_behind(
        &self,
        &(processor, order): &Station<'_>,
        window: Duration,
        work: &impl Fn(&[u64]) -> Result<(), String>,
    ) -> Result<Rate, String> {
        let settled = machine::stay_on(processor);
        // Once before the line, so that every thread is warm.
        let warm = settled.and_then(|()| work(order.get(..CHUNK).unwrap_or(order)));
        self.wait();
        // Behind the line, where no thread waits any more for one that fails.
        let rate = warm.and_then(|()| self.steadily(order, window, work));
        // Relaxed: a chunk more or less.
        self.over.store(true, Ordering::Relaxed);
        rate
    }

    /// Awake, because a thread that has to be woken would be late.
    fn wait(&self) {
        // Relaxed: nothing is handed over here.
        self.missing.fetch_sub(1, Ordering::Relaxed);
        while self.missing.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
    }

    /// Works on `order` again and again until the window is over.
    fn steadily(
        &self,
        order: &[u64],
        window: Duration,
        work: &impl Fn(&[u64]) -> Result<(), String>,
    ) -> Result<Rate, String> {
        let (lost, began) = (processor_lost(), Instant::now());
        let mut done = 0;
        for chunk in order.chunks(CHUNK).cycle() {
            work(chunk)?;
            done += chunk.len();
            // Relaxed: as in `work_behind`.
            if began.elapsed() >= window || self.over.load(Ordering::Relaxed) {
                break;
            }
        }
        let per_second = done as f64 / began.elapsed().as_secs_f64();
        Ok(Rate { per_second, undisturbed: processor_lost() == lost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn sides_take_turns_and_ratios_are_those_of_rounds() {
        let turns = RefCell::new(String::new());
        // Ours takes 1, 2, 3; the peer ten times as long, the warm-up left out.
        let mut ours = |round: usize| {
            turns.borrow_mut().push('o');
            Ok(round as f64)
        };
        let mut peer = |round: usize| {
            turns.borrow_mut().push('p');
            Ok(10.0 * round as f64)
        };
        let comparison = compare(3, &mut ours, Some(&mut peer)).unwrap();
        assert_eq!(*turns.borrow(), "oppooppo");
        assert_eq!((comparison.value, comparison.peer_value), (2.0, Some(20.0)));
        assert!((comparison.ratio.unwrap() - 0.1).abs() < 1e-9);
    }

    #[test]
    fn a_side_without_a_peer_has_no_ratio() {
        let comparison = compare(1, &mut |_| Ok(5.0), None).unwrap();
        assert_eq!((comparison.value, comparison.ratio), (5.0, None));
    }

    #[test]
    fn threads_are_counted_together_and_errors_come_back() {
        let processor = machine::processors().unwrap()[0];
        let stations = [(processor, &[1_u64][..]), (processor, &[2][..])];
        let both = throughput(&stations, Duration::from_millis(1), &|_| Ok(())).unwrap();
        assert!(both > 0.0);
        let wrong = throughput(&stations, Duration::from_secs(60), &|addresses| match addresses {
            [1] => Err("no".into()),
            _ => Ok(()),
        });
        assert_eq!(wrong, Err("no".into()));
    }
}
