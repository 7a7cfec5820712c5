//! What a thread of `pinfold torture` does: a list of operations that depends on the seed and the
//! thread's number alone, never on what the machine answers.

use crate::change::{Backing, Call, Mutation, Part, Specimen};
use crate::races::Pace;
use fastrand::Rng;
use pinfold::AddressRange;
use pinfold::pool::WhenExhausted;
use std::fmt::Write;
use std::iter;
use std::time::Duration;

/// How many pieces of memory a thread owns.
pub(super) const SLOTS: usize = 6;

/// How many buffers of the pool a thread has at most.
pub(super) const PLACES: usize = 4;

/// How many caches the threads share; [`Operation`]s name them by number.
pub(super) const PORTS: usize = 3;

/// A part of a slot's memory in 65536ths, so that it means something for every size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Window {
    pub(super) start: u16,
    pub(super) length: u16,
}

impl Window {
    /// The bytes of `specimen` that this means, at least one.
    pub(super) fn of(self, specimen: &Specimen) -> AddressRange {
        let body = specimen.body();
        let offset = (body.len() * usize::from(self.start)) >> 16;
        let length = ((body.len() - offset) * (usize::from(self.length) + 1)) >> 16;
        AddressRange::new(body.start() + offset, length.max(1)).unwrap_or(body)
    }
}

/// How data gets from the landing zone to its target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Copy,
    /// By an exchange of pages, once it is there.
    Exchange,
    /// By an exchange of pages before it is there.
    Early,
    /// As the zone's crossover says.
    Chosen,
}

/// One message's way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Arrival {
    pub(super) way: Way,
    /// What the program does to the target before the data is there.
    pub(super) change: Option<Mutation>,
    /// Whether another thread has the device move the data meanwhile.
    pub(super) beside: bool,
    /// Whether slots are registered anew before a place is asked for.
    pub(super) refill: bool,
}

/// One step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Operation {
    /// New memory for a slot; the old one goes.
    Allocate { slot: usize, backing: Backing, grains: usize },
    /// A change of a slot's memory, then new bytes.
    Change { slot: usize, mutation: Mutation },
    /// New bytes in place, perhaps, and a send.
    Send { slot: usize, window: Window, refill: bool, port: usize },
    /// The device writes into the memory.
    Receive { slot: usize, window: Window, port: usize },
    /// A lease that is kept over whatever comes.
    Hold { slot: usize, window: Window, port: usize },
    /// The end of the oldest lease kept.
    Release,
    /// A use that vouches for the memory, an explicit invalidation, a change.
    Vouch { slot: usize, mutation: Mutation, port: usize },
    /// Another thread takes the address while this one unmaps it.
    TakeOver { grains: usize, port: usize },
    /// Another thread registers while this one changes.
    Register { backing: Backing, grains: usize, mutation: Mutation, pace: Pace, port: usize },
    /// Another thread uses the head while this one changes the tail.
    Beside { backing: Backing, grains: usize, mutation: Mutation, pace: Pace, port: usize },
    /// A few changes and sends while no descriptor can be opened.
    Starve { slot: usize, port: usize },
    /// Data for a slot's memory arrives in the landing zone, and gets there.
    Arrive { slot: usize, window: Window, port: usize, arrival: Arrival },
    /// A buffer of the pool; the one that was in its place goes back.
    Take { place: usize, length: usize, when: WhenExhausted, zeroed: bool },
    /// A buffer's bytes go out by its own registration and by a cache's.
    SendBuffer { place: usize, refill: bool, port: usize },
    /// The device writes into a buffer.
    ReceiveBuffer { place: usize, as_word: bool },
    /// A buffer goes back.
    PutBack { place: usize },
    /// A buffer goes to whichever thread passes one on next, which puts it back.
    PassOn { place: usize },
    /// The pool gives back what is empty.
    Trim { down_to: usize },
    /// A forked child that is told so, and then runs a program of its own.
    Fork { flood: bool },
    /// Pages of a file are sent, replaced in the file, which reclaim may have unmapped before, and sent again.
    Replace { paged_out: bool, zeros: bool },
}

impl Operation {
    /// Whether a thread of its own begins and ends with it.
    pub(super) const fn begins_threads(&self) -> bool {
        match self {
            Self::TakeOver { .. } | Self::Register { .. } | Self::Beside { .. } => true,
            Self::Arrive { arrival, .. } => arrival.beside,
            _ => false,
        }
    }

    /// What a count of such operations is called.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Allocate { .. } => "allocate",
            Self::Change { .. } => "change",
            Self::Send { .. } => "send",
            Self::Receive { .. } => "receive",
            Self::Hold { .. } => "hold",
            Self::Release => "release",
            Self::Vouch { .. } => "vouch",
            Self::TakeOver { .. } => "take over",
            Self::Register { .. } => "change while registering",
            Self::Beside { .. } => "change beside use",
            Self::Starve { .. } => "no descriptors",
            Self::Arrive { arrival: Arrival { change: None, .. }, .. } => "arrival",
            Self::Arrive { .. } => "arrival, target changed",
            Self::Take { .. } => "pool: take",
            Self::SendBuffer { .. } => "pool: send",
            Self::ReceiveBuffer { .. } => "pool: receive",
            Self::PutBack { .. } => "pool: put back",
            Self::PassOn { .. } => "pool: pass on",
            Self::Trim { .. } => "pool: trim",
            Self::Fork { flood: false } => "forked child",
            Self::Fork { flood: true } => "forked child, no mappings",
            Self::Replace { zeros: false, .. } => "direct write",
            Self::Replace { zeros: true, .. } => "blocks filled with zeros",
        }
    }
}

/// What the thread does that has a file written past its pages, endlessly.
pub(super) fn replacements(seed: u64) -> impl Iterator<Item = Operation> {
    let mut rng = Rng::with_seed(seed);
    iter::repeat_with(move || Operation::Replace { paged_out: rng.bool(), zeros: rng.bool() })
}

/// The endless list of one thread's operations.
#[derive(Clone, Debug)]
pub(super) struct Program {
    rng: Rng,
    /// What each slot is made of after the operations so far, if all of them succeeded.
    backings: [Backing; SLOTS],
    /// Slots that were never allocated come first.
    fresh: usize,
}

impl Program {
    /// The program of `thread` under `seed`.
    pub(super) fn new(seed: u64, thread: usize) -> Self {
        let mut seeder = Rng::with_seed(seed);
        // The threads' seeds are drawn one after the other, so each depends on the seed only.
        let own = (0..=thread).map(|_| seeder.u64(..)).last().unwrap_or(seed);
        Self { rng: Rng::with_seed(own), backings: [Backing::Anonymous; SLOTS], fresh: 0 }
    }

    /// A digest of the first `count` operations of each of `threads` threads.
    pub(super) fn digest(seed: u64, threads: usize, count: usize) -> String {
        let mut text = String::new();
        for thread in 0..threads {
            for operation in Self::new(seed, thread).take(count) {
                // Writing to a string cannot fail.
                let _ = write!(text, "{operation:?};");
            }
        }
        format!("{:016x}", fnv1a(text.as_bytes()))
    }

    fn next_operation(&mut self) -> Operation {
        if self.fresh < SLOTS {
            self.fresh += 1;
            return self.allocate(self.fresh - 1);
        }
        let slot = self.rng.usize(..SLOTS);
        // What takes as long as hundreds of others (a child, no descriptors, two threads) is rare, so that
        // most of the time goes into what changes and uses memory.
        match self.rng.u32(..10_000) {
            0..600 => self.allocate(slot),
            600..2600 => Operation::Change { slot, mutation: self.mutation(self.backings[slot]) },
            2600..4900 => self.send(slot),
            4900..5900 => Operation::Receive { slot, window: self.window(slot), port: self.port() },
            5900..6400 => Operation::Hold { slot, window: self.window(slot), port: self.port() },
            6400..6900 => Operation::Release,
            6900..7150 => {
                let mutation = self.mutation(self.backings[slot]);
                Operation::Vouch { slot, mutation, port: self.port() }
            }
            7150..7170 => Operation::TakeOver { grains: self.grains(), port: self.port() },
            7170..7190 => self.register(),
            7190..7210 => self.beside(),
            7210..7211 => Operation::Starve { slot, port: self.port() },
            7211..7213 => Operation::Fork { flood: self.rng.u32(..16) == 0 },
            7213..8150 => self.arrive(slot),
            _ => self.with_the_pool(),
        }
    }

    fn arrive(&mut self, slot: usize) -> Operation {
        let arrival = Arrival {
            way: [Way::Copy, Way::Exchange, Way::Early, Way::Chosen][self.rng.usize(..4)],
            change: self.change_of_target(slot),
            // A thread's beginning and end take longer than an arrival.
            beside: self.rng.u32(..16) == 0,
            refill: self.rng.bool(),
        };
        Operation::Arrive { slot, window: self.window(slot), port: self.port(), arrival }
    }

    /// What becomes of a target whose changes are certain to be watched.
    fn change_of_target(&mut self, slot: usize) -> Option<Mutation> {
        const CHANGES: [Mutation; 6] = [
            Mutation::Unmap(Part::Whole, Call::Library),
            Mutation::Unmap(Part::Tail, Call::Library),
            Mutation::Unmap(Part::Whole, Call::Raw),
            Mutation::MapOver(Part::Whole),
            Mutation::Discard(Part::Middle, Call::Library),
            Mutation::MoveAway,
        ];
        let change = CHANGES[self.rng.usize(..CHANGES.len())];
        (self.backings[slot] == Backing::Anonymous && self.rng.bool()).then_some(change)
    }

    fn with_the_pool(&mut self) -> Operation {
        let place = self.rng.usize(..PLACES);
        match self.rng.u32(..100) {
            0..40 => self.take(place),
            40..60 => Operation::SendBuffer { place, refill: self.rng.bool(), port: self.port() },
            60..80 => Operation::ReceiveBuffer { place, as_word: self.rng.bool() },
            80..90 => Operation::PutBack { place },
            90..97 => Operation::PassOn { place },
            _ => Operation::Trim { down_to: self.rng.usize(..=4 << 20) },
        }
    }

    /// Mostly small, up to 4 MiB; patience for some milliseconds.
    fn take(&mut self, place: usize) -> Operation {
        let most = if self.is_large() { 22 } else { 15 };
        let longest = 1 << self.rng.u32(4..=most);
        let length = self.rng.usize(1..=longest);
        let patience = Duration::from_millis(self.rng.u64(..4));
        let when = match self.rng.u32(..4) {
            0 => WhenExhausted::Fail,
            1 => WhenExhausted::Grow,
            2 => WhenExhausted::Wait(patience),
            _ => WhenExhausted::GrowOrWait(patience),
        };
        Operation::Take { place, length, when, zeroed: self.rng.u32(..8) == 0 }
    }

    fn allocate(&mut self, slot: usize) -> Operation {
        let backing = self.backing();
        self.backings[slot] = backing;
        let grains = match backing {
            Backing::TransparentHuge => 512,
            Backing::Hugetlb => 2,
            _ => self.grains(),
        };
        Operation::Allocate { slot, backing, grains }
    }

    fn send(&mut self, slot: usize) -> Operation {
        let (window, refill) = (self.window(slot), self.rng.bool());
        Operation::Send { slot, window, refill, port: self.port() }
    }

    fn register(&mut self) -> Operation {
        let (backing, grains) = (self.watched_backing(), self.grains());
        let mutation = self.mutation(backing);
        Operation::Register { backing, grains, mutation, pace: self.pace(), port: self.port() }
    }

    fn beside(&mut self) -> Operation {
        const TAIL: [Mutation; 4] = [
            Mutation::Discard(Part::Tail, Call::Library),
            Mutation::Discard(Part::Tail, Call::Raw),
            Mutation::Unmap(Part::Tail, Call::Library),
            Mutation::MapOver(Part::Tail),
        ];
        let (backing, grains) = (self.watched_backing(), 4 * self.grains());
        let mutation = TAIL[self.rng.usize(..TAIL.len())];
        Operation::Beside { backing, grains, mutation, pace: self.pace(), port: self.port() }
    }

    fn backing(&mut self) -> Backing {
        match self.rng.u32(..1000) {
            0..500 => Backing::Anonymous,
            // Cleared and filled, a huge page takes as long as tens of operations on small ones.
            500..510 => Backing::TransparentHuge,
            510..515 => Backing::Hugetlb,
            515..650 => Backing::SharedAnonymous,
            650..750 => Backing::MemfdShared,
            750..850 => Backing::MemfdPrivate,
            850..950 => Backing::FilePrivate,
            _ => Backing::SystemV,
        }
    }

    /// The kinds of memory that races are about: those that a monitor may let the cache keep.
    fn watched_backing(&mut self) -> Backing {
        const KINDS: [Backing; 4] = [
            Backing::Anonymous,
            Backing::Anonymous,
            Backing::SharedAnonymous,
            Backing::MemfdShared,
        ];
        KINDS[self.rng.usize(..KINDS.len())]
    }

    /// One that fits; one that forks, whose time grows with the process, seldom.
    fn mutation(&mut self, backing: Backing) -> Mutation {
        let forks = self.rng.u32(..16) == 0;
        let start = self.rng.usize(..Mutation::ALL.len());
        let turned = Mutation::ALL.iter().cycle().skip(start);
        let wanted = |m: &&Mutation| m.fits(backing) && (forks || !m.forks());
        let mut fitting = turned.take(Mutation::ALL.len()).filter(wanted);
        *fitting.next().unwrap_or(&Mutation::FailedUnmap)
    }

    /// Mostly small, up to 256 KiB of small pages.
    fn grains(&mut self) -> usize {
        let most = if self.is_large() { 7 } else { 4 };
        1 << self.rng.u32(..most)
    }

    /// Whether this time more bytes are moved than the many small ones together take.
    fn is_large(&mut self) -> bool {
        self.rng.u32(..16) == 0
    }

    /// All of the memory, or any part of it; of huge pages mostly a small part.
    fn window(&mut self, slot: usize) -> Window {
        let is_huge = self.backings[slot].alignment() > Backing::Anonymous.grain();
        let longest = if is_huge && !self.is_large() { u16::MAX >> 6 } else { u16::MAX };
        if longest == u16::MAX && self.rng.bool() {
            return Window { start: 0, length: u16::MAX };
        }
        Window { start: self.rng.u16(..), length: self.rng.u16(..=longest) }
    }

    /// A lagging race takes the time of several others.
    fn pace(&mut self) -> Pace {
        if self.rng.u32(..8) == 0 { Pace::Lagging } else { Pace::Free }
    }

    /// Mostly the roomy cache.
    fn port(&mut self) -> usize {
        self.rng.usize(..2 * PORTS).saturating_sub(PORTS)
    }
}

impl Iterator for Program {
    type Item = Operation;

    fn next(&mut self) -> Option<Operation> {
        Some(self.next_operation())
    }
}

/// The hash of Fowler, Noll and Vo, which every machine computes alike.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_program() {
        let first: Vec<_> = Program::new(7, 2).take(500).collect();
        let second: Vec<_> = Program::new(7, 2).take(500).collect();
        assert_eq!(first, second);
        assert_ne!(first, Program::new(8, 2).take(500).collect::<Vec<_>>());
        assert_ne!(first, Program::new(7, 3).take(500).collect::<Vec<_>>());
        assert_eq!(Program::digest(7, 4, 100), Program::digest(7, 4, 100));
        assert_ne!(Program::digest(7, 4, 100), Program::digest(8, 4, 100));
    }

    #[test]
    fn every_kind_of_operation_and_every_change_comes_up() {
        let mut kinds = std::collections::HashSet::new();
        let mut mutations = std::collections::HashSet::new();
        for operation in Program::new(1, 0).take(500_000) {
            kinds.insert(operation.kind());
            if let Operation::Change { mutation, .. } = operation {
                mutations.insert(mutation);
            }
        }
        assert_eq!(kinds.len(), 21);
        // All but the heap's, which a child does alone.
        assert_eq!(mutations.len(), Mutation::ALL.len() - 1);
    }

    #[test]
    fn a_change_fits_the_memory_it_is_for() {
        let mut backings = [None; SLOTS];
        for operation in Program::new(3, 1).take(5_000) {
            match operation {
                Operation::Allocate { slot, backing, .. } => backings[slot] = Some(backing),
                Operation::Change { slot, mutation } | Operation::Vouch { slot, mutation, .. } => {
                    assert!(mutation.fits(backings[slot].expect("allocated first")));
                }
                Operation::Register { backing, mutation, .. }
                | Operation::Beside { backing, mutation, .. } => assert!(mutation.fits(backing)),
                Operation::Arrive {
                    slot, arrival: Arrival { change: Some(change), .. }, ..
                } => {
                    assert!(change.fits(backings[slot].expect("allocated first")));
                }
                _ => {}
            }
        }
    }
}
