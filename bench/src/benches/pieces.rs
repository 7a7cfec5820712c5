//! Ranges that no cache has seen: moved through pieces, compared with the slower of registering them and
//! moving them, each alone; and registered by two threads, compared with one.

use crate::Options;
use crate::report::Report;
use crate::ring::{Direction, Memory, Pages, Ring, registrar_of};
use crate::rounds::{Comparison, compare};
use pinfold::listed;
use pinfold::monitor::Userfaultfd;
use pinfold::pieces::{self, Progress};
use pinfold::registrar::IoUring;
use pinfold::{Access, Cache, Config};
use serde_json::json;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// What the promise is about.
const BYTES: usize = 256 << 20;
/// Room for every piece, and some.
const SLOTS: u32 = 512;

type TheCache = Cache<IoUring, Arc<Userfaultfd>>;

/// The pipeline by kind of memory, then what two threads are good for, part by part.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let bytes = options.scaled(BYTES).next_multiple_of(4 << 20);
    let mut rig = match Rig::open(bytes) {
        Ok(rig) => rig,
        Err(why) => {
            report.remark(&format!("skipped: pieces: {why}"));
            return Ok(());
        }
    };
    for pages in [Pages::Written, Pages::Untouched, Pages::UntouchedHuge] {
        let comparison = rig.pipeline(options, pages)?;
        let params = json!({"bytes": bytes, "memory": pages.name()});
        report.add_against("the slower alone", "pieces", params, "GiB/s", comparison);
    }
    let second = Rig::open(bytes)?;
    for part in Part::ALL {
        let comparison = two_threads(options, &rig.cache, &second.cache, bytes, part)?;
        let params = json!({"what": part.name(), "bytes": bytes, "threads": 2});
        report.add_against("one thread", "parallel registration", params, "ms", comparison);
    }
    Ok(())
}

/// A cache over a ring.
struct Rig {
    // Before the ring: its registrations end first.
    cache: TheCache,
    ring: Ring,
    bytes: usize,
}

impl Rig {
    fn open(bytes: usize) -> Result<Self, String> {
        let ring = Ring::open(bytes)?;
        let registrar = registrar_of(&ring, SLOTS).map_err(|error| error.to_string())?;
        let monitor = Userfaultfd::shared().map_err(|error| error.to_string())?;
        let cache = pinfold::cache(registrar, monitor, Config::keeping_all());
        Ok(Self { cache: cache.map_err(|error| error.to_string())?, ring, bytes })
    }

    /// GiB/s through pieces, compared with the slower of registering and moving alone. Each of the two
    /// sides has memory of its own, never seen before.
    fn pipeline(&mut self, options: Options, pages: Pages) -> Result<Comparison, String> {
        let times = (options.rounds / 2).max(1);
        let gib = self.bytes as f64 / f64::from(1 << 30);
        let rig = std::cell::RefCell::new(self);
        compare(
            times,
            &mut |_| rig.borrow_mut().through_pieces(pages).map(|seconds| gib / seconds),
            Some(&mut |_| rig.borrow_mut().slower_alone(pages).map(|seconds| gib / seconds)),
        )
    }

    fn aim(&mut self, pages: Pages, memory: &Memory) -> Access {
        // What was written is sent; into what was not, something is received.
        let written = pages == Pages::Written;
        let direction = if written { Direction::Send } else { Direction::Receive };
        self.ring.aim(direction, memory.start().addr());
        if written { Access::READ } else { Access::WRITE }
    }

    fn through_pieces(&mut self, pages: Pages) -> Result<f64, String> {
        let memory = Memory::new(self.bytes, pages)?;
        let access = self.aim(pages, &memory);
        let seconds = self.move_all(&memory, access)?;
        self.forget();
        Ok(seconds)
    }

    /// The time of the slower of the two: all leases taken, one piece after the other, then all
    /// moved behind them.
    fn slower_alone(&mut self, pages: Pages) -> Result<f64, String> {
        let memory = Memory::new(self.bytes, pages)?;
        let access = self.aim(pages, &memory);
        let began = Instant::now();
        let leases = memory.leases(&self.cache, access)?;
        let registered = began.elapsed().as_secs_f64();
        drop(leases);
        let moved = self.move_all(&memory, access)?;
        self.forget();
        Ok(registered.max(moved))
    }

    fn move_all(&mut self, memory: &Memory, access: Access) -> Result<f64, String> {
        let began = Instant::now();
        memory.transfer(&self.cache, access, &mut self.ring)?;
        Ok(began.elapsed().as_secs_f64())
    }

    fn forget(&self) {
        self.cache.evict_idle();
    }
}

listed! {
    /// What two threads divide between them.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Part {
        /// Registering small pages that are not there, made in advance: what `register_all` does.
        Untouched => "untouched, register_all",
        /// Registering huge pages that are not there.
        UntouchedHuge => "untouched, huge pages, register_all",
        /// The same with the pages made by the registration, under the ring's lock.
        NotPrefaulted => "untouched, without prefaulting",
        /// Making small pages, without registering them.
        PagesMade => "pages made, not registered",
        /// Registering pages that are there with one ring.
        OneRing => "pages there, one ring",
        /// The same with a ring for each thread.
        RingEach => "pages there, a ring each",
        /// Writing memory that is there, for the memory's own speed.
        Written => "memory written",
    }
}

impl Part {
    const fn pages(self) -> Pages {
        match self {
            Self::Untouched | Self::NotPrefaulted | Self::PagesMade => Pages::Untouched,
            Self::UntouchedHuge => Pages::UntouchedHuge,
            Self::OneRing | Self::RingEach | Self::Written => Pages::Written,
        }
    }
}

/// Milliseconds of two threads compared with one.
fn two_threads(
    options: Options,
    first: &TheCache,
    second: &TheCache,
    bytes: usize,
    part: Part,
) -> Result<Comparison, String> {
    let time = |threads: usize| {
        let memory = Memory::new(bytes, part.pages())?;
        let began = Instant::now();
        divide(part, threads, [first, second], &memory, bytes)?;
        let seconds = began.elapsed().as_secs_f64();
        first.evict_idle();
        second.evict_idle();
        Ok(seconds * 1e3)
    };
    let rounds = (options.rounds / 2).max(1);
    compare(rounds, &mut |_| time(2), Some(&mut |_| time(1)))
}

fn divide(
    part: Part,
    threads: usize,
    caches: [&TheCache; 2],
    memory: &Memory,
    bytes: usize,
) -> Result<(), String> {
    let count = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    let how = pieces::Options { threads: count, ..pieces::Options::for_register_all() };
    let progress = Progress::new();
    match part {
        Part::PagesMade => pieces::prefault(memory.range(), Access::WRITE, &how, &progress)
            .map_err(|error| error.to_string()),
        Part::RingEach => halves(threads, bytes, &|half, offset, length| {
            let how = pieces::Options { threads: NonZeroUsize::MIN, prefault: false, ..how };
            memory.register(caches[half], offset, length, &how)
        }),
        Part::Written => halves(threads, bytes, &|_, offset, length| {
            memory.write(offset, length);
            Ok(())
        }),
        Part::Untouched | Part::UntouchedHuge => memory.register(caches[0], 0, bytes, &how),
        Part::NotPrefaulted | Part::OneRing => {
            let how = pieces::Options { prefault: false, ..how };
            memory.register(caches[0], 0, bytes, &how)
        }
    }
}

/// Does a half on each of two threads, or both on one.
fn halves(
    threads: usize,
    bytes: usize,
    work: &(impl Fn(usize, usize, usize) -> Result<(), String> + Sync),
) -> Result<(), String> {
    let half = bytes / 2;
    if threads == 1 {
        return work(0, 0, bytes);
    }
    thread::scope(|scope| {
        let other = scope.spawn(|| work(1, half, bytes - half));
        let own = work(0, 0, half);
        own.and(other.join().map_err(|_| "a measuring thread panicked".to_string())?)
    })
}
