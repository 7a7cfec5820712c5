//! Sleeping on a word, and waking who sleeps.

use rustix::thread::futex::{self, Flags, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::thread::{ClockId, Timespec};
use std::sync::atomic::AtomicU32;

/// Sleeps until [`futex_wake`], unless `word` is no longer `expected`. May wake without reason.
pub fn futex_wait(word: &AtomicU32, expected: u32) {
    let _ = futex::wait(word, Flags::PRIVATE, expected, None);
}

/// As [`futex_wait`], for two words: until one of the two is woken, unless one is no longer what is
/// expected. A kernel that cannot wait for two (before 5.16) or must not (seccomp) sleeps on the
/// first for 10 ms at most.
pub fn futex_wait_either(words: [&AtomicU32; 2], expected: [u32; 2]) {
    use rustix::io::Errno;
    let waiter = |place: usize| {
        let mut waiter = Wait::new();
        waiter.val = expected[place].into();
        waiter.uaddr = WaitPtr::new(words[place].as_ptr().cast());
        waiter.flags = WaitFlags::SIZE_U32 | WaitFlags::PRIVATE;
        waiter
    };
    let waiters = [waiter(0), waiter(1)];
    match futex::waitv(&waiters, WaitvFlags::empty(), None, ClockId::Monotonic) {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
        Err(_) => {
            let a_while = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            let _ = futex::wait(words[0], Flags::PRIVATE, expected[0], Some(&a_while));
        }
    }
}

/// Wakes every thread that sleeps on `word`.
pub fn futex_wake(word: &AtomicU32) {
    let _ = futex::wake(word, Flags::PRIVATE, i32::MAX.cast_unsigned());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::SeqCst;

    #[test]
    fn a_changed_word_is_not_slept_on() {
        let words = [AtomicU32::new(1), AtomicU32::new(2)];
        futex_wait(&words[0], 0);
        futex_wait_either(words.each_ref(), [1, 0]);
        futex_wait_either(words.each_ref(), [0, 2]);
    }

    #[test]
    fn a_sleeper_on_either_word_is_woken() {
        for place in 0..2 {
            let words = [AtomicU32::new(0), AtomicU32::new(0)];
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while words[place].load(SeqCst) == 0 {
                        futex_wait_either(words.each_ref(), [0, 0]);
                    }
                });
                words[place].store(1, SeqCst);
                futex_wake(&words[place]);
            });
        }
    }
}
