//! A device without a kernel, a monitor without one, and a mover between them.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the traits on whose promise memory depends, and to write
//! into memory as a device does: only where a registration is live and a request is under way.

#![allow(unsafe_code)]

use pinfold::pieces::{Completion, Mover, Request};
use pinfold::rearrange::{RearrangeError, Trimmed, trim};
use pinfold::suspend::{ConnectionLost, Renewed, Suspend, Suspended, Transfers, Unsupported};
use pinfold::{
    Access, AddressRange, Cache, Change, ChangeMark, Config, Cover, DeregisterError, GetError,
    Lease, Lost, MappingKind, Monitor, Position, RegisterError, Registrar, RegistrarLimits, Replay,
    Sequence, Translation, Uncovered, Watch,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

pub(crate) const PAGE: usize = 4096;
pub(crate) type TheCache = Cache<Device, Silent>;

/// The registrar; what it did is seen through [`Records`], also when it is gone.
pub(crate) struct Device(Arc<Records>);

#[derive(Default)]
pub(crate) struct Records {
    live: Mutex<BTreeMap<u32, AddressRange>>,
    next: AtomicU32,
    calls: AtomicUsize,
    panic_at: AtomicUsize,
    bombs: AtomicBool,
    /// How many registrations a panicking `deregister` has left.
    left_by_panics: AtomicUsize,
    /// Whether from the call that panics on every destructor of a connection panics, too.
    drops_panic_from_then_on: bool,
    gone: AtomicBool,
    /// Whether a connection that is to go on is lost.
    loses_connections: AtomicBool,
    /// What its clock says, which only [`pass`](Self::pass) moves.
    now: Mutex<Duration>,
    stopped: Mutex<BTreeSet<u32>>,
    failed: Mutex<BTreeSet<u32>>,
    /// What copying or dropping a connection does besides.
    besides: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Panics when it is dropped, with another.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        std::panic::panic_any(Bomb);
    }
}

/// A connection. Copying and dropping it are calls of the device's, too.
pub(crate) struct Link(u32, Arc<Records>);

impl Link {
    fn called(&self, what: &str) {
        if let Some(besides) = self.1.besides.get() {
            besides();
        }
        assert!(!self.1.is_to_panic(), "{what} a connection");
    }
}

impl Clone for Link {
    fn clone(&self) -> Self {
        self.called("copy");
        Self(self.0, Arc::clone(&self.1))
    }
}

impl PartialEq for Link {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Link").field(&self.0).finish()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Whether or not this thread is unwinding: the library drops what is the device's.
        self.called("drop");
        assert!(
            !self.1.drops_panic_from_then_on || !self.1.has_panicked(),
            "drop every connection"
        );
    }
}

/// Counts its end, and panics.
pub(crate) struct LoudEnd(pub(crate) Arc<AtomicUsize>);

impl Drop for LoudEnd {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
        panic!("dropped");
    }
}

impl fmt::Debug for LoudEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoudEnd")
    }
}

/// The same, but each of its deregistrations panics when it is done, and so does its destructor.
pub(crate) struct Loud(pub(crate) Device, #[expect(dead_code)] pub(crate) LoudEnd);

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Loud {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    unsafe fn register(&self, range: AddressRange, access: Access) -> Result<u32, RegisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.register(range, access) }
    }

    unsafe fn deregister(&self, handle: u32, range: AddressRange) -> Result<(), DeregisterError> {
        // SAFETY: as above.
        unsafe { self.0.deregister(handle, range) }?;
        panic!("deregistered");
    }
}

/// The same, but it panics once it is [armed](Self::1), asked what it is like, and as it ends.
pub(crate) struct Undecided(
    pub(crate) Device,
    pub(crate) Arc<AtomicBool>,
    #[expect(dead_code)] pub(crate) LoudEnd,
);

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Undecided {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    fn pinned_limit(&self) -> Option<usize> {
        assert!(!self.1.load(SeqCst), "pinned limit");
        self.0.pinned_limit()
    }

    fn translation(&self) -> Translation {
        assert!(!self.1.load(SeqCst), "translation");
        self.0.translation()
    }

    unsafe fn register(&self, range: AddressRange, access: Access) -> Result<u32, RegisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.register(range, access) }
    }

    unsafe fn deregister(&self, handle: u32, range: AddressRange) -> Result<(), DeregisterError> {
        // SAFETY: as above.
        unsafe { self.0.deregister(handle, range) }
    }
}

/// The same, but it follows the page table.
pub(crate) struct Following(pub(crate) Device);

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Following {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    fn translation(&self) -> Translation {
        Translation::OnDemand
    }

    unsafe fn register(&self, range: AddressRange, access: Access) -> Result<u32, RegisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.register(range, access) }
    }

    unsafe fn deregister(&self, handle: u32, range: AddressRange) -> Result<(), DeregisterError> {
        // SAFETY: as above.
        unsafe { self.0.deregister(handle, range) }
    }
}

pub(crate) fn device() -> (Device, Arc<Records>) {
    device_with(Records::default())
}

/// One of whose connections none can be dropped without a panic from the call that panics on.
pub(crate) fn device_with_loud_connections() -> (Device, Arc<Records>) {
    device_with(Records { drops_panic_from_then_on: true, ..Records::default() })
}

/// Another one with the same records.
pub(crate) fn device_of(records: &Arc<Records>) -> Device {
    Device(Arc::clone(records))
}

fn device_with(records: Records) -> (Device, Arc<Records>) {
    let records = Arc::new(records);
    (Device(Arc::clone(&records)), records)
}

/// The device that panics at its `n`th call from now on, counted from 1; 0 for never.
pub(crate) fn panics_at(records: &Records, n: usize) {
    records.calls.store(0, SeqCst);
    records.panic_at.store(n, SeqCst);
}

impl Records {
    fn table(&self) -> MutexGuard<'_, BTreeMap<u32, AddressRange>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn live(&self) -> usize {
        self.table().len()
    }

    /// Registrations that are there although no panic explains it.
    pub(crate) fn leaked(&self) -> usize {
        self.live() - self.left_by_panics.load(SeqCst)
    }

    pub(crate) fn has(&self, handle: u32, range: AddressRange) -> bool {
        self.table().get(&handle).is_some_and(|registered| registered.contains(&range))
    }

    /// From now on a connection that is to go on is lost.
    pub(crate) fn loses_connections(&self) {
        self.loses_connections.store(true, SeqCst);
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, time: Duration) {
        *self.now.lock().unwrap() += time;
    }

    /// How many connections stand still.
    pub(crate) fn stopped(&self) -> usize {
        self.connections().len()
    }

    fn connections(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.stopped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many connections were failed.
    pub(crate) fn failed(&self) -> usize {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether a live registration has these bytes.
    pub(crate) fn covers(&self, range: AddressRange) -> bool {
        self.table().values().any(|registered| registered.contains(&range))
    }

    /// Two connections of this device.
    pub(crate) fn links(self: &Arc<Self>) -> Vec<Link> {
        vec![Link(1, Arc::clone(self)), Link(2, Arc::clone(self))]
    }

    /// What copying or dropping a connection does besides, from now on.
    pub(crate) fn besides(&self, besides: impl Fn() + Send + Sync + 'static) {
        assert!(self.besides.set(Box::new(besides)).is_ok());
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(SeqCst)
    }

    /// Whether the call that was to panic has been made.
    pub(crate) fn has_panicked(&self) -> bool {
        let at = self.panic_at.load(SeqCst);
        at > 0 && self.calls.load(SeqCst) >= at
    }

    /// What it panics with panics once more, and that again, where it is dropped.
    pub(crate) fn panics_with_bombs(&self) {
        self.bombs.store(true, SeqCst);
    }

    fn is_to_panic(&self) -> bool {
        let is_to = self.is_next_to_panic();
        if is_to && self.bombs.load(SeqCst) {
            std::panic::panic_any(Bomb);
        }
        is_to
    }

    fn is_next_to_panic(&self) -> bool {
        self.calls.fetch_add(1, SeqCst) + 1 == self.panic_at.load(SeqCst)
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Device {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 30, max_regions: 1 << 10 }
    }

    unsafe fn register(&self, range: AddressRange, _: Access) -> Result<u32, RegisterError> {
        assert!(!self.0.is_to_panic(), "register");
        let handle = self.0.next.fetch_add(1, SeqCst);
        self.0.table().insert(handle, range);
        Ok(handle)
    }

    unsafe fn deregister(&self, handle: u32, range: AddressRange) -> Result<(), DeregisterError> {
        if self.0.is_to_panic() {
            self.0.left_by_panics.fetch_add(1, SeqCst);
            panic!("deregister");
        }
        let was = self.0.table().remove(&handle);
        assert_eq!(was, Some(range), "what was registered is deregistered once");
        Ok(())
    }
}

/// Its connections can be stopped, by their numbers; it panics behind what it did.
// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Suspend for Device {
    type Connection = Link;

    fn now(&self) -> Duration {
        assert!(!self.0.is_to_panic(), "now");
        *self.0.now.lock().unwrap()
    }

    fn can_suspend(&self, _: AddressRange, _: &[Link]) -> Result<(), Unsupported> {
        assert!(!self.0.is_to_panic(), "can suspend");
        Ok(())
    }

    fn stop(&self, connection: &Link) -> Result<(), ConnectionLost> {
        self.0.connections().insert(connection.0);
        assert!(!self.0.is_to_panic(), "stop");
        Ok(())
    }

    fn in_flight(&self, _: &Link, _: AddressRange) -> Result<Transfers, ConnectionLost> {
        assert!(!self.0.is_to_panic(), "in flight");
        Ok(Transfers::default())
    }

    unsafe fn withdraw(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
        assert!(!self.0.is_to_panic(), "withdraw");
        Ok(())
    }

    fn quiet(&self, _: AddressRange) -> bool {
        assert!(!self.0.is_to_panic(), "quiet");
        true
    }

    unsafe fn renew(
        &self,
        handle: u32,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<u32>, RegisterError> {
        // SAFETY: the caller's promise.
        let _gone = unsafe { self.deregister(handle, range) };
        // SAFETY: as above.
        unsafe { self.register(range, access) }.map(Renewed::Changed)
    }

    unsafe fn restart(&self, connection: &Link) -> Result<(), ConnectionLost> {
        assert!(!self.0.is_to_panic(), "restart");
        self.0.connections().remove(&connection.0);
        if self.0.loses_connections.load(SeqCst) { Err(ConnectionLost::Gone) } else { Ok(()) }
    }

    fn fail(&self, connection: &Link) {
        self.0.connections().remove(&connection.0);
        self.0.failed.lock().unwrap_or_else(PoisonError::into_inner).insert(connection.0);
        assert!(!self.0.is_to_panic(), "fail");
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.0.gone.store(true, SeqCst);
    }
}

/// What a question does besides, by its name.
type Besides = Box<dyn Fn(&str) + Send + Sync>;

/// Set in a child that has its parent's number.
pub(crate) static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Sees what it is told, by [`change`](Self::change).
pub(crate) struct Silent {
    process: u32,
    changes: Arc<Mutex<Vec<AddressRange>>>,
    /// How many changes its log holds.
    kept: AtomicU64,
    /// How often it finds no moment to watch a range, from now on.
    busy: AtomicUsize,
    /// Whether it watches no range that has a hole.
    sees_holes: AtomicBool,
    /// Whether it marks what it is asked to.
    has_marks: AtomicBool,
    /// What a question does besides, by its name.
    besides: OnceLock<Besides>,
    /// What the question whether this is a forked child does besides.
    besides_forked: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// It sees nothing any more.
    lost: Arc<AtomicBool>,
    notified: Mutex<u32>,
    event_count: Condvar,
    /// What panics as it ends.
    #[expect(dead_code)]
    end: Option<LoudEnd>,
}

impl Silent {
    pub(crate) fn new() -> Self {
        let (changes, notified) = (Arc::default(), Mutex::default());
        let (process, besides, besides_forked) =
            (std::process::id(), OnceLock::new(), OnceLock::new());
        let (lost, kept) = (Arc::default(), AtomicU64::new(u64::MAX));
        let (busy, sees_holes) = (AtomicUsize::new(0), AtomicBool::new(false));
        let has_marks = AtomicBool::new(false);
        let event_count = Condvar::new();
        Self {
            process,
            changes,
            kept,
            busy,
            sees_holes,
            has_marks,
            besides,
            besides_forked,
            lost,
            notified,
            event_count,
            end: None,
        }
    }

    /// One that panics as it ends.
    pub(crate) fn that_ends(end: LoudEnd) -> Self {
        Self { end: Some(end), ..Self::new() }
    }

    /// It watches no range that has a hole, from now on.
    pub(crate) fn sees_holes(&self) {
        self.sees_holes.store(true, SeqCst);
    }

    /// It marks changes of ranges, from now on.
    pub(crate) fn marks_changes(&self) {
        self.has_marks.store(true, SeqCst);
    }

    /// The next so many times it finds no moment to watch a range.
    pub(crate) fn is_busy(&self, times: usize) {
        self.busy.store(times, SeqCst);
    }

    /// Its log holds no more than the last so many changes.
    pub(crate) fn keeps(&self, changes: u64) {
        self.kept.store(changes, SeqCst);
    }

    /// What a question does besides, from now on.
    pub(crate) fn besides(&self, besides: impl Fn(&str) + Send + Sync + 'static) {
        assert!(self.besides.set(Box::new(besides)).is_ok());
    }

    /// The same of the question whether this is a forked child, which is asked with no lock held.
    pub(crate) fn besides_forked(&self, besides: impl Fn() + Send + Sync + 'static) {
        assert!(self.besides_forked.set(Box::new(besides)).is_ok());
    }

    fn is_forked(&self) -> bool {
        self.process != std::process::id() || IS_CHILD.load(SeqCst)
    }

    /// The next time that it is asked this it sees nothing any more.
    pub(crate) fn is_lost_when_asked(&self, what: &'static str) {
        let lost = Arc::clone(&self.lost);
        self.besides(move |question| _ = lost.fetch_or(question == what, SeqCst));
    }

    /// It has seen a change of `range` the next time that it is to watch anything, and panics once from then on, asked
    /// this.
    pub(crate) fn sees_and_panics_when_it_watches(&self, what: &'static str, range: AddressRange) {
        let (changes, watched) = (Arc::clone(&self.changes), AtomicBool::new(false));
        let panicked = AtomicBool::new(false);
        self.besides(move |question| {
            if question == "watch" && !watched.swap(true, SeqCst) {
                changes.lock().unwrap().push(range);
            }
            let is_to = watched.load(SeqCst) && question == what;
            assert!(!is_to || panicked.swap(true, SeqCst), "{question}");
        });
    }

    fn asked(&self, question: &str) {
        if let Some(besides) = self.besides.get() {
            besides(question);
        }
    }

    pub(crate) fn change(&self, range: AddressRange) {
        self.changes.lock().unwrap().push(range);
        self.notify();
    }
}

/// Set by each change behind those that were there.
struct Mark<'m>(&'m Silent, AddressRange, usize);

impl ChangeMark for Mark<'_> {
    fn is_set(&self) -> bool {
        self.0.asked("is set");
        self.0.changes.lock().unwrap()[self.2..].iter().any(|change| change.overlaps(&self.1))
    }
}

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        self.0.asked("unmark");
    }
}

// SAFETY: nothing here changes a mapping that is registered without saying so.
unsafe impl Monitor for Silent {
    fn name(&self) -> &'static str {
        "silent"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        if self.is_forked() {
            return Err(Lost::Forked);
        }
        self.asked("check");
        if self.lost.load(SeqCst) {
            return Err(Lost::Descriptor { errno: libc::EBADF });
        }
        Ok(Sequence(self.changes.lock().unwrap().len() as u64))
    }

    fn watch(&self, range: AddressRange) -> Watch {
        self.asked("watch");
        if self.sees_holes.load(SeqCst) && !pinfold_kernel::memory::is_mapped(range) {
            return Watch::Uncovered(Uncovered::Unmapped);
        }
        let one_less = |busy: usize| busy.checked_sub(1);
        match self.busy.fetch_update(SeqCst, SeqCst, one_less) {
            Ok(_) => Watch::Uncovered(Uncovered::Refused { errno: libc::EAGAIN }),
            Err(_) => Watch::Covered,
        }
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        self.asked("pending");
        self.lost.load(SeqCst)
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.asked("replay");
        let changes = self.changes.lock().unwrap().clone();
        let end = changes.len() as u64;
        let is_known = end.checked_sub(from.0).is_some_and(|new| new <= self.kept.load(SeqCst));
        let complete = is_known && !self.lost.load(SeqCst);
        let seen = if is_known { usize::try_from(from.0).unwrap() } else { changes.len() };
        changes.into_iter().skip(seen).for_each(visit);
        Replay { up_to: Position(end, 0), sequence: Sequence(end), complete, may_repeat: false }
    }

    fn mark_changes(&self, range: AddressRange) -> Option<Box<dyn ChangeMark + '_>> {
        self.asked("mark");
        let mark = Mark(self, range, self.changes.lock().unwrap().len());
        self.has_marks.load(SeqCst).then(|| Box::new(mark) as Box<dyn ChangeMark>)
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        if let Some(besides) = self.besides_forked.get() {
            besides();
        }
        self.is_forked()
    }

    fn notified(&self) -> u32 {
        *self.notified.lock().unwrap()
    }

    fn notify(&self) {
        *self.notified.lock().unwrap() += 1;
        self.event_count.notify_all();
    }

    fn wait(&self, seen: u32) {
        let count = self.notified.lock().unwrap();
        drop(self.event_count.wait_while(count, |count| *count == seen).unwrap());
    }
}

pub(crate) fn cache(config: Config) -> (TheCache, Arc<Records>) {
    let (device, records) = device();
    (cache_of(device, config), records)
}

/// A lease for reading of memory that this device does not touch: what a [`Dma`] does, unsafe code has begun.
pub(crate) fn lease<'c>(
    cache: &'c TheCache,
    memory: &[u8],
) -> Result<Lease<'c, Device, Silent>, GetError> {
    // SAFETY: no request is begun here.
    unsafe { cache.get(memory.as_ptr(), memory.len(), Access::READ) }
}

/// The same, of a registration that is not kept.
pub(crate) fn lease_once<'c>(
    cache: &'c TheCache,
    memory: &[u8],
) -> Result<Lease<'c, Device, Silent>, GetError> {
    // SAFETY: as above.
    unsafe { cache.request(memory.as_ptr(), memory.len(), Access::READ).once().get() }
}

/// Gives up memory that holds zeros, as it does then.
pub(crate) fn trim_zeros(
    suspended: &Suspended<'_, Device, Silent>,
    memory: &[u8],
) -> Result<Trimmed, RearrangeError> {
    assert!(memory.iter().all(|&byte| byte == 0));
    let range = AddressRange::new(memory.as_ptr().expose_provenance(), memory.len()).unwrap();
    // SAFETY: only private memory without a file is given up, whose content is zeros then, as it was.
    unsafe { trim(suspended, range) }
}

pub(crate) fn cache_of(device: Device, config: Config) -> TheCache {
    started(device, Silent::new(), config)
}

/// A cache without a thread of its own: one that starts while the kernel maps nothing ends the process.
pub(crate) fn cache_without_a_thread(config: Config) -> (TheCache, Arc<Records>) {
    let (device, records) = device();
    (Cache::new(device, Silent::new(), config).unwrap(), records)
}

#[cfg(not(miri))]
fn started(device: Device, monitor: Silent, config: Config) -> TheCache {
    pinfold::cache(device, monitor, config).unwrap()
}

/// In the interpreter, without what the kernel adds: its barriers, and the thread that reclaims.
#[cfg(miri)]
fn started(device: Device, monitor: Silent, config: Config) -> TheCache {
    Cache::new(device, monitor, config).unwrap()
}

/// What the device writes.
pub(crate) const WRITTEN: u8 = 0xEE;

/// Writes into what it was told to when it is asked to complete, the latest first.
pub(crate) struct Dma {
    /// The registrars by whose handles it writes.
    pub(crate) records: Vec<Arc<Records>>,
    pub(crate) under_way: Vec<Request<u32>>,
    pub(crate) calls: usize,
    pub(crate) panic_at: usize,
    /// Whether it goes on to panic from there on.
    pub(crate) for_good: bool,
    /// Whether the next completion is another's.
    pub(crate) foreign: bool,
    pub(crate) gone_at: usize,
}

impl Dma {
    pub(crate) fn new(records: &Arc<Records>) -> Self {
        let (records, under_way) = (vec![Arc::clone(records)], Vec::new());
        let (calls, panic_at, for_good) = (0, 0, false);
        Self { records, under_way, calls, panic_at, for_good, foreign: false, gone_at: 0 }
    }

    /// The same, by another registrar's handles as well.
    pub(crate) fn and(mut self, other: &Arc<Records>) -> Self {
        self.records.push(Arc::clone(other));
        self
    }

    fn count(&mut self, what: &str) {
        self.calls += 1;
        let late = self.for_good && self.panic_at > 0 && self.calls > self.panic_at;
        assert!(self.calls != self.panic_at && !late, "mover: {what}");
    }

    fn write(&self, request: &Request<u32>) {
        let Request { handle, range, .. } = *request;
        let is_live = self.records.iter().any(|records| records.has(handle, range));
        assert!(is_live, "the device writes by a live registration");
        let start = std::ptr::with_exposed_provenance_mut::<u8>(range.start());
        // SAFETY: the request is under way, so its memory is kept, by the promise to `begin`: that is what the tests are about.
        unsafe { start.write_bytes(WRITTEN, range.len()) };
    }
}

// SAFETY: a request is reported when its bytes have been written; one that panics was not begun, or
// not completed.
unsafe impl Mover<u32> for Dma {
    type Error = &'static str;

    unsafe fn begin(&mut self, request: Request<u32>) -> Result<(), &'static str> {
        self.count("begin");
        self.under_way.push(request);
        Ok(())
    }

    fn complete(&mut self) -> Result<Completion<&'static str>, &'static str> {
        self.count("complete");
        assert!(!self.under_way.is_empty(), "called only when something is under way");
        if self.gone_at > 0 && self.calls >= self.gone_at {
            self.under_way.clear();
            return Err("gone");
        }
        if std::mem::take(&mut self.foreign) {
            return Ok(Completion { number: 7777, outcome: Err("another's") });
        }
        let request = self.under_way.pop().expect("called only when something is under way");
        self.write(&request);
        Ok(Completion { number: request.number, outcome: Ok(()) })
    }
}

/// The exit code of a process that has run its work.
pub(crate) const RAN: i32 = 77;

/// Runs `work` in a process of its own, the test `name` over again; how that ended, which is with the code
/// [`RAN`] if `work` returned.
pub(crate) fn in_a_process_of_its_own(name: &str, work: impl FnOnce()) -> ExitStatus {
    const CHILD: &str = "PINFOLD_ENDINGS_CHILD";
    if std::env::var_os(CHILD).is_some() {
        work();
        std::process::exit(RAN);
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    let run = again.args(["--exact", name]).env(CHILD, "1");
    run.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
}
