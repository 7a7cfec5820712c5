//! Two logs as one: a monitor's and one that any thread writes, not told apart by a thread that only compares
//! a word.
//!
//! A hit compares one word for equality, so two words have to become one of which equality says
//! as much. Theirs is their *sum*. Neither ever decreases, so if both pairs were true at one instant
//! each, one pair is nowhere smaller than the other, and equal sums are equal pairs. (Sums of words that were
//! not true at one instant prove nothing: one more here and one less there make the same sum.)
//!
//! A pair is true at one instant if the second word is the same before and after the first is read.
//! If it never keeps still for so long, the answer is [`Sequence::UNKNOWN`], which no cache has
//! applied, and every thread looks at the logs, under the cache's lock.
//!
//! # "At one instant", in terms of the memory model
//!
//! Let two readers, *A* and *B*, each load the second word, pass a fence, read the first, pass
//! a fence, and load the second again, to the same result. Claim: not *A*'s first word is newer and *B*'s
//! second. Otherwise *B*'s reading of the first word comes before *A*'s in the coherence order of
//! that word, so the fence before *B*'s comes before the fence behind *A*'s in the one order of all
//! SeqCst fences; and *A*'s last load of the second word comes before *B*'s first one, so the
//! fence behind *A*'s first word comes before the fence before *B*'s. That is a circle.

use crate::AddressRange;
use crate::change_log::ChangeLog;
use crate::monitor::{Lost, Monitor, Position, Replay, Sequence};
use crate::sync::{Ordering, fence};

/// How often the second word may move under a reader. Moving takes the mover as long as a try.
const TRIES: usize = 8;

/// What [`Monitor::check`] answers for `monitor` and `log` together.
///
/// # Errors
///
/// [`Lost`] when the monitor is.
#[inline]
pub fn check<M: Monitor, const ENTRIES: usize>(
    monitor: &M,
    log: &ChangeLog<ENTRIES>,
) -> Result<Sequence, Lost> {
    let mut before = log.word();
    for _ in 0..TRIES {
        // SeqCst fences, two: see the file's claim.
        fence(Ordering::SeqCst);
        let sequence = monitor.check()?;
        fence(Ordering::SeqCst);
        let after = log.word();
        if before == after {
            return Ok(together(sequence, after));
        }
        before = after;
    }
    Ok(Sequence::UNKNOWN)
}

/// What [`Monitor::replay`] answers for `monitor`, whose place is the first word, and `log`, whose
/// place is the second.
pub fn replay<M: Monitor, const ENTRIES: usize>(
    monitor: &M,
    log: &ChangeLog<ENTRIES>,
    from: Position,
    visit: &mut dyn FnMut(AddressRange),
) -> Replay {
    let Position(mut first, mut second) = from;
    let mut sequence = Sequence::STALE;
    let mut complete = true;
    for _ in 0..TRIES {
        let before = log.word();
        // SeqCst fences, two: as in `check`, because this pair is compared with those.
        fence(Ordering::SeqCst);
        let replay = monitor.replay(Position(first, 0), visit);
        fence(Ordering::SeqCst);
        let told = log.replay(second, visit);
        complete &= replay.complete && told.complete;
        (first, second) = (replay.up_to.0, told.up_to);
        if before == told.word {
            sequence = together(replay.sequence, told.word);
            break;
        }
    }
    Replay { up_to: Position(first, second), sequence, complete }
}

/// One word for two that were true at one instant.
fn together(Sequence(first): Sequence, second: u64) -> Sequence {
    match first.checked_add(second) {
        Some(sum) if first < Sequence::STALE.0 && sum < Sequence::STALE.0 => Sequence(sum),
        // One of the two says that it cannot tell.
        _ => Sequence(first.max(Sequence::STALE.0)),
    }
}
