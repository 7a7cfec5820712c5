//! How many instructions a hit takes, and a miss, to the end: counted one by one, because time is too noisy to be
//! compared between machines. In optimised builds alone.
//!
//! The figures stand in `bench/results/instructions.txt`, and no hit may take 2 % more: as many as a change of this
//! code adds, and as another arrangement of the same code does not. A miss calls the C library's allocator and may take
//! 10 % more. Where it is cheaper, or dearer on purpose, the new
//! figures go into that file; the test prints them as they stand there.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to fork a child and to have it make one step after the other, and to lease
//! addresses that no device uses.

#![cfg(not(debug_assertions))]
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)] // a test speaks

use libc::{SIGSTOP, WIFSTOPPED, c_int};
use pinfold::{
    Access, AddressRange, Cache, Change, Config, Cover, DeregisterError, Lease, Lost, MappingKind,
    Monitor, Position, RegisterError, Registrar, RegistrarLimits, Replay, Sequence, Watch,
};
use std::hint::black_box;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

const LENGTH: usize = 64 << 10;
const START: usize = 0x7000_0000_0000;

/// What is to spare, in percent: of a hit with the compiler of the figures, and of everything else.
const SPARE: [u64; 2] = [2, 10];

/// How many leases are in flight in the last case.
const HELD: usize = 16;

/// A device that does nothing.
struct Nowhere;

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Nowhere {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits::new(4096, 1 << 30, 1 << 20)
    }

    unsafe fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
        Ok(7)
    }

    unsafe fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

/// Its check is one load, and it answers in a child as in its parent: nothing changes, and no device is used.
#[derive(Default)]
struct OneLoad(AtomicU64);

// SAFETY: nothing changes what no program uses.
unsafe impl Monitor for OneLoad {
    fn name(&self) -> &'static str {
        "one load"
    }

    #[inline]
    fn check(&self) -> Result<Sequence, Lost> {
        // Acquire: as a monitor's that reports something.
        Ok(Sequence(self.0.load(Ordering::Acquire)))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        false
    }

    fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
        Replay { up_to: Position(0, 0), sequence: Sequence(0), complete: true, may_repeat: false }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        0
    }

    fn notify(&self) {}

    fn wait(&self, _: u32) {}
}

/// A child does `work`, one instruction after the other: how many. `None` where it may not be looked at.
fn instructions(work: impl FnOnce()) -> Option<u64> {
    // SAFETY: the child, which has one thread, uses nothing that another may have locked: it looks up what is cached.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: it asks to be looked at, waits until it is, and ends without destructors.
        unsafe {
            if libc::ptrace(libc::PTRACE_TRACEME, 0, ptr::null_mut::<u8>(), ptr::null_mut::<u8>())
                != 0
            {
                libc::_exit(77);
            }
            libc::raise(SIGSTOP);
            work();
            libc::_exit(0);
        }
    }
    assert!(child > 0);
    let mut steps = 0;
    while is_stopped(child) {
        steps += 1;
        // SAFETY: a child of this thread's that is stopped.
        let stepped = unsafe {
            libc::ptrace(
                libc::PTRACE_SINGLESTEP,
                child,
                ptr::null_mut::<u8>(),
                ptr::null_mut::<u8>(),
            )
        };
        assert_eq!(stepped, 0);
    }
    (steps > 0).then_some(steps)
}

/// Waits until the child stops, or ends.
fn is_stopped(child: c_int) -> bool {
    let mut status = 0;
    // SAFETY: the kernel fills `status`.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    WIFSTOPPED(status)
}

type NowhereCache = Cache<Nowhere, OneLoad>;

/// `count` regions, with as many pages between two as `gap` says.
fn regions(count: usize, mut gap: impl FnMut() -> usize) -> Vec<usize> {
    let mut end = START;
    let mut place = || {
        let start = end + gap() * 4096;
        end = start + LENGTH;
        start
    };
    (0..count).map(|_| place()).collect()
}

/// Gaps of up to two regions, as the bench has them: what an allocator leaves.
fn gaps() -> impl FnMut() -> usize {
    let mut random = 0x5eed_u64;
    move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize % (2 * LENGTH / 4096 + 1)
    }
}

fn get(cache: &NowhereCache, start: usize) -> Lease<'_, Nowhere, OneLoad> {
    // SAFETY: no device uses the bytes, and nothing ever changes there.
    let lease = unsafe { cache.get(ptr::without_provenance(start), LENGTH, Access::READ) }.unwrap();
    black_box(lease.handle());
    lease
}

/// What a hit takes, one after the other in a cache of these regions, with [`HELD`] leases in flight if it is holding.
/// All regions are asked for equally often, neighbours not one after the other.
fn each(starts: &[usize], is_holding: bool) -> Option<u64> {
    let config = Config { max_bytes: 1 << 30, ..Config::keeping_all() };
    let cache = Cache::new(Nowhere, OneLoad::default(), config).unwrap();
    let start = |at: usize| starts[at * 389 % starts.len()];
    let hit_one_by_one = |count: usize| (0..count).for_each(|at| drop(get(&cache, start(at))));
    let hit_holding = |count: usize| {
        let mut leases: [_; HELD] = std::array::from_fn(|_| None);
        for at in 0..count {
            leases[at % HELD] = None;
            leases[at % HELD] = Some(get(&cache, start(at)));
        }
    };
    let hit = |count| if is_holding { hit_holding(count) } else { hit_one_by_one(count) };
    // Twice, so that no region is on its way to another list.
    (0..2).for_each(|_| hit_one_by_one(starts.len()));
    of_one(hit, [200, 1_200])
}

/// What one more repetition takes.
fn of_one(work: impl Fn(usize), [few, many]: [usize; 2]) -> Option<u64> {
    let less = instructions(|| work(few))?;
    let more = instructions(|| work(many))?;
    Some((more - less) / (many - few) as u64)
}

/// What a miss of one page takes, kept, invalidated and given back with 63 others, in blocks where each second page is
/// cached.
fn each_miss_between() -> Option<u64> {
    const PAGE: usize = 4096;
    let config = Config { max_bytes: 1 << 40, ..Config::keeping_all() };
    let cache = Cache::new(Nowhere, OneLoad::default(), config).unwrap();
    // SAFETY: as in `get`.
    let get = |start: usize| {
        unsafe { cache.get(ptr::without_provenance(start), PAGE, Access::READ) }.unwrap()
    };
    let cached = (0..1_024).map(|at| START + 2 * at * PAGE);
    cached.clone().for_each(|start| drop(get(start)));
    let between: Vec<_> = cached.map(|start| start + PAGE).collect();
    let miss = |count: usize| {
        for batch in 0..count / 64 {
            for at in 0..64 {
                let start = between[(batch * 64 + at) * 389 % between.len()];
                let lease = get(start);
                black_box(lease.handle());
                cache.invalidate(AddressRange::new(start, PAGE).unwrap());
                drop(lease);
            }
            cache.reclaim();
        }
    };
    miss(192);
    of_one(miss, [64, 192])
}

/// What a miss takes, beside a thousand regions that are cached: kept, invalidated and given back with 63 others, or
/// registered for one use.
fn each_miss(is_kept: bool) -> Option<u64> {
    let config = Config { max_bytes: 1 << 40, ..Config::keeping_all() };
    let cache = Cache::new(Nowhere, OneLoad::default(), config).unwrap();
    regions(1_000, || 0).into_iter().for_each(|start| drop(get(&cache, start)));
    let miss_kept = |start: usize| {
        let lease = get(&cache, start);
        cache.invalidate(AddressRange::new(start, LENGTH).unwrap());
        drop(lease);
    };
    let miss_once = |start: usize| {
        // SAFETY: as in `get`.
        let lease = unsafe {
            cache.request(ptr::without_provenance(start), LENGTH, Access::READ).once().get()
        };
        black_box(lease.unwrap().handle());
    };
    let elsewhere: Vec<_> = regions(192, || 0).into_iter().map(|start| start + (1 << 40)).collect();
    let miss = |count: usize| {
        for batch in elsewhere[..count].chunks(64) {
            batch
                .iter()
                .for_each(|&start| if is_kept { miss_kept(start) } else { miss_once(start) });
            cache.reclaim();
        }
    };
    // What is made once is made.
    miss(elsewhere.len());
    of_one(miss, [64, elsewhere.len()])
}

/// What stands in the file under this name.
fn recorded(text: &str, key: &str) -> Option<String> {
    let of_key = |line: &str| Some(line.strip_prefix(key)?.strip_prefix(": ")?.to_owned());
    text.lines().find_map(of_key)
}

fn compiler() -> String {
    let version = std::process::Command::new("rustc").arg("--version").output();
    let text = version.map(|it| String::from_utf8_lossy(&it.stdout).into_owned());
    format!("{} {}", std::env::consts::ARCH, text.unwrap_or_default().trim())
}

#[test]
fn a_get_takes_no_more_instructions_than_it_did() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/results/instructions.txt");
    let before = std::fs::read_to_string(file).unwrap();
    let of_file = recorded(&before, "compiler").unwrap();
    let is_same = of_file == compiler();
    let (adjacent, scattered) = (regions(1_000, || 0), regions(1_000, gaps()));
    let cases: [(_, &dyn Fn() -> _, _); 7] = [
        ("1 region", &|| each(&adjacent[..1], false), is_same),
        ("1,000 regions side by side", &|| each(&adjacent, false), is_same),
        ("1,000 regions with gaps", &|| each(&scattered, false), is_same),
        ("1,000 regions, 16 leases in flight", &|| each(&adjacent, true), is_same),
        ("a miss, invalidated", &|| each_miss(true), false),
        ("a miss for one use", &|| each_miss(false), false),
        ("a miss between cached pages", &each_miss_between, false),
    ];
    eprintln!("compiler: {}", compiler());
    let mut dearer = Vec::new();
    for (case, count, is_exact) in cases {
        let Some(now) = count() else {
            return eprintln!("skipped: no process may be looked at step by step");
        };
        eprintln!("{case}: {now}");
        let then: u64 = recorded(&before, case).unwrap().parse().unwrap();
        let is_comparable = of_file.split(' ').next() == Some(std::env::consts::ARCH);
        let spare = SPARE[usize::from(!is_exact)];
        if now == 0 || (is_comparable && now * 100 > then * (100 + spare)) {
            dearer.push((case, then, now));
        }
    }
    assert!(dearer.is_empty(), "more instructions than before (case, before, now): {dearer:?}");
}
