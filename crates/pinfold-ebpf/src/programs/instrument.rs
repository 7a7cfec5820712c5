//! The instrument that checks the list of hooks: programs where the kernel parts pages from their addresses, one after
//! the other (`bpf/partings.c`). It tells which pinned pages of watched processes were parted outside of a told change.

use super::Programs;
use super::attach::{Attached, Loader};
use super::error::ProgramsError;
use super::hooks;
use super::kernel::Kernel;
use super::maps::{constants, first_refusal, one_value};
use super::object::{self, Target};
use super::sys::{self, Errno, Kind, Map, Shape, Words, flag};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// As in `bpf/partings.h`.
const FRAMES: u32 = 24;
const ANONYMOUS: u64 = 1;
const COUNTS: usize = 3;
/// How many ways are told apart; the count of all goes on.
const MOST_WAYS: u32 = 256;

/// `struct places` of `bpf/partings.h`, and whether the kernel must have them.
const PLACES: [(&str, &str, bool); 7] = [
    ("vm_area_struct", "vm_pgoff", true),
    ("folio", "mapping", true),
    ("folio", "index", true),
    ("folio", "_refcount", true),
    ("folio", "_pincount", true),
    // Since 7.3.
    ("vm_area_struct", "__vm_anon_pgoff_lo", false),
    ("vm_area_struct", "__vm_anon_pgoff_hi", false),
];

/// The programs of an instrument, attached as long as this lives. It costs each page that is unmapped on this machine
/// some nanoseconds.
#[derive(Debug)]
pub struct Instrument {
    partings: Map,
    counts: Words,
    /// The programs that it checks.
    checked: Vec<OwnedFd>,
    _attached: Vec<Attached>,
}

/// What an instrument saw so far of pinned pages that were parted from their addresses in watched processes.
#[derive(Debug)]
pub struct Partings {
    /// How many times one was in a change that the process had been told of.
    pub told: u32,
    /// How many times one was while the process took every range for changing, because a change had found no record.
    pub crowded: u32,
    /// How many times one was in no change that was told.
    pub untold: u32,
    /// How often the kernel skipped a program that it checks ([`Programs::misses`]).
    pub skipped: u64,
    /// How these came about; the first ones of each kind.
    pub ways: Vec<Parting>,
}

/// One way in which pinned pages were parted from their addresses in no change that was told.
#[derive(Debug)]
pub struct Parting {
    /// How many times.
    pub count: u64,
    /// The first address.
    pub address: usize,
    /// Whether the pages are anonymous memory.
    pub anonymous: bool,
    /// What ran the first time.
    pub command: String,
    /// The kernel's functions, the innermost first.
    pub stack: Vec<String>,
}

impl Parting {
    /// Whether it was within a function that has programs, besides the instrument's own: the one at its end tells of the
    /// change, also where the kernel has skipped the one at its beginning.
    pub fn is_told_at_end(&self) -> bool {
        self.stack.iter().filter(|function| function.starts_with("bpf_trampoline_")).count() > 1
    }

    /// Whether the page stays at its address: a huge anonymous page's one entry is replaced by many for the same pages.
    pub fn is_replaced(&self) -> bool {
        self.anonymous && self.stack.iter().any(|function| function.contains("split_huge_pmd"))
    }
}

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.anonymous { "anonymous" } else { "a file's" };
        let Self { count, address, command, .. } = self;
        write!(f, "{count} times {kind}, first {address:#x} by {command}: {}", self.stack.join(" "))
    }
}

impl Partings {
    /// The ways in which pages went that the monitors do not know. Where the kernel has skipped programs, it may have skipped the
    /// beginning of a change that is [told at its end](Parting::is_told_at_end): that is none.
    pub fn holes(&self) -> impl Iterator<Item = &Parting> {
        let is_told = |way: &Parting| self.skipped > 0 && way.is_told_at_end();
        self.ways.iter().filter(move |way| !way.is_replaced() && !is_told(way))
    }

    /// Whether all are told of in detail: not if there were too many ways.
    pub fn is_complete(&self) -> bool {
        self.ways.iter().map(|way| way.count).sum::<u64>() == self.untold.into()
    }
}

/// As in `bpf/changes.h`.
const HALF_BITS: u32 = 31;

impl Programs {
    /// As [`load`](Self::load), without the programs for one kind of change and without those at all ends, as where the
    /// kernel skips them: each change leaves its record. For tests.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_beginnings_without(change: &str) -> Result<Self, ProgramsError> {
        Self::load_at(|hook| hook.change != change, false)
    }

    /// As [`load`](Self::load), with the programs for one kind of change only, and those without which none are loaded. For
    /// tests.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_only(change: &str) -> Result<Self, ProgramsError> {
        Self::load_at(|hook| [change, hooks::SWITCHING_OFF].contains(&hook.change), true)
    }

    /// The thread, and above it how deep it was on its kernel stack (bits 32 to 47), that the owner of a
    /// [record](crate::layout::Record) of these programs stands for; `None` if they cannot be asked. For tests.
    pub fn caller_of(&self, owner: u64) -> Option<u64> {
        let veil = self.lock().veil()?;
        let scrambled = |half: u64, by: usize| {
            let (factor, addend) = (veil.get(2 * by)?, veil.get(2 * by + 1)?);
            Some(factor.wrapping_mul(half).wrapping_add(*addend) >> (64 - HALF_BITS))
        };
        let half = (1_u64 << HALF_BITS) - 1;
        let (mut left, mut right) = (owner >> HALF_BITS & half, owner & half);
        right ^= scrambled(left, 3)?;
        left ^= scrambled(right, 2)?;
        right ^= scrambled(left, 1)?;
        left ^= scrambled(right, 0)?;
        Some(left << 32 | right)
    }

    /// Checks from now on what these programs tell.
    ///
    /// # Errors
    ///
    /// [`ProgramsError`] says what this machine or this process lacks.
    pub fn instrument(&self) -> Result<Instrument, ProgramsError> {
        let kernel = Kernel::read()?;
        let places = kernel.places(&PLACES)?;
        let (places, partings, counts) = maps(&places).map_err(first_refusal)?;
        let words = Words::of(&counts).map_err(first_refusal)?;
        let own = [
            ("partings", Target::Map(partings.as_raw_fd())),
            ("counts", Target::ValueOf(counts.as_raw_fd())),
            ("places", Target::ValueOf(places.as_raw_fd())),
        ];
        let mut targets = self.lock().targets();
        targets.extend(own);
        let loader = Loader { kernel: &kernel, object: object::PARTINGS, targets, ends: true };
        let mut attached = vec![];
        loader.attach(&hooks::PARTINGS, &mut attached)?;
        let copied = |attached: &Attached| attached.program.try_clone();
        let checked: io::Result<_> = self.attached.iter().map(copied).collect();
        let checked = checked
            .map_err(|error| first_refusal(Errno(error.raw_os_error().unwrap_or_default())))?;
        Ok(Instrument { partings, counts: words, checked, _attached: attached })
    }
}

/// Constants, ways, counts.
fn maps(places: &[u64]) -> Result<(Map, Map, Map), Errno> {
    let ways = Shape {
        kind: Kind::Hash,
        key_bytes: 8 * (1 + FRAMES),
        value_bytes: 32,
        elements: MOST_WAYS,
        flags: 0,
    };
    Ok((
        constants(places)?,
        Map::new(c"pinfold_parting", ways, None)?,
        one_value(c"pinfold_counts", 4 * COUNTS, flag::MAPPABLE)?,
    ))
}

impl Instrument {
    /// What it saw so far.
    ///
    /// # Errors
    ///
    /// What the kernel says when it is asked, or, if it parted a page untold, when its names are read (`/proc/kallsyms`).
    pub fn partings(&self) -> io::Result<Partings> {
        let system = |Errno(errno)| io::Error::from_raw_os_error(errno);
        let keys = self.partings.keys().map_err(system)?;
        // The kernel writes 150,000 of them or more, which takes an emulated processor seconds.
        let names = if keys.is_empty() { BTreeMap::new() } else { names()? };
        let mut ways = vec![];
        for key in keys {
            ways.push(parting(&key, &self.partings.get(&key).map_err(system)?, &names));
        }
        let [told, crowded, untold] = [0, 1, 2].map(|index| self.counts.get(index));
        let mut skipped = 0;
        for program in &self.checked {
            skipped += sys::misses(program).map_err(system)?;
        }
        Ok(Partings { told, crowded, untold, skipped, ways })
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word))
}

fn parting(key: &[u8], value: &[u8], names: &BTreeMap<u64, String>) -> Parting {
    let mut key = words(key);
    let what = key.next().unwrap_or(0);
    let (numbers, command) = value.split_at(value.len().min(16));
    let mut numbers = words(numbers);
    let mut next = || numbers.next().unwrap_or(0);
    let name = |at: u64| names.range(..at).next_back().map_or("?", |(_, name)| name).to_owned();
    Parting {
        count: next(),
        address: usize::try_from(next()).unwrap_or(0),
        anonymous: what & ANONYMOUS != 0,
        command: command
            .iter()
            .take_while(|byte| **byte != 0)
            .map(|byte| char::from(*byte))
            .collect(),
        stack: key.filter(|at| *at != 0).map(name).collect(),
    }
}

/// The kernel's functions by their addresses.
fn names() -> io::Result<BTreeMap<u64, String>> {
    let text = std::fs::read_to_string("/proc/kallsyms")?;
    let each = text.lines().filter_map(|line| {
        let mut parts = line.split_whitespace();
        let address = u64::from_str_radix(parts.next()?, 16).ok()?;
        let function = matches!(parts.next()?, "t" | "T" | "w" | "W");
        function.then_some((address, parts.next()?.to_owned()))
    });
    Ok(each.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_have_the_same_layout() {
        let twin = include_str!("../../bpf/partings.h");
        assert!(twin.contains(&format!("#define FRAMES {FRAMES}\n")));
        assert!(twin.contains(&format!("#define ANONYMOUS {ANONYMOUS}ULL\n")));
        for text in [
            "enum { TOLD, CROWDED, UNTOLD, COUNTS };",
            "struct way {\n\tu64 what;\n\tu64 stack[FRAMES];\n};",
            "struct parting {\n\tu64 count, address;\n\tchar command[16];\n};",
            "struct places {\n\tu64 vma_pgoff, mapping, index, references, pins;\n",
            "\tu64 anonymous_low, anonymous_high;\n};",
        ] {
            assert!(twin.contains(text), "{text}");
        }
        assert_eq!((COUNTS, PLACES.len()), (3, 7));
    }

    #[test]
    fn what_the_programs_note_is_read_with_its_names() {
        let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let names = BTreeMap::from([(16, "outer".into()), (32, "__split_huge_pmd".into())]);
        let key: Vec<u8> = bytes(&[ANONYMOUS, 40, 32, 0]);
        let mut value: Vec<u8> = bytes(&[7, 0x1000]);
        value.extend(b"dd\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        let way = parting(&key, &value, &names);
        assert!(way.is_replaced());
        assert_eq!(
            way.to_string(),
            "7 times anonymous, first 0x1000 by dd: __split_huge_pmd outer"
        );
        let file = parting(&bytes(&[0, 40]), &value, &names);
        assert!(!file.is_replaced() && file.stack == ["__split_huge_pmd"]);
    }
}
