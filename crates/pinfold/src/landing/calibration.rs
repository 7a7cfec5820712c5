//! Measuring from which length on an exchange of pages wins, and keeping what was found.

use super::crossover::{Crossover, Measured};
use super::method::{LandError, Method};
use super::slab::{Slab, SlabError};
use super::zone::{AskError, Zone, ZoneError, ZoneOptions};
use crate::pieces::{self, Progress, prefault};
use crate::stored::{self, machine};
use crate::{Access, AddressRange, Cache, GetError, Monitor, Registrar};
use pinfold_kernel::{Errno, mapping::OwnedMapping};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Why a crossover could not be measured, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CrossoverError {
    /// No landing pages.
    #[error("{0}")]
    Slab(SlabError),
    /// The zone could not be made.
    #[error("{0}")]
    Zone(ZoneError),
    /// A slot could not be registered again.
    #[error("{0}")]
    Ask(AskError),
    /// A message did not land.
    #[error("{0}")]
    Land(LandError),
    /// The target's memory.
    #[error("no memory to measure with: {}", io::Error::from_raw_os_error(*.errno))]
    Memory {
        /// The kernel's error number.
        errno: i32,
    },
    /// The file could not be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
    /// The file holds something else, or was measured on another kernel or machine.
    #[error("{0} was not measured on this machine: measure again")]
    Stale(PathBuf),
}

impl CrossoverError {
    /// Whether there is no room for registrations of this length.
    const fn is_about_room(&self) -> bool {
        let Self::Zone(ZoneError::Register(error)) = self else { return false };
        match error {
            GetError::Exhausted(_) => true,
            GetError::Register(error) => error.is_about_room(),
            _ => false,
        }
    }
}

/// How often each length is landed.
const ROUNDS: usize = 9;

/// The first word of a file.
const FORMAT: &str = "pinfold-landing-1";

impl Crossover {
    /// Lands messages of 4 KiB, and four times as much over and over up to 64 MiB, as far as a piece of
    /// `cache` and the limit on pinned memory allow, and times each way.
    ///
    /// In huge pages if `huge`; with a monitor that watches the target if `watched`, as
    /// [`ZoneOptions::watch_targets`] has it, which makes an exchange slower. Costs a second for 64 MiB.
    ///
    /// # Errors
    ///
    /// [`CrossoverError`].
    pub fn measure<R: Registrar, M: Monitor>(
        cache: &Cache<R, M>,
        huge: bool,
        watched: bool,
    ) -> Result<Vec<Measured>, CrossoverError> {
        let piece_bytes = cache.config().piece_bytes;
        let sizes = (6..14).map(|shift| 1_usize << (2 * shift));
        let mut measured = Vec::new();
        for bytes in sizes.take_while(|&bytes| fits(bytes, piece_bytes)) {
            match measure_length(cache, bytes, huge, watched) {
                Err(error) if error.is_about_room() && !measured.is_empty() => break,
                each => measured.push(each?),
            }
        }
        Ok(measured)
    }

    /// What is known of this machine under `name`: what [`default_file`](Self::default_file) holds, else
    /// [`COPY_ALL`](Self::COPY_ALL).
    pub fn stored(name: &str) -> Self {
        let file = Self::default_file(name);
        file.and_then(|file| Self::load(&file).ok()).unwrap_or(Self::COPY_ALL)
    }

    /// Where crossovers are kept: `pinfold/landing-NAME` in the user's cache directory
    /// (`XDG_CACHE_HOME`, else `.cache` at home). `name` tells devices and sizes of pages apart.
    /// `None` without a home.
    pub fn default_file(name: &str) -> Option<PathBuf> {
        stored::file(&format!("landing-{name}"))
    }

    /// Reads what [`store`](Self::store) has written on this machine under this kernel.
    ///
    /// # Errors
    ///
    /// [`CrossoverError::File`], or [`CrossoverError::Stale`].
    pub fn load(path: &Path) -> Result<Self, CrossoverError> {
        let text = fs::read_to_string(path)
            .map_err(|error| CrossoverError::File(path.to_owned(), error))?;
        parse(&text, &machine()).ok_or_else(|| CrossoverError::Stale(path.to_owned()))
    }

    /// Writes it down, for this machine and kernel. A concurrent reader finds the old file
    /// or the new one.
    ///
    /// # Errors
    ///
    /// [`CrossoverError::File`].
    pub fn store(&self, path: &Path) -> Result<(), CrossoverError> {
        stored::write(path, &self.text(&machine()))
            .map_err(|error| CrossoverError::File(path.to_owned(), error))
    }

    fn text(&self, machine: &str) -> String {
        let from = self.exchange_from.map_or("never".to_string(), |bytes| bytes.to_string());
        format!("{FORMAT}\n{machine}\nexchange-from {from}\n")
    }
}

fn parse(text: &str, machine: &str) -> Option<Crossover> {
    let mut lines = text.lines();
    let known = lines.next() == Some(FORMAT) && lines.next() == Some(machine);
    let from = lines.next()?.strip_prefix("exchange-from ").filter(|_| known)?;
    match from {
        "never" => Some(Crossover::COPY_ALL),
        bytes => bytes.parse().ok().map(Crossover::exchange_from),
    }
}

/// Whether a slot for `bytes` is one piece.
fn fits(bytes: usize, piece_bytes: usize) -> bool {
    bytes + (4 << 20) <= piece_bytes || (bytes < 2 << 20 && bytes + (8 << 10) <= piece_bytes)
}

fn measure_length<R: Registrar, M: Monitor>(
    cache: &Cache<R, M>,
    bytes: usize,
    huge: bool,
    watched: bool,
) -> Result<Measured, CrossoverError> {
    let slab = Slab::new(bytes, 1, huge).map_err(CrossoverError::Slab)?;
    let options = ZoneOptions { watch_targets: watched, ..ZoneOptions::default() };
    let zone = Zone::new(cache, slab, options).map_err(CrossoverError::Zone)?;
    let mut target = Target::new(bytes, huge)?;
    let mut times = [Method::Copy, Method::Exchange, Method::Replace].map(|_| Vec::new());
    for _ in 0..ROUNDS {
        let methods = [Method::Copy, Method::Exchange, Method::Replace];
        for (method, times) in methods.into_iter().zip(&mut times) {
            times.push(time(&zone, &mut target, method)?);
        }
    }
    let [(copy, _), (exchange, exchange_refill), (replace, replace_refill)] = times.map(least);
    Ok(Measured { bytes, copy, exchange, exchange_refill, replace, replace_refill })
}

type Times = (Duration, Duration);

/// How long landing takes, and what comes after it.
fn time<R: Registrar, M: Monitor>(
    zone: &Zone<'_, R, M, Slab>,
    target: &mut Target,
    method: Method,
) -> Result<Times, CrossoverError> {
    let Target { mapped, offset, bytes } = target;
    let arrived = zone.arrived_in(mapped, *offset, *bytes).map_err(CrossoverError::Ask)?;
    let began = Instant::now();
    arrived.land_by(method).map_err(|refused| CrossoverError::Land(refused.error))?;
    let landed = began.elapsed();
    zone.refill_now().map_err(|error| CrossoverError::Ask(AskError::Register(error)))?;
    Ok((landed, began.elapsed() - landed))
}

/// The least of the rounds: what others do on the machine only adds.
fn least(times: Vec<Times>) -> Times {
    times.into_iter().min_by_key(|(landed, refilled)| *landed + *refilled).unwrap_or_default()
}

/// Memory to land in, whose pages are there.
struct Target {
    mapped: OwnedMapping,
    /// Where it begins in the mapping.
    offset: usize,
    bytes: usize,
}

/// Where a huge page may begin.
const HUGE: usize = 2 << 20;

impl Target {
    fn new(bytes: usize, huge: bool) -> Result<Self, CrossoverError> {
        let none = CrossoverError::Memory { errno: libc::ENOMEM };
        let all = bytes + HUGE;
        let mapped =
            OwnedMapping::new(all).map_err(|Errno(errno)| CrossoverError::Memory { errno })?;
        let start = mapped.start().addr().get();
        let first = start.next_multiple_of(HUGE);
        let range = AddressRange::between(first, first + bytes).ok_or(none)?;
        // Advice: without huge pages they are small.
        let _ = mapped.want_huge_pages(huge);
        // Where that is not to be had, the first copy makes the pages, and is not the fastest.
        let how = pieces::Options::for_register_all();
        let _ = prefault(range, Access::WRITE, &how, &Progress::new());
        Ok(Self { mapped, offset: first - start, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(bytes: usize, copy: u64, exchange: u64) -> Measured {
        let time = Duration::from_micros;
        Measured {
            bytes,
            copy: time(copy),
            exchange: time(exchange),
            exchange_refill: time(1),
            replace: time(0),
            replace_refill: time(0),
        }
    }

    #[test]
    fn the_crossover_is_where_an_exchange_wins_for_good() {
        let all = [measured(1, 9, 1), measured(2, 2, 3), measured(4, 9, 3), measured(8, 9, 2)];
        assert_eq!(Crossover::of(&all), Crossover::exchange_from(4));
        assert_eq!(Crossover::of(&all[..2]), Crossover::COPY_ALL);
        assert_eq!(Crossover::of(&[]), Crossover::COPY_ALL);
        let crossover = Crossover::of(&all);
        assert_eq!([3, 4].map(|bytes| crossover.choose(bytes)), [Method::Copy, Method::Exchange]);
    }

    #[test]
    fn what_was_written_down_holds_on_the_same_machine_only() {
        for crossover in [Crossover::COPY_ALL, Crossover::exchange_from(1 << 20)] {
            let text = crossover.text("6.18 a processor");
            assert_eq!(parse(&text, "6.18 a processor"), Some(crossover));
            assert_eq!(parse(&text, "6.19 a processor"), None);
            assert_eq!(parse(&text.replace("from ", "from x"), "6.18 a processor"), None);
        }
        assert_eq!(parse("", ""), None);
    }
}
