//! Random programs over huge and small pages, several rings, leases, a pool, reservations and evictions: whenever the
//! kernel's count is looked at, it is within the budget, and when the program rests, what the budget has left is there to
//! its last page.
//!
//! The seed is printed, and `PINFOLD_BUDGET_SEED` runs the same programs again, but for how their threads take turns;
//! `PINFOLD_BUDGET_ROUNDS` makes more of them.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use fastrand::Rng;
use pinfold::budget::{Amount, Budget, Kind, Reservation, Reserve, Terms};
use pinfold::monitor::Userfaultfd;
use pinfold::pool::{Pool, PoolBuffer, PoolConfig};
use pinfold::registrar::IoUring;
use pinfold::{Access, Cache, Config, GetError, Keep, Lease, RegisterError, Registrar};
use registrar_support::{
    Memory, Own, PAGE, QuietRing, alone, be_dumpable, live_under_a_limit, registrar_of_a_ring,
    status_bytes,
};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

const HUGE: usize = 2 << 20;

/// What the kernel lets the user pin: some huge pages, rings and the rest.
const LIMIT: u64 = 8 << 20;

const WORKERS: usize = 3;

/// What each worker does in a round.
const STEPS: usize = 300;

/// A worker's own memory: huge pages, then as much in small ones.
const ARENA: usize = 6 * HUGE;

/// The most leases, and buffers, that a worker has at a time.
const MOST_HELD: usize = 6;

type RingCache = Cache<Arc<IoUring>, Arc<Userfaultfd>>;
type RingLease<'c> = Lease<'c, Arc<IoUring>, Arc<Userfaultfd>>;

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Whether this kernel ends a registration in the call that asks for it.
fn frees_at_once() -> bool {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = text.split(['.', '-']).map_while(|number| number.trim().parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(13))
}

/// The registrar of a ring whose registrations are sampled; or a note why there is none.
fn ring() -> Option<(QuietRing, Arc<IoUring>)> {
    registrar_of_a_ring(512).map(|(ring, registrar)| (ring, Arc::new(registrar)))
}

/// What a process has that pins.
struct World {
    budget: Budget,
    caches: [RingCache; 2],
    /// A buffer of it is registered with two rings.
    pool: Pool<[Arc<IoUring>; 2]>,
    registrars: [Arc<IoUring>; 3],
    _rings: [QuietRing; 3],
}

impl World {
    /// `None`, with a note, where this machine lacks something.
    fn new() -> Option<Self> {
        let ((first, one), (second, two), (third, three)) = (ring()?, ring()?, ring()?);
        if !one.sees_huge_pages() || !frees_at_once() {
            eprintln!(
                "skipped: before Linux 6.13 the kernel counts for a while what was given back"
            );
            return None;
        }
        let monitor = Userfaultfd::shared();
        let monitor = monitor.map_err(|why| eprintln!("skipped: no userfaultfd: {why}")).ok()?;
        let budget = Budget::discover(Kind::IoUring, one.limits()).unwrap();
        let share = |minimum| {
            let minimum = Amount { bytes: minimum, regions: usize::from(minimum > 0) };
            budget.share(Terms { minimum, ..Terms::default() }).unwrap()
        };
        let cache = |minimum, registrar: &Arc<IoUring>, keep| {
            let config = Config { keep, ..Config::default() };
            let (registrar, monitor) = (Arc::clone(registrar), Arc::clone(&monitor));
            pinfold::cache_within(share(minimum), registrar, monitor, config).unwrap()
        };
        let caches = [cache(HUGE, &one, Keep::Always), cache(0, &two, Keep::WhenItPays)];
        let config = PoolConfig {
            max_bytes: 4 << 20,
            first_slab_bytes: 64 << 10,
            idle_bytes: 1 << 20,
            thread_cache_bytes: 64 << 10,
            ..PoolConfig::default()
        };
        let pool = Pool::within(share(0), [Arc::clone(&two), Arc::clone(&three)], config).unwrap();
        let (registrars, rings) = ([one, two, three], [first, second, third]);
        Some(Self { budget, caches, pool, registrars, _rings: rings })
    }
}

/// A thread's memory and what it holds.
struct Worker<'w> {
    world: &'w World,
    random: Rng,
    arena: Memory,
    leases: Vec<RingLease<'w>>,
    buffers: Vec<PoolBuffer<'w, [Arc<IoUring>; 2]>>,
    reserved: Option<Reservation<IoUring>>,
}

/// The kernel had room for all that the budget granted, so no other error is one of the limit.
fn is_granted(error: GetError) -> bool {
    !matches!(error, GetError::Register(RegisterError::PinnedMemoryLimit { .. }))
}

impl<'w> Worker<'w> {
    fn new(world: &'w World, seed: u64) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let arena = Memory::with_protection(ARENA + HUGE, protection);
        let (random, leases, buffers) = (Rng::with_seed(seed), Vec::new(), Vec::new());
        let worker = Self { world, random, arena, leases, buffers, reserved: None };
        worker.advise(0, ARENA / 2, libc::MADV_HUGEPAGE);
        worker.advise(ARENA / 2, ARENA / 2, libc::MADV_NOHUGEPAGE);
        worker
    }

    /// `length` bytes from `offset` of the part that begins with a huge page.
    fn place(&self, offset: usize, length: usize) -> Range<usize> {
        let start = self.arena.pointer().addr();
        let skipped = start.next_multiple_of(HUGE) - start;
        skipped + offset..skipped + offset + length
    }

    fn advise(&self, offset: usize, length: usize, advice: libc::c_int) {
        let _advice = self.arena.advise(self.place(offset, length), advice);
    }

    /// Some pages anywhere in the arena.
    fn pages(&mut self, most: usize) -> (usize, usize) {
        let first = self.random.usize(..ARENA / PAGE);
        let count = self.random.usize(1..=most.min(ARENA / PAGE - first));
        (first * PAGE, count * PAGE)
    }

    fn step(&mut self) {
        match self.random.u8(..16) {
            0..=6 => self.lease(),
            7 | 8 => self.end_some(),
            9 | 10 => self.buffer(),
            11 => self.discard(),
            12 => self.protect(),
            13 => self.reserve(),
            14 => _ = self.world.caches[self.random.usize(..2)].evict_idle(),
            _ => _ = self.world.pool.trim(self.random.usize(..HUGE)),
        }
    }

    /// In the first half whole huge pages: of one that the program has taken apart the kernel charges all, and says so
    /// to no one (`docs/src/budgets.md`).
    fn discard(&mut self) {
        let (offset, length) = self.pages(1024);
        if offset < ARENA / 2 {
            self.advise(offset / HUGE * HUGE, HUGE, libc::MADV_DONTNEED);
        } else {
            self.advise(offset, length, libc::MADV_DONTNEED);
        }
    }

    /// Takes rights away and gives them again, so that mappings are split and joined; in small pages.
    fn protect(&mut self) {
        let (offset, length) = self.pages(8);
        let part = self.place(offset.max(ARENA / 2), length.min(ARENA - offset));
        self.arena.protect_and_allow(part);
    }

    fn lease(&mut self) {
        if self.leases.len() == MOST_HELD {
            drop(self.leases.swap_remove(self.random.usize(..MOST_HELD)));
        }
        let most = if self.random.bool() { 1 } else { 64 };
        let (offset, length) = self.pages(most);
        let part = self.place(offset, length);
        let cache = &self.world.caches[self.random.usize(..2)];
        match self.arena.lease(cache, part, Access::READ_WRITE) {
            Ok(lease) => self.leases.push(lease),
            Err(error) => assert!(is_granted(error), "{error}"),
        }
    }

    fn end_some(&mut self) {
        self.leases.truncate(self.random.usize(..=self.leases.len()));
        self.buffers.truncate(self.random.usize(..=self.buffers.len()));
    }

    fn buffer(&mut self) {
        if self.buffers.len() == MOST_HELD {
            drop(self.buffers.swap_remove(self.random.usize(..MOST_HELD)));
        }
        let length = self.random.usize(1..64 << 10);
        // What the budget does not grant is refused, and no more is said here.
        self.buffers.extend(self.world.pool.get(length));
    }

    fn reserve(&mut self) {
        let wanted = Reserve::pages(self.random.usize(1..8));
        let registrar = &self.world.registrars[self.random.usize(..3)];
        self.reserved = self.world.budget.reserve(registrar, wanted).ok();
    }
}

/// Looks at the kernel's count until all workers have ended. How often.
fn sample(before: usize, world: &World, running: &AtomicUsize) -> usize {
    let most = world.budget.total().bytes;
    let mut samples = 0;
    // Acquire: what the workers did last has been done when none is left.
    while running.load(Ordering::Acquire) > 0 {
        let pinned = status_bytes("VmPin:") - before;
        assert!(pinned <= most, "{pinned} of {most} bytes are pinned");
        samples += 1;
    }
    samples
}

/// What `body` answers, or its panic.
fn caught<T>(body: impl FnOnce() -> T) -> thread::Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body))
}

/// One program for each worker, sampled meanwhile; what they hold at the end is held while the kernel is asked.
fn round(world: &World, before: usize, seed: u64) -> usize {
    let (running, rest) = (AtomicUsize::new(WORKERS), Barrier::new(WORKERS + 1));
    let outcome = thread::scope(|scope| {
        for number in 0..WORKERS as u64 {
            let (running, rest) = (&running, &rest);
            scope.spawn(move || {
                let mut worker = Worker::new(world, seed.wrapping_mul(31).wrapping_add(number));
                let outcome = caught(|| (0..STEPS).for_each(|_| worker.step()));
                // Release: see `sample`.
                running.fetch_sub(1, Ordering::Release);
                rest.wait();
                rest.wait();
                outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            });
        }
        let samples = caught(|| sample(before, world, &running));
        rest.wait();
        let outcome = samples.and_then(|samples| caught(|| rests(world, before)).map(|()| samples));
        rest.wait();
        outcome
    });
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// While no other thread works: what the kernel counts is what is held, and what is left can be pinned, by any ring.
fn rests(world: &World, before: usize) {
    let held = world.budget.held().bytes;
    let pinned = status_bytes("VmPin:") - before;
    assert!(pinned <= held, "{pinned} bytes are pinned, {held} are held");
    let left = world.budget.total().bytes - held;
    let memory = Memory::new(left.max(PAGE));
    // One piece: a ring has few slots, which the caches and the pool share.
    for registrar in &world.registrars {
        match memory.register(registrar, 0..left.max(PAGE), Access::READ_WRITE) {
            Ok(index) => registrar.deregister_own(index, memory.range()).unwrap(),
            // The user's own count, which nothing tells, has no room for what the budget has.
            Err(error) => assert!(left == 0, "{error}: {left} bytes are left of the budget"),
        }
    }
}

#[test]
fn whatever_pins_is_within_the_budget_at_every_sample() {
    alone("whatever_pins_is_within_the_budget_at_every_sample", || {
        let seed = from_environment("PINFOLD_BUDGET_SEED").unwrap_or_else(|| fastrand::u64(..));
        let rounds = from_environment("PINFOLD_BUDGET_ROUNDS").unwrap_or(8);
        eprintln!("PINFOLD_BUDGET_SEED={seed}");
        if !live_under_a_limit(LIMIT, 54_889) {
            return;
        }
        be_dumpable();
        let before = status_bytes("VmPin:");
        let Some(world) = World::new() else { return };
        let samples: usize =
            (0..rounds).map(|number| round(&world, before, seed.wrapping_add(number))).sum();
        eprintln!("{samples} samples");
        assert!(samples > 0);
    });
}
