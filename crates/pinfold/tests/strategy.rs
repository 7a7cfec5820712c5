//! The planner over a real ring: whichever way a transfer goes, the right bytes arrive, and what is slow is
//! said.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have memory of the tests' own transferred and its mappings changed
//! between transfers. It is not borrowed, and each transfer has ended before its place is completed.

#![allow(unsafe_code, missing_docs)]
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::panic)]

mod registrar_support;

use io_uring::{IoUring, opcode, types};
use pinfold::landing::Method;
use pinfold::monitor::{NoMonitor, Userfaultfd};
use pinfold::pieces::{Completion, Mover, Reason, Request};
use pinfold::pool::{AllocateError, Pool, PoolConfig, WhenExhausted};
use pinfold::registrar::{self, BufferIndex};
use pinfold::strategy::{
    Costs, Curve, Direction, PlannedPlace, Reuse, Slow, Strategy, TransferPlanner, Unmoved, Way,
    measure,
};
use pinfold::{Cache, Config, GetError, Monitor, PerUse, RangeError, Uncovered, WhenFull};
use registrar_support::{Memory, PAGE, alone, in_forked_child, memory_file, ring_with_registrar};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

type Shared = Arc<registrar::IoUring>;

/// A ring, a cache and a pool on it, and a file in memory.
struct Rig<M: Monitor> {
    // Before the ring: their registrations end first.
    cache: Cache<Shared, M>,
    pool: Pool<Shared>,
    ring: Mutex<IoUring>,
    file: File,
}

const PIECE: usize = 16 * PAGE;

fn rig_with<M: Monitor>(monitor: M, config: Config, pool: PoolConfig) -> Option<Rig<M>> {
    let (ring, registrar) = ring_with_registrar(64, 64)?;
    let registrar = Arc::new(registrar);
    let cache = pinfold::cache(Arc::clone(&registrar), monitor, config).unwrap();
    let pool = Pool::new(registrar, pool).unwrap();
    Some(Rig { cache, pool, ring: Mutex::new(ring), file: memory_file() })
}

fn rig() -> Option<Rig<Arc<Userfaultfd>>> {
    let config = Config { piece_bytes: PIECE, ..Config::keeping_all() };
    watched(config, PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() })
}

/// With the real monitor.
fn watched(config: Config, pool: PoolConfig) -> Option<Rig<Arc<Userfaultfd>>> {
    match Userfaultfd::shared() {
        Ok(monitor) => rig_with(monitor, config, pool),
        Err(error) => {
            eprintln!("skipped: no userfaultfd: {error}");
            None
        }
    }
}

impl<M: Monitor> Rig<M> {
    fn planner(&self, costs: Costs) -> TransferPlanner<'_, Shared, M> {
        // SAFETY: both are over one registrar.
        unsafe { TransferPlanner::new(&self.cache, costs).with_pool(&self.pool) }
    }

    fn mover(&self, into_memory: bool) -> RingMover<'_> {
        RingMover { ring: &self.ring, file: &self.file, into_memory, next: 0, lengths: Vec::new() }
    }

    /// What the device reads through a planner.
    fn sent(
        &self,
        planner: &TransferPlanner<'_, Shared, M>,
        memory: &Memory,
        reuse: Reuse,
    ) -> (Strategy, Vec<u8>) {
        let (range, mut mover) = (memory.range(), self.mover(false));
        let start = memory.pointer();
        // SAFETY: the test's own memory.
        let strategy =
            unsafe { planner.transfer(Direction::Leaving, start, range.len(), reuse, &mut mover) };
        (strategy.unwrap(), self.arrived(range.len()))
    }

    fn arrived(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Has the device go through the parts of a place.
    fn run(&self, place: &PlannedPlace<'_, Shared, M>, into_memory: bool) {
        let mut mover = self.mover(into_memory);
        for (number, part) in place.parts().enumerate() {
            let request = Request { number, handle: part.handle, range: part.range };
            // SAFETY: the place, whose part it is, outlives the completion, as does the test's memory.
            unsafe { mover.begin(request) }.unwrap();
            mover.complete().unwrap().outcome.unwrap();
        }
    }
}

/// Parts one behind the other, to the file or from it; one at a time.
struct RingMover<'r> {
    ring: &'r Mutex<IoUring>,
    file: &'r File,
    into_memory: bool,
    next: u64,
    lengths: Vec<(usize, usize)>,
}

// SAFETY: a request has ended when its completion is in the ring, and one that was not submitted is not
// under way.
unsafe impl Mover<BufferIndex> for RingMover<'_> {
    type Error = io::Error;

    unsafe fn begin(&mut self, request: Request<BufferIndex>) -> io::Result<()> {
        let Request { number, handle, range } = request;
        if number == 0 {
            self.next = 0;
        }
        let length = u32::try_from(range.len()).unwrap();
        let (file, at) = (types::Fd(self.file.as_raw_fd()), range.start());
        let at = std::ptr::with_exposed_provenance_mut(at);
        let entry = if self.into_memory {
            opcode::ReadFixed::new(file, at, length, handle.get()).offset(self.next).build()
        } else {
            opcode::WriteFixed::new(file, at, length, handle.get()).offset(self.next).build()
        };
        let entry = entry.user_data(number as u64);
        // SAFETY: the registration and the memory stay until the completion, by the caller's promise.
        unsafe { self.ring.lock().unwrap().submission().push(&entry) }.unwrap();
        self.ring.lock().unwrap().submit()?;
        self.next += u64::from(length);
        self.lengths.push((number, range.len()));
        Ok(())
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        let mut ring = self.ring.lock().unwrap();
        ring.submit_and_wait(1)?;
        let done = ring.completion().next().unwrap();
        let number = usize::try_from(done.user_data()).unwrap();
        let begun = self.lengths.iter().position(|(other, _)| *other == number).unwrap();
        let length = self.lengths.swap_remove(begun).1;
        let outcome = match usize::try_from(done.result()) {
            Ok(moved) if moved == length => Ok(()),
            Ok(_) => Err(io::ErrorKind::WriteZero.into()),
            Err(_) => Err(io::Error::from_raw_os_error(-done.result())),
        };
        Ok(Completion { number, outcome })
    }
}

fn way(first: f64, again: f64) -> Option<Way> {
    Some(Way { first: Curve::through(&[first])?, again: Curve::through(&[again])? })
}

/// Costs by which one way is the best for everything.
fn only(strategy: Strategy) -> Costs {
    let cheap = way(1.0, 1.0);
    let dear = Costs {
        cached: way(9.0, 9.0),
        copy: way(9.0, 9.0),
        per_use: way(9.0, 9.0),
        pieces: way(9.0, 9.0),
        exchange: None,
    };
    match strategy {
        Strategy::Cached => Costs { cached: cheap, ..dear },
        Strategy::PerUse => Costs { per_use: cheap, ..dear },
        Strategy::Pieces => Costs { pieces: cheap, ..dear },
        _ => Costs { copy: cheap, ..dear },
    }
}

/// Every way that a planner goes.
const WAYS: [Strategy; 4] = [Strategy::Cached, Strategy::Copy, Strategy::PerUse, Strategy::Pieces];

const REUSES: [Reuse; 3] = [Reuse::Once, Reuse::Often, Reuse::Unknown];

fn discard(memory: &Memory) {
    let (start, length) = (memory.pointer().cast(), memory.range().len());
    // SAFETY: the test's own memory, which is not borrowed.
    assert_eq!(unsafe { libc::madvise(start, length, libc::MADV_DONTNEED) }, 0);
}

#[test]
fn the_bytes_of_the_moment_arrive_whatever_the_way() {
    let Some(rig) = rig() else { return };
    for (strategy, reuse) in WAYS.into_iter().flat_map(|way| REUSES.map(|reuse| (way, reuse))) {
        let planner = rig.planner(only(strategy));
        // Longer than a piece, and shorter.
        for length in [3 * PIECE + PAGE, PAGE] {
            let mut memory = Memory::new(length);
            for round in 1..=9_u8 {
                match round % 3 {
                    0 => memory.replace(),
                    1 => discard(&memory),
                    // Nothing has changed but the bytes.
                    _ => {}
                }
                memory.fill(round);
                let (by, sent) = rig.sent(&planner, &memory, reuse);
                assert_eq!(sent, vec![round; length], "{strategy} {reuse:?} {round}");
                // While a discard may still be under way nothing that is registered is kept.
                let unkept = strategy == Strategy::Cached && by == Strategy::PerUse;
                assert!(by == strategy || length == PAGE || unkept, "{by} instead of {strategy}");
            }
        }
        let statistics = planner.statistics();
        assert_eq!(statistics.slow(), statistics.slow_uncovered, "{statistics:?}");
        let kept = matches!(strategy, Strategy::Cached | Strategy::Pieces);
        assert!(kept || statistics.slow() == 0, "{strategy} {reuse:?} {statistics:?}");
        assert_eq!(rig.pool.statistics().in_use_bytes, 0);
    }
}

// What tells which registrations are kept runs in a process of its own: memory may lie where another test
// has just discarded some, and as long as that may be under way nothing there is kept.

#[test]
fn a_kept_registration_is_found_again() {
    alone("a_kept_registration_is_found_again", || {
        let Some(rig) = rig() else { return };
        let (planner, mut memory) = (rig.planner(only(Strategy::Cached)), Memory::new(2 * PAGE));
        memory.fill(3);
        for _ in 0..10 {
            let start = memory.pointer();
            // SAFETY: the test's own memory.
            let place = unsafe { planner.send(start, 2 * PAGE, Reuse::Often) }.unwrap();
            assert_eq!((place.strategy(), place.slow()), (Strategy::Cached, None));
            // SAFETY: there is no transfer.
            unsafe { place.complete() };
        }
        assert_eq!((rig.cache.statistics().registrations, rig.cache.statistics().hits), (1, 9));
    });
}

/// A mapping whose changes no userfaultfd can see is never kept: neither believed to be, nor silently.
#[test]
fn unwatched_memory_is_registered_for_each_use_and_counted() {
    alone("unwatched_memory_is_registered_for_each_use_and_counted", || {
        let Some(rig) = rig() else { return };
        let shared = memory_file();
        shared.set_len(PAGE as u64).unwrap();
        let memory = Memory::shared_file(shared.as_raw_fd(), PAGE);
        let costs = Costs {
            copy: None,
            per_use: way(100.0, 100.0),
            cached: way(1e6, 1.0),
            ..Costs::UNMEASURED
        };
        let planner = rig.planner(costs);
        for round in 1..=5_u8 {
            // New pages, of which only the file knows.
            shared.set_len(0).unwrap();
            shared.set_len(PAGE as u64).unwrap();
            shared.write_all_at(&[round; PAGE], 0).unwrap();
            // SAFETY: the test's own memory.
            let place = unsafe { planner.send(memory.pointer(), PAGE, Reuse::Often) }.unwrap();
            assert_eq!(place.strategy(), Strategy::PerUse);
            match (round, place.slow()) {
                // Asked for, and found to be impossible; from then on remembered.
                (1, Some(Slow::NotKept(PerUse::Uncovered(Uncovered::Mapping(_))))) => {}
                (2.., Some(Slow::Uncovered(None))) => {}
                (_, slow) => panic!("{round}: {slow:?}"),
            }
            rig.run(&place, false);
            // SAFETY: the transfer has ended.
            unsafe { place.complete() };
            assert_eq!(rig.arrived(PAGE), [round; PAGE]);
            assert_eq!(planner.statistics().slow_uncovered, round.into());
            assert_eq!(rig.cache.statistics().pinned_bytes, 0);
        }
        let why = planner.advise(Direction::Leaving, memory.pointer(), PAGE, Reuse::Often).unwrap();
        assert!(why.to_string().contains("slower than it could be"), "{why}");
        assert!(why.to_string().contains("memfd"), "{why}");
    });
}

/// What could not be watched once may be watched later: nothing else stands at its address by then. With costs that were
/// never measured, too, by which the cache decides.
#[test]
fn memory_that_can_be_watched_again_is_kept_again() {
    alone("memory_that_can_be_watched_again_is_kept_again", || {
        let config = Config { piece_bytes: PIECE, ..Config::default() };
        let pool = PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() };
        let Some(rig) = watched(config, pool) else { return };
        let (shared, planner) = (memory_file(), rig.planner(Costs::UNMEASURED));
        shared.set_len(PAGE as u64).unwrap();
        let memory = Memory::shared_file(shared.as_raw_fd(), PAGE);
        let (_, sent) = rig.sent(&planner, &memory, Reuse::Often);
        assert_eq!((sent, planner.statistics().slow_uncovered), (vec![0; PAGE], 1));
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let at = memory.pointer().cast();
        // SAFETY: over this test's own memory.
        assert_eq!(unsafe { libc::mmap(at, PAGE, rights, kind, -1, 0) }, at);
        let before = rig.cache.statistics();
        for _ in 0..2000 {
            rig.sent(&planner, &memory, Reuse::Often);
        }
        let after = rig.cache.statistics();
        assert!(after.hits > before.hits + 1000, "{after:?}");
    });
}

#[test]
fn without_a_monitor_nothing_is_kept() {
    let config = Config { piece_bytes: PIECE, ..Config::keeping_all() };
    let monitor = NoMonitor::new().unwrap();
    let Some(rig) = rig_with(monitor, config, PoolConfig::default()) else { return };
    let planner = rig.planner(only(Strategy::Cached));
    let mut memory = Memory::new(3 * PIECE);
    for round in 1..=4_u8 {
        memory.replace();
        memory.fill(round);
        let (_, sent) = rig.sent(&planner, &memory, Reuse::Often);
        assert_eq!(sent, vec![round; 3 * PIECE]);
    }
    assert_eq!((planner.statistics().slow_uncovered, planner.statistics().slow()), (4, 4));
    assert_eq!(rig.cache.statistics().pinned_bytes, 0);
}

/// Pieces are not found again where nothing is kept: that is noticed, said, and remembered.
#[test]
fn pieces_that_cannot_be_kept_are_said_to_be_slow() {
    use Strategy::{PerUse, Pieces};
    let costs = Costs { pieces: way(7.0, 1.0), per_use: way(5.0, 5.0), ..Costs::UNMEASURED };
    // Each with a cache of its own, which remembers what was paid.
    let ways = |cached, reuse, rounds: u8| {
        let config = Config { piece_bytes: PIECE, ..Config::keeping_all() };
        let rig = rig_with(NoMonitor::new().unwrap(), config, PoolConfig::default())?;
        let (planner, mut memory) =
            (rig.planner(Costs { cached, ..costs }), Memory::new(3 * PIECE));
        let sent = (1..=rounds).map(|round| {
            memory.fill(round);
            let (by, sent) = rig.sent(&planner, &memory, reuse);
            assert_eq!(sent, vec![round; 3 * PIECE]);
            by
        });
        let sent = sent.collect::<Vec<_>>();
        assert_eq!(rig.cache.statistics().pinned_bytes, 0);
        Some((sent, planner.statistics().slow_uncovered))
    };
    let Some(often) = ways(way(1e9, 2.0), Reuse::Often, 4) else { return };
    assert_eq!(often, (vec![Pieces, PerUse, PerUse, PerUse], 4));
    // Each rent is 3 more than a hit, and buying 8 more. What was bought in vain and refused makes that four times as much, and from
    // then on pieces are known not to be kept.
    let unknown = ways(way(10.0, 2.0), Reuse::Unknown, 16);
    let mut expected = vec![PerUse; 16];
    expected[2] = Pieces;
    assert_eq!(unknown, Some((expected, 2)));
}

/// A planner that knows nothing copies until a registration would have paid; and not again when the memory is new, if it
/// did.
#[test]
fn renting_ends_when_it_has_cost_as_much_as_buying() {
    alone("renting_ends_when_it_has_cost_as_much_as_buying", || {
        let Some(rig) = rig() else { return };
        let costs =
            Costs { cached: way(1000.0, 10.0), copy: way(110.0, 110.0), ..Costs::UNMEASURED };
        // Nine rents of 100 more than a hit do not come to what buying costs more than a hit, the tenth would.
        let mut expected = vec![Strategy::Copy; 9];
        expected.resize(15, Strategy::Cached);
        // Of one piece, and of several.
        for length in [PAGE, 3 * PIECE] {
            let (planner, mut memory) = (rig.planner(costs), Memory::new(length));
            let ways = |memory: &Memory| -> Vec<Strategy> {
                (0..15).map(|_| rig.sent(&planner, memory, Reuse::Unknown).0).collect()
            };
            let before = rig.cache.statistics().registrations;
            let pieces = memory.range().pieces(PIECE).count() as u64;
            memory.fill(1);
            assert_eq!(ways(&memory), expected);
            assert_eq!(ways(&memory), [Strategy::Cached; 15]);
            assert_eq!(rig.cache.statistics().registrations - before, pieces);
            memory.replace();
            memory.fill(2);
            assert_eq!(ways(&memory), [Strategy::Cached; 15]);
            assert_eq!(rig.cache.statistics().registrations - before, 2 * pieces);
        }
    });
}

#[test]
fn pieces_of_memory_that_is_new_are_rented_again() {
    alone("pieces_of_memory_that_is_new_are_rented_again", || {
        let Some(rig) = rig() else { return };
        let costs = Costs {
            cached: way(1000.0, 20.0),
            copy: way(120.0, 120.0),
            pieces: way(1000.0, 10.0),
            ..Costs::UNMEASURED
        };
        let (planner, mut memory) = (rig.planner(costs), Memory::new(3 * PIECE));
        // Each life ends right behind a purchase, if there is one; then twice as much is paid.
        let mut uses = (0..3).flat_map(|_| {
            let ways: Vec<_> =
                (0..10).map(|_| rig.sent(&planner, &memory, Reuse::Unknown).0).collect();
            memory.replace();
            ways
        });
        let copies = |ways: &mut dyn Iterator<Item = Strategy>| {
            ways.take_while(|&way| way == Strategy::Copy).count()
        };
        assert_eq!((copies(&mut uses), copies(&mut uses)), (9, 19));
    });
}

/// Keeping would pay, but the budget does not hold the whole range: what can be copied is.
#[test]
fn what_is_worth_keeping_and_does_not_fit_is_copied() {
    alone("what_is_worth_keeping_and_does_not_fit_is_copied", || {
        let config = Config {
            piece_bytes: PIECE,
            max_bytes: 2 * PIECE,
            when_full: WhenFull::Refuse,
            ..Config::keeping_all()
        };
        let pool = PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() };
        let Some(rig) = watched(config, pool) else { return };
        let costs =
            Costs { cached: way(1000.0, 10.0), copy: way(110.0, 110.0), ..Costs::UNMEASURED };
        let (planner, mut memory) = (rig.planner(costs), Memory::new(3 * PIECE));
        for round in 1..=30_u8 {
            memory.fill(round);
            // SAFETY: the test's own memory.
            let place =
                unsafe { planner.send(memory.pointer(), 3 * PIECE, Reuse::Unknown) }.unwrap();
            assert_eq!(place.strategy(), Strategy::Copy, "{round}");
            rig.run(&place, false);
            // SAFETY: the transfer has ended.
            unsafe { place.complete() };
            assert_eq!(rig.arrived(3 * PIECE), [round; 3 * PIECE]);
        }
        let statistics = planner.statistics();
        assert!((1..30).contains(&statistics.slow_refused), "{statistics:?}");
    });
}

/// A range longer than the budget, and than what can be copied, moves piece by piece, whatever was decided.
#[test]
fn what_does_not_fit_as_a_whole_moves_in_pieces() {
    alone("what_does_not_fit_as_a_whole_moves_in_pieces", || {
        let config = Config { piece_bytes: PIECE, max_bytes: 2 * PIECE, ..Config::default() };
        let pool = PoolConfig { max_bytes: 4 * PAGE, ..PoolConfig::default() };
        let Some(rig) = watched(config, pool) else { return };
        let mut memory = Memory::new(8 * PIECE);
        let mut byte = 0;
        for costs in [Costs::UNMEASURED, only(Strategy::Cached), only(Strategy::PerUse)] {
            for reuse in REUSES {
                let planner = rig.planner(costs);
                byte += 1;
                memory.fill(byte);
                let (strategy, sent) = rig.sent(&planner, &memory, reuse);
                assert_eq!(
                    (strategy, sent),
                    (Strategy::Pieces, vec![byte; 8 * PIECE]),
                    "{reuse:?}"
                );
                let statistics = planner.statistics();
                assert_eq!(
                    (statistics.in_pieces, statistics.slow_refused),
                    (1, 1),
                    "{statistics:?}"
                );
                rig.cache.evict_idle();
            }
        }
    });
}

/// A budget of one piece is enough for pieces one after the other, if no lease of them is held.
#[test]
fn pieces_that_are_worth_keeping_move_through_a_small_budget() {
    alone("pieces_that_are_worth_keeping_move_through_a_small_budget", || {
        let config = Config {
            piece_bytes: PIECE,
            max_bytes: PIECE,
            when_full: WhenFull::Refuse,
            ..Config::keeping_all()
        };
        let pool = PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() };
        let Some(rig) = watched(config, pool) else { return };
        let costs = Costs {
            cached: way(1000.0, 20.0),
            copy: way(120.0, 120.0),
            pieces: way(1000.0, 10.0),
            ..Costs::UNMEASURED
        };
        let (planner, mut memory) = (rig.planner(costs), Memory::new(3 * PIECE));
        let mut pieces = 0;
        for round in 1..=30_u8 {
            memory.fill(round);
            let (by, sent) = rig.sent(&planner, &memory, Reuse::Unknown);
            assert_eq!(sent, vec![round; 3 * PIECE], "{by} {round}");
            pieces += usize::from(by == Strategy::Pieces);
        }
        assert!(pieces > 0);
        assert!(rig.cache.statistics().pinned_bytes <= PIECE as u64);
    });
}

/// What its caller uses once is not bought, however often the same memory comes.
#[test]
fn memory_that_is_used_once_is_never_bought() {
    alone("memory_that_is_used_once_is_never_bought", || {
        let shared = memory_file();
        shared.set_len(PAGE as u64).unwrap();
        let memory = Memory::shared_file(shared.as_raw_fd(), PAGE);
        let Some(rig) = rig() else { return };
        let costs =
            Costs { cached: way(1000.0, 1.0), copy: way(500.0, 500.0), ..Costs::UNMEASURED };
        let planner = rig.planner(costs);
        // Asked to be kept once, and remembered not to be.
        assert_eq!(rig.sent(&planner, &memory, Reuse::Often).0, Strategy::PerUse);
        let asked = rig.cache.statistics().registrations;
        let ways = (0..20).map(|_| rig.sent(&planner, &memory, Reuse::Once).0);
        assert!(ways.into_iter().all(|by| by == Strategy::Copy));
        assert_eq!(rig.cache.statistics().registrations, asked);
    });
}

/// Ten seconds are more nanoseconds than 32 bits count.
#[test]
fn a_price_of_seconds_is_paid_some_day() {
    alone("a_price_of_seconds_is_paid_some_day", || {
        let Some(rig) = rig() else { return };
        let costs = Costs { cached: way(1e10, 10.0), copy: way(6e8, 6e8), ..Costs::UNMEASURED };
        let (planner, memory) = (rig.planner(costs), Memory::new(PAGE));
        let ways = (0..18).map(|_| rig.sent(&planner, &memory, Reuse::Unknown).0);
        let mut expected = vec![Strategy::Copy; 16];
        expected.resize(18, Strategy::Cached);
        assert_eq!(ways.collect::<Vec<_>>(), expected);
    });
}

/// Rents that are paid while the pool is empty count, and what was not kept is not said to be.
#[test]
fn a_pool_that_stays_empty_leads_to_buying() {
    alone("a_pool_that_stays_empty_leads_to_buying", || {
        let pool =
            PoolConfig { max_bytes: 64 << 10, first_slab_bytes: 64 << 10, ..PoolConfig::default() };
        let Some(rig) = watched(Config::keeping_all(), pool) else { return };
        let costs = Costs {
            cached: way(1000.0, 10.0),
            copy: way(50.0, 50.0),
            per_use: way(510.0, 510.0),
            ..Costs::UNMEASURED
        };
        let (planner, memory) = (rig.planner(costs), Memory::new(16 << 10));
        let held: Vec<_> = std::iter::from_fn(|| rig.pool.get(16 << 10).ok()).collect();
        let ways = (0..4).map(|_| rig.sent(&planner, &memory, Reuse::Unknown).0);
        use Strategy::{Cached, PerUse};
        assert_eq!(ways.collect::<Vec<_>>(), [PerUse, Cached, Cached, Cached]);
        assert_eq!(planner.statistics().slow_pool, 1);
        drop(held);
    });
}

#[test]
fn a_pool_that_is_empty_does_not_hide_what_was_not_kept() {
    let pool =
        PoolConfig { max_bytes: 64 << 10, first_slab_bytes: 64 << 10, ..PoolConfig::default() };
    let monitor = NoMonitor::new().unwrap();
    let Some(rig) = rig_with(monitor, Config::keeping_all(), pool) else { return };
    let costs = Costs { cached: way(9.0, 9.0), copy: way(1.0, 1.0), ..Costs::UNMEASURED };
    let (planner, memory) = (rig.planner(costs), Memory::new(16 << 10));
    let held: Vec<_> = std::iter::from_fn(|| rig.pool.get(16 << 10).ok()).collect();
    // SAFETY: the test's own memory.
    let place = unsafe { planner.send(memory.pointer(), 16 << 10, Reuse::Often) }.unwrap();
    assert_eq!(place.strategy(), Strategy::PerUse);
    assert!(matches!(place.slow(), Some(Slow::Pool(_))), "{place:?}");
    // SAFETY: there is no transfer.
    unsafe { place.complete() };
    assert_eq!(rig.cache.statistics().pinned_bytes, 0);
    drop(held);
}

/// Reports, before anything else, that a request of another user of the ring has failed.
struct OnSharedRing<'r> {
    inner: RingMover<'r>,
    foreign: bool,
    under_way: usize,
}

// SAFETY: as the ring's mover; the first number is not one of a request.
unsafe impl Mover<BufferIndex> for OnSharedRing<'_> {
    type Error = io::Error;

    unsafe fn begin(&mut self, request: Request<BufferIndex>) -> io::Result<()> {
        // SAFETY: the caller's promise, which stands until the inner one completes.
        unsafe { self.inner.begin(request) }?;
        self.under_way += 1;
        Ok(())
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        if std::mem::take(&mut self.foreign) {
            return Ok(Completion { number: 7777, outcome: Err(io::ErrorKind::Other.into()) });
        }
        self.under_way -= 1;
        self.inner.complete()
    }
}

#[test]
fn a_completion_of_another_user_of_the_ring_ends_no_request() {
    let Some(rig) = rig() else { return };
    let memory = Memory::new(3 * PIECE);
    for strategy in WAYS {
        let planner = rig.planner(only(strategy));
        let mut mover = OnSharedRing { inner: rig.mover(false), foreign: true, under_way: 0 };
        let (start, length) = (memory.pointer(), memory.range().len());
        // SAFETY: the test's own memory.
        unsafe { planner.transfer(Direction::Leaving, start, length, Reuse::Often, &mut mover) }
            .unwrap();
        assert_eq!(mover.under_way, 0, "{strategy}");
        assert!(rig.ring.lock().unwrap().completion().next().is_none(), "{strategy}");
    }
}

#[test]
fn an_exhausted_pool_is_said() {
    let pool = PoolConfig {
        max_bytes: 64 << 10,
        first_slab_bytes: 64 << 10,
        when_exhausted: WhenExhausted::Grow,
        ..PoolConfig::default()
    };
    let Some(rig) = watched(Config::keeping_all(), pool) else { return };
    let (planner, mut memory) = (rig.planner(only(Strategy::Copy)), Memory::new(16 << 10));
    memory.fill(5);
    let mut held = Vec::new();
    while let Ok(buffer) = rig.pool.get(16 << 10) {
        held.push(buffer);
    }
    // SAFETY: the test's own memory.
    let place = unsafe { planner.send(memory.pointer(), 16 << 10, Reuse::Often) }.unwrap();
    assert!(matches!(place.slow(), Some(Slow::Pool(AllocateError::Exhausted(_)))), "{place:?}");
    rig.run(&place, false);
    // SAFETY: the transfer has ended.
    unsafe { place.complete() };
    assert_eq!(rig.arrived(16 << 10), vec![5; 16 << 10]);
    assert_eq!((planner.statistics().slow_pool, planner.statistics().copied), (1, 0));
    drop(held);
    assert_eq!(rig.sent(&planner, &memory, Reuse::Often).0, Strategy::Copy);
    assert_eq!((planner.statistics().slow(), planner.statistics().copied), (1, 1));
}

#[test]
fn a_spent_budget_is_said() {
    let config = Config { max_bytes: 2 * PAGE, ..Config::keeping_all() };
    let Some(rig) = watched(config, PoolConfig::default()) else { return };
    let (planner, memory) = (rig.planner(only(Strategy::Cached)), Memory::new(4 * PAGE));
    let part = |page: usize| memory.pointer().wrapping_add(page * PAGE);
    // SAFETY: the test's own memory.
    let held = unsafe { planner.send(part(0), 2 * PAGE, Reuse::Often) }.unwrap();
    // SAFETY: as above.
    let copied = unsafe { planner.send(part(2), 2 * PAGE, Reuse::Often) }.unwrap();
    assert!(matches!(copied.slow(), Some(Slow::Refused(GetError::Exhausted(_)))), "{copied:?}");
    assert_eq!((copied.strategy(), planner.statistics().slow_refused), (Strategy::Copy, 1));
    let without = TransferPlanner::new(&rig.cache, only(Strategy::Cached));
    // SAFETY: as above.
    let refused = unsafe { without.send(part(2), 2 * PAGE, Reuse::Often) };
    assert!(matches!(refused, Err(GetError::Exhausted(_))), "{refused:?}");
    // SAFETY: there is no transfer.
    unsafe {
        copied.complete();
        held.complete();
    }
}

/// io_uring pins every page to be written, so read-only memory can only be copied.
#[test]
fn memory_that_the_device_refuses_is_copied() {
    let Some(rig) = rig() else { return };
    let memory = Memory::with_protection(PAGE, libc::PROT_READ);
    let planner = rig.planner(only(Strategy::PerUse));
    let (by, sent) = rig.sent(&planner, &memory, Reuse::Once);
    assert_eq!((by, sent), (Strategy::Copy, vec![0; PAGE]));
    assert_eq!(planner.statistics().slow_refused, 1);
    // Nothing can arrive there by any way, and nothing is tried.
    // SAFETY: nothing is written: there is no transfer.
    let refused = unsafe { planner.receive(memory.pointer(), PAGE, Reuse::Once) };
    assert!(matches!(refused, Err(GetError::Register(_))), "{refused:?}");
}

#[test]
fn data_arrives_where_it_belongs_by_every_way() {
    let Some(rig) = rig() else { return };
    for strategy in WAYS {
        let (planner, mut memory) = (rig.planner(only(strategy)), Memory::new(4 * PIECE));
        memory.fill(1);
        let data: Vec<u8> = (0..3 * PIECE).map(|at| (at % 251).to_le_bytes()[0]).collect();
        rig.file.write_all_at(&data, 0).unwrap();
        let (to, mut mover) = (memory.pointer().wrapping_add(100), rig.mover(true));
        // SAFETY: the test's own memory.
        let by = unsafe {
            planner.transfer(Direction::Arriving, to, data.len(), Reuse::Once, &mut mover)
        };
        let copied = by.unwrap() == Strategy::Landing(Method::Copy);
        assert_eq!(copied, strategy == Strategy::Copy);
        let bytes = memory.bytes();
        assert_eq!(&bytes[100..100 + data.len()], &data);
        assert!(bytes[..100].iter().chain(&bytes[100 + data.len()..]).all(|&byte| byte == 1));
    }
}

#[test]
fn a_place_that_is_abandoned_delivers_nothing() {
    let Some(rig) = rig() else { return };
    let (planner, mut memory) = (rig.planner(only(Strategy::Copy)), Memory::new(PAGE));
    memory.fill(1);
    rig.file.write_all_at(&[7; PAGE], 0).unwrap();
    // SAFETY: the test's own memory.
    let place = unsafe { planner.receive(memory.pointer(), PAGE, Reuse::Once) }.unwrap();
    rig.run(&place, true);
    // SAFETY: the transfer has ended.
    unsafe { place.abandon() };
    assert!(memory.bytes().iter().all(|&byte| byte == 1));
    assert_eq!(rig.pool.statistics().in_use_bytes, 0);
}

/// What a buffer's last user left in it is hidden from the next.
#[test]
fn a_short_arrival_delivers_what_arrived() {
    let Some(rig) = rig() else { return };
    let (planner, mut memory) = (rig.planner(only(Strategy::Copy)), Memory::new(PAGE));
    for arrived in [0, 1, 100, PAGE, usize::MAX] {
        memory.fill(1);
        // The next buffer of this length is the same one.
        rig.pool.get(PAGE).unwrap().fill(0xee);
        // SAFETY: the test's own memory.
        let place = unsafe { planner.receive(memory.pointer(), PAGE, Reuse::Once) }.unwrap();
        assert_eq!(place.strategy(), Strategy::Landing(Method::Copy));
        // SAFETY: there is no transfer; so the leftovers stand for what would have arrived.
        unsafe { place.complete_with(arrived) };
        let bytes = memory.bytes();
        let (came, rest) = bytes.split_at(arrived.min(PAGE));
        assert!(came.iter().all(|&byte| byte == 0xee), "{arrived}");
        assert!(rest.iter().all(|&byte| byte == 1), "{arrived}");
        assert_eq!(rig.pool.statistics().in_use_bytes, 0);
    }
}

/// The buffer is the parent's: its child finds zeros there, and must not take them for data.
#[test]
fn a_forked_child_is_delivered_nothing() {
    let Some(rig) = rig() else { return };
    let (planner, mut memory) = (rig.planner(only(Strategy::Copy)), Memory::new(PAGE));
    memory.fill(1);
    // SAFETY: the test's own memory.
    let place = unsafe { planner.receive(memory.pointer(), PAGE, Reuse::Once) }.unwrap();
    let mut place = Some(place);
    assert!(in_forked_child(|| {
        let Some(place) = place.take() else { return false };
        // SAFETY: there is no transfer.
        unsafe { place.complete() };
        memory.bytes().iter().all(|&byte| byte == 1)
    }));
    // SAFETY: as above; this process has its own copy of the place.
    unsafe { place.unwrap().abandon() };
    assert_eq!(rig.pool.statistics().in_use_bytes, 0);
}

/// Fails at one of its requests.
struct Failing<'r> {
    inner: RingMover<'r>,
    at: usize,
}

// SAFETY: as the ring's mover; one that fails here was not begun.
unsafe impl Mover<BufferIndex> for Failing<'_> {
    type Error = io::Error;

    unsafe fn begin(&mut self, request: Request<BufferIndex>) -> io::Result<()> {
        if request.number == self.at {
            return Err(io::ErrorKind::Other.into());
        }
        // SAFETY: as above.
        unsafe { self.inner.begin(request) }
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        self.inner.complete()
    }
}

#[test]
fn a_transfer_that_fails_leaves_nothing_under_way() {
    let Some(rig) = rig() else { return };
    // Cut where pieces are, so that each is one request.
    let whole = Memory::new(9 * PIECE);
    let start = whole.range().start().next_multiple_of(PIECE);
    let length = 8 * PIECE;
    for (strategy, at) in WAYS.into_iter().flat_map(|way| [(way, 0), (way, 5)]) {
        let planner = rig.planner(only(strategy));
        let mut mover = Failing { inner: rig.mover(false), at };
        let start = std::ptr::with_exposed_provenance(start);
        // SAFETY: the test's own memory.
        let failed =
            unsafe { planner.transfer(Direction::Leaving, start, length, Reuse::Once, &mut mover) };
        // A copy is one request.
        if strategy == Strategy::Copy && at > 0 {
            failed.unwrap();
        } else {
            let error = failed.unwrap_err();
            assert!(matches!(error.reason, Reason::Move { .. }), "{strategy}: {error}");
            assert_eq!(error.moved_bytes, at * PIECE, "{strategy}: {error}");
        }
        assert_eq!(rig.pool.statistics().in_use_bytes, 0);
        rig.cache.evict_idle();
        assert_eq!(rig.cache.statistics().pinned_bytes, 0);
        assert!(rig.ring.lock().unwrap().completion().next().is_none());
    }
}

#[test]
fn what_is_no_range_is_refused() {
    let Some(rig) = rig() else { return };
    let (planner, memory) = (rig.planner(Costs::UNMEASURED), Memory::new(PAGE));
    let start = memory.pointer();
    for length in [0, usize::MAX] {
        // SAFETY: nothing is given to a device.
        unsafe {
            let sent = planner.send(start, length, Reuse::Once);
            assert!(matches!(sent, Err(GetError::Range(_))), "{sent:?}");
            assert!(matches!(planner.receive(start, length, Reuse::Once), Err(GetError::Range(_))));
            let (direction, mut mover) = (Direction::Leaving, rig.mover(false));
            let moved = planner.transfer(direction, start, length, Reuse::Once, &mut mover);
            assert!(matches!(moved.unwrap_err().reason, Reason::Range(_)));
        }
        let advice: Result<_, RangeError> =
            planner.advise(Direction::Leaving, start, length, Reuse::Once);
        assert!(advice.is_err());
    }
    assert_eq!(rig.cache.statistics().gets, 0);
}

#[test]
fn what_was_measured_is_what_is_used() {
    let Some(rig) = rig() else { return };
    let longest = 64 << 10;
    // SAFETY: both are over one registrar.
    let costs = unsafe { measure(&rig.cache, Some(&rig.pool), &mut rig.mover(false), longest) };
    let costs = costs.unwrap();
    for strategy in WAYS {
        let way = costs.of(strategy).unwrap();
        assert!(way.first.at(4096) > 0.0 && way.again.at(longest) > 0.0, "{strategy}");
    }
    assert_eq!(rig.cache.statistics().pinned_bytes, 0);
    let (planner, memory) = (rig.planner(costs), Memory::new(PAGE));
    let advice = planner.advise(Direction::Leaving, memory.pointer(), PAGE, Reuse::Once).unwrap();
    let least = advice
        .considered
        .iter()
        .filter(|each| each.excluded.is_none())
        .filter_map(|each| each.ns)
        .fold(f64::INFINITY, f64::min);
    assert_eq!(advice.expected_ns(), Some(least), "{advice}");
    let file = std::env::temp_dir().join(format!("pinfold-strategy-{}", std::process::id()));
    costs.store(&file).unwrap();
    let loaded = Costs::load(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    // Written with a tenth of a nanosecond.
    let difference = |at| loaded.cached.unwrap().first.at(at) - costs.cached.unwrap().first.at(at);
    assert!(difference(PAGE).abs() < 1.0);
    assert!(Costs::load(&file).is_err());
}

/// Without a pool there is no curve for copies, and with a small budget curves end early.
#[test]
fn what_cannot_be_had_is_not_measured() {
    let config = Config { max_bytes: 4 * PAGE, ..Config::keeping_all() };
    let Some(rig) = watched(config, PoolConfig::default()) else { return };
    // SAFETY: there is no pool.
    let costs = unsafe { measure(&rig.cache, None, &mut Unmoved::default(), 1 << 20) }.unwrap();
    assert!(costs.copy.is_none() && costs.cached.is_some());
    let planner = TransferPlanner::new(&rig.cache, costs);
    let mut memory = Memory::new(PAGE);
    memory.fill(9);
    assert_eq!(rig.sent(&planner, &memory, Reuse::Often).1, [9; PAGE]);
}

#[test]
fn a_forked_child_is_refused() {
    let Some(rig) = rig() else { return };
    let (planner, memory) = (rig.planner(only(Strategy::Cached)), Memory::new(PAGE));
    assert!(in_forked_child(|| {
        // SAFETY: the child's own copy of the test's memory.
        let place = unsafe { planner.send(memory.pointer(), PAGE, Reuse::Often) };
        matches!(place, Err(GetError::Forked))
    }));
}
