//! Steady reuse: one buffer sent over and over, from the same memory into the same channel, with
//! each way to have it registered.

use super::Bench;
use crate::block::{Block, Origin};
use crate::device::Kind;
use crate::medians::{median, times_faster};
use crate::output::{Failure, Progress};
use crate::strategy::{Cached, Copying, Message, Preregistered, Strategy, Uncached, Wire};
use pinfold::Config;
use pinfold::limits::Limits;
use serde_json::json;
use std::time::Instant;

/// Bytes per message and messages per submission, for which the cache asks its monitor once.
const CASES: [(usize, usize); 8] = [
    (4 << 10, 1),
    (4 << 10, 16),
    (64 << 10, 1),
    (64 << 10, 16),
    (256 << 10, 1),
    (256 << 10, 16),
    (1 << 20, 1),
    (16 << 20, 1),
];

/// How much a contender sends in one turn, in bytes.
const TURN: usize = 8 << 20;

/// How many buffers' worth of memory the contenders pin together, at most.
const PINNED: usize = 6;

/// How many turns all cases take.
pub(super) fn steps(rounds: u32) -> u64 {
    CASES.len() as u64 * u64::from(rounds)
}

/// Throughput by strategy, size and batch; sizes that the limit on pinned memory has no room for
/// are left out.
pub(super) fn transfer(rounds: u32, progress: &Progress) -> Result<Vec<Bench>, Failure> {
    let room = Limits::read().enforced().bytes().unwrap_or(u64::MAX);
    let mut benches = Vec::new();
    for (bytes, batch) in CASES {
        if (bytes * batch * PINNED) as u64 <= room {
            benches.extend(Case::new(bytes, batch)?.measure(rounds, progress)?);
        }
    }
    Ok(benches)
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
    fn new(bytes: usize, batch: usize) -> Result<Self, Failure> {
        let all = bytes * batch;
        let block = filled(all)?;
        let first = Preregistered::new(Wire::open(Kind::IoUring, all)?, &block)?;
        let wire = || Wire::beside(Kind::IoUring, first.channel());
        let copying = Copying::new(wire()?, filled(all)?)?;
        let uncached = Uncached::new(wire()?);
        let cached = Cached::new(wire()?, 2 * all + (4 << 20))?;
        let whole = Cached::in_pieces(wire()?, 2 * all + (4 << 20), bytes.next_power_of_two())?;
        let in_pieces = bytes > Config::default().piece_bytes;
        let mut contenders = vec![
            Contender::new("preregistered", first),
            Contender::new("pinfold", cached),
            Contender::new("copy", copying),
            Contender::new("per_use", uncached),
        ];
        if in_pieces {
            contenders.push(Contender::new("pinfold, one piece", whole));
        }
        Ok(Self { bytes, batch, contenders, block })
    }

    fn measure(mut self, rounds: u32, progress: &Progress) -> Result<Vec<Bench>, Failure> {
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
            progress.advance(1);
        }
        Ok(self.benches(repeats))
    }

    fn benches(&self, repeats: usize) -> Vec<Bench> {
        let sent = gib(self.bytes * self.batch * repeats);
        let yardstick = &self.contenders[0].seconds;
        let bench = |contender: &Contender| Bench {
            name: "transfer",
            params: json!({
                "bytes": self.bytes, "batch": self.batch, "strategy": contender.name,
            }),
            value: sent / median(contender.seconds.clone()),
            unit: "GiB/s",
            ratio: Some(times_faster(&contender.seconds, yardstick)),
        };
        self.contenders.iter().map(bench).collect()
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
