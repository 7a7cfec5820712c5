//! What stands in the way of gets: which ranges are suspended, and which threads wait before them.

use crate::AddressRange;
use crate::chunked::fits_in_map;
use crate::foreign::{Foreign, discard_all};
use crate::queue::Queue;
use crate::slots::Slots;
use crate::sync::ThreadMark;
use crate::sync::timed::{Condvar, Mutex};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// What becomes of gets of a suspended region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Gets {
    /// They wait for the end, and fail with [`GetError::Suspended`](crate::GetError::Suspended) at the deadline. A thread that
    /// both asks and is to resume would wait for itself that long. A get that a callback or the device makes within a call
    /// of the suspension, on the thread of that call, is refused at once.
    #[default]
    Hold,
    /// They fail with [`GetError::Suspended`](crate::GetError::Suspended) at once.
    Refuse,
}

/// All suspensions of a cache. Belongs to the holder of the writer's lock.
#[derive(Default)]
pub(crate) struct SuspendedRanges {
    /// By where their ranges begin; they do not overlap.
    suspended: BTreeMap<usize, usize>,
    entries: Slots<SuspendedRange>,
    /// By their ids.
    numbers: BTreeMap<u64, usize>,
    /// Those that may expire, by their deadlines.
    expiring: BTreeSet<(Duration, u64)>,
    /// What each suspension holds, in the order in which it was taken; a connection may be held by
    /// several suspensions at once.
    ///
    /// Apart from each other, and released from the end, because a node may have ten thousand
    /// connections: a suspension of them all that searched one list would take seconds.
    holds: BTreeMap<u64, Vec<Hold>>,
    last_id: u64,
    /// What came back, as long as a [look](Look) is under way.
    landings: Queue<AddressRange>,
    /// How many looks are under way.
    looks: usize,
    /// How often so many landings were noted that they were forgotten.
    floods: u64,
    pub(crate) counts: SuspensionStatistics,
}

// They grow while the lock is held.
const _: () = assert!(
    fits_in_map::<usize, usize>()
        && fits_in_map::<u64, usize>()
        && fits_in_map::<(Duration, u64), ()>()
        && fits_in_map::<u64, Vec<Hold>>()
);

/// A look at all regions of a range, slice by slice, that is to know whether one came back meanwhile from another
/// suspension.
pub(crate) struct Look {
    /// How many had come back that were looked at, or were there when it began.
    seen: usize,
    /// How many floods there had been.
    floods: u64,
}

/// How many that came back are noted: looks that overlap all the time would have them grow without end.
const MOST_LANDINGS: usize = if cfg!(any(shuttle, test)) { 8 } else { 1 << 16 };

/// How many of those that came back are looked at under one hold of the lock.
const LANDINGS_AT_ONCE: usize = if cfg!(shuttle) { 1 } else { 1024 };

/// One suspension, as gets and the clock see it.
pub(crate) struct SuspendedRange {
    range: AddressRange,
    gets: Gets,
    /// Until when gets wait, and where, if one does.
    until: Option<Instant>,
    gate: Option<Arc<Gate>>,
    /// On the device's clock.
    deadline: Duration,
    /// What to do when the deadline passes; nothing while a call of the suspension's own is running,
    /// which looks at the clock itself.
    on_expiry: Option<OnExpiry>,
    /// The thread inside the last call of the suspension's own.
    thread: ThreadMark,
}

/// What is left of a suspended range. To be dropped outside the lock: to wake 256 threads takes longer than the lock is
/// held, and the connections are the device's.
pub(crate) struct TakenDown {
    gate: Option<Arc<Gate>>,
    held: Vec<Hold>,
}

impl TakenDown {
    /// In a forked child, where the gate's lock may be held by a thread that does not exist.
    pub(crate) fn leave_shut(mut self) {
        self.gate = None;
    }
}

impl Drop for TakenDown {
    fn drop(&mut self) {
        self.gate.iter().for_each(|gate| gate.open());
        discard_all(self.held.drain(..));
    }
}

/// What is released is dropped outside the lock: its connection is the device's.
pub(crate) struct Hold {
    /// The device's connection; one cache has one type of them.
    connection: Foreign<Box<dyn Any + Send>>,
    state: HoldState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum HoldState {
    /// The device is being told to stop it.
    Stopping,
    Stopped,
    /// The device is being told to let it go on.
    Restarting,
}

/// What to do about a connection that is to be stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Claim {
    /// Stop it, and say so.
    Stop,
    /// Another suspension has stopped it.
    Shared,
    /// Another suspension is telling the device something: ask again.
    Later,
}

/// An overdue suspension that was taken out of the program's hands.
pub(crate) struct Overdue {
    pub(crate) id: u64,
    pub(crate) range: AddressRange,
    pub(crate) on_expiry: OnExpiry,
}

/// What an overdue suspension leaves behind, and what becomes of it.
pub(crate) struct OnExpiry {
    /// A [`ForeignList`](crate::foreign::ForeignList) of the device's connections, those that are stopped, if there are any.
    pub(crate) connections: Option<Box<dyn Any + Send>>,
    pub(crate) end: End,
}

/// How an overdue suspension ends.
pub(crate) enum End {
    /// Nothing was withdrawn: its connections go on.
    GoOn,
    /// Its connections are failed, and the registrations of these places, which are withdrawn, given up.
    Fail {
        /// By their numbers.
        parked: Vec<u32>,
    },
}

/// What a get meets at an entry.
pub(crate) enum Stop {
    /// It waits here.
    Wait(Arc<Gate>),
    /// It fails.
    Refuse(AddressRange),
}

impl SuspendedRange {
    fn stop(&mut self) -> Stop {
        let Self { range, until, .. } = *self;
        match self.gets {
            Gets::Hold if !self.is_in_a_call_of_this_thread() => {
                let gate = self.gate.get_or_insert_with(|| Arc::new(Gate::new(range, until)));
                Stop::Wait(Arc::clone(gate))
            }
            Gets::Hold | Gets::Refuse => Stop::Refuse(range),
        }
    }

    /// Whether a get of this thread would wait for itself: it comes from inside a call, as that of a callback.
    fn is_in_a_call_of_this_thread(&self) -> bool {
        self.on_expiry.is_none() && self.thread.is_this()
    }
}

impl SuspendedRanges {
    /// What a registration of `range` meets.
    #[inline]
    pub(crate) fn stop(&mut self, range: AddressRange) -> Option<Stop> {
        let (_, &last) = self.suspended.range(..range.end()).next_back()?;
        let entry = self.entries.get_mut(last)?;
        entry.range.overlaps(&range).then(|| entry.stop())
    }

    /// Whether a region of `range` must not be leased.
    #[inline]
    pub(crate) fn cover(&self, range: AddressRange) -> bool {
        !self.suspended.is_empty() && self.overlapping(range).is_some()
    }

    /// What is suspended of `range`.
    pub(crate) fn overlapping(&self, range: AddressRange) -> Option<AddressRange> {
        self.entry_in(range).map(|entry| entry.range)
    }

    /// The last that overlaps `range`: of those that begin before its end, the last ends last.
    #[inline]
    fn entry_in(&self, range: AddressRange) -> Option<&SuspendedRange> {
        let (_, &last) = self.suspended.range(..range.end()).next_back()?;
        self.entries.get(last).filter(|last| last.range.overlaps(&range))
    }

    fn entry_of(&self, id: u64) -> Option<&SuspendedRange> {
        self.entries.get(*self.numbers.get(&id)?)
    }

    fn entry_of_mut(&mut self, id: u64) -> Option<&mut SuspendedRange> {
        self.entries.get_mut(*self.numbers.get(&id)?)
    }

    /// Puts up an entry, where nothing is suspended, that stands until `deadline`, which is `patience` from now.
    pub(crate) fn put_up(
        &mut self,
        range: AddressRange,
        gets: Gets,
        deadline: Duration,
        patience: Duration,
    ) -> u64 {
        self.last_id += 1;
        self.counts.begun += 1;
        let until = Instant::now().checked_add(patience);
        let (gate, on_expiry, thread) = (None, None, ThreadMark::of_this());
        let entry = SuspendedRange { range, gets, until, gate, deadline, on_expiry, thread };
        let number = self.entries.insert(entry);
        self.suspended.insert(range.start(), number);
        self.numbers.insert(self.last_id, number);
        self.last_id
    }

    /// A region of `range` is registered that was in the hands of a suspension.
    pub(crate) fn note_landing(&mut self, range: AddressRange) {
        // However many suspended ranges it reaches into.
        if self.looks > 0 {
            if self.landings.len() == MOST_LANDINGS {
                self.landings.clear();
                self.floods += 1;
            }
            self.landings.push(range);
        }
    }

    /// Notes what comes back from now on, until it [ends](Self::end_look).
    pub(crate) fn begin_look(&mut self) -> Look {
        self.looks += 1;
        Look { seen: self.landings.len(), floods: self.floods }
    }

    /// Whether a region that reaches into `range` came back since the look began; true behind a flood. `None` if more came back
    /// than were looked at until now.
    pub(crate) fn came_back(&self, look: &mut Look, range: AddressRange) -> Option<bool> {
        if look.floods != self.floods {
            return Some(true);
        }
        let mut next = self.landings.iter_from(look.seen).take(LANDINGS_AT_ONCE);
        if next.any(|landed| landed.overlaps(&range)) {
            return Some(true);
        }
        look.seen = self.landings.len().min(look.seen + LANDINGS_AT_ONCE);
        (look.seen == self.landings.len()).then_some(false)
    }

    /// Ends a look; behind the last nothing is noted.
    pub(crate) fn end_look(&mut self, _: Look) {
        self.looks -= 1;
        if self.looks == 0 {
            self.landings.clear();
        }
    }

    /// The holds of suspension `id` will stand in `room`.
    pub(crate) fn prepare_holds(&mut self, id: u64, room: Vec<Hold>) {
        if room.capacity() > 0 {
            self.holds.insert(id, room);
        }
    }

    /// Takes a hold on `connection` for suspension `id`, unless the device is being told something
    /// about it.
    ///
    /// No lock is held while the device is told, so two suspensions could tell it to stop and to
    /// go on in the wrong order; hence one that tells is waited for, and the last to release it
    /// restarts.
    ///
    /// The hold is what `copy` has; where none is taken it stays, to be dropped outside the lock.
    pub(crate) fn claim<C: PartialEq + Send + 'static>(
        &mut self,
        id: u64,
        copy: &mut Foreign<C>,
    ) -> Claim {
        let Some(connection) = copy.get() else { return Claim::Later };
        let mut others = self.others_on(id, connection).peekable();
        let claim = if others.peek().is_none() {
            Claim::Stop
        } else if others.all(|state| state == HoldState::Stopped) {
            Claim::Shared
        } else {
            Claim::Later
        };
        drop(others);
        let state = match claim {
            Claim::Stop => HoldState::Stopping,
            Claim::Shared => HoldState::Stopped,
            Claim::Later => return claim,
        };
        let Some(connection) = copy.take() else { return Claim::Later };
        let hold = Hold { connection: Foreign::new(Box::new(connection)), state };
        self.holds.entry(id).or_default().push(hold);
        claim
    }

    /// The device has been told to stop.
    pub(crate) fn stopped<C: PartialEq + 'static>(&mut self, id: u64, connection: &C) {
        self.set(id, connection, HoldState::Stopped);
    }

    /// The device has lost it, so nothing stands on its being stopped: one that is made ready again is the same
    /// connection, and running, and the suspension that claims it next has it stopped anew, unless another one still
    /// stands on it: then the device fails it as it looks. The hold is to be dropped outside the lock.
    pub(crate) fn lost<C: PartialEq + 'static>(&mut self, id: u64, connection: &C) -> Option<Hold> {
        self.remove(id, connection)
    }

    /// Releases `connection`. Nothing if no other suspension holds it: then the device is to be notified, and
    /// [`restarted`](Self::restarted) says that it was.
    pub(crate) fn release<C: PartialEq + 'static>(
        &mut self,
        id: u64,
        connection: &C,
    ) -> Result<(), Option<Hold>> {
        let shared = self.others_on(id, connection).next().is_some();
        if shared {
            return Err(self.restarted(id, connection));
        }
        self.set(id, connection, HoldState::Restarting);
        Ok(())
    }

    /// The device has been told, or need not be.
    pub(crate) fn restarted<C: PartialEq + 'static>(
        &mut self,
        id: u64,
        connection: &C,
    ) -> Option<Hold> {
        self.remove(id, connection)
    }

    fn remove<C: PartialEq + 'static>(&mut self, id: u64, connection: &C) -> Option<Hold> {
        let (list, place) = self.own(id, connection)?;
        Some(list.swap_remove(place))
    }

    fn set<C: PartialEq + 'static>(&mut self, id: u64, connection: &C, state: HoldState) {
        if let Some((list, place)) = self.own(id, connection) {
            list[place].state = state;
        }
    }

    /// Where suspension `id` holds `connection`; the last is looked at first.
    fn own<C: PartialEq + 'static>(
        &mut self,
        id: u64,
        connection: &C,
    ) -> Option<(&mut Vec<Hold>, usize)> {
        let list = self.holds.get_mut(&id)?;
        let place = list.iter().rposition(|hold| is_on(hold, connection))?;
        Some((list, place))
    }

    /// How others than `id` hold `connection`.
    fn others_on<C: PartialEq + 'static>(
        &self,
        id: u64,
        connection: &C,
    ) -> impl Iterator<Item = HoldState> {
        let others = self.holds.iter().filter(move |(other, _)| **other != id);
        let all = others.flat_map(|(_, list)| list);
        all.filter(move |hold| is_on(hold, connection)).map(|hold| hold.state)
    }

    /// From now on the suspension may expire.
    pub(crate) fn hand_over(&mut self, id: u64, on_expiry: OnExpiry) {
        if let Some(entry) = self.entry_of_mut(id) {
            entry.on_expiry = Some(on_expiry);
            let deadline = entry.deadline;
            self.expiring.insert((deadline, id));
        }
    }

    /// Whether it has expired, or is just being ended, if it was handed over.
    pub(crate) fn has_expired(&self, id: u64) -> bool {
        self.entry_of(id).is_none_or(|entry| entry.on_expiry.is_none())
    }

    /// From now on it may not, because this thread is inside a call of its own, or ends it. `None` if it has expired.
    /// The connections in it are the device's: to be dropped outside the lock.
    pub(crate) fn take_back(&mut self, id: u64) -> Option<OnExpiry> {
        let entry = self.entry_of_mut(id)?;
        let (deadline, on_expiry) = (entry.deadline, entry.on_expiry.take());
        if on_expiry.is_some() {
            entry.thread = ThreadMark::of_this();
        }
        self.expiring.remove(&(deadline, id));
        on_expiry
    }

    /// Takes an entry down; those who waited go on once what this gives is dropped.
    pub(crate) fn take_down(&mut self, id: u64) -> TakenDown {
        let number = self.numbers.remove(&id);
        let entry = number.and_then(|number| self.entries.remove(number));
        if let Some(entry) = &entry {
            self.suspended.remove(&entry.range.start());
            self.expiring.remove(&(entry.deadline, id));
        }
        let held = self.holds.remove(&id).unwrap_or_default();
        TakenDown { gate: entry.and_then(|entry| entry.gate), held }
    }

    /// Takes the suspension that expires first out of the program's hands, if its deadline `is_over`, and says what it
    /// left.
    ///
    /// Its entry and its holds stand until [`take_down`](Self::take_down): no thread lets its connections
    /// go on, or gets what they may still touch, before they were failed.
    pub(crate) fn take_overdue(
        &mut self,
        is_over: impl FnOnce(Duration) -> bool,
    ) -> Option<Overdue> {
        let &(deadline, id) = self.expiring.first()?;
        if !is_over(deadline) {
            return None;
        }
        let on_expiry = self.take_back(id)?;
        let range = self.entry_of(id)?.range;
        Some(Overdue { id, range, on_expiry })
    }
}

fn is_on<C: PartialEq + 'static>(hold: &Hold, connection: &C) -> bool {
    hold.connection.get().and_then(|theirs| theirs.downcast_ref::<C>()) == Some(connection)
}

/// Where gets of a suspended region wait.
pub(crate) struct Gate {
    range: AddressRange,
    until: Option<Instant>,
    /// Whether the entry is down. Rank 3: taken with nothing else held.
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn new(range: AddressRange, until: Option<Instant>) -> Self {
        Self { range, until, is_open: Mutex::new(false), opened: Condvar::new() }
    }

    fn open(&self) {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    /// Waits until the entry is down, if it is before `until`.
    ///
    /// # Errors
    ///
    /// The suspended range, then or at the deadline.
    pub(crate) fn wait(&self, until: Option<Instant>) -> Result<(), AddressRange> {
        let until = self.until.into_iter().chain(until).min();
        let mut is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        while !*is_open {
            let left = until
                .map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(self.range);
            }
            let waited = self.opened.wait_timeout(is_open, left);
            is_open = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

/// What became of the suspensions of a cache, counted exactly:
/// `begun = refused + resumed + killed + expired + those under way`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SuspensionStatistics {
    /// Suspensions begun; what was unsupported was not.
    pub begun: u64,
    /// Those that did not come about, cancelled and dropped ones included.
    pub refused: u64,
    /// Those that came about and were resumed, dropped ones with
    /// [`OnDrop::Resume`](crate::OnDrop) included.
    pub resumed: u64,
    /// Those that were dropped and ended with their connections.
    pub killed: u64,
    /// Those that were overdue when [`expire_suspensions`](crate::Cache::expire_suspensions) looked.
    pub expired: u64,
    /// Panics of the device that could not be passed on: while another panic was on its way, or
    /// while connections were being failed, where each must have its turn.
    pub device_panics: u64,
}

impl fmt::Debug for SuspendedRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SuspendedRanges").field("counts", &self.counts).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;

    /// Of those that begin before the end of a range the last is looked at: one that is gone would hide the one ahead.
    #[test]
    fn what_was_taken_down_hides_nothing_that_stands() {
        let mut suspended = SuspendedRanges::default();
        let pages =
            |first: usize, count: usize| AddressRange::new(4096 * (1 + first), 4096 * count);
        let (standing, gone, all) =
            (pages(0, 1).unwrap(), pages(2, 1).unwrap(), pages(0, 4).unwrap());
        let mut put_up =
            |range| suspended.put_up(range, Gets::Refuse, Duration::ZERO, Duration::ZERO);
        let (first, second) = (put_up(standing), put_up(gone));
        drop(suspended.take_down(second));
        assert_eq!(suspended.overlapping(all), Some(standing));
        assert!(matches!(suspended.stop(all), Some(Stop::Refuse(range)) if range == standing));
        assert!(!suspended.cover(gone));
        // Its number is used again, for what begins elsewhere.
        let third =
            suspended.put_up(pages(5, 1).unwrap(), Gets::Refuse, Duration::ZERO, Duration::ZERO);
        drop(suspended.take_down(first));
        assert!(!suspended.cover(all) && suspended.cover(pages(2, 4).unwrap()));
        drop(suspended.take_down(third));
        assert!(suspended.suspended.is_empty() && suspended.numbers.is_empty());
    }

    /// Looks that overlap all the time would have what came back stand there for ever.
    #[test]
    fn what_comes_back_in_a_flood_came_back_anywhere() {
        let mut suspended = SuspendedRanges::default();
        let range = |start| AddressRange::new(start, 4096).unwrap();
        let (near, far) = (range(4096), range(1 << 20));
        let mut look = suspended.begin_look();
        (0..MOST_LANDINGS).for_each(|_| suspended.note_landing(near));
        assert_eq!(suspended.came_back(&mut look, far), Some(false));
        suspended.note_landing(near);
        let mut later = suspended.begin_look();
        assert_eq!(suspended.came_back(&mut look, far), Some(true));
        assert_eq!(suspended.came_back(&mut later, near), Some(false));
        assert_eq!(suspended.landings.len(), 1);
        suspended.end_look(look);
        suspended.end_look(later);
        assert_eq!(suspended.landings.len(), 0);
    }
}
