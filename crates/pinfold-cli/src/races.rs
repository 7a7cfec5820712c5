//! The changes that take two threads: one changes memory while the other uses it, or its address.
//!
//! Each race is one round. What is judged is only what the program itself orders: a `get` that
//! begins after the change has returned, or after the address was mapped anew, and bytes that
//! no thread changes.

use crate::change::{
    FirstWrong, Foothold, Mutation, Obstacle, Part, Specimen, difference, lag_behind,
};
use crate::port::{Port, Refusal};
use pinfold::landing::AskError;
use pinfold::pool::AllocateError;
use pinfold::{Access, AddressRange, GetError};
use pinfold_kernel::thread::stay_on;
use rustix::thread::sched_getcpu;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Why something could not be tried.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    /// The change could not be made.
    #[error(transparent)]
    Obstacle(#[from] Obstacle),
    /// The memory could not be moved.
    #[error(transparent)]
    Refusal(#[from] Refusal),
    /// No second thread could be started.
    #[error("no thread could be started: {0}")]
    Thread(io::Error),
    /// The memory is gone after an earlier obstacle.
    #[error("the memory is gone after an earlier obstacle")]
    Gone,
    /// A forked child could not make a monitor and caches of its own.
    #[error("a forked child could not make caches of its own")]
    Child,
    /// The pool gave no buffer.
    #[error(transparent)]
    Pool(#[from] AllocateError),
    /// There was no place to land in.
    #[error(transparent)]
    Place(#[from] AskError),
    /// There is no landing zone: the device follows the page table, or nothing could be registered.
    #[error("there is no landing zone")]
    NoZone,
}

impl Stop {
    /// The reason without addresses, so that equal ones can be counted.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::Refusal(Refusal::Get(GetError::Register(error))) => first_word(error),
            Self::Refusal(Refusal::Get(error)) => first_word(error),
            Self::Pool(error) => first_word(error),
            Self::Place(error) => first_word(error),
            other => other.to_string(),
        }
    }

    /// Whether another try with other memory may go through.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Self::Obstacle(obstacle) if obstacle.is_taken())
    }
}

/// The name of an error's variant.
fn first_word(error: &impl fmt::Debug) -> String {
    let text = format!("{error:?}");
    text.chars().take_while(char::is_ascii_alphanumeric).collect()
}

/// Sends `range` of `specimen` and compares what arrives with what the memory holds.
pub(crate) fn send_wrong(
    port: &Port,
    specimen: &Specimen,
    range: AddressRange,
    lane: usize,
) -> Result<Option<FirstWrong>, Refusal> {
    let sent = port.send(range, lane)?;
    Ok(specimen.difference(range, &sent.bytes))
}

/// Has the device write the pattern of `key` into `range` and looks at what the memory holds then.
pub(crate) fn receive_wrong(
    port: &Port,
    specimen: &Specimen,
    range: AddressRange,
    lane: usize,
    key: u64,
) -> Result<Option<FirstWrong>, Refusal> {
    let wanted = Specimen::pattern(range, key);
    port.receive(range, lane, &wanted)?;
    Ok(specimen.difference(range, &wanted))
}

/// How the two threads of a race are scheduled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pace {
    /// As it comes.
    Free,
    /// Both on one processor, and the one that changes memory lags: after the kernel has told of
    /// a change, and before the change takes effect, the other one runs for a while.
    Lagging,
}

impl Pace {
    /// Where more threads run than there are processors, the one that changes memory, or the
    /// monitor's, may wait for this one's processor. A lagging race wants it to wait.
    fn make_way(self) {
        if self == Self::Free {
            thread::yield_now();
        }
    }
}

/// What a race is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Race {
    pub(crate) mutation: Mutation,
    pub(crate) pace: Pace,
    /// Keys of the bytes before and after the change.
    pub(crate) keys: [u64; 2],
    /// The first of two lanes.
    pub(crate) lane: usize,
}

/// One round of a race; where wrong data begins, if there is any.
pub(crate) type RunRace = fn(&Port, &mut Specimen, Race) -> Result<Option<FirstWrong>, Stop>;

/// Two threads' meeting point. Both flags order nothing but themselves: what the threads tell each
/// other about memory goes through the kernel's address space and through joining.
#[derive(Default)]
struct Signals {
    begun: AtomicBool,
    over: AtomicBool,
}

impl Signals {
    fn begin(&self) {
        // Release: pairs with the Acquire in `await_begin`.
        self.begun.store(true, Ordering::Release);
    }

    fn await_begin(&self) {
        // Acquire: pairs with the Release in `begin`.
        while !self.begun.load(Ordering::Acquire) {
            thread::yield_now();
        }
    }

    /// Ends the race when what it returns is dropped, by a panic too.
    fn end_at_last(&self) -> impl Drop {
        struct End<'s>(&'s AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                // Relaxed: a flag that guards no data.
                self.0.store(true, Ordering::Relaxed);
            }
        }
        End(&self.over)
    }

    fn is_over(&self) -> bool {
        // Relaxed: as in `end_at_last`.
        self.over.load(Ordering::Relaxed)
    }
}

/// As [`thread::Scope::spawn`], which panics where the machine has no room for a thread.
pub(crate) fn start<'s, T: Send + 's>(
    scope: &'s thread::Scope<'s, '_>,
    work: impl FnOnce() -> T + Send + 's,
) -> Result<thread::ScopedJoinHandle<'s, T>, Stop> {
    thread::Builder::new().spawn_scoped(scope, work).map_err(Stop::Thread)
}

/// A thread that panicked has found something wrong at its very first byte.
pub(crate) fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>, panicked: T) -> T {
    thread.join().unwrap_or(panicked)
}

/// While this thread unmaps the specimen, another maps memory at its address and uses it at once.
pub(crate) fn take_over(
    port: &Port,
    specimen: &mut Specimen,
    race: Race,
) -> Result<Option<FirstWrong>, Stop> {
    let Race { mutation, keys, lane, .. } = race;
    let body = specimen.body();
    specimen.fill(body, keys[0]);
    port.send(body, lane)?;
    let signals = Signals::default();
    let (outcome, taken) = thread::scope(|scope| {
        let other = start(scope, || settle(port, &signals, body, keys[1], lane + 1))?;
        let end = signals.end_at_last();
        signals.await_begin();
        let outcome = specimen.take_away(mutation);
        drop(end);
        Ok::<_, Stop>((outcome, joined(other, Ok(None))))
    })?;
    outcome?;
    match taken? {
        None => Err(Obstacle::taken("mmap").into()),
        Some((foothold, wrong)) => {
            specimen.adopt(foothold);
            Ok(wrong)
        }
    }
}

type Settled = Option<(Foothold, Option<FirstWrong>)>;

fn settle(
    port: &Port,
    signals: &Signals,
    place: AddressRange,
    key: u64,
    lane: usize,
) -> Result<Settled, Stop> {
    signals.begin();
    loop {
        // Asked before the try: the last try comes after the address was released for good, so it
        // fails only if a third thread was faster.
        let over = signals.is_over();
        if let Ok(foothold) = Foothold::take(place) {
            // The get comes first, while the other thread may still be in its `munmap`; what it
            // registers is this memory, so bytes written afterwards are sent as well.
            let lease = port.lease(place, Access::READ)?;
            foothold.fill(key);
            let sent = port.send_leased(&lease, place, lane)?;
            return Ok(Some((foothold, difference(&sent, &Specimen::pattern(place, key)))));
        }
        if over {
            return Ok(None);
        }
        thread::yield_now();
    }
}

/// While another thread registers the specimen over and over, this one changes it and uses it.
pub(crate) fn change_while_registering(
    port: &Port,
    specimen: &mut Specimen,
    race: Race,
) -> Result<Option<FirstWrong>, Stop> {
    let body = specimen.body();
    specimen.fill(body, race.keys[0]);
    let other = |signals: &Signals| {
        register_over_and_over(port, signals, body, race.pace);
        None
    };
    run(race.pace, other, || change_and_send(port, specimen, race, body))
}

/// Runs `other` on one thread, and when that has begun `changer` on another one.
fn run(
    pace: Pace,
    other: impl Fn(&Signals) -> Option<FirstWrong> + Sync,
    changer: impl FnOnce() -> Result<Option<FirstWrong>, Stop> + Send,
) -> Result<Option<FirstWrong>, Stop> {
    let signals = Signals::default();
    let processor = sched_getcpu();
    let keep_together = || {
        if pace == Pace::Lagging {
            // Where it may not, the two meet less often.
            let _ = stay_on(processor);
        }
    };
    thread::scope(|scope| {
        let end = signals.end_at_last();
        let user = start(scope, || {
            keep_together();
            other(&signals)
        })?;
        signals.await_begin();
        let changer = start(scope, || {
            keep_together();
            if pace == Pace::Lagging {
                lag_behind();
            }
            changer()
        })?;
        let changed = joined(changer, Ok(Some(0)));
        drop(end);
        let beside = joined(user, Some(0));
        Ok(changed?.or(beside))
    })
}

/// How often memory is changed in one round, while the other thread goes on and on.
const CHANGES: u64 = 4;

/// Changes the specimen, gives `part` new bytes and sends all of it, again and again, until
/// something is wrong.
fn change_and_send(
    port: &Port,
    specimen: &mut Specimen,
    race: Race,
    part: AddressRange,
) -> Result<Option<FirstWrong>, Stop> {
    for change in 0..CHANGES {
        specimen.apply(race.mutation)?;
        specimen.populate()?;
        specimen.fill(part, race.keys[1] ^ (change << 32));
        let wrong = send_wrong(port, specimen, specimen.body(), race.lane)?;
        if wrong.is_some() {
            return Ok(wrong);
        }
    }
    Ok(None)
}

/// The memory may be gone at any moment, and with it the answer: nothing here is judged.
fn register_over_and_over(port: &Port, signals: &Signals, body: AddressRange, pace: Pace) {
    loop {
        register(port, body);
        pace.make_way();
        signals.begin();
        if signals.is_over() {
            return;
        }
    }
}

fn register(port: &Port, body: AddressRange) {
    for piece in body.pieces(Port::piece_bytes()) {
        drop(port.lease(piece, Access::READ));
    }
}

/// While another thread sends the head of the specimen from registrations of all of it, this one
/// changes the tail and uses the whole.
pub(crate) fn change_beside(
    port: &Port,
    specimen: &mut Specimen,
    race: Race,
) -> Result<Option<FirstWrong>, Stop> {
    let (body, head, tail) =
        (specimen.body(), specimen.part(Part::Head), specimen.part(Part::Tail));
    specimen.fill(body, race.keys[0]);
    let wanted = specimen.bytes(head);
    let lane = race.lane + 1;
    let other = |signals: &Signals| send_head(port, signals, body, head, &wanted, lane, race.pace);
    run(race.pace, other, || change_and_send(port, specimen, race, tail))
}

/// Registers `body`, sends `head` and compares it, until told to stop; a refusal (the tail may be
/// gone at the moment) is no wrong.
fn send_head(
    port: &Port,
    signals: &Signals,
    body: AddressRange,
    head: AddressRange,
    wanted: &[u8],
    lane: usize,
    pace: Pace,
) -> Option<FirstWrong> {
    /// A registration takes less time than a transfer; it is what the change should meet.
    const REGISTRATIONS: usize = 16;
    loop {
        (0..REGISTRATIONS).for_each(|_| register(port, body));
        pace.make_way();
        let sent =
            port.lease(body, Access::READ).and_then(|lease| port.send_leased(&lease, head, lane));
        signals.begin();
        let wrong = sent.ok().and_then(|bytes| difference(&bytes, wanted));
        if wrong.is_some() || signals.is_over() {
            return wrong;
        }
    }
}
