//! A region made huge while it is in use: one huge page's worth is suspended at a time.

use super::RearrangeError;
use super::beside::HugePageWay;
use super::collapse::Obstacle;
use super::huge::{Defragmented, Plan};
use super::pages::ResidentPages;
use crate::AddressRange;
use pinfold_core::foreign::{ForeignList, HandedOver};
use pinfold_core::{
    Cache, ConnectionLost, Ended, Expired, Keys, Lease, Monitor, NotSuspended, RegisterError,
    Suspend, SuspendProgress, Suspended, SuspensionTerms, Why,
};
use std::fmt;
use std::time::{Duration, Instant};

/// What became of a region that was made huge in steps, and the leases that were handed over.
pub struct Stepped<'c, R: Suspend, M: Monitor> {
    /// What became of the memory.
    pub defragmented: Defragmented,
    /// How many suspensions there were.
    pub suspensions: usize,
    /// The longest of them, from when gets were held back to when they went on.
    pub longest: Duration,
    /// Whether what the leases are known by is as before.
    pub keys: Keys,
    /// The leases, in the order in which they were handed over.
    pub leases: Vec<Result<Lease<'c, R, M>, LeaseEnded>>,
    /// Connections that died meanwhile, besides those that [`StoppedBy::NotSuspended`] names.
    pub lost: Vec<(R::Connection, ConnectionLost)>,
    /// Connections that were failed in the open, because a suspension was overdue, besides the same.
    pub failed: Vec<R::Connection>,
}

/// Why a lease that was handed over does not come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LeaseEnded {
    /// Its memory could not be registered any more.
    #[error("{0}")]
    NotRegistered(RegisterError),
    /// A suspension was overdue, and a thread ended it; or this process is a forked child.
    #[error("it ended with its suspension, which was overdue")]
    WithSuspension,
}

/// A region was not made huge to its end. What is huge stays so; everything goes on, but what this names.
#[derive(thiserror::Error)]
#[error("after {} bytes were made huge: {why}", .done.defragmented.made)]
pub struct Stopped<'c, R: Suspend, M: Monitor> {
    /// Why.
    pub why: StoppedBy<R::Connection>,
    /// What was done until then.
    pub done: Stepped<'c, R, M>,
}

/// Why a region was not made huge to its end.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoppedBy<C> {
    /// A part could not be suspended.
    #[error("{range} was not suspended: {why}")]
    NotSuspended {
        /// The part.
        range: AddressRange,
        /// Why not.
        why: Why<C>,
    },
    /// Nothing could be tried, or a suspension ended before its time.
    #[error("{0}")]
    Rearrange(RearrangeError),
}

/// Puts `range` into huge pages while it is in use, as far as it goes.
///
/// One block of a huge page's size is suspended at a time, with `terms` each: gets that touch it
/// wait, the others go on. Behind each block it rests for as long as that took: the kernel's lock of the
/// process's mappings, which moving pages takes and registering takes too, is not fair, and a thread that
/// took it over and over would keep others waiting for milliseconds.
///
/// `connections` are all that can touch the range; `leases` those that do not end by themselves, and are to
/// come back. A registration that reaches beyond the block and that no lease handed over keeps is
/// given up, so that gets of other blocks register what they need; get the whole range once when
/// this is done, and it is registered as one again.
///
/// # Errors
///
/// [`Stopped`], which says why, and what was done until then.
pub fn defragment_in_steps<'c, R: Suspend, M: Monitor>(
    cache: &'c Cache<R, M>,
    range: AddressRange,
    connections: &[R::Connection],
    leases: Vec<Lease<'c, R, M>>,
    terms: SuspensionTerms,
    way: HugePageWay,
) -> Result<Stepped<'c, R, M>, Box<Stopped<'c, R, M>>> {
    let begun = Instant::now();
    let mut steps = Steps::new(cache, connections, leases, terms);
    let outcome = steps.run(range, way);
    let Steps { mut done, leases, lost, failed, .. } = steps;
    done.defragmented.left.sort_by_key(|(part, _)| part.start());
    done.defragmented.after = ResidentPages::of(range);
    done.defragmented.elapsed = begun.elapsed();
    (done.leases, done.lost) = (leases.into_vec(), lost.into_vec());
    done.failed = failed.into_vec();
    match outcome {
        Ok(()) => Ok(done),
        Err(why) => Err(Box::new(Stopped { why, done })),
    }
}

struct Steps<'c, 'a, R: Suspend, M: Monitor> {
    cache: &'c Cache<R, M>,
    connections: &'a [R::Connection],
    terms: SuspensionTerms,
    done: Stepped<'c, R, M>,
    /// Until all is done, or cannot be.
    leases: HandedOver<Result<Lease<'c, R, M>, LeaseEnded>>,
    /// As long.
    lost: ForeignList<(R::Connection, ConnectionLost)>,
    /// As long.
    failed: ForeignList<R::Connection>,
}

type Stop<R> = StoppedBy<<R as Suspend>::Connection>;

impl<'c, 'a, R: Suspend, M: Monitor> Steps<'c, 'a, R, M> {
    fn new(
        cache: &'c Cache<R, M>,
        connections: &'a [R::Connection],
        leases: Vec<Lease<'c, R, M>>,
        terms: SuspensionTerms,
    ) -> Self {
        let done = Stepped {
            defragmented: Defragmented::default(),
            suspensions: 0,
            longest: Duration::ZERO,
            keys: Keys::Same,
            leases: Vec::new(),
            lost: Vec::new(),
            failed: Vec::new(),
        };
        let leases = HandedOver::new(leases.into_iter().map(Ok).collect());
        let (lost, failed) = (ForeignList::default(), ForeignList::default());
        Self { cache, connections, terms, done, leases, lost, failed }
    }

    #[allow(clippy::result_large_err)] // made once, as everything ends
    fn run(&mut self, range: AddressRange, way: HugePageWay) -> Result<(), Stop<R>> {
        let (mut plan, report) = Plan::new(range, way).map_err(StoppedBy::Rearrange)?;
        self.done.defragmented = report;
        let mut blocks = plan.take_blocks().peekable();
        while let Some(block) = blocks.next() {
            if !plan.is_to_be_made(block, &mut self.done.defragmented) {
                continue;
            }
            let begun = Instant::now();
            let outcome = match plan.tool.prepare(block) {
                Ok(()) => self.step(block, &mut plan)?,
                refused => refused,
            };
            self.done.defragmented.note(block, outcome);
            if blocks.peek().is_some() {
                std::thread::sleep(begun.elapsed());
            }
        }
        Ok(())
    }

    /// One suspension.
    #[allow(clippy::result_large_err)] // as in `run`
    fn step(
        &mut self,
        block: AddressRange,
        plan: &mut Plan,
    ) -> Result<Result<(), Obstacle>, Stop<R>> {
        // Before any `get` has to wait: most of what is registered there is idle.
        self.cache.evict_idle_in(block);
        let (places, leases) = self.take_leases(block);
        let suspended = match self.suspend(block, leases) {
            Ok(suspended) => suspended,
            Err(refused) => {
                let NotSuspended { why, leases, keys } = *refused;
                self.put_back(&places, leases, keys);
                return Err(StoppedBy::NotSuspended { range: block, why });
            }
        };
        let checked = super::check(&suspended);
        let outcome = checked.map(|()| plan.tool.switch(block));
        // Also where it has expired: that names the connections.
        let resumed = match suspended.resume() {
            Ok(resumed) => resumed,
            Err(ended) => {
                // What was done to the memory was done.
                outcome.into_iter().for_each(|done| self.done.defragmented.note(block, done));
                return Err(self.stopped_by(ended));
            }
        };
        self.done.suspensions += 1;
        self.done.longest = self.done.longest.max(resumed.paused);
        self.lost.extend(resumed.lost);
        self.put_back(&places, resumed.leases, resumed.keys);
        outcome.map_err(StoppedBy::Rearrange)
    }

    fn stopped_by(&mut self, ended: Expired<R::Connection>) -> Stop<R> {
        self.lost.extend(ended.lost);
        self.failed.extend(ended.failed);
        StoppedBy::Rearrange(match ended.reason {
            Ended::Forked => RearrangeError::Forked,
            _ => RearrangeError::Expired,
        })
    }

    /// The leases whose registrations touch `block`, and their places. Those that do not come
    /// back have ended with their suspension.
    fn take_leases(&mut self, block: AddressRange) -> (Vec<usize>, HandedOver<Lease<'c, R, M>>) {
        let touches = |slot: &Result<Lease<'c, R, M>, LeaseEnded>| {
            slot.as_ref().is_ok_and(|lease| lease.registered().overlaps(&block))
        };
        let slots = self.leases.iter_mut().enumerate();
        let taken = slots.filter_map(|(place, slot)| {
            let taken =
                touches(slot).then(|| std::mem::replace(slot, Err(LeaseEnded::WithSuspension)));
            Some((place, taken?.ok()?))
        });
        let (places, leases) = taken.unzip();
        (places, HandedOver::new(leases))
    }

    fn put_back(
        &mut self,
        places: &[usize],
        leases: Vec<Result<Lease<'c, R, M>, RegisterError>>,
        keys: Keys,
    ) {
        if keys == Keys::Changed {
            self.done.keys = keys;
        }
        for (&place, lease) in places.iter().zip(leases) {
            self.leases[place] = lease.map_err(LeaseEnded::NotRegistered);
        }
    }

    /// As [`Cache::suspend`], with less of a wait at first: what is in flight ends within
    /// microseconds, if it ends soon.
    fn suspend(
        &self,
        block: AddressRange,
        leases: HandedOver<Lease<'c, R, M>>,
    ) -> Result<Suspended<'c, R, M>, Box<NotSuspended<'c, R, M>>> {
        let connections = ForeignList::copies_of(self.connections).into_vec();
        let leases = leases.into_vec();
        let mut suspending = self.cache.begin_suspension(block, connections, leases, self.terms)?;
        let mut round = 0_usize;
        loop {
            match suspending.poll()? {
                SuspendProgress::Suspended(suspended) => return Ok(suspended),
                SuspendProgress::Pending(pending, _) => suspending = pending,
            }
            wait(round);
            round = round.saturating_add(1);
        }
    }
}

fn wait(round: usize) {
    const BRIEF: usize = 200;
    if round < BRIEF {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(50));
    }
}

impl<R: Suspend, M: Monitor> fmt::Debug for Stepped<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stepped")
            .field("defragmented", &self.defragmented)
            .field("suspensions", &self.suspensions)
            .field("longest", &self.longest)
            .field("keys", &self.keys)
            .field("lost", &self.lost)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl<R: Suspend, M: Monitor> fmt::Debug for Stopped<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stopped").field("why", &self.why).field("done", &self.done).finish()
    }
}
