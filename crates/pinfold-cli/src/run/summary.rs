//! What the processes of a job report at their ends, added up.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// What the caches of all processes did together; the summary's JSON object.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub(super) struct Summary {
    /// Processes that registered memory and exited in an orderly way.
    pub(super) processes: u64,
    #[serde(flatten)]
    counts: Counts,
    /// Those of `per_use` and `passed`, by their reasons.
    not_kept: Vec<NotKept>,
    /// How many processes had which monitor.
    monitors: BTreeMap<String, u64>,
    /// How many ranks the job has, as its ranks know it; of several jobs the largest.
    ranks: Option<u64>,
    ranks_reported: u64,
    /// By the rank's number.
    by_rank: BTreeMap<u64, OfRank>,
}

/// What the processes of one rank did.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
struct OfRank {
    #[serde(flatten)]
    counts: Counts,
    /// Of the last process that registered memory.
    monitor: Option<String>,
}

/// Of one process, or of all.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(default)]
struct Counts {
    gets: u64,
    hits: u64,
    misses: u64,
    regs: u64,
    deregs: u64,
    invalidations: u64,
    per_use: u64,
    evictions: u64,
    passed: u64,
    /// Registrations that went past the library.
    bypassed: u64,
}

/// Registrations that were not kept for one reason.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct NotKept {
    why: String,
    /// The variable with its value, or the program, that has them kept.
    change: Option<String>,
    registrations: u64,
}

/// The line that a process leaves.
#[derive(Default, Debug, Deserialize)]
#[serde(default)]
struct Report {
    #[serde(flatten)]
    counts: Counts,
    not_kept: Vec<NotKept>,
    monitor: Option<String>,
    rank: Option<u64>,
    ranks: Option<u64>,
}

impl Summary {
    /// Adds a line that a process left; what is no such line counts as nothing.
    pub(super) fn add(&mut self, line: &str) {
        let Ok(report) = serde_json::from_str::<Report>(line) else { return };
        self.add_to_rank(&report);
        self.counts.add(&report.counts);
        report.not_kept.into_iter().for_each(|more| self.add_not_kept(more));
        if report.counts.registered() {
            self.processes += 1;
            report.monitor.into_iter().for_each(|it| *self.monitors.entry(it).or_default() += 1);
        }
    }

    fn add_to_rank(&mut self, report: &Report) {
        let Some(number) = report.rank else { return };
        self.ranks = self.ranks.max(report.ranks);
        let rank = self.by_rank.entry(number).or_default();
        rank.counts.add(&report.counts);
        if report.counts.registered() || rank.monitor.is_none() {
            rank.monitor.clone_from(&report.monitor);
        }
        self.ranks_reported = self.by_rank.len() as u64;
    }

    fn add_not_kept(&mut self, more: NotKept) {
        match self.not_kept.iter_mut().find(|known| known.why == more.why) {
            Some(known) => known.registrations += more.registrations,
            None => self.not_kept.push(more),
        }
    }

    /// For people, in lines.
    pub(super) fn in_words(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.processes > 0 {
            lines.push(self.counts.in_words());
        } else if self.counts.bypassed == 0 {
            lines.push(if self.ranks_reported > 0 { NOTHING_BY_RANKS } else { NOTHING }.into());
        }
        lines.extend((!self.not_kept.is_empty()).then(|| self.reasons_in_words()));
        lines.extend((!self.monitors.is_empty()).then(|| self.monitors_in_words()));
        lines.extend((self.counts.bypassed > 0).then(|| self.bypassed_in_words()));
        lines.extend(self.ranks_in_words());
        lines
    }

    fn bypassed_in_words(&self) -> String {
        let count = self.counts.bypassed;
        format!(
            "{count} registrations went past Pinfold, by a libibverbs that is linked statically or functions from a \
             private handle: they are not cached here, and what keeps them elsewhere may be stale"
        )
    }

    /// How many ranks are in the summary, where the job is one of several.
    fn ranks_in_words(&self) -> Option<String> {
        let (of, reported) = (self.ranks?, self.ranks_reported);
        Some(if reported < of {
            format!(
                "{reported} of {of} ranks reported; the others were killed, lack the library, or cannot open the \
                 summary's file (other machines need --reports DIRECTORY)"
            )
        } else {
            format!("all {of} ranks reported")
        })
    }

    /// The most frequent first.
    fn reasons_in_words(&self) -> String {
        let mut reasons: Vec<_> = self.not_kept.iter().collect();
        reasons.sort_by_key(|reason| std::cmp::Reverse(reason.registrations));
        let reasons: Vec<_> = reasons.into_iter().map(NotKept::in_words).collect();
        format!("not kept: {}", reasons.join("; "))
    }

    /// Those that registered memory with this monitor.
    fn ranks_with(&self, monitor: &str) -> Vec<u64> {
        let has_it = |of: &OfRank| of.counts.registered() && of.monitor.as_deref() == Some(monitor);
        self.by_rank.iter().filter(|(_, of)| has_it(of)).map(|(&rank, _)| rank).collect()
    }

    fn monitors_in_words(&self) -> String {
        let each = |(name, count): (&String, &u64)| match self.ranks_with(name) {
            ranks if ranks.is_empty() => format!("{name} in {count}"),
            ranks if ranks.len() == 1 => format!("{name} in {count} (rank {})", spans(&ranks)),
            ranks => format!("{name} in {count} (ranks {})", spans(&ranks)),
        };
        let monitors: Vec<_> = self.monitors.iter().map(each).collect();
        format!("monitor of the processes: {}", monitors.join(", "))
    }
}

const NOTHING: &str = "no process reported that it registered memory through Pinfold: the program uses no RDMA, was \
                       killed, is linked statically, or takes libibverbs' functions from a private handle";

const NOTHING_BY_RANKS: &str = "the ranks registered no memory through Pinfold: they use no RDMA (shared memory, TCP), \
                                or drive the device past libibverbs (UCX_IB_MLX5_DEVX)";

/// Ascending numbers as `0-3,5`.
fn spans(numbers: &[u64]) -> String {
    let mut spans: Vec<[u64; 2]> = Vec::new();
    for &number in numbers {
        match spans.last_mut() {
            Some([_, last]) if *last + 1 == number => *last = number,
            _ => spans.push([number; 2]),
        }
    }
    let span = |[first, last]: &[u64; 2]| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    };
    spans.iter().map(span).collect::<Vec<_>>().join(",")
}

impl Counts {
    fn add(&mut self, more: &Self) {
        self.gets += more.gets;
        self.hits += more.hits;
        self.misses += more.misses;
        self.regs += more.regs;
        self.deregs += more.deregs;
        self.invalidations += more.invalidations;
        self.per_use += more.per_use;
        self.evictions += more.evictions;
        self.passed += more.passed;
        self.bypassed += more.bypassed;
    }

    /// Whether libibverbs was asked for anything through the library.
    const fn registered(&self) -> bool {
        self.gets + self.passed > 0
    }

    fn in_words(&self) -> String {
        let Self { gets, hits, misses, regs, invalidations, per_use, passed, .. } = self;
        let share = if *gets == 0 { 0.0 } else { 100.0 * *hits as f64 / *gets as f64 };
        format!(
            "{gets} registrations asked for, {hits} found ({share:.1} %), {misses} not; {regs} made \
             ({per_use} for one use), {invalidations} invalidated by changes of mappings; {passed} \
             passed through to libibverbs"
        )
    }
}

impl NotKept {
    fn in_words(&self) -> String {
        let mut words = format!("{} for {}", self.registrations, self.why);
        if let Some(change) = &self.change {
            let _ = write!(words, " (changed by {change})");
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_add_up_and_other_lines_are_nothing() {
        let mut summary = Summary::default();
        summary.add(r#"{"pid":7,"gets":5,"hits":3,"misses":2,"regs":2,"deregs":2}"#);
        summary.add(r#"{"pid":8,"gets":1,"misses":1,"passed":4}"#);
        summary.add("torn");
        let Counts { gets, hits, passed, .. } = summary.counts;
        assert_eq!((summary.processes, gets, hits, passed), (2, 6, 3, 4));
        let words = summary.in_words();
        assert!(words.len() == 1 && words[0].contains("3 found (50.0 %)"), "{words:?}");
        assert!(Summary::default().in_words()[0].contains("no process reported"));
    }

    fn of(lines: &[&str]) -> Summary {
        let mut summary = Summary::default();
        lines.iter().for_each(|line| summary.add(line));
        summary
    }

    #[test]
    fn ranks_that_are_missing_are_counted() {
        let [first, second] = [
            r#"{"gets":4,"hits":2,"monitor":"userfaultfd","rank":0,"ranks":3}"#,
            r#"{"gets":1,"monitor":"refused","rank":2,"ranks":3}"#,
        ];
        let some = of(&[first, second, r#"{"rank":2,"ranks":3,"monitor":"not started"}"#]);
        let words = some.in_words();
        assert_eq!(
            words[1],
            "monitor of the processes: refused in 1 (rank 2), userfaultfd in 1 (rank 0)"
        );
        assert!(
            words[2].starts_with("2 of 3 ranks reported; ") && some.processes == 2,
            "{words:?}"
        );
        let all = of(&[first, second, r#"{"rank":1,"ranks":3}"#]);
        assert_eq!(all.in_words().last().unwrap(), "all 3 ranks reported");
        let json = serde_json::to_value(&all).unwrap();
        assert_eq!((&json["ranks"], &json["ranks_reported"]), (&3.into(), &3.into()));
        assert_eq!(json["by_rank"]["2"]["monitor"], "refused");
        assert_eq!(json["by_rank"]["0"]["hits"], 2);
    }

    #[test]
    fn a_job_that_registered_nothing_here_says_what_that_means() {
        let shared = of(&[r#"{"rank":0,"ranks":1,"monitor":"not started"}"#]);
        assert!(shared.in_words()[0].contains("the ranks registered no memory"));
        let past = of(&[r#"{"rank":0,"ranks":2,"bypassed":7,"monitor":"not started"}"#]);
        let words = past.in_words();
        assert!(words[0].starts_with("7 registrations went past Pinfold"), "{words:?}");
        assert!(words[1].starts_with("1 of 2 ranks reported") && past.processes == 0);
    }

    #[test]
    fn numbers_in_a_row_are_one_span() {
        assert_eq!(spans(&[0, 1, 2, 3, 5, 8, 9]), "0-3,5,8-9");
        assert_eq!((spans(&[7]).as_str(), spans(&[]).as_str()), ("7", ""));
    }

    #[test]
    fn reasons_and_monitors_add_up() {
        let mut summary = Summary::default();
        summary.add(
            r#"{"passed":2,"per_use":1,"monitor":"userfaultfd","not_kept":[
                {"why":"memory that was changing","change":null,"registrations":1},
                {"why":"rights for peers","change":"PINFOLD_CACHE_REMOTE=on","registrations":2}]}"#,
        );
        summary.add(
            r#"{"passed":5,"monitor":"not started","not_kept":[
                {"why":"rights for peers","change":"PINFOLD_CACHE_REMOTE=on","registrations":5}]}"#,
        );
        let words = summary.in_words();
        assert_eq!(
            words[1],
            "not kept: 7 for rights for peers (changed by PINFOLD_CACHE_REMOTE=on); \
             1 for memory that was changing"
        );
        assert_eq!(words[2], "monitor of the processes: not started in 1, userfaultfd in 1");
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!((&json["passed"], &json["per_use"]), (&7.into(), &1.into()));
        assert_eq!(json["not_kept"][1]["registrations"], 7);
        assert_eq!(json["monitors"]["userfaultfd"], 1);
    }
}
