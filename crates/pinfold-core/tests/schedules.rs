//! The whole cache under random schedules: a scheduler of our own chooses which thread goes on at
//! every access to shared memory, and when a store arrives.
//!
//! Each schedule is one number: it seeds the program of each thread, the turns and the delays. A
//! failure prints it; `PINFOLD_SCHEDULE=NUMBER` with the test's name replays that one. How many are
//! tried `PINFOLD_SCHEDULES` says, for each test; those of `./check schedules` are in `check`.
//!
//! What is looked at is public behaviour alone. A simulated device numbers registrations and never
//! uses a number again, so that it knows
//!
//! - a deregistration under a live lease, a second one, and one of what was never registered;
//! - a lease of what is not registered any more;
//! - a stale hit: bytes whose change had returned before the `get` was called, whether the monitor or the program
//!   reports it;
//! - more registrations than the budget allows, and any that are left when the cache is gone;
//! - an end that no thread is woken for: then no thread can go on, which the scheduler sees.
//!
//! What no schedule here can find stands in `schedule.rs`: orders that x86 does not make.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the monitor, to lease addresses that have no memory
//! behind them, to vouch for a simulated barrier, and to lend a cache to threads that end before it.

#![cfg(shuttle)]
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // a test speaks

use pinfold_core::schedule::{self, AtomicBool, AtomicU32, Ordering, thread};
use pinfold_core::{
    Access, Account, AddressRange, Amount, Barriers, Cache, Change, Clock, Config, ConnectionLost,
    Cover, DeregisterError, GetError, Gets, Lease, Leases, Lender, Lost, MappingKind, Monitor,
    OnDrop, Position, Refusal, RegisterError, Registrar, RegistrarLimits, Renewed, Replay,
    Sequence, Suspend, SuspensionTerms, Transfers, Unsupported, Watch, WhenFull,
};
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

const PAGE: usize = 4096;
/// Pages of the program.
const PAGES: usize = 4;
/// On both sides of the end of one of the index's blocks of 2 MiB: what reaches across is entered into it, and
/// taken out of it, in several holds of the lock.
const START: usize = (2 << 20) - PAGES / 2 * PAGE;

// --- the scheduler ---------------------------------------------------------------------------------

std::thread_local! {
    /// The number of the schedule under way.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
    /// What became of a fork.
    static CHILD: Cell<Child> = const { Cell::new(Child::Unborn) };
}

/// A schedule's forked child, whose one thread is the one that forked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Child {
    Unborn,
    Lives(TaskId),
    /// It waits for a thread that it does not have.
    Stuck,
    Ended,
}

/// splitmix64.
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// How a schedule chooses who goes on.
#[derive(Debug)]
enum Manner {
    /// The same thread as before, except once in so many steps on average.
    Stay(usize),
    /// The one of the highest rank; at each of these steps the one that runs becomes the lowest
    /// (Burckhardt and others, 2010).
    Ranks { of_tasks: Vec<u64>, falls: Vec<usize>, lowest: u64 },
}

/// One random schedule after another, each from its number.
#[derive(Debug)]
struct Turns {
    next: u64,
    left: usize,
    random: Random,
    manner: Manner,
    step: usize,
}

impl Turns {
    fn new(first: u64, count: usize) -> Self {
        let manner = Manner::Stay(1);
        Self { next: first, left: count, random: Random(0), manner, step: 0 }
    }

    fn manner(random: &mut Random) -> Manner {
        if random.one_in(3) {
            let falls = (0..1 + random.below(4)).map(|_| random.below(600)).collect();
            Manner::Ranks { of_tasks: Vec::new(), falls, lowest: u64::MAX >> 1 }
        } else {
            Manner::Stay([1, 2, 4, 8, 16, 32, 64][random.below(7)])
        }
    }
}

impl Scheduler for Turns {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.left = self.left.checked_sub(1)?;
        assert_ne!(CHILD.get(), Child::Stuck, "the child waits for a thread of the parent");
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        NUMBER.set(number);
        CHILD.set(Child::Unborn);
        self.random = Random(number);
        self.manner = Self::manner(&mut self.random);
        self.step = 0;
        Some(Schedule::new(number))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        self.step += 1;
        match CHILD.get() {
            Child::Unborn => {}
            Child::Lives(only) if runnable.iter().any(|task| task.id() == only) => {
                return Some(only);
            }
            Child::Lives(_) => {
                CHILD.set(Child::Stuck);
                return None;
            }
            Child::Stuck | Child::Ended => return None,
        }
        let current = current.filter(|current| runnable.iter().any(|task| task.id() == *current));
        match &mut self.manner {
            Manner::Stay(steps) => {
                let steps = *steps;
                if let Some(current) = current
                    && !is_yielding
                    && !self.random.one_in(steps)
                {
                    return Some(current);
                }
                Some(runnable[self.random.below(runnable.len())].id())
            }
            Manner::Ranks { of_tasks, falls, lowest } => {
                let rank = |of_tasks: &Vec<u64>, task: TaskId| of_tasks[usize::from(task)];
                for task in runnable {
                    while of_tasks.len() <= usize::from(task.id()) {
                        of_tasks.push(self.random.next() | 1 << 63);
                    }
                }
                if let Some(current) = current
                    && (is_yielding || falls.contains(&self.step))
                {
                    *lowest -= 1;
                    of_tasks[usize::from(current)] = *lowest;
                }
                runnable.iter().map(|task| task.id()).max_by_key(|&task| rank(of_tasks, task))
            }
        }
    }

    fn next_u64(&mut self) -> u64 {
        self.random.next()
    }
}

/// How many schedules each test tries if nothing was said.
const USUAL: usize = 2_000;

/// Runs `schedule` under as many schedules as were asked for, or `one_in` so many of them.
fn explore(one_in: usize, schedule: fn(Random)) {
    let asked = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let replayed = asked("PINFOLD_SCHEDULE");
    let count = asked("PINFOLD_SCHEDULES").map_or(USUAL, |count| usize::try_from(count).unwrap());
    let first = replayed.or(asked("PINFOLD_SEED")).unwrap_or_else(|| {
        let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        u64::from(since.subsec_nanos()) << 32 | since.as_secs() & 0xffff_ffff
    });
    let count = if replayed.is_some() { 1 } else { count.div_ceil(one_in) };
    eprintln!("{count} schedules from PINFOLD_SEED={first}");
    let mut config = shuttle::Config::new();
    config.silence_warnings = true;
    config.failure_persistence = shuttle::FailurePersistence::None;
    config.stack_size = 1 << 18;
    config.max_steps = shuttle::MaxSteps::FailAfter(200_000);
    let run = || {
        shuttle::Runner::new(Turns::new(first, count), config).run(move || {
            let mut random = Random(NUMBER.get().wrapping_mul(0x5851_f42d_4c95_7f2d));
            schedule::begin(random.next(), [0, 4, 40, 400][random.below(4)]);
            schedule(random);
        });
        assert_ne!(CHILD.get(), Child::Stuck, "the child waits for a thread of the parent");
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
        let number = NUMBER.get();
        let tried = number.wrapping_sub(first) + 1;
        eprintln!("failed in schedule {tried}; PINFOLD_SCHEDULE={number} replays it");
        resume_unwind(panic);
    }
}

// --- the world -------------------------------------------------------------------------------------

/// What the program's addresses mean, what the device has, and what the program holds.
///
/// Behind `std`'s lock, which is never held over a turn: what is done under it is one step.
struct World {
    state: Mutex<State>,
    change_pending: AtomicU32,
    forked: AtomicBool,
    rings: schedule::Mutex<u32>,
    changed: schedule::Condvar,
    /// Whether some registrations fail, and some barriers are refused.
    is_flaky: bool,
    /// Whether suspensions may expire, whichever thread has them.
    expires: bool,
}

#[derive(Default)]
struct State {
    /// Grows with every change of the page.
    versions: [u64; PAGES],
    /// Those whose change has returned.
    returned: [u64; PAGES],
    log: Vec<AddressRange>,
    /// By number; `None` once deregistered.
    registrations: Vec<Option<Registration>>,
    peak: usize,
    connections: [Connection; 4],
    clock: Duration,
    wrong: Vec<String>,
    in_child: bool,
    failures: Option<Random>,
    /// Some deregistrations panic.
    panics: Option<Random>,
    /// Words of `invalidate_then` that were given, and that came.
    words: (usize, usize),
    /// The cache is about to end.
    is_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Connection {
    #[default]
    GoingOn,
    Stopped,
    Failed,
}

#[derive(Clone, Debug)]
struct Registration {
    range: AddressRange,
    /// The pages that it pins, by number and version.
    pinned: Vec<(usize, u64)>,
    leases: usize,
    is_withdrawn: bool,
    /// The device did not let go of it when it was to be withdrawn.
    is_stuck: bool,
}

fn pages(first: usize, count: usize) -> AddressRange {
    AddressRange::new(START + first * PAGE, count * PAGE).unwrap()
}

/// Which pages `range` touches.
fn touched(range: AddressRange) -> std::ops::Range<usize> {
    (range.start() - START) / PAGE..((range.end() - START).div_ceil(PAGE)).min(PAGES)
}

impl State {
    fn wrong(&mut self, what: String) {
        self.wrong.push(what);
    }

    fn pin(&self, range: AddressRange) -> Vec<(usize, u64)> {
        touched(range).map(|page| (page, self.versions[page])).collect()
    }

    fn change(&mut self, range: AddressRange) {
        touched(range).for_each(|page| self.versions[page] += 1);
    }

    /// The number of a new registration.
    fn add(&mut self, range: AddressRange, pinned: Vec<(usize, u64)>) -> usize {
        let (leases, is_withdrawn, is_stuck) = (0, false, false);
        self.registrations.push(Some(Registration {
            range,
            pinned,
            leases,
            is_withdrawn,
            is_stuck,
        }));
        self.peak = self.peak.max(self.live().count());
        self.registrations.len() - 1
    }

    fn live(&self) -> impl Iterator<Item = &Registration> {
        self.registrations.iter().flatten()
    }

    fn fails(&mut self) -> bool {
        self.failures.as_mut().is_some_and(|random| random.one_in(8))
    }
}

impl World {
    fn new(failures: Option<Random>, expires: bool) -> Arc<Self> {
        let is_flaky = failures.is_some();
        Arc::new(Self {
            state: Mutex::new(State { failures, ..State::default() }),
            change_pending: AtomicU32::new(0),
            forked: AtomicBool::new(false),
            rings: schedule::Mutex::new(0),
            changed: schedule::Condvar::new(),
            is_flaky,
            expires,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change that is logged before its call returns, as `munmap` is.
    fn change(&self, range: AddressRange) {
        schedule::turn();
        let versions = self.change_undetected(range);
        self.append(range);
        self.note_returned(range, versions);
    }

    /// A change that no log has. The versions then.
    fn change_undetected(&self, range: AddressRange) -> [u64; PAGES] {
        schedule::turn();
        let mut state = self.state();
        state.change(range);
        state.versions
    }

    /// A change that is logged first and takes effect later, as `MADV_DONTNEED` is.
    fn discard(&self, range: AddressRange) {
        self.change_pending.fetch_add(1, Ordering::AcqRel);
        self.append(range);
        schedule::turn();
        let versions = {
            let mut state = self.state();
            state.change(range);
            state.versions
        };
        self.change_pending.fetch_sub(1, Ordering::AcqRel);
        self.note_returned(range, versions);
    }

    /// From here on every `get` must know of it.
    fn note_returned(&self, range: AddressRange, versions: [u64; PAGES]) {
        let mut state = self.state();
        for page in touched(range) {
            state.returned[page] = state.returned[page].max(versions[page]);
        }
    }

    fn append(&self, range: AddressRange) {
        schedule::turn();
        self.state().log.push(range);
        self.notify();
    }

    /// How many entries there are; each is readable as soon as it counts.
    fn logged(&self) -> u64 {
        schedule::turn();
        self.state().log.len() as u64
    }

    fn notify(&self) {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        *rings = rings.wrapping_add(1);
        self.changed.notify_all();
    }
}

struct Device(Arc<World>);

impl Device {
    /// The child of a fork must not touch the parent's device.
    fn touch(&self, what: &str) -> MutexGuard<'_, State> {
        schedule::turn();
        let mut state = self.0.state();
        if state.in_child {
            state.wrong(format!("{what} in the child"));
        }
        state
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Device {
    type Handle = usize;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 20, max_regions: 64 }
    }

    unsafe fn register(&self, range: AddressRange, _: Access) -> Result<usize, RegisterError> {
        let pinned = {
            let mut state = self.touch("registered");
            if state.fails() {
                return Err(RegisterError::Os { operation: "register", errno: 5 });
            }
            state.pin(range)
        };
        schedule::turn();
        Ok(self.0.state().add(range, pinned))
    }

    unsafe fn deregister(&self, handle: usize, range: AddressRange) -> Result<(), DeregisterError> {
        let mut state = self.touch("deregistered");
        match state.registrations.get_mut(handle).and_then(Option::take) {
            None => state.wrong(format!("{handle} was deregistered twice")),
            Some(it) if it.leases > 0 => {
                state.wrong(format!("{handle} was deregistered under {} leases", it.leases));
            }
            Some(it) if it.range != range => {
                state.wrong(format!("{handle} of {} was deregistered as {range}", it.range));
            }
            Some(_) => {}
        }
        let panics = state.panics.as_mut().is_some_and(|random| random.one_in(4));
        drop(state);
        if panics {
            // Without the hook, which would print it.
            resume_unwind(Box::new("as told"));
        }
        Ok(())
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Suspend for Device {
    type Connection = u8;

    fn now(&self) -> Duration {
        self.0.state().clock
    }

    fn can_suspend(&self, _: AddressRange, _: &[u8]) -> Result<(), Unsupported> {
        Ok(())
    }

    fn stop(&self, connection: &u8) -> Result<(), ConnectionLost> {
        let mut state = self.touch("stopped");
        let connection = usize::from(*connection);
        match state.connections[connection] {
            Connection::GoingOn => state.connections[connection] = Connection::Stopped,
            Connection::Stopped => state.wrong("stopped twice".into()),
            Connection::Failed => return Err(ConnectionLost::Gone),
        }
        Ok(())
    }

    fn in_flight(&self, _: &u8, _: AddressRange) -> Result<Transfers, ConnectionLost> {
        schedule::turn();
        Ok(Transfers::default())
    }

    unsafe fn withdraw(&self, handle: usize, _: AddressRange) -> Result<(), DeregisterError> {
        let mut state = self.touch("withdrew");
        let refuses = state.fails();
        match state.registrations.get_mut(handle) {
            Some(Some(it)) => (it.is_withdrawn, it.is_stuck) = (!refuses, refuses),
            _ => state.wrong(format!("{handle} was withdrawn and is not registered")),
        }
        let refused = DeregisterError::Os { operation: "withdraw", errno: 16 };
        if refuses { Err(refused) } else { Ok(()) }
    }

    fn quiet(&self, range: AddressRange) -> bool {
        let state = self.touch("asked for silence");
        state.live().all(|it| !it.is_stuck || !it.range.overlaps(&range))
    }

    unsafe fn renew(
        &self,
        handle: usize,
        range: AddressRange,
        _: Access,
    ) -> Result<Renewed<usize>, RegisterError> {
        let mut state = self.touch("renewed");
        let Some(old) = state.registrations.get_mut(handle).and_then(Option::take) else {
            state.wrong(format!("{handle} was renewed and is not registered"));
            return Ok(Renewed::Same);
        };
        if state.fails() {
            return Err(RegisterError::Os { operation: "renew", errno: 5 });
        }
        let pinned = state.pin(range);
        // As verbs do, which know every registration by another key.
        if handle % 2 == 1 {
            return Ok(Renewed::Changed(state.add(range, pinned)));
        }
        state.registrations[handle] =
            Some(Registration { pinned, is_withdrawn: false, is_stuck: false, ..old });
        Ok(Renewed::Same)
    }

    unsafe fn restart(&self, connection: &u8) -> Result<(), ConnectionLost> {
        let mut state = self.touch("restarted");
        let connection = usize::from(*connection);
        match state.connections[connection] {
            Connection::GoingOn => state.wrong("restarted while it was going on".into()),
            Connection::Stopped => state.connections[connection] = Connection::GoingOn,
            Connection::Failed => return Err(ConnectionLost::Gone),
        }
        Ok(())
    }

    fn fail(&self, connection: &u8) {
        self.touch("failed").connections[usize::from(*connection)] = Connection::Failed;
    }

    fn wait(&self, _: Duration) {
        self.0.state().clock += Duration::from_millis(1);
        thread::yield_now();
    }
}

struct Watcher(Arc<World>);

// SAFETY: `change` and `discard` append before they return, a discard is pending from before its
// entry until after its effect, and the log keeps everything.
unsafe impl Monitor for Watcher {
    fn name(&self) -> &'static str {
        "schedules"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        if self.0.forked.load(Ordering::Acquire) {
            return Err(Lost::Forked);
        }
        Ok(Sequence(self.0.logged()))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        schedule::turn();
        Watch::Covered
    }

    fn has_slow_check(&self) -> bool {
        true
    }

    fn change_surcharge(&self) -> u64 {
        100
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        self.0.change_pending.load(Ordering::Acquire) > 0
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.replay_some(from, usize::MAX, visit)
    }

    fn replay_some(
        &self,
        from: Position,
        most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        let logged = self.0.logged();
        let first = if from == Position::NOWHERE { logged } else { from.0 };
        let end = logged.min(first.saturating_add(most as u64));
        let entries: Vec<_> = {
            let state = self.0.state();
            let index = |at: u64| usize::try_from(at).unwrap();
            state.log[index(first)..index(end)].to_vec()
        };
        entries.into_iter().for_each(visit);
        Replay {
            up_to: Position(end, 0),
            sequence: if end < logged { Sequence::CUT } else { Sequence(end) },
            complete: from != Position::NOWHERE,
            may_repeat: false,
        }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        self.0.forked.load(Ordering::Acquire)
    }

    fn notified(&self) -> u32 {
        *self.0.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self) {
        self.0.notify();
    }

    fn wait(&self, seen: u32) {
        let mut rings = self.0.rings.lock().unwrap_or_else(PoisonError::into_inner);
        while *rings == seen {
            rings = self.0.changed.wait(rings).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

// --- the program -----------------------------------------------------------------------------------

type TheCache = Cache<Device, Watcher>;
type TheLease = Lease<'static, Device, Watcher>;

/// A lease that the device knows of.
struct Held {
    lease: TheLease,
    handle: usize,
    world: Arc<World>,
}

impl Held {
    /// `returned` are the versions whose change had returned before the get was called.
    fn new(world: &Arc<World>, lease: TheLease, returned: [u64; PAGES]) -> Self {
        let handle = lease.handle();
        let mut state = world.state();
        let mut wrong = None;
        match state.registrations.get_mut(handle) {
            Some(Some(it)) => {
                it.leases += 1;
                let asked = touched(lease.range());
                let stale = |&&(page, version): &&(usize, u64)| {
                    asked.contains(&page) && version < returned[page]
                };
                if let Some((page, version)) = it.pinned.iter().find(stale) {
                    wrong = Some(format!(
                        "{handle} is stale: page {page} in version {version}, not {}",
                        returned[*page]
                    ));
                } else if !it.range.contains(&lease.range()) {
                    wrong = Some(format!("{handle} of {} leased for {}", it.range, lease.range()));
                } else if it.is_withdrawn {
                    wrong = Some(format!("{handle} was leased while it is withdrawn"));
                }
            }
            _ => wrong = Some(format!("{handle} was leased and is not registered")),
        }
        wrong.into_iter().for_each(|what| state.wrong(what));
        drop(state);
        Self { lease, handle, world: Arc::clone(world) }
    }

    /// One use.
    fn check(&self) {
        schedule::turn();
        let handle = self.lease.handle();
        let mut state = self.world.state();
        if handle != self.handle {
            let was = self.handle;
            state.wrong(format!("a lease of {was} became one of {handle}"));
        }
        if !matches!(state.registrations.get(handle), Some(Some(_))) {
            state.wrong(format!("{handle} is leased and not registered any more"));
        }
    }

    /// The lease alone, of which the device does not know any more.
    fn into_lease(self) -> TheLease {
        self.check();
        if let Some(Some(it)) = self.world.state().registrations.get_mut(self.handle) {
            it.leases -= 1;
        }
        self.lease
    }

    fn end(self) {
        drop(self.into_lease());
    }
}

/// What a thread may do.
#[derive(Clone, Copy, Debug)]
enum Step {
    Get,
    Look,
    End,
    EvictIn,
    Evict,
    Invalidate,
    Change,
    Discard,
    Reclaim,
    GetOnce,
    PassOn,
    LookAtAll,
    Suspend,
    Fork,
    /// A word that comes when the last registration is gone, from where the cache is used again.
    Then,
    /// The same of an invalidation that a lease hears of.
    Hear,
}

/// What the threads of one schedule do, each as often as it is in the list. Many schedules leave much
/// out, because what is rare when everything is done at once is frequent when little is (swarm testing,
/// Groce and others, 2012).
fn menu(random: &mut Random, suspends: bool) -> Vec<Step> {
    use Step::*;
    let all = [
        Look, End, EvictIn, Evict, Invalidate, Change, Discard, Reclaim, GetOnce, PassOn, LookAtAll,
    ];
    let mut menu = vec![Get; 2 + random.below(3)];
    if suspends {
        menu.push(Suspend);
    }
    for step in all {
        menu.extend(vec![step; [0, 0, 0, 1, 3][random.below(5)]]);
    }
    menu
}

/// One thread of the program.
struct Worker {
    menu: Vec<Step>,
    /// How many pages it uses.
    pages: usize,
    cache: &'static TheCache,
    world: Arc<World>,
    random: Random,
    held: Vec<Held>,
    /// Leases that any thread may end.
    /// Leases for any thread. Behind the model's lock, as whatever hands a lease over orders its stores: a hazard
    /// that arrived behind its own end would keep its region for ever.
    basket: Arc<schedule::Mutex<Vec<Held>>>,
    connection: u8,
}

impl Worker {
    fn some_pages(&mut self) -> AddressRange {
        let first = self.random.below(self.pages);
        let count = if self.random.one_in(4) { 2 } else { 1 };
        pages(first, count.min(PAGES - first))
    }

    fn run(mut self, steps: usize) {
        let panics = self.world.state().panics.is_some();
        for _ in 0..steps {
            if panics {
                // The operation ends with the panic.
                _ = catch_unwind(AssertUnwindSafe(|| self.step()));
            } else {
                self.step();
            }
        }
        for held in self.held.drain(..) {
            let ended = catch_unwind(AssertUnwindSafe(|| held.end()));
            if let (Err(panic), false) = (ended, panics) {
                resume_unwind(panic);
            }
        }
    }

    fn step(&mut self) {
        let range = self.some_pages();
        match self.menu[self.random.below(self.menu.len())] {
            Step::Get => self.get(range),
            Step::Look => self.look(range),
            Step::End => self.end_one(),
            Step::EvictIn => _ = self.cache.evict_idle_in(range),
            Step::Evict => _ = self.cache.evict_idle(),
            Step::Invalidate => self.invalidate(range),
            Step::Change => self.world.change(range),
            Step::Discard => self.world.discard(range),
            Step::Reclaim => _ = self.cache.reclaim(),
            Step::GetOnce => self.get_once(range),
            Step::PassOn => self.pass_on(),
            Step::LookAtAll => self.look_at_all(),
            Step::Suspend => self.suspend(range),
            Step::Fork => self.fork(range),
            Step::Then => {
                let word = self.word();
                let versions = self.world.change_undetected(range);
                self.cache.invalidate_then(range, word);
                self.world.note_returned(range, versions);
            }
            Step::Hear => {
                let callback = self.callback();
                if let Some(held) = self.held.last_mut() {
                    held.lease.on_invalidate(callback);
                }
            }
        }
    }

    /// A change that the program alone reports.
    fn invalidate(&self, range: AddressRange) {
        let versions = self.world.change_undetected(range);
        self.cache.invalidate(range);
        self.world.note_returned(range, versions);
    }

    /// Comes once, and comes back into the cache.
    fn word(&mut self) -> impl FnOnce() + Send + 'static {
        self.world.state().words.0 += 1;
        let (world, callback) = (Arc::clone(&self.world), self.callback());
        move || {
            world.state().words.1 += 1;
            callback();
        }
    }

    /// What a program may do where the cache calls it.
    fn callback(&mut self) -> impl FnOnce() + Send + 'static {
        let (cache, range, what) = (self.cache, self.some_pages(), self.random.below(7));
        let world = Arc::clone(&self.world);
        // A thread that suspends and asks for what it has suspended waits for itself.
        let may_ask = !self.menu.iter().any(|step| matches!(step, Step::Suspend));
        move || {
            // Not as the cache ends.
            if world.state().is_over {
                return;
            }
            match what {
                0 => _ = cache.evict_idle(),
                1 => _ = cache.evict_idle_in(range),
                2 => _ = cache.reclaim(),
                3 => cache.invalidate(range),
                4 => {
                    world.state().words.0 += 1;
                    let world = Arc::clone(&world);
                    cache.invalidate_then(range, move || world.state().words.1 += 1);
                }
                _ => {
                    let returned = world.state().returned;
                    let address = std::ptr::without_provenance(range.start());
                    // SAFETY: as in `get`.
                    let lease = unsafe {
                        if may_ask {
                            cache.get(address, range.len(), Access::READ).ok()
                        } else {
                            cache.request(address, range.len(), Access::READ).get_if_cached()
                        }
                    };
                    if let Some(lease) = lease {
                        Held::new(&world, lease, returned).end();
                    }
                }
            }
        }
    }

    fn returned(&self) -> [u64; PAGES] {
        self.world.state().returned
    }

    fn get(&mut self, range: AddressRange) {
        let returned = self.returned();
        let address = std::ptr::without_provenance(range.start());
        // SAFETY: no memory is behind the address, and the device touches none.
        let lease = unsafe { self.cache.get(address, range.len(), Access::READ) };
        self.keep(lease, returned);
    }

    fn get_once(&mut self, range: AddressRange) {
        let returned = self.returned();
        let address = std::ptr::without_provenance(range.start());
        // SAFETY: as in `get`.
        let lease = unsafe { self.cache.request(address, range.len(), Access::READ).once().get() };
        self.keep(lease, returned);
    }

    /// A lookup that becomes a lease only if something is found.
    fn look(&mut self, range: AddressRange) {
        let returned = self.returned();
        let address = std::ptr::without_provenance(range.start());
        // SAFETY: as in `get`.
        let lease =
            unsafe { self.cache.request(address, range.len(), Access::READ).get_if_cached() };
        if let Some(lease) = lease {
            self.keep(Ok(lease), returned);
        }
    }

    fn keep(&mut self, lease: Result<TheLease, GetError>, returned: [u64; PAGES]) {
        match lease {
            Ok(lease) => {
                let held = Held::new(&self.world, lease, returned);
                if self.random.one_in(2) {
                    self.held.push(held);
                    if self.held.len() > 2 {
                        self.held.remove(0).end();
                    }
                } else {
                    held.end();
                }
            }
            // A thread that holds what others want gives way.
            Err(GetError::Exhausted(_)) => self.end_one(),
            Err(GetError::Suspended { .. }) => {}
            Err(GetError::Register(_)) if self.world.is_flaky => {}
            Err(error) => self.world.state().wrong(format!("get failed: {error}")),
        }
    }

    fn end_one(&mut self) {
        let anothers = {
            let mut basket = self.basket.lock().unwrap_or_else(PoisonError::into_inner);
            basket.pop()
        };
        if let Some(held) = anothers.or_else(|| self.held.pop()) {
            held.end();
        }
    }

    fn pass_on(&mut self) {
        if let Some(held) = self.held.pop() {
            held.check();
            self.basket.lock().unwrap_or_else(PoisonError::into_inner).push(held);
        }
    }

    fn look_at_all(&self) {
        self.held.iter().for_each(Held::check);
        let invalidated = self.held.iter().filter(|held| held.lease.is_invalidated()).count();
        let statistics = self.cache.statistics();
        let live = self.world.state().live().count() as u64;
        // Each is read at its own time; neither may be absurd.
        if invalidated > self.held.len() || statistics.regions > 64 || live > 64 {
            self.world.state().wrong(format!("{statistics:?}"));
        }
    }

    /// The process forks, and this is the child: no other thread goes on, whatever lock it holds. The
    /// schedule ends with it.
    fn fork(&mut self, range: AddressRange) {
        schedule::turn();
        CHILD.set(Child::Lives(shuttle::current::me()));
        self.world.forked.store(true, Ordering::SeqCst);
        self.world.state().in_child = true;
        let (cache, address) = (self.cache, std::ptr::without_provenance(range.start()));
        // SAFETY: as in `get`, for both.
        let (got, found) = unsafe {
            let got = cache.get(address, range.len(), Access::READ).map(drop);
            (got, cache.request(address, range.len(), Access::READ).get_if_cached().is_some())
        };
        let evicted = cache.evict_idle() + cache.evict_idle_in(range) + cache.reclaim();
        cache.invalidate(range);
        let statistics = cache.statistics();
        self.held.drain(..).for_each(|held| drop(held.lease));
        // SAFETY: the parent's threads, which use it, do not exist here.
        drop(unsafe { take_back(cache) });
        let wrong = std::mem::take(&mut self.world.state().wrong);
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert!(matches!(got, Err(GetError::Forked)) && !found, "{got:?} {found}");
        assert_eq!((evicted, statistics), (0, pinfold_core::Statistics::default()));
        CHILD.set(Child::Ended);
        schedule::turn();
    }

    /// A range is suspended, its memory moved, and resumed in one of three ways.
    fn suspend(&mut self, range: AddressRange) {
        // A lease of this thread that is not handed over would be waited for until the deadline.
        let (overlapping, others) = std::mem::take(&mut self.held)
            .into_iter()
            .partition(|held| held.lease.registered().overlaps(&range));
        self.held = others;
        let overlapping: Vec<Held> = overlapping;
        let leases: Vec<_> = overlapping.into_iter().map(Held::into_lease).collect();
        let handed: Vec<_> = leases.iter().map(Lease::handle).collect();
        let terms = SuspensionTerms {
            deadline: Duration::from_millis(6),
            leases: if self.random.one_in(2) { Leases::Refuse } else { Leases::Drain },
            gets: if self.random.one_in(2) { Gets::Refuse } else { Gets::Hold },
            on_drop: if self.random.one_in(2) { OnDrop::Kill } else { OnDrop::Resume },
        };
        let before = self.returned();
        // One that all share, and one of this thread.
        let connections = vec![0, self.connection];
        let suspended = match self.cache.suspend(range, connections, leases, terms) {
            Ok(suspended) => suspended,
            Err(refused) => {
                // They are as old as they were.
                self.take_back(refused.leases.into_iter().flatten(), [0; PAGES]);
                return;
            }
        };
        let versions = if self.world.expires {
            // It may have expired, and then this is a change like any other.
            self.world.change(range);
            self.returned()
        } else {
            self.move_untouched(range, &handed)
        };
        let ended = match self.random.below(4) {
            0 => {
                drop(suspended);
                Vec::new()
            }
            1 if self.world.expires => {
                self.world.state().clock += Duration::from_millis(10);
                self.cache.expire_suspensions();
                suspended.resume().map_or(Vec::new(), |resumed| resumed.leases)
            }
            _ => suspended.resume().map_or(Vec::new(), |resumed| resumed.leases),
        };
        self.world.note_returned(range, versions);
        self.take_back(ended.into_iter().flatten(), before);
    }

    /// New pages, of which no monitor hears; the versions then.
    fn move_untouched(&self, range: AddressRange, handed: &[usize]) -> [u64; PAGES] {
        self.assert_untouched(range, handed);
        let versions = {
            let mut state = self.world.state();
            state.change(range);
            state.versions
        };
        schedule::turn();
        self.assert_untouched(range, handed);
        versions
    }

    fn take_back(&mut self, leases: impl Iterator<Item = TheLease>, returned: [u64; PAGES]) {
        for lease in leases {
            self.keep(Ok(lease), returned);
        }
    }

    /// Nothing but the registrations that were handed over is there, and those are withdrawn.
    fn assert_untouched(&self, range: AddressRange, handed: &[usize]) {
        let mut state = self.world.state();
        let touching: Vec<_> = (0..)
            .zip(&state.registrations)
            .filter_map(|(handle, it)| Some((handle, it.as_ref()?)))
            .filter(|(handle, it)| {
                it.range.overlaps(&range) && !(handed.contains(handle) && it.is_withdrawn)
            })
            .map(|(handle, it)| format!("{handle}: {it:?}"))
            .collect();
        if !touching.is_empty() {
            state.wrong(format!("{range} is suspended, and there is {touching:?}"));
        }
    }
}

/// What a schedule's cache is like.
fn config(random: &mut Random, world: &World) -> Config {
    // SAFETY: it has every store arrive.
    let asymmetric = unsafe { Barriers::asymmetric(schedule::heavy_barrier) };
    // SAFETY: as above, where it says so.
    let refused = unsafe { Barriers::asymmetric(sometimes_refused) };
    let barriers = match random.below(4) {
        0 => Barriers::SYMMETRIC,
        1 if world.is_flaky => refused,
        _ => asymmetric,
    };
    let max_regions = [2, 2, 3, 64][random.below(4)];
    let when_full = if random.one_in(2) { WhenFull::Refuse } else { WhenFull::RegisterPerUse };
    // Without a clock every range is kept.
    let clock = random.one_in(3).then(|| {
        MOOD.set(random.next());
        Clock::new(moods)
    });
    Config { max_regions, when_full, barriers, clock, ..Config::default() }
}

std::thread_local! {
    /// All threads of a schedule run on one, so that a schedule can be repeated.
    static MOOD: Cell<u64> = const { Cell::new(0) };
    static NOW: Cell<u64> = const { Cell::new(0) };
}

/// A clock by which things take now long, now no time: what is kept changes from get to get.
fn moods() -> u64 {
    MOOD.set(MOOD.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    NOW.set(NOW.get().wrapping_add(MOOD.get() >> 52));
    NOW.get()
}

/// A barrier that the system takes away now and then.
fn sometimes_refused() -> bool {
    use std::sync::atomic::AtomicU64;
    static ASKED: AtomicU64 = AtomicU64::new(0);
    let mut random = Random(NUMBER.get() ^ ASKED.fetch_add(1, Ordering::Relaxed));
    !random.one_in(3) && schedule::heavy_barrier()
}

fn lend(cache: TheCache) -> &'static TheCache {
    Box::leak(Box::new(cache))
}

/// # Safety
///
/// Nothing of the cache is in use any more.
unsafe fn take_back(cache: &'static TheCache) -> Box<TheCache> {
    // SAFETY: made by `lend`; the rest is the caller's promise.
    unsafe { Box::from_raw(std::ptr::from_ref(cache).cast_mut()) }
}

/// What is to be tried.
#[derive(Clone, Copy)]
struct Trial {
    workers: usize,
    steps: usize,
    reclaimer: bool,
    suspends: bool,
    flaky: bool,
    /// Two registrations, three pages, and nothing but gets, lookups and evictions.
    cramped: bool,
    /// One of many steps is a fork.
    forks: bool,
    /// Callbacks come back into the cache.
    reenters: bool,
    /// Some deregistrations panic.
    panics: bool,
}

impl Trial {
    const USUAL: Self = Self {
        workers: 3,
        steps: 6,
        reclaimer: false,
        suspends: false,
        flaky: false,
        cramped: false,
        forks: false,
        reenters: false,
        panics: false,
    };

    fn run(self, mut random: Random) {
        let world = World::new(self.flaky.then(|| Random(random.next())), random.one_in(3));
        world.state().panics = self.panics.then(|| Random(random.next()));
        let mut config = config(&mut random, &world);
        if self.cramped {
            config.max_regions = 2;
        }
        let mut cache =
            Cache::new(Device(Arc::clone(&world)), Watcher(Arc::clone(&world)), config).unwrap();
        if self.reclaimer {
            let started =
                cache.start_reclaimer(|reclaimer| Ok(thread::spawn(move || reclaimer.run())));
            started.unwrap();
        }
        let cache = lend(cache);
        if self.cramped {
            stand_by(cache);
        }
        let basket = Arc::default();
        let (mut menu, pages) = if self.cramped {
            use Step::{End, EvictIn, Get, Look};
            (vec![Get, Get, Get, Look, Look, Look, EvictIn, EvictIn, End], 3)
        } else {
            (menu(&mut random, self.suspends), 1 + random.below(PAGES))
        };
        if self.forks {
            menu.push(Step::Fork);
        }
        if self.reenters {
            menu.extend([Step::Then, Step::Hear, Step::Hear]);
        }
        let workers: Vec<_> = (1..=self.workers)
            .map(|number| {
                let worker = Worker {
                    menu: menu.clone(),
                    pages,
                    cache,
                    world: Arc::clone(&world),
                    random: Random(random.next()),
                    held: Vec::new(),
                    basket: Arc::clone(&basket),
                    connection: u8::try_from(number).unwrap(),
                };
                thread::spawn(move || worker.run(self.steps))
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        basket.lock().unwrap_or_else(PoisonError::into_inner).drain(..).for_each(|held| {
            let ended = catch_unwind(AssertUnwindSafe(|| held.end()));
            assert!(ended.is_ok() || self.panics);
        });
        if self.reclaimer && !self.flaky {
            wait_until_gone(cache);
        }
        // A callback that the reclaimer's thread runs may register something meanwhile.
        if !self.panics && !(self.reenters && self.reclaimer) {
            balance(cache, &world);
        }
        world.state().is_over = true;
        // SAFETY: every worker has ended, and every lease.
        let cache = unsafe { take_back(cache) };
        let ended = catch_unwind(AssertUnwindSafe(|| drop(cache)));
        assert!(ended.is_ok() || self.panics);
        judge(&world, config);
    }
}

/// The first of three pages makes room for the third, and the second is the next to go.
fn stand_by(cache: &TheCache) {
    for page in 0..3 {
        let address = std::ptr::without_provenance(START + page * PAGE);
        // SAFETY: no memory is behind the address, and the device touches none.
        drop(unsafe { cache.get(address, PAGE, Access::READ) });
    }
}

/// The last registration's end is notified, whichever thread deregisters it: else this waits for ever.
fn wait_until_gone(cache: &TheCache) {
    let done = Arc::new((schedule::Mutex::new(false), schedule::Condvar::new()));
    let told = Arc::clone(&done);
    cache.invalidate_then(pages(0, PAGES), move || {
        *told.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        told.1.notify_all();
    });
    let mut is_done = done.0.lock().unwrap_or_else(PoisonError::into_inner);
    while !*is_done {
        is_done = done.1.wait(is_done).unwrap_or_else(PoisonError::into_inner);
    }
}

/// With nothing under way, what the cache says is what the device has.
fn balance(cache: &TheCache, world: &World) {
    cache.reclaim();
    let statistics = cache.statistics();
    let mut state = world.state();
    let live = state.live().count() as u64;
    if statistics.regions < live {
        state.wrong(format!("{} regions in the books, {live} in the device", statistics.regions));
    }
    if state.connections.contains(&Connection::Stopped) {
        state.wrong("a connection was left stopped".into());
    }
}

fn judge(world: &World, config: Config) {
    let mut state = world.state();
    let left = state.live().count();
    if left > 0 {
        state.wrong(format!("{left} registrations are left"));
    }
    let (given, came) = state.words;
    if given != came {
        state.wrong(format!("{came} of {given} words came"));
    }
    if config.when_full == WhenFull::Refuse && state.peak > config.max_regions {
        let peak = state.peak;
        state.wrong(format!("{peak} registrations of {}", config.max_regions));
    }
    assert!(state.wrong.is_empty(), "{:#?}", state.wrong);
}

/// Gets, lookups, evictions, invalidations and changes; only these threads reclaim.
#[test]
fn leases_hold_and_hits_are_fresh() {
    explore(1, |random| Trial::USUAL.run(random));
}

/// Little room, so that every get evicts, and lookups that do not become leases are in the way.
#[test]
fn evictions_spare_what_is_leased() {
    explore(1, |random| Trial { cramped: true, ..Trial::USUAL }.run(random));
}

/// The same with the reclaimer's thread, which must hear of every end.
#[test]
fn the_reclaimer_hears_of_every_end() {
    explore(1, |random| Trial { workers: 2, reclaimer: true, ..Trial::USUAL }.run(random));
}

/// The same with suspensions.
#[test]
fn what_is_suspended_is_touched_by_no_thread() {
    explore(1, |random| Trial { suspends: true, ..Trial::USUAL }.run(random));
}

/// Suspensions of ranges side by side, with a registration that reaches into both: leased by the thread of
/// one of them, or by none. None keeps the other waiting until its deadline.
#[test]
fn suspensions_of_neighbours_all_come_about() {
    explore(1, neighbours);
}

fn neighbours(mut random: Random) {
    let world = World::new(None, false);
    let config = Config { max_regions: 64, clock: None, ..config(&mut random, &world) };
    let cache = Cache::new(Device(Arc::clone(&world)), Watcher(Arc::clone(&world)), config);
    let cache = lend(cache.unwrap());
    let get = |range: AddressRange| {
        let address = std::ptr::without_provenance(range.start());
        // SAFETY: no memory is behind the address, and the device touches none.
        unsafe { cache.get(address, range.len(), Access::READ) }
    };
    let of_both = pages(0, 2);
    let mut leased = Some(get(of_both).unwrap()).filter(|_| random.one_in(2));
    let rounds = 1 + random.below(3);
    let suspend_in_turns = move |page: usize, mut leases: Vec<TheLease>| {
        for round in 1..=rounds {
            // Each wait of the device takes a millisecond: no schedule has so many.
            let terms = SuspensionTerms {
                deadline: Duration::from_secs(100),
                gets: Gets::Refuse,
                ..SuspensionTerms::default()
            };
            let suspended = cache.suspend(pages(page, 1), vec![0], leases, terms);
            let suspended = suspended.unwrap_or_else(|not| panic!("{page}: {:?}", not.why));
            schedule::turn();
            let resumed = suspended.resume().unwrap();
            leases = resumed.leases.into_iter().map(Result::unwrap).collect();
            // The other may wait for it.
            if round == rounds {
                leases.clear();
            }
            drop(get(of_both));
        }
    };
    let threads = [0, 1].map(|page| {
        let leases: Vec<_> = leased.take().into_iter().collect();
        thread::spawn(move || suspend_in_turns(page, leases))
    });
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    balance(cache, &world);
    // SAFETY: every thread has ended, and every lease.
    drop(unsafe { take_back(cache) });
    judge(&world, config);
}

/// The same on a device that fails now and then, and a system that takes its barrier away.
#[test]
fn failures_leave_nothing_behind() {
    const TRIAL: Trial =
        Trial { workers: 2, suspends: true, flaky: true, reclaimer: true, ..Trial::USUAL };
    explore(1, |random| TRIAL.run(random));
}

/// A forked child owns nothing and waits for no thread, wherever the parent's threads stood. A
/// tenth of the schedules, because each leaves the stacks of the parent's threads behind.
#[test]
fn a_forked_child_touches_nothing_and_waits_for_no_thread() {
    const TRIAL: Trial = Trial { reclaimer: true, forks: true, ..Trial::USUAL };
    explore(10, |random| TRIAL.run(random));
}

/// Callbacks that come back into the cache, on whatever thread they run.
#[test]
fn what_the_cache_calls_may_come_back_into_it() {
    explore(1, |random| Trial { reenters: true, reclaimer: true, ..Trial::USUAL }.run(random));
}

/// The same without the reclaimer's thread, and little room.
#[test]
fn callbacks_among_evictions_may_come_back() {
    explore(1, |mut random| {
        let cramped = random.one_in(2);
        Trial { reenters: true, cramped, ..Trial::USUAL }.run(random);
    });
}

/// The same with suspensions.
#[test]
fn callbacks_among_suspensions_may_come_back() {
    explore(1, |random| {
        Trial { workers: 2, reenters: true, suspends: true, ..Trial::USUAL }.run(random);
    });
}

/// A registrar that panics at some deregistrations: the others are made, once each.
#[test]
fn a_registrar_that_panics_loses_nothing() {
    explore(1, |mut random| {
        let (reclaimer, reenters) = (random.one_in(2), random.one_in(2));
        Trial { panics: true, reclaimer, reenters, ..Trial::USUAL }.run(random);
    });
}

/// Nothing is leased, and one thread gives back, invalidates or looks at what another has no room for.
#[test]
fn a_get_is_refused_for_leases_alone() {
    explore(1, |mut random| {
        let world = World::new(None, false);
        let max_regions = 1 + random.below(2);
        let when_full = WhenFull::Refuse;
        let config = Config { max_regions, when_full, clock: None, ..config(&mut random, &world) };
        let cache = Cache::new(Device(Arc::clone(&world)), Watcher(Arc::clone(&world)), config);
        let cache = lend(cache.unwrap());
        let get = |page: usize| {
            let address = std::ptr::without_provenance(START + page * PAGE);
            // SAFETY: no memory is behind the address, and the device touches none.
            unsafe { cache.get(address, PAGE, Access::READ) }
        };
        (0..max_regions).for_each(|page| drop(get(page).unwrap()));
        let how = random.below(5);
        let other = thread::spawn(move || match how {
            0 => _ = cache.evict_idle(),
            1 => _ = cache.evict_idle_in(pages(0, 2)),
            2 => {
                cache.invalidate(pages(0, 1));
                cache.reclaim();
            }
            // The page of a region that does not serve it, and one that is not registered.
            how => {
                let (page, access) = [(0, Access::WRITE), (2, Access::READ)][how - 3];
                let address = std::ptr::without_provenance(START + page * PAGE);
                // SAFETY: as above.
                let found = unsafe { cache.request(address, PAGE, access).get_if_cached() };
                drop(found);
            }
        });
        if let Err(error) = get(3) {
            panic!("nothing is leased ({how}, {max_regions}): {error}");
        }
        other.join().unwrap();
        // SAFETY: every thread has ended, and every lease.
        drop(unsafe { take_back(cache) });
        judge(&world, config);
    });
}

/// A budget of which another draws, which recalls from the cache.
#[derive(Default)]
struct Shelf(Mutex<Option<Weak<dyn Lender>>>);

impl Account for Shelf {
    fn take(&self, _: Amount) -> Result<(), Refusal> {
        Ok(())
    }
    fn overdraw(&self, _: Amount) {}
    fn give(&self, _: Amount) {}
    fn recall(&self, _: Amount) -> bool {
        false
    }
    fn refused(&self, _: RegisterError, _: Amount) -> bool {
        false
    }
    fn settle(&self) {}
    fn attach(&self, lender: Weak<dyn Lender>) {
        *self.0.lock().unwrap() = Some(lender);
    }
}

/// The cache ends while others recall from it what is idle, or changed, at some registrars' with panics.
#[test]
fn a_cache_ends_while_others_recall_from_it() {
    explore(1, |mut random| {
        let world = World::new(None, false);
        world.state().panics = random.one_in(2).then(|| Random(random.next()));
        let config = Config { clock: None, max_regions: 64, ..config(&mut random, &world) };
        let shelf = Arc::new(Shelf::default());
        let mut cache = Cache::with_account(
            Device(Arc::clone(&world)),
            Watcher(Arc::clone(&world)),
            config,
            Arc::clone(&shelf) as Arc<dyn Account>,
        )
        .unwrap();
        if random.one_in(2) {
            let started =
                cache.start_reclaimer(|reclaimer| Ok(thread::spawn(move || reclaimer.run())));
            started.unwrap();
        }
        for page in 0..PAGES {
            let address = std::ptr::without_provenance(START + page * PAGE);
            // SAFETY: no memory is behind the address, and the device touches none.
            drop(unsafe { cache.get(address, PAGE, Access::READ) });
        }
        let invalidates = random.one_in(2);
        let recalls = [0, 1].map(|_| {
            let shelf = Arc::clone(&shelf);
            let amount = [Amount::EVERYTHING, Amount::one(2 * PAGE)][random.below(2)];
            thread::spawn(move || {
                let lender = shelf.0.lock().unwrap().as_ref().and_then(Weak::upgrade);
                let recalled = lender
                    .map(|lender| catch_unwind(AssertUnwindSafe(|| _ = lender.give_back(amount))));
                drop(recalled);
            })
        });
        if invalidates {
            cache.invalidate(pages(1, 2));
        }
        _ = catch_unwind(AssertUnwindSafe(|| drop(cache)));
        recalls.into_iter().for_each(|recall| recall.join().unwrap());
        judge(&world, config);
    });
}
