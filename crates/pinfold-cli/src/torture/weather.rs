//! What the kernel does to memory by itself, done all the time: reclaim, merging of equal pages,
//! compaction, huge pages, migration, pages taken out of use.
//!
//! None of it may part a registered page from its address unnoticed, and none changes a byte; so it
//! is done to any mapping of the process, whichever thread it belongs to. What this machine or this
//! user may not do is refused and counted.

use crate::change::{Advice, advise_harmlessly, migrate};
use fastrand::Rng;
use pinfold::AddressRange;
use pinfold::mappings::mappings_in;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// How many pages a trial may take out of use for good: the machine does not get them back before
/// it is booted again.
const OFFLINE: u32 = 16;

/// After this many advices comes something that concerns the whole machine.
const WIDE_EVERY: u32 = 512;

/// After this many the mappings are looked up again.
const LOOK_EVERY: u32 = 16;

/// The rest between two advices.
const REST: Duration = Duration::from_micros(200);

const KSM: &str = "/sys/kernel/mm/ksm/run";

/// How often something was done and refused.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(super) struct Tried {
    done: u64,
    refused: u64,
}

/// What was done, by its name.
pub(super) type WeatherReport = BTreeMap<&'static str, Tried>;

/// Makes weather until `over`.
pub(super) fn blow(seed: u64, over: &AtomicBool) -> WeatherReport {
    let mut weather = Weather {
        rng: Rng::with_seed(seed),
        offlined: 0,
        mappings: Vec::new(),
        report: BTreeMap::new(),
    };
    let ksm = fs::read_to_string(KSM);
    weather.count("KSM switched on", fs::write(KSM, "1").is_ok());
    let mut turn = 0_u32;
    // Relaxed: a flag that guards no data.
    while !over.load(Ordering::Relaxed) {
        if turn.is_multiple_of(LOOK_EVERY) {
            weather.look();
        }
        turn = turn.wrapping_add(1);
        if turn.is_multiple_of(WIDE_EVERY) {
            weather.machine_wide();
        } else {
            weather.advise();
        }
        thread::sleep(REST);
    }
    if let Ok(before) = ksm {
        let _ = fs::write(KSM, before.trim());
    }
    weather.report
}

struct Weather {
    rng: Rng,
    offlined: u32,
    /// The process's mappings, as they were a while ago.
    mappings: Vec<AddressRange>,
    report: WeatherReport,
}

impl Weather {
    fn count(&mut self, what: &'static str, done: bool) {
        let tried = self.report.entry(what).or_default();
        if done {
            tried.done += 1;
        } else {
            tried.refused += 1;
        }
    }

    fn look(&mut self) {
        // With no descriptor left, what was there before serves as well.
        if let Ok(mappings) = mappings_in(AddressRange::EVERYTHING) {
            self.mappings = mappings.iter().map(|mapping| mapping.range).collect();
        }
    }

    fn machine_wide(&mut self) {
        match self.rng.u32(..3) {
            0 => {
                let written = fs::write("/proc/sys/vm/compact_memory", "1");
                self.count("compaction", written.is_ok());
            }
            1 => self.count("drop_caches", fs::write("/proc/sys/vm/drop_caches", "1").is_ok()),
            _ => {
                let to = self.rng.usize(..2);
                self.count("migration to another node", migrate(1 - to, to));
            }
        }
    }

    /// Something for a part of any mapping, which may be gone by then.
    fn advise(&mut self) {
        let advice = Advice::HARMLESS[self.rng.usize(..Advice::HARMLESS.len())];
        if advice == Advice::SOFT_OFFLINE && self.offlined >= OFFLINE {
            return;
        }
        let Some(range) = self.any_range(advice.longest()) else { return };
        let done = advise_harmlessly(range, advice);
        self.offlined += u32::from(done && advice == Advice::SOFT_OFFLINE);
        self.count(advice.name, done);
    }

    fn any_range(&mut self, longest: usize) -> Option<AddressRange> {
        const PAGE: usize = 4096;
        let all = *self.mappings.get(self.rng.usize(..self.mappings.len().max(1)))?;
        let pages = all.len() / PAGE;
        let first = self.rng.usize(..pages.max(1));
        let length = ((pages - first) * PAGE).clamp(PAGE, longest);
        AddressRange::new(all.start() + first * PAGE, length).ok()
    }
}
