//! What a userfaultfd must show before anything it says is believed.
//!
//! Nothing here sleeps and hopes: a changing call returns only after its event has been read, and
//! its effect can be seen in memory.

use super::start::StartError;
use super::watched_page::{Unread, bounds, range_of};
use crate::{AddressRange, Monitor, Position};
use pinfold_kernel::{
    Errno, descriptor, mapping::AtomicPage, thread, thread::LeanThread, userfaultfd,
    userfaultfd::Message,
};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Tests the question whether a change is under way, before there is a reader.
///
/// Two threads change a page each. While their events are unread the answer must be yes, it must
/// stay yes while the second is unread, and be no in the end. Kernels before 5.15 keep a mere flag
/// and fail in the middle: there, one change that ends hides another.
pub(super) fn of_the_question(uffd: BorrowedFd<'_>) -> Result<(), StartError> {
    if userfaultfd::changing(uffd) != Ok(false) {
        return Err(StartError::SelfTest { missed: "the absence of changes" });
    }
    let new_page = || AtomicPage::walled().map_err(StartError::memory);
    let pages = [Arc::new(new_page()?), Arc::new(new_page()?)];
    must_be_watched(uffd, &pages, false)?;
    let _unread = [Unread::watch(uffd, &pages[0])?, Unread::watch(uffd, &pages[1])?];
    must_be_watched(uffd, &pages, true)?;
    let changers = pages.each_ref().map(spawn_changer);
    let verdict = judge(uffd, &pages, &changers);
    read_until_finished(uffd, &changers);
    changers.into_iter().flatten().for_each(LeanThread::join);
    verdict
}

/// A change of one page, on a thread of its own.
struct Change {
    page: Arc<AtomicPage>,
    /// Why it failed; 0 as long as it has not.
    errno: AtomicI32,
    is_done: AtomicBool,
}

type Changer = std::io::Result<LeanThread<Change>>;

/// Replaces `page` in a thread of its own, after marking its old contents.
fn spawn_changer(page: &Arc<AtomicPage>) -> Changer {
    // Relaxed: the thread is made after this.
    page.word().store(1, Ordering::Relaxed);
    let (errno, is_done) = (AtomicI32::new(0), AtomicBool::new(false));
    let change = Change { page: Arc::clone(page), errno, is_done };
    LeanThread::spawn(c"pinfold-test", change, |change| {
        // One that was joined may have its part in the process's directories for a moment longer (`do_exit` lets go of memory,
        // for which a join waits, before it does of `fs`): the program may not enter a mount namespace then.
        thread::leave_directory_and_semaphores();
        if let Err(Errno(errno)) = change.page.replace() {
            // Relaxed: the number says all there is to say.
            change.errno.store(errno, Ordering::Relaxed);
        }
        // Release: the replacement has returned.
        change.is_done.store(true, Ordering::Release);
    })
}

fn judge(
    uffd: BorrowedFd<'_>,
    pages: &[Arc<AtomicPage>; 2],
    changers: &[Changer; 2],
) -> Result<(), StartError> {
    for changer in changers {
        if let Err(error) = changer {
            return Err(StartError::thread(error));
        }
    }
    // Relaxed: the kernel swaps the page; its lock orders that after the count was raised.
    let replaced = |page: &Arc<AtomicPage>| page.word().load(Ordering::Relaxed) == 0;
    let is_over = || pages.iter().all(replaced) || refused(changers).is_err();
    must(is_over, "a page mapped over another")?;
    refused(changers)?;
    must_be(uffd, true, "changes under way")?;
    read_one(uffd)?;
    must(|| finished(changers) == 1, "a change that ends when its event is read")?;
    must_be(uffd, true, "a change under way beside one that ended")?;
    read_one(uffd)?;
    must(|| finished(changers) == 2, "a change that ends when its event is read")?;
    must_be(uffd, false, "the end of changes")
}

/// The error of a change that the kernel refused.
fn refused(changers: &[Changer; 2]) -> Result<(), StartError> {
    // Relaxed: as where it is stored.
    let errno = |changer: &LeanThread<Change>| changer.on().errno.load(Ordering::Relaxed);
    let first = changers.iter().flatten().map(errno).find(|&errno| errno != 0);
    first.map_or(Ok(()), |errno| Err(StartError::memory(Errno(errno))))
}

fn finished(changers: &[Changer; 2]) -> usize {
    // Acquire: pairs with the store at the thread's end.
    let is_done = |changer: &&LeanThread<Change>| changer.on().is_done.load(Ordering::Acquire);
    changers.iter().flatten().filter(is_done).count()
}

/// For a thread that is ready and gets no processor: with fifteen others to each processor, 2 s were too short. A kernel
/// that does less shows it at once.
const LONGEST: Duration = Duration::from_secs(30);

/// Waits for what happens within microseconds unless the kernel does not do it, or others have its processors.
fn must(condition: impl Fn() -> bool, missed: &'static str) -> Result<(), StartError> {
    const YIELDS: u32 = 64;
    let deadline = Instant::now() + LONGEST;
    for tries in 0_u32.. {
        // Before the look: a thread that did not run meanwhile looks once more.
        let is_last = Instant::now() > deadline;
        if condition() {
            return Ok(());
        }
        if is_last {
            break;
        }
        // One that only yields takes the processor from the thread that it waits for.
        if tries < YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(Duration::from_micros(100));
        }
    }
    Err(StartError::SelfTest { missed })
}

fn must_be(uffd: BorrowedFd<'_>, changing: bool, missed: &'static str) -> Result<(), StartError> {
    match userfaultfd::changing(uffd) {
        Ok(answer) if answer == changing => Ok(()),
        _ => Err(StartError::SelfTest { missed }),
    }
}

/// What `watch` asks the kernel.
fn must_be_watched(
    uffd: BorrowedFd<'_>,
    pages: &[Arc<AtomicPage>; 2],
    watched: bool,
) -> Result<(), StartError> {
    let is_so = |page: &Arc<AtomicPage>| {
        let (start, end) = bounds(page);
        userfaultfd::watches(uffd, start, end) == Ok(watched)
    };
    let missed = if watched { "a page that is watched" } else { "a page that is not watched" };
    if pages.iter().all(is_so) { Ok(()) } else { Err(StartError::SelfTest { missed }) }
}

fn read_one(uffd: BorrowedFd<'_>) -> Result<(), StartError> {
    let read = || userfaultfd::read(uffd, &mut [Message::default()]) == Ok(1);
    must(read, "a page mapped over another")
}

/// Whatever went wrong: lets every thread go that waits for its event to be read.
fn read_until_finished(uffd: BorrowedFd<'_>, changers: &[Changer; 2]) {
    let all = changers.iter().flatten().count();
    while finished(changers) < all {
        descriptor::wait_readable(uffd.as_raw_fd(), 1);
        let _ = userfaultfd::read(uffd, &mut [Message::default(); 2]);
    }
}

/// Tests that each kind of change is in the log when the changing call has returned.
///
/// `watched_page` makes a fresh page that the monitor watches.
pub(super) fn of_the_events(
    monitor: &impl Monitor,
    watched_page: impl Fn() -> Result<AtomicPage, StartError>,
) -> Result<(), StartError> {
    let page = watched_page()?;
    sees(monitor, &page, "MADV_DONTNEED", || page.discard())?;
    sees(monitor, &page, "mremap", || page.move_contents().map(drop))?;
    let page = watched_page()?;
    let range = range_of(&page);
    sees_in(monitor, range, "munmap", move || {
        drop(page);
        Ok(())
    })
}

fn sees(
    monitor: &impl Monitor,
    page: &AtomicPage,
    missed: &'static str,
    change: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), StartError> {
    sees_in(monitor, range_of(page), missed, change)
}

fn sees_in(
    monitor: &impl Monitor,
    range: Option<AddressRange>,
    missed: &'static str,
    change: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), StartError> {
    let failed = StartError::SelfTest { missed };
    monitor.check().map_err(|_| failed)?;
    let before = monitor.replay(Position::NOWHERE, &mut |_| {}).up_to;
    change().map_err(|errno| StartError::change(missed, errno))?;
    let after = monitor.check().map_err(|_| failed)?;
    let mut seen = false;
    let replay = monitor.replay(before, &mut |entry| {
        seen |= range.is_some_and(|range| range == entry || entry.contains(&range));
    });
    let told = seen && replay.complete && replay.sequence.0 >= after.0;
    if told { Ok(()) } else { Err(failed) }
}
