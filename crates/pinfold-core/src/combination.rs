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

/// What [`Monitor::replay_some`] answers for `monitor`, whose place is the first word, and `log`, whose
/// place is the second.
pub fn replay<M: Monitor, const ENTRIES: usize>(
    monitor: &M,
    log: &ChangeLog<ENTRIES>,
    from: Position,
    most: usize,
    visit: &mut dyn FnMut(AddressRange),
) -> Replay {
    let Position(mut first, mut second) = from;
    let mut sequence = Sequence::STALE;
    let (mut complete, mut may_repeat) = (true, false);
    for _ in 0..TRIES {
        let before = log.word();
        // SeqCst fences, two: as in `check`, because this pair is compared with those.
        fence(Ordering::SeqCst);
        let replay = monitor.replay_some(Position(first, 0), most, visit);
        fence(Ordering::SeqCst);
        let told = log.replay(second, most, visit);
        complete &= replay.complete && told.complete;
        // Of what the last round ended before, earlier ones did, too.
        may_repeat = replay.may_repeat || told.may_repeat;
        (first, second) = (replay.up_to.0, told.up_to);
        if replay.sequence == Sequence::CUT || told.is_cut {
            sequence = Sequence::CUT;
            break;
        }
        if before == told.word {
            sequence = together(replay.sequence, told.word);
            break;
        }
    }
    Replay { up_to: Position(first, second), sequence, complete, may_repeat }
}

/// One word for two that were true at one instant.
fn together(Sequence(first): Sequence, second: u64) -> Sequence {
    match first.checked_add(second) {
        // The first is no greater.
        Some(sum) if sum < Sequence::CUT.0 => Sequence(sum),
        // One of the two says that it cannot tell.
        _ => Sequence(first.max(Sequence::STALE.0)),
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;
    use crate::fake::{Fake, FakeMonitor};
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::{Arc, Mutex};

    type Log = ChangeLog<16>;

    /// Answers as a test wants it to, and an entry of the log comes amid each of its next so many calls.
    struct Script {
        check: Result<Sequence, Lost>,
        /// In the order of the calls. Behind the last it has nothing new.
        replays: Mutex<Vec<Replay>>,
        log: Arc<Log>,
        appends: AtomicUsize,
    }

    type Scripted = Fake<Script>;

    impl Scripted {
        fn new(check: Result<Sequence, Lost>, replays: &[Replay]) -> Self {
            let replays = Mutex::new(replays.iter().rev().copied().collect());
            let (log, appends) = (Arc::new(Log::new()), AtomicUsize::new(0));
            Self(Script { check, replays, log, appends })
        }

        fn append_amid(self, calls: usize) -> Self {
            self.appends.store(calls, SeqCst);
            self
        }

        fn check_both(&self) -> Result<Sequence, Lost> {
            check(self, &self.log)
        }

        /// From the first entry of each log on, `most` of them.
        fn replay_both(&self, most: usize) -> Replay {
            replay(self, &self.log, Position(0, 0), most, &mut |_| {})
        }
    }

    impl Script {
        fn call(&self) {
            let less = |left: usize| left.checked_sub(1);
            if self.appends.fetch_update(SeqCst, SeqCst, less).is_ok() {
                self.log.append(AddressRange::EVERYTHING);
            }
        }
    }

    impl FakeMonitor for Script {
        fn check(&self) -> Result<Sequence, Lost> {
            self.call();
            self.check
        }

        fn replay(&self, from: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
            self.call();
            let nothing_new = told(from.0, Sequence(from.0));
            self.replays.lock().unwrap().pop().unwrap_or(nothing_new)
        }
    }

    /// Of a replay that told everything up to `place`.
    fn told(place: u64, sequence: Sequence) -> Replay {
        Replay { up_to: Position(place, 0), sequence, complete: true, may_repeat: false }
    }

    #[test]
    fn the_sum_is_of_a_second_word_that_kept_still() {
        let answer =
            |appends| Scripted::new(Ok(Sequence(5)), &[]).append_amid(appends).check_both();
        assert_eq!(answer(0), Ok(Sequence(5)));
        assert_eq!(answer(2), Ok(Sequence(7)));
        assert_eq!(answer(TRIES - 1), Ok(Sequence(5 + TRIES as u64 - 1)));
        assert_eq!(answer(TRIES), Ok(Sequence::UNKNOWN), "it never kept still");
        assert_eq!(Scripted::new(Err(Lost::Forked), &[]).check_both(), Err(Lost::Forked));
    }

    #[test]
    fn a_sum_is_none_of_the_words_that_say_nothing() {
        let last = Sequence::CUT.0 - 1;
        assert_eq!(together(Sequence(last - 3), 3), Sequence(last));
        for (first, second) in [(last - 3, 4), (last, 1), (last, 4), (Sequence::CUT.0, 0)] {
            assert_eq!(together(Sequence(first), second), Sequence::STALE);
        }
        assert_eq!(together(Sequence::STALE, 0), Sequence::STALE);
        assert_eq!(together(Sequence::UNKNOWN, 0), Sequence::UNKNOWN);
    }

    #[test]
    fn a_replay_goes_on_until_the_second_word_keeps_still() {
        let replays = [told(3, Sequence(3)), told(4, Sequence(4))];
        let both = Scripted::new(Ok(Sequence(4)), &replays).append_amid(1);
        let expected = Replay { up_to: Position(4, 1), ..told(4, Sequence(5)) };
        assert_eq!(both.replay_both(usize::MAX), expected);
        assert_eq!(both.check_both(), Ok(expected.sequence), "nothing new since");
        let restless = Scripted::new(Ok(Sequence(3)), &replays[..1]).append_amid(TRIES);
        let expected = Replay { up_to: Position(3, TRIES as u64), ..told(3, Sequence::STALE) };
        assert_eq!(restless.replay_both(usize::MAX), expected);
    }

    #[test]
    fn a_replay_is_complete_if_both_were_each_time() {
        let gone = Replay { complete: false, ..told(3, Sequence(3)) };
        let first_gone = Scripted::new(Ok(Sequence(3)), &[gone]).append_amid(1);
        assert!(!first_gone.replay_both(usize::MAX).complete, "the first time it was not");
        let second_gone = Scripted::new(Ok(Sequence(0)), &[]);
        (0..17).for_each(|_| second_gone.log.append(AddressRange::EVERYTHING));
        let expected = Replay { up_to: Position(0, 17), complete: false, ..told(0, Sequence(17)) };
        assert_eq!(second_gone.replay_both(usize::MAX), expected);
    }

    /// And is not to be taken for everything.
    #[test]
    fn a_replay_ends_where_that_of_either_log_was_cut() {
        let first_cut =
            Scripted::new(Ok(Sequence(9)), &[told(2, Sequence::CUT), told(4, Sequence(4))]);
        assert_eq!(first_cut.replay_both(2), told(2, Sequence::CUT));
        let second_cut = Scripted::new(Ok(Sequence(0)), &[]);
        (0..3).for_each(|_| second_cut.log.append(AddressRange::EVERYTHING));
        let expected = Replay { up_to: Position(0, 2), ..told(0, Sequence::CUT) };
        assert_eq!(second_cut.replay_both(2), expected);
    }

    #[test]
    fn what_may_come_again_is_what_either_log_may_tell_again() {
        let before_hole = Replay { may_repeat: true, ..told(3, Sequence(3)) };
        let first_repeats = Scripted::new(Ok(Sequence(3)), &[before_hole]);
        assert_eq!(first_repeats.replay_both(usize::MAX), before_hole);
        let second_repeats = Scripted::new(Ok(Sequence(0)), &[]);
        second_repeats.log.begin_for_ever();
        let expected = Replay { may_repeat: true, ..told(0, Sequence(0)) };
        assert_eq!(second_repeats.replay_both(usize::MAX), expected);
        let filled_since =
            Scripted::new(Ok(Sequence(4)), &[before_hole, told(4, Sequence(4))]).append_amid(1);
        assert!(
            !filled_since.replay_both(usize::MAX).may_repeat,
            "what stood behind it has come again"
        );
    }
}
