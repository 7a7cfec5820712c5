//! The memory that the programs and a watched process share.
//!
//! Its twin is `bpf/changes.h`; a test compares the two. All words are read and written as atomics
//! by both sides.
//!
//! # The log
//!
//! [`Changes::sequence`] counts the entries, so it is the one word that a process has to look at.
//! Entry `i` (counted from zero) stands in place `i % ENTRIES`. Whoever writes it takes its number by
//! adding one to the sequence, takes the place by putting [`busy`]`(i)` into its stamp, writes the
//! range, and puts [`done`]`(i)` there. A place is taken only from a stamp that is `done` and older,
//! so two writers are never in one place; one who finds it taken leaves it alone, and then nobody
//! will find [`done`]`(i)` there. So a reader who does not find it has lost an entry and takes
//! everything for changed.
//!
//! # Changes under way
//!
//! A change that has begun and not ended has a [`Record`]: whoever begins takes one whose owner is
//! 0 or that is [too old](RECORD_SECONDS), whoever ends gives it back. If he finds none among
//! [`TRIES`] places, he notes the time in [`Changes::crowded`], and everything is under way for as
//! long as a record is believed.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// How many changes back a process may be before it has to take everything for changed.
pub const ENTRIES: usize = 4096;
/// How many changes can be told apart while they are under way.
pub const RECORDS: usize = 128;
/// How many records are tried for one change.
pub const TRIES: usize = 4;
/// How long a record is believed. One whose end was never noted (which needs a program to be
/// skipped, see the crate's text) must not keep its range from being cached for ever; and while
/// it is not believed, the change's own last entry in the log still tells of it.
pub const RECORD_SECONDS: u64 = 2;
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
    /// The thread's number, in the first namespace of process numbers; [`WRITING`] is added while
    /// the rest is being written, 0 stands for nobody.
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

/// What a process tells the programs; it may write it as it likes, and harms nobody else.
#[repr(C)]
#[derive(Debug)]
pub struct Wishes {
    /// Not 0 while somebody sleeps who wants to be woken by the next entry. Whoever wakes him sets
    /// it to 0.
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
