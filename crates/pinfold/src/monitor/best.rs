//! The best monitor that this machine has.
//!
//! | choice | sees | a hit costs |
//! |---|---|---|
//! | [`Ebpf`](Choice::Ebpf) | everything, of every kind of memory | some loads |
//! | [`Userfaultfd`](Choice::Userfaultfd) | private anonymous memory; what it is blind to, if hooks or allocators tell the process's [`Feed`] | a system call |
//! | [`NoMonitor`](Choice::NoMonitor) | what is told to the feed of memory that callers vouch for; nothing else is cached | some loads |
//!
//! Each follows the process's feed besides, so that what is reported to it counts on every machine: the
//! kernel does not know what a driver changes, and eBPF is not asked to watch memory that a caller
//! vouches for. Programs without a feed that use [`Ebpf`] itself save some 3 ns for each hit.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement `Monitor` by handing each call to the one that was
//! chosen. It contains no unsafe block.

#![allow(unsafe_code)]

use super::ebpf::Ebpf;
use super::feed::Feed;
use super::none::NoMonitor;
use super::start::StartError;
use super::userfaultfd::{Pause, Userfaultfd};
use super::with_feed::{Combinable, WithFeed};
use crate::mappings::{self, Mapping};
use crate::{
    AddressRange, Change, ChangeMark, Cover, Lost, MappingKind, Monitor, Position, Replay,
    Sequence, Watch,
};
use pinfold_core::listed;
use pinfold_kernel::process::page_bytes;
use std::error::Error;
use std::io;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;

listed! {
    /// Which monitor: from the best to the worst.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[non_exhaustive]
    pub enum Choice {
        /// Programs inside of the kernel, and the process's [`Feed`].
        Ebpf => "ebpf",
        /// [`Userfaultfd`], and the process's [`Feed`].
        Userfaultfd => "userfaultfd",
        /// None; the process's [`Feed`] is followed for memory that callers vouch for.
        NoMonitor => "none",
    }
}

impl Choice {
    /// The choice of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|choice| choice.name() == name)
    }
}

/// A monitor that this machine does not have.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", .choice.name())]
pub struct MonitorRefused {
    /// Which.
    pub choice: Choice,
    /// Why, and what to do about it.
    #[source]
    pub reason: Box<dyn Error + Send + Sync>,
}

/// A monitor that was chosen when the program ran.
///
/// Programs that know which one they want use that one itself and save a branch.
#[derive(Debug)]
pub struct Best {
    active: Active,
    refused: Vec<MonitorRefused>,
}

/// One predictable branch for each call.
#[derive(Debug)]
enum Active {
    Ebpf(WithFeed<Arc<Ebpf>>),
    Userfaultfd(WithFeed<Arc<Userfaultfd>>),
    NoMonitor(WithFeed<NoMonitor>),
}

/// The best monitor that this machine has; those that all caches of the process share.
///
/// With the cargo feature `ebpf`, a privileged process that finds no helper loads the programs itself, and
/// every process of the machine pays for them as long as it lives. Programs of which many run at
/// once take [`best_without_loading`].
///
/// [`Best::refused`] says what the better ones lack. In a container that allows nothing it is the
/// one that sees nothing, and memory is registered for each use.
///
/// # Errors
///
/// [`StartError`] if not even a page can be had.
pub fn best() -> Result<Best, StartError> {
    Best::of([(Choice::Ebpf, &ebpf), (Choice::Userfaultfd, &userfaultfd)])
}

/// As [`best`], with programs of the helper's only, which listens at `helper` (usually
/// [`notify::path`](super::notify::path)), whatever this process may do: one set of
/// programs serves a whole machine, one for each of a hundred processes burdens it a hundred times.
///
/// # Errors
///
/// As [`best`].
pub fn best_without_loading(helper: &Path) -> Result<Best, StartError> {
    let of_the_helper = || ebpf_of_the_helper(helper);
    Best::of([(Choice::Ebpf, &of_the_helper), (Choice::Userfaultfd, &userfaultfd)])
}

impl Best {
    /// The first of these that there is.
    fn of(choices: [(Choice, &Start<'_>); 2]) -> Result<Self, StartError> {
        let mut refused = Vec::new();
        for (choice, start) in choices {
            match start() {
                Ok(active) => return Ok(Self { active, refused }),
                Err(reason) => refused.push(MonitorRefused { choice, reason }),
            }
        }
        Ok(Self { active: no_monitor()?, refused })
    }

    /// This one and no other.
    ///
    /// # Errors
    ///
    /// [`MonitorRefused`] if this machine does not have it.
    pub fn only(choice: Choice) -> Result<Self, MonitorRefused> {
        let active = match choice {
            Choice::Ebpf => ebpf(),
            Choice::Userfaultfd => userfaultfd(),
            Choice::NoMonitor => no_monitor().map_err(Into::into),
        };
        let active = active.map_err(|reason| MonitorRefused { choice, reason })?;
        Ok(Self { active, refused: Vec::new() })
    }

    /// What is active.
    pub const fn chosen(&self) -> Choice {
        match self.active {
            Active::Ebpf(_) => Choice::Ebpf,
            Active::Userfaultfd(_) => Choice::Userfaultfd,
            Active::NoMonitor(_) => Choice::NoMonitor,
        }
    }

    /// The better ones, and why each is not active.
    pub fn refused(&self) -> &[MonitorRefused] {
        &self.refused
    }

    /// Ends the watch of the pages of `range`, where the monitor has one, from its own call to the next
    /// [`watch`](Monitor::watch): their changes cost nothing, and another userfaultfd may have them.
    ///
    /// The process's feed and the monitor report that the pages change, meanwhile and once more when the watch
    /// has ended, so no registration is believed that was made before, by whichever cache. Costs two turns of
    /// the monitor's thread. A discard that is under way as the watch ends goes unseen by a foreign userfaultfd that has the
    /// pages at once, not by another monitor of this library (`docs/src/monitors.md`).
    pub fn unwatch(&self, range: AddressRange) {
        self.unwatch_by(Userfaultfd::unwatch_range, range);
    }

    /// Until the answer is dropped, no call of [`watch`](Monitor::watch) or [`unwatch`](Self::unwatch), on any thread, has
    /// the kernel watch anything: for a system call that a watch would have the kernel refuse. Those calls wait some 20 ms at
    /// most, and then watch nothing and end no watch. Waits for those that have begun, and for another pause: some 20 ms at most
    /// for each. Beside a pause that lasts longer this one is that one, and over with it.
    pub fn pause_watches(&self) -> WatchPause<'_> {
        let paused = match &self.active {
            Active::Userfaultfd(monitor) => monitor.monitor().pause(),
            Active::Ebpf(_) | Active::NoMonitor(_) => None,
        };
        WatchPause { monitor: self, _paused: paused }
    }

    fn unwatch_by(&self, end: fn(&Userfaultfd, AddressRange), range: AddressRange) {
        if let Active::Userfaultfd(monitor) = &self.active {
            // Whole pages, because the watch of whole pages ends.
            let range = range.page_aligned(page_bytes());
            let changing = monitor.feed().begin(range);
            end(monitor.monitor(), range);
            // A registration that began after the entry above was read, and was watched before the watch ended,
            // learns only from this entry that it is watched no longer: it asks whether a change is under
            // way after it was watched, and by then this one may be over.
            monitor.feed().changed(range);
            drop(changing);
        }
    }

    /// Whether a page of `range`, or next to it, may be watched, where this monitor watches mappings: by its own notes, which
    /// part of a mapping that has grown since, and was split, is missing in. No system call, and no change of what the
    /// kernel keeps of a mapping, as to ask it would be; an allocation as long as the notes.
    pub fn may_watch(&self, range: AddressRange) -> bool {
        match &self.active {
            Active::Userfaultfd(monitor) => monitor.monitor().may_watch(range),
            _ => false,
        }
    }

    /// The mappings that share bytes with `range`, where this monitor watches mappings; none where it watches
    /// all of the process.
    ///
    /// Asks the table that the monitor has open, so that no descriptor is opened, not for a moment, unless the
    /// program has closed that one.
    ///
    /// # Errors
    ///
    /// As [`mappings_in`](crate::mappings::mappings_in).
    pub fn watched_mappings(&self, range: AddressRange) -> io::Result<Vec<Mapping>> {
        match &self.active {
            Active::Userfaultfd(monitor) => Ok(monitor.monitor().mappings_in(range)?),
            Active::Ebpf(_) | Active::NoMonitor(_) => Ok(Vec::new()),
        }
    }

    /// Whether a mapping in `range` may have pages of a pool of huge pages (`hugetlbfs`): while they are registered, the pool
    /// lacks them, also when the program has unmapped or discarded them. Shared ones are told from others since Linux 6.11.
    ///
    /// # Errors
    ///
    /// As [`mappings_in`](crate::mappings::mappings_in).
    pub fn may_have_hugetlb(&self, range: AddressRange) -> io::Result<bool> {
        match &self.active {
            // It watches no others.
            Active::Userfaultfd(monitor) => {
                let mappings = monitor.monitor().mappings_in(range)?;
                Ok(mappings.iter().any(|mapping| mapping.kind == MappingKind::PrivateHuge))
            }
            Active::Ebpf(_) => Ok(mappings::may_have_hugetlb(range)?),
            Active::NoMonitor(_) => Ok(false),
        }
    }

    /// How many mappings the process has, where this monitor watches mappings, whose parts do not become one with parts that
    /// it does not watch; 0 where it watches none. Takes some 0.3 us for each.
    ///
    /// # Errors
    ///
    /// As [`mappings_in`](crate::mappings::mappings_in).
    pub fn count_mappings(&self) -> io::Result<usize> {
        match &self.active {
            Active::Userfaultfd(monitor) => Ok(monitor.monitor().count_mappings()?),
            Active::Ebpf(_) | Active::NoMonitor(_) => Ok(0),
        }
    }

    /// The descriptors that a thread needs which asks this monitor and has a table of descriptors of its own.
    ///
    /// With them it learns what a thread of the program learns, also after the program has closed its own. They keep their
    /// numbers as long as the monitor lives, unless the program closes them.
    pub fn descriptors(&self) -> Vec<RawFd> {
        match &self.active {
            Active::Userfaultfd(monitor) => monitor.monitor().descriptors().to_vec(),
            // Memory that is mapped; what the kernel's programs need has a thread of its own.
            Active::Ebpf(_) | Active::NoMonitor(_) => Vec::new(),
        }
    }

    fn monitor(&self) -> &dyn Monitor {
        match &self.active {
            Active::Ebpf(monitor) => monitor,
            Active::Userfaultfd(monitor) => monitor,
            Active::NoMonitor(monitor) => monitor,
        }
    }
}

type Start<'s> = dyn Fn() -> Result<Active, Box<dyn Error + Send + Sync>> + 's;

fn ebpf() -> Result<Active, Box<dyn Error + Send + Sync>> {
    Ok(Active::Ebpf(fed(Ebpf::shared()?)))
}

fn ebpf_of_the_helper(helper: &Path) -> Result<Active, Box<dyn Error + Send + Sync>> {
    Ok(Active::Ebpf(fed(Ebpf::shared_from_helper(helper)?)))
}

fn userfaultfd() -> Result<Active, Box<dyn Error + Send + Sync>> {
    Ok(Active::Userfaultfd(fed(Userfaultfd::shared()?)))
}

fn no_monitor() -> Result<Active, StartError> {
    Ok(Active::NoMonitor(fed(NoMonitor::new()?)))
}

fn fed<M: Combinable>(monitor: M) -> WithFeed<M> {
    WithFeed::new(monitor, Feed::of_process())
}

/// No mapping becomes watched until this is dropped; see [`Best::pause_watches`].
#[derive(Debug)]
pub struct WatchPause<'m> {
    monitor: &'m Best,
    /// `None` where no monitor watches mappings of this process, or another pause lasts.
    _paused: Option<Pause<'m>>,
}

impl WatchPause<'_> {
    /// As [`Best::unwatch`]: `range` is unwatched until the pause is over.
    pub fn unwatch(&self, range: AddressRange) {
        self.monitor.unwatch_by(Userfaultfd::unwatch_paused, range);
    }
}

// SAFETY: every call goes to the one monitor that is active, whose promise it is.
unsafe impl Monitor for Best {
    fn name(&self) -> &'static str {
        self.monitor().name()
    }

    #[inline]
    fn check(&self) -> Result<Sequence, Lost> {
        match &self.active {
            Active::Ebpf(monitor) => monitor.check(),
            Active::Userfaultfd(monitor) => monitor.check(),
            Active::NoMonitor(monitor) => monitor.check(),
        }
    }

    fn watch(&self, range: AddressRange) -> Watch {
        self.monitor().watch(range)
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        self.monitor().change_pending(range)
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.monitor().replay(from, visit)
    }

    fn replay_some(
        &self,
        from: Position,
        most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        self.monitor().replay_some(from, most, visit)
    }

    fn mark_changes(&self, range: AddressRange) -> Option<Box<dyn ChangeMark + '_>> {
        self.monitor().mark_changes(range)
    }

    fn has_slow_check(&self) -> bool {
        self.monitor().has_slow_check()
    }

    fn is_simulated(&self) -> bool {
        self.monitor().is_simulated()
    }

    fn change_surcharge(&self) -> u64 {
        self.monitor().change_surcharge()
    }

    fn coverage(&self, mapping: MappingKind, change: Change) -> Cover {
        self.monitor().coverage(mapping, change)
    }

    #[inline]
    fn forked(&self) -> bool {
        match &self.active {
            Active::Ebpf(monitor) => monitor.forked(),
            Active::Userfaultfd(monitor) => monitor.forked(),
            Active::NoMonitor(monitor) => monitor.forked(),
        }
    }

    fn notified(&self) -> u32 {
        self.monitor().notified()
    }

    fn notify(&self) {
        self.monitor().notify();
    }

    fn wait(&self, seen: u32) {
        self.monitor().wait(seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_has_a_name_of_its_own() {
        for choice in Choice::ALL {
            assert_eq!(Choice::named(choice.name()), Some(choice));
        }
        assert_eq!(Choice::named("worst"), None);
    }

    #[test]
    fn what_is_better_than_the_chosen_one_was_refused_with_a_reason() {
        let best = best().unwrap();
        let better: Vec<_> =
            Choice::ALL.into_iter().take_while(|&choice| choice != best.chosen()).collect();
        let refused: Vec<_> = best.refused().iter().map(|refused| refused.choice).collect();
        assert_eq!(refused, better);
        assert!(best.refused().iter().all(|refused| !refused.to_string().is_empty()));
        best.check().unwrap();
    }

    #[test]
    fn one_can_be_forced() {
        let none = Best::only(Choice::NoMonitor).unwrap();
        assert_eq!((none.chosen(), none.name()), (Choice::NoMonitor, "none"));
        assert!(none.refused().is_empty());
        let range = AddressRange::new(0x1000, 0x1000).unwrap();
        assert_ne!(none.watch(range), Watch::Covered);
    }
}
