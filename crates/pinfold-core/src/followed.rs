//! Whether a range has changed, for those that use a cache's monitor for memory which the cache does not hold.

use crate::AddressRange;
use crate::cache::Cache;
use crate::foreign::ForeignPart;
use crate::monitor::{ChangeMark, Monitor};
use crate::registrar::Registrar;
use crate::shared::Shared;
use std::fmt;

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
    /// `None` in a forked child, and where more are followed than can be counted.
    pub fn begin(cache: &'c Cache<R, M>, range: AddressRange) -> Option<Self> {
        let shared = &*cache.shared;
        let number = shared.locked(|writer| {
            shared.follow_log(writer);
            writer.followed.insert(range)
        });
        let notes = Notes::Read(number.ok().flatten()?);
        Some(Self { shared, range, notes })
    }

    /// As [`begin`](Self::begin), with one of the monitor's marks, of which there are few: what is known does not depend on
    /// how soon the log is read. Where the monitor has none left, the log must do.
    pub fn begin_marked(cache: &'c Cache<R, M>, range: AddressRange) -> Option<Self> {
        let shared = &*cache.shared;
        if shared.monitor.forked() {
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
            Notes::Marked(mark) => (!self.shared.monitor.forked()).then(|| mark.is_set()),
            Notes::Read(number) => {
                let known = self.shared.locked(|writer| {
                    self.shared.follow_log(writer);
                    writer.followed.has_changed(*number)
                });
                known.ok().flatten()
            }
        };
        changed.filter(|&changed| changed || sees_all)
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
