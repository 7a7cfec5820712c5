//! The preload library's keeper, its store, and what forked children do, in every interleaving.
//!
//! Keeper, store and the words that children share are the library's own files. Around them stands the
//! smallest world that can go wrong, as in the core's models: one page, whose number changes when the
//! program's mapping does; a libibverbs that remembers which page it pinned; a monitor whose check is one load.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the monitor, and to follow the handles that its own
//! libibverbs made and keeps as long as the world.

#![allow(unsafe_code)]

use crate::registrar::verbs::ffi::ibv_mr;
use crate::sync::{AtomicU32, AtomicU64, Condvar, Mutex, MutexGuard, Ordering};
use pinfold_core::{AddressRange, Change, Cover, Lost, MappingKind};
use pinfold_core::{Monitor, Position, Replay, Sequence, Uncovered, Watch};
use std::marker::PhantomData;
use std::ptr::without_provenance_mut;
use std::sync::Arc;

/// There is memory for everything.
pub(crate) mod heap {
    pub(crate) const fn secure_room() -> bool {
        true
    }
}

/// What a keeper asks for besides.
pub(crate) mod admission {
    use crate::store::Key;

    use std::sync::atomic::{AtomicU64, Ordering};

    /// What is worth keeping is not asked here: a model keeps all.
    #[derive(Default, Debug)]
    pub(crate) struct Admission {
        /// Not loom's: how often something was kept in vain, or could not be.
        vain: AtomicU64,
    }

    impl Admission {
        pub(crate) const fn note_found(&self, _: &Key) {}

        pub(crate) fn note_vain(&self, _: &Key) {
            self.vain.fetch_add(1, Ordering::Relaxed);
        }

        pub(crate) fn vain(&self) -> u64 {
            self.vain.load(Ordering::Relaxed)
        }
    }
}

pub(crate) mod apart {
    /// A model's threads have stack enough.
    #[allow(clippy::unnecessary_wraps)] // as the part expects it
    pub(crate) fn run_again<T>(ours: impl FnOnce() -> T) -> Option<T> {
        Some(ours())
    }
}

/// No handler interrupts a model's threads.
pub(crate) mod holding {
    #[derive(Debug)]
    pub(crate) struct Holding;

    impl Holding {
        #[allow(clippy::unnecessary_wraps)] // as the part expects it
        pub(crate) const fn begin() -> Option<Self> {
            Some(Self)
        }
    }
}

pub(crate) mod hooks {
    pub(crate) const fn note_kept(_: pinfold_core::AddressRange) {}
}

pub(crate) mod sandbox {
    pub(crate) const fn is_the_program_s() -> bool {
        false
    }
}

pub(crate) mod report {
    use crate::reasons::Reasons;

    #[derive(Clone, Copy, Default, Debug)]
    pub(crate) struct Totals {
        pub(crate) hits: u64,
        pub(crate) misses: u64,
        pub(crate) regs: u64,
        pub(crate) deregs: u64,
        pub(crate) invalidations: u64,
        pub(crate) per_use: Reasons,
        pub(crate) evictions: u64,
    }
}

/// A model's device is its world, which may be closed and opened anew at its address.
pub(crate) mod device {
    use super::World;

    /// How often the device had been opened before: of one device, so it tells all that there are.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct Opening(pub(super) u64);

    #[derive(Debug)]
    pub(crate) struct KnownDevice {
        pub(crate) opening: Opening,
        pub(crate) gone: Vec<usize>,
    }

    /// The device of the model, once something was registered there.
    #[derive(Clone, Default, Debug)]
    pub(crate) struct OpenDevices(Option<(usize, Opening)>);

    /// All threads of a model have the device.
    #[derive(Debug)]
    pub(crate) enum Table {
        Shared,
    }

    #[derive(Debug)]
    pub(crate) struct LentDevice(pub(super) Opening);

    impl LentDevice {
        pub(crate) fn is_of(&self, opening: Opening) -> bool {
            self.0 == opening
        }
    }

    /// What it stands for by now.
    fn now(device: usize) -> Opening {
        // SAFETY: a device of a model is the address of a world that is still there.
        Opening(unsafe { &*std::ptr::with_exposed_provenance::<World>(device) }.opening())
    }

    impl OpenDevices {
        #[allow(clippy::unnecessary_wraps)] // a device of a model can be told from others
        pub(crate) unsafe fn note(&mut self, device: usize) -> Option<KnownDevice> {
            let opening = now(device);
            let before = self.0.replace((device, opening));
            let gone = before.filter(|&(_, before)| before != opening).map(|(device, _)| device);
            Some(KnownDevice { opening, gone: gone.into_iter().collect() })
        }

        /// A model's device is opened anew as another.
        pub(crate) fn inherit(&self, _: &Self) {}

        /// A model is one process.
        pub(crate) const fn has_marked(&self, _: std::ffi::c_int) -> bool {
            true
        }

        pub(crate) fn look(&self) -> Self {
            self.clone()
        }

        pub(crate) fn look_last(&self) -> Self {
            self.clone()
        }

        pub(crate) fn end_look(&self) {}

        pub(crate) fn is_open(&self, opening: Opening) -> bool {
            self.0.is_some_and(|(device, noted)| noted == opening && now(device) == opening)
        }

        pub(crate) fn lend(&self, opening: Opening, _: &Table) -> Option<LentDevice> {
            self.is_open(opening).then_some(LentDevice(opening))
        }

        pub(crate) fn forget(&mut self, device: usize) {
            self.0 = self.0.filter(|&(noted, _)| noted != device);
        }
    }
}

/// A deregistration by the thread is a deregistration; what remains of it is nothing of the model's.
pub(crate) mod steps {
    use crate::device::LentDevice;
    use crate::registrar::verbs::ffi::ibv_mr;
    use std::ptr::NonNull;

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Ended {
        InKernel,
        Not,
    }

    pub(crate) unsafe fn in_kernel(lent: &LentDevice, mr: NonNull<ibv_mr>) -> Ended {
        // SAFETY: the caller's promise.
        let (world, mr) = unsafe { (&*(*mr.as_ptr()).world, mr.as_ref()) };
        let mut pinned = super::lock(&world.pinned);
        assert_eq!(lent.0.0, mr.opening, "another device's number");
        // What was lent stays open, and what was registered in it, whatever the program closes.
        if pinned.opening == mr.opening {
            pinned.end(mr.handle);
        }
        Ended::InKernel
    }

    pub(crate) fn in_library(_: u32, _: impl FnOnce() -> bool) {}
}

pub(crate) mod errno {
    use crate::Errno;

    /// What fails here lacks room.
    pub(crate) const fn last_errno() -> Errno {
        Errno(libc::ENOMEM)
    }

    pub(crate) const fn set_errno(_: Errno) {}
}

pub(crate) mod mapping {
    use crate::Errno;
    use crate::sync::AtomicU64;

    /// A page that all threads of a model share, its processes as well.
    pub(crate) struct AtomicPage;

    impl AtomicPage {
        #[allow(clippy::unnecessary_wraps)] // as the part expects it
        pub(crate) const fn shared() -> Result<Self, Errno> {
            Ok(Self)
        }

        #[allow(clippy::unused_self)] // as the part expects it
        pub(crate) fn leak<const WORDS: usize>(self) -> &'static [AtomicU64; WORDS] {
            Box::leak(Box::new(std::array::from_fn(|_| AtomicU64::new(0))))
        }
    }
}

pub(crate) mod registrar {
    pub(crate) mod verbs {
        pub(crate) mod ffi {
            #[allow(non_camel_case_types)] // libibverbs' name
            #[derive(Debug)]
            pub(crate) struct ibv_mr {
                pub(crate) world: *const crate::keeping::World,
                pub(crate) opening: u64,
                pub(crate) addr: *mut std::ffi::c_void,
                pub(crate) length: usize,
                pub(crate) pd: *mut std::ffi::c_void,
                pub(crate) handle: u32,
                pub(crate) lkey: u32,
            }
        }
    }
}

pub(crate) mod monitor {
    pub(crate) use crate::keeping::{Best, WatchPause};
}

pub(crate) mod real {
    use crate::registrar::verbs::ffi::ibv_mr;

    pub(crate) struct Library {
        pub(crate) dereg_mr: unsafe fn(*mut ibv_mr) -> i32,
    }

    pub(crate) struct Real {
        pub(crate) library: Library,
    }

    #[allow(clippy::unnecessary_wraps)] // as the part expects it
    pub(crate) fn real() -> Option<Real> {
        Some(Real { library: Library { dereg_mr: crate::keeping::dereg_mr } })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no model goes on after a panic")
}

/// What is registered in a device.
#[derive(Default, Debug)]
struct Pinned {
    /// How often the device was closed, and opened anew.
    opening: u64,
    /// Pinned pages by handle; `None` once deregistered.
    pages: Vec<Option<u64>>,
    /// How many libibverbs has deregistered.
    by_library: usize,
}

impl Pinned {
    /// Deregisters.
    fn end(&mut self, handle: u32) {
        let page = self.pages[handle as usize - 1].take();
        assert!(page.is_some(), "deregistered twice");
    }

    fn count(&self) -> usize {
        self.pages.iter().flatten().count()
    }
}

/// The page that the program's address means now, and what libibverbs has pinned.
#[derive(Debug)]
pub(crate) struct World {
    page: AtomicU64,
    pinned: Mutex<Pinned>,
    /// How many may be pinned at once.
    room: usize,
    /// Not loom's: nothing is read of it.
    handles: std::sync::Mutex<Vec<Box<ibv_mr>>>,
    /// The log's length, published after the entry.
    sequence: AtomicU64,
    log: Mutex<Vec<AddressRange>>,
    change_pending: AtomicU32,
    /// What the monitor answers to what it is to watch: an error number, or 0.
    refusal: AtomicU32,
    event_count: Mutex<u32>,
    changed: Condvar,
}

// SAFETY: the handles in it point back to it, and nothing writes through them.
unsafe impl Send for World {}
// SAFETY: as above.
unsafe impl Sync for World {}

const START: usize = 1 << 16;
const PAGE: usize = 4096;
/// The address of the protection domain.
const DOMAIN: usize = 1;

impl World {
    fn new() -> Arc<Self> {
        Self::with_room_for(usize::MAX)
    }

    fn with_room_for(room: usize) -> Arc<Self> {
        Arc::new(Self {
            page: AtomicU64::new(0),
            pinned: Mutex::new(Pinned::default()),
            room,
            handles: std::sync::Mutex::new(Vec::new()),
            sequence: AtomicU64::new(0),
            log: Mutex::new(Vec::new()),
            change_pending: AtomicU32::new(0),
            refusal: AtomicU32::new(0),
            event_count: Mutex::new(0),
            changed: Condvar::new(),
        })
    }

    /// A change that is logged before its call returns, as `munmap` is.
    fn change(&self) {
        self.page.fetch_add(1, Ordering::AcqRel);
        self.append();
    }

    /// A change that is logged first and takes effect later, as `MADV_DONTNEED` is.
    fn discard(&self) {
        self.change_pending.fetch_add(1, Ordering::AcqRel);
        self.append();
        self.page.fetch_add(1, Ordering::AcqRel);
        self.change_pending.fetch_sub(1, Ordering::AcqRel);
    }

    fn append(&self) {
        let mut log = lock(&self.log);
        log.push(AddressRange::new(START, PAGE).expect("a page"));
        // Release: the entry is there before the sequence says so.
        self.sequence.store(log.len() as u64, Ordering::Release);
        drop(log);
        *lock(&self.event_count) += 1;
        self.changed.notify_all();
    }

    fn page(&self) -> u64 {
        self.page.load(Ordering::Acquire)
    }

    /// `ibv_reg_mr`.
    fn reg_mr(self: &Arc<Self>) -> *mut ibv_mr {
        let page = self.page();
        let mut pinned = lock(&self.pinned);
        if pinned.count() >= self.room {
            return std::ptr::null_mut();
        }
        pinned.pages.push(Some(page));
        let handle = u32::try_from(pinned.pages.len()).expect("few");
        let (world, opening) = (Arc::as_ptr(self), pinned.opening);
        let (addr, pd) = (without_provenance_mut(START), without_provenance_mut(DOMAIN));
        let mr = ibv_mr { world, opening, addr, length: PAGE, pd, handle, lkey: handle };
        let mut handles = self.handles.lock().expect("no panic under it");
        handles.push(Box::new(mr));
        handles.last_mut().map_or(std::ptr::null_mut(), |mr| std::ptr::from_mut(&mut **mr))
    }

    /// What is pinned for this handle.
    fn pinned(&self, mr: *const ibv_mr) -> Option<u64> {
        // SAFETY: the world's own, which stays as long as the world.
        let place = unsafe { (*mr).handle } as usize - 1;
        lock(&self.pinned).pages[place]
    }

    fn opening(&self) -> u64 {
        lock(&self.pinned).opening
    }

    /// The device is closed behind the keeper's back, with all that is registered, and opened anew: the first to be
    /// registered there has the first number again.
    fn open_anew(&self) {
        let mut pinned = lock(&self.pinned);
        pinned.opening += 1;
        pinned.pages.clear();
    }
}

/// `ibv_dereg_mr`.
///
/// # Safety
///
/// `mr` is a handle of a world that is still there.
unsafe fn dereg_mr(mr: *mut ibv_mr) -> i32 {
    // SAFETY: the caller's promise.
    let (world, mr) = unsafe { (&*(*mr).world, &*mr) };
    let mut pinned = lock(&world.pinned);
    assert_eq!(pinned.opening, mr.opening, "another registration has this number");
    pinned.end(mr.handle);
    pinned.by_library += 1;
    0
}

pub(crate) struct Mapping {
    pub(crate) range: AddressRange,
}

/// The world's monitor.
#[derive(Debug)]
pub(crate) struct Best(Arc<World>);

impl Best {
    #[allow(clippy::unnecessary_wraps, clippy::unused_self)] // as the part expects it
    pub(crate) fn watched_mappings(&self, range: AddressRange) -> std::io::Result<Vec<Mapping>> {
        Ok(vec![Mapping { range }])
    }

    #[allow(clippy::unnecessary_wraps, clippy::unused_self)] // as the part expects it
    pub(crate) const fn may_have_hugetlb(&self, _: AddressRange) -> std::io::Result<bool> {
        Ok(false)
    }

    #[allow(clippy::unnecessary_wraps, clippy::unused_self)] // as the part expects it
    pub(crate) const fn count_mappings(&self) -> std::io::Result<usize> {
        Ok(0)
    }

    /// Nothing is watched less for it: a monitor may report more than is asked for.
    #[allow(clippy::unused_self)] // as the part expects it
    pub(crate) const fn unwatch(&self, _: AddressRange) {}

    pub(crate) const fn may_watch(&self, _: AddressRange) -> bool {
        false
    }

    #[allow(clippy::unused_self)] // as the part expects it
    pub(crate) const fn pause_watches(&self) -> WatchPause<'_> {
        WatchPause(PhantomData)
    }
}

/// No model steps aside.
pub(crate) struct WatchPause<'m>(PhantomData<&'m Best>);

impl WatchPause<'_> {
    #[allow(clippy::unused_self)] // as the part expects it
    pub(crate) const fn unwatch(&self, _: AddressRange) {}
}

// SAFETY: `change` and `discard` append before they return, a discard is pending from before its
// entry until after its effect, and the log keeps everything.
unsafe impl Monitor for Best {
    fn name(&self) -> &'static str {
        "model"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        // Acquire: a thread that sees the sequence sees the entry.
        Ok(Sequence(self.0.sequence.load(Ordering::Acquire)))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        // Relaxed: the model's alone.
        match self.0.refusal.load(Ordering::Relaxed) {
            0 => Watch::Covered,
            errno => Watch::Uncovered(Uncovered::Refused { errno: errno.cast_signed() }),
        }
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        self.0.change_pending.load(Ordering::Acquire) > 0
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        let log = lock(&self.0.log);
        log.iter().skip(usize::try_from(from.0).unwrap_or(0)).for_each(|&range| visit(range));
        let end = log.len() as u64;
        Replay {
            up_to: Position(end, 0),
            sequence: Sequence(end),
            complete: from != Position::NOWHERE,
            may_repeat: false,
        }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        *lock(&self.0.event_count)
    }

    fn notify(&self) {
        *lock(&self.0.event_count) += 1;
        self.0.changed.notify_all();
    }

    fn wait(&self, seen: u32) {
        let mut count = lock(&self.0.event_count);
        while *count == seen {
            count = self.0.changed.wait(count).expect("no model goes on after a panic");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::admission::Admission;
    use super::{DOMAIN, PAGE, START, World, lock};
    use crate::children::{Children, Moves, Name};
    use crate::exploring::explore;
    use crate::keeper::Keeper;
    use crate::mapping_room::MappingRoom;
    use crate::monitor::Best;
    use crate::reasons::Reason;
    use crate::store::{DomainName, End, Key, Limit, Scope};
    use crate::sync::{AtomicU64, Ordering};
    use loom::thread;
    use std::ptr::NonNull;
    use std::sync::Arc;

    fn key(world: &Arc<World>) -> Key {
        let device = Arc::as_ptr(world).expose_provenance();
        let domain = DomainName { address: DOMAIN, device, number: 3 };
        Key { start: START, length: PAGE, domain, flags: 1 }
    }

    fn keeper_of(world: &Arc<World>, regions: usize) -> Arc<Keeper> {
        keeper_with(world, regions, Box::leak(Box::default()))
    }

    fn keeper_with(
        world: &Arc<World>,
        regions: usize,
        admission: &'static Admission,
    ) -> Arc<Keeper> {
        let children = Children::new().unwrap();
        let limit = Limit { bytes: 1 << 20, regions };
        let monitor = Arc::new(Best(Arc::clone(world)));
        Arc::new(Keeper::new(monitor, limit, admission, children, MappingRoom::of(None)))
    }

    /// Registers as the program does: finds what is kept, else has it registered and kept.
    fn reg(keeper: &Keeper, world: &Arc<World>) -> NonNull<super::ibv_mr> {
        keeper.find(&key(world)).unwrap_or_else(|| {
            NonNull::new(keeper.register(key(world), &|_| world.reg_mr()).unwrap()).unwrap()
        })
    }

    /// The thread that deregisters what has changed, for one look.
    fn reclaiming(keeper: &Arc<Keeper>) -> thread::JoinHandle<()> {
        let keeper = Arc::clone(keeper);
        thread::spawn(move || keeper.reclaim_once(&crate::device::Table::Shared))
    }

    /// Gives back as the program does.
    fn dereg(keeper: &Keeper, mr: NonNull<super::ibv_mr>) {
        // SAFETY: the program has it, and uses it no more.
        if unsafe { keeper.end(mr) } == End::Foreign {
            // SAFETY: as above; its world is still there.
            unsafe { super::dereg_mr(mr.as_ptr()) };
        }
    }

    /// A registration is what the page is after a change that has returned.
    fn assert_fresh(keeper: &Keeper, world: &Arc<World>) {
        let mr = reg(keeper, world);
        assert_eq!(world.pinned(mr.as_ptr()), Some(world.page()));
        dereg(keeper, mr);
    }

    fn registered_beside_a_change(change: fn(&World)) {
        let world = World::new();
        let keeper = keeper_of(&world, 8);
        let other = {
            let (keeper, world) = (Arc::clone(&keeper), Arc::clone(&world));
            thread::spawn(move || dereg(&keeper, reg(&keeper, &world)))
        };
        change(&world);
        assert_fresh(&keeper, &world);
        other.join().unwrap();
        assert_fresh(&keeper, &world);
    }

    #[test]
    fn loom_what_was_registered_during_a_change_is_not_found() {
        explore(2, || registered_beside_a_change(World::change));
    }

    #[test]
    fn loom_what_was_registered_during_a_discard_is_not_found() {
        explore(2, || registered_beside_a_change(World::discard));
    }

    /// What the program has stays registered, and what it gave back is deregistered once, while the thread
    /// that deregisters what has changed does so.
    #[test]
    fn loom_what_the_program_has_stays_registered() {
        explore(2, || {
            let world = World::new();
            let keeper = keeper_of(&world, 8);
            dereg(&keeper, reg(&keeper, &world));
            let reclaiming = reclaiming(&keeper);
            world.change();
            let mr = reg(&keeper, &world);
            assert_eq!(world.pinned(mr.as_ptr()), Some(world.page()));
            reclaiming.join().unwrap();
            assert_eq!(world.pinned(mr.as_ptr()), Some(world.page()));
            dereg(&keeper, mr);
            keeper.empty(Scope::Everything);
            assert_eq!(lock(&world.pinned).count(), 0, "left");
        });
    }

    /// Two threads of one program: each has a handle of its own, whichever of them finds the one that is kept.
    #[test]
    fn loom_a_handle_is_one_holder_s() {
        explore(2, || {
            let world = World::new();
            let keeper = keeper_of(&world, 1);
            dereg(&keeper, reg(&keeper, &world));
            let used = Arc::new(std::array::from_fn::<_, 4, _>(|_| AtomicU64::new(0)));
            let program = |keeper: Arc<Keeper>, world: Arc<World>, used: Arc<[AtomicU64; 4]>| {
                let mr = reg(&keeper, &world);
                // SAFETY: the world's own, which stays as long as the world.
                let user = &used[unsafe { mr.as_ref() }.handle as usize];
                assert_eq!(user.swap(1, Ordering::Relaxed), 0, "two have it");
                assert!(world.pinned(mr.as_ptr()).is_some());
                user.store(0, Ordering::Relaxed);
                dereg(&keeper, mr);
            };
            let other = {
                let (keeper, world) = (Arc::clone(&keeper), Arc::clone(&world));
                let used = Arc::clone(&used);
                thread::spawn(move || program(keeper, world, used))
            };
            program(Arc::clone(&keeper), Arc::clone(&world), used);
            other.join().unwrap();
            let kept = lock(&world.pinned).count();
            assert_eq!(kept, 1, "the limit");
        });
    }

    /// A domain that is emptied, to be deallocated, has none of its registrations left, though another
    /// thread is deregistering them.
    #[test]
    fn loom_an_emptied_domain_has_no_registration() {
        explore(2, || {
            let world = World::new();
            let keeper = keeper_of(&world, 8);
            dereg(&keeper, reg(&keeper, &world));
            world.change();
            let reclaiming = reclaiming(&keeper);
            keeper.empty(Scope::Domain(key(&world).domain));
            assert_eq!(lock(&world.pinned).count(), 0, "left");
            reclaiming.join().unwrap();
        });
    }

    /// libibverbs may be what a handler has interrupted that ends the process, or wait for it.
    #[test]
    fn loom_what_is_idle_as_the_process_ends_is_ended_without_libibverbs() {
        explore(2, || {
            let world = World::new();
            let keeper = keeper_of(&world, 8);
            dereg(&keeper, reg(&keeper, &world));
            let later = reg(&keeper, &world);
            dereg(&keeper, reg(&keeper, &world));
            let other = {
                let keeper = Arc::clone(&keeper);
                thread::spawn(move || keeper.totals())
            };
            keeper.empty_at_the_end();
            other.join().unwrap();
            let pinned = || lock(&world.pinned).count();
            assert_eq!((pinned(), lock(&world.pinned).by_library), (1, 0));
            dereg(&keeper, later);
            assert_eq!(pinned(), 0, "nothing is kept any more");
        });
    }

    /// What the thread that deregisters could not end, because the device was closed behind it, is not ended in the
    /// one that was opened anew at the same address.
    #[test]
    fn loom_what_is_owed_to_a_closed_device_is_not_ended_in_its_successor() {
        explore(2, || {
            let world = World::new();
            let keeper = keeper_of(&world, 8);
            dereg(&keeper, reg(&keeper, &world));
            world.change();
            let reclaiming = reclaiming(&keeper);
            world.open_anew();
            let mr = reg(&keeper, &world);
            assert_eq!(world.pinned(mr.as_ptr()), Some(world.page()));
            reclaiming.join().unwrap();
            assert_eq!(world.pinned(mr.as_ptr()), Some(world.page()));
            dereg(&keeper, mr);
            keeper.empty(Scope::Everything);
            assert_eq!(lock(&world.pinned).count(), 0, "left");
        });
    }

    /// Each such attempt takes some 10 ms, so attempts become rare.
    #[test]
    fn loom_what_could_not_be_watched_beside_changes_counts_as_kept_in_vain() {
        // One thread, and so one order.
        loom::model(|| {
            let (world, admission) = (World::new(), &*Box::leak(Box::<Admission>::default()));
            let keeper = keeper_with(&world, 8, admission);
            world.refusal.store(libc::EAGAIN.cast_unsigned(), Ordering::Relaxed);
            dereg(&keeper, reg(&keeper, &world));
            let reasons = keeper.totals().per_use;
            assert_eq!((reasons.total(), admission.vain()), (1, 1));
            assert_eq!(reasons.of(Reason::ManyChanges), 1);
            world.refusal.store(0, Ordering::Relaxed);
            dereg(&keeper, reg(&keeper, &world));
            assert_eq!((keeper.totals().per_use.total(), admission.vain()), (1, 1));
            // What the kernel never lets it watch costs no wait.
            world.change();
            world.refusal.store(libc::EPERM.cast_unsigned(), Ordering::Relaxed);
            let vain = admission.vain();
            dereg(&keeper, reg(&keeper, &world));
            assert_eq!(keeper.totals().per_use.of(Reason::WatchRefused), 1);
            assert_eq!(admission.vain() - vain, 1, "what the change has ended");
        });
    }

    /// A registration that lacked room is tried again, whichever thread has made room since.
    #[test]
    fn loom_room_that_another_thread_makes_is_used() {
        explore(2, || {
            let world = World::with_room_for(1);
            let keeper = keeper_of(&world, 8);
            dereg(&keeper, reg(&keeper, &world));
            world.change();
            let reclaiming = reclaiming(&keeper);
            // It finds nothing that is valid, and no room unless the other thread was quick.
            dereg(&keeper, reg(&keeper, &world));
            reclaiming.join().unwrap();
        });
    }

    /// The parent goes on with what is idle, while a child that was forked before, or two, end it.
    #[test]
    fn loom_of_parent_and_children_one_has_what_is_idle() {
        explore(3, || {
            let children = Children::new().unwrap();
            let mut moves = children.moves();
            let forked = moves;
            let child = |moves: Moves| thread::spawn(move || children.empty(moves));
            let others = [child(forked), child(forked)];
            let ours = children.take_over(&mut moves);
            let won = others.map(|other| other.join().unwrap());
            let winners = won.into_iter().chain([ours]).filter(|&won| won).count();
            assert_eq!(winners, 1, "{won:?} {ours}");
        });
    }

    /// The same of children of two forks: what the first left to the parent is the parent's or the second's.
    #[test]
    fn loom_of_two_forks_each_has_one_that_ends_what_was_idle() {
        explore(3, || {
            let children = Children::new().unwrap();
            let mut moves = children.moves();
            let child = |moves: Moves| thread::spawn(move || children.empty(moves));
            let first = child(moves);
            let ours = children.take_over(&mut moves);
            let second = child(moves);
            let still_ours = children.take_over(&mut moves);
            let (first, second) = (first.join().unwrap(), second.join().unwrap());
            assert_ne!(first, ours, "the first fork's");
            assert_ne!(second, still_ours, "the second fork's");
        });
    }

    /// A child that ends these, one after the other.
    fn notes(
        children: Children,
        numbers: impl IntoIterator<Item = u32> + 'static,
    ) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            numbers.into_iter().for_each(|number| children.note_ended(Name::of(0, number)));
        })
    }

    #[test]
    fn loom_what_is_counted_of_what_children_end_is_noted_once() {
        explore(3, || {
            let children = Children::new().unwrap();
            let others = [notes(children, [1]), notes(children, [2])];
            let seen = children.ended();
            let mut names: Vec<_> = children.names(0..seen).collect();
            _ = others.map(|other| other.join().unwrap());
            assert_eq!(children.ended(), 2);
            names.extend(children.names(seen..2));
            let name = |number| Some(Name::of(0, number));
            assert!(names == [name(1), name(2)] || names == [name(2), name(1)], "{names:?}");
        });
    }

    /// A model has words for two: a child that was slow finds a later end's in the place of its own.
    #[test]
    fn loom_the_latest_of_what_children_end_are_noted() {
        explore(3, || {
            let children = Children::new().unwrap();
            let others = [notes(children, [1, 3, 4]), notes(children, [2])];
            _ = others.map(|other| other.join().unwrap());
            assert_eq!(children.ended(), 4);
            let names: Vec<_> = children.names(0..4).collect();
            assert!(names[..2] == [None, None] && !names[2..].contains(&None), "{names:?}");
            assert_ne!(names[2], names[3]);
        });
    }
}
