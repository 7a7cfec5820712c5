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
}

impl Summary {
    /// Adds a line that a process left; what is no such line counts as nothing.
    pub(super) fn add(&mut self, line: &str) {
        let Ok(report) = serde_json::from_str::<Report>(line) else { return };
        self.processes += 1;
        self.counts.add(&report.counts);
        report.not_kept.into_iter().for_each(|more| self.add_not_kept(more));
        if let Some(monitor) = report.monitor {
            *self.monitors.entry(monitor).or_default() += 1;
        }
    }

    fn add_not_kept(&mut self, more: NotKept) {
        match self.not_kept.iter_mut().find(|known| known.why == more.why) {
            Some(known) => known.registrations += more.registrations,
            None => self.not_kept.push(more),
        }
    }

    /// For people, in lines.
    pub(super) fn in_words(&self) -> Vec<String> {
        if self.processes == 0 {
            return vec![NOTHING.into()];
        }
        let mut lines = vec![self.counts.in_words()];
        lines.extend((!self.not_kept.is_empty()).then(|| self.reasons_in_words()));
        lines.extend((!self.monitors.is_empty()).then(|| self.monitors_in_words()));
        lines
    }

    /// The most frequent first.
    fn reasons_in_words(&self) -> String {
        let mut reasons: Vec<_> = self.not_kept.iter().collect();
        reasons.sort_by_key(|reason| std::cmp::Reverse(reason.registrations));
        let reasons: Vec<_> = reasons.into_iter().map(NotKept::in_words).collect();
        format!("not kept: {}", reasons.join("; "))
    }

    fn monitors_in_words(&self) -> String {
        let each = |(name, count): (&String, &u64)| format!("{name} in {count}");
        let monitors: Vec<_> = self.monitors.iter().map(each).collect();
        format!("monitor of the processes: {}", monitors.join(", "))
    }
}

const NOTHING: &str = "the program registered no memory through Pinfold (or was killed, or takes libibverbs' \
                       functions from a handle of its own)";

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
        assert!(Summary::default().in_words()[0].contains("no memory"));
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
