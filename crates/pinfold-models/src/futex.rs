//! The kernel's futexes, and what an event count does with them.
//!
//! The kernel compares a word under the lock of its queue of sleepers; here one lock serves all words.

use crate::sync::{AtomicU32, Ordering};
use shuttle::sync::{Condvar, Mutex};
use std::collections::BTreeMap;

/// How often each word was woken, by its address.
type Wakes = BTreeMap<usize, u64>;

shuttle::lazy_static! {
    static ref FUTEXES: (Mutex<Wakes>, Condvar) = (Mutex::new(BTreeMap::new()), Condvar::new());
}

fn address(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word).addr()
}

fn sleep<const N: usize>(words: [&AtomicU32; N], expected: [u32; N]) {
    let (wakes, woken) = &*FUTEXES;
    let mut wakes = wakes.lock().expect("no model panics with it");
    if words.map(|word| word.load(Ordering::SeqCst)) != expected {
        return;
    }
    let counts = |wakes: &Wakes| words.map(|word| wakes.get(&address(word)).copied());
    let before = counts(&wakes);
    while counts(&wakes) == before {
        wakes = woken.wait(wakes).expect("no model panics with it");
    }
}

pub(crate) fn futex_wait(word: &AtomicU32, expected: u32) {
    sleep([word], [expected]);
}

pub(crate) fn futex_wait_either(words: [&AtomicU32; 2], expected: [u32; 2]) {
    sleep(words, expected);
}

pub(crate) fn futex_wake(word: &AtomicU32) {
    let (wakes, woken) = &*FUTEXES;
    *wakes.lock().expect("no model panics with it").entry(address(word)).or_default() += 1;
    woken.notify_all();
}

/// A wake-up that is lost is a deadlock, which shuttle reports.
#[cfg(test)]
mod tests {
    use crate::event_count::EventCount;
    use crate::sync::{AtomicU32, Ordering};
    use shuttle::{check_pct, check_random, thread};
    use std::sync::Arc;

    /// How many schedules of each kind: there are too many to go through all.
    const SCHEDULES: usize = 10_000;

    /// An event count, and what is done before it is notified.
    #[derive(Default)]
    struct Post {
        event_count: EventCount,
        letters: AtomicU32,
    }

    impl Post {
        fn send(&self) {
            self.letters.fetch_add(1, Ordering::Relaxed);
            self.event_count.notify();
        }

        fn letters(&self) -> u32 {
            self.letters.load(Ordering::Relaxed)
        }

        fn await_letters(&self, count: u32) {
            loop {
                let seen = self.event_count.count();
                if self.letters() >= count {
                    return;
                }
                self.event_count.wait(seen);
            }
        }
    }

    /// Random schedules, and such with few preemptions at places drawn at random.
    fn explore(model: impl Fn() + Clone + Send + Sync + 'static) {
        check_random(model.clone(), SCHEDULES);
        check_pct(model, SCHEDULES, 3);
    }

    #[test]
    fn shuttle_no_ring_is_lost() {
        explore(|| {
            let post = Arc::new(Post::default());
            let sender = {
                let post = Arc::clone(&post);
                thread::spawn(move || (0..2).for_each(|_| post.send()))
            };
            post.await_letters(2);
            sender.join().unwrap();
        });
    }

    #[test]
    fn shuttle_a_ring_wakes_every_waiter() {
        explore(|| {
            let post = Arc::new(Post::default());
            let waiter = {
                let post = Arc::clone(&post);
                thread::spawn(move || post.await_letters(1))
            };
            let sender = {
                let post = Arc::clone(&post);
                thread::spawn(move || post.send())
            };
            post.await_letters(1);
            waiter.join().unwrap();
            sender.join().unwrap();
        });
    }

    #[test]
    fn shuttle_a_waiter_for_two_is_woken_by_either() {
        explore(|| {
            let posts = Arc::new([Post::default(), Post::default()]);
            let sender = {
                let posts = Arc::clone(&posts);
                thread::spawn(move || posts.iter().for_each(Post::send))
            };
            loop {
                let event_counts = posts.each_ref().map(|post| &post.event_count);
                let seen = event_counts.map(EventCount::count).iter().sum();
                if posts.iter().all(|post| post.letters() == 1) {
                    break;
                }
                EventCount::wait_for_either(event_counts, seen);
            }
            sender.join().unwrap();
        });
    }
}
