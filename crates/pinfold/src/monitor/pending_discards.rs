//! Discards that were announced and may not have happened yet.
//!
//! `MADV_DONTNEED` and its kin tell us BEFORE they take the pages, wait until the event has been
//! read, and never say when they are done. A range registered in between would keep pages that
//! the program is about to lose. So each announced discard is kept here as a *record*, a range
//! that overlaps an unsettled record is pending, and nothing pending is cached.
//!
//! # When is a record settled?
//!
//! When every thread of the process has been seen, after the record was made, where no thread in
//! the middle of a discard can be. The claim to prove: *if a record is settled, then its discard
//! has taken effect.* Let `D` be the thread that discards and `t` the moment at which the record
//! is made. `D` is inside its system call from before `t` (the kernel queued its event before we
//! could read it) until some moment `e` after the pages are gone. Settling needs one of the
//! following for `D`, each observed after `t`:
//!
//! 1. **At rest** in `/proc/self/task/D/stat`. From the event to the return, `D` waits for the
//!    event to be read (`TASK_KILLABLE`, shown as `D`), takes the lock of all mappings
//!    (uninterruptible, `D`), and unmaps pages (running, `R`; the driver callbacks in there may
//!    not fail, so they cannot sleep interruptibly either). It stops for a debugger or for job
//!    control (`T`, `t`) on its way back to user mode only. So a thread seen at rest after `t`
//!    is either not `D` or is past `e`.
//! 2. **Gone**: no such thread, or a zombie: past `e`.
//! 3. **Not on the list** of threads read after `t`: it ended, or it began after `t` and then it
//!    is not `D`. (Why the list is complete: see
//!    [`ThreadDirectory::list`].)
//! 4. **It called us**: a thread that executes our code is in user mode. If it does so after `t`
//!    it is past `e`, if it was `D`. Every check leaves a mark: the thread's number and how many
//!    records there were at that moment. A mark that counts our record was made after `t`.
//!    A mark of an earlier thread of the same number, made after `t`, means that the thread on
//!    the list began after `t`: case 3.
//! 5. **It is our own reader**, or that of another monitor of the process: they never discard.
//!
//! A thread may have a `/proc` of its own, or none. So the list and what is said of those on it come from one directory, known
//! by its identity, in which a thread that is missing is gone ([`ThreadDirectory`]); a thread that finds another one begins
//! anew, and one that finds none proves nothing. 4 and 5 compare `/proc`'s numbers with ours: only in the `/proc` in which they
//! were found to agree.
//!
//! The effect is then visible to a thread that finds the record settled: in 4 through the mark
//! (released by `D`, acquired here), in 1-3 through the kernel, which orders a thread's earlier
//! stores before the state it shows; and `settled` itself is released and acquired.
//!
//! # What this assumes
//!
//! Each discard is announced to this monitor. One that is announced to another of the process's monitors has its record there, and that
//! one is asked, too (`discard_sources.rs`). One that is announced to a foreign userfaultfd, which ends its watch of the
//! range before the discard goes on, has no record: see `docs/src/monitors.md`, and the catalogue.
//!
//! Only threads of this process change its memory. A child made by `vfork` or `posix_spawn` runs
//! in our memory while the thread that made it waits uninterruptibly (`D`), so it is covered by
//! that thread; a bare `clone(CLONE_VM)` without `CLONE_THREAD` or `CLONE_VFORK` is not, nor is a
//! debugger that injects system calls into a thread it shows as stopped. The workers of io_uring,
//! which run `IORING_OP_MADVISE`, are on the list. Other processes cannot discard: the kernel
//! allows `process_madvise` of this kind on oneself only.
//!
//! # What it costs
//!
//! Nothing while no record overlaps, but a search among those that stand. Otherwise three system calls and three per suspected thread,
//! at most [`SUSPECTS_PER_CALL`] of them at a time, on a miss only. A thread that computes for ever,
//! sleeps never and calls us never keeps what was discarded uncached: slower, never wrong.
//!
//! # Why the records need no more memory with each discard
//!
//! They are kept as a set of ranges ([`RangeSet`]). Discards of the same memory, or of neighbours,
//! are one range there, which is settled when the last of them is; if there are more than
//! [`RECORDS`] ranges, the smallest gaps between them count as discarded too. So the set covers
//! every unsettled record, which is all that soundness asks, and a thread that never sleeps costs
//! what was discarded and the smallest gaps in it. Memory in such a gap is not cached, as if it had been discarded: where
//! every other one of 4,000 pages is, half of the others are such. A range leaves the set only
//! when a record is made, and only if every record in it is settled: the reader's look at `settled`
//! acquires the proof, and the set's version hands it on to a thread that finds the range gone.

use super::range_set::RangeSet;
use super::threads::{Identity, ThreadDirectory, thread_id};
use crate::AddressRange;
use crate::sync::{AtomicU32, AtomicU64, Mutex, Ordering, fence};
#[cfg(not(loom))]
use pinfold_kernel::thread::is_lean;
#[cfg(not(loom))]
use std::cell::Cell;
use std::sync::TryLockError;

/// How many discarded ranges can be told apart; with more, gaps between them are pending too.
const RECORDS: usize = if cfg!(loom) { 2 } else { 1024 };
/// How many threads there can be; with more, nothing is settled.
const MOST_THREADS: usize = 8192;
/// How many threads one call looks at: about 0.2 ms.
const SUSPECTS_PER_CALL: usize = 64;
/// Room for marks. Threads whose numbers agree modulo this overwrite each other's marks, which
/// loses evidence and makes none.
const MARKS: usize = if cfg!(loom) { 4 } else { 256 };

#[derive(Debug)]
pub(super) struct PendingDiscards {
    records: RangeSet,
    /// How many records were ever made.
    born: AtomicU64,
    /// Records with a lower number are settled.
    settled: AtomicU64,
    marks: Box<[Mark]>,
    /// Tells this table from every other, also from those of a forked process's parent.
    instance: u64,
    /// The `/proc` whose thread numbers are known to be ours. With another one nothing is concluded from a thread's number.
    proc_of_our_numbers: Option<u64>,
    /// The reader's thread number, 0 until it runs.
    reader: AtomicU32,
    /// Guards the evidence gathered so far. Taken by misses only, and only if it is free.
    prover: Mutex<Prover>,
}

/// "This thread executed our code when there were so many records." Alone in its cache line.
#[derive(Default, Debug)]
#[repr(align(64))]
struct Mark(AtomicU64);

/// Thread numbers have at most 22 bits (`PID_MAX_LIMIT`); 42 bits count a million discards per
/// second for fifty days, after which the count saturates and marks are no longer made.
const COUNT_BITS: u32 = 42;

/// The records under investigation and which threads may still be in the middle of one of them.
#[derive(Debug)]
struct Prover {
    /// Records with a lower number are settled once no thread is suspected; `None` if no
    /// investigation is open.
    up_to: Option<u64>,
    /// Where the suspects are listed. In another directory their numbers may be other threads', or none's.
    directory: Option<Identity>,
    /// Thread numbers; never more than its first capacity, so it never allocates.
    suspects: Vec<u32>,
}

impl PendingDiscards {
    pub(super) fn new() -> Self {
        /// Not a loom atomic: it only makes names.
        static INSTANCES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let suspects = Vec::with_capacity(MOST_THREADS);
        Self {
            records: RangeSet::new(RECORDS),
            born: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            marks: (0..MARKS).map(|_| Mark::default()).collect(),
            // Relaxed: only uniqueness counts. A forked child goes on counting from its copy, so
            // it never meets a number that one of its threads has cached from its parent.
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            proc_of_our_numbers: ThreadDirectory::open()
                .ok()
                .filter(ThreadDirectory::numbers_agree)
                .map(|directory| directory.identity().file_system()),
            reader: AtomicU32::new(0),
            prover: Mutex::new(Prover { up_to: None, directory: None, suspects }),
        }
    }

    /// The calling thread is the reader of the events.
    pub(super) fn reader_is_me(&self) {
        // Relaxed: until it is seen, the reader is one suspect more.
        self.reader.store(thread_id(), Ordering::Relaxed);
    }

    /// The reader ends, and its number may be another thread's.
    pub(super) fn reader_ends(&self) {
        // Relaxed: a thread with the number that discards is made after this one has ended, and who finds the record of the
        // discard finds this.
        self.reader.store(0, Ordering::Relaxed);
    }

    /// Whether the thread is the reader of the events.
    pub(super) fn is_read_by(&self, thread: u32) -> bool {
        // Relaxed: see where it is written.
        thread != 0 && thread == self.reader.load(Ordering::Relaxed)
    }

    /// Makes a record. Called by the reader alone, before the event is in the log.
    pub(super) fn record(&self, range: AddressRange) {
        // Relaxed: no other thread writes it.
        let number = self.born.load(Ordering::Relaxed);
        // Acquire: what is over is dropped, so the proof that it is goes with it.
        let settled = self.settled.load(Ordering::Acquire);
        self.records.insert(range, number, settled);
        // Release: a thread that counts the record can read it.
        self.born.store(number + 1, Ordering::Release);
    }

    /// Every record so far is of a discard that the calling thread made, and that has returned. Before another thread has the
    /// monitor: the other writer of `settled` holds a lock.
    pub(super) fn settle_own(&self) {
        // Acquire: what was recorded. Release: as in `investigate`.
        self.settled.store(self.born.load(Ordering::Acquire), Ordering::Release);
    }

    /// Whether a thread's number is the same in this directory as to us.
    pub(super) fn counts_as(&self, directory: &ThreadDirectory) -> bool {
        self.proc_of_our_numbers == Some(directory.identity().file_system())
    }

    /// Whether every record is known to be settled; gathers no evidence.
    pub(super) fn is_settled(&self) -> bool {
        !self.overlaps(AddressRange::EVERYTHING)
    }

    /// Notes that the calling thread is not in the middle of a discard. Some 2 ns.
    pub(super) fn mark_caller(&self) {
        // Relaxed suffices: a value cannot be read before it is stored, so the records it counts
        // were made before this instruction, which this thread executes in user mode.
        let count = self.born.load(Ordering::Relaxed);
        // Relaxed: whatever is read here was settled. A mark that counts settled records only is evidence of nothing.
        if self.settled.load(Ordering::Relaxed) == count {
            return;
        }
        let thread = cached_thread_id(self.instance);
        if count >> COUNT_BITS != 0 {
            return;
        }
        let place = usize::try_from(thread).unwrap_or(0) % MARKS;
        if let Some(mark) = self.marks.get(place) {
            let value = u64::from(thread) << COUNT_BITS | count;
            // Release: a thread that acquires the mark sees what this thread did before, its discard
            // included. Only written when it changes, to leave the line alone on hits.
            if mark.0.load(Ordering::Relaxed) != value {
                mark.0.store(value, Ordering::Release);
            }
        }
    }

    /// Whether an announced discard may still take pages of `range` away. `is_reader` says which threads are readers of
    /// other monitors.
    pub(super) fn overlaps_unsettled(
        &self,
        range: AddressRange,
        is_reader: &dyn Fn(u32) -> bool,
    ) -> bool {
        self.mark_caller();
        if !self.overlaps(range) {
            return false;
        }
        self.investigate(is_reader);
        self.overlaps(range)
    }

    fn overlaps(&self, range: AddressRange) -> bool {
        // Acquire, in this order: `settled` never exceeds the `born` read after it, and both
        // carry what their writers saw.
        let settled = self.settled.load(Ordering::Acquire);
        let born = self.born.load(Ordering::Acquire);
        settled != born && self.records.overlaps(range, settled)
    }

    /// Gathers evidence. If another thread does, leaves it to that one. A thread without `/proc` gathers none.
    fn investigate(&self, is_reader: &dyn Fn(u32) -> bool) {
        let mut prover = match self.prover.try_lock() {
            Ok(prover) => prover,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let Ok(directory) = ThreadDirectory::open() else { return };
        let Some(up_to) = prover.open(self, &directory) else { return };
        prover.clear_suspects(|thread| self.is_innocent(thread, up_to, &directory, is_reader));
        if prover.suspects.is_empty() {
            prover.up_to = None;
            // Acquire fence: what cleared the last suspects happened before. Release: it
            // happened before whatever is done by those who find the records settled.
            fence(Ordering::Acquire);
            self.settled.store(up_to, Ordering::Release);
        }
    }

    /// Whether `thread`, in `directory` after record `up_to - 1` was made, has been out of the kernel, or
    /// at rest in it, since.
    fn is_innocent(
        &self,
        thread: u32,
        up_to: u64,
        directory: &ThreadDirectory,
        is_reader: &dyn Fn(u32) -> bool,
    ) -> bool {
        let called_us = || {
            thread == cached_thread_id(self.instance)
                || self.is_read_by(thread)
                || self.has_mark(thread, up_to)
                || is_reader(thread)
        };
        // The number is the directory's: where its numbers are not ours, one that looks like ours is another thread.
        (self.counts_as(directory) && called_us()) || directory.is_at_rest(thread)
    }

    fn has_mark(&self, thread: u32, up_to: u64) -> bool {
        let place = usize::try_from(thread).unwrap_or(0) % MARKS;
        // Acquire: see `mark_caller`.
        let mark = self.marks.get(place).map_or(0, |mark| mark.0.load(Ordering::Acquire));
        let counted = mark & ((1 << COUNT_BITS) - 1);
        mark >> COUNT_BITS == u64::from(thread) && counted >= up_to
    }
}

impl Prover {
    /// The open investigation, or a new one with every thread under suspicion, also if the open one is of another directory.
    fn open(&mut self, pending: &PendingDiscards, directory: &ThreadDirectory) -> Option<u64> {
        if self.up_to.is_none() || self.directory != Some(directory.identity()) {
            self.up_to = None;
            // Acquire: the records counted here were made before the threads are listed.
            let up_to = pending.born.load(Ordering::Acquire);
            directory.list(&mut self.suspects).ok()?;
            (self.up_to, self.directory) = (Some(up_to), Some(directory.identity()));
        }
        self.up_to
    }

    /// Looks at the first few suspects, drops the innocent and puts the others at the end.
    fn clear_suspects(&mut self, mut is_innocent: impl FnMut(u32) -> bool) {
        let looked_at = self.suspects.len().min(SUSPECTS_PER_CALL);
        let (mut seen, mut kept) = (0, 0);
        self.suspects.retain(|&thread| {
            seen += 1;
            let keep = seen > looked_at || !is_innocent(thread);
            kept += usize::from(keep && seen <= looked_at);
            keep
        });
        self.suspects.rotate_left(kept);
    }
}

/// The threads of a model share the standard library's thread-local variables.
#[cfg(loom)]
fn cached_thread_id(_: u64) -> u32 {
    thread_id()
}

/// The calling thread's number: a system call the first time, and whenever a thread goes back and
/// forth between two monitors. A thread of the library's own asks each time.
#[cfg(not(loom))]
fn cached_thread_id(instance: u64) -> u32 {
    if is_lean() {
        return thread_id();
    }
    thread_local! {
        static CACHED: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
    }
    let (known_for, thread) = CACHED.get();
    if known_for == instance {
        return thread;
    }
    let thread = thread_id();
    CACHED.set((instance, thread));
    thread
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::descriptor::without_proc;
    use std::sync::atomic::AtomicBool;
    use std::thread;
    use std::time::Duration;

    fn range(start: usize) -> AddressRange {
        AddressRange::new(start, 0x1000).unwrap()
    }

    /// Asks until the answer is no; other tests' threads may be busy for a while. Sleeps in between: two tests
    /// that only yield here are each a thread that never rests to the other, and none would end.
    fn settles(pending: &PendingDiscards, range: AddressRange) {
        while pending.overlaps_unsettled(range, &|_| false) {
            thread::sleep(Duration::from_micros(100));
        }
    }

    #[test]
    fn only_overlapping_ranges_are_pending() {
        let pending = PendingDiscards::new();
        assert!(!pending.overlaps(range(0x2000)));
        pending.record(range(0x2000));
        assert!(pending.overlaps(range(0x2fff)));
        assert!(!pending.overlaps(range(0x1000)) && !pending.overlaps(range(0x3000)));
    }

    /// No evidence is needed for what the calling thread has done itself.
    #[test]
    fn own_discards_are_settled_by_a_word() {
        let pending = PendingDiscards::new();
        assert!(pending.is_settled());
        pending.record(range(0x2000));
        assert!(!pending.is_settled());
        pending.settle_own();
        assert!(pending.is_settled() && !pending.overlaps(range(0x2000)));
    }

    /// In a process that sees the `/proc` of an outer pid namespace, the list's number may be another thread's.
    #[test]
    fn a_number_that_means_another_thread_to_the_list_is_no_evidence() {
        let mut pending = PendingDiscards::new();
        pending.record(range(0x2000));
        pending.mark_caller();
        let directory = ThreadDirectory::open().unwrap();
        let is_innocent = |pending: &PendingDiscards, is_reader| {
            pending.is_innocent(thread_id(), 1, &directory, &|_| is_reader)
        };
        assert!(is_innocent(&pending, false), "it executes our code");
        // As if another `/proc` had been there when the monitor was made.
        pending.proc_of_our_numbers = pending.proc_of_our_numbers.map(|it| it + 1);
        assert!(!is_innocent(&pending, false), "and is not at rest");
        pending.reader_is_me();
        assert!(!is_innocent(&pending, false) && !is_innocent(&pending, true));
    }

    /// However many discards there were, only what was discarded is pending, and it settles.
    #[test]
    fn many_records_leave_other_memory_alone() {
        let pending = PendingDiscards::new();
        let discards = 4 * RECORDS as u64;
        for number in 0..discards {
            // Half of them neighbours, half of them scattered.
            let place = usize::try_from(number / 2 + 1).unwrap();
            let start = if number % 2 == 0 { place << 12 } else { (1 << 32) + (place << 16) };
            pending.record(range(start));
        }
        assert!(pending.overlaps(range(0x1000)) && pending.overlaps(range(RECORDS << 12)));
        assert!(pending.overlaps(range((1 << 32) + (RECORDS << 16))));
        assert!(!pending.overlaps(range(1 << 31)) && !pending.overlaps(range(1 << 40)));
        settles(&pending, AddressRange::EVERYTHING);
        assert_eq!(pending.settled.load(Ordering::Acquire), discards);
    }

    /// A thread that never sleeps keeps the record alive for as long as it does not call us, and
    /// a call is enough. While it spins, the answer must be yes every time.
    #[test]
    fn a_busy_thread_is_suspected_until_it_calls() {
        let (pending, call, called, stop) = (
            PendingDiscards::new(),
            AtomicBool::new(false),
            AtomicBool::new(false),
            AtomicBool::new(false),
        );
        let busy = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                busy.store(true, Ordering::Release);
                while !stop.load(Ordering::Acquire) {
                    if call.load(Ordering::Acquire) {
                        pending.mark_caller();
                        called.store(true, Ordering::Release);
                    }
                }
            });
            while !busy.load(Ordering::Acquire) {
                thread::yield_now();
            }
            pending.record(range(0x2000));
            for _ in 0..50 {
                assert!(pending.overlaps_unsettled(range(0x2000), &|_| false));
            }
            call.store(true, Ordering::Release);
            while !called.load(Ordering::Acquire) {
                thread::yield_now();
            }
            settles(&pending, range(0x2000));
            stop.store(true, Ordering::Release);
        });
    }

    /// A thread that finds no `/proc` does not take the threads for gone that another one has listed.
    #[test]
    fn a_thread_without_proc_clears_no_suspect() {
        let pending = PendingDiscards::new();
        let (busy, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        let asks = || (0..50).all(|_| pending.overlaps_unsettled(range(0x2000), &|_| false));
        let answers = thread::scope(|scope| {
            scope.spawn(|| {
                busy.store(true, Ordering::Release);
                while !stop.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
            });
            while !busy.load(Ordering::Acquire) {
                thread::yield_now();
            }
            pending.record(range(0x2000));
            let answers = (asks(), without_proc(asks), asks());
            stop.store(true, Ordering::Release);
            answers
        });
        assert!(matches!(answers, (true, None | Some(true), true)), "{answers:?}");
        settles(&pending, range(0x2000));
    }

    /// A thread that is busy and never calls is suspected, unless it reads events: another monitor's, or ours.
    #[test]
    fn a_reader_is_not_suspected() {
        let (pending, other) = (PendingDiscards::new(), PendingDiscards::new());
        let (busy, stop) = (AtomicU32::new(0), AtomicBool::new(false));
        pending.record(range(0x2000));
        let verdicts = thread::scope(|scope| {
            scope.spawn(|| {
                other.reader_is_me();
                busy.store(thread_id(), Ordering::Release);
                while !stop.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                other.reader_ends();
            });
            while busy.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            let reader = busy.load(Ordering::Acquire);
            let is_reader = |thread| other.is_read_by(thread);
            let directory = ThreadDirectory::open().unwrap();
            let verdicts = [
                pending.is_innocent(reader, 1, &directory, &|_| false),
                pending.is_innocent(reader, 1, &directory, &is_reader),
                other.is_innocent(reader, 1, &directory, &|_| false),
            ];
            stop.store(true, Ordering::Release);
            verdicts
        });
        assert_eq!(verdicts, [false, true, true]);
        assert!(!other.is_read_by(busy.into_inner()) && !other.is_read_by(0));
    }

    /// A mark made before the record says nothing about it.
    #[test]
    fn old_marks_are_no_evidence() {
        let pending = PendingDiscards::new();
        let me = thread_id();
        pending.mark_caller();
        pending.record(range(0x1000));
        assert!(!pending.has_mark(me, 1), "a mark without records is none");
        pending.mark_caller();
        assert!(pending.has_mark(me, 1));
        pending.record(range(0x2000));
        assert!(!pending.has_mark(me, 2));
        pending.mark_caller();
        assert!(pending.has_mark(me, 2) && !pending.has_mark(me + 256, 2));
    }

    /// The suspects of one directory are none of another's, which has its own.
    #[test]
    fn an_investigation_goes_on_in_its_own_directory_only() {
        let pending = PendingDiscards::new();
        let directory = ThreadDirectory::open().unwrap();
        pending.record(range(0x1000));
        let mut prover = pending.prover.lock().unwrap();
        // Threads come and go.
        let open = |prover: &mut Prover| {
            (0..1000).find_map(|_| prover.open(&pending, &directory)).expect("a list")
        };
        assert_eq!(open(&mut prover), 1);
        assert!(prover.suspects.contains(&thread_id()));
        pending.record(range(0x2000));
        prover.suspects.clear();
        assert_eq!((open(&mut prover), prover.suspects.len()), (1, 0));
        prover.directory = pinfold_kernel::descriptor::identity(0).ok();
        assert_eq!(open(&mut prover), 2);
        assert!(prover.suspects.contains(&thread_id()));
    }

    #[test]
    fn suspects_are_looked_at_in_turn() {
        let suspects = (0..200).collect();
        let mut prover = Prover { up_to: Some(1), directory: None, suspects };
        let mut looked_at = Vec::new();
        for _ in 0..4 {
            let before = looked_at.len();
            prover.clear_suspects(|thread| {
                looked_at.push(thread);
                thread % 2 == 0
            });
            assert!(looked_at.len() - before <= SUSPECTS_PER_CALL);
        }
        assert_eq!(looked_at.first_chunk(), Some(&[0, 1, 2]));
        assert!((0..200).all(|thread| looked_at.contains(&thread)));
        assert!(prover.suspects.iter().all(|thread| thread % 2 == 1));
        assert_eq!(prover.suspects.len(), 100);
    }
}
