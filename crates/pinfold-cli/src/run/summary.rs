//! What the processes of a job report at their ends, added up.
//!
//! A rank's variables are inherited by the processes that it starts, and each process with them leaves a line as it
//! begins. A rank has reported when the first of them has, which the launcher has started; or one that registered memory:
//! then the first was a script that starts the program, and a shell may end by `_exit`, which leaves no report.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
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
    /// How many processes cache nothing, and why.
    off: BTreeMap<String, u64>,
    /// Lines of which a part is missing.
    torn: u64,
    /// How many ranks the job has, as its ranks know it; of several jobs the largest.
    ranks: Option<u64>,
    /// Those of which anything is known.
    ranks_began: u64,
    ranks_reported: u64,
    /// Processes of those ranks, and of smaller jobs, that began and did not.
    processes_unreported: u64,
    /// By the rank's number.
    by_rank: BTreeMap<u64, OfRank>,
    /// By the job's size and the rank's number. A launcher may be a rank itself, of a smaller job.
    #[serde(skip)]
    known: BTreeMap<(u64, u64), Processes>,
}

/// The processes with the variables of one rank, by their numbers.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
struct Processes {
    /// When, by their machine's clock.
    began: BTreeMap<u64, u64>,
    reported: BTreeSet<u64>,
    /// Whether one of those registered memory.
    registered: bool,
}

impl Processes {
    /// The one that the launcher has started.
    fn first(&self) -> Option<u64> {
        self.began.iter().min_by_key(|(_, at)| **at).map(|(&process, _)| process)
    }

    fn has_begun(&self) -> bool {
        self.registered || !self.began.is_empty()
    }

    fn has_reported(&self) -> bool {
        self.registered || self.first().is_some_and(|first| self.reported.contains(&first))
    }

    fn unreported(&self) -> u64 {
        self.began.keys().filter(|process| !self.reported.contains(process)).count() as u64
    }
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

/// The line that a process leaves, of its beginning or its end.
#[derive(Default, Debug, Deserialize)]
#[serde(default)]
struct Report {
    pid: u64,
    /// When, in nanoseconds of the machine's clock, if this is its beginning.
    began: Option<u64>,
    /// Why the process caches nothing; it leaves no other line.
    off: Option<String>,
    #[serde(flatten)]
    counts: Counts,
    not_kept: Vec<NotKept>,
    monitor: Option<String>,
    rank: Option<u64>,
    ranks: Option<u64>,
}

impl Summary {
    /// Of the lines that processes left.
    pub(super) fn of<'l>(lines: impl IntoIterator<Item = &'l str>) -> Self {
        let mut summary = Self::default();
        // A line begins with an end of line, so that no torn one is part of it.
        lines.into_iter().filter(|line| !line.is_empty()).for_each(|line| summary.add(line));
        let (reported, others): (Vec<_>, _) =
            summary.known.iter().partition(|(_, processes)| processes.has_reported());
        let of_job = |(of, _): &(u64, u64)| Some(*of) == summary.ranks;
        let began =
            others.iter().filter(|(rank, it)| of_job(rank) && it.has_begun()).count() as u64;
        summary.ranks_reported = reported.iter().filter(|(rank, _)| of_job(rank)).count() as u64;
        summary.ranks_began = summary.ranks_reported + began;
        summary.processes_unreported = reported.iter().map(|(_, it)| it.unreported()).sum();
        summary
    }

    fn add(&mut self, line: &str) {
        let Ok(report) = serde_json::from_str::<Report>(line) else {
            self.torn += 1;
            return;
        };
        self.note_process(&report);
        if let Some(why) = &report.off {
            *self.off.entry(why.clone()).or_default() += 1;
        }
        if report.began.is_none() {
            self.add_to_rank(&report);
            self.counts.add(&report.counts);
            report.not_kept.into_iter().for_each(|more| self.add_not_kept(more));
        }
        if report.counts.registered() {
            self.processes += 1;
            report.monitor.into_iter().for_each(|it| *self.monitors.entry(it).or_default() += 1);
        }
    }

    fn note_process(&mut self, report: &Report) {
        let (Some(rank), Some(of)) = (report.rank, report.ranks) else { return };
        self.ranks = self.ranks.max(Some(of));
        let known = self.known.entry((of, rank)).or_default();
        if let Some(at) = report.began {
            // A process that executes another program begins again.
            let began = known.began.entry(report.pid).or_insert(at);
            *began = at.min(*began);
        }
        if report.began.is_none() || report.off.is_some() {
            known.reported.insert(report.pid);
            known.registered |= report.counts.registered();
        }
    }

    fn add_to_rank(&mut self, report: &Report) {
        let Some(number) = report.rank else { return };
        let rank = self.by_rank.entry(number).or_default();
        rank.counts.add(&report.counts);
        if report.counts.registered() || rank.monitor.is_none() {
            rank.monitor.clone_from(&report.monitor);
        }
    }

    fn add_not_kept(&mut self, more: NotKept) {
        match self.not_kept.iter_mut().find(|known| known.why == more.why) {
            Some(known) => {
                known.registrations = known.registrations.saturating_add(more.registrations);
            }
            None => self.not_kept.push(more),
        }
    }

    /// The other ranks of its job have summaries of their own.
    pub(super) fn is_of_one_rank(&mut self) {
        self.ranks = None;
    }

    /// For people, in lines.
    pub(super) fn in_words(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.processes > 0 {
            lines.push(self.counts.in_words());
        } else if self.counts.bypassed == 0 {
            lines.extend(self.nothing_in_words().map(str::to_owned));
        }
        lines.extend(self.off.iter().map(|(why, count)| {
            format!("nothing is cached in {}: {why}", counted(*count, "process", "processes"))
        }));
        lines.extend((!self.not_kept.is_empty()).then(|| self.reasons_in_words()));
        lines.extend((!self.monitors.is_empty()).then(|| self.monitors_in_words()));
        lines.extend((self.counts.bypassed > 0).then(|| self.bypassed_in_words()));
        lines.extend((self.torn > 0).then(|| self.torn_in_words()));
        lines.extend(self.ranks_in_words());
        lines
    }

    /// What it means that no process registered memory; `None` where another line says why.
    fn nothing_in_words(&self) -> Option<&'static str> {
        match (self.ranks, self.ranks_reported) {
            _ if !self.off.is_empty() || self.torn > 0 => None,
            (None, _) => Some(NOTHING),
            (Some(_), 0) => None,
            (Some(of), reported) if reported == of && self.processes_unreported == 0 => {
                Some(NOTHING_BY_RANKS)
            }
            (Some(_), _) => Some(NOTHING_REPORTED),
        }
    }

    fn torn_in_words(&self) -> String {
        let torn = counted(self.torn, "report is", "reports are");
        format!(
            "{torn} torn, and not counted: the disk was full, or a limit of file sizes (ulimit -f) reached"
        )
    }

    fn bypassed_in_words(&self) -> String {
        let count = self.counts.bypassed;
        format!(
            "{count} registrations went past Pinfold, by a libibverbs that is linked statically or functions from a \
             private handle: they are not cached here, and what keeps them elsewhere may be stale"
        )
    }

    /// How many ranks are in the summary, and what is known of the others.
    fn ranks_in_words(&self) -> Option<String> {
        let (of, reported) = (self.ranks?, self.ranks_reported);
        let share = if reported == of { "all".into() } else { format!("{reported} of") };
        let mut words = format!("{share} {of} ranks reported");
        let missing = [
            (self.ranks_began - reported, "began and did not", UNREPORTED),
            (of.saturating_sub(self.ranks_began), "left nothing", ABSENT),
        ];
        for (count, what, why) in missing.into_iter().filter(|(count, ..)| *count > 0) {
            let _ = write!(words, "; {count} {what}: {why}");
        }
        if self.processes_unreported > 0 {
            let count = counted(self.processes_unreported, "process", "processes");
            let _ = write!(words, "; {count} of theirs did not: {UNREPORTED}");
        }
        Some(words)
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
                       killed, is linked statically, was started without these variables (sudo, a container, a batch \
                       queue), or takes libibverbs' functions from a private handle";

const NOTHING_BY_RANKS: &str = "the ranks registered no memory through Pinfold: they use no RDMA (shared memory, TCP), \
                                or drive the device past libibverbs (UCX_IB_MLX5_DEVX)";

const NOTHING_REPORTED: &str = "the processes that reported registered no memory through Pinfold";

const UNREPORTED: &str = "killed, ended by _exit (as some shells end), under a seccomp filter of their own, or without \
                          space for a report";

const ABSENT: &str = "they lack the library, or cannot open or write the summary's file (other machines need --reports \
                      DIRECTORY)";

fn counted(count: u64, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

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
    /// A file that others have written may have any numbers.
    fn add(&mut self, more: &Self) {
        let both = [
            (&mut self.gets, more.gets),
            (&mut self.hits, more.hits),
            (&mut self.misses, more.misses),
            (&mut self.regs, more.regs),
            (&mut self.deregs, more.deregs),
            (&mut self.invalidations, more.invalidations),
            (&mut self.per_use, more.per_use),
            (&mut self.evictions, more.evictions),
            (&mut self.passed, more.passed),
            (&mut self.bypassed, more.bypassed),
        ];
        both.into_iter().for_each(|(sum, more)| *sum = sum.saturating_add(more));
    }

    /// Whether libibverbs was asked for anything through the library.
    const fn registered(&self) -> bool {
        self.gets > 0 || self.passed > 0
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

    fn of(lines: &[&str]) -> Summary {
        Summary::of(lines.iter().copied())
    }

    #[test]
    fn processes_add_up() {
        let first = r#"{"pid":7,"gets":5,"hits":3,"misses":2,"regs":2,"deregs":2}"#;
        let summary = of(&["", first, "", r#"{"pid":8,"gets":1,"misses":1,"passed":4}"#]);
        let Counts { gets, hits, passed, .. } = summary.counts;
        assert_eq!((summary.processes, gets, hits, passed), (2, 6, 3, 4));
        let words = summary.in_words();
        assert!(words.len() == 1 && words[0].contains("3 found (50.0 %)"), "{words:?}");
        assert!(of(&[]).in_words()[0].contains("no process reported"));
    }

    #[test]
    fn a_torn_line_is_counted_and_told() {
        let summary = of(&[r#"{"pid":7,"gets":5}"#, r#"{"pid":8,"ge"#]);
        assert_eq!((summary.processes, summary.torn), (1, 1));
        assert!(summary.in_words()[1].starts_with("1 report is torn, "));
        let words = of(&["{", "}"]).in_words();
        assert!(words.len() == 1 && words[0].starts_with("2 reports are torn, "), "{words:?}");
    }

    #[test]
    fn numbers_that_no_process_counts_change_nothing_else() {
        let most = u64::MAX;
        let line = format!(
            r#"{{"gets":{most},"passed":{most},"not_kept":[{{"why":"x","change":null,"registrations":{most}}}]}}"#
        );
        let words = of(&[&line, &line, r#"{"gets":-1}"#]).in_words();
        assert!(words[0].starts_with(&format!("{most} registrations asked for")), "{words:?}");
        assert!(words[2].starts_with("1 report is torn, "), "{words:?}");
    }

    /// The lines of a rank of three, whose process begins at this time, and what it reports.
    fn began(rank: u64, process: u64) -> String {
        format!(r#"{{"pid":{process},"rank":{rank},"ranks":3,"began":{process}}}"#)
    }

    fn ended(rank: u64, process: u64, counts: &str) -> String {
        format!(r#"{{"pid":{process},{counts}"rank":{rank},"ranks":3}}"#)
    }

    #[test]
    fn ranks_that_are_missing_are_counted() {
        let counts =
            [r#""gets":4,"hits":2,"monitor":"userfaultfd","#, r#""gets":1,"monitor":"refused","#];
        let [first, last] = [(0, 1, counts[0]), (2, 3, counts[1])]
            .map(|(rank, process, counts)| [began(rank, process), ended(rank, process, counts)]);
        let lines = [&first[..], &last, &[ended(2, 4, r#""monitor":"not started","#)]].concat();
        let some = of(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let words = some.in_words();
        assert_eq!(
            words[1],
            "monitor of the processes: refused in 1 (rank 2), userfaultfd in 1 (rank 0)"
        );
        assert!(
            words[2].starts_with("2 of 3 ranks reported; 1 left nothing: ") && some.processes == 2,
            "{words:?}"
        );
        let lines = [&lines[..], &[began(1, 2)]].concat();
        let words = of(&lines.iter().map(String::as_str).collect::<Vec<_>>()).in_words();
        assert!(words[2].starts_with("2 of 3 ranks reported; 1 began and did not: "), "{words:?}");
        let lines = [&lines[..], &[ended(1, 2, "")]].concat();
        let all = of(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(all.in_words().last().unwrap(), "all 3 ranks reported");
        let json = serde_json::to_value(&all).unwrap();
        assert_eq!((&json["ranks"], &json["ranks_reported"]), (&3.into(), &3.into()));
        assert_eq!(json["by_rank"]["2"]["monitor"], "refused");
        assert_eq!(json["by_rank"]["0"]["hits"], 2);
    }

    #[test]
    fn a_rank_is_told_from_the_processes_that_it_starts() {
        // In files of their own, whose order says nothing; the rank's program executes another one.
        let [child, begun] = [ended(0, 9, ""), began(0, 9)];
        let again = r#"{"pid":5,"rank":0,"ranks":3,"began":20}"#;
        let rank = began(0, 5);
        let summary = of(&[&child, &begun, again, &rank]);
        assert_eq!((summary.ranks_began, summary.ranks_reported), (1, 0));
        assert_eq!(summary.processes_unreported, 0, "beside the rank");
        let summary = of(&[&begun, again, &rank, &ended(0, 5, "")]);
        assert_eq!((summary.ranks_reported, summary.processes_unreported), (1, 1));
        let words = summary.in_words();
        assert!(words[0].starts_with("the processes that reported registered no memory"));
        assert!(words[1].contains("; 1 process of theirs did not: killed, "), "{words:?}");
        // What the launcher started is a shell, and its child the program.
        let summary = of(&[&ended(0, 9, r#""gets":1,"#), &begun, &rank]);
        assert_eq!((summary.ranks_began, summary.ranks_reported), (1, 1));
        assert_eq!(summary.processes_unreported, 1);
    }

    #[test]
    fn a_launcher_that_is_a_rank_of_a_step_is_none_of_its_job() {
        let launcher = r#"{"pid":1,"rank":0,"ranks":1,"began":1}"#;
        let ended = r#"{"pid":1,"rank":0,"ranks":1}"#;
        let summary = of(&[launcher, &began(0, 2), ended]);
        assert_eq!((summary.ranks_began, summary.ranks_reported), (1, 0));
    }

    #[test]
    fn a_job_that_registered_nothing_here_says_what_that_means() {
        let lines = [0, 1, 2].map(|rank| [began(rank, rank), ended(rank, rank, "")]).concat();
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let words = of(&lines).in_words();
        assert!(words[0].starts_with("the ranks registered no memory"), "{words:?}");
        let words = of(&lines[..3]).in_words();
        assert!(
            words[0].starts_with("the processes that reported registered no memory"),
            "{words:?}"
        );
        let words = of(&lines[..1]).in_words();
        assert!(words.len() == 1 && words[0].starts_with("0 of 3 ranks reported; 1 began and "));
        let past = ended(0, 0, r#""bypassed":7,"#);
        let words = of(&[lines[0], &past]).in_words();
        assert!(words[0].starts_with("7 registrations went past Pinfold"), "{words:?}");
        assert!(words[1].starts_with("1 of 3 ranks reported; 2 left nothing: "), "{words:?}");
    }

    #[test]
    fn a_cache_that_is_off_is_what_nothing_means() {
        let off = r#"{"pid":1,"off":"PINFOLD_CACHE=off","began":1}"#;
        let said = "nothing is cached in 1 process: PINFOLD_CACHE=off";
        assert_eq!(of(&[off]).in_words(), [said]);
        let rank = r#"{"pid":1,"rank":0,"ranks":1,"off":"PINFOLD_CACHE=off","began":1}"#;
        assert_eq!(of(&[rank]).in_words(), [said, "all 1 ranks reported"]);
    }

    #[test]
    fn numbers_in_a_row_are_one_span() {
        assert_eq!(spans(&[0, 1, 2, 3, 5, 8, 9]), "0-3,5,8-9");
        assert_eq!((spans(&[7]).as_str(), spans(&[]).as_str()), ("7", ""));
    }

    #[test]
    fn reasons_and_monitors_add_up() {
        let summary = of(&[
            r#"{"passed":2,"per_use":1,"monitor":"userfaultfd","not_kept":[
                {"why":"memory that was changing","change":null,"registrations":1},
                {"why":"rights for peers","change":"PINFOLD_CACHE_REMOTE=on","registrations":2}]}"#,
            r#"{"passed":5,"monitor":"not started","not_kept":[
                {"why":"rights for peers","change":"PINFOLD_CACHE_REMOTE=on","registrations":5}]}"#,
        ]);
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
