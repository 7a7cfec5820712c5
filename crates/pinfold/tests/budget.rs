//! Budgets against the kernel: what is promised is kept under pressure from other processes of the
//! same user, and what changes from outside is noticed.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register memory of its own, to submit requests for it whose
//! completion every helper awaits, and for the system calls that make processes and limits.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use pinfold::budget::{
    Amount, Budget, BudgetError, BudgetNotice, BudgetWatch, Kind, Reservation, Reserve,
    ReserveError, Reserved, Share, Terms, Watermark, WatermarkEvent,
};
use pinfold::monitor::{NoMonitor, Userfaultfd};
use pinfold::pool::{Pool, PoolConfig};
use pinfold::registrar::{BufferIndex, IoUring, Mlock};
use pinfold::{
    Access, AddressRange, Cache, Config, DeregisterError, GetError, Lease, Limit, RegisterError,
    Registrar, RegistrarLimits,
};
use pinfold_core::{Lender, Recalls};
use registrar_support::{
    Memory, Own, PAGE, alone, in_forked_child, live_under_a_limit, memory_file,
    ring_with_registrar, send, status_bytes,
};
use std::fmt::Debug;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

const LIMIT: u64 = 1 << 20;

type RingCache = Cache<IoUring, Arc<Userfaultfd>>;

/// A ring with a registrar of `slots`, or a note why there is none.
fn ring(slots: u32) -> Option<(io_uring::IoUring, Arc<IoUring>)> {
    ring_with_registrar(8, slots).map(|(ring, registrar)| (ring, Arc::new(registrar)))
}

fn register(registrar: &IoUring, memory: &Memory) -> Result<BufferIndex, RegisterError> {
    // SAFETY: the test's own memory.
    unsafe { registrar.register(memory.range(), Access::READ_WRITE) }
}

fn is_about_the_limit(error: RegisterError) -> bool {
    matches!(error, RegisterError::PinnedMemoryLimit { .. })
}

/// The first success, of attempts that fail while the kernel still counts what it was asked to release:
/// up to a second on kernels before 6.13, not at all on later ones.
fn at_last<T, E: Debug>(mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(why) => assert!(start.elapsed() < Duration::from_secs(60), "{why:?}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether the buffer's own bytes leave through its registration.
fn moves(ring: &mut io_uring::IoUring, buffer: &mut Reserved<IoUring>, byte: u8) -> bool {
    buffer.fill(byte);
    let (file, mut seen) = (memory_file(), vec![0; buffer.len()]);
    let sent = send(ring, &file, buffer.as_ptr(), buffer.len(), buffer.handle());
    sent == i32::try_from(buffer.len()).unwrap()
        && file.read_exact_at(&mut seen, 0).is_ok()
        && seen.iter().all(|&other| other == byte)
}

fn set_limit(soft: u64) {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: LIMIT };
    // SAFETY: a system call without effect on memory.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
}

/// A process that runs `body` until the value is dropped.
struct Process(libc::pid_t);

impl Process {
    fn start(body: impl FnOnce()) -> Self {
        // SAFETY: the child runs `body` alone and leaves without unwinding or exit handlers.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "{}", std::io::Error::last_os_error());
        if child == 0 {
            // SAFETY: system calls without effect on memory: the child ends with its parent.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            // SAFETY: ends this child.
            unsafe { libc::_exit(i32::from(held.is_err())) };
        }
        Self(child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SAFETY: the child is this test's own and has not been waited for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// Takes all that it can get, lets some of it go, and again, for ever.
fn press(seed: u64) {
    let Some((_ring, registrar)) = ring(256) else { return };
    let memory: Vec<Memory> = (0..128).map(|_| Memory::new(4 * PAGE)).collect();
    let mut held: Vec<(BufferIndex, usize)> = Vec::new();
    let mut random = seed | 1;
    loop {
        for (number, memory) in memory.iter().enumerate() {
            if held.iter().all(|&(_, other)| other != number) {
                match register(&registrar, memory) {
                    Ok(index) => held.push((index, number)),
                    Err(_) => break,
                }
            }
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let keep = usize::try_from(random >> 33).unwrap() % (held.len() + 1);
        for (index, number) in held.drain(keep..) {
            registrar.deregister_own(index, memory[number].range()).unwrap();
        }
    }
}

/// How many reservations to make: `PINFOLD_TEST_RUNS`, or 200.
fn runs() -> usize {
    let runs = std::env::var("PINFOLD_TEST_RUNS").ok();
    runs.map_or(200, |runs| runs.parse().unwrap())
}

/// What the reservations of one test came to.
#[derive(Default, Debug)]
struct Tally {
    made: usize,
    refused: usize,
    honoured: usize,
    /// Registrations of the same size that were not reserved, and failed.
    plain_refused: usize,
}

impl Tally {
    fn note(
        &mut self,
        ring: &mut io_uring::IoUring,
        registrar: &IoUring,
        reservation: &Reservation<IoUring>,
    ) {
        self.made += 1;
        let plain = Memory::new(20 * PAGE);
        match register(registrar, &plain) {
            Ok(index) => registrar.deregister_own(index, plain.range()).unwrap(),
            Err(error) => {
                assert!(is_about_the_limit(error), "{error}");
                self.plain_refused += 1;
            }
        }
        let mut taken: Vec<_> = std::iter::from_fn(|| reservation.take()).collect();
        let all_move = taken
            .iter_mut()
            .enumerate()
            .all(|(number, buffer)| moves(ring, buffer, u8::try_from(number + 1).unwrap()));
        self.honoured += usize::from(taken.len() == 20 && all_move);
    }
}

/// Twenty real pages, while other processes of the same user fight for the same limit.
#[test]
fn a_reservation_is_honoured_under_pressure_or_refused_when_made() {
    alone("a_reservation_is_honoured_under_pressure_or_refused_when_made", || {
        if !live_under_a_limit(LIMIT, 54_881) {
            return;
        }
        let Some((mut ring, registrar)) = ring(64) else { return };
        let budget = Budget::within(
            Amount { bytes: 512 << 10, regions: 64 },
            Kind::IoUring,
            registrar.limits(),
        )
        .unwrap();
        let pressure = [1, 2, 3].map(|seed| Process::start(move || press(seed)));
        let mut tally = Tally::default();
        let runs = runs();
        while (tally.made < runs || tally.plain_refused == 0)
            && tally.made + tally.refused < 1000 * runs
        {
            match budget.reserve(&registrar, Reserve::pages(20)) {
                Ok(reservation) => tally.note(&mut ring, &registrar, &reservation),
                Err(ReserveError::Register { error, .. }) => {
                    assert!(is_about_the_limit(error), "{error}");
                    tally.refused += 1;
                }
                Err(other) => panic!("{other}"),
            }
            assert_eq!(budget.held(), Amount::ZERO, "nothing is left behind");
        }
        drop(pressure);
        eprintln!("{tally:?}");
        assert!(tally.made >= runs, "{tally:?}");
        assert_eq!(tally.honoured, tally.made, "{tally:?}");
        assert!(tally.plain_refused > 0, "no pressure: {tally:?}");
    });
}

/// Why a reservation is registered memory and no mere number: room cannot be swapped.
#[test]
fn fact_a_spare_registration_makes_no_room_for_its_replacement() {
    alone("fact_a_spare_registration_makes_no_room_for_its_replacement", || {
        if !live_under_a_limit(LIMIT, 54_882) {
            return;
        }
        let Some((_ring, registrar)) = ring(64) else { return };
        let (spare, wanted) = (Memory::new(150 * PAGE), Memory::new(150 * PAGE));
        let index = register(&registrar, &spare).unwrap();
        // Other processes may take what is released.
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let (mut go_reader, mut go_writer) = std::io::pipe().unwrap();
        let other = Process::start(move || {
            let (_ring, registrar) = ring(8).unwrap();
            let memory = Memory::new(150 * PAGE);
            go_reader.read_exact(&mut [0]).unwrap();
            at_last(|| register(&registrar, &memory));
            writer.write_all(&[1]).unwrap();
            loop {
                std::thread::park();
            }
        });
        registrar.deregister_own(index, spare.range()).unwrap();
        go_writer.write_all(&[0]).unwrap();
        let mut taken = [0];
        reader.read_exact(&mut taken).unwrap();
        assert_eq!(taken, [1], "the other process of this user has the room");
        assert!(is_about_the_limit(register(&registrar, &wanted).unwrap_err()));
        drop(other);
    });
}

#[test]
fn reservations_refuse_what_cannot_be() {
    let Some((_ring, registrar)) = ring(8) else { return };
    let budget = Budget::new(Amount { bytes: 64 * PAGE, regions: 100 }).unwrap();
    let reserve = |buffers, buffer_bytes| {
        let access = Access::READ_WRITE;
        budget.reserve(&registrar, Reserve { buffers, buffer_bytes, access }).map(drop).unwrap_err()
    };
    for (buffers, bytes) in [(0, PAGE), (1, 0), (usize::MAX, PAGE), (2, usize::MAX)] {
        assert!(matches!(reserve(buffers, bytes), ReserveError::Size { .. }));
    }
    assert!(matches!(reserve(65, 1), ReserveError::Budget(BudgetError::Kept { .. })));
    let full = reserve(9, 1);
    assert!(matches!(full, ReserveError::Register { made: 8, .. }), "{full}");
    assert_eq!(budget.held(), Amount::ZERO);
    let reservation = budget.reserve(&registrar, Reserve::pages(8)).unwrap();
    assert_eq!((reservation.len(), budget.held().bytes), (8, 8 * PAGE));
    let first = reservation.take().unwrap();
    assert_eq!((reservation.remaining(), first.len()), (7, PAGE));
    drop(reservation);
    assert_eq!(budget.held().bytes, 8 * PAGE, "as long as a buffer is out");
    drop(first);
    assert_eq!(budget.held(), Amount::ZERO);
}

/// What can never be free is asked of none.
#[test]
fn a_reservation_that_cannot_be_evicts_nothing() {
    let Some((_ring, registrar)) = ring(8) else { return };
    let budget = Budget::new(Amount { bytes: 64 * PAGE, regions: 200 }).unwrap();
    let Some((_own_ring, cache)) = cache_on(&budget.share(Terms::default()).unwrap()) else {
        return;
    };
    let memory: Vec<Memory> = (0..32).map(|_| Memory::new(PAGE)).collect();
    memory.iter().for_each(|memory| get(&cache, memory).unwrap());
    let kept = Terms { minimum: Amount { bytes: 16 * PAGE, regions: 1 }, ..Terms::default() };
    let _other = budget.share(kept).unwrap();
    let held = budget.held();
    assert_eq!(held.bytes, 32 * PAGE);
    // More than there is, and more than there is beside what another keeps.
    for pages in [65, 49] {
        let refused = budget.reserve(&registrar, Reserve::pages(pages)).map(drop).unwrap_err();
        assert!(matches!(refused, ReserveError::Budget(BudgetError::Kept { .. })), "{refused}");
        assert_eq!(budget.held(), held);
    }
    drop(cache);
}

/// A device without memory that bounds how many registrations it has, for all that use it.
#[derive(Debug)]
struct Table {
    capacity: usize,
    held: AtomicUsize,
    tries: AtomicUsize,
}

impl Table {
    fn of(capacity: usize) -> Arc<Self> {
        Arc::new(Self { capacity, held: AtomicUsize::new(0), tries: AtomicUsize::new(0) })
    }

    fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Table {
    type Handle = ();

    fn limits(&self) -> RegistrarLimits {
        Full.limits()
    }

    unsafe fn register(&self, _: AddressRange, _: Access) -> Result<(), RegisterError> {
        let Self { capacity, held, tries } = self;
        tries.fetch_add(1, Ordering::SeqCst);
        let more = |held: usize| Some(held + 1).filter(|held| held <= capacity);
        let taken = held.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        taken.map(drop).map_err(|_| RegisterError::TableFull { capacity: *capacity })
    }

    unsafe fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
        self.held.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A pool with so many slabs in `device`, all of them empty.
fn idle_pool(budget: &Budget, device: &Arc<Table>, slabs: usize) -> Pool<Arc<Table>> {
    let share = budget.share(Terms::default()).unwrap();
    let config =
        PoolConfig { first_slab_bytes: SLAB, max_slab_bytes: SLAB, ..PoolConfig::default() };
    let pool = Pool::within(share, Arc::clone(device), config).unwrap();
    drop((0..slabs).map(|_| pool.get(SLAB).unwrap()).collect::<Vec<_>>());
    assert_eq!((pool.statistics().slabs, device.held()), (slabs, slabs));
    pool
}

const SLAB: usize = 64 << 10;

/// How often the budget's listeners have been notified of a refusal.
fn refusals_of(budget: &Budget) -> (BudgetWatch, Arc<AtomicUsize>) {
    let counted = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&counted);
    let watch = budget.watch(Watermark::Percent(100), move |event: &WatermarkEvent| {
        let refused = usize::from(event.notice == BudgetNotice::Refused);
        counts.fetch_add(refused, Ordering::SeqCst);
    });
    (watch, counted)
}

/// The budget has room for both. What others leave idle goes for what the device refuses, and no more than that.
#[test]
fn a_reservation_that_the_device_refuses_gets_what_others_leave_idle() {
    let budget = Budget::new(Amount { bytes: 1 << 30, regions: 100 }).unwrap();
    let device = Table::of(8);
    let idle = idle_pool(&budget, &device, 6);
    let (_watch, refusals) = refusals_of(&budget);
    let reservation = budget.reserve(&device, Reserve::pages(4)).unwrap();
    assert_eq!((idle.statistics().slabs, device.held()), (4, 8));
    assert_eq!(refusals.load(Ordering::SeqCst), 1, "the program is notified");
    assert_eq!(device.tries.load(Ordering::SeqCst), 6 + 5);
    let held = Amount { bytes: 4 * SLAB + 4 * PAGE, regions: 8 };
    assert_eq!(budget.held(), held);
    drop(reservation);
    assert_eq!(budget.held(), Amount { bytes: 4 * SLAB, regions: 4 });
}

/// What no room would be enough for is not asked for. What could be had is refused once none has anything to give.
#[test]
fn a_reservation_that_the_device_can_never_take_evicts_nothing() {
    let budget = Budget::new(Amount { bytes: 1 << 30, regions: 100 }).unwrap();
    let device = Table::of(8);
    let idle = idle_pool(&budget, &device, 6);
    let (_watch, refusals) = refusals_of(&budget);
    let refused = |buffers| {
        let refused = budget.reserve(&device, Reserve::pages(buffers)).map(drop).unwrap_err();
        let full = RegisterError::TableFull { capacity: 8 };
        assert_eq!(refused, ReserveError::Register { made: 2, error: full });
        assert_eq!((idle.statistics().slabs, device.held()), (6, 6));
        assert_eq!(budget.held(), Amount { bytes: 6 * SLAB, regions: 6 });
        refusals.swap(0, Ordering::SeqCst)
    };
    assert_eq!(refused(9), 1, "the budget hears of it");
    let in_use: Vec<_> = (0..6).map(|_| idle.get(SLAB).unwrap()).collect();
    assert_eq!(refused(8), 1);
    drop(in_use);
    assert!(budget.reserve(&device, Reserve::pages(8)).is_ok());
    assert_eq!(idle.statistics().slabs, 0);
}

/// A cache over its own ring, on a share of `budget`.
fn cache_on(share: &Arc<Share>) -> Option<(io_uring::IoUring, RingCache)> {
    let (ring, registrar) = ring_with_registrar(8, 1024)?;
    let monitor = Userfaultfd::shared().map_err(|why| eprintln!("skipped: {why}")).ok()?;
    let share = Arc::clone(share);
    Some((ring, pinfold::cache_within(share, registrar, monitor, Config::keeping_all()).unwrap()))
}

fn get(cache: &RingCache, memory: &Memory) -> Result<(), GetError> {
    get_range(cache, memory.range())
}

fn get_range(cache: &RingCache, range: AddressRange) -> Result<(), GetError> {
    let start = std::ptr::without_provenance(range.start());
    // SAFETY: the test's own memory; no transfer uses it.
    unsafe { cache.get(start, range.len(), Access::READ) }.map(drop)
}

#[test]
fn caches_borrow_and_give_back() {
    let budget = Budget::new(Amount { bytes: 64 * PAGE, regions: 64 }).unwrap();
    let shares = [(); 2].map(|()| budget.share(Terms::default()).unwrap());
    let (Some((_one_ring, one)), Some((_other_ring, other))) =
        (cache_on(&shares[0]), cache_on(&shares[1]))
    else {
        return;
    };
    let memory: Vec<Memory> = (0..64).map(|_| Memory::new(PAGE)).collect();
    memory.iter().for_each(|memory| get(&one, memory).unwrap());
    assert_eq!(
        shares[0].held().bytes,
        64 * PAGE,
        "all of it is borrowed while no other share asks"
    );
    for memory in &memory[..32] {
        get(&other, memory).unwrap();
    }
    assert_eq!(shares.each_ref().map(|share| share.held().bytes), [32 * PAGE; 2]);
    // Beyond its due it has to make room by itself.
    get(&other, &memory[40]).unwrap();
    assert_eq!(shares.each_ref().map(|share| share.held().bytes), [32 * PAGE; 2]);
    assert_eq!(other.statistics().evictions, 1);
    drop(one);
    assert_eq!(budget.held().bytes, 32 * PAGE);
    memory.iter().for_each(|memory| get(&other, memory).unwrap());
    assert_eq!(shares[1].held().bytes, 64 * PAGE);
}

#[test]
fn a_minimum_is_there_when_everything_else_is_leased() {
    let budget = Budget::new(Amount { bytes: 16 * PAGE, regions: 64 }).unwrap();
    let minimum = Amount { bytes: 4 * PAGE, regions: 4 };
    let kept = budget.share(Terms { minimum, ..Terms::default() }).unwrap();
    let greedy = budget.share(Terms::default()).unwrap();
    let Some((_ring, cache)) = cache_on(&greedy) else { return };
    let memory: Vec<Memory> = (0..13).map(|_| Memory::new(PAGE)).collect();
    let leases: Vec<_> = memory
        .iter()
        // SAFETY: the test's own memory; no transfer uses it.
        .map(|memory| unsafe { cache.get(memory.pointer(), PAGE, Access::READ) })
        .collect();
    let refused = leases[12].as_ref().err().copied();
    let Some(GetError::Exhausted(exhausted)) = refused else { panic!("{refused:?}") };
    let shared = (Limit::SharedBytes, 12 * PAGE);
    assert_eq!((exhausted.limit, exhausted.allowed), shared);
    let drawn = kept.draw(minimum).unwrap();
    assert!(kept.draw(Amount::one(PAGE)).is_err());
    assert_eq!(budget.held().bytes, 16 * PAGE);
    drop((drawn, leases));
    assert!(cache.evict_idle() <= 12);
    assert_eq!(budget.held(), Amount::ZERO);
}

/// Two caches, four threads, a budget that holds a quarter of what they want.
#[test]
fn the_budget_is_exact_and_never_exceeded_by_many_threads() {
    let total = Amount { bytes: 40 * PAGE, regions: 16 };
    let budget = Budget::new(total).unwrap();
    let shares = [3, 1].map(|weight| budget.share(Terms { weight, ..Terms::default() }).unwrap());
    let caches: Vec<_> = shares.iter().filter_map(cache_on).collect();
    if caches.len() < 2 {
        return;
    }
    let memory: Vec<Memory> = (0..40).map(|pages| Memory::new((1 + pages % 4) * PAGE)).collect();
    let ranges: Vec<AddressRange> = memory.iter().map(Memory::range).collect();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (budget, (_, cache), ranges) = (&budget, &caches[thread % 2], &ranges);
            scope.spawn(move || {
                for step in 0..500_usize {
                    let which = (step * (7 + thread) + thread * 13) % ranges.len();
                    match get_range(cache, ranges[which]) {
                        Ok(()) | Err(GetError::Exhausted(_)) => {}
                        Err(other) => panic!("{other}"),
                    }
                    assert!(budget.held().fits(total));
                }
            });
        }
    });
    for (share, (_, cache)) in shares.iter().zip(&caches) {
        let statistics = cache.statistics();
        assert_eq!(share.held().bytes as u64, statistics.pinned_bytes);
        assert_eq!(share.held().regions as u64, statistics.regions);
        assert!(statistics.hits > 0 && statistics.evictions > 0, "{statistics:?}");
    }
    drop(caches);
    assert_eq!(budget.held(), Amount::ZERO);
}

#[test]
fn the_program_is_told_with_no_lock_held() {
    let budget = Budget::new(Amount { bytes: 10 * PAGE, regions: 64 }).unwrap();
    let share = budget.share(Terms::default()).unwrap();
    let Some((_ring, cache)) = cache_on(&share) else { return };
    let (told, cache) = (Arc::new(Mutex::new(Vec::new())), Arc::new(cache));
    let extra = Memory::new(PAGE);
    let watch = budget.watch(Watermark::Percent(80), {
        let (told, cache, extra) = (Arc::clone(&told), Arc::downgrade(&cache), extra.range());
        move |news: &WatermarkEvent| {
            told.lock().unwrap().push(*news);
            // The cache can be used here, and its memory registered.
            if let Some(cache) = cache.upgrade() {
                get_range(&cache, extra).unwrap();
            }
            panic!("a panic here reaches no caller");
        }
    });
    let memory: Vec<Memory> = (0..8).map(|_| Memory::new(PAGE)).collect();
    memory[..7].iter().for_each(|memory| get(&cache, memory).unwrap());
    assert_eq!(told.lock().unwrap().len(), 0);
    get(&cache, &memory[7]).unwrap();
    let reached = BudgetNotice::Reached(Watermark::Percent(80));
    {
        let told = told.lock().unwrap();
        assert_eq!(told.iter().map(|news| news.notice).collect::<Vec<_>>(), [reached]);
        assert_eq!(told[0].held.bytes, 8 * PAGE);
    }
    cache.evict_idle();
    assert_eq!(told.lock().unwrap()[1].notice, BudgetNotice::Left(Watermark::Percent(80)));
    drop(watch);
    memory.iter().for_each(|memory| get(&cache, memory).unwrap());
    assert_eq!(told.lock().unwrap().len(), 2, "the callback is gone");
}

/// A device that has no room for any registration.
struct Full;

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Full {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 30, max_regions: 8 }
    }

    unsafe fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
        Err(RegisterError::TableFull { capacity: 8 })
    }

    unsafe fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

/// What a listener's own attempts meet is not news for it, or telling would never end.
#[test]
fn a_listener_that_is_refused_itself_is_told_once() {
    let budget = Budget::new(Amount { bytes: 10 * PAGE, regions: 64 }).unwrap();
    let share = budget.share(Terms::default()).unwrap();
    let monitor = NoMonitor::new().unwrap();
    let cache = pinfold::cache_within(share, Full, monitor, Config::keeping_all()).unwrap();
    let (cache, told) = (Arc::new(cache), Arc::new(AtomicUsize::new(0)));
    let memory = Memory::new(PAGE);
    let _watch = budget.watch(Watermark::Percent(100), {
        let (told, cache, range) = (Arc::clone(&told), Arc::downgrade(&cache), memory.range());
        move |news: &WatermarkEvent| {
            assert_eq!(news.notice, BudgetNotice::Refused);
            assert!(told.fetch_add(1, Ordering::SeqCst) < 100, "it never ends");
            let Some(cache) = cache.upgrade() else { return };
            let start = std::ptr::without_provenance(range.start());
            for _ in 0..2 {
                // SAFETY: the test's own memory, and nothing is registered.
                let got = unsafe { cache.get(start, range.len(), Access::READ) };
                assert!(got.is_err());
            }
        }
    });
    for round in 1..=2 {
        let start = std::ptr::without_provenance(memory.range().start());
        // SAFETY: as above.
        assert!(unsafe { cache.get(start, PAGE, Access::READ) }.is_err());
        assert_eq!(told.load(Ordering::SeqCst), round);
    }
}

/// As an operator does with `prlimit`, from outside.
#[test]
fn a_limit_lowered_while_running_is_noticed_and_told() {
    alone("a_limit_lowered_while_running_is_noticed_and_told", || {
        if !live_under_a_limit(LIMIT, 54_883) {
            return;
        }
        let Some((_ring, registrar)) = ring(8) else { return };
        let budget = Budget::discover(Kind::IoUring, registrar.limits()).unwrap();
        let share = budget.share(Terms::default()).unwrap();
        let Some((_ring, cache)) = cache_on(&share) else { return };
        // Less what the cache's ring takes.
        let before = budget.refresh();
        assert!(before.bytes as u64 <= LIMIT, "{before:?}");
        let mut notices = cache.notices(9);
        let changes = Arc::new(AtomicUsize::new(0));
        let _watch = budget.watch(Watermark::Percent(100), {
            let changes = Arc::clone(&changes);
            move |told: &WatermarkEvent| {
                if matches!(told.notice, BudgetNotice::Changed { from } if from.bytes > told.total.bytes)
                {
                    changes.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        let memory: Vec<Memory> = (0..20).map(|_| Memory::new(16 * PAGE)).collect();
        memory[..8].iter().for_each(|memory| get(&cache, memory).unwrap());
        set_limit(LIMIT / 4);
        for memory in &memory[8..] {
            at_last(|| get(&cache, memory));
        }
        assert_eq!(changes.load(Ordering::SeqCst), 1);
        let after = budget.total();
        assert!(after.bytes as u64 <= LIMIT / 4 && budget.held().fits(after), "{after:?}");
        let shrank = pinfold::Notice::BudgetShrank { from: before, to: after };
        assert_eq!([notices.next(), notices.next()], [Some(shrank), None]);
        set_limit(LIMIT);
        assert_eq!(budget.refresh(), before);
        assert_eq!(notices.next(), None, "more is no reason to do anything");
        memory[..8].iter().for_each(|memory| at_last(|| get(&cache, memory)));
        assert!(budget.held().bytes as u64 > LIMIT / 4);
    });
}

/// Registers page after page until the kernel refuses. How many bytes it took; all are given back.
fn taken_by_kernel(registrar: &IoUring, memory: &Memory, most: usize) -> usize {
    let mut taken = Vec::new();
    while taken.len() < most {
        let range = memory.part(taken.len() * PAGE, PAGE);
        // SAFETY: no request uses it.
        match unsafe { registrar.register(range, Access::READ_WRITE) } {
            Ok(index) => taken.push((index, range)),
            Err(error) if is_about_the_limit(error) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let bytes = taken.len() * PAGE;
    for (index, range) in taken {
        // SAFETY: registered above, and not used.
        unsafe { registrar.deregister(index, range) }.unwrap();
    }
    bytes
}

/// What was discovered is there to its last page, and not a page more is, however large the rings.
#[test]
fn a_discovered_budget_can_be_used_to_its_last_page() {
    alone("a_discovered_budget_can_be_used_to_its_last_page", || {
        const LIMIT: usize = 8 << 20;
        if !live_under_a_limit(LIMIT as u64, 54_885) {
            return;
        }
        let memory = Memory::new(LIMIT);
        let mut rings = Vec::new();
        for entries in [8, 4096, 32_768] {
            let Some((ring, registrar)) = ring_with_registrar(entries, 4096) else { return };
            let budget = Budget::discover(Kind::IoUring, registrar.limits()).unwrap();
            // What was given back a moment ago may still be counted.
            at_last(|| {
                let taken = taken_by_kernel(&registrar, &memory, LIMIT / PAGE);
                if taken == budget.total().bytes { Ok(()) } else { Err((entries, taken)) }
            });
            rings.push(ring);
        }
    });
}

/// One page is served, one after the other, and two pages are refused by name.
#[test]
fn a_budget_of_one_page_serves_one_page() {
    let budget = Budget::new(Amount::one(PAGE)).unwrap();
    let share = budget.share(Terms::default()).unwrap();
    let Some((_ring, cache)) = cache_on(&share) else { return };
    let memory = Memory::new(4 * PAGE);
    for number in [0, 1, 0, 3] {
        get_range(&cache, memory.part(number * PAGE, PAGE)).unwrap();
        assert_eq!(budget.held(), Amount::one(PAGE));
    }
    let error = get_range(&cache, memory.part(PAGE, 2 * PAGE)).unwrap_err();
    assert!(matches!(error, GetError::Exhausted(it) if it.limit == Limit::SharedBytes), "{error}");
    let none = Budget::new(Amount { bytes: 0, regions: 1 }).unwrap_err();
    assert!(matches!(none, BudgetError::Nothing { .. }), "{none}");
}

/// Rings made later take of the limit as well: a refreshed budget is what is left, to its last page, and
/// it is as before when they are gone.
#[test]
fn a_ring_made_later_takes_of_a_discovered_budget() {
    alone("a_ring_made_later_takes_of_a_discovered_budget", || {
        const LIMIT: usize = 8 << 20;
        if !live_under_a_limit(LIMIT as u64, 54_887) {
            return;
        }
        let Some((_ring, registrar)) = ring(4096) else { return };
        let budget = Budget::discover(Kind::IoUring, registrar.limits()).unwrap();
        let (before, memory) = (budget.total(), Memory::new(LIMIT));
        let Ok(later) = io_uring::IoUring::new(4096) else { return };
        let after = budget.refresh();
        assert!(after.fits(before), "{after:?} of {before:?}");
        at_last(|| {
            let taken = taken_by_kernel(&registrar, &memory, LIMIT / PAGE);
            if taken == after.bytes { Ok(()) } else { Err(taken) }
        });
        drop(later);
        assert_eq!(budget.refresh(), before);
    });
}

/// A ring that this test has mapped itself, of the kind that can grow.
struct GrowingRing {
    file: OwnedFd,
    mapped: Vec<(*mut libc::c_void, usize)>,
}

/// `struct io_uring_params` as words: its two sizes, its flags, and what the kernel tells of two lengths.
#[repr(C, align(8))]
struct RingParameters([u32; 30]);

impl RingParameters {
    const fn of(entries: u32, flags: u32) -> Self {
        let mut words = [0; 30];
        (words[0], words[1], words[2]) = (entries, 2 * entries, flags);
        Self(words)
    }

    /// The lengths of the queues, which share a mapping, and of the entries.
    fn lengths(&self) -> [usize; 2] {
        // `sq_entries`, `cq_entries`, `sq_off.array`, `cq_off.cqes`
        let [requests, completions, array, all] =
            [0, 1, 10 + 6, 20 + 5].map(|word| self.0[word] as usize);
        let end = all + 16 * completions;
        // Of a ring that has grown the kernel does not say where the array is: behind the completions.
        [array.max(end) + 4 * requests, 64 * requests]
    }
}

impl GrowingRing {
    /// `None`, with a note, where the kernel makes no such ring.
    fn new(entries: u32) -> Option<Self> {
        const OF_ONE_THREAD: u32 = 1 << 12;
        const WHEN_ASKED: u32 = 1 << 13;
        const SIZES_GIVEN: u32 = 1 << 3;
        let mut told = RingParameters::of(entries, OF_ONE_THREAD | WHEN_ASKED | SIZES_GIVEN);
        // SAFETY: the kernel reads and writes the parameters alone.
        let file = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, &raw mut told) };
        if file < 0 {
            eprintln!("skipped: no such ring: {}", std::io::Error::last_os_error());
            return None;
        }
        // SAFETY: a new descriptor.
        let file = unsafe { OwnedFd::from_raw_fd(i32::try_from(file).unwrap()) };
        let mut ring = Self { file, mapped: Vec::new() };
        ring.map(&told);
        Some(ring)
    }

    /// As large as `told` says, in the place of what was mapped.
    fn map(&mut self, told: &RingParameters) {
        self.unmap();
        const OF_ENTRIES: i64 = 0x1000_0000;
        for (length, offset) in told.lengths().into_iter().zip([0, OF_ENTRIES]) {
            let (rights, fd) = (libc::PROT_READ | libc::PROT_WRITE, self.file.as_raw_fd());
            // SAFETY: a new mapping at an address of the kernel's choice.
            let start = unsafe {
                libc::mmap(std::ptr::null_mut(), length, rights, libc::MAP_SHARED, fd, offset)
            };
            assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
            self.mapped.push((start, length));
        }
    }

    fn unmap(&mut self) {
        for (start, length) in self.mapped.drain(..) {
            // SAFETY: mapped by this ring and used by nothing.
            assert_eq!(unsafe { libc::munmap(start, length) }, 0);
        }
    }

    /// False, with a note, before Linux 6.13.
    fn grow(&mut self, entries: u32) -> bool {
        const RESIZE: u32 = 33;
        const SIZES_GIVEN: u32 = 1 << 3;
        let mut told = RingParameters::of(entries, SIZES_GIVEN);
        let fd = self.file.as_raw_fd();
        // SAFETY: the kernel reads and writes the parameters, and the queues are empty.
        let answer =
            unsafe { libc::syscall(libc::SYS_io_uring_register, fd, RESIZE, &raw mut told, 1) };
        if answer != 0 {
            eprintln!("skipped: no ring grows: {}", std::io::Error::last_os_error());
            return false;
        }
        self.map(&told);
        true
    }
}

impl Drop for GrowingRing {
    fn drop(&mut self) {
        self.unmap();
    }
}

/// What a ring takes more once it has grown is not there any more, to the page; and is again when the ring is gone.
#[test]
fn a_ring_that_grows_takes_of_a_discovered_budget() {
    alone("a_ring_that_grows_takes_of_a_discovered_budget", || {
        const LIMIT: usize = 8 << 20;
        if !live_under_a_limit(LIMIT as u64, 54_888) {
            return;
        }
        let Some((_ring, registrar)) = ring(4096) else { return };
        let Some(mut growing) = GrowingRing::new(8) else { return };
        let budget = Budget::discover(Kind::IoUring, registrar.limits()).unwrap();
        let (before, memory) = (budget.total(), Memory::new(LIMIT));
        let is_exact = |total: Amount| {
            at_last(|| match taken_by_kernel(&registrar, &memory, LIMIT / PAGE) {
                taken if taken == total.bytes => Ok(()),
                taken => Err((taken, total)),
            });
        };
        is_exact(before);
        if !growing.grow(4096) {
            return;
        }
        let after = budget.refresh();
        assert!(after.bytes < before.bytes, "{after:?} of {before:?}");
        is_exact(after);
        drop(growing);
        let most = budget.refresh();
        assert!(most.bytes > before.bytes || most == before, "{most:?}");
    });
}

const HUGE: usize = 2 << 20;

/// So many transparent huge pages side by side, and the mapping that they are in; `None`, with a note,
/// where the kernel makes none.
fn huge_pages(count: usize) -> Option<(Memory, AddressRange)> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let mut memory = Memory::with_protection((count + 1) * HUGE, protection);
    let start = memory.range().start();
    let pages = memory.part(start.next_multiple_of(HUGE) - start, count * HUGE);
    let place = std::ptr::without_provenance_mut(pages.start());
    // SAFETY: advice on this test's own mapping.
    unsafe { libc::madvise(place, pages.len(), libc::MADV_HUGEPAGE) };
    memory.fill(1);
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("AnonHugePages:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
    if kibibytes.is_none_or(|huge| huge << 10 < pages.len()) {
        eprintln!("skipped: no transparent huge pages here: {kibibytes:?} KiB");
        return None;
    }
    Some((memory, pages))
}

fn lease_of<'c>(
    cache: &'c RingCache,
    page: AddressRange,
    offset: usize,
) -> Result<Lease<'c, IoUring, Arc<Userfaultfd>>, GetError> {
    let start = std::ptr::without_provenance(page.start() + offset);
    // SAFETY: the test's own memory; no transfer uses it.
    unsafe { cache.get(start, PAGE, Access::READ) }
}

/// The kernel counts a huge page as a whole, however little of it is registered. The budget does as
/// well, and refuses before the kernel does; what else is used of the page costs nothing.
#[test]
fn what_the_kernel_counts_of_huge_pages_is_within_the_budget() {
    alone("what_the_kernel_counts_of_huge_pages_is_within_the_budget", || {
        const LIMIT: usize = 8 << 20;
        if !live_under_a_limit(LIMIT as u64, 54_886) {
            return;
        }
        // A process that gave up root may not look into its own tables otherwise.
        // SAFETY: a system call without effect on memory.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
        let Some((_memory, pages)) = huge_pages(100) else { return };
        let Some((_ring, registrar)) = ring(1024) else { return };
        if registrar.widened(AddressRange::new(pages.start(), PAGE).unwrap()).len() == PAGE {
            return eprintln!("skipped: before Linux 6.7 the kernel does not say what is huge");
        }
        let Some((_ring, registrar)) = ring_with_registrar(8, 1024) else { return };
        let budget = Budget::discover(Kind::IoUring, registrar.limits()).unwrap();
        let Ok(monitor) = Userfaultfd::shared() else {
            return eprintln!("skipped: no userfaultfd");
        };
        let share = budget.share(Terms::default()).unwrap();
        let config = Config::keeping_all();
        let cache = pinfold::cache_within(share, registrar, monitor, config).unwrap();
        let before = status_bytes("VmPin:");
        let is_within = || status_bytes("VmPin:") - before <= budget.held().bytes;
        let page = |number| AddressRange::new(pages.start() + number * HUGE, HUGE).unwrap();
        let mut leases = Vec::new();
        let refused = (0..100).find_map(|number| {
            let lease = lease_of(&cache, page(number), 2 * PAGE).map(|lease| leases.push(lease));
            assert!(is_within(), "{} of {:?}", status_bytes("VmPin:"), budget.held());
            lease.err()
        });
        assert!(matches!(refused, Some(GetError::Exhausted(_))), "{refused:?}");
        assert_eq!((leases.len(), budget.held().bytes), (3, 3 * HUGE));
        leases.extend((0..512).map(|number| lease_of(&cache, page(0), number * PAGE).unwrap()));
        assert_eq!(budget.held().regions, 3, "one registration for each huge page");
        // Split under its lease: what was counted stays so.
        let place = std::ptr::without_provenance_mut(page(1).start());
        // SAFETY: protects what is this test's own, and allows it again.
        unsafe {
            libc::mprotect(place, PAGE, libc::PROT_READ);
            libc::mprotect(place, PAGE, libc::PROT_READ | libc::PROT_WRITE);
        }
        leases.push(lease_of(&cache, page(1), 5 * PAGE).unwrap());
        assert!(is_within() && budget.held().bytes == 3 * HUGE);
        drop(leases);
        cache.evict_idle();
        assert_eq!((budget.held(), status_bytes("VmPin:")), (Amount::ZERO, before));
    });
}

/// The kernel counts a page of 1 GiB as a whole, also of those that were set aside.
#[test]
fn what_the_kernel_counts_of_a_page_of_a_gibibyte_is_within_the_budget() {
    alone("what_the_kernel_counts_of_a_page_of_a_gibibyte_is_within_the_budget", || {
        const GIB: usize = 1 << 30;
        // An ordinary process may not raise its limit.
        let has_room = live_under_a_limit(3 * GIB as u64, 54_880);
        if !has_room && !live_under_a_limit(8 << 20, 54_880) {
            return;
        }
        // A process that gave up root may not look into its own tables otherwise.
        // SAFETY: a system call without effect on memory.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
        let flags =
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_1GB;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, which ends with the process.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), GIB, rights, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return eprintln!("skipped: no page of 1 GiB is set aside");
        }
        let Some((_ring, registrar)) = ring(16) else { return };
        let all = AddressRange::new(start.addr(), GIB).unwrap();
        let part = AddressRange::new(start.addr() + 3 * HUGE, HUGE).unwrap();
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
        if (numbers.next(), numbers.next()) < (Some(6), Some(11)) {
            return eprintln!("skipped: Linux {release} does not say how large a page is");
        }
        assert_eq!(registrar.widened(part), all);
        let budget = Budget::discover(Kind::IoUring, registrar.limits()).unwrap();
        let share = budget.share(Terms::default()).unwrap();
        let Some((_ring, cache)) = cache_on(&share) else { return };
        let before = status_bytes("VmPin:");
        let lease = |number: usize| lease_of(&cache, all, number * 4 * HUGE + PAGE);
        if has_room {
            let leases: Vec<_> = (0..100).map(|number| lease(number).unwrap()).collect();
            assert_eq!((status_bytes("VmPin:") - before, budget.held().bytes), (GIB, GIB));
            assert_eq!((leases.len(), budget.held().regions), (100, 1));
        } else {
            assert!(matches!(lease(0), Err(GetError::Exhausted(_))));
            // SAFETY: the test's own memory; nothing is registered.
            let refused = unsafe { registrar.register(part, Access::READ_WRITE) };
            assert!(is_about_the_limit(refused.unwrap_err()));
        }
    });
}

/// Memory that no one has touched becomes a huge page as it is registered, and counts as one.
#[test]
fn what_becomes_huge_as_it_is_registered_is_counted_whole() {
    alone("what_becomes_huge_as_it_is_registered_is_counted_whole", || {
        if huge_pages(1).is_none() {
            return;
        }
        let Some((_ring, registrar)) = ring(16) else { return };
        if !registrar.sees_huge_pages() {
            return eprintln!("skipped: before Linux 6.7 the kernel does not say what is huge");
        }
        let monitor = NoMonitor::new().unwrap();
        let cache = Cache::new(registrar, monitor, Config::keeping_all()).unwrap();
        let before = status_bytes("VmPin:");
        let memory = Memory::with_protection(2 * HUGE, libc::PROT_READ | libc::PROT_WRITE);
        let start = memory.range().start().next_multiple_of(HUGE);
        let place = std::ptr::without_provenance_mut(start);
        // SAFETY: advice on this test's own mapping.
        unsafe { libc::madvise(place, HUGE, libc::MADV_HUGEPAGE) };
        let start = std::ptr::without_provenance(start + PAGE);
        // SAFETY: the test's own memory, which no transfer uses.
        let lease = unsafe { cache.get(start, PAGE, Access::READ) }.unwrap();
        let counted = usize::try_from(cache.statistics().pinned_bytes).unwrap();
        assert_eq!(status_bytes("VmPin:") - before, counted);
        drop(lease);
    });
}

/// A program may have small pages made huge while one of them is being registered, behind the question what the kernel will
/// count. Also then its count is what the cache says, or nothing is registered.
#[test]
fn what_is_made_huge_while_it_is_registered_is_counted_whole() {
    alone("what_is_made_huge_while_it_is_registered_is_counted_whole", || {
        if !pinfold_kernel::memory::can_collapse() || huge_pages(1).is_none() {
            return eprintln!("skipped: no MADV_COLLAPSE, or no huge pages");
        }
        for max_bytes in [HUGE, 4 * PAGE] {
            let Some((_ring, registrar)) = ring(16) else { return };
            if !registrar.sees_huge_pages() {
                return eprintln!("skipped: before Linux 6.7 the kernel does not say what is huge");
            }
            let config = Config { max_bytes, ..Config::keeping_all() };
            let cache = Cache::new(registrar, NoMonitor::new().unwrap(), config).unwrap();
            let memory = Memory::with_protection(2 * HUGE, libc::PROT_READ | libc::PROT_WRITE);
            let start = memory.range().start().next_multiple_of(HUGE);
            let block = AddressRange::new(start, HUGE).unwrap();
            let (is_over, before) = (AtomicBool::new(false), status_bytes("VmPin:"));
            let met = std::thread::scope(|scope| {
                scope.spawn(|| {
                    // Relaxed: nothing else is read by it.
                    while !is_over.load(Ordering::Relaxed) {
                        // Refused where a page is pinned, or is being faulted in.
                        let _ = pinfold_kernel::memory::collapse(block);
                    }
                });
                let met = caught(|| {
                    let meets = |_: &usize| meets_collapse(&cache, block, before);
                    (0..3000).filter(meets).take(30).count()
                });
                is_over.store(true, Ordering::Relaxed);
                met
            });
            let met = met.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            eprintln!("{met} registrations met a collapse");
        }
    });
}

/// What `body` answers, or its panic.
fn caught<T>(body: impl FnOnce() -> T) -> std::thread::Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body))
}

/// Registers a page of `block`, which is small when this begins. Whether it became huge behind the plan.
fn meets_collapse(
    cache: &Cache<Arc<IoUring>, NoMonitor>,
    block: AddressRange,
    before: usize,
) -> bool {
    let start: *mut u8 = std::ptr::without_provenance_mut(block.start());
    let page = start.wrapping_add(3 * PAGE);
    // SAFETY: the test's own memory, which no transfer uses.
    let got = unsafe {
        libc::madvise(start.cast(), HUGE, libc::MADV_DONTNEED);
        page.write_volatile(1);
        cache.get(page, PAGE, Access::READ)
    };
    let pinned = status_bytes("VmPin:") - before;
    let counted = usize::try_from(cache.statistics().pinned_bytes).unwrap();
    let most = cache.config().max_bytes;
    assert!(pinned <= counted && counted <= most, "{pinned} of {counted} of {most} are pinned");
    match got {
        Ok(lease) => lease.registered().len() < counted,
        Err(error) => {
            assert!(matches!(error, GetError::Exhausted(_)), "{error}");
            true
        }
    }
}

/// Each of several rings pins a page, and the kernel counts it for each; so with a huge page of which no more
/// than a part is registered.
#[test]
fn what_several_rings_pin_is_counted_for_each() {
    alone("what_several_rings_pin_is_counted_for_each", || {
        let Some(((_one, first), (_other, second))) = ring(64).zip(ring(64)) else { return };
        let (memory, huge) = (Memory::new(4 * PAGE), huge_pages(2));
        let tells = |pages: &AddressRange| {
            first.widened(AddressRange::new(pages.start(), PAGE).unwrap()).len() == HUGE
        };
        let huge = huge.filter(|(_, pages)| tells(pages));
        let monitor = NoMonitor::new().unwrap();
        let cache = Cache::new([first, second], monitor, Config::keeping_all()).unwrap();
        let before = status_bytes("VmPin:");
        let counted = || {
            let counted = usize::try_from(cache.statistics().pinned_bytes).unwrap();
            assert_eq!(status_bytes("VmPin:") - before, counted);
            counted
        };
        let vouched = |range: AddressRange| {
            let start = std::ptr::without_provenance(range.start());
            // SAFETY: the test's own memory, which no transfer uses and which is not unmapped before the
            // registration is gone.
            unsafe { cache.request(start, PAGE, Access::READ).vouched().get() }.unwrap()
        };
        let mut leases = vec![vouched(memory.range())];
        assert_eq!(counted(), 2 * PAGE);
        if let Some((_, pages)) = &huge {
            leases.push(vouched(*pages));
            assert_eq!(leases[1].registered().len(), PAGE);
            assert_eq!(counted(), 2 * PAGE + 2 * HUGE);
        }
        drop(leases);
        cache.evict_idle();
        assert_eq!(cache.statistics().pinned_bytes, 0);
        at_last(|| match status_bytes("VmPin:") - before {
            0 => Ok(()),
            left => Err(left),
        });
    });
}

/// Nothing of this budget is idle, and the kernel has no room: an error, and the program hears
/// that others have what the budget allows.
#[test]
fn a_limit_that_others_use_up_is_told() {
    alone("a_limit_that_others_use_up_is_told", || {
        if !live_under_a_limit(LIMIT, 54_884) {
            return;
        }
        let Some((_ring, registrar)) = ring(8) else { return };
        let budget = Budget::discover(Kind::IoUring, registrar.limits()).unwrap();
        let share = budget.share(Terms::default()).unwrap();
        let Some((_ring, cache)) = cache_on(&share) else { return };
        // Less what the cache's ring takes.
        budget.refresh();
        let refusals = Arc::new(AtomicUsize::new(0));
        let _watch = budget.watch(Watermark::Percent(100), {
            let refusals = Arc::clone(&refusals);
            move |told: &WatermarkEvent| {
                let refused = usize::from(told.notice == BudgetNotice::Refused);
                refusals.fetch_add(refused, Ordering::SeqCst);
            }
        });
        let (others, ours) = (Memory::new(200 * PAGE), Memory::new(100 * PAGE));
        let index = register(&registrar, &others).unwrap();
        let error = get(&cache, &ours).unwrap_err();
        assert!(matches!(error, GetError::Register(error) if is_about_the_limit(error)), "{error}");
        assert_eq!((refusals.load(Ordering::SeqCst), budget.held()), (1, Amount::ZERO));
        registrar.deregister_own(index, others.range()).unwrap();
        at_last(|| get(&cache, &ours));
    });
}

#[test]
fn a_forked_child_is_granted_nothing_and_waits_for_no_thread() {
    let budget = Budget::new(Amount { bytes: 64 * PAGE, regions: 64 }).unwrap();
    let share = budget.share(Terms::default()).unwrap();
    let Some((_ring, cache)) = cache_on(&share) else { return };
    let Some((_other_ring, registrar)) = ring(8) else { return };
    let memory = Memory::new(PAGE);
    get(&cache, &memory).unwrap();
    let reservation = budget.reserve(&registrar, Reserve::pages(2)).unwrap();
    let taken = reservation.take().unwrap();
    let held = in_forked_child(|| {
        let refused = budget.share(Terms::default()).unwrap_err();
        let nothing = share.draw(Amount::one(PAGE)).is_err()
            && budget.held() == Amount::ZERO
            && reservation.take().is_none();
        drop((cache, share, taken, reservation));
        refused == BudgetError::Forked && nothing
    });
    assert!(held);
    assert_eq!(budget.held(), Amount::ZERO, "the parent's went with the closure");
}

/// Says that it has given something, and has nothing.
#[derive(Default)]
struct Boaster(AtomicUsize);

impl Lender for Boaster {
    fn give_back(&self, _: Amount) -> bool {
        // An end, for code that would believe it for ever.
        self.0.fetch_add(1, Ordering::Relaxed) < 10 * Recalls::MOST // one thread
    }
}

#[test]
fn a_lender_that_says_yes_and_gives_nothing_is_not_asked_for_ever() {
    let budget = Budget::new(Amount { bytes: 8 * PAGE, regions: 8 }).unwrap();
    let [borrower, other] = [(); 2].map(|()| budget.share(Terms::default()).unwrap());
    let boaster = Arc::new(Boaster::default());
    let lender: Weak<dyn Lender> = Arc::<Boaster>::downgrade(&boaster);
    borrower.attach(lender);
    let drawn = borrower.draw(Amount { bytes: 8 * PAGE, regions: 8 }).unwrap();
    assert!(other.draw(Amount::one(PAGE)).is_err());
    assert_eq!(boaster.0.load(Ordering::Relaxed), Recalls::MOST); // one thread
    drop(drawn);
    drop(other.draw(Amount::one(PAGE)).unwrap());
}

/// A lender that has nothing to give, and counts how often there was room.
#[derive(Default)]
struct Waits(AtomicUsize);

impl Lender for Waits {
    fn give_back(&self, _: Amount) -> bool {
        false
    }

    fn room_made(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Gives nothing, and needs something itself.
struct Draws {
    through: Arc<Share>,
    asked: AtomicUsize,
}

impl Lender for Draws {
    fn give_back(&self, _: Amount) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed); // one thread
        assert!(self.through.draw(Amount::one(PAGE)).is_err());
        false
    }
}

/// Without a bound it would be asked until its thread's stack is used up.
#[test]
fn a_lender_that_draws_is_asked_some_times_inside_itself_and_no_more() {
    let budget = Budget::new(Amount { bytes: 10 * PAGE, regions: 10 }).unwrap();
    let [lends, draws, through] = [(); 3].map(|()| budget.share(Terms::default()).unwrap());
    let held = lends.draw(budget.total()).unwrap();
    let lender = Arc::new(Draws { through, asked: AtomicUsize::new(0) });
    let weak: Weak<dyn Lender> = Arc::downgrade(&(Arc::clone(&lender) as Arc<dyn Lender>));
    lends.attach(weak);
    for times in 1..3 {
        assert!(draws.draw(Amount::one(PAGE)).is_err());
        assert_eq!(lender.asked.load(Ordering::Relaxed), 2 * times); // one thread
    }
    drop(held);
    assert!(draws.draw(Amount::one(PAGE)).is_ok());
}

/// What a program drew and what it was refused are one user's: neither ends the other.
#[test]
fn a_program_that_was_refused_is_told_of_room_whatever_else_it_drew() {
    let budget = Budget::new(Amount { bytes: 4 * PAGE, regions: 100 }).unwrap();
    let share = || budget.share(Terms::default()).unwrap();
    let (mine, other) = (share(), share());
    let lender = Arc::new(Waits::default());
    let weak: Weak<dyn Lender> = Arc::<Waits>::downgrade(&lender);
    mine.attach(weak);
    for is_drawing in [false, true] {
        let before = lender.0.swap(0, Ordering::Relaxed);
        assert_eq!(before, 0);
        let drawn = is_drawing.then(|| mine.draw(Amount::one(PAGE)).unwrap());
        let held = other.draw(Amount::one(3 * PAGE)).unwrap();
        assert!(mine.draw(Amount::one(4 * PAGE)).is_err());
        drop(drawn);
        drop(held);
        assert_eq!(lender.0.swap(0, Ordering::Relaxed), 1, "drawing: {is_drawing}");
    }
}

/// Each call undoes what the last one told: it ends all the same, and what is due is told with the next change.
#[test]
fn a_listener_that_reaches_and_leaves_its_mark_is_not_called_for_ever() {
    let budget = Budget::new(Amount { bytes: 8 * PAGE, regions: 8 }).unwrap();
    let share = budget.share(Terms::default()).unwrap();
    let (calls, drawn) = (Arc::new(AtomicUsize::new(0)), Mutex::new(None));
    let (counted, draws) = (Arc::clone(&calls), Arc::clone(&share));
    let watch = budget.watch(Watermark::Bytes(PAGE), move |event| {
        // An end, for code that would go on for ever.
        if counted.fetch_add(1, Ordering::Relaxed) < 10_000 {
            let more = matches!(event.notice, BudgetNotice::Left(_))
                .then(|| draws.draw(Amount::one(PAGE)));
            *drawn.lock().unwrap() = more.and_then(Result::ok);
        }
    });
    drop(share.draw(Amount::one(PAGE)).unwrap());
    let first = calls.load(Ordering::Relaxed); // one thread
    assert!((2..100).contains(&first), "{first}");
    drop(share.draw(Amount::one(PAGE)).unwrap());
    assert!(calls.load(Ordering::Relaxed) > first, "goes on"); // one thread
    drop(watch);
}

/// What it captured goes with its call, because its watch has ended: not in the midst of its panic, which would end
/// the process.
#[test]
fn a_listener_that_ends_its_watch_and_panics_may_have_captured_what_panics() {
    struct Bomb(Arc<AtomicUsize>);
    impl Drop for Bomb {
        fn drop(&mut self) {
            let before = self.0.fetch_add(1, Ordering::Relaxed);
            assert_eq!(before, usize::MAX, "what was captured panics");
        }
    }
    let budget = Budget::new(Amount { bytes: 1 << 20, regions: 16 }).unwrap();
    let (own, gone) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
    let (captured, bomb) = (Arc::clone(&own), Bomb(Arc::clone(&gone)));
    let watch = budget.watch(Watermark::Regions(1), move |_| {
        let _held = &bomb;
        drop(captured.lock().unwrap().take());
        assert!(std::thread::panicking(), "the listener panics");
    });
    *own.lock().unwrap() = Some(watch);
    let share = budget.share(Terms::default()).unwrap();
    let _drawn = share.draw(Amount::one(PAGE)).unwrap();
    assert_eq!(gone.load(Ordering::Relaxed), 1); // one thread
}

/// Whatever its parent's other threads were about.
#[test]
fn a_forked_child_makes_reservations_of_its_own() {
    alone("a_forked_child_makes_reservations_of_its_own", || {
        let make = || Budget::new(Amount { bytes: 1 << 20, regions: 64 }).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (budget, registrar) = (make(), Arc::new(Mlock::new().unwrap()));
                while !over.load(Ordering::Relaxed) {
                    drop(budget.reserve(&registrar, Reserve::pages(1)).unwrap());
                }
            });
            let reserves = || {
                // SAFETY: plain numbers. The child ends by it if it waits for ever.
                unsafe { libc::alarm(300) };
                let registrar = Arc::new(Mlock::new().unwrap());
                make().reserve(&registrar, Reserve::pages(1)).is_ok()
            };
            let all = (0..300).all(|_| in_forked_child(reserves));
            over.store(true, Ordering::Relaxed);
            assert!(all, "a child waited for ever");
        });
    });
}
