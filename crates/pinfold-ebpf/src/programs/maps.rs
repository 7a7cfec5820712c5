//! The maps that the programs use, and the table of views in them.

use super::error::{ProgramsError, ViewError};
use super::kernel::OFFSETS;
#[cfg(feature = "instrument")]
use super::kernel::VEIL_WORDS;
use super::object::Target;
use super::sys::{self, Errno, Kind, Map, Put, Shape, Words, flag};
use crate::layout::{Changes, WatchFilter};
use crate::{View, ViewId, ViewParts};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

/// How many views there can be.
pub(super) const MOST_VIEWS: usize = 1024;
/// How many views one process can have, as in `bpf/changes.h`.
pub(super) const VIEWS_PER_PROCESS: usize = 2;
/// As in `bpf/changes.h`.
const FILTER_BITS: u32 = 12;
/// How many views whose processes ended are closed for each that is opened: more than one, so that they do
/// not gather, and few, because each takes the kernel some tens of milliseconds, and the thread that opens one waits.
const SWEPT_AT_ONCE: usize = 2;
/// The smallest ring buffer there is.
const BELL_BYTES: u32 = 4096;

/// A view's number among the programs.
pub(super) type Number = u32;

#[derive(Debug)]
pub(super) struct Maps {
    watched: Map,
    changes: Map,
    wishes: Map,
    wakeups_by_view: Map,
    filter: Map,
    filter_words: Words,
    offsets: Map,
    setting_reads: Map,
    setting_reads_word: Words,
    /// What each number stands for.
    views: Vec<Option<Open>>,
    /// How many views were ever opened.
    opened: u64,
}

#[derive(Debug)]
struct Open {
    id: ViewId,
    mm: u64,
    /// Until they are given away.
    parts: Option<Parts>,
}

/// The maps of one view.
#[derive(Debug)]
struct Parts {
    changes: Map,
    wishes: Map,
    wakeups: Map,
}

impl Parts {
    fn new() -> Result<Self, Errno> {
        let changes = array::<Changes>(c"pinfold_changes")?;
        // From now on only programs change it: its holders can map it for reading alone. (A
        // descriptor that can only be read from cannot be mapped at all.)
        changes.freeze()?;
        Ok(Self {
            changes,
            wishes: array::<WatchFilter>(c"pinfold_wishes")?,
            wakeups: Map::new(
                c"pinfold_bell",
                Shape {
                    kind: Kind::RingBuffer,
                    key_bytes: 0,
                    value_bytes: 0,
                    elements: BELL_BYTES,
                    flags: 0,
                },
                None,
            )?,
        })
    }
}

fn array<T>(name: &std::ffi::CStr) -> Result<Map, Errno> {
    one_value(name, size_of::<T>(), flag::MAPPABLE)
}

pub(super) fn one_value(name: &std::ffi::CStr, bytes: usize, flags: u32) -> Result<Map, Errno> {
    let value_bytes = u32::try_from(bytes).map_err(|_| Errno(libc::E2BIG))?;
    let shape = Shape { kind: Kind::Array, key_bytes: 4, value_bytes, elements: 1, flags };
    Map::new(name, shape, None)
}

/// A map from the numbers of views to maps like `inner`.
fn by_number(name: &std::ffi::CStr, inner: &Map) -> Result<Map, Errno> {
    let elements = u32::try_from(MOST_VIEWS).map_err(|_| Errno(libc::E2BIG))?;
    let shape = Shape { kind: Kind::ArrayOfMaps, key_bytes: 4, value_bytes: 4, elements, flags: 0 };
    Map::new(name, shape, Some(inner))
}

/// Creating the first map tells whether we may do any of this.
pub(super) fn first_refusal(Errno(errno): Errno) -> ProgramsError {
    match errno {
        libc::EPERM => ProgramsError::NotPermitted { errno },
        errno => ProgramsError::Os { operation: "bpf(BPF_MAP_CREATE)", errno },
    }
}

impl Maps {
    pub(super) fn new(offsets: &[u64; OFFSETS]) -> Result<Self, ProgramsError> {
        Self::make(offsets).map_err(first_refusal)
    }

    fn make(offsets: &[u64; OFFSETS]) -> Result<Self, Errno> {
        let like = Parts::new()?;
        let elements = u32::try_from(MOST_VIEWS).map_err(|_| Errno(libc::E2BIG))?;
        let value_bytes = size_of::<[Number; VIEWS_PER_PROCESS]>();
        let value_bytes = u32::try_from(value_bytes).map_err(|_| Errno(libc::E2BIG))?;
        let watched = Shape { kind: Kind::Hash, key_bytes: 8, value_bytes, elements, flags: 0 };
        let filter = one_value(c"pinfold_filter", 4 << FILTER_BITS, flag::MAPPABLE)?;
        let setting_reads = one_value(c"pinfold_reads", 4, flag::MAPPABLE)?;
        Ok(Self {
            watched: Map::new(c"pinfold_watched", watched, None)?,
            changes: by_number(c"pinfold_changes", &like.changes)?,
            wishes: by_number(c"pinfold_wishes", &like.wishes)?,
            wakeups_by_view: by_number(c"pinfold_bells", &like.wakeups)?,
            filter_words: Words::of(&filter)?,
            filter,
            offsets: constants(offsets)?,
            setting_reads_word: Words::of(&setting_reads)?,
            setting_reads,
            views: (0..MOST_VIEWS).map(|_| None).collect(),
            opened: 0,
        })
    }

    /// What the symbols of the object stand for.
    pub(super) fn targets(&self) -> HashMap<&'static str, Target> {
        HashMap::from([
            ("watched", Target::Map(self.watched.as_raw_fd())),
            ("changes", Target::Map(self.changes.as_raw_fd())),
            ("wishes", Target::Map(self.wishes.as_raw_fd())),
            ("bells", Target::Map(self.wakeups_by_view.as_raw_fd())),
            ("filter", Target::ValueOf(self.filter.as_raw_fd())),
            ("offsets", Target::ValueOf(self.offsets.as_raw_fd())),
            ("setting_reads", Target::ValueOf(self.setting_reads.as_raw_fd())),
        ])
    }

    /// What the owners of records are veiled by.
    #[cfg(feature = "instrument")]
    pub(super) fn veil(&self) -> Option<Vec<u64>> {
        let offsets = self.offsets.get(&0_u32.to_ne_bytes()).ok()?;
        let words =
            offsets.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes));
        let words: Vec<_> = words.collect();
        words.get(words.len().checked_sub(VEIL_WORDS)?..).map(Into::into)
    }

    /// How often the program `setting` saw `kernel.ftrace_enabled` being read.
    pub(super) fn setting_reads(&self) -> u32 {
        self.setting_reads_word.get(0)
    }

    /// Opens a view of the address space `mm`.
    pub(super) fn open(&mut self, mm: u64, close: &OwnedFd) -> Result<Number, ViewError> {
        self.sweep(close);
        let place = self.views.iter().position(Option::is_none);
        let place = place.ok_or(ViewError::ManyProcesses { most: MOST_VIEWS })?;
        let number = Number::try_from(place).map_err(|_| os(Errno(libc::E2BIG)))?;
        let parts = Parts::new().map_err(os)?;
        let key = number.to_ne_bytes();
        let put = |outer: &Map, inner: &Map| {
            outer.put(&key, &inner.as_raw_fd().to_ne_bytes(), Put::Any).map_err(os)
        };
        put(&self.changes, &parts.changes)?;
        put(&self.wishes, &parts.wishes)?;
        let wakeups = parts.wakeups.as_raw_fd().to_ne_bytes();
        self.opened += 1;
        let open = Open { id: ViewId(self.opened), mm, parts: Some(parts) };
        if let Some(view) = self.views.get_mut(place) {
            *view = Some(open);
        }
        // The map of wake-ups last: no thread that it would wake sleeps yet, and before it is there for its caller,
        // every program has ended that found what this entry took the place of. A hash map gives such
        // memory to the next key at once, and the program would read that one's views.
        let entered = self
            .enter(mm, number)
            .and_then(|()| self.wakeups_by_view.put(&key, &wakeups, Put::Any).map_err(os));
        if entered.is_err() {
            self.close(number, close);
        }
        entered.map(|()| number)
    }

    /// Has the programs find the view by its address space.
    fn enter(&self, mm: u64, number: Number) -> Result<(), ViewError> {
        let Some(mut views) = self.views_of(mm) else {
            let mut views = [0; VIEWS_PER_PROCESS];
            views[0] = number + 1;
            self.filter_words.add(hash(mm));
            return self.put_views(mm, views, Put::New).inspect_err(|_| {
                self.filter_words.subtract(hash(mm));
            });
        };
        let free = views.iter_mut().find(|view| **view == 0);
        *free.ok_or(ViewError::ManyViews { most: VIEWS_PER_PROCESS })? = number + 1;
        // Not if it ended in between.
        self.put_views(mm, views, Put::Existing)
    }

    fn put_views(
        &self,
        mm: u64,
        views: [Number; VIEWS_PER_PROCESS],
        how: Put,
    ) -> Result<(), ViewError> {
        let bytes: Vec<u8> = views.iter().flat_map(|view| view.to_ne_bytes()).collect();
        self.watched.put(&mm.to_ne_bytes(), &bytes, how).map_err(|Errno(errno)| match errno {
            libc::ENOENT => ViewError::Gone,
            libc::E2BIG => ViewError::ManyProcesses { most: MOST_VIEWS },
            errno => os(Errno(errno)),
        })
    }

    /// The views of an address space, each number plus one.
    fn views_of(&self, mm: u64) -> Option<[Number; VIEWS_PER_PROCESS]> {
        let bytes = self.watched.get(&mm.to_ne_bytes()).ok()?;
        let mut views = [0; VIEWS_PER_PROCESS];
        for (view, bytes) in views.iter_mut().zip(bytes.chunks_exact(4)) {
            *view = bytes.try_into().map_or(0, Number::from_ne_bytes);
        }
        Some(views)
    }

    /// Whether the programs still find the view.
    pub(super) fn is_open(&self, number: Number) -> bool {
        let views = self.entry(number).and_then(|open| self.views_of(open.mm));
        views.is_some_and(|views| views.contains(&(number + 1)))
    }

    fn entry(&self, number: Number) -> Option<&Open> {
        self.views.get(number as usize)?.as_ref()
    }

    /// The view itself, which can be had once.
    pub(super) fn view(&mut self, number: Number, links: Vec<OwnedFd>) -> Result<View, ViewError> {
        let open = self.views.get_mut(number as usize).and_then(Option::as_mut);
        let id = open.as_ref().map_or(ViewId(0), |open| open.id);
        let parts = open.and_then(|open| open.parts.take()).ok_or(ViewError::Gone)?;
        let parts = ViewParts {
            changes: parts.changes.into_descriptor(),
            wishes: parts.wishes.into_descriptor(),
            wakeups: parts.wakeups.into_descriptor(),
            links,
        };
        Ok(View { parts, id })
    }

    pub(super) fn number_of(&self, id: ViewId) -> Option<Number> {
        let is_it = |view: &Option<Open>| view.as_ref().is_some_and(|open| open.id == id);
        self.views.iter().position(is_it).and_then(|place| Number::try_from(place).ok())
    }

    /// Ends a view: the programs forget it, its process is told so by the program `close`, and its number
    /// is free.
    pub(super) fn close(&mut self, number: Number, close: &OwnedFd) {
        let Some(open) = self.views.get_mut(number as usize).and_then(Option::take) else { return };
        // First the view is marked as closed: a thread that finds that it is not, even in another
        // process in the same address space, finds every change that returned before.
        let _ = sys::call(close, number);
        if let Some(mut views) = self.views_of(open.mm)
            && let Some(view) = views.iter_mut().find(|view| **view == number + 1)
        {
            *view = 0;
            if views.iter().all(|&view| view == 0) {
                self.leave(open.mm);
            } else {
                // An error means that it has ended.
                let _ = self.put_views(open.mm, views, Put::Existing);
            }
        }
        // From now on no program that begins to report a change finds the view.
        self.empty(number);
    }

    /// Has the programs forget an address space. Either we take it out or they do when it ends, and
    /// the side that does subtracts from the filter what it added.
    fn leave(&self, mm: u64) {
        if self.watched.delete(&mm.to_ne_bytes()).is_ok() {
            self.filter_words.subtract(hash(mm));
        }
    }

    /// Before an element of a map of maps is gone for its caller, every program that may have found it
    /// has ended. So a change that was on its way into this view is not told in the next one of its
    /// number.
    fn empty(&self, number: Number) {
        for outer in [&self.changes, &self.wishes, &self.wakeups_by_view] {
            // It may not have got that far.
            let _ = outer.delete(&number.to_ne_bytes());
        }
    }

    /// Frees the numbers of some views whose processes have ended.
    fn sweep(&mut self, close: &OwnedFd) {
        let numbers = 0..Number::try_from(MOST_VIEWS).unwrap_or(0);
        let has_ended = |&number: &Number| self.entry(number).is_some() && !self.is_open(number);
        let ended: Vec<_> = numbers.filter(has_ended).take(SWEPT_AT_ONCE).collect();
        ended.into_iter().for_each(|number| self.close(number, close));
    }
}

/// Constants for the programs.
pub(super) fn constants(words: &[u64]) -> Result<Map, Errno> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let map = one_value(c"pinfold_offsets", bytes.len(), flag::READ_ONLY_FOR_PROGRAMS)?;
    map.put(&0_u32.to_ne_bytes(), &bytes, Put::Any)?;
    map.freeze()?;
    Ok(map)
}

/// As in `bpf/changes.c`.
fn hash(mm: u64) -> usize {
    let low = (mm & 0xffff_ffff) as u32;
    (low.wrapping_mul(0x9e37_79b1) >> (32 - FILTER_BITS)) as usize
}

fn os(Errno(errno): Errno) -> ViewError {
    ViewError::Os { operation: "bpf", errno }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_close_as_many_views_as_there_can_be() {
        let twin = include_str!("../../bpf/changes.h");
        assert!(twin.contains(&format!("#define MOST_VIEWS {MOST_VIEWS}\n")));
        assert!(
            twin.contains(&format!("#define VEIL_WORDS {}\n", crate::programs::kernel::VEIL_WORDS))
        );
        assert!(twin.contains(&format!("#define VIEWS_PER_PROCESS {VIEWS_PER_PROCESS}\n")));
        assert!(twin.contains(&format!("#define FILTER_BITS {FILTER_BITS}\n")));
    }
}
