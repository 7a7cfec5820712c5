//! The memory that the programs and a watched process share.
//!
//! `bpf/changes.h` says the same in C; a test compares the two. All words are read and written as atomics
//! by both sides.
//!
//! # The log
//!
//! [`Changes::sequence`] counts the entries, so it is the one word that a process has to look at.
//! Entry `i` (counted from zero) stands in place `i % ENTRIES`. Its writer takes its number by
//! adding one to the sequence, takes the place by putting [`busy`]`(i)` into its stamp, writes the
//! range, and puts [`done`]`(i)` there. A place is taken only from a stamp that is `done` and older,
//! so two writers are never in one place; one that finds it taken leaves it alone, and then no reader
//! will find [`done`]`(i)` there. So a reader that does not find it has lost an entry and takes
//! everything for changed.
//!
//! # Changes under way
//!
//! A change that has begun and not ended has a [`Record`]: its thread takes one whose owner is
//! 0 or that is [too old](RECORD_SECONDS), and frees it at the end. If none among [`TRIES`] places is
//! free, the program notes the time in [`Changes::crowded`], and everything is under way for
//! [`CROWDED_SECONDS`].

use std::sync::atomic::{AtomicU32, AtomicU64};

/// How many changes back a process may be before it has to take everything for changed.
pub const ENTRIES: usize = 4096;
/// How many changes can be told apart while they are under way.
pub const RECORDS: usize = 128;
/// How many records are tried for one change.
pub const TRIES: usize = 4;
/// How long a record is believed. A change whose end was never noted (which needs a program to be
/// skipped, see `bpf/changes.c`) must not keep its range from being cached for ever; most such records
/// go before, with the next change that their thread makes. Unmapping 4 TiB of small pages takes as long: what
/// is registered during a change that takes longer, and whose end is skipped, could be stale.
pub const RECORD_SECONDS: u64 = 60;
/// How long everything is under way after a change found no record. Shorter, because threads that change much
/// at once need no skipped program for it, and the change's end tells of it as of any. A change that takes longer,
/// found no record and has its end skipped is the one that this leaves out.
pub const CROWDED_SECONDS: u64 = 2;
/// The size of a block of addresses, as a power of two: the filter knows no smaller one.
pub const BLOCK_SHIFT: u32 = 21;
/// How many bits the filter has; blocks that agree modulo this share one.
pub const BLOCKS: usize = 65536;
/// A change of more blocks than this is always told.
pub const BLOCKS_LOOKED_AT: usize = 8;

/// What the programs tell a process; it can only read it.
#[repr(C)]
#[derive(Debug)]
pub struct Changes {
    /// How many entries the log has had, and [`CLOSED`] once there will be no more.
    pub sequence: AtomicU64,
    /// When a change last found no record (`CLOCK_MONOTONIC`, nanoseconds), 0 for never.
    pub crowded: AtomicU64,
    /// Only ever added zero to, for the order of memory accesses that this brings.
    pub fence: AtomicU64,
    reserved: [u64; 5],
    /// The changes under way.
    pub records: [Record; RECORDS],
    /// The last changes.
    pub entries: [Entry; ENTRIES],
}

/// A change under way.
#[repr(C)]
#[derive(Debug)]
pub struct Record {
    /// Stands for the thread and how deep on its kernel stack the change is. What it says of them only the programs read:
    /// it is veiled by random numbers that a view does not show (`bpf/programs.h`). The same thread at the same depth has
    /// the same owner. [`WRITING`] is added while the rest is being written, 0 stands for no owner.
    pub owner: AtomicU64,
    /// The first address.
    pub start: AtomicU64,
    /// The address after the last one.
    pub end: AtomicU64,
    /// When it began (`CLOCK_MONOTONIC`, nanoseconds).
    pub since: AtomicU64,
}

/// One change.
#[repr(C)]
#[derive(Debug)]
pub struct Entry {
    /// 0, or which entry this is: see [`done`] and [`busy`].
    pub stamp: AtomicU64,
    /// The first address.
    pub start: AtomicU64,
    /// The address after the last one.
    pub end: AtomicU64,
}

/// Added to the sequence when nothing more will be told: the process has given up its memory, or the
/// one who gave the view has taken it back.
pub const CLOSED: u64 = 1 << 63;
/// Added to a record's owner while the record is being written.
pub const WRITING: u64 = 1 << 63;

/// What a process asks of the programs; it may write anything here, and harms no other process.
#[repr(C)]
#[derive(Debug)]
pub struct WatchFilter {
    /// Not 0 while a thread sleeps that is to be woken by the next entry. The program that wakes it sets
    /// this to 0.
    pub asleep: AtomicU64,
    reserved: [u64; 7],
    /// A bit for each block of addresses whose changes are to be logged.
    pub blocks: [AtomicU32; BLOCKS / 32],
}

/// The stamp of a place where entry `index` stands.
pub const fn done(index: u64) -> u64 {
    2 * (index + 1)
}

/// The stamp of a place where entry `index` is being written.
pub const fn busy(index: u64) -> u64 {
    done(index) + 1
}

/// The words and bits of the filter that stand for the addresses from `start` to `end`: every
/// block once, unless there are more than the filter has bits.
pub fn blocks(start: u64, end: u64) -> impl Iterator<Item = (usize, u32)> {
    let first = start >> BLOCK_SHIFT;
    let last = end.saturating_sub(1).max(start) >> BLOCK_SHIFT;
    let count = (last - first + 1).min(BLOCKS as u64);
    (first..first + count).map(|block| {
        let bit = usize::try_from(block % BLOCKS as u64).unwrap_or(0);
        (bit / 32, 1 << (bit % 32))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The other side's text: what it calls by our names must have our values.
    const TWIN: &str = include_str!("../bpf/changes.h");

    fn defined(name: &str) -> u64 {
        let words = |line: &'static str| line.split_whitespace().collect::<Vec<_>>();
        let line = TWIN.lines().map(words).find(|words| words.starts_with(&["#define", name]));
        line.unwrap()[2].parse().unwrap()
    }

    #[test]
    fn both_sides_have_the_same_constants() {
        for (name, value) in [
            ("ENTRIES", ENTRIES as u64),
            ("RECORDS", RECORDS as u64),
            ("TRIES", TRIES as u64),
            ("RECORD_SECONDS", RECORD_SECONDS),
            ("CROWDED_SECONDS", CROWDED_SECONDS),
            ("BLOCK_SHIFT", BLOCK_SHIFT.into()),
            ("BLOCKS", BLOCKS as u64),
            ("BLOCKS_LOOKED_AT", BLOCKS_LOOKED_AT as u64),
        ] {
            assert_eq!(defined(name), value, "{name}");
        }
        assert!(TWIN.contains("#define WRITING (1ULL << 63)") && WRITING == 1 << 63);
        assert!(TWIN.contains("#define CLOSED (1ULL << 63)") && CLOSED == 1 << 63);
        assert!(TWIN.contains("#define DONE(index) (2 * ((index) + 1))") && done(3) == 8);
        assert!(TWIN.contains("#define BUSY(index) (DONE(index) + 1)") && busy(3) == 9);
    }

    #[test]
    fn both_sides_have_the_same_structures() {
        for structure in [
            "struct record {\n\tu64 owner, start, end, since;\n};",
            "struct entry {\n\tu64 stamp, start, end;\n};",
            "struct changes {\n\tu64 sequence, crowded, fence, reserved[5];\n\tstruct record \
             records[RECORDS];\n\tstruct entry entries[ENTRIES];\n};",
            "struct wishes {\n\tu64 asleep, reserved[7];\n\tu32 blocks[BLOCKS / 32];\n};",
        ] {
            assert!(TWIN.contains(structure), "{structure}");
        }
        assert_eq!(std::mem::offset_of!(Changes, records), 64);
        assert_eq!(size_of::<Changes>(), 64 + 32 * RECORDS + 24 * ENTRIES);
        assert_eq!(std::mem::offset_of!(WatchFilter, blocks), 64);
        assert_eq!(size_of::<WatchFilter>(), 64 + BLOCKS / 8);
    }

    #[test]
    fn the_blocks_of_a_range_are_each_there_once() {
        let block = 1_u64 << BLOCK_SHIFT;
        let found = |start, end| blocks(start, end).collect::<Vec<_>>();
        assert_eq!(found(1, 2), [(0, 1)]);
        assert_eq!(found(block - 1, block), [(0, 1)]);
        assert_eq!(found(block - 1, block + 1), [(0, 1), (0, 2)]);
        assert_eq!(found(31 * block, 33 * block), [(0, 1 << 31), (1, 1)]);
        assert_eq!(found(65536 * block, 65536 * block + 1), [(0, 1)]);
        assert_eq!(found(1, u64::MAX).len(), BLOCKS);
    }
}
