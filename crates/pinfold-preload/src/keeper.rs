//! Keeps registrations: the store, the monitor that says what changed, and libibverbs to end them.
//!
//! # The life of a kept registration
//!
//! It is noted in the store, its memory is watched, then libibverbs registers it, and the program gets
//! libibverbs' own handle. When the program gives it back it stays, idle; the same bytes find it
//! again. Once its device is closed without `ibv_close_device`, it is forgotten (`device`). When the monitor says that its bytes changed, nothing finds it any more. The program's next
//! calls deregister it, or a thread does, one for all of the process, which sleeps else. That thread has the
//! kernel end it; what libibverbs has of it is released by the program's next calls (`steps`).
//!
//! **Why nothing stale is found.** Let a change of its bytes take effect after the registration began.
//! If the monitor's entry of it is applied after the registration was noted, it marks the record. If
//! it was applied before, the change is one that takes effect later than its entry is logged; then the
//! monitor says that it is pending, which is asked after the noting and before the registration, and
//! the registration is not kept. Finding applies every entry first that took effect before.
//!
//! # Locks
//!
//! `books` guards the store and how far the monitor's log is applied to it. Nothing is registered,
//! deregistered or watched under it. A panic under it ends all keeping: what is registered stays so. The thread that
//! deregisters holds a gate around it, `at_books`, and another, `at_work`, until it has deregistered: a thread of the
//! program that waits for either lends it its priority. A call that interrupts a thread with the books finds none (`holding`).
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the fields of handles that the program gives, and to call
//! libibverbs with handles out of the store, each of which has one holder.

#![allow(unsafe_code)]

use crate::admission::Admission;
use crate::apart;
use crate::children::{Children, Ends, Moves, Name};
use crate::device::{LentDevice, OpenDevices, Opening, Table};
use crate::heap::secure_room;
use crate::holding::Holding;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::hooks::note_kept;
use crate::mapping_room::MappingRoom;
use crate::real::{Real, real};
use crate::reasons::Reason;
use crate::report::Totals;
use crate::sandbox;
use crate::steps::{Ended, in_kernel, in_library};
use crate::store::{DomainName, End, HandleFields, Key, Leaving, Limit, Region, Scope, Store};
use crate::sync::{Condvar, HeldGate, Mutex, MutexGuard, PriorityGate, sleep};
use pinfold::monitor::{Best, WatchPause};
use pinfold::registrar::verbs::ffi::ibv_mr;
use pinfold::{AddressRange, Lost, Monitor, Position, Sequence, Uncovered, Watch};
use pinfold_kernel::Errno;
use pinfold_kernel::errno::{last_errno, set_errno};
use std::collections::{HashMap, TryReserveError};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

/// The monitor of a process.
pub(crate) type Monitored = Arc<Best>;

/// How long what is to be deregistered waits for the program's next calls, which take it along, before
/// the thread does it.
const GATHER: Duration = Duration::from_millis(10);

/// How many changed registrations one call of the program deregisters besides its own work.
const ALONG: usize = 4;

/// How many that the kernel has ended already it has libibverbs release: no system call.
const REMAINS_ALONG: usize = 64;

/// How many ranges kept in vain are remembered.
const IN_VAIN: usize = 64;

/// See the module.
#[derive(Debug)]
pub(crate) struct Keeper {
    monitor: Monitored,
    admission: &'static Admission,
    children: Children,
    books: Mutex<Books>,
    at_books: PriorityGate,
    at_work: PriorityGate,
    /// Notified whenever registrations have been given back to libibverbs.
    departed: Condvar,
    mapping_room: MappingRoom,
}

#[derive(Debug)]
struct Books {
    store: Store,
    /// How far the monitor's log is applied.
    position: Position,
    applied: Sequence,
    lost: bool,
    /// For threads of the program to release: what the kernel has ended and libibverbs has still, and what our thread
    /// could not end.
    remains: Vec<Remains>,
    /// Of which domains the thread of ours deregisters: it holds `at_work` from before until behind that.
    at_work: Vec<DomainName>,
    /// How many of each domain are being deregistered.
    leaving: HashMap<DomainName, usize, BuildHasherDefault<DefaultHasher>>,
    devices: OpenDevices,
    totals: Totals,
    /// What children have ended of the program's handles, as far as it was heeded.
    ended: u64,
    /// Where something was kept in vain: perhaps nothing there needs to be watched. A few, the others are
    /// forgotten.
    in_vain: Vec<AddressRange>,
    /// How often what is idle was changed; see [`Children::take_over`].
    moves: Moves,
}

/// What is left of a registration, and how far it is ended.
#[derive(Clone, Copy, Debug)]
struct Remains {
    leaving: Leaving,
    ended: Ended,
}

impl Keeper {
    /// Starts nothing yet: [`reclaim`](Self::reclaim) is to run on a thread.
    pub(crate) fn new(
        monitor: Monitored,
        limit: Limit,
        admission: &'static Admission,
        children: Children,
        mapping_room: MappingRoom,
    ) -> Self {
        // Nothing is registered yet, so what happened before concerns nothing.
        let start = monitor.replay(Position::NOWHERE, &mut |_| ());
        let books = Books {
            store: Store::new(limit),
            position: start.up_to,
            applied: start.sequence,
            lost: false,
            remains: Vec::new(),
            at_work: Vec::new(),
            leaving: HashMap::default(),
            devices: OpenDevices::default(),
            totals: Totals::default(),
            ended: children.ended(),
            in_vain: Vec::with_capacity(IN_VAIN),
            moves: children.moves(),
        };
        let (books, departed) = (Mutex::new(books), Condvar::new());
        // A program's filter may answer the gates' system call, which the C library's locks do not make, with a signal.
        let may_wait = || !sandbox::is_the_program_s();
        let (at_books, at_work) = (PriorityGate::new(may_wait), PriorityGate::new(may_wait));
        Self { monitor, admission, children, books, at_books, at_work, departed, mapping_room }
    }

    /// An idle registration of exactly this, the program's from now on.
    pub(crate) fn find(&self, key: &Key) -> Option<NonNull<ibv_mr>> {
        let books = self.books()?;
        // Most that is not there never was: that costs no system call.
        if !books.store.has_idle(key) {
            return None;
        }
        let mut books = self.up_to_date(books)?;
        if !books.store.has_idle(key) || !self.take_over(&mut books) {
            return None;
        }
        let (region, is_first) = books.store.take(key)?;
        books.totals.hits += 1;
        drop(books);
        if is_first {
            self.admission.note_found(key);
        }
        handle_of(region)
    }

    /// Registers, to be kept if the monitor covers the memory.
    ///
    /// # Errors
    ///
    /// That was not tried, and nothing is registered.
    pub(crate) fn register(
        &self,
        key: Key,
        register: &dyn Fn(&Real) -> *mut ibv_mr,
    ) -> Result<*mut ibv_mr, Reason> {
        let range = key.range().ok_or(Reason::NoMemory)?;
        let real = real().ok_or(Reason::Fault)?;
        let place = self.begin(key, range)?;
        // The monitor reads tables of the kernel into buffers on the stack, and the caller's may be
        // small.
        let obstacle = apart::run_again(|| self.obstacle(range)).unwrap_or(Some(Reason::Fault));
        if obstacle == Some(Reason::ManyChanges) {
            // The next registration of these bytes that is tried to be kept comes later, because each waits.
            self.admission.note_vain(&key);
        }
        let made = self.with_room(|| register(&real), |made| made.is_null());
        let errno = last_errno();
        self.land(place, made, obstacle);
        // Now, and not as the program moves memory to where nothing is.
        secure_room();
        set_errno(errno);
        Ok(made)
    }

    fn begin(&self, key: Key, range: AddressRange) -> Result<u32, Reason> {
        let mut books = self.current().ok_or(Reason::MonitorLost)?;
        if books.lost {
            return Err(Reason::MonitorLost);
        }
        if !books.store.has_room_for(&key) {
            return Err(Reason::OverBudget);
        }
        let opening = books.opening_of(key.domain.device).ok_or(Reason::Fault)?;
        let place = books.store.begin(key, opening).ok_or(Reason::NoRoom)?;
        books.totals.misses += 1;
        note_kept(range);
        Ok(place)
    }

    /// Why what is registered in `range` is not kept, if it is not: otherwise the monitor covers it from now on.
    fn obstacle(&self, range: AddressRange) -> Option<Reason> {
        match self.monitor.may_have_hugetlb(range) {
            Ok(false) => {}
            Ok(true) => return Some(Reason::HugePagePool),
            Err(_) => return Some(Reason::WatchRefused),
        }
        if !self.mapping_room.has_room(|| self.monitor.count_mappings().ok()) {
            return Some(Reason::ManyMappings);
        }
        match self.monitor.watch(range) {
            Watch::Covered => self.monitor.change_pending(range).then_some(Reason::Changing),
            Watch::Uncovered(Uncovered::Mapping(_)) => Some(Reason::KindOfMemory),
            Watch::Uncovered(Uncovered::Unmapped | Uncovered::NoAccess) => Some(Reason::NoMemory),
            Watch::Uncovered(Uncovered::Lost(_)) => Some(Reason::MonitorLost),
            // The monitor has waited for some 20 ms.
            Watch::Uncovered(Uncovered::Refused { errno: libc::EAGAIN }) => {
                Some(Reason::ManyChanges)
            }
            Watch::Uncovered(_) => Some(Reason::WatchRefused),
        }
    }

    fn land(&self, place: u32, made: *mut ibv_mr, obstacle: Option<Reason>) {
        let Some(mut books) = self.books() else { return };
        let Some(made) = NonNull::new(made) else { return books.store.abandon(place) };
        books.totals.regs += 1;
        // SAFETY: libibverbs has just made it.
        let region = unsafe { fields_of(made) }.region;
        if let Some(reason) = obstacle {
            books.store.abandon(place);
            books.store.note_fresh(region.address);
            books.totals.per_use.note(reason);
        } else if let Err(reason) = books.store.land(place, region) {
            books.totals.per_use.note(reason);
        }
    }

    /// Calls `register`, once more if it lacks room that idle registrations take, or took: another thread may have
    /// deregistered them since.
    pub(crate) fn with_room<T>(
        &self,
        register: impl Fn() -> T,
        has_failed: impl Fn(&T) -> bool,
    ) -> T {
        let errno_before = last_errno();
        let before = self.deregistered();
        set_errno(errno_before);
        let made = register();
        let errno = last_errno();
        if has_failed(&made) && matches!(errno, Errno(libc::ENOMEM | libc::EAGAIN | libc::ENOSPC)) {
            self.empty(Scope::Everything);
            if self.deregistered() != before {
                set_errno(errno_before);
                return register();
            }
            set_errno(errno);
        }
        made
    }

    /// The program gives `mr` back.
    ///
    /// # Safety
    ///
    /// `mr` is a handle that the program has.
    pub(crate) unsafe fn end(&self, mr: NonNull<ibv_mr>) -> End {
        let Some(mut books) = self.books() else { return End::Foreign };
        self.heed_children(&mut books);
        // What becomes idle, and what is ended below.
        self.take_over(&mut books);
        // SAFETY: the caller's promise.
        let end = books.store.release(&unsafe { fields_of(mr) });
        let mut excess = books.store.take_excess(&mut |key| self.admission.note_vain(key));
        books.totals.evictions += excess.len() as u64;
        if excess.try_reserve(ALONG).is_ok() {
            excess.append(&mut books.store.take_dead(ALONG));
        }
        books.forget_ended(&mut excess);
        let remains = books.take_remains(Scope::Everything, REMAINS_ALONG);
        books.note_leaving(&excess);
        let before = books.ended;
        drop(books);
        self.deregister(&excess, before, by_library);
        self.release(&remains, before);
        end
    }

    /// The program's handle is libibverbs' alone from now on. False if it was before.
    pub(crate) fn forget(&self, mr: *mut ibv_mr) -> bool {
        self.books().is_some_and(|mut books| books.store.forget(mr.addr()))
    }

    /// libibverbs has just made `mr`, which is not kept.
    pub(crate) fn note_passed(&self, mr: *mut ibv_mr) {
        if let Some(mut books) = self.books() {
            books.store.note_fresh(mr.addr());
        }
    }

    /// The program's handles in `scope` are gone.
    pub(crate) fn forget_live(&self, scope: Scope) {
        if let Some(mut books) = self.books() {
            books.store.forget_live(scope);
            if let Scope::Device(device) = scope {
                books.devices.forget(device);
            }
        }
    }

    /// How many registrations have been given back so far. One that is not counted yet is awaited by
    /// [`empty`](Self::empty), and counted behind it.
    fn deregistered(&self) -> u64 {
        self.books().map_or(0, |books| books.totals.deregs)
    }

    /// Deregisters what is idle in `scope`, and waits for what is being deregistered there.
    pub(crate) fn empty(&self, scope: Scope) {
        while self.empty_in_part(scope, by_library) {}
        self.await_departures(scope);
    }

    /// Deregisters all that is idle, or remains, as the process ends, and keeps nothing any more. By the kernel alone where
    /// that can be: the structures go with the process, and libibverbs would wait for ever for the C library's allocator
    /// where a handler ends the process in the midst of that. What other threads of the program are deregistering is not
    /// waited for: they may wait for this one.
    pub(crate) fn empty_at_the_end(&self) {
        let Some(mut books) = self.books() else { return };
        books.store.keep_no_more();
        let devices = books.devices.look_last();
        drop(books);
        let end = |leaving: &Leaving| {
            let lent = devices.lend(leaving.opening, &Table::Shared);
            let ended = lent.map_or(Ended::Not, |lent| end_in_kernel(&lent, leaving.region));
            ended == Ended::InKernel || by_library(leaving)
        };
        while self.empty_in_part(Scope::Everything, end) {}
        // The thread of ours may be at work, and leaves behind what it cannot end.
        self.at_work.pass();
        let Some(mut books) = self.books() else { return };
        books.remains.retain(|remains| remains.ended == Ended::Not);
        let (remains, before) = (books.take_remains(Scope::Everything, usize::MAX), books.ended);
        drop(books);
        self.deregister(remains.iter().map(|remains| &remains.leaving), before, end);
    }

    /// Deregisters by `end`, of what is idle in `scope`, as much as there is memory for at once. Whether there is more.
    fn empty_in_part(&self, scope: Scope, end: impl Fn(&Leaving) -> bool) -> bool {
        let Some(mut books) = self.books() else { return false };
        self.heed_children(&mut books);
        self.take_over(&mut books);
        let mut idle = books.store.take_idle(scope);
        let is_part = !idle.is_empty() && books.store.has_idle_in(scope);
        books.forget_ended(&mut idle);
        books.note_leaving(&idle);
        let before = books.ended;
        drop(books);
        self.deregister(&idle, before, end);
        is_part
    }

    /// This is the keeper of a forked child of the process that `parent` is of.
    ///
    /// Another thread of the parent may have had the lock. Then it is held in this process for ever, and nothing is ended
    /// that stands in those books. Where another thread of this process has it at the moment, a device that the program
    /// closes is told by [`forget_inherited`](Self::forget_inherited) alone.
    pub(crate) fn inherit(&mut self, parent: &Self) {
        if let (Ok(books), Ok(inherited)) = (self.books.get_mut(), parent.books.try_lock()) {
            books.devices.inherit(&inherited.devices);
        }
    }

    /// A forked child of the process that kept this closes `device`: one that has its address and its number later is
    /// another. Where another thread of the child has the lock at the moment, that is told by its mark alone.
    pub(crate) fn forget_inherited(&self, device: usize) {
        if let Ok(mut books) = self.books.try_lock() {
            books.devices.forget(device);
        }
    }

    /// Deregisters what is idle, in a forked child of the process that kept it, if some of it is in `scope`.
    pub(crate) fn empty_inherited(&self, scope: Scope) {
        self.empty_inherited_by(scope, |leaving| _ = dereg(leaving.region));
    }

    fn empty_inherited_by(&self, scope: Scope, mut end: impl FnMut(&Leaving)) {
        // Another thread of the parent may have had the lock.
        let Ok(mut books) = self.books.try_lock() else { return };
        // Not if the parent went on with it, which is asked before the system calls.
        let is_left = books.store.has_idle_in(scope) && self.children.stand_at(books.moves);
        // Everything, because the parent forgets everything: what this child cannot end no process would end then.
        if !is_left || !books.may_end_idle() || !self.children.empty(books.moves) {
            return;
        }
        loop {
            let mut idle = books.store.take_idle(Scope::Everything);
            if idle.is_empty() {
                return;
            }
            books.forget_ended(&mut idle);
            // Children may have ended some of it since the fork, and do meanwhile: the numbers of those may be others' by
            // now. What this child has of the books stays: it is asked what the parent may have.
            let is_ours = |leaving: &&Leaving| !self.has_child_ended(leaving, books.ended);
            idle.iter().filter(is_ours).for_each(&mut end);
        }
    }

    /// Whether the parent may have `mr`; asked in a forked child.
    pub(crate) fn may_have(&self, mr: *mut ibv_mr) -> bool {
        self.books.try_lock().map_or(true, |books| books.store.has(mr.addr()))
    }

    /// Whether this process was the first to keep something in what `descriptor` stands for.
    pub(crate) fn has_marked(&self, descriptor: libc::c_int) -> bool {
        self.books().is_some_and(|books| books.devices.has_marked(descriptor))
    }

    pub(crate) const fn monitor(&self) -> &Monitored {
        &self.monitor
    }

    /// What was done so far.
    pub(crate) fn totals(&self) -> Totals {
        self.books().map(|books| books.totals).unwrap_or_default()
    }

    /// Deregisters what has changed, for as long as the process lives. `table` is the calling thread's.
    pub(crate) fn reclaim(&self, table: &Table) {
        loop {
            let seen = self.monitor.notified();
            // A panic costs what was to be deregistered, no more.
            let _panicked = catch_unwind(AssertUnwindSafe(|| self.reclaim_once(table)));
            self.monitor.wait(seen);
            // Before the look, not between two: changes that follow each other wake this thread once, and the program's
            // calls behind a change find the books free.
            sleep(GATHER);
        }
    }

    pub(crate) fn reclaim_once(&self, table: &Table) {
        let at_work = self.at_work.hold();
        let at_books = self.at_books.hold();
        let Some(mut books) = self.current_behind(&at_books) else { return };
        if books.store.dead() == 0 && books.in_vain.is_empty() {
            return;
        }
        // Without, they wait for the program's next calls.
        let Ok(remains) = books.room_for_dead() else { return };
        self.take_over(&mut books);
        let (dead, devices) = (books.store.take_dead(remains.capacity()), books.devices.look());
        let in_vain = std::mem::replace(&mut books.in_vain, Vec::with_capacity(IN_VAIN));
        books.note_leaving(&dead);
        books.begin_work(&dead);
        let before = books.ended;
        drop((books, at_books));
        self.deregister_in_kernel(&dead, before, remains, |opening| devices.lend(opening, table));
        drop(at_work);
        in_vain.iter().for_each(|range| self.unwatch_around(*range));
    }

    /// Has the mappings in `range` watched no longer, if nothing in them is worth it: their changes cost
    /// what they did.
    fn unwatch_around(&self, range: AddressRange) {
        for mapping in self.monitor.watched_mappings(range).unwrap_or_default() {
            let is_used = |books: HeldBooks<'_>| books.store.holds_valid(mapping.range);
            let at_books = self.at_books.hold();
            let is_worth_it = self.current_behind(&at_books).is_none_or(is_used);
            drop(at_books);
            if !is_worth_it {
                // What is registered there at this moment is not believed.
                self.monitor.unwatch(mapping.range);
            }
        }
    }

    /// The program wants `range` for a userfaultfd of its own, or moves it: until the answer is dropped nothing there is
    /// watched, nor becomes so by another thread's registration of the same mapping. If `is_noted`, a watch ends only where
    /// the monitor has noted one.
    pub(crate) fn step_aside(&self, range: AddressRange, is_noted: bool) -> WatchPause<'_> {
        let pause = self.monitor.pause_watches();
        if !is_noted || self.monitor.may_watch(range) {
            pause.unwatch(range);
        }
        pause
    }

    /// The books with everything applied that has happened. `None` if they cannot be believed.
    fn current(&self) -> Option<HeldBooks<'_>> {
        self.up_to_date(self.books()?)
    }

    /// As [`current`](Self::current), on the thread that holds the gate.
    fn current_behind(&self, at_books: &HeldGate<'_>) -> Option<HeldBooks<'_>> {
        self.up_to_date(self.books_behind(at_books)?)
    }

    fn up_to_date<'k>(&self, mut books: HeldBooks<'k>) -> Option<HeldBooks<'k>> {
        self.heed_children(&mut books);
        match self.monitor.check() {
            Ok(sequence) if sequence == books.applied => {}
            Ok(_) => self.replay(&mut books),
            Err(Lost::Forked) => return None,
            Err(Lost::Descriptor { .. }) => {
                if !std::mem::replace(&mut books.lost, true) {
                    self.invalidate(&mut books, AddressRange::EVERYTHING);
                }
            }
        }
        Some(books)
    }

    fn replay(&self, books: &mut Books) {
        let from = books.position;
        let replay = self.monitor.replay(from, &mut |range| self.invalidate(books, range));
        if !replay.complete {
            self.invalidate(books, AddressRange::EVERYTHING);
        }
        (books.position, books.applied) = (replay.up_to, replay.sequence);
    }

    fn invalidate(&self, books: &mut Books, range: AddressRange) {
        let Books { store, in_vain, .. } = books;
        let touched = store.invalidate(range, &mut |key| {
            self.admission.note_vain(key);
            if in_vain.len() < IN_VAIN {
                in_vain.extend(key.range());
            }
        });
        books.totals.invalidations += touched;
    }

    /// A forked child may end what it inherited, and with it the parent's.
    fn heed_children(&self, books: &mut Books) {
        if self.children.is_emptied() {
            self.take_over(books);
        }
        books.forget_ends(self.children);
    }

    /// Before what is idle is changed. False if a child ended it: then it is forgotten, because the kernel may
    /// have given its numbers to others.
    fn take_over(&self, books: &mut Books) -> bool {
        let is_ours = self.children.take_over(&mut books.moves);
        if !is_ours {
            books.store.forget_idle(Scope::Everything);
        }
        is_ours
    }

    /// Whether a child has ended it since there were `before` ends: its number may be another's. What was taken off the
    /// books is not in reach of [`Books::forget_ends`].
    fn has_child_ended(&self, leaving: &Leaving, before: u64) -> bool {
        let name = name_of(&leaving.key, &leaving.region);
        // Nearly always there are none. What is not noted may be it.
        let mut names = self.children.names(before..self.children.ended());
        names.any(|ended| ended.is_none_or(|ended| ended == name))
    }

    /// By `end`, with no lock held, what no child has ended since it was taken off the books, when there were `before` ends.
    fn deregister<'l>(
        &self,
        leaving: impl IntoIterator<Item = &'l Leaving, IntoIter: Clone>,
        before: u64,
        end: impl Fn(&Leaving) -> bool,
    ) {
        let mut leaving = leaving.into_iter().peekable();
        if leaving.peek().is_none() {
            return;
        }
        let Some(holding) = Holding::begin() else { return };
        let is_ended = |leaving: &&Leaving| !self.has_child_ended(leaving, before) && end(leaving);
        let ended = leaving.clone().filter(is_ended).count();
        drop(holding);
        if let Some(mut books) = self.books() {
            books.totals.deregs += ended as u64;
            leaving.for_each(|leaving| books.note_left(leaving));
            self.departed.notify_all();
        }
    }

    /// As [`deregister`](Self::deregister), on the thread of ours, to which `lend` lends a device: what libibverbs has of them
    /// remains, and all of those whose device this thread does not get. `remains` has room for as many.
    fn deregister_in_kernel(
        &self,
        leaving: &[Leaving],
        before: u64,
        mut remains: Vec<Remains>,
        lend: impl Fn(Opening) -> Option<LentDevice>,
    ) {
        let mut lent = None;
        for &leaving in leaving {
            let opening = leaving.opening;
            if self.has_child_ended(&leaving, before) {
                continue;
            }
            lent = lent.filter(|lent: &LentDevice| lent.is_of(opening)).or_else(|| lend(opening));
            let ended =
                lent.as_ref().map_or(Ended::Not, |lent| end_in_kernel(lent, leaving.region));
            remains.push(Remains { leaving, ended });
        }
        drop(lent);
        let at_books = self.at_books.hold();
        if let Some(mut books) = self.books_behind(&at_books) {
            let ended = remains.iter().filter(|remains| remains.ended == Ended::InKernel).count();
            books.devices.end_look();
            books.totals.deregs += ended as u64;
            // The program's calls look at what stands there.
            let ends = self.children.ends(before..self.children.ended());
            forget_remains(&mut remains, &ends);
            books.remains.append(&mut remains);
            leaving.iter().for_each(|leaving| books.note_left(leaving));
            books.at_work.clear();
            self.departed.notify_all();
        }
    }

    /// Has libibverbs release what the kernel has ended; taken by [`Books::take_remains`]. With no lock held.
    fn release(&self, remains: &[Remains], before: u64) {
        if remains.is_empty() {
            return;
        }
        let Some(holding) = Holding::begin() else { return };
        let mut ended = 0;
        for &Remains { leaving, ended: how } in remains {
            let region = leaving.region;
            match how {
                Ended::InKernel => in_library(region.handle, || dereg(region)),
                Ended::Not if self.has_child_ended(&leaving, before) => {}
                Ended::Not => ended += u64::from(dereg(region)),
            }
        }
        drop(holding);
        if let Some(mut books) = self.books() {
            books.totals.deregs += ended;
            remains.iter().for_each(|remains| books.note_left(&remains.leaving));
            self.departed.notify_all();
        }
    }

    /// Waits until nothing of `scope` is being deregistered, and nothing of it remains.
    fn await_departures(&self, scope: Scope) {
        let Some(mut books) = self.books() else { return };
        loop {
            let remains = books.take_remains(scope, usize::MAX);
            if !remains.is_empty() {
                let before = books.ended;
                drop(books);
                self.release(&remains, before);
                let Some(next) = self.books() else { return };
                books = next;
            } else if books.has_leaving(scope) {
                drop(books);
                let may_lend = self.at_work.pass();
                let Some(next) = self.books() else { return };
                // The thread that deregisters may have begun anew: it is awaited at its gate, where it has this one's
                // priority. What else is leaving is with threads of the program. That the gate is held says less: by another
                // that waits, it may be, and each of the two would find the other there. Behind a panic none holds it.
                let is_at_work = may_lend && next.is_at_work(scope) && self.at_work.is_held();
                let is_awaited = next.has_leaving(scope) && !is_at_work;
                let next = if is_awaited { self.await_departure(next) } else { Some(next) };
                let Some(next) = next else { return };
                books = next;
            } else {
                return;
            }
        }
    }

    fn books(&self) -> Option<HeldBooks<'_>> {
        // First: the thread with the gate may wait for the books of the interrupted one.
        let holding = Holding::begin()?;
        self.at_books.pass();
        Some(HeldBooks { books: self.books.lock().ok()?, holding })
    }

    /// As [`books`](Self::books), on the thread that holds the gate: it would ask the kernel for what it has.
    fn books_behind(&self, _at_books: &HeldGate<'_>) -> Option<HeldBooks<'_>> {
        let holding = Holding::begin()?;
        Some(HeldBooks { books: self.books.lock().ok()?, holding })
    }

    /// Without the books until something was given back to libibverbs.
    fn await_departure<'k>(&self, held: HeldBooks<'k>) -> Option<HeldBooks<'k>> {
        let HeldBooks { books, holding } = held;
        Some(HeldBooks { books: self.departed.wait(books).ok()?, holding })
    }
}

/// The books, locked; unlocked before the thread is no more said to have them.
struct HeldBooks<'k> {
    books: MutexGuard<'k, Books>,
    holding: Holding,
}

impl Deref for HeldBooks<'_> {
    type Target = Books;

    fn deref(&self) -> &Books {
        &self.books
    }
}

impl DerefMut for HeldBooks<'_> {
    fn deref_mut(&mut self) -> &mut Books {
        &mut self.books
    }
}

/// By which a child notes that it ends it.
fn name_of(key: &Key, region: &Region) -> Name {
    Name::of(key.domain.device, region.handle)
}

impl Books {
    /// The opening of the device in which something is about to be registered; `None` if that could not be ended later, by
    /// the number that it gets now. What was registered in a device that was closed behind our back, and opened anew, is
    /// forgotten.
    fn opening_of(&mut self, device: usize) -> Option<Opening> {
        // SAFETY: the program is registering in it.
        let noted = unsafe { self.devices.note(device) }?;
        for scope in noted.gone.into_iter().map(Scope::Device) {
            self.store.forget_live(scope);
            self.store.forget_idle(scope);
            // What remains of it goes when it is looked at: a thread may note some of it behind this.
        }
        Some(noted.opening)
    }

    /// What children have ended is neither found nor ended again, by a number that may be another's: the program may have
    /// given it back since the fork. libibverbs' structures of it stay, some hundred bytes each.
    fn forget_ends(&mut self, children: Children) {
        let before = std::mem::replace(&mut self.ended, children.ended());
        if before == self.ended {
            return;
        }
        let ends = children.ends(before..self.ended);
        self.store.forget_live(Scope::Everything);
        self.store.forget_idle_if(|key, region| ends.has(name_of(key, region)));
        forget_remains(&mut self.remains, &ends);
    }

    /// What the kernel has ended with a device that was closed behind our back is not ended again: its number may be that
    /// of another registration by now. libibverbs' structures of it stay, some hundred bytes each.
    fn forget_ended(&self, leaving: &mut Vec<Leaving>) {
        leaving.retain(|leaving| self.devices.is_open(leaving.opening));
    }

    /// Whether all that is idle can be ended by its numbers.
    fn may_end_idle(&self) -> bool {
        // A system call for each opening, of which there are few side by side.
        let mut last = None;
        self.store
            .idle_openings()
            .all(|opening| last.replace(opening) == Some(opening) || self.devices.is_open(opening))
    }

    /// What the thread of ours takes to deregister the dead; the lists here get no shorter until it is done.
    fn room_for_dead(&mut self) -> Result<Vec<Remains>, TryReserveError> {
        let (dead, mut remains) = (self.store.dead(), Vec::new());
        remains.try_reserve_exact(dead)?;
        self.remains.try_reserve(remains.capacity())?;
        self.at_work.try_reserve(remains.capacity())?;
        Ok(remains)
    }

    /// The thread of ours, which holds its gate, is about to deregister these.
    fn begin_work(&mut self, leaving: &[Leaving]) {
        self.at_work.clear();
        self.at_work.extend(leaving.iter().map(|leaving| leaving.key.domain));
        self.at_work.dedup();
    }

    fn is_at_work(&self, scope: Scope) -> bool {
        self.at_work.iter().any(|domain| scope.holds(domain))
    }

    fn note_leaving(&mut self, leaving: &[Leaving]) {
        for Leaving { key, .. } in leaving {
            // Without memory for a domain more it is not waited for.
            if self.leaving.try_reserve(1).is_ok() {
                *self.leaving.entry(key.domain).or_default() += 1;
            }
        }
    }

    /// Up to `count` of what remains in `scope`; each is counted as being deregistered until
    /// [`note_left`](Self::note_left).
    fn take_remains(&mut self, scope: Scope, count: usize) -> Vec<Remains> {
        let mut taken = Vec::new();
        let devices = &self.devices;
        // What the kernel has ended, too: libibverbs' release of it begins at the device's `ibv_context`, which a device that
        // was closed through a `dlsym` handle has no more. Its structure stays, some hundred bytes. A system call for
        // each opening, of which there are few side by side.
        let mut last = None;
        self.remains.retain(|&Remains { leaving: Leaving { opening, .. }, .. }| {
            let known = last.filter(|&(of, _)| of == opening);
            let (_, is_open) = known.unwrap_or_else(|| (opening, devices.is_open(opening)));
            last = Some((opening, is_open));
            is_open
        });
        self.remains.retain(|remains| {
            let takes = taken.len() < count
                && scope.holds(&remains.leaving.key.domain)
                && taken.try_reserve(1).is_ok();
            taken.extend(takes.then_some(*remains));
            !takes
        });
        taken.iter().for_each(|remains| self.note_leaving(&[remains.leaving]));
        taken
    }

    fn note_left(&mut self, Leaving { key, .. }: &Leaving) {
        if let Some(count) = self.leaving.get_mut(&key.domain) {
            *count -= 1;
            if *count == 0 {
                self.leaving.remove(&key.domain);
            }
        }
    }

    /// Whether some in `scope` are being deregistered.
    fn has_leaving(&self, scope: Scope) -> bool {
        self.leaving.keys().any(|domain| scope.holds(domain))
    }
}

/// Without hooks there is nothing to tell.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const fn note_kept(_: AddressRange) {}

/// Has libibverbs end it; whether it did.
fn by_library(leaving: &Leaving) -> bool {
    dereg(leaving.region)
}

/// What children have ended is not ended again. libibverbs' release of what the kernel has ended asks that for nothing.
fn forget_remains(remains: &mut Vec<Remains>, ends: &Ends) {
    remains.retain(|Remains { leaving, ended }| {
        *ended == Ended::InKernel || !ends.has(name_of(&leaving.key, &leaving.region))
    });
}

/// As [`by_library`].
fn dereg(region: Region) -> bool {
    let errno = last_errno();
    let ended = real().zip(handle_of(region)).is_some_and(|(real, mr)| {
        // SAFETY: out of the store, so the program does not have it, and it ends once.
        unsafe { (real.library.dereg_mr)(mr.as_ptr()) == 0 }
    });
    set_errno(errno);
    ended
}

/// Has the kernel end it, without libibverbs.
fn end_in_kernel(device: &LentDevice, region: Region) -> Ended {
    // SAFETY: out of the store, so the program does not have it, and it ends once.
    handle_of(region).map_or(Ended::Not, |mr| unsafe { in_kernel(device, mr) })
}

fn handle_of(region: Region) -> Option<NonNull<ibv_mr>> {
    NonNull::new(ptr::with_exposed_provenance_mut(region.address))
}

/// # Safety
///
/// `mr` is a live handle.
unsafe fn fields_of(mr: NonNull<ibv_mr>) -> HandleFields {
    let address = mr.as_ptr().expose_provenance();
    // SAFETY: the caller's promise.
    let mr = unsafe { mr.as_ref() };
    let region = Region { address, handle: mr.handle, lkey: mr.lkey };
    HandleFields { region, start: mr.addr.addr(), length: mr.length, domain: mr.pd.addr() }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::process::may_end_of;
    use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
    use pinfold::monitor::best_without_loading;
    use pinfold::registrar::verbs::ffi::ibv_context;
    use pinfold_kernel::priority::priority_of;
    use pinfold_kernel::raw::system_call;
    use pinfold_kernel::thread::{run_before_all, thread_id, yield_now};
    use std::collections::BTreeSet;
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::path::Path;
    use std::sync::OnceLock;
    use std::sync::mpsc::channel;
    use std::thread;

    fn keeper() -> Keeper {
        static ADMISSION: OnceLock<Admission> = OnceLock::new();
        let monitor = best_without_loading(Path::new("/none")).unwrap();
        let admission = ADMISSION.get_or_init(Admission::new);
        // Its own: what a test's children end is no other test's.
        let children = Children::new().unwrap();
        let (limit, room) = (Limit { bytes: 1 << 20, regions: 16 }, MappingRoom::of(None));
        Keeper::new(Arc::new(monitor), limit, admission, children, room)
    }

    /// Of a registration that was never made.
    fn leaving() -> Leaving {
        let domain = DomainName { address: 1, device: 2, number: 3 };
        Leaving {
            key: Key { start: 4096, length: 4096, domain, flags: 0 },
            region: Region { address: 0, handle: 0, lkey: 0 },
            opening: Opening::ANY,
        }
    }

    /// A device that is closed through a `dlsym` handle takes its `ibv_context` along, which libibverbs would read.
    #[test]
    fn what_remains_of_a_device_that_is_closed_stays() {
        let (keeper, leaving) = (keeper(), leaving());
        for ended in [Ended::InKernel, Ended::Not] {
            let mut books = keeper.books().unwrap();
            assert!(!books.devices.is_open(leaving.opening));
            books.remains.push(Remains { leaving, ended });
            assert!(books.take_remains(Scope::Everything, 1).is_empty(), "{ended:?}");
        }
    }

    /// An idle registration with this number, and one that the thread which deregisters could not end.
    fn gave_back(books: &mut Books, handle: u32) {
        let Leaving { key, opening, .. } = leaving();
        let leaving = gave_back_in(books, key.domain.device, opening, handle);
        books.remains.push(Remains { leaving, ended: Ended::Not });
    }

    /// An idle registration with this number.
    fn gave_back_in(books: &mut Books, device: usize, opening: Opening, handle: u32) -> Leaving {
        let region = Region { address: 64 * handle as usize + device, handle, lkey: handle };
        let mut key = leaving().key;
        key.domain.device = device;
        let place = books.store.begin(key, opening).unwrap();
        books.store.land(place, region).unwrap();
        let Key { start, length, domain, .. } = key;
        let handle = HandleFields { region, start, length, domain: domain.address };
        assert_eq!(books.store.release(&handle), End::Kept);
        Leaving { key, region, opening }
    }

    #[test]
    fn what_a_child_has_ended_is_neither_found_nor_ended_again() {
        let keeper = keeper();
        let mut books = keeper.books().unwrap();
        let mut left = |ended: &[u32]| {
            (1..=4).for_each(|handle| gave_back(&mut books, handle));
            let names = ended.iter().map(|&handle| Name::of(2, handle));
            names.for_each(|name| keeper.children.note_ended(name));
            keeper.children.note_ended(Name::of(32, 4));
            keeper.heed_children(&mut books);
            let idle = books.store.take_idle(Scope::Everything);
            let remain = std::mem::take(&mut books.remains);
            let idle = idle.iter().map(|leaving| leaving.region.handle).collect::<BTreeSet<_>>();
            let remain = remain.iter().map(|remains| remains.leaving.region.handle);
            assert_eq!(idle, remain.collect());
            Vec::from_iter(idle)
        };
        assert_eq!(left(&[]), [1, 2, 3, 4], "of another device");
        assert_eq!(left(&[3, 1, 7]), [2, 4]);
        assert_eq!(left(&[9; 5000]), [], "more than can be told apart");
        assert_eq!(left(&[2]), [1, 3, 4]);
    }

    /// What a child inherited it goes on to know, so that its parent hears of each that it ends. What another child has
    /// ended, before or meanwhile, it leaves alone.
    #[test]
    fn a_child_that_ends_a_domain_ends_what_no_other_has_and_knows_what_else_its_parent_has() {
        let keeper = keeper();
        let mut books = keeper.books().unwrap();
        let device = File::open("/dev/null").unwrap();
        let known = books.devices.note_descriptor(2, device.as_raw_fd()).unwrap();
        assert_eq!(known.opening, leaving().opening);
        (1..=4).for_each(|handle| gave_back(&mut books, handle));
        let Leaving { key, opening, .. } = leaving();
        let place = books.store.begin(Key { start: 8192, ..key }, opening).unwrap();
        books.store.land(place, Region { address: 640, handle: 10, lkey: 10 }).unwrap();
        drop(books);
        keeper.children.note_ended(Name::of(2, 1));
        let (mut ended, mut meanwhile) = (Vec::new(), None);
        keeper.empty_inherited_by(Scope::Everything, |leaving| {
            let handle = leaving.region.handle;
            meanwhile.get_or_insert_with(|| {
                let other = if handle == 3 { 4 } else { 3 };
                keeper.children.note_ended(Name::of(2, other));
                other
            });
            ended.push(handle);
        });
        ended.extend(meanwhile);
        assert_eq!(BTreeSet::from_iter(ended.iter().copied()), (2..=4).collect());
        assert_eq!(ended.len(), 3, "none twice");
        assert!(keeper.may_have(std::ptr::without_provenance_mut(640)));
    }

    /// A descriptor whose number, `from` or the next, no other test's file gets once it is closed.
    fn high(file: &File, from: libc::c_int) -> OwnedFd {
        // SAFETY: a new descriptor, of this test's.
        unsafe { OwnedFd::from_raw_fd(libc::fcntl(file.as_raw_fd(), libc::F_DUPFD, from)) }
    }

    /// The parent would forget what the child does not end.
    #[test]
    fn a_child_without_one_of_the_devices_leaves_all_that_is_idle_to_its_parent() {
        let (keeper, file) = (keeper(), File::open("/dev/null").unwrap());
        let mut books = keeper.books().unwrap();
        let closed = high(&File::open("/dev/null").unwrap(), 910);
        for (device, descriptor) in [(2, closed.as_raw_fd()), (32, file.as_raw_fd())] {
            let known = books.devices.note_descriptor(device, descriptor).unwrap();
            _ = gave_back_in(&mut books, device, known.opening, 1);
        }
        drop((books, closed));
        let empty = |scope| {
            let mut ended = Vec::new();
            keeper.empty_inherited_by(scope, |leaving| ended.push(leaving.key.domain.device));
            ended
        };
        let domain = DomainName { device: 32, ..leaving().key.domain };
        assert_eq!(empty(Scope::Everything), []);
        assert_eq!(empty(Scope::Domain(domain)), []);
        assert!(!keeper.children.is_emptied());
    }

    /// What a child opens may have the address and the number of what it closed, and the same mark.
    #[test]
    fn a_child_ends_nothing_in_a_device_that_it_has_opened_anew() {
        let (keeper, file) = (keeper(), high(&File::open("/dev/null").unwrap(), 930));
        let mut books = keeper.books().unwrap();
        let opening = books.devices.note_descriptor(2, file.as_raw_fd()).unwrap().opening;
        _ = gave_back_in(&mut books, 2, opening, 1);
        drop(books);
        keeper.forget_inherited(2);
        let other = File::open("/dev/null").unwrap();
        // SAFETY: two descriptors of this test's.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), file.as_raw_fd()) } >= 0);
        OpenDevices::default().note_descriptor(2, file.as_raw_fd()).unwrap();
        let mut ended = 0;
        keeper.empty_inherited_by(Scope::Everything, |_| ended += 1);
        assert!(ended == 0 && !keeper.children.is_emptied());
    }

    /// Another thread of the parent had them at the fork.
    #[test]
    fn a_child_without_the_books_of_its_parent_notes_no_end_in_a_device_of_its_own() {
        let (parent, child) = (keeper(), keeper());
        let _never_unlocked = parent.books.lock().unwrap();
        let theirs = File::open("/dev/null").unwrap();
        OpenDevices::default().note_descriptor(2, theirs.as_raw_fd()).unwrap();
        let (kept, new) = (File::open("/dev/null").unwrap(), File::open("/dev/null").unwrap());
        let note = |device, number| child.books().unwrap().devices.note_descriptor(device, number);
        for (device, file) in [(2, &theirs), (32, &kept)] {
            note(device, file.as_raw_fd()).unwrap();
        }
        let is_to_be_noted = |number, own| {
            // SAFETY: zeros are a context and a handle.
            let (mut context, mut mr): (ibv_context, ibv_mr) = unsafe { std::mem::zeroed() };
            context.cmd_fd = number;
            mr.context = &raw mut context;
            // SAFETY: both are there.
            unsafe { may_end_of(&parent, own, &raw mut mr) }
        };
        let of = |own| [&theirs, &kept, &new].map(|file| is_to_be_noted(file.as_raw_fd(), own));
        assert_eq!(of(Some(&child)), [true, false, false]);
        assert_eq!(of(None), [true, true, false]);
        assert!(is_to_be_noted(-1, Some(&child)), "it stands for nothing");
    }

    #[test]
    fn what_a_child_has_ended_since_it_was_taken_off_the_books_is_not_ended() {
        let keeper = keeper();
        let of = |handle| Leaving { region: Region { address: 64, handle, lkey: 1 }, ..leaving() };
        let before = keeper.children.ended();
        keeper.children.note_ended(Name::of(2, 3));
        let ended = Mutex::new(Vec::new());
        let end = |leaving: &Leaving| {
            ended.lock().unwrap().push(leaving.region.handle);
            true
        };
        keeper.deregister(&[of(3), of(4)], before, end);
        keeper.deregister_in_kernel(&[of(3), of(4)], before, Vec::with_capacity(2), |_| None);
        let remain = std::mem::take(&mut keeper.books().unwrap().remains);
        let remain: Vec<_> = remain.iter().map(|it| it.leaving.region.handle).collect();
        assert_eq!((ended.into_inner().unwrap(), remain), (vec![4], vec![4]));
    }

    /// As `reclaim_once` has them.
    #[test]
    fn the_thread_that_deregisters_has_the_priority_of_one_that_wants_the_books() {
        let (keeper, (may_run, answer)) = (keeper(), channel());
        let at_books = keeper.at_books.hold();
        let books = keeper.current();
        thread::scope(|scope| {
            scope.spawn(|| {
                may_run.send(run_before_all()).unwrap();
                keeper.totals();
            });
            let may_run = answer.recv().unwrap();
            if !may_run {
                eprintln!("skipped: no real-time priority may be had");
            }
            while may_run && priority_of(thread_id()).unwrap() >= 0 {
                yield_now();
            }
            drop((books, at_books));
        });
    }

    /// It begins anew after the other thread has passed its gate, and before that looks into the books.
    #[test]
    fn the_thread_that_deregisters_anew_has_the_priority_of_one_that_waits_for_what_is_leaving() {
        let (keeper, (may_run, answer)) = (keeper(), channel());
        let leaving = leaving();
        let at_work = keeper.at_work.hold();
        keeper.books().unwrap().note_leaving(&[leaving]);
        keeper.books().unwrap().begin_work(&[leaving]);
        thread::scope(|scope| {
            scope.spawn(|| {
                may_run.send(run_before_all()).unwrap();
                keeper.await_departures(Scope::Everything);
            });
            let await_priority = |may_run: bool| {
                while may_run && priority_of(thread_id()).unwrap() >= 0 {
                    yield_now();
                }
            };
            let may_run = answer.recv().unwrap();
            if !may_run {
                eprintln!("skipped: no real-time priority may be had");
            }
            await_priority(may_run);
            let books = keeper.books();
            // The kernel gives the gate to the one that waits, and behind it to this one.
            drop(at_work);
            let at_work = keeper.at_work.hold();
            drop(books);
            await_priority(may_run);
            keeper.books().unwrap().note_left(&leaving);
            keeper.departed.notify_all();
            drop(at_work);
        });
    }

    /// Another thread that waits may stand at the gate as well: each of the two would find the other there for ever.
    #[test]
    fn what_a_programs_thread_ends_is_not_awaited_at_the_gate() {
        let (keeper, (begun, has_begun)) = (keeper(), channel());
        let leaving = leaving();
        let at_work = keeper.at_work.hold();
        keeper.books().unwrap().note_leaving(&[leaving]);
        thread::scope(|scope| {
            scope.spawn(|| {
                begun.send(thread_id()).unwrap();
                keeper.await_departures(Scope::Everything);
            });
            let waiting = has_begun.recv().unwrap();
            // It stands at the gate, then wants the books, then looks.
            while awaits(waiting).is_none_or(|(operation, _)| operation != libc::FUTEX_LOCK_PI) {
                yield_now();
            }
            let books = keeper.books();
            drop(at_work);
            let at_work = keeper.at_work.hold();
            let (_, books_word) = loop {
                match awaits(waiting) {
                    Some(awaited) if awaited.0 != libc::FUTEX_LOCK_PI => break awaited,
                    _ => yield_now(),
                }
            };
            drop(books);
            let (operation, _) = loop {
                match awaits(waiting) {
                    Some(awaited) if awaited.1 != books_word => break awaited,
                    _ => yield_now(),
                }
            };
            keeper.books().unwrap().note_left(&leaving);
            keeper.departed.notify_all();
            drop(at_work);
            assert_eq!(operation, libc::FUTEX_WAIT_BITSET);
        });
    }

    /// In which call of `futex` a thread is, and for which word.
    fn awaits(thread: u32) -> Option<(libc::c_int, usize)> {
        let call = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")).ok()?;
        let mut words = call.split_whitespace();
        let number: libc::c_long = words.next()?.parse().ok()?;
        let mut next = || usize::from_str_radix(words.next()?.trim_start_matches("0x"), 16).ok();
        let (word, operation) = (next()?, next()?);
        (number == libc::SYS_futex).then_some((libc::c_int::try_from(operation).ok()? & 0x7f, word))
    }

    /// Has `FUTEX_LOCK_PI` end the calling thread's process by SIGSYS, and the question whether there are filters. Set by the
    /// instruction, which no hook sees. False if it cannot be set.
    #[allow(clippy::cast_possible_truncation)] // numbers of calls, and of bytes in a structure
    fn forbid_gates() -> bool {
        let rule = |code: u32, k: usize, jt, jf| libc::sock_filter {
            code: code as u16,
            jt,
            jf,
            k: k as u32,
        };
        let load = |offset| rule(BPF_LD | BPF_W | BPF_ABS, offset, 0, 0);
        let answer = |answer: u32| rule(BPF_RET | BPF_K, answer as usize, 0, 0);
        let is = |value, otherwise| rule(BPF_JMP | BPF_JEQ | BPF_K, value, 0, otherwise);
        let second = std::mem::offset_of!(libc::seccomp_data, args) + size_of::<u64>();
        let mut rules = [
            load(std::mem::offset_of!(libc::seccomp_data, nr)),
            is(libc::SYS_prctl as usize, 1),
            answer(libc::SECCOMP_RET_TRAP),
            is(libc::SYS_futex as usize, 4),
            load(second + if cfg!(target_endian = "big") { 4 } else { 0 }),
            rule(BPF_ALU | BPF_AND | BPF_K, 0x7f, 0, 0), // without FUTEX_PRIVATE_FLAG
            is(libc::FUTEX_LOCK_PI as usize, 1),
            answer(libc::SECCOMP_RET_TRAP),
            answer(libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: rules.len() as u16, filter: rules.as_mut_ptr() };
        let filter = (&raw const program).expose_provenance();
        // SAFETY: the kernel reads the rules.
        unsafe {
            let privileges = [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0];
            let mode = libc::SECCOMP_MODE_FILTER as usize;
            let restrict = [libc::PR_SET_SECCOMP as usize, mode, filter, 0, 0];
            !system_call(libc::SYS_prctl, privileges).has_failed()
                && !system_call(libc::SYS_prctl, restrict).has_failed()
        }
    }

    /// How a forked child ends that does `work` under that filter: 0 if it does not wait at a gate.
    fn status_without_gates(work: impl FnOnce()) -> libc::c_int {
        // SAFETY: the child works and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the child's own timer.
            unsafe { libc::alarm(300) };
            let is_set = forbid_gates();
            work();
            // SAFETY: the child's end.
            unsafe { libc::_exit(i32::from(!is_set)) };
        }
        let mut status = -1;
        // SAFETY: the child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status
    }

    #[test]
    fn the_thread_that_deregisters_does_not_ask_for_a_gate_that_it_holds() {
        let keeper = keeper();
        let status = status_without_gates(|| {
            keeper.reclaim_once(&Table::Shared);
            keeper.deregister_in_kernel(&[], 0, Vec::new(), |_| None);
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn no_thread_waits_at_a_gate_under_a_filter_of_the_program_s() {
        let keeper = keeper();
        let held = (keeper.at_books.hold(), keeper.at_work.hold());
        let want_both = || {
            keeper.at_work.pass();
            keeper.totals();
        };
        let wants_both = || sandbox::restricts(want_both, |()| true);
        let status =
            thread::scope(|scope| scope.spawn(|| status_without_gates(wants_both)).join().unwrap());
        drop(held);
        assert_eq!(status, 0);
    }
}
