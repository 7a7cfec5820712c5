//! Access traces: which region is asked for, one after the other, as programs do it. Each is made
//! from a seed and for a cache of a given capacity, because only their relation matters.

use fastrand::Rng;
use pinfold::listed;

/// A region's number.
pub(crate) type Region = u32;

listed! {
    /// A kind of trace.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Trace {
        /// Any of twice the capacity, each as likely.
        Uniform => "uniform",
        /// Of eight times the capacity, a few very often: the n-th in proportion to 1/n.
        Zipf => "zipf",
        /// Round and round through a tenth more than fits: least recent use never hits.
        Loop => "loop",
        /// Zipf over the capacity, and now and then a scan of what is used once and never again.
        Scans => "zipf and scans",
        /// Buffers of a message-passing program, in rings, one ring for each peer; now and then it
        /// sends all of a large array, the same one each time, piece by piece.
        Messages => "messages",
        /// Zipf over the capacity, then the same over other memory, and so on.
        Phases => "phases",
    }
}

impl Trace {
    /// The trace of `length` accesses for a cache of `capacity` regions.
    pub(crate) fn make(self, capacity: Region, length: usize, random: &mut Rng) -> Vec<Region> {
        match self {
            Self::Uniform => (0..length).map(|_| random.u32(..2 * capacity)).collect(),
            Self::Zipf => zipf(8 * capacity, length, random),
            Self::Loop => (0..capacity + capacity / 10).cycle().take(length).collect(),
            Self::Scans => scans(capacity, length, random),
            Self::Messages => messages(capacity, length, random),
            Self::Phases => phases(capacity, length, random),
        }
    }
}

/// The n-th of `regions` in proportion to 1/n.
fn zipf(regions: Region, length: usize, random: &mut Rng) -> Vec<Region> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=regions)
        .map(|n| {
            sum += 1.0 / f64::from(n);
            sum
        })
        .collect();
    let mut draw = || {
        let drawn = random.f64() * sum;
        let position = sums.partition_point(|&sum| sum <= drawn);
        Region::try_from(position).unwrap_or(regions).min(regions - 1)
    };
    (0..length).map(|_| draw()).collect()
}

/// A scan of twice the capacity behind every ten capacities of the rest.
fn scans(capacity: Region, length: usize, random: &mut Rng) -> Vec<Region> {
    let steady = zipf(capacity, length, random);
    let mut fresh = capacity..;
    let mut trace = Vec::with_capacity(length);
    for stretch in steady.chunks(10 * capacity as usize) {
        trace.extend(stretch);
        trace.extend(fresh.by_ref().take(2 * capacity as usize));
    }
    trace.truncate(length);
    trace
}

/// Eight peers' rings take half of the capacity, the array twice of it.
fn messages(capacity: Region, length: usize, random: &mut Rng) -> Vec<Region> {
    const PEERS: usize = 8;
    let slots = (capacity / 16).max(1);
    let array = capacity..3 * capacity;
    let mut heads = [0; PEERS];
    let mut trace = Vec::with_capacity(length);
    while trace.len() < length {
        for _ in 0..12 * capacity {
            let peer = random.usize(..PEERS);
            heads[peer] = (heads[peer] + 1) % slots;
            trace.extend(
                (0..).step_by(slots as usize).nth(peer).map(|ring: Region| ring + heads[peer]),
            );
        }
        trace.extend(array.clone());
    }
    trace.truncate(length);
    trace
}

/// Twenty capacities' worth of accesses in each phase.
fn phases(capacity: Region, length: usize, random: &mut Rng) -> Vec<Region> {
    let steady = zipf(capacity, length, random);
    let stretches = steady.chunks(20 * capacity as usize).zip(0..);
    stretches
        .flat_map(|(stretch, phase): (_, Region)| {
            stretch.iter().map(move |region| region + phase * capacity)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn made(trace: Trace) -> Vec<Region> {
        trace.make(100, 10_000, &mut Rng::with_seed(7))
    }

    #[test]
    fn the_same_seed_makes_the_same_trace_of_the_length_asked_for() {
        for trace in Trace::ALL {
            assert_eq!(made(trace), made(trace));
            assert_eq!(made(trace).len(), 10_000, "{trace:?}");
        }
    }

    #[test]
    fn every_trace_wants_more_than_fits() {
        for trace in Trace::ALL {
            let different: HashSet<Region> = made(trace).into_iter().collect();
            assert!(different.len() > 100, "{trace:?}");
        }
    }

    #[test]
    fn the_first_of_zipf_comes_twice_as_often_as_the_second() {
        let trace = zipf(10, 100_000, &mut Rng::with_seed(7));
        let count = |region| trace.iter().filter(|&&each| each == region).count() as f64;
        let ratio = count(0) / count(1);
        assert!((1.9..2.1).contains(&ratio), "{ratio}");
        assert!(count(9) > 0.0);
    }

    #[test]
    fn what_a_scan_touches_is_touched_once() {
        let trace = made(Trace::Scans);
        let scanned: Vec<&Region> = trace.iter().filter(|&&region| region >= 100).collect();
        assert!(scanned.len() > 200 && scanned.is_sorted_by(|one, next| one < next));
    }
}
