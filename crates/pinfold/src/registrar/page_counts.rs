//! How many registrations cover each page, as runs of pages with the same count.
//!
//! Locks do not nest in the kernel, so they are counted here. The map holds one entry per run, not
//! per page: at most two per registration and one more, whatever their lengths.

use pinfold_core::AddressRange;
use std::collections::BTreeMap;

/// Pages covered by the same number of registrations, one at least.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    /// The first address behind the run.
    end: usize,
    count: usize,
}

/// The counts. Ranges passed in begin and end where pages do; nothing else is assumed of a page.
#[derive(Default, Debug)]
pub(super) struct PageCounts {
    /// Runs by their first address: disjoint, and neighbours that touch differ in their counts.
    runs: BTreeMap<usize, Run>,
}

impl PageCounts {
    /// The parts of `range` that no registration covers.
    pub(super) fn uncovered(&self, range: AddressRange) -> Vec<AddressRange> {
        let mut gaps = Vec::new();
        let mut next = range.start();
        let before = self.runs.range(..range.start()).next_back();
        for (&start, run) in before.into_iter().chain(self.runs.range(range.start()..range.end())) {
            gaps.extend(AddressRange::between(next, start));
            next = next.max(run.end);
        }
        gaps.extend(AddressRange::between(next, range.end()));
        gaps
    }

    /// Counts a registration of `range`.
    pub(super) fn add(&mut self, range: AddressRange) {
        let gaps = self.uncovered(range);
        self.split_around(range);
        for (_, run) in self.runs.range_mut(range.start()..range.end()) {
            run.count += 1;
        }
        for gap in gaps {
            self.runs.insert(gap.start(), Run { end: gap.end(), count: 1 });
        }
        self.join_around(range);
    }

    /// Takes a registration of `range` away again; the parts that it was the last to cover.
    pub(super) fn remove(&mut self, range: AddressRange) -> Vec<AddressRange> {
        self.split_around(range);
        let mut last = Vec::new();
        for (&start, run) in self.runs.range_mut(range.start()..range.end()) {
            run.count -= 1;
            if run.count == 0 {
                last.extend(AddressRange::between(start, run.end));
            }
        }
        for run in &last {
            self.runs.remove(&run.start());
        }
        self.join_around(range);
        last
    }

    /// Everything that is covered, once; nothing is afterwards.
    pub(super) fn drain(&mut self) -> Vec<AddressRange> {
        let runs = std::mem::take(&mut self.runs);
        runs.iter().filter_map(|(&start, run)| AddressRange::between(start, run.end)).collect()
    }

    fn split_around(&mut self, range: AddressRange) {
        self.split(range.start());
        self.split(range.end());
    }

    /// Sees to it that no run crosses `at`.
    fn split(&mut self, at: usize) {
        let Some((_, run)) = self.runs.range_mut(..at).next_back() else { return };
        if run.end > at {
            let tail = *run;
            run.end = at;
            self.runs.insert(at, tail);
        }
    }

    /// Makes one of neighbours with the same count, wherever `range` may have made some.
    fn join_around(&mut self, range: AddressRange) {
        let starts: Vec<_> =
            self.runs.range(range.start()..=range.end()).map(|(&s, _)| s).collect();
        for start in starts {
            self.join(start);
        }
    }

    /// Makes one of the run that begins at `start` and the one before it, if they touch and agree.
    fn join(&mut self, start: usize) {
        let Some(&run) = self.runs.get(&start) else { return };
        let Some((_, before)) = self.runs.range_mut(..start).next_back() else { return };
        if before.end == start && before.count == run.count {
            before.end = run.end;
            self.runs.remove(&start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One entry per page: nothing to get wrong.
    #[derive(Default)]
    struct Naive([usize; Naive::PAGES]);

    impl Naive {
        const PAGES: usize = 24;

        fn pages(&self, wanted: impl Fn(usize) -> bool) -> Vec<usize> {
            (0..Self::PAGES).filter(|&page| wanted(self.0[page])).collect()
        }
    }

    /// Pages as addresses: page 0 is address 1, and a page is one address long.
    fn range(first: usize, count: usize) -> AddressRange {
        AddressRange::new(first + 1, count).unwrap()
    }

    fn pages(ranges: &[AddressRange]) -> Vec<usize> {
        ranges.iter().flat_map(|r| r.start() - 1..r.end() - 1).collect()
    }

    fn check_shape(counts: &PageCounts) {
        let runs: Vec<_> = counts.runs.iter().collect();
        assert!(runs.iter().all(|(start, run)| **start < run.end && run.count > 0));
        for pair in runs.windows(2) {
            let ((_, left), (right_start, right)) = (pair[0], pair[1]);
            assert!(left.end <= *right_start, "runs overlap: {runs:?}");
            assert!(left.end < *right_start || left.count != right.count, "not joined: {runs:?}");
        }
    }

    proptest! {
        #[test]
        fn counts_like_one_counter_per_page(
            steps in prop::collection::vec((0..Naive::PAGES, 1..9_usize, any::<bool>(), any::<prop::sample::Index>()), 1..60)
        ) {
            let (mut counts, mut naive, mut live) = (PageCounts::default(), Naive::default(), Vec::new());
            for (first, length, add, which) in steps {
                if add || live.is_empty() {
                    let length = length.min(Naive::PAGES - first);
                    let gaps = pages(&counts.uncovered(range(first, length)));
                    let expected: Vec<_> = naive.pages(|count| count == 0)
                        .into_iter().filter(|page| (first..first + length).contains(page)).collect();
                    prop_assert_eq!(gaps, expected);
                    counts.add(range(first, length));
                    naive.0[first..first + length].iter_mut().for_each(|count| *count += 1);
                    live.push((first, length));
                } else {
                    let (first, length) = live.swap_remove(which.index(live.len()));
                    let expected: Vec<_> = (first..first + length).filter(|&p| naive.0[p] == 1).collect();
                    naive.0[first..first + length].iter_mut().for_each(|count| *count -= 1);
                    prop_assert_eq!(pages(&counts.remove(range(first, length))), expected);
                }
                check_shape(&counts);
                prop_assert!(counts.runs.len() <= 2 * live.len() + 1);
            }
            prop_assert_eq!(pages(&counts.drain()), naive.pages(|count| count > 0));
            prop_assert!(counts.runs.is_empty());
        }
    }

    #[test]
    fn a_page_in_the_middle_leaves_its_neighbours() {
        let mut counts = PageCounts::default();
        counts.add(range(0, 10));
        counts.add(range(4, 1));
        assert_eq!(pages(&counts.remove(range(0, 10))), [0, 1, 2, 3, 5, 6, 7, 8, 9]);
        assert_eq!(pages(&counts.remove(range(4, 1))), [4]);
        assert!(counts.runs.is_empty());
    }
}
