//! The thread that reads the events, and what it shares with those who ask.
//!
//! A changing thread waits until its event has been read, so this thread must never wait for one:
//! it allocates nothing, frees nothing, takes no lock and runs no signal handler. What it needs
//! was made before it began, and what it leaves is freed when no thread can wait for it any more.
//!
//! It has a table of descriptors of its own, so a program that closes every descriptor it does
//! not know (as daemons do) takes the userfaultfd away from our callers, which notice, but not from
//! the reader: no thread is left hanging in `munmap`.
//! In that table are copies of the files whose closing the program would notice
//! ([`keep_only`](descriptor::keep_only)); they are closed when the reader ends.
//!
//! It runs with the highest real-time priority that the process may ask for (`CAP_SYS_NICE` or
//! `RLIMIT_RTPRIO`), because a thread with such a priority may be the one that waits for it, and a
//! thread with a lower one, which never sleeps, must not stand between them. A process that may ask
//! for none has no such threads, unless it gave the right away. The reader sleeps but for a
//! microsecond or two for each event.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have a table of descriptors that is the reader's alone, to close a number there, and to
//! read from it.

#![allow(unsafe_code)]

use super::event_count::EventCount;
use super::log::{Log, Writer, from_kernel};
use super::pending_discards::PendingDiscards;
use super::range_set::RangeSet;
use crate::AddressRange;
use pinfold_core::ChangeMarks;
use pinfold_kernel::{
    Descriptor, Errno, descriptor, thread, userfaultfd, userfaultfd::Event, userfaultfd::Message,
};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// How many changes back a cache may be before it has to drop everything.
const LOG_ENTRIES: usize = 4096;
/// How many places that watched memory may have moved to are told apart; with more, the memory
/// between some of them is looked at as well when the monitor ends.
const MOVED_PLACES: usize = 1024;
/// How many ranges can be marked when they change.
const MARKS: usize = 128;

/// What threads ask the reader to log: how often they did, and how often that is in the log.
#[derive(Debug, Default)]
struct Requests {
    made: AtomicU64,
    done: AtomicU64,
}

impl Requests {
    /// One more; its number.
    fn add(&self) -> u64 {
        // AcqRel: the reader that finds the count finds what came with it, and what the asker saw before is
        // before the entry.
        self.made.fetch_add(1, Ordering::AcqRel) + 1
    }

    fn is_done(&self, number: u64) -> bool {
        // Acquire: the log word that counts the entry was stored before.
        self.done.load(Ordering::Acquire) >= number
    }

    /// The last one, if it is not done. Asked before the entry is made, which covers all until then.
    fn open(&self) -> Option<u64> {
        // Acquire: pairs with `add`.
        let last = self.made.load(Ordering::Acquire);
        // Relaxed: the reader alone writes it.
        (last != self.done.load(Ordering::Relaxed)).then_some(last)
    }

    /// All up to this one are in the log.
    fn close(&self, last: Option<u64>) {
        // Release: pairs with `is_done`, after the log word.
        last.into_iter().for_each(|last| self.done.store(last, Ordering::Release));
    }
}

#[derive(Debug)]
pub(super) struct Core {
    pub(super) log: Log,
    /// Set by the reader with each entry but those that were asked for because a change takes too long.
    pub(super) marks: ChangeMarks<MARKS>,
    pub(super) discards: PendingDiscards,
    pub(super) event_count: EventCount,
    /// The error that ended everything, 0 while all is well.
    lost: AtomicI32,
    /// Set, then followed by the unmapping of the doorbell page, to end the reader.
    stop: AtomicBool,
    /// To have everything declared changed.
    floods: Requests,
    /// A range that is to be declared changed; one at a time, by the thread that holds the monitor's lock for it.
    named: [AtomicUsize; 2],
    /// To have that done.
    names: Requests,
    /// The doorbell page: discarding it wakes the reader and means nothing else, unmapping it is
    /// the last event there is.
    doorbell: AddressRange,
    /// Where watched memory may be that no call of `watch` named: where it was moved to, and next to
    /// what was unmapped. Written by the reader alone.
    moved: RangeSet,
    /// How many events there were after which watched memory may be at another place.
    moves: AtomicU64,
}

impl Core {
    pub(super) fn new(doorbell: AddressRange) -> Result<Self, Errno> {
        Ok(Self {
            log: Log::new(LOG_ENTRIES)?,
            marks: ChangeMarks::new(),
            discards: PendingDiscards::new(),
            event_count: EventCount::default(),
            lost: AtomicI32::new(0),
            stop: AtomicBool::new(false),
            floods: Requests::default(),
            named: [const { AtomicUsize::new(0) }; 2],
            names: Requests::default(),
            doorbell,
            moved: RangeSet::new(MOVED_PLACES),
            moves: AtomicU64::new(0),
        })
    }

    /// The error that ended everything.
    pub(super) fn lost(&self) -> Option<Errno> {
        // Relaxed: the number says all there is to say.
        let errno = self.lost.load(Ordering::Relaxed);
        (errno != 0).then_some(Errno(errno))
    }

    /// Remembers that nothing can be believed any more. The first reason is kept.
    pub(super) fn lose(&self, reason: Errno) -> Errno {
        // Relaxed: as above.
        let kept = self.lost.compare_exchange(0, reason.0, Ordering::Relaxed, Ordering::Relaxed);
        kept.map_or_else(Errno, |_| reason)
    }

    /// Tells the reader to end once it has read that the doorbell page was unmapped.
    pub(super) fn stop(&self) {
        // Release, as a matter of course; the event of the doorbell page that follows carries it.
        self.stop.store(true, Ordering::Release);
    }

    /// Asks for [`AddressRange::EVERYTHING`] in the log; gives the number to wait for.
    pub(super) fn want_flood(&self) -> u64 {
        self.floods.add()
    }

    pub(super) fn flooded(&self, number: u64) -> bool {
        self.floods.is_done(number)
    }

    /// Asks for `range` in the log; gives the number to wait for. By one thread at a time, until it is there.
    pub(super) fn want_named(&self, range: AddressRange) -> u64 {
        // Relaxed: carried by the count.
        self.named[0].store(range.start(), Ordering::Relaxed);
        self.named[1].store(range.end(), Ordering::Relaxed);
        self.names.add()
    }

    /// Whether the range is in the log.
    pub(super) fn is_named(&self, number: u64) -> bool {
        self.names.is_done(number)
    }

    /// Remembers that watched memory may be in `range`. Called by the reader alone.
    fn note_moved(&self, range: AddressRange) {
        if !self.moved.covers(range) {
            self.moved.insert(range, 0, 0);
        }
        // Release: a thread that counts this finds the range. It is counted, too, if the range was known:
        // a thread that looked there has looked too early.
        self.moves.fetch_add(1, Ordering::Release);
    }

    /// How often watched memory may have come to another place.
    pub(super) fn moves(&self) -> u64 {
        // Acquire: pairs with `note_moved`.
        self.moves.load(Ordering::Acquire)
    }

    /// Where it may have come to; `None` if the reader was in the way all the time.
    pub(super) fn moved(&self) -> Option<Vec<AddressRange>> {
        self.moved.ranges()
    }
}

/// Reads events until told to stop.
pub(super) fn run(core: &Core, uffd: Descriptor) {
    // SAFETY: this thread is the library's own, has no other descriptor, and closes this one by its number.
    let own_table = unsafe { descriptor::keep_only(&[uffd]) }.is_ok();
    thread::leave_directory_and_semaphores();
    // SAFETY: it was opened, so it is not -1. In a table of its own it stays open until this thread closes it; in one
    // that is shared the kernel looks the number up for each call.
    let lent = unsafe { BorrowedFd::borrow_raw(uffd) };
    core.discards.reader_is_me();
    // Without the right to it, no other thread of the process has it either.
    let _ = thread::run_before_all();
    let mut reader = Reader { core, uffd: lent, log: Writer::new(&core.log), doorbell_gone: false };
    while reader.wait() {
        reader.drain();
        // Both: the thread that stops us then unmaps the doorbell, and waits in there until we have
        // read that. Stopping at the word alone, behind an earlier event, would leave it waiting
        // for ever. Acquire: pairs with `stop`.
        if reader.doorbell_gone && core.stop.load(Ordering::Acquire) {
            break;
        }
    }
    core.discards.reader_ends();
    if own_table {
        // SAFETY: the number is this thread's table's alone, whose copies no value owns.
        unsafe { descriptor::close(uffd) };
    }
}

struct Reader<'a> {
    core: &'a Core,
    uffd: BorrowedFd<'a>,
    log: Writer<'a>,
    /// The event of the doorbell's unmapping has been read.
    doorbell_gone: bool,
}

impl Reader<'_> {
    /// Waits for an event; false if the descriptor is gone, which only happens in a shared table.
    fn wait(&self) -> bool {
        let open = descriptor::wait_readable(self.uffd.as_raw_fd(), -1);
        if !open {
            self.core.lose(Errno(libc::EBADF));
        }
        open
    }

    /// Takes what there is, writes it down, and only then says so.
    fn drain(&mut self) {
        let mut messages = [Message::default(); 16];
        self.log.raise_pending();
        let got = userfaultfd::read(self.uffd, &mut messages).unwrap_or(0);
        for message in messages.iter().take(got) {
            self.note(message.event());
        }
        let Core { floods, names, .. } = self.core;
        let (flood, name) = (floods.open(), names.open());
        if flood.is_some() {
            // No mark: it stands for changes under way, each of which has an entry of its own before its call returns.
            self.log.append(AddressRange::EVERYTHING);
        }
        if name.is_some() {
            // Relaxed: the range came with the request.
            let [start, end] = [0, 1].map(|bound| self.core.named[bound].load(Ordering::Relaxed));
            self.log(from_kernel(start, end));
        }
        self.log.publish();
        floods.close(flood);
        names.close(name);
        if got != 0 {
            self.core.event_count.notify();
        }
    }

    /// Writes an entry down, and marks what it changes. Published later: a thread that knows of it finds the marks set.
    fn log(&mut self, range: AddressRange) {
        self.core.marks.set(range);
        self.log.append(range);
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::Unmap { start, end } => self.note_unmap(from_kernel(start, end)),
            Event::Remap { from, to, length } => {
                let [left, arrived] =
                    [from, to].map(|start| from_kernel(start, start.saturating_add(length)));
                self.note_neighbours(left);
                self.core.note_moved(arrived);
                self.log(left);
                // No mark: what stood there and was watched has an event of its own, and the kernel names more than has
                // come where it shortens what it moves (before Linux 6.16).
                self.log.append(arrived);
            }
            Event::Remove { start, end } => self.note_remove(from_kernel(start, end)),
            // The memory's content stays, so nothing is logged.
            Event::Protected { page } => userfaultfd::unprotect(self.uffd, page),
            Event::Other => {}
        }
    }

    fn note_unmap(&mut self, range: AddressRange) {
        self.doorbell_gone |= range.overlaps(&self.core.doorbell);
        self.note_neighbours(range);
        self.log(range);
    }

    /// What was cut off from watched memory by a change of `range` touches it.
    fn note_neighbours(&self, range: AddressRange) {
        let (start, end) = (range.start().saturating_sub(1), range.end().saturating_add(1));
        if let Some(wider) = AddressRange::between(start.max(1), end)
            && !self.core.moved.covers(wider)
        {
            self.core.note_moved(wider);
        }
    }

    /// The record comes first: a thread that reads the log entry must find the range pending.
    fn note_remove(&mut self, discarded: AddressRange) {
        if discarded != self.core.doorbell {
            self.core.discards.record(discarded);
            self.log(discarded);
        }
    }
}
