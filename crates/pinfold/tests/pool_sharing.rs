//! What a pool has and others want: threads that wait for its buffers, in their order, and other
//! drawers of its budget, which get what it leaves idle.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use pinfold::budget::{
    Amount, Budget, BudgetNotice, BudgetWatch, Kind, Lender, Share, Terms, Watermark,
};
use pinfold::limits::Limits;
use pinfold::monitor::Userfaultfd;
use pinfold::pool::{
    AllocateError, Allowance, Denied, Pool, PoolBuffer, PoolConfig, WhenExhausted,
};
use pinfold::registrar::{BufferIndex, IoUring};
use pinfold::{
    Access, AddressRange, Cache, Config, DeregisterError, GetError, RegisterError, Registrar,
    RegistrarLimits,
};
use pinfold_sim::{Fake, FakeDevice, get_simulated};
use registrar_support::{Memory, PAGE, memory_file, ring_with_registrar, send};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Condvar, Mutex, OnceLock, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

// --- a device without memory, whose deregistrations can be held up -------------------------------

#[derive(Clone, Debug, Default)]
struct SlowDevice(Arc<(Mutex<bool>, Condvar)>);

impl SlowDevice {
    fn hold_up(&self, held: bool) {
        *self.0.0.lock().unwrap() = held;
        self.0.1.notify_all();
    }
}

type Slow = Fake<SlowDevice>;

impl FakeDevice for SlowDevice {
    type Handle = ();

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 30, max_regions: 1000 }
    }

    fn register(&self, _: AddressRange, _: Access) -> Result<(), RegisterError> {
        Ok(())
    }

    fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
        let held = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(held, |held| *held).unwrap());
        Ok(())
    }
}

/// The same, and its registrations are held up instead.
#[derive(Clone, Default)]
struct SlowToRegisterDevice {
    slow: Slow,
    is_inside: Arc<AtomicBool>,
}

type SlowToRegister = Fake<SlowToRegisterDevice>;

impl FakeDevice for SlowToRegisterDevice {
    type Handle = ();

    fn limits(&self) -> RegistrarLimits {
        self.slow.limits()
    }

    fn register(&self, range: AddressRange, _: Access) -> Result<(), RegisterError> {
        self.is_inside.store(true, SeqCst);
        self.slow.0.deregister((), range).unwrap();
        Ok(())
    }

    fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

fn pool_of(max_bytes: usize) -> Pool<Slow> {
    Pool::new(Slow::default(), PoolConfig { max_bytes, ..PoolConfig::default() }).unwrap()
}

fn until(what: impl Fn() -> bool) {
    while !what() {
        thread::yield_now();
    }
}

// --- waiting -------------------------------------------------------------------------------------

/// Threads come one after the other; however many buffers come back at once, it is the first of
/// them who get one.
#[test]
fn threads_that_wait_are_served_in_the_order_of_coming() {
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let pool = &pool_of(512 * KIB);
    let mut held: Vec<_> = (0..8).map(|_| pool.get(64 * KIB).unwrap()).collect();
    let (served, order) = mpsc::channel();
    thread::scope(|scope| {
        let (mut came, mut went) = (0, 0);
        while went < 60 {
            let waiting = came - went;
            if waiting < 8 && came < 60 && (held.is_empty() || waiting == 0 || rng.bool()) {
                let (number, served) = (came, served.clone());
                scope.spawn(move || {
                    let request = pool.request(64 * KIB).when_exhausted(WhenExhausted::Wait(LONG));
                    served.send((number, request.get().unwrap())).unwrap();
                });
                came += 1;
                until(|| pool.statistics().waiting == came - went);
                continue;
            }
            let back = rng.usize(1..=waiting.min(held.len()));
            held.drain(..back).for_each(drop);
            let mut lucky: Vec<usize> = Vec::new();
            for (number, buffer) in (0..back).map(|_| order.recv().unwrap()) {
                lucky.push(number);
                held.push(buffer);
            }
            lucky.sort_unstable();
            assert_eq!(lucky, (went..went + back).collect::<Vec<_>>());
            went += back;
        }
    });
    drop(held);
    assert_eq!(pool.statistics().in_use_bytes, 0);
}

/// Short buffers that come and go do not keep a long one from the thread that waits for it.
#[test]
fn a_thread_that_waits_for_a_long_buffer_is_not_passed_by() {
    let pool = &pool_of(512 * KIB);
    let short = || pool.request(16 * KIB).when_exhausted(WhenExhausted::Fail).get();
    let mut held: Vec<_> = std::iter::from_fn(|| pool.get(16 * KIB).ok()).collect();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let request = pool.request(512 * KIB).when_exhausted(WhenExhausted::Wait(LONG));
            request.get().map(|buffer| buffer.len())
        });
        until(|| pool.statistics().waiting == 1);
        // What comes back is the waiter's, so it is not free for others.
        while let Some(buffer) = held.pop() {
            assert!(matches!(short(), Err(AllocateError::Exhausted(_))));
            drop(buffer);
        }
        assert_eq!(waiter.join().unwrap(), Ok(512 * KIB));
    });
    assert!(short().is_ok(), "no thread waits any more");
}

/// What was kept for a thread that then goes without it is room for another thread's slab.
#[test]
fn an_empty_slab_that_no_thread_waits_for_any_more_makes_room() {
    let config = PoolConfig {
        max_bytes: 7 * MIB,
        first_slab_bytes: 64 * KIB,
        max_slab_bytes: 64 * KIB,
        thread_cache_bytes: 0,
        ..PoolConfig::default()
    };
    let pool = &Pool::new(Slow::default(), config).unwrap();
    let (three, two) = (pool.get(3 * MIB).unwrap(), pool.get(2 * MIB).unwrap());
    thread::scope(|scope| {
        let get = |length, when| pool.request(length).when_exhausted(when).get().map(|it| it.len());
        // No slab is long enough for it.
        let maker = scope.spawn(move || get(4 * MIB, WhenExhausted::GrowOrWait(LONG)));
        until(|| pool.statistics().waiting == 1);
        let briefly = Duration::from_millis(300);
        let waiter = scope.spawn(move || get(3 * MIB, WhenExhausted::Wait(briefly)));
        until(|| pool.statistics().waiting == 2 || waiter.is_finished());
        drop(two);
        assert!(matches!(waiter.join().unwrap(), Err(AllocateError::TimedOut { .. })));
        let began = Instant::now();
        while !maker.is_finished() && began.elapsed() < FOR_EVER {
            thread::yield_now();
        }
        let is_served = maker.is_finished();
        // So that it ends in any case.
        drop(three);
        assert_eq!(maker.join().unwrap(), Ok(4 * MIB));
        assert!(is_served, "it slept on");
    });
}

/// Nor do requests that would make a slab, where none can be had.
#[test]
fn a_thread_that_waits_is_not_passed_by_requests_that_cannot_grow() {
    let briefly = Duration::from_millis(1);
    for when in
        [WhenExhausted::Grow, WhenExhausted::GrowOrWait(briefly), WhenExhausted::Wait(briefly)]
    {
        let pool = &pool_of(512 * KIB);
        let short = || pool.request(16 * KIB).when_exhausted(when).get();
        let mut held: Vec<_> = std::iter::from_fn(|| pool.get(16 * KIB).ok()).collect();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let request = pool.request(512 * KIB).when_exhausted(WhenExhausted::Wait(LONG));
                request.get().map(|buffer| buffer.len())
            });
            until(|| pool.statistics().waiting == 1);
            let mut passed = 0;
            while let Some(buffer) = held.pop() {
                passed += usize::from(short().is_ok());
                drop(buffer);
            }
            assert_eq!(waiter.join().unwrap(), Ok(512 * KIB));
            assert_eq!(passed, 0, "{when:?}");
        });
    }
}

/// A thread that stops waiting makes way for one that came later.
#[test]
fn a_thread_that_runs_out_of_patience_is_passed_by() {
    let pool = &pool_of(512 * KIB);
    let mut held: Vec<_> = (0..8).map(|_| pool.get(64 * KIB).unwrap()).collect();
    let wait = |length, time| pool.request(length).when_exhausted(WhenExhausted::Wait(time)).get();
    thread::scope(|scope| {
        let patience = Duration::from_millis(20);
        let impatient = scope.spawn(move || wait(512 * KIB, patience).map(drop));
        until(|| pool.statistics().waiting == 1 || impatient.is_finished());
        let patient = scope.spawn(move || wait(64 * KIB, LONG).map(drop));
        drop(held.pop());
        let error = impatient.join().unwrap().unwrap_err();
        assert!(matches!(error, AllocateError::TimedOut { waited, .. } if waited >= patience));
        assert_eq!(patient.join().unwrap(), Ok(()));
    });
    assert_eq!(pool.statistics().waiting, 0);
}

/// A slab that becomes empty is what a waiter waits for, even in a pool that keeps none.
#[test]
fn what_is_waited_for_is_not_given_back() {
    let config = PoolConfig { max_bytes: 512 * KIB, idle_bytes: 0, ..PoolConfig::default() };
    let pool = &Pool::new(Slow::default(), config).unwrap();
    let held = pool.get(512 * KIB).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let request = pool.request(64 * KIB).when_exhausted(WhenExhausted::Wait(LONG));
            request.get().map(drop)
        });
        until(|| pool.statistics().waiting == 1);
        drop(held);
        assert_eq!(waiter.join().unwrap(), Ok(()));
    });
}

/// A slab that another thread registers is first theirs who wait.
#[test]
fn a_pool_that_grows_serves_the_threads_that_wait() {
    let pool = &pool_of(4 * MIB);
    let held: Vec<_> = (0..2).map(|_| pool.get(MIB).unwrap()).collect();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let request = pool.request(MIB).when_exhausted(WhenExhausted::Wait(LONG));
            request.get().map(drop)
        });
        until(|| pool.statistics().waiting == 1);
        let grown = pool.request(MIB).when_exhausted(WhenExhausted::Grow).get();
        assert!(grown.is_ok());
        assert_eq!(waiter.join().unwrap(), Ok(()));
    });
    drop(held);
}

/// What no slab can hold is waited for without keeping what there is from others.
#[test]
fn a_thread_that_waits_for_more_than_a_slab_delays_no_other() {
    let budget = budget(8 * MIB);
    let pool = || Pool::within(share(&budget), Slow::default(), lending()).unwrap();
    let (pool, other) = (&pool(), pool());
    drop((0..8).map(|_| pool.get(MIB).unwrap()).collect::<Vec<_>>());
    let get = |length, when| pool.request(length).when_exhausted(when).get().map(drop);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| get(4 * MIB, WhenExhausted::Wait(LONG)));
        until(|| pool.statistics().waiting == 1);
        assert_eq!(get(MIB, WhenExhausted::Fail), Ok(()));
        assert!(other.get(MIB).is_ok(), "what is idle is lent");
        assert!(pool.trim(0) > 0);
        // Another thread makes the slab.
        assert_eq!(get(4 * MIB, WhenExhausted::Grow), Ok(()));
        assert_eq!(waiter.join().unwrap(), Ok(()));
    });
    assert_eq!(pool.statistics().waiting, 0);
}

/// A thread that may register a slab, and waits because there is no room for one, does so when there is.
#[test]
fn a_thread_that_waits_for_room_to_grow_gets_it() {
    let config = PoolConfig { max_bytes: 8 * MIB, ..lending() };
    for long in [0, 1] {
        let pool = &Pool::new(Slow::default(), config).unwrap();
        // With a slab that is long enough and stays in use, and without.
        let stays: Vec<_> = (0..long).map(|_| pool.get(4 * MIB).unwrap()).collect();
        let held: Vec<_> = std::iter::from_fn(|| pool.get(MIB).ok()).collect();
        assert_eq!(held.len(), 8 - 4 * long);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let request = pool.request(4 * MIB);
                request.when_exhausted(WhenExhausted::GrowOrWait(LONG)).get().map(drop)
            });
            until(|| pool.statistics().waiting == 1);
            drop(held);
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
        drop(stays);
    }
}

/// What was kept because a thread waited is released when none does.
#[test]
fn what_no_thread_waits_for_any_more_is_released() {
    let config =
        PoolConfig { max_bytes: 2 * MIB, idle_bytes: 0, thread_cache_bytes: 0, ..lending() };
    let pool = &Pool::new(Slow::default(), config).unwrap();
    let held: Vec<_> = (0..2).map(|_| pool.get(MIB).unwrap()).collect();
    thread::scope(|scope| {
        let waiter = scope
            .spawn(|| pool.request(MIB).when_exhausted(WhenExhausted::Wait(LONG)).get().unwrap());
        until(|| pool.statistics().waiting == 1);
        drop(held);
        let buffer = waiter.join().unwrap();
        assert_eq!(pool.statistics().registered_bytes, MIB);
        drop(buffer);
    });
    assert_eq!(pool.statistics().registered_bytes, 0);
}

// --- lending -------------------------------------------------------------------------------------

fn budget(bytes: usize) -> Budget {
    Budget::new(Amount { bytes, regions: 64 }).unwrap()
}

fn share(budget: &Budget) -> Arc<Share> {
    budget.share(Terms::default()).unwrap()
}

/// What a pool holds and does not use does not keep it from what it wants, though the budget is short.
#[test]
fn a_pool_gives_its_own_empty_slabs_back_for_a_longer_one() {
    let budget = budget(2 * MIB);
    let config = PoolConfig { first_slab_bytes: 64 * KIB, max_slab_bytes: 64 * KIB, ..lending() };
    let pool = Pool::within(share(&budget), Slow::default(), config).unwrap();
    let short: Vec<_> = (0..3).map(|_| pool.get(600 * KIB).unwrap()).collect();
    let refused = pool.get(MIB).unwrap_err();
    assert!(matches!(refused, AllocateError::Denied { .. }), "all of them are in use: {refused}");
    drop(short);
    assert!(budget.held().bytes > MIB, "kept for later uses");
    assert!(pool.get(MIB).is_ok());
    assert!(budget.held().bytes <= 2 * MIB);
}

/// What a thread waits for until it is taken for one that waits for ever.
const FOR_EVER: Duration = Duration::from_secs(20);

#[test]
fn a_listener_may_wait_for_a_thread_that_wants_a_slab_of_the_pool() {
    let budget = budget(64 * MIB);
    let pool = Arc::new(Pool::within(share(&budget), Slow::default(), lending()).unwrap());
    let (ask, asked) = mpsc::channel::<mpsc::Sender<Result<(), AllocateError>>>();
    let theirs = Arc::clone(&pool);
    let worker = thread::spawn(move || {
        for answer in asked {
            let request = theirs.request(100).when_exhausted(WhenExhausted::GrowOrWait(LONG));
            let _unheard = answer.send(request.get().map(drop));
        }
    });
    let (report, heard) = mpsc::channel();
    let watch = budget.watch(Watermark::Bytes(1), move |_| {
        let (answer, answered) = mpsc::channel();
        ask.send(answer).unwrap();
        report.send(answered.recv_timeout(FOR_EVER)).unwrap();
    });
    drop(pool.get(100).unwrap());
    assert_eq!(heard.try_recv(), Ok(Ok(Ok(()))));
    drop(watch);
    worker.join().unwrap();
}

/// What a pool that keeps no empty slab does when its budget's listener does `what` with it: whether a buffer was had, and
/// how many slabs were made. `None` if the request does not return.
fn grown_with_a_listener(
    when: WhenExhausted,
    what: impl Fn(&Pool<Slow>) + Send + Sync + 'static,
) -> Option<(bool, u64)> {
    let budget = budget(64 * MIB);
    let config = PoolConfig { idle_bytes: 0, thread_cache_bytes: 0, ..lending() };
    let pool = Arc::new(Pool::within(share(&budget), Slow::default(), config).unwrap());
    let listening = Arc::downgrade(&pool);
    let watch = budget.watch(Watermark::Bytes(MIB), move |_| {
        if let Some(pool) = listening.upgrade() {
            what(&pool);
        }
    });
    let (answer, answered) = mpsc::channel();
    let theirs = Arc::clone(&pool);
    // Not joined: it may not return.
    thread::spawn(move || {
        let buffer = theirs.request(100).when_exhausted(when).get();
        let made = theirs.statistics().grown;
        let _unheard = answer.send((buffer.is_ok(), made));
    });
    let got = answered.recv_timeout(FOR_EVER).ok();
    drop(watch);
    got
}

/// The slab that a thread has made is in use before any listener hears of it, so that none gives it back.
#[test]
fn a_listener_that_gives_empty_slabs_back_leaves_the_new_one_to_its_thread() {
    let patience = Duration::from_millis(1);
    for when in [WhenExhausted::Grow, WhenExhausted::GrowOrWait(patience)] {
        let trims = |pool: &Pool<Slow>| {
            pool.trim(0);
        };
        assert_eq!(grown_with_a_listener(when, trims), Some((true, 1)), "{when:?}");
        let puts_back = |pool: &Pool<Slow>| {
            drop(pool.request(100).when_exhausted(WhenExhausted::Fail).get());
        };
        assert_eq!(grown_with_a_listener(when, puts_back), Some((true, 1)), "{when:?}");
    }
}

/// Grants everything, and panics when it settles, once when it is armed.
#[derive(Debug)]
struct Settling(AtomicUsize);

impl Allowance for Settling {
    fn grant(&self, _: usize) -> Result<(), Denied> {
        Ok(())
    }

    fn give_back(&self, _: usize) {}

    fn settle(&self) {
        panic_if_due(&self.0);
    }
}

#[test]
fn an_allowance_that_panics_behind_a_new_slab_leaves_its_blocks_to_the_pool() {
    let allowance = Arc::new(Settling(AtomicUsize::new(1)));
    let pool = Pool::with_allowance(Slow::default(), lending(), allowance).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| pool.get(100).map(drop))).is_err());
    assert_eq!(pool.trim(0), MIB, "the slab is empty");
    assert!(pool.get(100).is_ok());
}

/// Denies slabs when it is told to, and settles by asking a thread that uses the pool, once when it is armed.
#[derive(Debug)]
struct Asking {
    denies: AtomicBool,
    is_armed: AtomicBool,
    ask: Mutex<mpsc::Sender<mpsc::Sender<Result<(), AllocateError>>>>,
    report: Mutex<mpsc::Sender<Answer>>,
    /// The listener returns when it is told to.
    go_on: Mutex<mpsc::Receiver<()>>,
}

/// What the thread got, if it was heard of in time.
type Answer = Result<Result<(), AllocateError>, mpsc::RecvTimeoutError>;

impl Allowance for Asking {
    fn grant(&self, _: usize) -> Result<(), Denied> {
        if self.denies.load(SeqCst) { Err(Denied { available: 0 }) } else { Ok(()) }
    }

    fn give_back(&self, _: usize) {}

    fn settle(&self) {
        if self.is_armed.swap(false, SeqCst) {
            let (answer, answered) = mpsc::channel();
            self.ask.lock().unwrap().send(answer).unwrap();
            self.report.lock().unwrap().send(answered.recv_timeout(FOR_EVER)).unwrap();
            self.go_on.lock().unwrap().recv_timeout(FOR_EVER).unwrap();
        }
    }
}

/// The thread that grows the pool was the first in the queue: others are served while a listener runs, and it is the
/// first again afterwards.
#[test]
fn a_listener_may_wait_for_a_thread_behind_the_one_that_grows() {
    for denies in [false, true] {
        let (ask, asked) = mpsc::channel::<mpsc::Sender<Result<(), AllocateError>>>();
        let (report, heard) = mpsc::channel();
        let (go_on, told_to_go_on) = mpsc::channel();
        let allowance = Arc::new(Asking {
            denies: AtomicBool::new(false),
            is_armed: AtomicBool::new(false),
            ask: Mutex::new(ask),
            report: Mutex::new(report),
            go_on: Mutex::new(told_to_go_on),
        });
        let config = PoolConfig { max_bytes: 5 * MIB, thread_cache_bytes: 0, ..lending() };
        let theirs: Arc<dyn Allowance> = Arc::clone(&allowance) as _;
        let pool = &Pool::with_allowance(Slow::default(), config, theirs).unwrap();
        let long = |when| pool.request(2 * MIB).when_exhausted(when).get();
        let stays = long(WhenExhausted::Grow).unwrap();
        // Two slabs that are given back for a longer one, and one with something left for others.
        let short = [pool.get(MIB).unwrap(), pool.get(MIB).unwrap()];
        let _rest = pool.get(512 * KIB).unwrap();
        assert_eq!(pool.statistics().slabs, 4);
        let (served, order) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                for answer in asked {
                    let request = pool.request(100).when_exhausted(WhenExhausted::Wait(LONG));
                    let _unheard = answer.send(request.get().map(drop));
                }
            });
            let come = |number: usize, when, waiting: usize| {
                let served = served.clone();
                scope.spawn(move || {
                    let buffer = long(when);
                    served.send((number, buffer.is_ok())).unwrap();
                });
                until(|| pool.statistics().waiting == waiting);
            };
            come(0, WhenExhausted::GrowOrWait(LONG), 1);
            allowance.denies.store(denies, SeqCst);
            allowance.is_armed.store(true, SeqCst);
            drop(short);
            let answer = heard.recv_timeout(FOR_EVER + FOR_EVER);
            if answer == Ok(Ok(Ok(()))) {
                // The thread that has the listener called is in no queue.
                come(1, WhenExhausted::Wait(LONG), 1);
            }
            go_on.send(()).unwrap();
            let first = if denies {
                until(|| pool.statistics().waiting == 2 || answer != Ok(Ok(Ok(()))));
                drop(stays);
                order.recv_timeout(FOR_EVER)
            } else {
                // It had its buffer before the other came.
                let first = order.recv_timeout(FOR_EVER);
                drop(stays);
                first
            };
            let served = [first, order.recv_timeout(FOR_EVER)];
            // The thread that answers ends.
            *allowance.ask.lock().unwrap() = mpsc::channel().0;
            assert_eq!(answer, Ok(Ok(Ok(()))), "denies: {denies}");
            assert_eq!(served, [Ok((0, true)), Ok((1, true))], "denies: {denies}");
        });
    }
}

/// An allowance that asks the pool which asks it.
#[derive(Debug)]
struct Inside {
    pool: OnceLock<Weak<Pool<Slow>>>,
    when: WhenExhausted,
    report: Mutex<mpsc::Sender<Result<(), AllocateError>>>,
}

impl Allowance for Inside {
    fn grant(&self, _: usize) -> Result<(), Denied> {
        if let Some(pool) = self.pool.get().and_then(Weak::upgrade) {
            let got = pool.request(100).when_exhausted(self.when).get().map(drop);
            let _unheard = self.report.lock().unwrap().send(got);
        }
        Ok(())
    }

    fn give_back(&self, _: usize) {}
}

#[test]
fn an_allowance_that_asks_its_growing_pool_does_not_wait() {
    for when in [WhenExhausted::GrowOrWait(LONG), WhenExhausted::Wait(LONG)] {
        let (report, heard) = mpsc::channel();
        let inside = Arc::new(Inside { pool: OnceLock::new(), when, report: Mutex::new(report) });
        let theirs: Arc<dyn Allowance> = Arc::clone(&inside) as _;
        let pool = Arc::new(Pool::with_allowance(Slow::default(), lending(), theirs).unwrap());
        inside.pool.set(Arc::downgrade(&pool)).unwrap();
        let (answer, answered) = mpsc::channel();
        // Not joined: it would wait for itself.
        thread::spawn(move || answer.send(pool.get(100).map(drop)));
        let refused = heard.recv_timeout(FOR_EVER);
        assert!(matches!(refused, Ok(Err(AllocateError::Exhausted(_)))), "{when:?}: {refused:?}");
        assert_eq!(answered.recv_timeout(FOR_EVER), Ok(Ok(())), "{when:?}");
    }
}

#[test]
fn a_thread_waits_for_the_slab_of_another_as_long_as_it_has_patience() {
    // One whose span is a whole slab, and one that may have a run of its own.
    [100, 10_000].into_iter().for_each(waits_as_long_as_it_has_patience);
}

fn waits_as_long_as_it_has_patience(bytes: usize) {
    let device = SlowToRegister::default();
    device.slow.hold_up(true);
    let pool = Pool::new(device.clone(), lending()).unwrap();
    let (answer, answered) = mpsc::channel();
    let got = thread::scope(|scope| {
        scope.spawn(|| drop(pool.get(100).unwrap()));
        until(|| device.is_inside.load(SeqCst));
        let briefly = WhenExhausted::GrowOrWait(Duration::from_millis(1));
        let (pool, device) = (&pool, &device);
        let request = pool.request(bytes).when_exhausted(briefly);
        scope.spawn(move || answer.send(request.get().map(drop)));
        let got = answered.recv_timeout(FOR_EVER);
        device.slow.hold_up(false);
        got
    });
    assert!(matches!(got, Ok(Err(AllocateError::TimedOut { .. }))), "{got:?}");
    assert!(pool.get(100).is_ok());
}

/// Each device pins the slab, and the system counts it for each.
#[test]
fn a_slab_of_several_devices_takes_its_bytes_for_each() {
    let budget = budget(4 * MIB);
    let config = PoolConfig { first_slab_bytes: MIB, max_slab_bytes: MIB, ..lending() };
    let devices = (Slow::default(), Slow::default());
    let pool = Pool::within(share(&budget), devices, config).unwrap();
    let held = [pool.get(MIB).unwrap(), pool.get(MIB).unwrap()];
    assert_eq!(budget.held(), Amount { bytes: 4 * MIB, regions: 2 });
    let refused = pool.get(MIB).unwrap_err();
    assert!(matches!(refused, AllocateError::Denied { available: 0, .. }), "{refused}");
    drop(held);
    drop(pool);
    assert_eq!(budget.held(), Amount::ZERO);
}

/// Slabs of a mebibyte, all of which stay until they are asked for.
fn lending() -> PoolConfig {
    PoolConfig {
        max_bytes: 64 * MIB,
        first_slab_bytes: MIB,
        max_slab_bytes: MIB,
        idle_bytes: 64 * MIB,
        ..PoolConfig::default()
    }
}

#[test]
fn a_pool_gives_empty_slabs_to_the_drawer_that_is_due() {
    let budget = budget(8 * MIB);
    let pool = || Pool::within(share(&budget), Slow::default(), lending()).unwrap();
    let (first, second) = (pool(), pool());
    let mut held: Vec<_> = std::iter::from_fn(|| first.get(MIB).ok()).collect();
    assert_eq!((held.len(), budget.held().bytes), (8, 8 * MIB));
    assert!(matches!(second.get(MIB), Err(AllocateError::Denied { .. })), "all are in use");
    held.truncate(3);
    let theirs: Vec<_> = std::iter::from_fn(|| second.get(MIB).ok()).collect();
    assert_eq!(theirs.len(), 4, "what is due, and no more");
    assert_eq!(first.statistics().registered_bytes, 4 * MIB);
    drop((held, theirs));
    drop((first, second));
    assert_eq!(budget.held(), Amount::ZERO);
}

/// What threads have cached is idle too.
#[test]
fn what_threads_have_cached_is_lent() {
    let budget = budget(2 * MIB);
    let pool = || Pool::within(share(&budget), Slow::default(), lending()).unwrap();
    let (first, second) = (pool(), pool());
    drop((0..64).map(|_| first.get(16 * KIB).unwrap()).collect::<Vec<_>>());
    drop((0..2).map(|_| first.get(MIB)).collect::<Vec<_>>());
    assert!(first.statistics().cached_bytes > 0 && budget.held().bytes == 2 * MIB);
    assert!(second.get(MIB).is_ok());
}

/// The shortest slab that makes up for what is missing goes.
#[test]
fn no_more_is_lent_than_is_missing_where_that_can_be() {
    let budget = budget(16 * MIB);
    let config = PoolConfig { max_slab_bytes: 8 * MIB, thread_cache_bytes: 0, ..lending() };
    let first = Pool::within(share(&budget), Slow::default(), config).unwrap();
    let second = Pool::within(share(&budget), Slow::default(), lending()).unwrap();
    // 1, 1, 2, 4 and 8 MiB.
    drop(std::iter::from_fn(|| first.get(MIB).ok()).collect::<Vec<_>>());
    assert_eq!(first.statistics().registered_bytes, 16 * MIB);
    assert!(second.get(MIB).is_ok());
    assert_eq!(first.statistics().registered_bytes, 15 * MIB);
}

/// Room that another drawer makes is noticed, whether the pool has a slab that is long enough or none.
#[test]
fn a_thread_that_waits_for_room_to_grow_notices_what_another_drawer_gives_back() {
    for slabs in [0, 1] {
        let budget = budget(4 * MIB);
        let other = share(&budget);
        let pool = Pool::within(share(&budget), Slow::default(), lending()).unwrap();
        let pool = Arc::new(pool);
        let theirs = Arc::clone(&pool);
        let held: Vec<_> = (0..slabs).map(|_| pool.get(MIB).unwrap()).collect();
        let more = Amount { bytes: (3 - slabs) * MIB, regions: 1 };
        let (drawn, rest) = (other.draw(Amount::one(MIB)).unwrap(), other.draw(more).unwrap());
        let (answer, answered) = mpsc::channel();
        // Not joined: it would wait for ever.
        thread::spawn(move || {
            let request = theirs.request(MIB).when_exhausted(WhenExhausted::GrowOrWait(LONG));
            answer.send(request.get().map(drop))
        });
        // Once before it waits, and once as it waits; then it sleeps.
        until(|| pool.statistics().refused == 2);
        drop(drawn);
        let answer = answered.recv_timeout(FOR_EVER);
        assert_eq!(answer, Ok(Ok(())), "{slabs} slabs");
        drop((held, rest));
    }
}

/// What the two have together is no more than before, so it is not the share that may hold more.
#[test]
fn a_thread_that_waits_for_room_to_grow_notices_what_another_pool_of_its_share_gives_back() {
    let (budget, config) = (budget(2 * MIB), lending());
    let share = share(&budget);
    let pool = || Pool::within(Arc::clone(&share), Slow::default(), config).unwrap();
    let (holds, waits) = (pool(), Arc::new(pool()));
    let held = [holds.get(MIB).unwrap(), holds.get(MIB).unwrap()];
    let (theirs, (answer, answered)) = (Arc::clone(&waits), mpsc::channel());
    // Not joined: it would wait for ever.
    thread::spawn(move || {
        let request = theirs.request(MIB).when_exhausted(WhenExhausted::GrowOrWait(LONG));
        answer.send(request.get().map(drop))
    });
    // Once before it waits, and once as it waits; then it sleeps.
    until(|| waits.statistics().refused == 2);
    drop(held);
    assert_eq!(holds.trim(0), 2 * MIB);
    assert_eq!(answered.recv_timeout(FOR_EVER), Ok(Ok(())));
}

/// A slab that another thread is giving back counts as soon as it is gone.
#[test]
fn what_is_on_its_way_back_is_waited_for() {
    let budget = budget(2 * MIB);
    let slow = Slow::default();
    let first = &Pool::within(share(&budget), slow.clone(), lending()).unwrap();
    let second = &Pool::within(share(&budget), Slow::default(), lending()).unwrap();
    drop((0..2).map(|_| first.get(MIB).unwrap()).collect::<Vec<_>>());
    slow.hold_up(true);
    let asks = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| first.trim(0));
        until(|| first.statistics().slabs == 0);
        let asking = scope.spawn(|| {
            asks.wait();
            second.get(MIB).map(drop)
        });
        asks.wait();
        // It asks now or soon; if it did not wait, it would be refused.
        (0..100).for_each(|_| thread::yield_now());
        assert!(!asking.is_finished(), "nothing has come back yet");
        slow.hold_up(false);
        assert_eq!(asking.join().unwrap(), Ok(()));
    });
}

/// A device that panics as often as it has been told to.
#[derive(Clone, Debug, Default)]
struct ShakyDevice {
    in_register: Arc<AtomicUsize>,
    in_deregister: Arc<AtomicUsize>,
}

fn panic_if_due(due: &AtomicUsize) {
    let one_less = due.fetch_update(SeqCst, SeqCst, |due| due.checked_sub(1));
    assert!(one_less.is_err(), "as the test has it");
}

type Shaky = Fake<ShakyDevice>;

impl FakeDevice for ShakyDevice {
    type Handle = ();

    fn limits(&self) -> RegistrarLimits {
        SlowDevice::default().limits()
    }

    fn register(&self, _: AddressRange, _: Access) -> Result<(), RegisterError> {
        panic_if_due(&self.in_register);
        Ok(())
    }

    fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
        panic_if_due(&self.in_deregister);
        Ok(())
    }
}

/// All slabs of a batch are counted out, whatever happens to one of them.
#[test]
fn a_device_that_panics_leaves_no_slab_on_its_way() {
    let (budget, shaky) = (budget(2 * MIB), Shaky::default());
    let pool = Pool::within(share(&budget), shaky.clone(), lending()).unwrap();
    drop((0..2).map(|_| pool.get(MIB).unwrap()).collect::<Vec<_>>());
    assert_eq!(budget.held().bytes, 2 * MIB);
    shaky.in_deregister.store(1, SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| pool.trim(0))).is_err());
    assert_eq!(budget.held(), Amount::ZERO);
    assert!(pool.get(MIB).is_ok());
    drop(pool);
    assert_eq!(budget.held(), Amount::ZERO);
}

/// What a slab would have counted for is free again if its registration panics.
#[test]
fn a_device_that_panics_when_a_pool_grows_costs_it_nothing() {
    let shaky = Shaky::default();
    let config = PoolConfig { max_bytes: MIB, ..lending() };
    let pool = Pool::new(shaky.clone(), config).unwrap();
    shaky.in_register.store(1, SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| pool.get(MIB).map(drop))).is_err());
    assert!(pool.get(MIB).is_ok());
}

/// No drawer tells of what it leaves idle: the pool that waits looks for it.
#[test]
fn what_another_pool_leaves_idle_is_found_before_the_time_is_up() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let budget = budget(4 * MIB);
    let (keeps, wants) = (&pool_without_caches(&budget), &pool_without_caches(&budget));
    let held: Vec<_> = (0..4).map(|_| keeps.get(MIB).unwrap()).collect();
    thread::scope(|scope| {
        let began = Instant::now();
        let wait = WhenExhausted::GrowOrWait(PATIENCE);
        let maker = scope.spawn(move || wants.request(MIB).when_exhausted(wait).get().map(drop));
        until(|| wants.statistics().waiting == 1);
        drop(held);
        assert_eq!(maker.join().unwrap(), Ok(()));
        assert!(began.elapsed() < PATIENCE, "not at its last look");
    });
}

/// An empty slab is kept for a thread that waits for a longer one, and goes without: it came before another pool was lent
/// nothing, or after.
#[test]
fn what_was_kept_for_the_queue_of_another_pool_is_found_before_the_time_is_up() {
    const PATIENCE: Duration = Duration::from_secs(60);
    for waiter_comes_first in [true, false] {
        let budget = budget(5 * MIB);
        let (keeps, wants) = (&pool_without_caches(&budget), &pool_without_caches(&budget));
        let (two, three) = (keeps.get(2 * MIB).unwrap(), keeps.get(3 * MIB).unwrap());
        let wait = |pool: &Pool<Slow>, bytes, when| {
            pool.request(bytes).when_exhausted(when).get().map(drop)
        };
        thread::scope(|scope| {
            let make_way = || {
                let short = WhenExhausted::Wait(Duration::from_millis(300));
                let waiter = scope.spawn(move || wait(keeps, 3 * MIB, short));
                until(|| keeps.statistics().waiting == 1 || waiter.is_finished());
                drop(two);
                waiter
            };
            let make =
                || scope.spawn(move || wait(wants, 2 * MIB, WhenExhausted::GrowOrWait(PATIENCE)));
            let began = Instant::now();
            let (waiter, maker) = if waiter_comes_first {
                (make_way(), make())
            } else {
                let maker = make();
                until(|| wants.statistics().waiting == 1);
                (make_way(), maker)
            };
            assert!(matches!(waiter.join().unwrap(), Err(AllocateError::TimedOut { .. })));
            assert_eq!(maker.join().unwrap(), Ok(()));
            assert!(began.elapsed() < PATIENCE, "not at its last look");
            drop(three);
        });
    }
}

/// What would not do is left where it is, however often it comes and goes.
#[test]
fn what_another_pool_leaves_idle_stays_where_it_is_less_than_is_wanted() {
    let budget = budget(4 * MIB);
    let config = PoolConfig { max_slab_bytes: MIB, thread_cache_bytes: 0, ..lending() };
    let keeps = &Pool::within(share(&budget), Slow::default(), config).unwrap();
    let wants = &pool_without_caches(&budget);
    let held: Vec<_> = (0..3).map(|_| keeps.get(MIB).unwrap()).collect();
    drop(keeps.get(MIB).unwrap());
    assert_eq!(keeps.statistics().slabs, 4);
    thread::scope(|scope| {
        let wait = WhenExhausted::GrowOrWait(Duration::from_millis(500));
        let maker =
            scope.spawn(move || wants.request(2 * MIB).when_exhausted(wait).get().map(drop));
        until(|| wants.statistics().waiting == 1 || maker.is_finished());
        while !maker.is_finished() {
            // Refused where the maker's look has its slab given back just now.
            drop(keeps.get(MIB));
        }
        assert!(matches!(maker.join().unwrap(), Err(AllocateError::TimedOut { .. })));
    });
    // Four at first, one after its first look and each of some tries, and one after its last.
    assert!(keeps.statistics().grown < 16, "{} slabs", keeps.statistics().grown);
    drop(held);
}

/// Whether its thread waits, and has tried in vain to make a slab since it does.
fn is_asleep<R: Registrar>(pool: &Pool<R>) -> bool {
    let statistics = pool.statistics();
    statistics.waiting == 1 && statistics.refused >= 2
}

/// A thread waits for a slab of a pool that has as much as is due to it, until another share of the budget goes.
#[test]
fn a_share_that_goes_has_what_others_owe_then_given_back() {
    let budget = budget(12 * MIB);
    let config = PoolConfig { max_slab_bytes: 8 * MIB, thread_cache_bytes: 0, ..lending() };
    let pool = || Pool::within(share(&budget), Slow::default(), config).unwrap();
    let (wants, keeps, goes) = (&pool(), &pool(), share(&budget));
    let (_has, _uses) = (wants.get(3 * MIB).unwrap(), keeps.get(7 * MIB).unwrap());
    drop(keeps.get(2 * MIB).unwrap());
    thread::scope(|scope| {
        let wait = WhenExhausted::GrowOrWait(FOR_EVER);
        let maker =
            scope.spawn(move || wants.request(2 * MIB).when_exhausted(wait).get().map(drop));
        until(|| is_asleep(wants));
        let begun = Instant::now();
        drop(goes);
        assert!(maker.join().unwrap().is_ok());
        assert!(begun.elapsed() < FOR_EVER / 2);
    });
}

/// What a trim leaves empty is due to a thread that waits in another pool.
#[test]
fn what_a_trim_leaves_empty_serves_a_thread_of_another_pool() {
    let budget = budget(4 * MIB);
    let keeps = &Pool::within(share(&budget), Slow::default(), lending()).unwrap();
    let wants = &pool_without_caches(&budget);
    let held: Vec<_> = (0..4).map(|_| keeps.get(MIB).unwrap()).collect();
    thread::scope(|scope| {
        let wait = WhenExhausted::GrowOrWait(FOR_EVER);
        let maker = scope.spawn(move || wants.request(MIB).when_exhausted(wait).get().map(drop));
        until(|| is_asleep(wants));
        let begun = Instant::now();
        // Into the caches of this thread.
        drop(held);
        keeps.trim(usize::MAX);
        assert!(maker.join().unwrap().is_ok());
        assert!(begun.elapsed() < FOR_EVER / 2);
    });
}

/// What two devices pin twice is lent as often as it is missing, and not twice that.
#[test]
fn a_pool_of_two_devices_lends_no_more_than_is_missing() {
    let budget = budget(6 * MIB);
    let config = PoolConfig { max_slab_bytes: MIB, thread_cache_bytes: 0, ..lending() };
    let devices = (Slow::default(), Slow::default());
    let pairs = Pool::within(share(&budget), devices, config).unwrap();
    let wants = pool_without_caches(&budget);
    drop([(); 3].map(|()| pairs.get(MIB).unwrap()));
    assert_eq!(pairs.statistics().registered_bytes, 3 * MIB);
    assert!(wants.get(3 * MIB).is_ok());
    assert_eq!(pairs.statistics().registered_bytes, MIB);
}

/// A slab that becomes empty only as a thread looks for room goes for a longer one.
#[test]
fn what_a_raid_empties_makes_room_in_a_pool_that_keeps_nothing() {
    let config = PoolConfig { max_bytes: 2 * MIB, idle_bytes: 0, ..PoolConfig::default() };
    let pool = Pool::new(Slow::default(), config).unwrap();
    drop(pool.get(4096).unwrap());
    assert!(pool.get(2 * MIB).is_ok());
}

/// What threads cache is a request's before a device that takes no more is the reason to refuse it.
#[test]
fn what_a_raid_empties_serves_a_request_that_the_device_has_no_room_for() {
    let device = BoundedDevice::of_bytes(2 * MIB);
    let pool = Pool::new(device.clone(), PoolConfig::default()).unwrap();
    drop(pool.get(4096).unwrap());
    device.0.0.max_bytes.store(0, SeqCst);
    assert!(pool.get(2 * MIB).is_ok());
    drop(pool.get(4096).unwrap());
    assert!(pool.get(MIB).is_ok());
}

/// However little a device takes, what holds one buffer is tried before a request is refused: a span of blocks may be many
/// times as long.
#[test]
fn a_device_with_little_room_serves_what_it_has_room_for() {
    for (bytes, limit) in
        [(10_000, 300 * KIB), (20_000, 64 * KIB), (1500, 48 * KIB), (64, 16 * KIB)]
    {
        let pool = Pool::new(BoundedDevice::of_bytes(limit), PoolConfig::default()).unwrap();
        let mut buffers = Vec::new();
        let error = loop {
            match pool.get(bytes) {
                Ok(buffer) => buffers.push(buffer),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, AllocateError::Register(_)), "{error}");
        // Less is left than holds one more.
        let run = bytes.next_multiple_of(16 * KIB);
        assert_eq!(pool.statistics().registered_bytes, limit - limit % run, "{bytes}");
        assert!(buffers.len() >= limit / run, "{bytes}: {}", buffers.len());
        buffers.iter_mut().for_each(|buffer| buffer.fill(1));
        drop(buffers);
        assert_eq!(pool.statistics().in_use_bytes, 0);
    }
}

fn pool_without_caches(budget: &Budget) -> Pool<Slow> {
    let config = PoolConfig { max_slab_bytes: 8 * MIB, thread_cache_bytes: 0, ..lending() };
    Pool::within(share(budget), Slow::default(), config).unwrap()
}

// --- on the real kernel --------------------------------------------------------------------------

type RingCache = Cache<Arc<IoUring>, Arc<Userfaultfd>>;
type RingPool = Pool<Arc<IoUring>>;

/// A ring, and a cache and a pool that register with it and share a budget.
struct Machine {
    cache: RingCache,
    pool: RingPool,
    budget: Budget,
    ring: Mutex<io_uring::IoUring>,
    file: File,
}

/// What the cache and the pool share; half of it is due to each.
const TOTAL: usize = 8 * MIB;

impl Machine {
    /// `None`, with a note why, where there is no ring or no monitor.
    fn new() -> Option<Self> {
        let (ring, registrar) = ring_with_registrar(8, 256)?;
        let limit = Limits::read().enforced().bytes();
        // Tests run concurrently, and the kernel counts a user's rings together.
        if let Some(bytes) = limit.filter(|&bytes| bytes < 4 * TOTAL as u64) {
            eprintln!("skipped: no more than {bytes} bytes may be pinned");
            return None;
        }
        // One for all tests: the kernel joins neighbouring mappings, also those of two tests, and
        // what one monitor watches another cannot.
        let monitor = Userfaultfd::shared().map_err(|why| eprintln!("skipped: {why}")).ok()?;
        let (registrar, budget) = (Arc::new(registrar), budget(TOTAL));
        let (device, config) = (Arc::clone(&registrar), Config::keeping_all());
        let cache = pinfold::cache_within(share(&budget), device, monitor, config).unwrap();
        let pool = Pool::within(share(&budget), registrar, lending()).unwrap();
        Some(Self { cache, pool, budget, ring: Mutex::new(ring), file: memory_file() })
    }

    /// Sends registered memory of one byte's value through the ring, and looks whether it arrived.
    fn moves(&self, start: *const u8, length: usize, index: BufferIndex, byte: u8) -> bool {
        let (mut ring, mut seen) = (self.ring.lock().unwrap(), vec![0; length]);
        let sent = send(&mut ring, &self.file, start, length, index);
        self.file.read_exact_at(&mut seen, 0).unwrap();
        sent == i32::try_from(length).unwrap() && seen.iter().all(|&other| other == byte)
    }

    /// Leases memory and sends it.
    fn lease(&self, memory: &mut Memory, byte: u8) -> Result<(), GetError> {
        memory.fill(byte);
        let length = memory.range().len();
        let lease = memory.lease(&self.cache, 0..length, Access::READ)?;
        assert!(self.moves(memory.pointer(), length, lease.handle(), byte));
        Ok(())
    }

    /// Leases all of it until so many bytes are kept: what a concurrent program does can have a
    /// registration given back with its lease (see `Monitor::change_pending`), and is over soon.
    fn lease_until_kept(&self, memory: &mut [Memory], byte: u8, pinned: usize) {
        let began = Instant::now();
        loop {
            memory.iter_mut().for_each(|memory| self.lease(memory, byte).unwrap());
            let kept = self.cache.statistics().pinned_bytes;
            if kept == pinned as u64 {
                return;
            }
            let statistics = self.cache.statistics();
            assert!(began.elapsed() < Duration::from_secs(30), "{kept} bytes: {statistics:#?}");
        }
    }

    fn take(&self, length: usize, byte: u8) -> Result<PoolBuffer<'_, Arc<IoUring>>, AllocateError> {
        let mut buffer = self.pool.get(length)?;
        buffer.fill(byte);
        assert!(self.moves(buffer.as_ptr(), length, buffer.handle(), byte));
        Ok(buffer)
    }

    fn end(self) {
        let Self { cache, pool, budget, .. } = self;
        drop((cache, pool));
        assert_eq!(budget.held(), Amount::ZERO);
    }
}

#[test]
fn a_cache_and_a_pool_get_what_the_other_leaves_idle() {
    let Some(machine) = Machine::new() else { return };
    let buffers: Vec<_> = std::iter::from_fn(|| machine.take(MIB, 1).ok()).collect();
    assert_eq!((buffers.len(), machine.budget.held().bytes), (8, TOTAL));
    let mut memory: Vec<Memory> = (0..8).map(|_| Memory::new(MIB)).collect();
    let refused = machine.lease(&mut memory[0], 2).unwrap_err();
    assert!(matches!(refused, GetError::Exhausted(_)), "all of the pool is in use: {refused}");
    drop(buffers);
    // What is due to the cache is its own now.
    machine.lease_until_kept(&mut memory[..4], 3, 4 * MIB);
    assert_eq!(machine.pool.statistics().registered_bytes, 4 * MIB);
    // What the pool leaves unused the cache may borrow, and returns.
    machine.pool.trim(0);
    machine.lease_until_kept(&mut memory, 4, TOTAL);
    let buffers: Vec<_> = (0..4).map(|_| machine.take(MIB, 5).unwrap()).collect();
    assert!(machine.cache.statistics().pinned_bytes <= 4 << 20);
    assert!(machine.budget.held().bytes <= TOTAL);
    drop(buffers);
    machine.end();
}

/// A budget's listener may use the cache while the pool is giving back.
#[test]
fn a_listener_may_ask_for_what_a_pool_gives_back() {
    let Some(machine) = Machine::new() else { return };
    drop(std::iter::from_fn(|| machine.take(MIB, 1).ok()).collect::<Vec<_>>());
    assert_eq!(machine.budget.held().bytes, TOTAL);
    let (memory, leased) = (Arc::new(Memory::new(2 * MIB)), Arc::new(AtomicUsize::new(0)));
    let (machine, leases) = (Arc::new(machine), Arc::clone(&memory));
    let (seen, counted) = (Arc::downgrade(&machine), Arc::clone(&leased));
    let watch = machine.budget.watch(Watermark::Percent(90), move |told| {
        let Some(machine) = seen.upgrade().filter(|_| told.held.bytes < TOTAL) else { return };
        let lease = leases.lease(&machine.cache, 0..2 * MIB, Access::READ);
        counted.fetch_add(usize::from(lease.is_ok()), SeqCst);
    });
    machine.pool.trim(0);
    assert!(leased.load(SeqCst) > 0, "what was given back is there for others");
    drop(watch);
    Arc::into_inner(machine).unwrap().end();
}

/// No thread asks for more than is due, so none is refused, whatever the others do, and none waits
/// for ever.
#[test]
fn threads_of_a_cache_and_a_pool_always_get_what_is_due() {
    let Some(machine) = Machine::new() else { return };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let users: Vec<_> = (0..4_u8)
            .map(|user| {
                let machine = &machine;
                scope.spawn(move || {
                    let mut memory: Vec<Memory> = (0..3).map(|_| Memory::new(512 * KIB)).collect();
                    for step in 0..150_u8 {
                        let (which, byte) = (usize::from(step) % 3, step.wrapping_mul(4) + user);
                        if user % 2 == 0 {
                            machine.lease(&mut memory[which], byte).unwrap();
                        } else {
                            drop(machine.take(512 * KIB + 100_000 * which, byte).unwrap());
                        }
                        assert!(machine.budget.held().bytes <= TOTAL);
                    }
                })
            })
            .collect();
        let trimmer = scope.spawn(|| {
            while !over.load(SeqCst) {
                machine.pool.trim(MIB);
                machine.cache.evict_idle();
                thread::yield_now();
            }
        });
        let failed = users.into_iter().filter_map(|user| user.join().err()).count();
        over.store(true, SeqCst);
        trimmer.join().unwrap();
        assert_eq!(failed, 0);
    });
    assert_eq!(machine.pool.statistics().in_use_bytes, 0);
    machine.end();
}

/// Each takes what the other has put back, again and again.
#[test]
fn two_pools_that_lend_to_each_other_never_stand_still() {
    let budget = budget(2 * MIB);
    let pool = || Pool::within(share(&budget), Slow::default(), lending()).unwrap();
    let pools = [pool(), pool()];
    let patience = WhenExhausted::GrowOrWait(Duration::from_micros(100));
    thread::scope(|scope| {
        for pool in pools.iter().chain(&pools) {
            scope.spawn(|| {
                for _ in 0..300 {
                    match pool.request(MIB).when_exhausted(patience).get() {
                        Ok(_) | Err(AllocateError::TimedOut { .. }) => thread::yield_now(),
                        Err(other) => panic!("{other}"),
                    }
                    assert!(budget.held().bytes <= 2 * MIB);
                }
            });
        }
    });
    pools.iter().for_each(|pool| assert!(pool.get(MIB).is_ok(), "what is idle is lent"));
    drop(pools);
    assert_eq!(budget.held(), Amount::ZERO);
}

/// A device without room, which takes a while to say so.
#[derive(Clone, Default)]
struct FullDevice {
    tries: Arc<AtomicUsize>,
}

type Full = Fake<FullDevice>;

impl FakeDevice for FullDevice {
    type Handle = ();

    fn limits(&self) -> RegistrarLimits {
        SlowDevice::default().limits()
    }

    fn register(&self, _: AddressRange, _: Access) -> Result<(), RegisterError> {
        let tries = self.tries.fetch_add(1, SeqCst);
        // Not the same for all, so that the tries of several pools overlap each time in another way.
        let steps = tries.wrapping_mul(0x9E37_79B9) >> 16 & 3;
        thread::sleep(Duration::from_micros(100) * (1 + u32::try_from(steps).unwrap()));
        Err(RegisterError::TableFull { capacity: 0 })
    }

    fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

/// What one is granted and cannot use is refused to another meanwhile, which is notified when it comes back: several that try
/// at once went on to wake each other as long as they had patience.
#[test]
fn pools_whose_slabs_the_device_refuses_do_not_wake_each_other_for_ever() {
    const SLAB: usize = 8 * MIB;
    const PATIENCE: Duration = Duration::from_secs(2);
    let sizes = [MIB, 512 * KIB];
    for pools in [2, 4] {
        let (budget, device) = (budget(SLAB), Full::default());
        let config = PoolConfig { first_slab_bytes: SLAB, max_slab_bytes: SLAB, ..lending() };
        let pool = |_| Pool::within(share(&budget), device.clone(), config).unwrap();
        let pools: Vec<_> = (0..pools).map(pool).collect();
        thread::scope(|scope| {
            for (pool, size) in pools.iter().flat_map(|pool| sizes.map(|size| (pool, size))) {
                scope.spawn(move || {
                    let when = WhenExhausted::GrowOrWait(PATIENCE);
                    let timed_out = pool.request(size).when_exhausted(when).get().unwrap_err();
                    assert!(matches!(timed_out, AllocateError::TimedOut { .. }), "{timed_out}");
                });
            }
        });
        // Once before it waits, five times as it waits, and once more at the end. No shorter slab is tried, because the table is full.
        let most = pools.len() * sizes.len() * 7;
        let tries = device.tries.load(SeqCst);
        assert!(tries <= most, "{} pools tried {tries} times, {most} at most", pools.len());
    }
}

/// What keeps it from a grant is other pools' tries, which the device refuses: its own would take it.
#[test]
fn a_pool_whose_device_has_room_gets_it_behind_those_whose_device_has_none() {
    const SLAB: usize = 8 * MIB;
    const PATIENCE: Duration = Duration::from_secs(60);
    for _ in 0..10 {
        let (budget, device) = (budget(SLAB), Full::default());
        let config = PoolConfig { first_slab_bytes: SLAB, max_slab_bytes: SLAB, ..lending() };
        let good = Pool::within(share(&budget), Slow::default(), config).unwrap();
        let pool = |_| Pool::within(share(&budget), device.clone(), config).unwrap();
        let pools: Vec<_> = (0..4).map(pool).collect();
        let waiter = |pool: &Pool<Full>, patience| {
            let when = WhenExhausted::GrowOrWait(patience);
            pool.request(5 * MIB).when_exhausted(when).get().unwrap_err()
        };
        let began = Instant::now();
        thread::scope(|scope| {
            for pool in pools.iter().chain(&pools) {
                scope.spawn(move || waiter(pool, Duration::from_millis(200)));
            }
            until(|| device.tries.load(SeqCst) > 0);
            let when = WhenExhausted::GrowOrWait(PATIENCE);
            drop(good.request(5 * MIB).when_exhausted(when).get().unwrap());
        });
        // Its last try would have had it, when its patience was over.
        assert!(began.elapsed() < PATIENCE);
    }
}

/// A device with room for one slab.
#[derive(Clone, Default)]
struct RoomForOneDevice {
    registered: Arc<AtomicUsize>,
    refusals: Arc<AtomicUsize>,
}

type RoomForOne = Fake<RoomForOneDevice>;

impl FakeDevice for RoomForOneDevice {
    type Handle = ();

    fn limits(&self) -> RegistrarLimits {
        SlowDevice::default().limits()
    }

    fn register(&self, _: AddressRange, _: Access) -> Result<(), RegisterError> {
        if self.registered.compare_exchange(0, 1, SeqCst, SeqCst).is_err() {
            self.refusals.fetch_add(1, SeqCst);
            return Err(RegisterError::TableFull { capacity: 1 });
        }
        Ok(())
    }

    fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
        self.registered.store(0, SeqCst);
        Ok(())
    }
}

/// The budget has room for both, and refuses neither.
#[test]
fn a_thread_that_waits_for_room_in_the_device_notices_what_another_pool_gives_back() {
    const SLAB: usize = 8 * MIB;
    const PATIENCE: Duration = Duration::from_secs(60);
    let (budget, device) = (budget(4 * SLAB), RoomForOne::default());
    let config = PoolConfig { first_slab_bytes: SLAB, max_slab_bytes: SLAB, ..lending() };
    let pool = || Pool::within(share(&budget), device.clone(), config).unwrap();
    let (first, second) = (pool(), pool());
    let held = first.get(5 * MIB).unwrap();
    let began = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            let when = WhenExhausted::GrowOrWait(PATIENCE);
            drop(second.request(5 * MIB).when_exhausted(when).get().unwrap());
        });
        until(|| second.statistics().waiting == 1 && device.refusals.load(SeqCst) > 0);
        drop(held);
        first.trim(0);
    });
    // Its last try would have had it.
    assert!(began.elapsed() < PATIENCE);
}

// --- what the device refuses although the budget grants it ---------------------------------------

/// A device that bounds what it pins, and how many registrations it has, for all that use it.
#[derive(Clone, Default)]
struct BoundedDevice(Arc<Bounds>);

struct Bounds {
    bytes: AtomicUsize,
    regions: AtomicUsize,
    max_bytes: AtomicUsize,
    max_regions: AtomicUsize,
    /// Whether its refusals say how much it takes at most.
    says_limit: AtomicBool,
    tries: AtomicUsize,
}

impl Default for Bounds {
    fn default() -> Self {
        let zero = || AtomicUsize::new(0);
        let most = || AtomicUsize::new(usize::MAX);
        Self {
            bytes: zero(),
            regions: zero(),
            max_bytes: most(),
            max_regions: most(),
            says_limit: AtomicBool::new(false),
            tries: zero(),
        }
    }
}

impl BoundedDevice {
    fn of_bytes(max_bytes: usize) -> Bounded {
        let device = Self::default();
        device.0.max_bytes.store(max_bytes, SeqCst);
        Fake(device)
    }

    fn of_regions(max_regions: usize) -> Bounded {
        let device = Self::default();
        device.0.max_regions.store(max_regions, SeqCst);
        Fake(device)
    }

    fn held(&self) -> (usize, usize) {
        (self.0.bytes.load(SeqCst), self.0.regions.load(SeqCst))
    }

    fn tries(&self) -> usize {
        self.0.tries.load(SeqCst)
    }
}

type Bounded = Fake<BoundedDevice>;

impl FakeDevice for BoundedDevice {
    type Handle = ();

    fn limits(&self) -> RegistrarLimits {
        SlowDevice::default().limits()
    }

    fn register(&self, range: AddressRange, _: Access) -> Result<(), RegisterError> {
        let Bounds { bytes, regions, max_bytes, max_regions, says_limit, tries } = &*self.0;
        tries.fetch_add(1, SeqCst);
        let capacity = max_regions.load(SeqCst);
        let taken =
            regions.fetch_update(SeqCst, SeqCst, |it| Some(it + 1).filter(|&it| it <= capacity));
        taken.map_err(|_| RegisterError::TableFull { capacity })?;
        let limit = max_bytes.load(SeqCst);
        let pinned = bytes
            .fetch_update(SeqCst, SeqCst, |it| Some(it + range.len()).filter(|&it| it <= limit));
        pinned.map(drop).map_err(|_| {
            regions.fetch_sub(1, SeqCst);
            let limit_bytes = says_limit.load(SeqCst).then_some(limit as u64);
            RegisterError::PinnedMemoryLimit { limit_bytes, errno: libc::ENOMEM }
        })
    }

    fn deregister(&self, (): (), range: AddressRange) -> Result<(), DeregisterError> {
        self.0.bytes.fetch_sub(range.len(), SeqCst);
        self.0.regions.fetch_sub(1, SeqCst);
        Ok(())
    }
}

/// A pool of the budget that keeps so many slabs of a mebibyte, all of them empty.
fn idle_pool<R: Registrar>(budget: &Budget, device: R, slabs: usize) -> Pool<R> {
    let pool = Pool::within(share(budget), device, lending()).unwrap();
    drop((0..slabs).map(|_| pool.get(MIB).unwrap()).collect::<Vec<_>>());
    assert_eq!(pool.statistics().registered_bytes, slabs * MIB);
    pool
}

/// How often the budget's listeners have been notified of a refusal.
fn refusals_of(budget: &Budget) -> (BudgetWatch, Arc<AtomicUsize>) {
    let counted = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&counted);
    let watch = budget.watch(Watermark::Percent(100), move |event| {
        counts.fetch_add(usize::from(event.notice == BudgetNotice::Refused), SeqCst);
    });
    (watch, counted)
}

/// The budget has room for both, so it refuses neither. What is idle elsewhere in it goes for a slab that the device
/// refuses, as it does for a cache, as far as it is due to the pool.
#[test]
fn a_slab_that_the_device_refuses_gets_what_other_pools_leave_idle() {
    for device in [BoundedDevice::of_bytes(8 * MIB), BoundedDevice::of_regions(8)] {
        let budget = budget(64 * MIB);
        let idle = idle_pool(&budget, device.clone(), 8);
        let (_watch, refusals) = refusals_of(&budget);
        let marks = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&marks);
        let _reached = budget.watch(Watermark::Bytes(8 * MIB), move |event| {
            counts.fetch_add(usize::from(event.notice != BudgetNotice::Refused), SeqCst);
        });
        let pool = Pool::within(share(&budget), device.clone(), lending()).unwrap();
        let mut held: Vec<_> = (0..4).map(|_| pool.get(MIB).unwrap()).collect();
        assert_eq!(idle.statistics().registered_bytes, 4 * MIB, "no more than was missing");
        assert_eq!((device.held(), budget.held().bytes), ((8 * MIB, 8), 8 * MIB));
        assert_eq!(refusals.load(SeqCst), 4, "the program is notified");
        // When it began. While a pool grows no listener is called: it may wait for a thread that waits for the slab.
        assert_eq!(marks.load(SeqCst), 1);
        // Once in vain and once with success.
        assert_eq!(device.tries(), 16);
        let refused = pool.get(MIB).unwrap_err();
        assert!(matches!(refused, AllocateError::Register(_)), "more than its due: {refused}");
        assert_eq!(idle.statistics().registered_bytes, 4 * MIB);
        held.clear();
        assert!(pool.get(MIB).is_ok());
    }
}

/// The budget follows the limit, as it does when a registration of a cache is refused.
#[test]
fn a_slab_that_is_refused_finds_a_limit_that_was_lowered() {
    let root = std::env::temp_dir().join(format!("pinfold-pool-limit-{}", std::process::id()));
    std::fs::create_dir_all(root.join("proc/self")).unwrap();
    let limit = |bytes: usize| {
        let text = format!("Max locked memory {bytes} {bytes} bytes\n");
        std::fs::write(root.join("proc/self/limits"), text).unwrap();
    };
    limit(64 * MIB);
    let device = BoundedDevice::of_bytes(8 * MIB);
    let budget = Budget::discover_below(&root, Kind::Mlock, device.limits()).unwrap();
    let pool = Pool::within(share(&budget), device, lending()).unwrap();
    limit(8 * MIB);
    let held: Vec<_> = std::iter::from_fn(|| pool.get(MIB).ok()).collect();
    assert_eq!((held.len(), budget.total().bytes), (8, 8 * MIB));
    let refused = pool.get(MIB).unwrap_err();
    assert!(matches!(refused, AllocateError::Denied { .. }), "{refused}");
    std::fs::remove_dir_all(root).unwrap();
}

/// What a cache of the budget leaves idle goes as well: what it has cached and does not use.
#[test]
fn a_slab_that_the_device_refuses_gets_what_a_cache_leaves_idle() {
    let monitor = Userfaultfd::shared().map_err(|why| eprintln!("skipped: {why}"));
    let Ok(monitor) = monitor else { return };
    let (budget, device) = (budget(64 * MIB), BoundedDevice::of_bytes(8 * MIB));
    let cache =
        pinfold::cache_within(share(&budget), device.clone(), monitor, Config::keeping_all());
    let (cache, memory) = (cache.unwrap(), [(); 8].map(|()| Memory::new(MIB)));
    for memory in &memory {
        drop(get_simulated(&cache, memory.range(), Access::READ).unwrap());
    }
    assert_eq!(device.held(), (8 * MIB, 8));
    let pool = Pool::within(share(&budget), device, lending()).unwrap();
    let held: Vec<_> = std::iter::from_fn(|| pool.get(MIB).ok()).collect();
    assert_eq!((held.len(), cache.statistics().pinned_bytes), (4, 4 << 20));
}

/// A thread that waits for a slab asks others as one does that does not wait.
#[test]
fn a_slab_that_the_device_refuses_to_a_thread_that_waits_gets_what_becomes_idle() {
    let (budget, device) = (budget(64 * MIB), BoundedDevice::of_bytes(4 * MIB));
    // What a thread caches lies idle unnoticed.
    let config = PoolConfig { thread_cache_bytes: 0, ..lending() };
    let other = Pool::within(share(&budget), device.clone(), config).unwrap();
    let pool = Pool::within(share(&budget), device.clone(), lending()).unwrap();
    let mut held: Vec<_> = (0..4).map(|_| other.get(MIB).unwrap()).collect();
    let began = Instant::now();
    thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let when = WhenExhausted::GrowOrWait(LONG);
            pool.request(MIB).when_exhausted(when).get().map(drop)
        });
        let sleeps = || pool.statistics().waiting == 1 && pool.statistics().refused >= 2;
        until(|| sleeps() || waits.is_finished());
        held.clear();
        assert_eq!(waits.join().unwrap(), Ok(()));
        assert!(began.elapsed() < LONG, "not at its last look");
    });
}

/// What no room would be enough for is not asked for.
#[test]
fn a_slab_that_the_device_can_never_take_evicts_nothing() {
    let never_taken = [BoundedDevice::of_bytes(4 * MIB), BoundedDevice::of_regions(0)];
    never_taken[0].0.0.says_limit.store(true, SeqCst);
    for device in never_taken {
        let budget = budget(64 * MIB);
        let idle = idle_pool(&budget, Slow::default(), 32);
        let (_watch, refusals) = refusals_of(&budget);
        let pool = Pool::within(share(&budget), device.clone(), lending()).unwrap();
        let refused = pool.get(5 * MIB).unwrap_err();
        assert!(matches!(refused, AllocateError::Register(_)), "{refused}");
        assert_eq!((device.tries(), refusals.load(SeqCst)), (1, 1), "the budget hears of it");
        assert_eq!(idle.statistics().registered_bytes, 32 * MIB);
    }
}

/// Says that it has given something, and has nothing.
#[derive(Default)]
struct Boaster(AtomicUsize);

impl Lender for Boaster {
    fn give_back(&self, _: Amount) -> bool {
        // An end, for code that would believe it for ever.
        self.0.fetch_add(1, SeqCst) < 1000
    }
}

#[test]
fn a_slab_that_the_device_refuses_is_tried_so_often_and_no_more() {
    let (budget, device) = (budget(64 * MIB), BoundedDevice::of_bytes(0));
    let (other, boaster) = (share(&budget), Arc::new(Boaster::default()));
    let lender: Weak<dyn Lender> = Arc::<Boaster>::downgrade(&boaster);
    other.attach(lender);
    let drawn = other.draw(Amount { bytes: 16 * MIB, regions: 16 }).unwrap();
    let config = PoolConfig { first_slab_bytes: 64 * KIB, max_slab_bytes: 64 * KIB, ..lending() };
    let pool = Pool::within(share(&budget), device.clone(), config).unwrap();
    assert!(matches!(pool.get(64 * KIB), Err(AllocateError::Register(_))));
    assert_eq!((boaster.0.load(SeqCst), device.tries()), (64, 1 + 64));
    drop(drawn);
}

/// What a listener puts back is room that would have the slab tried again, and the listener called again.
#[test]
fn a_listener_that_uses_the_pool_does_not_have_a_refused_slab_tried_for_ever() {
    let (budget, device) = (budget(64 * MIB), BoundedDevice::of_bytes(4 * MIB));
    let config = PoolConfig { first_slab_bytes: 64 * KIB, ..lending() };
    let pool = Pool::within(share(&budget), device.clone(), config).unwrap();
    let pool = Arc::new(pool);
    let (own, calls) = (Arc::downgrade(&pool), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&calls);
    let _watch = budget.watch(Watermark::Percent(100), move |_| {
        // An end, for one that would be called for ever.
        if counted.fetch_add(1, SeqCst) < 1000 {
            own.upgrade().into_iter().for_each(|pool| drop(pool.get(4 * KIB)));
        }
    });
    let when = WhenExhausted::GrowOrWait(Duration::from_millis(500));
    let timed_out = pool.request(8 * MIB).when_exhausted(when).get().unwrap_err();
    assert!(matches!(timed_out, AllocateError::TimedOut { .. }), "{timed_out}");
    let (calls, tries) = (calls.load(SeqCst), device.tries());
    assert!((1..=3).contains(&calls) && tries <= 50, "{calls} calls, {tries} tries");
}

/// However often a request is tried, shorter and after a wait.
#[test]
fn a_listener_hears_once_of_a_request_that_a_device_refuses() {
    for (bytes, wait) in [10_000, 8 * MIB].into_iter().flat_map(|it| [(it, true), (it, false)]) {
        let (budget, device) = (budget(64 * MIB), BoundedDevice::of_bytes(0));
        let pool = Pool::within(share(&budget), device.clone(), lending()).unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let _watch = budget.watch(Watermark::Percent(100), move |_| {
            counted.fetch_add(1, SeqCst);
        });
        let patience = WhenExhausted::GrowOrWait(Duration::from_millis(20));
        let when = if wait { patience } else { WhenExhausted::Grow };
        assert!(pool.request(bytes).when_exhausted(when).get().is_err());
        assert!(device.tries() > usize::from(bytes < MIB), "it is tried shorter");
        assert_eq!(calls.load(SeqCst), 1, "{bytes} bytes, {when:?}");
    }
}

/// A shorter slab is one registration as well.
#[test]
fn a_slab_is_not_tried_shorter_where_the_device_has_no_registration_left() {
    let device = BoundedDevice::of_regions(1);
    let config = PoolConfig { first_slab_bytes: 8 * MIB, max_slab_bytes: 8 * MIB, ..lending() };
    let pool = Pool::new(device.clone(), config).unwrap();
    let held = pool.get(5 * MIB).unwrap();
    assert!(pool.get(5 * KIB).is_ok(), "of the slab that is there");
    let refused = pool.get(4 * MIB).unwrap_err();
    assert!(matches!(refused, AllocateError::Register(_)), "{refused}");
    assert_eq!((device.tries(), pool.statistics().refused), (2, 1));
    drop(held);
    // Its own empty slab goes for a longer one.
    assert!(pool.get(16 * MIB).is_ok());
    assert_eq!(device.held(), (16 * MIB, 1));
}
