//! What the threads of `pinfold torture` have counted.

use super::journal::Row;
use super::program::Operation;
use super::weather::WeatherReport;
use crate::port::Parted;
use crate::races::Stop;
use pinfold::AddressRange;
use pinfold::landing::Landed;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// How many wrong transfers are described in full.
const DESCRIBED: usize = 16;

/// What became of the operations of one kind.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(super) struct Count {
    /// Carried out and, where there is something to judge, judged.
    pub(super) done: u64,
    /// Refused by the machine or the cache: a limit, an address taken by another thread.
    pub(super) refused: u64,
    /// Moved wrong data.
    pub(super) wrong: u64,
    /// What all of them took, in seconds of one thread each.
    pub(super) seconds: f64,
}

/// A transfer that moved wrong data.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Wrong {
    pub(super) thread: usize,
    /// The operation's place in the thread's program.
    pub(super) step: u64,
    pub(super) operation: String,
    /// What was moved.
    pub(super) range: String,
    /// The first wrong byte, counted from the start of the range.
    pub(super) first_wrong: usize,
    pub(super) note: Cow<'static, str>,
}

/// Wrong bytes, before it is known whose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct WrongBytes {
    pub(super) range: AddressRange,
    pub(super) first: usize,
    pub(super) note: Cow<'static, str>,
}

/// What an operation that was carried out found.
pub(super) type Judged = Result<Option<WrongBytes>, Stop>;

/// How the messages of one thread, or of all, have landed.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(super) struct LandingTally {
    /// Messages that got to their targets.
    pub(super) landed: u64,
    pub(super) exchanged_bytes: u64,
    pub(super) copied_bytes: u64,
    /// Messages whose pages were exchanged before the data was there.
    pub(super) early: u64,
    /// Refused because the target had changed.
    pub(super) target_changed: u64,
    /// Where the monitor could not tell whether it had; the program could, and vouched for it.
    pub(super) vouched: u64,
    /// Copied although pages were to be exchanged.
    pub(super) copied_instead: u64,
}

impl LandingTally {
    pub(super) fn add(&mut self, other: Self) {
        self.landed += other.landed;
        self.exchanged_bytes += other.exchanged_bytes;
        self.copied_bytes += other.copied_bytes;
        self.early += other.early;
        self.target_changed += other.target_changed;
        self.vouched += other.vouched;
        self.copied_instead += other.copied_instead;
    }

    pub(super) fn count(&mut self, landed: Landed) {
        self.landed += 1;
        self.exchanged_bytes += landed.moved_bytes as u64;
        self.copied_bytes += landed.copied_bytes as u64;
        self.copied_instead += u64::from(landed.copied_because.is_some());
    }
}

impl fmt::Display for LandingTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "landing: {} messages, {} bytes exchanged ({} times before the data was there), {} \
             copied; {} refused because the target had changed",
            self.landed, self.exchanged_bytes, self.early, self.copied_bytes, self.target_changed
        )
    }
}

/// What forked children did, which is in no other count.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(super) struct Children {
    processes: u64,
    operations: u64,
    transfers: u64,
}

impl Children {
    /// Adds a child that came to its end, by its last row.
    pub(super) fn add(&mut self, row: Row) {
        self.processes += 1;
        self.operations += row.step;
        self.transfers += row.transfers;
    }
}

/// One thread's counts, or all threads'.
#[derive(Clone, Default, Debug)]
pub(super) struct Tally {
    pub(super) operations: u64,
    pub(super) transfers: u64,
    pub(super) kinds: BTreeMap<&'static str, Count>,
    /// Why operations were refused, and how often.
    pub(super) reasons: BTreeMap<String, u64>,
    pub(super) wrong: u64,
    pub(super) landing: LandingTally,
    pub(super) children: Children,
    pub(super) weather: Option<WeatherReport>,
    pub(super) described: Vec<Wrong>,
}

impl Tally {
    /// Counts an operation that was carried out.
    pub(super) fn done(
        &mut self,
        thread: usize,
        step: u64,
        operation: &Operation,
        wrong: Option<WrongBytes>,
    ) {
        self.operations += 1;
        let count = self.kinds.entry(operation.kind()).or_default();
        count.done += 1;
        if let Some(WrongBytes { range, first, note }) = wrong {
            count.wrong += 1;
            self.wrong += 1;
            let (operation, range) = (format!("{operation:?}"), range.to_string());
            self.describe(Wrong { thread, step, operation, range, first_wrong: first, note });
        }
    }

    /// Adds the time that an operation took.
    pub(super) fn took(&mut self, operation: &Operation, time: Duration) {
        self.kinds.entry(operation.kind()).or_default().seconds += time.as_secs_f64();
    }

    /// Counts pages that a registration has and that are no longer behind their addresses: as wrong, whatever the bytes
    /// were.
    pub(super) fn parted(
        &mut self,
        thread: usize,
        step: u64,
        operation: &Operation,
        parted: Parted,
    ) {
        self.wrong += 1;
        self.kinds.entry(operation.kind()).or_default().wrong += 1;
        let (operation, range) = (format!("{operation:?}"), parted.range.to_string());
        self.describe(Wrong {
            thread,
            step,
            operation,
            range,
            first_wrong: parted.offset,
            note: parted.note.into(),
        });
    }

    /// Counts an operation that could not be carried out.
    pub(super) fn refused(&mut self, operation: &Operation, why: &Stop) {
        self.operations += 1;
        *self.reasons.entry(why.reason()).or_default() += 1;
        self.kinds.entry(operation.kind()).or_default().refused += 1;
    }

    fn describe(&mut self, wrong: Wrong) {
        if self.described.len() < DESCRIBED {
            self.described.push(wrong);
        }
    }

    /// Adds another thread's counts.
    pub(super) fn add(&mut self, other: Self) {
        self.operations += other.operations;
        self.transfers += other.transfers;
        self.wrong += other.wrong;
        self.landing.add(other.landing);
        self.children.processes += other.children.processes;
        self.children.operations += other.children.operations;
        self.children.transfers += other.children.transfers;
        for (reason, count) in other.reasons {
            *self.reasons.entry(reason).or_default() += count;
        }
        for (kind, count) in other.kinds {
            let sum = self.kinds.entry(kind).or_default();
            sum.done += count.done;
            sum.refused += count.refused;
            sum.wrong += count.wrong;
            sum.seconds += count.seconds;
        }
        other.described.into_iter().for_each(|wrong| self.describe(wrong));
    }
}
