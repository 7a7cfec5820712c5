//! Steady reuse: one buffer sent over and over, from the same memory into the same channel, with
//! each way to have it registered.
//!
//! In each round every contender has a turn of some milliseconds, each round begins with another
//! one, and a ratio is the median of the ratios within a round.

use crate::block::{Block, Origin};
use crate::device::Kind;
use crate::medians::{median, times_faster};
use crate::output::Failure;
use crate::strategy::{Cached, Copying, Message, Preregistered, Strategy, Uncached, Wire};
use pinfold::Config;
use pinfold::limits::Limits;
use std::time::Instant;

/// The way that the others are compared with: memory registered once, explicitly, and never deregistered.
pub const PREREGISTERED: &str = "preregistered";
/// The library's cache as it comes.
pub const PINFOLD: &str = "pinfold";
/// The library's cache with pieces as long as the message; for messages longer than a piece.
pub const ONE_PIECE: &str = "pinfold, one piece";
/// Each message copied into registered memory.
pub const COPY: &str = "copy";
/// Each message registered for its one send.
pub const PER_USE: &str = "per_use";

/// How fast one strategy sends messages of one size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Throughput {
    /// Which: one of this module's names.
    pub strategy: &'static str,
    /// Bytes of a message.
    pub bytes: usize,
    /// Messages per submission, for which the cache asks its monitor once.
    pub batch: usize,
    /// The median of its rounds.
    pub gib_per_s: f64,
    /// The same of [`PREREGISTERED`].
    pub preregistered_gib_per_s: f64,
    /// The median of the rounds' own ratios to [`PREREGISTERED`]: above 1 is faster.
    pub ratio: f64,
}

/// What to compare.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Every strategy, one message at a time and several.
    Everything,
    /// [`PINFOLD`] with [`PREREGISTERED`], one message at a time: each size once.
    EachSizeOnce,
}

impl Scope {
    /// Bytes per message and messages per submission.
    fn cases(self) -> impl Iterator<Item = (usize, usize)> {
        const CASES: [(usize, usize); 10] = [
            (4 << 10, 1),
            (4 << 10, 16),
            (16 << 10, 1),
            (64 << 10, 1),
            (64 << 10, 16),
            (256 << 10, 1),
            (256 << 10, 16),
            (1 << 20, 1),
            (4 << 20, 1),
            (16 << 20, 1),
        ];
        CASES.into_iter().filter(move |&(_, batch)| self == Self::Everything || batch == 1)
    }

    /// How often [`measure`] calls `advance`.
    pub fn steps(self, rounds: u32) -> u64 {
        self.cases().count() as u64 * u64::from(rounds)
    }
}

/// How much a contender sends in one turn, in bytes.
const TURN: usize = 8 << 20;

/// How many buffers' worth of memory the contenders pin together, at most.
const PINNED: usize = 6;

/// Throughput by strategy, size and batch; sizes that the limit on pinned memory has no room for
/// are left out. Calls `advance` behind every round.
///
/// # Errors
///
/// What this machine lacks: io_uring, userfaultfd, room for registrations.
pub fn measure(scope: Scope, rounds: u32, advance: &dyn Fn()) -> Result<Vec<Throughput>, Failure> {
    let room = Limits::read().enforced().bytes().unwrap_or(u64::MAX);
    let mut rows = Vec::new();
    for (bytes, batch) in scope.cases() {
        if (bytes * batch * PINNED) as u64 <= room {
            rows.extend(Case::new(scope, bytes, batch)?.measure(rounds, advance)?);
        }
    }
    Ok(rows)
}

struct Contender {
    name: &'static str,
    strategy: Box<dyn Strategy>,
    /// Seconds for each round.
    seconds: Vec<f64>,
}

struct Case {
    bytes: usize,
    batch: usize,
    // Before the block: registrations end before the memory does.
    contenders: Vec<Contender>,
    block: Block,
}

impl Case {
    fn new(scope: Scope, bytes: usize, batch: usize) -> Result<Self, Failure> {
        let all = bytes * batch;
        let block = filled(all)?;
        let first = Preregistered::new(Wire::open(Kind::IoUring, all)?, &block)?;
        let wire = || Wire::beside(Kind::IoUring, first.channel());
        let mut contenders = vec![Contender::new(PINFOLD, Cached::new(wire()?, budget(all))?)];
        if scope == Scope::Everything {
            contenders.push(Contender::new(COPY, Copying::new(wire()?, filled(all)?)?));
            contenders.push(Contender::new(PER_USE, Uncached::new(wire()?)));
            if bytes > Config::default().piece_bytes {
                let whole = Cached::in_pieces(wire()?, budget(all), bytes.next_power_of_two())?;
                contenders.push(Contender::new(ONE_PIECE, whole));
            }
        }
        contenders.insert(0, Contender::new(PREREGISTERED, first));
        Ok(Self { bytes, batch, contenders, block })
    }

    fn measure(mut self, rounds: u32, advance: &dyn Fn()) -> Result<Vec<Throughput>, Failure> {
        let messages: Vec<Message<'_>> = (0..self.batch)
            .map(|n| Message { block: &self.block, offset: n * self.bytes, length: self.bytes })
            .collect();
        let repeats = (TURN / (self.bytes * self.batch)).max(1);
        for contender in &mut self.contenders {
            contender.strategy.send(&messages)?;
        }
        for round in 0..rounds as usize {
            let first = round % self.contenders.len();
            let (late, early) = self.contenders.split_at_mut(first);
            for contender in early.iter_mut().chain(late) {
                contender.turn(&messages, repeats)?;
            }
            advance();
        }
        Ok(self.rows(repeats))
    }

    fn rows(&self, repeats: usize) -> Vec<Throughput> {
        let sent = gib(self.bytes * self.batch * repeats);
        let yardstick = &self.contenders[0].seconds;
        let speed = |seconds: &[f64]| sent / median(seconds.to_vec());
        let row = |contender: &Contender| Throughput {
            strategy: contender.name,
            bytes: self.bytes,
            batch: self.batch,
            gib_per_s: speed(&contender.seconds),
            preregistered_gib_per_s: speed(yardstick),
            ratio: times_faster(&contender.seconds, yardstick),
        };
        self.contenders.iter().map(row).collect()
    }
}

impl Contender {
    fn new(name: &'static str, strategy: impl Strategy + 'static) -> Self {
        Self { name, strategy: Box::new(strategy), seconds: Vec::new() }
    }

    fn turn(&mut self, messages: &[Message<'_>], repeats: usize) -> Result<(), Failure> {
        let start = Instant::now();
        for _ in 0..repeats {
            self.strategy.send(messages)?;
        }
        self.seconds.push(start.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Bytes that a cache may pin which is to keep `all` of them.
fn budget(all: usize) -> usize {
    2 * all + (4 << 20)
}

/// A block whose pages are all there.
fn filled(bytes: usize) -> Result<Block, Failure> {
    let mut block = Block::new(Origin::Mapping, bytes).map_err(Failure::unavailable)?;
    for page in (0..bytes).step_by(4096) {
        block.write(page, &[0x5a; 4096]);
    }
    Ok(block)
}

#[allow(clippy::cast_precision_loss)] // a throughput of three digits
fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
