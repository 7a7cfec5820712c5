//! The ranges that another registration cache keeps, and whether each is what it was: the table behind
//! [`libfabric`](super::libfabric).
//!
//! Such a cache registers first and then *subscribes* to the range, on the same thread; before each use of an entry
//! it asks whether the entry is *valid*. A change between the two steps of the first is lost to a monitor that
//! watches from the subscription on. So here the first subscription of a range is refused, and the range watched; a
//! later one is accepted if nothing has changed since and its registration began behind the watch.
//!
//! # Why no entry is believed that is stale
//!
//! 1. **When the registration began.** A thread's calls of this table follow each other, and one returns before the
//!    registration begins that the next one subscribes. The exception is a cache that registers through another
//!    cache: the inner one's subscription is made while the outer one's registration runs. That call stands deeper on
//!    the same stack. So a registration began behind the last subscription of its thread that did not stand deeper
//!    ([`Calls`]); `since <= last` means that it began behind the watch.
//! 2. **What changed since.** A record is made before its range is watched, and stays only if the monitor covers the
//!    range and no change is pending behind that. What is told from the record on ends it, and each call here applies
//!    every change that took effect before it.
//! 3. **Several caches.** The question names a range and no cache, and entries of several caches may have the same one.
//!    So a record whose range changed is not accepted anew before [`notified`](Subscriptions::notified): behind the
//!    call that has every cache drop its entries of that range. *An entry that a cache keeps has a record that is
//!    accepted or changed*: records end as notes, which no cache has an entry of, behind that call, or when no cache
//!    is left ([`clear`](Subscriptions::clear)). A record made anew has another number, so a call that comes late ends
//!    no other record.
//!
//! A user's thread that is moved to another kernel thread, or put aside, in the middle of a registration would break
//! the first; libfabric does neither.

use super::follower::{ChangeReport, Follower};
use crate::{AddressRange, Lost, Monitor, Watch};
use pinfold_core::foreign;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

/// How many ranges are known at most. A cache need not say that it has dropped one.
const MOST_RANGES: usize = 1 << 14;

/// How many threads are remembered at most, and how many depths of a stack.
const MOST_THREADS: usize = 1 << 12;
const MOST_DEPTHS: usize = 8;

/// See the module.
#[derive(Debug)]
pub(super) struct Subscriptions<M: Monitor> {
    monitor: Arc<M>,
    table: Mutex<Table<M>>,
}

/// Where a call comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Call {
    /// Which thread, as long as it lives.
    pub(super) thread: usize,
    /// An address in the call's frame; deeper calls have smaller ones.
    pub(super) stack: usize,
}

/// A range that changed, with the number of its record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChangedRange {
    pub(super) range: AddressRange,
    since: u64,
}

#[derive(Debug)]
struct Table<M: Monitor> {
    follower: Follower<Arc<M>>,
    /// Of the last record.
    tick: u64,
    /// By start and length.
    records: BTreeMap<(usize, usize), Record>,
    /// The longest range that a record was ever made of.
    longest: usize,
    threads: HashMap<usize, Calls>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    /// Watched behind this tick, and by no other record.
    since: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Watched; no cache keeps it.
    Noted,
    /// Caches may keep it.
    Accepted,
    /// The same, and they are to drop it.
    Changed,
}

/// The subscriptions of one thread: at each depth of its stack the last one that none has followed at this depth or
/// less. Deeper ones come later.
#[derive(Default, Debug)]
struct Calls(Vec<(usize, u64)>);

impl Calls {
    /// The tick of the last call that was not made from within the caller of one at `stack`; 0 without one.
    fn last(&self, stack: usize) -> u64 {
        let mut outer = self.0.iter().rev().filter(|call| call.0 >= stack);
        outer.next().map_or(0, |call| call.1)
    }

    fn note(&mut self, stack: usize, tick: u64) {
        self.0.retain(|call| call.0 > stack);
        // One that is forgotten has a later one take longer to be accepted.
        self.0.truncate(MOST_DEPTHS - 1);
        self.0.push((stack, tick));
    }
}

impl<M: Monitor> Subscriptions<M> {
    /// Follows `monitor` from now on.
    ///
    /// # Errors
    ///
    /// [`Lost`] if it sees nothing any more.
    pub(super) fn new(monitor: Arc<M>) -> Result<Self, Lost> {
        let follower = Follower::new(Arc::clone(&monitor))?;
        let table = Table {
            follower,
            tick: 0,
            records: BTreeMap::new(),
            longest: 0,
            threads: HashMap::new(),
        };
        Ok(Self { monitor, table: Mutex::new(table) })
    }

    pub(super) fn monitor(&self) -> &M {
        &self.monitor
    }

    /// Whether a cache may keep what it has registered of `range` on this thread, just now.
    pub(super) fn subscribe(&self, range: AddressRange, call: Call) -> bool {
        let subscribe = |table: &mut Table<M>| {
            let is_accepted = table.subscribe(range, call);
            table.note(call);
            is_accepted
        };
        self.in_table(subscribe).unwrap_or(false)
    }

    /// Whether what caches keep of exactly this range is what the program has there.
    pub(super) fn valid(&self, range: AddressRange) -> bool {
        let is_accepted = |table: &mut Table<M>| {
            let is_known = table.apply_news().is_ok();
            let record = table.records.get(&key_of(range));
            is_known && record.is_some_and(|record| record.state == State::Accepted)
        };
        self.in_table(is_accepted).unwrap_or(false)
    }

    /// What caches are to drop.
    pub(super) fn changed(&self) -> Vec<ChangedRange> {
        let changed = |table: &mut Table<M>| {
            // What is lost has changed.
            _ = table.apply_news();
            table.changed().collect()
        };
        self.in_table(changed).unwrap_or_default()
    }

    /// Every cache has dropped its entries of these, all of them behind the call that gave them.
    pub(super) fn notified(&self, dropped: &[ChangedRange]) {
        let end = |table: &mut Table<M>| {
            for ChangedRange { range, since } in dropped {
                let key = key_of(*range);
                if table.records.get(&key).is_some_and(|record| record.since == *since) {
                    table.records.remove(&key);
                }
            }
        };
        _ = self.in_table(end);
    }

    /// No cache is left.
    pub(super) fn clear(&self) {
        _ = self.in_table(|table| table.records.clear());
    }

    /// `None` in a forked child, which may find the lock taken for ever, and where the monitor panics: then everything
    /// has changed, whatever was half done, and the caches are notified.
    fn in_table<T>(&self, work: impl FnOnce(&mut Table<M>) -> T) -> Option<T> {
        if self.monitor.forked() {
            return None;
        }
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let worked = foreign::call(|| work(&mut table));
        if worked.is_err() {
            table.note_change(AddressRange::EVERYTHING);
        }
        // What the panic carries is dropped with no lock held.
        drop(table);
        if worked.is_err() {
            self.monitor.notify();
        }
        worked.ok()
    }
}

impl<M: Monitor> Table<M> {
    fn subscribe(&mut self, range: AddressRange, call: Call) -> bool {
        if self.apply_news().is_err() {
            return false;
        }
        let last = self.threads.get(&call.thread).map_or(0, |calls| calls.last(call.stack));
        match self.records.get_mut(&key_of(range)) {
            Some(record) if record.state != State::Changed && record.since <= last => {
                record.state = State::Accepted;
                true
            }
            Some(_) => false,
            None => {
                self.watch(range);
                false
            }
        }
    }

    /// Makes a record, if the range is watched from now on and nothing changes there.
    fn watch(&mut self, range: AddressRange) {
        if !self.has_room() {
            return;
        }
        self.tick += 1;
        self.longest = self.longest.max(range.len());
        let record = Record { since: self.tick, state: State::Noted };
        self.records.insert(key_of(range), record);
        let is_watched = self.follower.watch(range) == Watch::Covered
            // Behind the watch: an entry of the log that was applied above may be of a change that takes effect later. One
            // that was not will end the record.
            && !self.follower.change_pending(range);
        if !is_watched {
            self.records.remove(&key_of(range));
        }
    }

    /// Whether there is room for one more. If not, there is some once the caches have been notified.
    fn has_room(&mut self) -> bool {
        if self.records.len() < MOST_RANGES {
            return true;
        }
        self.records.retain(|_, record| record.state != State::Noted);
        if self.records.len() < MOST_RANGES {
            return true;
        }
        if self.changed().next().is_none() {
            let mut ages: Vec<u64> = self.records.values().map(|record| record.since).collect();
            ages.sort_unstable();
            let old = ages[ages.len() / 4];
            let records = self.records.values_mut().filter(|record| record.since < old);
            records.for_each(|record| record.state = State::Changed);
            self.follower.monitor().notify();
        }
        false
    }

    /// Applies every change that took effect before this call.
    fn apply_news(&mut self) -> Result<(), Lost> {
        let Self { follower, records, longest, .. } = self;
        let news = follower.news(|news| {
            let range = match news {
                ChangeReport::Changed(range) => range,
                ChangeReport::Everything => AddressRange::EVERYTHING,
            };
            note_change(records, range, *longest);
        });
        if news.is_err() {
            let is_new = self.records.values().any(|record| record.state == State::Accepted);
            self.note_change(AddressRange::EVERYTHING);
            if is_new {
                // The caches drop it all. What is lost says nothing more by itself.
                self.follower.monitor().notify();
            }
        }
        news
    }

    fn note_change(&mut self, changed: AddressRange) {
        note_change(&mut self.records, changed, self.longest);
    }

    fn changed(&self) -> impl Iterator<Item = ChangedRange> {
        let changed = self.records.iter().filter(|(_, record)| record.state == State::Changed);
        changed.filter_map(|(&(start, length), record)| {
            let range = AddressRange::new(start, length).ok()?;
            Some(ChangedRange { range, since: record.since })
        })
    }

    fn note(&mut self, call: Call) {
        if self.threads.len() >= MOST_THREADS && !self.threads.contains_key(&call.thread) {
            self.threads.clear();
        }
        self.threads.entry(call.thread).or_default().note(call.stack, self.tick);
    }
}

const fn key_of(range: AddressRange) -> (usize, usize) {
    (range.start(), range.len())
}

/// What is only noted ends, and what caches may keep has changed. No record is longer than `longest`.
fn note_change(
    records: &mut BTreeMap<(usize, usize), Record>,
    changed: AddressRange,
    longest: usize,
) {
    let first = (changed.start().saturating_sub(longest), 0);
    let touched = records.range_mut(first..(changed.end(), 0));
    let touched = touched.filter(|(key, _)| key.0 + key.1 > changed.start());
    let mut ended = Vec::new();
    for (key, record) in touched {
        match record.state {
            State::Noted => ended.push(*key),
            State::Accepted | State::Changed => record.state = State::Changed,
        }
    }
    ended.iter().for_each(|key| _ = records.remove(key));
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{Position, Replay, Sequence, Uncovered};
    use pinfold_sim::{Fake, FakeMonitor};
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

    /// Sees what a test tells it.
    #[derive(Default, Debug)]
    pub(in crate::monitor) struct MonitorScript {
        log: Mutex<Vec<AddressRange>>,
        /// Entries that the next watch makes.
        at_watch: Mutex<Vec<AddressRange>>,
        incomplete: AtomicBool,
        uncovered: AtomicBool,
        pending: AtomicBool,
        lost: AtomicBool,
        forked: AtomicBool,
        notified: AtomicU32,
        /// Panics the next time that it is asked this.
        panics_at: Mutex<Option<&'static str>>,
    }

    /// Panics with another as it is dropped, and that again.
    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            std::panic::panic_any(Bomb);
        }
    }

    pub(in crate::monitor) type ScriptedMonitor = Fake<MonitorScript>;

    impl MonitorScript {
        pub(in crate::monitor) fn panics_at(&self, question: &'static str) {
            *self.panics_at.lock().unwrap() = Some(question);
        }

        pub(in crate::monitor) fn has_panicked(&self) -> bool {
            self.panics_at.lock().unwrap().is_none()
        }

        fn asked(&self, question: &'static str) {
            let panics = self.panics_at.lock().unwrap().take_if(|at| *at == question).is_some();
            if panics {
                std::panic::panic_any(Bomb);
            }
        }

        pub(in crate::monitor) fn change(&self, start: usize, length: usize) {
            self.log.lock().unwrap().push(range(start, length));
        }
    }

    impl FakeMonitor for MonitorScript {
        fn check(&self) -> Result<Sequence, Lost> {
            self.asked("check");
            if self.lost.load(SeqCst) {
                return Err(Lost::Descriptor { errno: 9 });
            }
            Ok(Sequence(self.log.lock().unwrap().len() as u64))
        }
        fn watch(&self, _: AddressRange) -> Watch {
            self.asked("watch");
            let made = std::mem::take(&mut *self.at_watch.lock().unwrap());
            self.log.lock().unwrap().extend(made);
            match self.uncovered.load(SeqCst) {
                true => Watch::Uncovered(Uncovered::Unmapped),
                false => Watch::Covered,
            }
        }
        fn change_pending(&self, _: AddressRange) -> bool {
            self.asked("pending");
            self.pending.load(SeqCst)
        }
        fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
            self.asked("replay");
            let log = self.log.lock().unwrap().clone();
            let start = usize::try_from(from.0).unwrap().min(log.len());
            let complete = !self.incomplete.swap(false, SeqCst);
            log[start..].iter().copied().for_each(visit);
            let end = log.len() as u64;
            Replay { up_to: Position(end, 0), sequence: Sequence(end), complete, may_repeat: false }
        }
        fn forked(&self) -> bool {
            self.asked("forked");
            self.forked.load(SeqCst)
        }
        fn notified(&self) -> u32 {
            self.asked("notified");
            self.notified.load(SeqCst)
        }
        fn notify(&self) {
            self.asked("notify");
            self.notified.fetch_add(1, SeqCst);
        }
        fn wait(&self, _: u32) {
            self.asked("wait");
        }
    }

    const PAGE: usize = 4096;

    fn range(start: usize, length: usize) -> AddressRange {
        AddressRange::new(start, length).unwrap()
    }

    const fn by(thread: usize) -> Call {
        Call { thread, stack: 1000 }
    }

    fn table() -> Subscriptions<ScriptedMonitor> {
        Subscriptions::new(Arc::new(ScriptedMonitor::default())).unwrap()
    }

    /// Subscribed twice by thread 1, as if it had registered the range in between.
    fn kept(start: usize, length: usize) -> (Subscriptions<ScriptedMonitor>, AddressRange) {
        let (table, range) = (table(), range(start, length));
        assert!(!table.subscribe(range, by(1)) && table.subscribe(range, by(1)));
        (table, range)
    }

    #[test]
    fn the_first_subscription_is_refused_and_the_second_kept() {
        let (table, kept) = kept(PAGE, PAGE);
        assert!(table.valid(kept));
        assert!(!table.valid(range(PAGE, PAGE - 1)), "another range");
        assert!(table.changed().is_empty());
    }

    /// By the change that the monitor of an unmodified cache loses: behind the registration, before the subscription.
    #[test]
    fn a_change_between_a_registration_and_its_subscription_spoils_it() {
        let (table, range) = (table(), range(PAGE, PAGE));
        assert!(!table.subscribe(range, by(1)));
        table.monitor.change(PAGE + 5, 1);
        assert!(!table.subscribe(range, by(1)) && !table.valid(range));
        assert!(table.subscribe(range, by(1)), "watched by the one before");
    }

    /// Thread 2 may have begun to register before thread 1 had the range watched.
    #[test]
    fn a_thread_that_was_not_seen_behind_the_watch_is_refused() {
        let (table, watched) = (table(), range(PAGE, PAGE));
        let _elsewhere = table.subscribe(range(9 * PAGE, PAGE), by(2));
        assert!(!table.subscribe(watched, by(1)));
        assert!(!table.subscribe(watched, by(2)));
        assert!(table.subscribe(watched, by(2)), "it began behind its own call");
        assert!(!table.subscribe(watched, by(3)), "also where another is accepted");
        assert!(table.valid(watched), "which stays");
    }

    /// A cache that registers through another one: both subscribe the range, the inner one from within the
    /// registration of the outer one, which began before the range was watched.
    #[test]
    fn a_subscription_from_within_a_registration_says_nothing_of_its_beginning() {
        let (table, range) = (table(), range(PAGE, PAGE));
        let at = |stack| table.subscribe(range, Call { thread: 1, stack });
        assert_eq!([at(500), at(1000)], [false, false]);
        assert_eq!([at(500), at(1000)], [true, true], "behind the outer call above");
    }

    #[test]
    fn what_is_pending_uncovered_or_changed_as_it_is_watched_is_not_noted() {
        let (table, range) = (table(), range(PAGE, PAGE));
        for spoilt in [&table.monitor.pending, &table.monitor.uncovered] {
            spoilt.store(true, SeqCst);
            assert!(!table.subscribe(range, by(1)) && !table.subscribe(range, by(1)));
            spoilt.store(false, SeqCst);
        }
        table.monitor.at_watch.lock().unwrap().push(range);
        assert!(!table.subscribe(range, by(1)));
        assert!(!table.subscribe(range, by(1)), "the first left no note");
        assert!(table.subscribe(range, by(1)));
    }

    /// Caches of two domains may have it, and only one asks.
    #[test]
    fn what_changed_is_not_accepted_before_all_have_dropped_it() {
        let (table, kept) = kept(3 * PAGE, 2 * PAGE);
        table.monitor.change(4 * PAGE, PAGE);
        assert!(!table.valid(kept));
        assert!(!table.subscribe(kept, by(1)) && !table.subscribe(kept, by(1)));
        let changed = table.changed();
        assert_eq!(changed.iter().map(|it| it.range).collect::<Vec<_>>(), [kept]);
        assert!(!table.subscribe(kept, by(1)), "they are being told");
        table.notified(&changed);
        assert!(!table.subscribe(kept, by(1)) && table.subscribe(kept, by(1)));
        assert!(table.valid(kept));
    }

    /// A feeder that is late, while all caches end and others begin.
    #[test]
    fn a_late_notification_ends_no_record_that_was_made_since() {
        let (table, kept) = kept(PAGE, PAGE);
        table.monitor.change(PAGE, PAGE);
        let late = table.changed();
        table.clear();
        assert!(!table.subscribe(kept, by(1)) && table.subscribe(kept, by(1)));
        table.monitor.change(PAGE, PAGE);
        assert!(!table.valid(kept));
        table.notified(&late);
        assert!(!table.subscribe(kept, by(1)) && !table.subscribe(kept, by(1)));
    }

    #[test]
    fn long_ranges_are_found_by_changes_far_behind_their_start() {
        let (table, long) = kept(PAGE, 100 * PAGE);
        let short = range(90 * PAGE, PAGE);
        assert!(!table.subscribe(short, by(1)) && table.subscribe(short, by(1)));
        table.monitor.change(101 * PAGE, PAGE);
        assert!(table.valid(long) && table.valid(short), "behind both");
        table.monitor.change(100 * PAGE, PAGE);
        assert!(!table.valid(long) && table.valid(short));
    }

    #[test]
    fn a_log_that_lost_entries_has_changed_everything() {
        let (table, kept) = kept(PAGE, PAGE);
        table.monitor.incomplete.store(true, SeqCst);
        table.monitor.change(80 * PAGE, PAGE);
        assert!(!table.valid(kept) && table.changed().len() == 1);
    }

    #[test]
    fn nothing_is_valid_or_accepted_once_the_monitor_is_lost() {
        let (table, kept) = kept(PAGE, PAGE);
        table.monitor.lost.store(true, SeqCst);
        assert!(!table.valid(kept) && !table.subscribe(kept, by(1)));
        assert_eq!(table.monitor.notified.load(SeqCst), 1, "the feeder is woken once");
        assert_eq!(table.changed().len(), 1);
    }

    /// Whatever it panics at, what was kept before may be stale, and is kept anew once the caches have dropped it.
    #[test]
    fn where_the_monitor_panics_everything_has_changed() {
        for question in ["check", "replay", "notified"] {
            let (table, range) = kept(PAGE, PAGE);
            table.monitor.change(9 * PAGE, 1);
            table.monitor.panics_at(question);
            assert!(!table.valid(range) && table.monitor.has_panicked(), "{question}");
            assert!(!table.valid(range) && !table.subscribe(range, by(1)), "{question}");
            let changed = table.changed();
            assert_eq!(changed.iter().map(|each| each.range).collect::<Vec<_>>(), [range]);
            table.notified(&changed);
            assert!(!table.subscribe(range, by(1)) && table.subscribe(range, by(1)));
        }
    }

    #[test]
    fn a_range_at_whose_watch_the_monitor_panics_is_not_noted() {
        for question in ["watch", "pending"] {
            let (table, range) = (table(), range(PAGE, PAGE));
            table.monitor.panics_at(question);
            assert!(!table.subscribe(range, by(1)) && table.monitor.has_panicked(), "{question}");
            assert!(!table.subscribe(range, by(1)), "{question}: it is not watched");
            assert!(table.subscribe(range, by(1)));
        }
    }

    /// The lock is taken, as a forked child may find it.
    #[test]
    fn a_forked_child_waits_for_nothing() {
        let (table, kept) = kept(PAGE, PAGE);
        table.monitor.forked.store(true, SeqCst);
        let _taken = table.table.lock().unwrap();
        assert!(!table.valid(kept) && !table.subscribe(kept, by(1)));
        assert!(table.changed().is_empty());
        table.clear();
    }

    #[test]
    fn a_full_table_forgets_notes_then_has_the_oldest_dropped() {
        let table = table();
        let nth = |number: usize| range((number + 1) * PAGE, PAGE);
        for number in 0..MOST_RANGES {
            assert!(!table.subscribe(nth(number), by(1)));
        }
        let keep = |number| (0..3).any(|_| table.subscribe(nth(number), by(1)));
        assert!((0..=MOST_RANGES).all(keep) || table.changed().len() == MOST_RANGES / 4);
        assert!(table.monitor.notified.load(SeqCst) > 0, "the feeder is woken");
        let dropped = table.changed();
        assert!(dropped.iter().all(|it| it.range.start() <= (MOST_RANGES / 4 + 1) * PAGE));
        assert!(!keep(MOST_RANGES + 1), "before they are dropped");
        table.notified(&dropped);
        assert!(keep(MOST_RANGES + 1) && table.valid(nth(MOST_RANGES - 1)));
    }

    #[test]
    fn threads_and_depths_are_forgotten_not_believed() {
        let mut calls = Calls::default();
        (0..20).for_each(|depth| calls.note(1000 - depth, depth as u64 + 1));
        assert!(calls.0.len() <= MOST_DEPTHS);
        assert_eq!((calls.last(1001), calls.last(1000), calls.last(10)), (0, 1, 20));
        (0..20).for_each(|turn| {
            calls.note(1000, 100 + turn);
            calls.note(500, 200 + turn);
        });
        assert_eq!((calls.last(1000), calls.last(500)), (119, 219));
        let (table, kept) = kept(PAGE, PAGE);
        (2..MOST_THREADS + 2).for_each(|thread| _ = table.subscribe(kept, by(thread)));
        assert!(!table.subscribe(kept, by(1)), "forgotten");
        assert!(table.subscribe(kept, by(1)) && table.valid(kept));
    }

    /// Pages, caches and threads of libfabric's, one step at a time: whatever the order, no entry is found that has
    /// other pages than the program.
    struct World {
        table: Subscriptions<ScriptedMonitor>,
        random: fastrand::Rng,
        /// What stands in each page now.
        pages: [u64; 4],
        caches: [Vec<Entry>; 2],
        threads: [Stage; 3],
        /// A change that is logged and has not taken effect.
        pending: Option<usize>,
        /// What the feeder is about to have dropped.
        dropping: Option<Vec<ChangedRange>>,
        hits: usize,
    }

    #[derive(Clone, Debug)]
    struct Entry {
        range: AddressRange,
        pages: Vec<u64>,
    }

    /// How far a thread is with a registration: through cache 0, which may register through cache 1.
    #[derive(Clone, Debug)]
    enum Stage {
        Idle,
        Begun {
            range: AddressRange,
            cache: usize,
        },
        Registered {
            entry: Entry,
            cache: usize,
        },
        /// The same of the inner cache, while the outer one's registration runs.
        Inner {
            entry: Entry,
        },
    }

    impl World {
        fn new(seed: u64) -> Self {
            Self {
                table: table(),
                random: fastrand::Rng::with_seed(seed),
                pages: [0; 4],
                caches: [Vec::new(), Vec::new()],
                threads: [const { Stage::Idle }; 3],
                pending: None,
                dropping: None,
                hits: 0,
            }
        }

        fn step(&mut self) {
            match self.random.u32(..16) {
                0 => self.change(),
                1 => self.begin_change(),
                2 | 3 => self.end_change(),
                4..7 => self.feed(),
                7 if self.threads.iter().all(|stage| matches!(stage, Stage::Idle)) => {
                    self.close_caches();
                }
                _ => self.advance(),
            }
        }

        fn pages_of(&self, range: AddressRange) -> Vec<u64> {
            self.pages[range.start() / PAGE - 1..range.end() / PAGE - 1].to_vec()
        }

        fn change(&mut self) {
            let page = self.random.usize(..4);
            self.pages[page] += 1;
            self.table.monitor.change((page + 1) * PAGE, PAGE);
        }

        fn begin_change(&mut self) {
            if self.pending.is_none() {
                let page = self.random.usize(..4);
                self.pending = Some(page);
                self.table.monitor.pending.store(true, SeqCst);
                self.table.monitor.change((page + 1) * PAGE, PAGE);
            }
        }

        fn end_change(&mut self) {
            if let Some(page) = self.pending.take() {
                self.pages[page] += 1;
                self.table.monitor.pending.store(false, SeqCst);
            }
        }

        fn feed(&mut self) {
            match self.dropping.take() {
                None => self.dropping = Some(self.table.changed()),
                Some(changed) => {
                    for ChangedRange { range, .. } in &changed {
                        self.caches.iter_mut().for_each(|cache| drop_of(cache, *range));
                    }
                    // Another thread comes between the two at times.
                    if self.random.bool() {
                        self.advance();
                    }
                    self.table.notified(&changed);
                }
            }
        }

        fn close_caches(&mut self) {
            self.caches.iter_mut().for_each(Vec::clear);
            self.table.clear();
        }

        fn advance(&mut self) {
            let thread = self.random.usize(..3);
            let stage = std::mem::replace(&mut self.threads[thread], Stage::Idle);
            self.threads[thread] = match stage {
                Stage::Idle => self.begin(),
                Stage::Begun { range, cache: 0 } if self.random.bool() => self.through_inner(range),
                Stage::Begun { range, cache } => {
                    let entry = Entry { range, pages: self.pages_of(range) };
                    Stage::Registered { entry, cache }
                }
                Stage::Inner { entry } => {
                    self.subscribe(thread, 500, 1, entry.clone());
                    Stage::Registered { entry, cache: 0 }
                }
                Stage::Registered { entry, cache } => {
                    self.subscribe(thread, 1000, cache, entry);
                    Stage::Idle
                }
            };
        }

        fn begin(&mut self) -> Stage {
            let start = self.random.usize(1..4);
            let range = range(start * PAGE, PAGE * self.random.usize(1..=5 - start));
            let cache = self.random.usize(..2);
            match self.find(range, cache) {
                Some(_) => Stage::Idle,
                None => Stage::Begun { range, cache },
            }
        }

        fn through_inner(&mut self, range: AddressRange) -> Stage {
            match self.find(range, 1) {
                Some(entry) => Stage::Registered { entry, cache: 0 },
                None => Stage::Inner { entry: Entry { range, pages: self.pages_of(range) } },
            }
        }

        /// What is found has the program's pages; what is not makes room.
        fn find(&mut self, range: AddressRange, cache: usize) -> Option<Entry> {
            let known = self.caches[cache].iter().find(|entry| entry.range == range).cloned();
            let found = known.filter(|_| self.table.valid(range));
            match &found {
                Some(entry) => {
                    assert_eq!(entry.pages, self.pages_of(range), "stale: {range:?}");
                    self.hits += 1;
                }
                None => drop_of(&mut self.caches[cache], range),
            }
            found
        }

        fn subscribe(&mut self, thread: usize, stack: usize, cache: usize, entry: Entry) {
            drop_of(&mut self.caches[cache], entry.range);
            let changing = self.random.usize(..8);
            if changing < 4 {
                let change = range((changing + 1) * PAGE, PAGE);
                self.table.monitor.at_watch.lock().unwrap().push(change);
            }
            let is_kept = self.table.subscribe(entry.range, Call { thread, stack });
            let unused = std::mem::take(&mut *self.table.monitor.at_watch.lock().unwrap());
            if changing < 4 && unused.is_empty() {
                self.pages[changing] += 1;
            }
            if is_kept {
                self.caches[cache].push(entry);
            }
        }
    }

    fn drop_of(cache: &mut Vec<Entry>, range: AddressRange) {
        cache.retain(|entry| !entry.range.overlaps(&range));
    }

    #[test]
    fn no_order_of_steps_has_a_cache_find_other_pages_than_the_program_s() {
        let hits: usize = (0..3000)
            .map(|seed| {
                let mut world = World::new(seed);
                (0..300).for_each(|_| world.step());
                world.hits
            })
            .sum();
        assert!(hits > 1000, "{hits}");
    }
}
