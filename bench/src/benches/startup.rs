//! What the library costs a program at its start: making a monitor, a registrar for a ring that is there, and a cache.

use crate::Options;
use crate::report::Report;
use crate::ring::{self, registrar_of};
use crate::rounds::Comparison;
use io_uring::IoUring as Ring;
use pinfold::Config;
use serde_json::json;
use std::time::Instant;

const SLOTS: u32 = 1024;

/// How long the parts of one start took, in microseconds.
struct Start {
    monitor: f64,
    registrar: f64,
    cache: f64,
}

impl Start {
    fn all(&self) -> f64 {
        self.monitor + self.registrar + self.cache
    }
}

/// One figure for each part, and one for all of them.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    if report.is_skipped("startup", ring::missing()) {
        return Ok(());
    }
    // Rings are taken down in the background, so they stay until all is measured.
    let mut rings = Vec::new();
    let starts = (0..options.rounds).map(|_| start(&mut rings));
    let starts: Vec<Start> = starts.collect::<Result<_, _>>()?;
    let mut add = |part, time: fn(&Start) -> f64| {
        let times = starts.iter().map(time).collect();
        let comparison = Comparison::of_rounds(times, Vec::new());
        report.add("startup", json!({ "part": part }), "us", comparison);
    };
    add("monitor", |start| start.monitor);
    add("registrar", |start| start.registrar);
    add("cache", |start| start.cache);
    add("all", Start::all);
    Ok(())
}

fn start(rings: &mut Vec<Ring>) -> Result<Start, String> {
    let ring = Ring::new(8).map_err(|error| format!("no io_uring: {error}"))?;
    let begun = Instant::now();
    let monitor = ring::userfaultfd()?;
    let watching = begun.elapsed();
    let registrar = registrar_of(&ring, SLOTS).map_err(|error| error.to_string())?;
    let registering = begun.elapsed();
    let cache = pinfold::cache(registrar, monitor, Config::keeping_all());
    let ready = begun.elapsed();
    cache.map(drop).map_err(|error| error.to_string())?;
    rings.push(ring);
    Ok(Start {
        monitor: watching.as_secs_f64() * 1e6,
        registrar: (registering - watching).as_secs_f64() * 1e6,
        cache: (ready - registering).as_secs_f64() * 1e6,
    })
}
