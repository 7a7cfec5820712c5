//! Pools: what is out when a pool goes, and panics of its registrar and its budget.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to give buffers back by their addresses and to say that no device uses
//! them: none does.

#![allow(unsafe_code)]

use crate::device::{
    Device, IS_CHILD, Loud, LoudEnd, RAN, Records, Silent, device, in_a_process_of_its_own,
    panics_at,
};
use crate::ways::{child_does, panics};
use pinfold::budget::{Budget, Reserve, Terms};
use pinfold::pool::{
    AllocateError, Allowance, Denied, Pages, Pool, PoolBuffer, PoolConfig, PoolStatistics,
    WhenExhausted, deallocate,
};
use pinfold::{
    Access, AddressRange, Config, DeregisterError, RegisterError, Registrar, RegistrarLimits,
};
use pinfold_core::{Amount, Lender};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex, OnceLock, Weak, mpsc};
use std::thread;
use std::time::Duration;

const MIB: usize = 1 << 20;
/// Longer than what threads cache.
const UNCACHED: usize = 5 * MIB;
/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);
/// After this a thread is taken for one that waits for ever.
const FOR_EVER: Duration = Duration::from_secs(20);

fn config() -> PoolConfig {
    PoolConfig { max_bytes: 8 * MIB, ..PoolConfig::default() }
}

fn pool() -> (Pool<Device>, Arc<Records>) {
    let (device, records) = device();
    (Pool::new(device, config()).unwrap(), records)
}

/// An address, to be handed to another thread.
fn address(block: NonNull<u8>) -> usize {
    block.as_ptr().expose_provenance()
}

fn block(address: usize) -> NonNull<u8> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap()
}

/// The ways for a buffer to be out when its pool goes, for good or not.
type Way = fn(PoolBuffer<'_, Device>) -> Option<NonNull<u8>>;
const WAYS: [(&str, Way); 4] = [
    ("by its address", |buffer| Some(buffer.into_raw())),
    ("in flight, forgotten as a word", |buffer| {
        let _word = buffer.in_flight().into_user_data();
        None
    }),
    ("in flight, dropped", |buffer| {
        drop(buffer.in_flight());
        None
    }),
    ("forgotten", |buffer| {
        std::mem::forget(buffer);
        None
    }),
];

#[test]
fn what_is_out_keeps_its_slab_and_the_last_one_back_takes_the_registrar_along() {
    for (how, way) in WAYS {
        for length in [1500, 2 * MIB] {
            let budget = Budget::new(Amount { bytes: 64 * MIB, regions: 64 }).unwrap();
            let share = budget.share(Terms::default()).unwrap();
            let (device, records) = device();
            let pool = Pool::within(share, device, config()).unwrap();
            drop(pool.get(5 * MIB).unwrap());
            let mut buffer = pool.get(length).unwrap();
            let start = address(NonNull::from(&mut buffer[0]));
            let out = way(buffer);
            drop(pool);
            // What the device may still use is leaked, and nothing else.
            assert_eq!((records.is_gone(), records.live()), (false, 1), "{how}");
            assert_eq!(budget.held().regions, 1, "{how}");
            // SAFETY: the memory is out, and this test's alone.
            unsafe { block(start).as_ptr().write_bytes(7, length) };
            let Some(raw) = out else { continue };
            // SAFETY: given back once.
            unsafe { deallocate(raw) }.unwrap();
            assert_eq!((records.is_gone(), records.live()), (true, 0), "{how}");
            assert_eq!(budget.held(), Amount::ZERO, "{how}");
            // SAFETY: its slab is gone.
            assert!(unsafe { deallocate(raw) }.is_err(), "{how}");
        }
    }
}

/// Says that it is being settled, and is not done before it is told to.
#[derive(Debug)]
struct Slow {
    inside: Arc<AtomicBool>,
    go_on: Arc<AtomicBool>,
    value: Vec<u64>,
}

impl Allowance for Slow {
    fn grant(&self, _: usize) -> Result<(), Denied> {
        Ok(())
    }

    fn give_back(&self, _: usize) {}

    fn settle(&self) {
        self.inside.store(true, SeqCst);
        while !self.go_on.load(SeqCst) {
            thread::yield_now();
        }
        assert_eq!(self.value, [0x600d; 64], "used after it was dropped");
    }
}

#[test]
fn what_a_late_buffer_calls_outlives_the_pool() {
    let (inside, go_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
    let slow = Slow { inside: inside.clone(), go_on: go_on.clone(), value: vec![0x600d; 64] };
    let (device, _records) = device();
    let config = PoolConfig { idle_bytes: 0, thread_cache_bytes: 0, ..config() };
    let pool = Pool::with_allowance(device, config, Arc::new(slow)).unwrap();
    let out = address(pool.allocate(65536, 64).unwrap());
    inside.store(false, SeqCst);
    go_on.store(false, SeqCst);
    // SAFETY: given back once.
    let late = thread::spawn(move || unsafe { deallocate(block(out)) }.unwrap());
    while !inside.load(SeqCst) {
        thread::yield_now();
    }
    drop(pool);
    go_on.store(true, SeqCst);
    late.join().unwrap();
}

#[test]
fn buffers_come_back_on_other_threads_while_their_pool_goes() {
    const THREADS: usize = 3;
    for round in 0..200 {
        let (pool, records) = pool();
        let (pool, begin) = (Arc::new(pool), Arc::new(Barrier::new(THREADS + 1)));
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (pool, begin) = (Arc::clone(&pool), Arc::clone(&begin));
                thread::spawn(move || {
                    let take = |length| address(pool.allocate(length, 64).unwrap());
                    let mine = [64, 1500, 64, 65536].map(take);
                    // In half of the rounds it takes the slow way first.
                    if round % 2 == 0 {
                        drop([64, 1500].map(|length| pool.get(length).unwrap()));
                    }
                    drop(pool);
                    begin.wait();
                    for each in mine {
                        // SAFETY: given back once, by this thread.
                        unsafe { deallocate(block(each)) }.unwrap();
                    }
                })
            })
            .collect();
        begin.wait();
        drop(pool);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(records.is_gone() && records.live() == 0);
    }
}

/// For a slab the budget has a cache give back, which runs a callback that is due, on the thread that grows the pool
/// (see the contract). There the pool refuses what it has not, and the callback does not wait for its own thread.
#[test]
fn a_callback_that_a_growing_pool_runs_does_not_wait_for_it() {
    for when in [WhenExhausted::GrowOrWait(LONG), WhenExhausted::Wait(LONG)] {
        let budget = Budget::new(Amount { bytes: 4 * MIB, regions: 64 }).unwrap();
        let share = || budget.share(Terms::default()).unwrap();
        let ((of_cache, _), (of_pool, _)) = (device(), device());
        let monitor = Arc::new(Silent::new());
        let theirs = Arc::clone(&monitor);
        let cache =
            pinfold::cache_within(share(), of_cache, theirs, Config::keeping_all()).unwrap();
        let config = PoolConfig {
            first_slab_bytes: 2 * MIB,
            max_slab_bytes: 2 * MIB,
            pages: Pages::Base,
            ..config()
        };
        let pool = Arc::new(Pool::within(share(), of_pool, config).unwrap());
        let memory = vec![0_u8; 8 * MIB];
        let lease = |from: usize, bytes| {
            // SAFETY: no device is told of the memory.
            unsafe { cache.get(memory[from..].as_ptr(), bytes, Access::READ_WRITE) }.unwrap()
        };
        let idle = lease(0, 2 * MIB);
        let mut changed = lease(4 * MIB, MIB / 2);
        let (theirs, (report, heard)) = (Arc::clone(&pool), mpsc::channel());
        changed.on_invalidate(move || {
            let got = theirs.request(100).when_exhausted(when).get().map(drop);
            let _unheard = report.send((thread::current().id(), got));
        });
        drop(idle);
        // The change is found by the thread that grows the pool, and by no other before.
        let (range, reports, is_due) =
            (changed.registered(), Arc::downgrade(&monitor), AtomicBool::new(true));
        monitor.besides(move |question| {
            let is_it = question == "replay" && thread::current().name() == Some("grows");
            if is_it && is_due.swap(false, SeqCst) {
                reports.upgrade().unwrap().change(range);
            }
        });
        // Not joined before it is heard of: it would wait for itself.
        let grows = thread::Builder::new().name("grows".into());
        let grows = grows.spawn(move || pool.get(100).map(drop)).unwrap();
        let (id, got) = heard.recv_timeout(FOR_EVER).unwrap();
        assert_eq!(id, grows.thread().id(), "{when:?}");
        assert!(matches!(got, Err(AllocateError::Exhausted(_))), "{when:?}: {got:?}");
        assert_eq!(grows.join().unwrap(), Ok(()), "{when:?}");
        drop(changed);
    }
}

/// Panics at its `n`th call, of whatever kind.
#[derive(Debug, Default)]
struct Panicking {
    calls: AtomicUsize,
    panic_at: AtomicUsize,
    granted: AtomicUsize,
    /// How many grants it denies from now on.
    denials: AtomicUsize,
    /// Whether it settles without being counted.
    settles_uncounted: AtomicBool,
}

impl Panicking {
    fn count(&self, what: &str) {
        assert!(self.calls.fetch_add(1, SeqCst) + 1 != self.panic_at.load(SeqCst), "{what}");
    }
}

impl Allowance for Panicking {
    fn grant(&self, bytes: usize) -> Result<(), Denied> {
        let denied = self.denials.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        if denied.is_ok() {
            return Err(Denied { available: 0 });
        }
        self.count("grant");
        self.granted.fetch_add(bytes, SeqCst);
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.granted.fetch_sub(bytes, SeqCst);
        self.count("give_back");
    }

    fn settle(&self) {
        if !self.settles_uncounted.load(SeqCst) {
            self.count("settle");
        }
    }
}

/// Everything that a pool does, each step although the one before may have panicked.
fn use_all<R: Registrar>(pool: &Pool<R>) -> usize {
    let briefly = WhenExhausted::GrowOrWait(Duration::from_millis(1));
    let steps: [&dyn Fn(); 6] = [
        &|| drop(pool.get(1500)),
        &|| drop([pool.get(2 * MIB), pool.get(3 * MIB), pool.get(1500)]),
        &|| drop(pool.request(9 * MIB).when_exhausted(WhenExhausted::Grow).get()),
        &|| assert!(pool.trim(0) <= 8 * MIB),
        // The second has to wait, and in vain.
        &|| {
            drop([UNCACHED; 2].map(|bytes| pool.request(bytes).when_exhausted(briefly).get()));
        },
        &|| {
            let raw = pool.allocate(100, 64).map(address).ok();
            // SAFETY: given back once.
            raw.into_iter().for_each(|raw| unsafe { deallocate(block(raw)) }.unwrap());
        },
    ];
    steps.into_iter().filter(|step| panics(step)).count()
}

#[test]
fn a_registrar_or_a_budget_that_panics_at_any_call_leaves_the_pool_whole() {
    let (mut registrars, mut budgets) = (true, true);
    for n in 1.. {
        for of_registrar in [true, false] {
            if !(if of_registrar { registrars } else { budgets }) {
                continue;
            }
            let (device, records) = device();
            let allowance = Arc::new(Panicking::default());
            let theirs = Arc::clone(&allowance);
            let pool = Pool::with_allowance(device, config(), theirs).unwrap();
            if of_registrar {
                panics_at(&records, n);
            } else {
                allowance.panic_at.store(n, SeqCst);
            }
            let panicked = use_all(&pool);
            // It goes on as one whose registrar and budget never panicked.
            panics_at(&records, 0);
            allowance.panic_at.store(0, SeqCst);
            assert_eq!(use_all(&pool), 0, "call {n}");
            assert_eq!(pool.statistics().in_use_bytes, 0, "call {n}");
            drop(pool);
            assert_eq!(allowance.granted.load(SeqCst), 0, "call {n}");
            assert_eq!(records.leaked(), 0, "call {n}");
            if panicked == 0 {
                *(if of_registrar { &mut registrars } else { &mut budgets }) = false;
            }
        }
        if !registrars && !budgets {
            break;
        }
    }
}

/// A thread that waits tries to make a slab, and the budget panics: it leaves its place in the queue.
#[test]
fn a_thread_that_waits_leaves_the_queue_although_its_budget_panics() {
    let mut panicked = 0;
    // The first try denies as often as it asks, and the panic is met at another.
    for denials in 0.. {
        let (device, _records) = device();
        let allowance = Arc::new(Panicking::default());
        let theirs = Arc::clone(&allowance);
        let config = PoolConfig { max_bytes: 64 * MIB, ..PoolConfig::default() };
        let pool = Pool::with_allowance(device, config, theirs).unwrap();
        let held = std::iter::from_fn(|| {
            let size = pool.request(UNCACHED);
            size.when_exhausted(if pool.statistics().slabs == 0 {
                WhenExhausted::Grow
            } else {
                WhenExhausted::Fail
            })
            .get()
            .ok()
        });
        let held: Vec<_> = held.collect();
        allowance.settles_uncounted.store(true, SeqCst);
        allowance.denials.store(denials, SeqCst);
        allowance.calls.store(0, SeqCst);
        allowance.panic_at.store(1, SeqCst);
        let briefly = WhenExhausted::GrowOrWait(Duration::from_millis(20));
        let unwound = panics(|| drop(pool.request(UNCACHED).when_exhausted(briefly).get()));
        panicked += u32::from(unwound);
        allowance.panic_at.store(0, SeqCst);
        allowance.denials.store(0, SeqCst);
        assert_eq!(pool.statistics().waiting, 0, "{denials} denials");
        drop(held);
        let found = pool.request(UNCACHED).when_exhausted(WhenExhausted::Fail).get();
        assert!(found.is_ok(), "{denials} denials: {found:?}");
        drop(found);
        if !unwound {
            // While no thread waits, and while one does.
            assert!(panicked > 1, "{panicked} panics");
            break;
        }
    }
}

/// A thread that has waited gives back what is empty and no other thread waits for; should that panic, what it
/// has waited for is put back.
#[test]
fn what_a_thread_has_waited_for_is_put_back_although_its_registrar_panics() {
    for of_registrar in [true, false] {
        let (device, records) = device();
        let allowance = Arc::new(Panicking::default());
        let theirs = Arc::clone(&allowance);
        let config = PoolConfig { max_bytes: 12 * MIB, idle_bytes: 0, ..PoolConfig::default() };
        let pool = Pool::with_allowance(device, config, theirs).unwrap();
        let short = pool.get(2 * MIB).unwrap();
        let long = pool.get(UNCACHED).unwrap();
        assert_eq!(pool.statistics().slabs, 2);
        thread::scope(|scope| {
            let patiently = WhenExhausted::Wait(Duration::from_secs(60));
            let pool = &pool;
            let waits = scope.spawn(move || {
                panics(|| drop(pool.request(UNCACHED).when_exhausted(patiently).get()))
            });
            while pool.statistics().waiting == 0 {
                thread::yield_now();
            }
            // Nothing goes while a thread waits.
            drop(short);
            if of_registrar {
                panics_at(&records, 1);
            } else {
                allowance.calls.store(0, SeqCst);
                allowance.panic_at.store(1, SeqCst);
            }
            drop(long);
            assert!(waits.join().unwrap(), "its registrar or its budget panicked");
        });
        let statistics = pool.statistics();
        assert_eq!((statistics.in_use_bytes, statistics.registered_bytes), (0, 0));
        drop(pool);
        assert_eq!((allowance.granted.load(SeqCst), records.leaked()), (0, 0));
    }
}

#[test]
fn a_pool_whose_registrar_panics_as_it_goes_is_gone() {
    for n in 1..4 {
        for unwinding in [false, true] {
            let (device, records) = device();
            let pool = Pool::new(device, config()).unwrap();
            drop([pool.get(3 * MIB).unwrap(), pool.get(2 * MIB).unwrap(), pool.get(1500).unwrap()]);
            panics_at(&records, n);
            let panicked = panics(|| {
                let _dropped = pool;
                assert!(!unwinding, "unwinds");
            });
            assert_eq!(panicked, unwinding || records.has_panicked());
            assert!(records.is_gone());
            assert_eq!(records.leaked(), 0);
        }
    }
}

/// A budget that panics at each return and at its end.
#[derive(Debug)]
struct LoudAllowance {
    _end: LoudEnd,
}

impl Allowance for LoudAllowance {
    fn grant(&self, _: usize) -> Result<(), Denied> {
        Ok(())
    }

    fn give_back(&self, _: usize) {
        panic!("given back");
    }
}

/// Every deregistration, every return and both destructors panic: one panic goes on, and all has ended.
#[test]
fn a_pool_ends_although_all_that_it_calls_and_drops_panics() {
    for unwinding in [false, true] {
        for is_last_out in [false, true] {
            let ended = Arc::new(AtomicUsize::new(0));
            let (device, records) = device();
            let device = Loud(device, LoudEnd(Arc::clone(&ended)));
            let allowance = Arc::new(LoudAllowance { _end: LoudEnd(Arc::clone(&ended)) });
            let pool = Pool::with_allowance(device, config(), allowance).unwrap();
            let out = pool.get(UNCACHED).unwrap().into_raw();
            drop(pool.get(1500).unwrap());
            let panicked = panics(|| {
                let _dropped = pool;
                if !is_last_out {
                    // SAFETY: given back once.
                    unsafe { deallocate(out) }.unwrap();
                }
                assert!(!unwinding, "unwinds");
            });
            assert!(panicked);
            if is_last_out {
                // SAFETY: given back once.
                assert!(panics(|| unsafe { deallocate(out) }.unwrap()));
            }
            assert_eq!((ended.load(SeqCst), records.live()), (2, 0));
        }
    }
}

#[test]
fn a_reservation_ends_although_all_that_it_calls_and_drops_panics() {
    for unwinding in [false, true] {
        let ended = Arc::new(AtomicUsize::new(0));
        let (device, records) = device();
        let device = Arc::new(Loud(device, LoudEnd(Arc::clone(&ended))));
        let budget = Budget::new(Amount { bytes: 64 * MIB, regions: 64 }).unwrap();
        let reserved = budget.reserve(&device, Reserve::pages(2)).unwrap();
        drop(device);
        let panicked = panics(|| {
            let _taken = (reserved.take(), reserved);
            assert!(!unwinding, "unwinds");
        });
        assert!(panicked);
        assert_eq!((ended.load(SeqCst), records.live()), (1, 0));
        assert_eq!(budget.held(), Amount::ZERO);
    }
}

/// Whatever call panics, of those that it makes and of those that end it.
#[test]
fn a_registrar_that_panics_at_any_call_leaves_nothing_of_a_reservation() {
    for n in 1.. {
        let budget = Budget::new(Amount { bytes: 64 * MIB, regions: 64 }).unwrap();
        let (device, records) = device();
        let device = Arc::new(device);
        panics_at(&records, n);
        let panicked = panics(|| {
            let reservation = budget.reserve(&device, Reserve::pages(4)).unwrap();
            let mut taken = reservation.take().unwrap();
            taken.fill(7);
            drop(reservation);
        });
        assert_eq!(panicked, records.has_panicked(), "call {n}");
        assert_eq!((records.leaked(), budget.held()), (0, Amount::ZERO), "call {n}");
        assert_eq!(Arc::strong_count(&device), 1, "call {n}");
        // All of it is to be had again.
        panics_at(&records, 0);
        drop(budget.reserve(&device, Reserve::pages(64)).unwrap());
        if !panicked {
            assert_eq!(n, 9, "four registrations and their ends");
            break;
        }
    }
}

/// Who else holds a lender, until it is asked for something.
type Owners = Arc<Mutex<Vec<Arc<LoudLender>>>>;

/// Panics at its `n`th call; then all that own it and its like have let go of them, and each panics as it goes.
struct LoudLender {
    calls: Arc<AtomicUsize>,
    panic_at: usize,
    owners: Owners,
    _end: LoudEnd,
}

impl LoudLender {
    fn called(&self, what: &str) {
        if self.calls.fetch_add(1, SeqCst) + 1 == self.panic_at {
            std::mem::take(&mut *self.owners.lock().unwrap()).into_iter().for_each(|owned| {
                let _ended = panics(|| drop(owned));
            });
            panic!("{what}");
        }
    }
}

impl Lender for LoudLender {
    fn give_back(&self, _: Amount) -> bool {
        self.called("give back");
        false
    }

    fn budget_changed(&self, _: Amount, _: Amount) {
        self.called("changed");
    }

    fn room_made(&self) {
        self.called("room made");
    }
}

/// Asked for what their drawer is to give back by a cache, a pool, a drawer of the program's and a reservation.
#[test]
fn lenders_that_panic_at_any_call_and_as_they_go_end_no_process() {
    let name = "pools::lenders_that_panic_at_any_call_and_as_they_go_end_no_process";
    let status = in_a_process_of_its_own(name, || {
        let all = Amount { bytes: 4 * MIB, regions: 8 };
        let patiently = WhenExhausted::GrowOrWait(Duration::from_millis(1));
        let memory = vec![0_u8; 3 * MIB];
        for n in 1.. {
            let budget = Budget::new(all).unwrap();
            let share = |minimum| budget.share(Terms { minimum, ..Terms::default() }).unwrap();
            let (calls, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let (owners, borrower) = (Owners::default(), share(Amount::ZERO));
            for _ in 0..2 {
                let (calls, owners) = (Arc::clone(&calls), Arc::clone(&owners));
                let _end = LoudEnd(Arc::clone(&ended));
                let lender = Arc::new(LoudLender { calls, panic_at: n, owners, _end });
                let weak: Weak<dyn Lender> = Arc::<LoudLender>::downgrade(&lender);
                borrower.attach(weak);
                lender.owners.lock().unwrap().push(Arc::clone(&lender));
            }
            let room = borrower.draw(Amount { bytes: 2 * MIB, regions: 4 }).unwrap();
            let ((of_cache, cached), (of_pool, pooled)) = (device(), device());
            let config = Config::keeping_all();
            let monitor = Silent::new();
            let cache = pinfold::cache_within(share(Amount::ZERO), of_cache, monitor, config);
            let (cache, of_reservation) = (cache.unwrap(), Arc::new(device().0));
            let pool = Pool::within(share(Amount::ZERO), of_pool, crate::pools::config()).unwrap();
            let drawer = share(Amount::ZERO);
            let steps: [&dyn Fn(); 4] = [
                // SAFETY: no device is told of the memory.
                &|| drop(unsafe { cache.get(memory.as_ptr(), memory.len(), Access::READ) }),
                &|| drop(pool.request(3 * MIB).when_exhausted(patiently).get()),
                &|| drop(drawer.draw(Amount::one(3 * MIB))),
                &|| {
                    let reserve = Reserve { buffer_bytes: 3 * MIB, ..Reserve::pages(1) };
                    drop(budget.reserve(&of_reservation, reserve));
                },
            ];
            let panicked = steps.into_iter().filter(|step| panics(step)).count();
            let room_made = panics(|| drop(room));
            let was_asked = calls.load(SeqCst) >= n;
            assert!(panicked <= 1 && !room_made, "call {n}");
            assert_eq!(ended.load(SeqCst), if was_asked { 2 } else { 0 }, "call {n}");
            // All goes on.
            drop(borrower.draw(all).unwrap());
            // SAFETY: as above.
            drop(unsafe { cache.get(memory.as_ptr(), memory.len(), Access::READ) }.unwrap());
            cache.evict_idle();
            drop(pool.request(3 * MIB).when_exhausted(patiently).get().unwrap());
            drop((cache, pool));
            assert_eq!((cached.leaked(), pooled.leaked(), budget.held()), (0, 0, Amount::ZERO));
            std::mem::take(&mut *owners.lock().unwrap()).into_iter().for_each(std::mem::forget);
            if !was_asked {
                assert!(n > 4, "only {n} calls");
                break;
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// What a thread has cached goes back in a destructor that no panic may leave.
#[test]
fn a_thread_ends_although_what_it_gives_back_makes_others_panic() {
    let name = "pools::a_thread_ends_although_what_it_gives_back_makes_others_panic";
    let status = in_a_process_of_its_own(name, || {
        for of_registrar in [true, false] {
            let (device, records) = device();
            let allowance = Arc::new(Panicking::default());
            let config = PoolConfig { idle_bytes: 0, ..config() };
            let theirs = Arc::clone(&allowance);
            let pool = Pool::with_allowance(device, config, theirs).unwrap();
            let ended = thread::scope(|scope| {
                scope
                    .spawn(|| {
                        drop(pool.get(1500).unwrap());
                        // The first call from now on is that of the thread's end.
                        if of_registrar {
                            panics_at(&records, 1);
                        } else {
                            allowance.calls.store(0, SeqCst);
                            allowance.panic_at.store(1, SeqCst);
                        }
                    })
                    .join()
            });
            assert!(ended.is_ok());
            allowance.panic_at.store(0, SeqCst);
            panics_at(&records, 0);
            assert_eq!(pool.statistics().panics_kept_back, 1);
            assert_eq!(pool.statistics().registered_bytes, 0);
            drop(pool.get(1500).unwrap());
            drop(pool);
            assert_eq!(allowance.granted.load(SeqCst), 0);
            assert_eq!(records.leaked(), 0);
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// What may be done at an address by the table of mappings, or nothing where nothing is mapped.
fn rights_at(address: usize) -> Option<String> {
    let table = std::fs::read_to_string("/proc/self/maps").unwrap();
    table.lines().find_map(|line| {
        let (addresses, rest) = line.split_once(' ')?;
        let (start, end) = addresses.split_once('-')?;
        let [start, end] = [start, end].map(|end| usize::from_str_radix(end, 16).unwrap());
        (start..end).contains(&address).then(|| rest[..4].to_owned())
    })
}

/// The signal that ends a forked child that does `work`, if one does.
fn signal_that_ends(work: impl FnOnce()) -> Option<i32> {
    // SAFETY: the child works and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no handler of another's, such as a sanitizer's, makes an exit of it.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        work();
        // SAFETY: the child's own end.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: the child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
}

/// Pages set aside are left out of a child. Its own memory does not come in their place, where its parent's buffers
/// point.
#[test]
fn a_forked_child_maps_nothing_where_its_parents_pages_set_aside_were() {
    const SLAB: usize = 2 * MIB;
    let small = PoolConfig { max_slab_bytes: SLAB, ..config() };
    let pool = Pool::new(device().0, small).unwrap();
    let mut buffer = pool.get(MIB).unwrap();
    buffer.fill(1);
    if pool.statistics().set_aside_bytes == 0 {
        eprintln!("skipped: no huge pages are set aside (vm.nr_hugepages)");
        return;
    }
    let start = address(NonNull::from(&mut buffer[0]));
    let slab = start / SLAB * SLAB..(start / SLAB + 1) * SLAB;
    let buffer = child_does(buffer, |mut buffer| {
        assert_eq!(rights_at(start).as_deref(), Some("---p"));
        let own: Vec<_> = (0..8).map(|_| vec![7_u8; MIB]).collect();
        assert!(own.iter().all(|own| !slab.contains(&own.as_ptr().addr())));
        let own_pool = Pool::new(device().0, small).unwrap();
        assert!(!slab.contains(&own_pool.get(MIB).unwrap().as_ptr().addr()));
        assert_eq!(signal_that_ends(|| buffer.fill(9)), Some(libc::SIGSEGV));
        // What is the parent's stays so, whatever becomes of the child's copies.
        drop(buffer);
        assert_eq!(rights_at(start).as_deref(), Some("---p"));
    });
    assert!(buffer.iter().all(|&byte| byte == 1));
}

/// The C library calls no handler that was registered while it called those before the fork.
#[test]
fn a_slab_that_is_made_while_the_process_forks_leaves_no_hole_in_the_child() {
    static POOL: OnceLock<Pool<Device>> = OnceLock::new();
    /// A buffer of the pool's first slab.
    static MADE_AT_FORK: AtomicUsize = AtomicUsize::new(0);
    static IS_LEFT_OUT: AtomicBool = AtomicBool::new(false);
    /// The test's process ends with this code then.
    const NONE_SET_ASIDE: i32 = RAN + 1;
    extern "C" fn take() {
        if MADE_AT_FORK.load(SeqCst) == 0 {
            let pool = POOL.get().unwrap();
            let buffer = pool.get(MIB).unwrap();
            IS_LEFT_OUT.store(pool.statistics().set_aside_bytes > 0, SeqCst);
            MADE_AT_FORK.store(buffer.as_ptr().addr(), SeqCst);
            std::mem::forget(buffer);
        }
    }
    let name = "pools::a_slab_that_is_made_while_the_process_forks_leaves_no_hole_in_the_child";
    let status = in_a_process_of_its_own(name, || {
        let pool = Pool::new(device().0, PoolConfig { max_slab_bytes: 2 * MIB, ..config() });
        POOL.get_or_init(|| pool.unwrap());
        // SAFETY: the handler is there as long as the process.
        assert_eq!(unsafe { libc::pthread_atfork(Some(take), None, None) }, 0);
        child_does((), |()| {
            // Otherwise the child has zeros.
            let is_left_out = IS_LEFT_OUT.load(SeqCst);
            let rights = rights_at(MADE_AT_FORK.load(SeqCst));
            assert_eq!(rights.as_deref(), Some(if is_left_out { "---p" } else { "rw-p" }));
        });
        if !IS_LEFT_OUT.load(SeqCst) {
            std::process::exit(NONE_SET_ASIDE);
        }
    });
    if status.code() == Some(NONE_SET_ASIDE) {
        return eprintln!("skipped: no huge pages are set aside (vm.nr_hugepages)");
    }
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// A child that was forked while another thread had the pool's lock is refused, and what it drops is its
/// parent's.
#[test]
fn a_forked_child_is_refused_and_waits_for_no_thread_of_its_parent() {
    let name = "pools::a_forked_child_is_refused_and_waits_for_no_thread_of_its_parent";
    let status = in_a_process_of_its_own(name, || {
        let ended = Arc::new(AtomicBool::new(false));
        let (pool, records) = pool();
        thread::scope(|scope| {
            for _ in 0..2 {
                // Through the pool's lock each time.
                scope.spawn(|| {
                    while !ended.load(SeqCst) {
                        drop(pool.request(UNCACHED).get());
                    }
                });
            }
            for _ in 0..100 {
                let (buffer, flight) = (pool.get(1500).unwrap(), pool.get(1500).unwrap());
                let raw = address(pool.allocate(100, 64).unwrap());
                let (buffer, flight, _) =
                    child_does((buffer, flight, &pool), |(buffer, flight, pool)| {
                        let refused = |error| matches!(error, Err(AllocateError::Forked));
                        assert!(refused(pool.get(1500).map(drop)));
                        assert!(refused(pool.request(UNCACHED).get().map(drop)));
                        assert!(refused(pool.allocate(100, 64).map(|_| ())));
                        drop((buffer, flight.in_flight()));
                        // SAFETY: given back once in this process.
                        unsafe { deallocate(block(raw)) }.unwrap();
                        assert_eq!(
                            (pool.trim(0), pool.statistics()),
                            (0, PoolStatistics::default())
                        );
                    });
                // SAFETY: given back once.
                unsafe { deallocate(block(raw)) }.unwrap();
                // SAFETY: no device knows of it.
                drop((buffer, unsafe { flight.in_flight().complete() }));
            }
            ended.store(true, SeqCst);
        });
        assert_eq!(pool.statistics().in_use_bytes, 0);
        let _pool = child_does(pool, drop);
        assert!(records.live() > 0, "the child ended nothing");
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// The next child of this thread has the number 1. False where that is not allowed.
pub(crate) fn numbers_begin_anew() -> bool {
    // SAFETY: this thread starts no more threads.
    unsafe { libc::unshare(libc::CLONE_NEWPID) == 0 }
}

/// Forks at its `n`th call, of whatever kind; the child goes on as if nothing had been.
#[derive(Debug, Default)]
pub(crate) struct Forking {
    calls: AtomicUsize,
    calls_at_fork: AtomicUsize,
    fork_at: AtomicUsize,
    /// Its number here, 0 in the child, -1 before there is one.
    pub(crate) child: AtomicI32,
    granted: AtomicUsize,
    granted_at_fork: AtomicUsize,
    /// The child begins a namespace of numbers.
    is_first: bool,
}

impl Forking {
    pub(crate) fn at(n: usize) -> Arc<Self> {
        Arc::new(Self { fork_at: n.into(), child: (-1).into(), ..Self::default() })
    }

    /// With the number 1 for the child.
    pub(crate) fn first_at(n: usize) -> Arc<Self> {
        let number = (-1).into();
        Arc::new(Self { fork_at: n.into(), child: number, is_first: true, ..Self::default() })
    }

    /// Whether there was another call since it forked.
    pub(crate) fn is_called_since(&self) -> bool {
        self.calls.load(SeqCst) != self.calls_at_fork.load(SeqCst)
    }

    /// A forked child ends here, and says whether it called what is its parent's. Whether there was one.
    pub(crate) fn is_left_alone(&self, has_called: bool) -> bool {
        let child = self.child.load(SeqCst);
        if child == 0 {
            // SAFETY: the child's own end.
            unsafe { libc::_exit(i32::from(has_called)) };
        }
        let mut status = 0;
        // SAFETY: the child of this process, if there is one.
        let waited = child < 0 || unsafe { libc::waitpid(child, &raw mut status, 0) } == child;
        assert!(waited && status == 0, "the child ended with {status:#x}");
        child > 0
    }

    pub(crate) fn count(&self) {
        if self.calls.fetch_add(1, SeqCst) + 1 == self.fork_at.load(SeqCst) {
            assert!(!self.is_first || numbers_begin_anew());
            // SAFETY: the child goes on in this test alone, and leaves by `_exit`.
            let child = unsafe { libc::fork() };
            self.child.store(child, SeqCst);
            if child == 0 {
                IS_CHILD.store(true, SeqCst);
                self.granted_at_fork.store(self.granted.load(SeqCst), SeqCst);
                self.calls_at_fork.store(self.calls.load(SeqCst), SeqCst);
                // SAFETY: the child's own timer.
                unsafe { libc::alarm(300) };
            }
        }
    }
}

impl Allowance for Forking {
    fn grant(&self, bytes: usize) -> Result<(), Denied> {
        self.granted.fetch_add(bytes, SeqCst);
        self.count();
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.granted.fetch_sub(bytes, SeqCst);
        self.count();
    }

    fn settle(&self) {
        self.count();
    }
}

/// A device that forks as its budget does.
pub(crate) struct ForkingDevice(pub(crate) Device, pub(crate) Arc<Forking>);

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for ForkingDevice {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    unsafe fn register(&self, range: AddressRange, access: Access) -> Result<u32, RegisterError> {
        // SAFETY: the caller's promise, passed on.
        let registered = unsafe { self.0.register(range, access) };
        self.1.count();
        registered
    }

    unsafe fn deregister(&self, handle: u32, range: AddressRange) -> Result<(), DeregisterError> {
        // SAFETY: as above.
        let ended = unsafe { self.0.deregister(handle, range) };
        self.1.count();
        ended
    }
}

/// Whatever call of the device or the budget has forked, the child comes back from it although the pool's
/// lock was held by another thread, is refused, and takes nothing of its parent's.
#[test]
fn a_child_forked_inside_a_registrar_or_a_budget_comes_back_from_it() {
    let name = "pools::a_child_forked_inside_a_registrar_or_a_budget_comes_back_from_it";
    let status = in_a_process_of_its_own(name, || {
        // As often as it takes for each call to be met with the lock held.
        for n in 1.. {
            if (0..10).any(|_| fork_at_call(n) < 0) {
                assert!(n > 15, "{n} calls");
                break;
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Says which child was forked, if any.
fn fork_at_call(n: usize) -> i32 {
    let (device, records) = device();
    let forks = Forking::at(n);
    let device = ForkingDevice(device, Arc::clone(&forks));
    let budget: Arc<dyn Allowance> = forks.clone();
    let pool = Pool::with_allowance(device, config(), budget).unwrap();
    let ended = AtomicBool::new(false);
    let child = thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(SeqCst) {
                pool.statistics();
            }
        });
        let panicked = use_all(&pool);
        let child = forks.child.load(SeqCst);
        if child == 0 {
            let refused = matches!(pool.get(1500).map(drop), Err(AllocateError::Forked));
            let took_away = forks.granted.load(SeqCst) != forks.granted_at_fork.load(SeqCst);
            // SAFETY: the child's own end.
            unsafe { libc::_exit(i32::from(panicked > 0 || !refused || took_away)) };
        }
        ended.store(true, SeqCst);
        assert_eq!(panicked, 0, "call {n}");
        child
    });
    drop(pool);
    let child = child.max(forks.child.load(SeqCst));
    if child == 0 {
        let took_away = forks.granted.load(SeqCst) != forks.granted_at_fork.load(SeqCst);
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(took_away)) };
    }
    assert_eq!((forks.granted.load(SeqCst), records.leaked()), (0, 0), "call {n}");
    assert!(records.is_gone(), "call {n}");
    let mut status = 0;
    // SAFETY: the child of this process, if there is one.
    let waited = child < 0 || unsafe { libc::waitpid(child, &raw mut status, 0) } == child;
    assert!(waited && status == 0, "call {n}: the child ended with {status:#x}");
    child
}

/// Has room for one buffer and for no span of blocks, and forks where it is asked for the one.
struct ForksInLastResort(AtomicI32);

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for ForksInLastResort {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 30, max_regions: 16 }
    }

    unsafe fn register(&self, range: AddressRange, _: Access) -> Result<u32, RegisterError> {
        if range.len() > 16 << 10 {
            return Err(RegisterError::PinnedMemoryLimit { limit_bytes: None, errno: 12 });
        }
        // SAFETY: the child goes on in this test alone, and leaves by `_exit`.
        self.0.store(unsafe { libc::fork() }, SeqCst);
        IS_CHILD.store(self.0.load(SeqCst) == 0, SeqCst);
        Ok(0)
    }

    unsafe fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

#[test]
fn a_child_forked_in_a_last_resort_hears_that_it_is_one() {
    let name = "pools::a_child_forked_in_a_last_resort_hears_that_it_is_one";
    let status = in_a_process_of_its_own(name, || {
        let device = Arc::new(ForksInLastResort((-1).into()));
        let pool = Pool::new(Arc::clone(&device), config()).unwrap();
        let asked = pool.get(10_000).map(drop);
        let child = device.0.load(SeqCst);
        if child == 0 {
            let is_refused = matches!(asked, Err(AllocateError::Forked));
            // SAFETY: the child's own end.
            unsafe { libc::_exit(i32::from(!is_refused)) };
        }
        assert!(child > 0 && asked.is_ok(), "{asked:?}");
        let mut status = 0;
        // SAFETY: the child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Grants nothing, and forks when a pool awaits room for the first time.
#[derive(Debug)]
struct ForksInWait {
    /// As in [`Forking`].
    child: AtomicI32,
    is_asked_in_child: AtomicBool,
}

impl Allowance for ForksInWait {
    fn grant(&self, _: usize) -> Result<(), Denied> {
        self.is_asked_in_child.fetch_or(self.child.load(SeqCst) == 0, SeqCst);
        Err(Denied { available: 0 })
    }

    fn give_back(&self, _: usize) {}

    fn released(&self) -> Option<u64> {
        self.is_asked_in_child.fetch_or(self.child.load(SeqCst) == 0, SeqCst);
        Some(0)
    }

    fn await_room(&self) {
        if self.child.load(SeqCst) < 0 {
            // SAFETY: the child goes on in this test alone, and leaves by `_exit`.
            self.child.store(unsafe { libc::fork() }, SeqCst);
            IS_CHILD.store(self.child.load(SeqCst) == 0, SeqCst);
        }
    }
}

/// What was the parent's budget is asked nothing in the child, not even how much there may be.
#[test]
fn a_child_forked_while_a_pool_awaits_room_asks_nothing() {
    let name = "pools::a_child_forked_while_a_pool_awaits_room_asks_nothing";
    let status = in_a_process_of_its_own(name, || {
        let (device, _records) = device();
        let forks = Arc::new(ForksInWait { child: (-1).into(), is_asked_in_child: false.into() });
        let pool = Pool::with_allowance(device, config(), forks.clone()).unwrap();
        let when = WhenExhausted::GrowOrWait(Duration::from_millis(20));
        let asked = pool.request(1500).when_exhausted(when).get().map(drop);
        let child = forks.child.load(SeqCst);
        if child == 0 {
            let is_right = matches!(asked, Err(AllocateError::Forked))
                && !forks.is_asked_in_child.load(SeqCst);
            // SAFETY: the child's own end.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        assert!(child > 0, "room was never awaited");
        assert!(matches!(asked, Err(AllocateError::TimedOut { .. })), "{asked:?}");
        let mut status = 0;
        // SAFETY: the child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}
