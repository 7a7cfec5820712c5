//! `pinfold demo`: a message-passing program on real data, once with each way to register memory.
//!
//! One program, drawn from a seed, fills buffers with pieces of a file, sends them through a
//! device and, between sends, frees, reallocates, resizes, maps over and discards them.
//! The receiver compares every byte with the file. All strategies take the same steps, in turns of
//! [`TURN`] messages, so that whatever else the machine does slows them alike; only the send itself
//! is timed, from looking for a registration until the data has arrived and the registration is
//! given up or put back.
//!
//! Where this machine refuses io_uring, or every monitor, the same program runs on the simulated device.

mod data;
mod program;
mod report;
mod simulated;

use crate::block::{Block, Origin};
use crate::device::Kind;
use crate::medians::times_faster;
use crate::output::{Failure, Output, Verdict};
use crate::strategy::{Cached, Copying, Message, Naive, Preregistered, Strategy, Uncached, Wire};
use data::{Data, Receiver};
use pinfold::limits::Limits;
use pinfold::monitor::{Choice, best};
use program::{Change, Program, SLOTS, SMALLEST, Step};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Options of `pinfold demo`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// The data to send: the first 256 MiB of this file
    #[arg(default_value = "/proc/self/exe")]
    file: PathBuf,
    /// How many messages each strategy sends [default: 1500, over RDMA 60]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    messages: Option<u64>,
    /// The seed of the program; the same seed is the same program
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The largest message, in bytes: 4096 to 67108864, rounded down to a power of two
    /// [default: 4 MiB, or what RLIMIT_MEMLOCK has room for]
    #[arg(long, value_parser = clap::value_parser!(u64).range(4096..=64 << 20))]
    size: Option<u64>,
    /// The device that moves the data
    #[arg(long, value_enum, default_value_t)]
    registrar: Kind,
    /// Use the simulated device, which needs nothing of this machine; so does `demo` where io_uring or
    /// every monitor is refused
    #[arg(long, conflicts_with = "registrar")]
    simulated: bool,
}

impl Arguments {
    /// As asked; else what takes a minute where RDMA is emulated, as in `vm/run`, and a second through io_uring.
    fn messages(&self) -> u64 {
        let usual = if self.registrar == Kind::IoUring { 1500 } else { 60 };
        self.messages.unwrap_or(usual)
    }
}

/// How many messages a strategy sends before the next one takes its turn.
const TURN: u64 = 20;
/// The largest message unless asked otherwise.
const LARGEST: usize = 4 << 20;
/// What a message may pin beyond its length, because it begins and ends within pages.
const PAGE: usize = 4096;
/// All strategies together pin this many times the largest message and a page, or a little less:
/// the pool and the two caches one for each buffer and one more, the bounce buffer and the lone
/// registration one each.
const PINNED: usize = 3 * (SLOTS + 1) + 3;
/// Each has a channel for one message.
const STRATEGIES: [&str; 5] = ["uncached", "naive", "copy", "preregistered", "pinfold"];

/// Shows the demo; it holds if the naive cache sent wrong data and no other strategy did.
pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<Verdict, Failure> {
    let data = Data::read(&arguments.file)?;
    let report = match arguments.simulated {
        true => on_simulated_device(arguments, None)?,
        false => match on_real_device(arguments, &data, output) {
            Err(Failure::Unavailable(why)) if arguments.registrar == Kind::IoUring => {
                on_simulated_device(arguments, Some(why))?
            }
            outcome => outcome?,
        },
    };
    output.report(&report, || report.for_people());
    Ok(Verdict::of(report.held()))
}

fn on_real_device(
    arguments: &Arguments,
    data: &Data,
    output: &Output,
) -> Result<report::Report, Failure> {
    if arguments.registrar == Kind::IoUring
        && best().is_ok_and(|best| best.chosen() == Choice::NoMonitor)
    {
        return Err(Failure::unavailable("no monitor here, so nothing could be cached"));
    }
    let largest = largest(arguments.size, arguments.registrar)?;
    let mut senders = senders(arguments, largest)?;
    let progress = output.progress(arguments.messages(), "demo");
    let mut receiver = Receiver::new(largest);
    for (turn, steps) in turns(arguments, largest).enumerate() {
        send(&mut senders, turn, &steps, data, &mut receiver)?;
        progress.advance(steps.len() as u64);
    }
    Ok(report::Report::new(arguments, largest, rows(&senders)))
}

/// `why`: what this machine refuses, if that is the reason.
fn on_simulated_device(
    arguments: &Arguments,
    why: Option<String>,
) -> Result<report::Report, Failure> {
    let asked = arguments.size.and_then(|bytes| usize::try_from(bytes).ok());
    let largest = asked.map_or(LARGEST, |bytes| 1 << bytes.ilog2());
    let rows = simulated::rows(&STRATEGIES, arguments.seed, arguments.messages(), largest)?;
    Ok(report::Report::new(arguments, largest, rows).simulated(why))
}

/// The program's steps, turn by turn.
fn turns(arguments: &Arguments, largest: usize) -> impl Iterator<Item = Vec<Step>> {
    let mut program = Program::new(arguments.seed, largest);
    let mut left = arguments.messages();
    std::iter::from_fn(move || {
        let turn = left.min(TURN);
        left -= turn;
        let steps: Vec<Step> = (0..turn).filter_map(|_| program.next()).collect();
        (!steps.is_empty()).then_some(steps)
    })
}

/// Has every sender take the steps of one turn; each turn begins with another sender.
fn send(
    senders: &mut [Sender],
    turn: usize,
    steps: &[Step],
    data: &Data,
    receiver: &mut Receiver,
) -> Result<(), Failure> {
    let (late, early) = senders.split_at_mut(turn % senders.len());
    for sender in early.iter_mut().chain(late) {
        sender.tally.turns.push(0.0);
        steps.iter().try_for_each(|step| sender.step(data, step, receiver))?;
    }
    Ok(())
}

fn rows(senders: &[Sender]) -> Vec<report::Row> {
    let yardstick = senders.iter().find(|sender| sender.name == "preregistered");
    let yardstick = yardstick.map_or(&[][..], |sender| &sender.tally.turns);
    senders.iter().map(|sender| sender.row(yardstick)).collect()
}

/// The largest message: as asked, or as large as the limit on pinned memory has room for.
fn largest(asked: Option<u64>, registrar: Kind) -> Result<usize, Failure> {
    if let Some(asked) = asked.and_then(|bytes| usize::try_from(bytes).ok()) {
        return Ok(1 << asked.ilog2());
    }
    let pinned = PINNED + STRATEGIES.len() * registrar.pinned_channels();
    let room = Limits::read()
        .enforced()
        .bytes()
        .map_or(usize::MAX, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    match (room / pinned).saturating_sub(PAGE).min(LARGEST) {
        largest if largest >= SMALLEST => Ok(1 << largest.ilog2()),
        _ => Err(Failure::unavailable(format_args!(
            "RLIMIT_MEMLOCK lets this program pin {room} bytes, too few to compare strategies: \
             raise it (`ulimit -l`) to {} KiB or more",
            pinned * (SMALLEST + PAGE) / 1024
        ))),
    }
}

fn senders(arguments: &Arguments, largest: usize) -> Result<Vec<Sender>, Failure> {
    let budget = (SLOTS + 1) * (largest + PAGE);
    let wire = || Wire::open(arguments.registrar, largest);
    let own = || Memory::own(arguments.seed, largest);
    let bounce = Block::new(Origin::Mapping, largest).map_err(|error| no_memory(&error))?;
    let pool = Block::new(Origin::Mapping, SLOTS * largest).map_err(|error| no_memory(&error))?;
    let preregistered = Preregistered::new(wire()?, &pool)?;
    Ok(vec![
        Sender::new("uncached", own()?, Uncached::new(wire()?)),
        Sender::new("naive", own()?, Naive::new(wire()?, budget)),
        Sender::new("copy", own()?, Copying::new(wire()?, bounce)?),
        Sender::new("preregistered", Memory::Pool(pool, largest), preregistered),
        Sender::new("pinfold", own()?, Cached::new(wire()?, budget)?),
    ])
}

/// Where a sender's messages are built.
enum Memory {
    /// Buffers that come and go as the program likes.
    Own(Vec<Block>),
    /// A pool with a place of this many bytes for each buffer, where nothing ever changes.
    Pool(Block, usize),
}

impl Memory {
    fn own(seed: u64, largest: usize) -> Result<Self, Failure> {
        let origins = [Origin::Heap, Origin::Mapping].into_iter().cycle();
        let lengths = Program::new(seed, largest).lengths();
        let blocks = origins.zip(lengths).map(|(origin, length)| Block::new(origin, length));
        blocks.collect::<io::Result<_>>().map(Self::Own).map_err(|error| no_memory(&error))
    }

    fn change(&mut self, step: &Step) -> io::Result<()> {
        match (self, step.change) {
            (Self::Own(blocks), Some(change)) => {
                let block = &mut blocks[step.slot];
                match change {
                    Change::Reallocate => block.reallocate(step.length),
                    Change::Resize => block.resize(step.length),
                    Change::MapOver => block.map_over(),
                    Change::Discard => block.discard(),
                }
            }
            _ => Ok(()),
        }
    }

    /// Builds the step's message.
    fn fill(&mut self, data: &Data, step: &Step) -> Message<'_> {
        let (block, offset) = match self {
            Self::Own(blocks) => (&mut blocks[step.slot], 0),
            Self::Pool(pool, place) => (pool, *place * step.slot),
        };
        data.fill(step, block, offset);
        Message { block, offset, length: step.length }
    }
}

/// One strategy at work, and what became of its messages.
struct Sender {
    name: &'static str,
    // The strategy goes first, so that its registrations end before the memory does.
    strategy: Box<dyn Strategy>,
    memory: Memory,
    tally: Tally,
}

/// What became of a sender's messages.
#[derive(Clone, Default, Debug)]
struct Tally {
    wrong: u64,
    bytes: u64,
    time: Duration,
    /// Of these, the messages from buffers that had not changed since their last use.
    steady_bytes: u64,
    steady_time: Duration,
    /// The same time for each turn, in seconds.
    turns: Vec<f64>,
}

impl Sender {
    fn new(name: &'static str, memory: Memory, strategy: impl Strategy + 'static) -> Self {
        Self { name, memory, strategy: Box::new(strategy), tally: Tally::default() }
    }

    fn step(&mut self, data: &Data, step: &Step, receiver: &mut Receiver) -> Result<(), Failure> {
        self.memory.change(step).map_err(|error| no_memory(&error))?;
        let message = self.memory.fill(data, step);
        let start = Instant::now();
        self.strategy.send(&[message])?;
        self.tally.sent(step, start.elapsed());
        let right = receiver
            .check(data, step, self.strategy.channel())
            .map_err(|error| no_message(&error))?;
        self.tally.wrong += u64::from(!right);
        Ok(())
    }

    fn row(&self, yardstick: &[f64]) -> report::Row {
        let ratio = times_faster(&self.tally.turns, yardstick);
        report::Row::new(self.name, &self.tally, self.strategy.counts(), ratio)
    }
}

impl Tally {
    fn sent(&mut self, step: &Step, time: Duration) {
        let bytes = step.length as u64;
        self.bytes += bytes;
        self.time += time;
        if step.change.is_none() {
            self.steady_bytes += bytes;
            self.steady_time += time;
            if let Some(turn) = self.turns.last_mut() {
                *turn += time.as_secs_f64();
            }
        }
    }
}

fn no_memory(error: &io::Error) -> Failure {
    Failure::unavailable(format_args!("no memory for the messages: {error}"))
}

fn no_message(error: &io::Error) -> Failure {
    Failure::unavailable(format_args!("the channel cannot be read: {error}"))
}
