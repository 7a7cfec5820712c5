//! The userfaultfd monitors of this process, as sources of what discards are under way.
//!
//! The kernel announces a discard once, to the userfaultfd that watches the pages at that moment. The discard goes on by
//! their addresses alone, whichever userfaultfd watches them by then. So a monitor that has watched pages asks the records of
//! the process's other monitors, too ([`others_may_discard`]): they may have watched the same pages before, or what was mapped there.
//!
//! **Claim:** *if a discard of a page of `range` was announced to another of these monitors, before the calling thread's
//! registration of the page with its own, then `others_may_discard(range)`, called after that registration, says
//! yes or the discard has taken effect.* The discard was announced under the kernel's lock of all mappings, after the other one had
//! registered the page, and that after it was entered here; the caller's registration took the same lock later. So:
//!
//! 1. The other one is found, or was removed, which is done only when it has ended, and every record of it is
//!    settled. What a thread saw that removes it, is seen by a thread that finds it removed (`members.rs`).
//! 2. The kernel's count of changes under way, of the other one's userfaultfd, was raised under that lock. If it is not
//!    raised any more, the event was read. The reader raised the log's pending mark before, and records the discard
//!    before it takes the mark back. So after the wait for that, the record is there, and stands until it is settled
//!    (`pending_discards.rs`). Both waits are bounded; where they do not succeed, the answer is yes.
//! 3. One that has ended needs not be asked by the kernel's count: it has ended all its watches, and found the count zero
//!    after that, and everything logged, before it was said to have ended.
//!
//! Where the calling thread has a table of descriptors without the other one's, it cannot ask, and the answer is yes as long as
//! another thread has it. So it is where it has another file under that number, another userfaultfd for instance.
//!
//! One that has lost its descriptor cannot be asked for the count; its records count. A discard that was announced to such a
//! one and is not read yet goes unseen if its pages are unmapped and mapped anew meanwhile. Its watches end in no other way.
//!
//! Each copy of the library (the preload library has its own) knows its own monitors only. A forked child begins anew: none
//! of its memory is watched, and a list whose locks other threads of its parent may have held is not looked at.
//!
//! The price: nothing but two loads for a process with one monitor; two system calls on each miss for each other one.

use super::log::Log;
use super::members::Members;
use super::patience::Patience;
use super::reader::Core;
use super::shared::Kept;
use super::threads::ThreadDirectory;
use crate::AddressRange;
use crate::descriptor::KnownNumber;
use crate::fork_mark::ForkMark;
use pinfold_kernel::{Errno, userfaultfd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// With more threads it is not looked which of them have a descriptor.
const MOST_THREADS: usize = 8192;

/// Those of this process; the parent's in a forked child that has made none.
static SOURCES: Kept<Sources> = Kept::new();

#[derive(Debug)]
struct Sources {
    mark: ForkMark,
    members: Members<DiscardSource>,
}

impl Sources {
    fn new() -> Result<Self, Errno> {
        Ok(Self { mark: ForkMark::new(1)?, members: Members::new() })
    }

    fn of_this_process() -> Option<&'static Self> {
        SOURCES.current().filter(|sources| !sources.mark.forked())
    }
}

/// One monitor, which may have been dropped.
#[derive(Debug)]
pub(super) struct DiscardSource {
    core: Arc<Core>,
    uffd: KnownNumber,
    /// Nothing is watched any more, and all announcements are recorded. Set before the descriptor is closed.
    has_ended: AtomicBool,
}

impl DiscardSource {
    /// One more; before it watches what another monitor may watch after it.
    pub(super) fn enter(core: &Arc<Core>, uffd: KnownNumber) -> Result<Arc<Self>, Errno> {
        let sources = SOURCES.get(|sources| !sources.mark.forked(), Sources::new)?;
        // Ended ones whose last discard was settled after they ended.
        sources.members.any(|source| {
            source.leave_if_over(&sources.members, Self::investigates_over);
            false
        });
        let (core, has_ended) = (Arc::clone(core), AtomicBool::new(false));
        let source = Arc::new(Self { core, uffd, has_ended });
        sources.members.enter(&source);
        Ok(source)
    }

    /// The monitor has ended its watches, and every change of what it watched is in its log. Its records
    /// stay until they are settled.
    pub(super) fn end(self: &Arc<Self>) {
        // Release: a thread that asks no further finds the records.
        self.has_ended.store(true, Ordering::Release);
        if let Some(sources) = Sources::of_this_process() {
            self.leave_if_over(&sources.members, Self::investigates_over);
        }
    }

    fn has_ended(&self) -> bool {
        // Acquire: pairs with `end`.
        self.has_ended.load(Ordering::Acquire)
    }

    fn leave_if_over(self: &Arc<Self>, members: &Members<Self>, is_over: fn(&Self) -> bool) {
        if self.has_ended() && is_over(self) {
            // False if another thread was faster.
            let _ = members.remove(self);
        }
    }

    fn investigates_over(&self) -> bool {
        !self.has_unsettled(AddressRange::EVERYTHING)
    }

    /// Whether a discard that is recorded may still take pages of `range` away. No monitor's reader discards.
    pub(super) fn has_unsettled(&self, range: AddressRange) -> bool {
        let is_reader = |thread| {
            let reads = |source: &Arc<Self>| source.core.discards.is_read_by(thread);
            Sources::of_this_process().is_some_and(|sources| sources.members.any(reads))
        };
        self.core.discards.overlaps_unsettled(range, &is_reader)
    }

    /// Whether a discard that was announced to this monitor before the call may still take pages of `range` away.
    fn may_discard(&self, range: AddressRange, patience: &mut Patience) -> bool {
        let is_recorded = || self.has_unsettled(range);
        is_recorded() || !self.has_recorded_all(patience) || is_recorded()
    }

    /// Waits until every discard that was announced before this call has its record. False if that cannot be told in time, or not
    /// by this thread.
    fn has_recorded_all(&self, patience: &mut Patience) -> bool {
        while !self.has_ended() && self.core.lost().is_none() {
            let answer = userfaultfd::changing(self.uffd.lend());
            // Behind the question: it was this one's userfaultfd that answered.
            match answer.is_ok() && self.uffd.is_ours() {
                true if answer == Ok(false) => break,
                true if patience.is_over() => return false,
                true => patience.pause(),
                false if self.has_ended() => break,
                false if self.may_be_open_elsewhere() => return false,
                // Closed by the monitor's end, or by the program.
                false if self.has_ended() => break,
                false => _ = self.core.lose(answer.err().unwrap_or(Errno(libc::EBADF))),
            }
        }
        // Acquire fence: the word is loaded after the kernel's answer; see `userfaultfd.rs`, Visible.
        fence(Ordering::Acquire);
        let first = self.core.log.word();
        while Log::includes(first, self.core.log.word()).is_none() {
            if patience.is_over() {
                return false;
            }
            patience.pause();
        }
        true
    }

    /// Whether another thread than the reader may have it in its table of descriptors, which this one has not: each may have a
    /// table of its own (`unshare(CLONE_FILES)`). Where the threads cannot be listed, that is unknown.
    fn may_be_open_elsewhere(&self) -> bool {
        let Ok(directory) = ThreadDirectory::open() else { return true };
        let mut threads = Vec::with_capacity(MOST_THREADS);
        let is_reader = |thread| self.core.discards.is_read_by(thread);
        let may_have_it = |thread| self.uffd.may_be_open_in(directory.lend(), thread);
        directory.list(&mut threads).is_err()
            || !self.core.discards.counts_as(&directory)
            || threads.iter().any(|&it| !is_reader(it) && may_have_it(it))
    }
}

/// Whether a discard that was announced to another userfaultfd monitor of this process than `own` may still take pages of `range`
/// away. Waits some 20 ms at most; says yes if it cannot be told by then.
pub(super) fn others_may_discard(own: &Arc<DiscardSource>, range: AddressRange) -> bool {
    let Some(sources) = Sources::of_this_process() else { return false };
    if sources.members.count() <= 1 {
        return false;
    }
    let mut patience = Patience::new();
    sources.members.any(|source| {
        let may_discard = !Arc::ptr_eq(source, own) && source.may_discard(range, &mut patience);
        source.leave_if_over(&sources.members, |it| it.core.discards.is_settled());
        may_discard
    })
}

/// Runs `code` while a thread of this process is about to enter or leave.
#[cfg(test)]
pub(super) fn while_a_place_is_locked<A>(code: impl FnOnce() -> A) -> A {
    Sources::of_this_process().unwrap().members.while_locked(code)
}

#[cfg(test)]
mod tests {
    use super::super::log::Writer;
    use super::super::start::StartError;
    use super::super::watched_page::{Unread, range_of};
    use super::*;
    use crate::descriptor::{KnownDescriptor, in_another_table};
    use crate::own_process::alone;
    use pinfold_kernel::descriptor;
    use pinfold_kernel::mapping::AtomicPage;
    use pinfold_kernel::userfaultfd::Message;
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};
    use std::thread;

    /// A monitor without a reader, which no other one asks.
    fn unread() -> (KnownDescriptor, DiscardSource) {
        let uffd = KnownDescriptor::new(userfaultfd::open().unwrap()).unwrap();
        userfaultfd::api(uffd.lend(), StartError::FEATURES).unwrap();
        let doorbell = AddressRange::new(0x1000, 0x1000).unwrap();
        let core = Arc::new(Core::new(doorbell).unwrap());
        let has_ended = AtomicBool::new(false);
        let source = DiscardSource { core, uffd: uffd.alias(), has_ended };
        (uffd, source)
    }

    fn is_told(source: &DiscardSource) -> bool {
        source.has_recorded_all(&mut Patience::new())
    }

    /// From the announcement until the record is made, nothing is told, of no range.
    #[test]
    fn an_announcement_counts_before_it_is_read_and_while_it_is_in_the_readers_hands() {
        let (uffd, source) = unread();
        assert!(is_told(&source));
        let page = AtomicPage::new().unwrap();
        let _unread = Unread::watch(uffd.lend(), &page).unwrap();
        let other = AddressRange::new(0x1000, 0x1000).unwrap();
        let is_pending = || !is_told(&source) && source.may_discard(other, &mut Patience::new());
        let mut reader = Writer::new(&source.core.log);
        // Asserted when no thread waits for a reader any more.
        let (announced, held) = thread::scope(|scope| {
            scope.spawn(|| page.discard().unwrap());
            while userfaultfd::changing(uffd.lend()) == Ok(false) {
                thread::yield_now();
            }
            let announced = is_pending();
            reader.raise_pending();
            while userfaultfd::read(uffd.lend(), &mut [Message::default()]) != Ok(1) {}
            while userfaultfd::changing(uffd.lend()) == Ok(true) {
                thread::yield_now();
            }
            (announced, is_pending())
        });
        assert!(announced && held);
        source.core.discards.record(range_of(&page).unwrap());
        reader.append(range_of(&page).unwrap());
        reader.publish();
        assert!(is_told(&source) && !source.may_discard(other, &mut Patience::new()));
    }

    /// Its descriptor is in the table of another thread. What stands under its number here says nothing of it, and it is not
    /// lost to those that have it.
    #[test]
    fn one_in_another_table_of_descriptors_is_asked_for_nothing_and_is_not_lost() {
        // No other test takes the number.
        let name = "one_in_another_table_of_descriptors_is_asked_for_nothing_and_is_not_lost";
        alone(&format!("{}::{name}", module_path!().split_once("::").unwrap().1), || {
            in_another_table(unread, |(uffd, source)| {
                let numbers = |file: OwnedFd| {
                    let here = descriptor::duplicate_above(file.as_fd(), uffd.number()).unwrap();
                    (here.as_raw_fd() == uffd.number()).then_some(here)
                };
                let null = || descriptor::open(c"/dev/null", 0).unwrap();
                let other = || {
                    let other = userfaultfd::open().unwrap();
                    userfaultfd::api(other.as_fd(), StartError::FEATURES).unwrap();
                    other
                };
                let nothing = || !is_told(&source) && source.core.lost().is_none();
                assert!(nothing());
                for file in [null(), other()] {
                    let here = numbers(file);
                    assert!(nothing() && here.is_some(), "{here:?}");
                }
                let page = AddressRange::new(0x1000, 0x1000).unwrap();
                assert!(source.may_discard(page, &mut Patience::new()));
            });
        });
    }

    /// A monitor that lost its descriptor hinders no other one for ever.
    #[test]
    fn one_without_a_descriptor_is_lost_or_has_ended() {
        let (uffd, source) = unread();
        drop(uffd);
        assert!(is_told(&source));
        assert_eq!(source.core.lost(), Some(Errno(libc::EBADF)));
        let (uffd, source) = unread();
        source.has_ended.store(true, Ordering::Release);
        drop(uffd);
        assert!(is_told(&source));
        assert_eq!(source.core.lost(), None);
    }
}
