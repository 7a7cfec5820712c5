//! What the library costs a program that has it: at its start, and where it unmaps memory.

use super::Bench;
use crate::block::{Block, Origin, register_ahead};
use crate::device::{Ring, registrar_of};
use crate::medians::{median, times_faster};
use crate::output::Failure;
use pinfold::monitor::Userfaultfd;
use pinfold::registrar::IoUring;
use pinfold::{AddressRange, Cache, Config};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

type Library = Cache<IoUring, Arc<Userfaultfd>>;

/// How long the parts of one start took, in microseconds.
struct Start {
    monitor: f64,
    registrar: f64,
    cache: f64,
}

/// Starts a library on `device`, part by part.
fn start(device: &Ring) -> Result<(Library, Start), Failure> {
    let begun = Instant::now();
    let monitor = Arc::new(Userfaultfd::new().map_err(Failure::unavailable)?);
    let watching = begun.elapsed();
    let registrar = registrar_of(device, 1024).map_err(Failure::unavailable)?;
    let registering = begun.elapsed();
    let library =
        pinfold::cache(registrar, monitor, Config::keeping_all()).map_err(Failure::unavailable)?;
    let ready = begun.elapsed();
    let times = Start {
        monitor: watching.as_secs_f64() * 1e6,
        registrar: (registering - watching).as_secs_f64() * 1e6,
        cache: (ready - registering).as_secs_f64() * 1e6,
    };
    Ok((library, times))
}

/// Microseconds to make a monitor, a registrar for a ring that is there, and a cache.
pub(super) fn startup(rounds: u32) -> Result<Vec<Bench>, Failure> {
    let starts = (0..rounds)
        .map(|_| {
            let device = Ring::open(4096)?;
            start(&device).map(|(_library, times)| times)
        })
        .collect::<Result<Vec<Start>, Failure>>()?;
    let bench = |part, time: fn(&Start) -> f64| Bench {
        name: "startup",
        params: json!({ "part": part }),
        value: median(starts.iter().map(time).collect()),
        unit: "us",
        ratio: None,
    };
    Ok(vec![
        bench("monitor", |start| start.monitor),
        bench("registrar", |start| start.registrar),
        bench("cache", |start| start.cache),
        bench("all", |start| start.monitor + start.registrar + start.cache),
    ])
}

/// How many unmappings a turn takes, and how long the mappings are, in bytes.
const UNMAPPINGS: u32 = 200;
const MAPPING: usize = 64 << 10;

/// Nanoseconds for a `munmap`: with no library in the process, with one that watches something
/// else, and of memory that it watches.
pub(super) fn munmap(rounds: u32) -> Result<Vec<Bench>, Failure> {
    let (mut without, mut beside, mut watched) = (Vec::new(), Vec::new(), Vec::new());
    // Rings are taken down in the background, so they stay until all is measured.
    let mut devices = Vec::new();
    for _ in 0..rounds {
        without.push(turn(|_| Ok(()))?);
        let device = Ring::open(4096)?;
        let (library, _) = start(&device)?;
        devices.push(device);
        let kept = mapping()?;
        watch(&library, &kept)?;
        beside.push(turn(|_| Ok(()))?);
        watched.push(turn(|block| watch(&library, block))?);
    }
    let bench = |params: Value, nanoseconds: &[f64]| Bench {
        name: "munmap",
        params,
        value: median(nanoseconds.to_vec()),
        unit: "ns",
        ratio: Some(times_faster(nanoseconds, &without)),
    };
    Ok(vec![
        bench(json!({ "bytes": MAPPING, "library": false, "watched": false }), &without),
        bench(json!({ "bytes": MAPPING, "library": true, "watched": false }), &beside),
        bench(json!({ "bytes": MAPPING, "library": true, "watched": true }), &watched),
    ])
}

/// Nanoseconds for each of [`UNMAPPINGS`], after `prepare` did something with the mapping.
fn turn(prepare: impl Fn(&Block) -> Result<(), Failure>) -> Result<f64, Failure> {
    let mut nanoseconds = 0.0;
    for _ in 0..UNMAPPINGS {
        let block = mapping()?;
        prepare(&block)?;
        let start = Instant::now();
        drop(block);
        nanoseconds += start.elapsed().as_secs_f64() * 1e9;
    }
    Ok(nanoseconds / f64::from(UNMAPPINGS))
}

fn mapping() -> Result<Block, Failure> {
    let mut block = Block::new(Origin::Mapping, MAPPING).map_err(Failure::unavailable)?;
    for page in (0..MAPPING).step_by(4096) {
        block.write(page, &[1]);
    }
    Ok(block)
}

/// Has the library watch the block: a lease that ends at once leaves it registered and watched.
fn watch(library: &Library, block: &Block) -> Result<(), Failure> {
    let range = AddressRange::new(block.address(), block.length());
    register_ahead(library, range.map_err(Failure::unavailable)?).map_err(Failure::unavailable)
}
