//! How often caches would hit that are as simple as they are slow: what the real one is judged by.

use crate::traces::Region;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The hits of a cache of `capacity` regions that gives up the one whose last use is longest ago.
pub(crate) fn least_recent(trace: &[Region], capacity: usize) -> usize {
    let (mut uses, mut last) = (BTreeMap::new(), HashMap::new());
    let mut hits = 0;
    for (now, &region) in trace.iter().enumerate() {
        match last.insert(region, now) {
            Some(before) => {
                hits += 1;
                uses.remove(&before);
            }
            None if uses.len() == capacity => {
                let oldest = uses.pop_first();
                oldest.map(|(_, oldest)| last.remove(&oldest));
            }
            None => {}
        }
        uses.insert(now, region);
    }
    hits
}

/// The hits of one that knows the future and gives up what is needed last, or never (Belady). What
/// it has just got may be that: then it is not kept.
pub(crate) fn optimum(trace: &[Region], capacity: usize) -> usize {
    let next = next_uses(trace);
    // What is held, by its next use.
    let mut held: BTreeSet<(usize, Region)> = BTreeSet::new();
    let mut hits = 0;
    for (now, &region) in trace.iter().enumerate() {
        hits += usize::from(held.remove(&(now, region)));
        held.insert((next[now], region));
        if held.len() > capacity {
            held.pop_last();
        }
    }
    hits
}

/// For each access when the same region comes next; `usize::MAX` if never.
fn next_uses(trace: &[Region]) -> Vec<usize> {
    let mut seen = HashMap::new();
    let backwards = trace.iter().enumerate().rev();
    let mut next: Vec<usize> =
        backwards.map(|(now, &region)| seen.insert(region, now).unwrap_or(usize::MAX)).collect();
    next.reverse();
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    #[test]
    fn hits_counted_by_hand() {
        // Least recent use with room for two: 1 2 [1] 3 (2 goes) [1] 2 (3 goes) [1].
        assert_eq!(least_recent(&[1, 2, 1, 3, 1, 2, 1], 2), 3);
        // Knowing the future: 1 2 [1] 3 (not kept) [1] [2] [1].
        assert_eq!(optimum(&[1, 2, 1, 3, 1, 2, 1], 2), 4);
        // A loop over one more than fits: 1 2 3 (not kept) [1] [2] 3 [1] [2] 3.
        assert_eq!(least_recent(&[1, 2, 3, 1, 2, 3, 1, 2, 3], 2), 0);
        assert_eq!(optimum(&[1, 2, 3, 1, 2, 3, 1, 2, 3], 2), 4);
    }

    #[test]
    fn everything_hits_from_its_second_use_on_where_everything_fits() {
        let trace = [5, 6, 7, 5, 6, 7, 7];
        assert_eq!((least_recent(&trace, 3), optimum(&trace, 3)), (4, 4));
    }

    /// The best of all ways to give up one region or none at each miss, tried out.
    fn best_of_all(trace: &[Region], held: &mut Vec<Region>, capacity: usize) -> usize {
        let Some((&region, rest)) = trace.split_first() else { return 0 };
        if held.contains(&region) {
            return 1 + best_of_all(rest, held, capacity);
        }
        if held.len() < capacity {
            held.push(region);
            let best = best_of_all(rest, held, capacity);
            held.pop();
            return best;
        }
        let mut best = best_of_all(rest, held, capacity);
        for victim in 0..held.len() {
            let before = std::mem::replace(&mut held[victim], region);
            best = best.max(best_of_all(rest, held, capacity));
            held[victim] = before;
        }
        best
    }

    #[test]
    fn nothing_beats_the_optimum_and_the_optimum_can_be_reached() {
        let seed = fastrand::u64(..);
        eprintln!("seed {seed}");
        let mut random = Rng::with_seed(seed);
        for _ in 0..200 {
            let trace: Vec<Region> = (0..12).map(|_| random.u32(..5)).collect();
            let best = best_of_all(&trace, &mut Vec::new(), 2);
            assert_eq!(optimum(&trace, 2), best, "{trace:?}");
            assert!(least_recent(&trace, 2) <= best, "{trace:?}");
        }
    }
}
