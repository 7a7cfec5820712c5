//! Whether a range has changed, for those that use a cache's monitor for memory which the cache does not hold.

use crate::AddressRange;
use crate::cache::Cache;
use crate::foreign::ForeignPart;
use crate::monitor::{ChangeMark, Monitor, Sequence};
use crate::registrar::Registrar;
use crate::shared::{Shared, Writer};
use crate::sync::thread;
use std::fmt;
use std::time::{Duration, Instant};

/// How long a thread that has lost its processor as it notes a change is awaited, where the calling thread leaves it one...
const PATIENCE: Duration = Duration::from_millis(20);

/// ...and how often at least is looked whether it has noted it: other threads may have the processor for long.
const LOOKS: u32 = 100;

/// How many entries may be read again meanwhile. Each is a change for all that is registered, too.
const MOST_AGAIN: u64 = 4096;

/// A range whose changes are noted. Ended when it is dropped.
///
/// The monitor must watch the range as long.
pub struct Followed<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    range: AddressRange,
    notes: Notes<'c>,
}

/// Where changes are noted.
enum Notes<'c> {
    /// By the monitor, as it logs them.
    Marked(ForeignPart<Box<dyn ChangeMark + 'c>>),
    /// By this number, as the cache reads its monitor's log: with each call that finds something new there, and on the
    /// reclaimer's thread.
    Read(u32),
}

impl<'c, R: Registrar, M: Monitor> Followed<'c, R, M> {
    /// From now on. A change is left out that is in the log already: one that took effect before the monitor's last
    /// check returned.
    ///
    /// `None` in a forked child, where more are followed than can be counted, and where the log may go on to tell again what
    /// it has told: a thread stands still as it notes a change, or did when the monitor was lost.
    pub fn begin(cache: &'c Cache<R, M>, range: AddressRange) -> Option<Self> {
        let shared = &*cache.shared;
        let add = |writer: &mut Writer| match writer.followed.may_repeat() {
            false => Ok(writer.followed.insert(range)),
            true => Err((writer.replayed, writer.counts.events)),
        };
        let (began, mut at_first) = (Instant::now(), None);
        loop {
            let (read, told) = match shared.behind_log(add).ok()? {
                Ok(number) => return Some(Self { shared, range, notes: Notes::Read(number?) }),
                Err(so_far) => so_far,
            };
            let again = told - *at_first.get_or_insert(told);
            if again > MOST_AGAIN || !is_appended(shared, read, began) {
                return None;
            }
        }
    }

    /// As [`begin`](Self::begin), with one of the monitor's marks, of which there are few: what is known does not depend on
    /// how soon the log is read. Where the monitor has none left, the log must do.
    pub fn begin_marked(cache: &'c Cache<R, M>, range: AddressRange) -> Option<Self> {
        let shared = &*cache.shared;
        if shared.is_forked() {
            return None;
        }
        let Some(mark) = shared.monitor.mark_changes(range) else {
            return Self::begin(cache, range);
        };
        Some(Self { shared, range, notes: Notes::Marked(ForeignPart::new(mark)) })
    }

    /// The range.
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// Whether a change was reported that took effect before this call; `None` if that is unknown: the monitor is
    /// lost, or this is a forked child, or, where the range has no mark, entries of the log were overwritten that the
    /// cache had not read, or one says that everything may have changed. Where it has one, a change counts whose call has
    /// returned.
    pub fn has_changed(&self) -> Option<bool> {
        let sees_all = self.shared.ask(false).sees_all();
        let changed = match &self.notes {
            Notes::Marked(mark) => (!self.shared.is_forked()).then(|| mark.is_set()),
            Notes::Read(number) => {
                let known = self.shared.behind_log(|writer| writer.followed.has_changed(*number));
                known.ok().flatten()
            }
        };
        changed.filter(|&changed| changed || sees_all)
    }
}

/// Whether more stands in the log than was `read`. To read it again before would tell the same again. Of a monitor that is lost
/// that is not known.
fn is_appended<R: Registrar, M: Monitor>(
    shared: &Shared<R, M>,
    read: Sequence,
    began: Instant,
) -> bool {
    let mut looks = 0;
    loop {
        match shared.monitor.check() {
            Ok(now) if now == read => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
        if looks > LOOKS && began.elapsed() > PATIENCE {
            return false;
        }
        looks += 1;
        thread::yield_now();
    }
}

impl<R: Registrar, M: Monitor> Drop for Followed<'_, R, M> {
    fn drop(&mut self) {
        if let Notes::Read(number) = self.notes {
            // In a forked child it is the parent's.
            let _forked = self.shared.locked(|writer| writer.followed.remove(number));
        }
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for Followed<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Followed").field("range", &self.range).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;
    use crate::fake::{Fake, FakeDevice, FakeMonitor};
    use crate::monitor::{Lost, Position, Replay, Sequence};
    use crate::registrar::{DeregisterError, RegisterError};
    use crate::{Access, Config};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    struct Nothing;

    type Device = Fake<Nothing>;

    impl FakeDevice for Nothing {
        type Handle = ();

        fn register(&self, _: AddressRange, _: Access) -> Result<(), RegisterError> {
            Ok(())
        }

        fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
            Ok(())
        }
    }

    /// What a test says changed.
    #[derive(Default)]
    struct Changes {
        changes: Mutex<Vec<AddressRange>>,
        marks_left: AtomicUsize,
        is_child: AtomicBool,
    }

    impl Changes {
        fn changed(&self, range: AddressRange) {
            self.changes.lock().unwrap().push(range);
        }

        fn len(&self) -> usize {
            self.changes.lock().unwrap().len()
        }

        /// Those behind the first `from`.
        fn since(&self, from: usize) -> Vec<AddressRange> {
            self.changes.lock().unwrap()[from..].to_vec()
        }
    }

    struct Mark<'l>(&'l Changes, AddressRange, usize);

    impl ChangeMark for Mark<'_> {
        fn is_set(&self) -> bool {
            let Self(log, range, from) = *self;
            log.since(from).iter().any(|change| change.overlaps(&range))
        }
    }

    type Log = Fake<Changes>;

    impl FakeMonitor for Changes {
        fn check(&self) -> Result<Sequence, Lost> {
            if self.forked() { Err(Lost::Forked) } else { Ok(Sequence(self.len() as u64)) }
        }

        fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
            let from = if from == Position::NOWHERE { 0 } else { from.0 };
            self.since(usize::try_from(from).unwrap()).into_iter().for_each(visit);
            let end = self.len() as u64;
            let (up_to, sequence) = (Position(end, 0), Sequence(end));
            Replay { up_to, sequence, complete: true, may_repeat: false }
        }

        fn mark_changes(&self, range: AddressRange) -> Option<Box<dyn ChangeMark + '_>> {
            let less = |left: usize| left.checked_sub(1);
            self.marks_left.fetch_update(SeqCst, SeqCst, less).ok()?;
            Some(Box::new(Mark(self, range, self.len())))
        }

        fn forked(&self) -> bool {
            self.is_child.load(SeqCst)
        }
    }

    fn page(number: usize) -> AddressRange {
        AddressRange::new(0x7000_0000 + number * 4096, 4096).unwrap()
    }

    /// Whose monitor has so many marks.
    fn cache(marks: usize) -> Cache<Device, Log> {
        let log = Fake(Changes { marks_left: marks.into(), ..Changes::default() });
        Cache::new(Fake(Nothing), log, Config::default()).unwrap()
    }

    #[test]
    fn a_range_is_marked_by_the_monitor_or_where_that_has_no_mark_left_as_the_log_is_read() {
        let cache = cache(1);
        cache.monitor().changed(page(7));
        let followed = [0; 2].map(|_| Followed::begin_marked(&cache, page(7)).unwrap());
        assert!(matches!(followed[0].notes, Notes::Marked(_)));
        assert!(matches!(followed[1].notes, Notes::Read(_)));
        let answers = || followed.each_ref().map(Followed::has_changed);
        cache.monitor().changed(page(8));
        assert_eq!(answers(), [Some(false); 2]);
        cache.monitor().changed(page(7));
        assert_eq!(answers(), [Some(true); 2]);
    }

    #[test]
    fn a_forked_child_follows_nothing_and_knows_of_no_change() {
        let cache = cache(2);
        let followed = [Followed::begin(&cache, page(7)), Followed::begin_marked(&cache, page(7))];
        cache.monitor().changed(page(7));
        cache.monitor().is_child.store(true, SeqCst);
        assert_eq!(followed.map(|it| it.unwrap().has_changed()), [None; 2]);
        assert!(Followed::begin(&cache, page(7)).is_none());
        assert!(Followed::begin_marked(&cache, page(7)).is_none());
    }

    #[test]
    fn what_is_dropped_is_followed_no_longer() {
        let cache = cache(0);
        let follows = || cache.shared.locked(|writer| writer.followed.has_unchanged()).unwrap();
        let followed = Followed::begin(&cache, page(7)).unwrap();
        assert!(follows());
        drop(followed);
        assert!(!follows());
    }
}
