//! The thread that keeps the programs in the kernel and passes their wake-ups on.
//!
//! It has a table of descriptors of its own, with the attachments in it and the ring buffer that becomes
//! readable when a program wakes it. So no code that closes descriptors in this process can take the
//! programs away. If the thread is killed, by a seccomp filter that is set later, the kernel says so in a word that
//! every check reads, before it takes the programs away.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to give the thread that table.

#![allow(unsafe_code)]

use super::Core;
use super::error::EbpfError;
use super::positions::Positions;
use pinfold_kernel::descriptor::{keep_only, wait_readable};
use pinfold_kernel::{Descriptor, Errno, thread};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How long no wake-up is listened to after one: a change that wakes us costs its thread many
/// times what the others do, so of many in a row few should. The thread that waits for wake-ups deregisters;
/// nothing stale is used meanwhile.
const PACE: Duration = Duration::from_millis(2);

/// Starts the thread, and closes `kept` in this one's table once it has them in its own. The first is
/// the ring buffer.
pub(super) fn start(
    core: &Arc<Core>,
    kept: Vec<OwnedFd>,
    positions: Positions,
) -> Result<(), EbpfError> {
    let numbers: Vec<Descriptor> = kept.iter().map(AsRawFd::as_raw_fd).collect();
    let (tell, told) = mpsc::channel();
    let core = Arc::clone(core);
    let body = move || {
        // SAFETY: this thread is the library's own, and has numbers only: the values stay with the one that starts it.
        let own_table = unsafe { keep_only(&numbers) };
        thread::leave_directory_and_semaphores();
        let wakeups = numbers.first().copied().unwrap_or(-1);
        let ended = own_table.and_then(|()| {
            thread::marked_when_it_ends(core.mark.word(), || {
                let _ = tell.send(Ok(()));
                run(&core, wakeups, &positions);
            })
        });
        // The thread that waits for it is gone where it has heard that all is well.
        let _ = tell.send(ended);
    };
    thread::spawn("pinfold-keeper", body).map_err(|error| EbpfError::thread(&error))?;
    let begun = told.recv().unwrap_or(Err(Errno(libc::EAGAIN)));
    drop(kept);
    begun.map_err(EbpfError::begun)
}

fn run(core: &Core, wakeups: Descriptor, positions: &Positions) {
    let mut told = core.sequence();
    loop {
        // SeqCst, with the fence: a program that changes the sequence after we look at it finds that we
        // sleep; an earlier change is found. The programs do the same the other way round.
        core.wishes.get().asleep.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if core.stopped() {
            return;
        }
        if core.sequence() == told && !wait_readable(wakeups, -1) {
            core.lose();
            core.event_count.notify();
            return;
        }
        // Acquire and release: the kernel's own orders for these two words. What was written is of
        // no interest; that all of it was read is what makes the next one wake us.
        positions.read().store(positions.written().load(Ordering::Acquire), Ordering::Release);
        told = core.sequence();
        core.event_count.notify();
        if core.closed() {
            return;
        }
        thread::sleep(PACE);
    }
}
