//! Memory regions of real RDMA devices: the right bytes, the right errors, and nothing left behind.
//!
//! Without a device every test says so and passes; `vm/run` boots a machine that has one.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register memory and to move it. Memory that a transfer uses
//! outlives the transfer: [`Loopback`] waits for its completion.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;
#[path = "endings/ways.rs"]
mod ways;

use pinfold::monitor::Userfaultfd;
use pinfold::pool::{Pool, PoolBuffer, PoolConfig};
use pinfold::registrar::verbs::{
    Connection, Device, DeviceError, DmabufError, DmabufPart, Domain, Library, Loopback,
    LoopbackDirection, LoopbackError, MemoryRegion, OnDemand, Operations, PrefetchError, Transfer,
    Transport, Verbs, device_names, ffi,
};
use pinfold::tier::{OnDemandOrPinned, TierError, WhyPinned};
use pinfold::{
    Access, AddressRange, BadAddress, Cache, Config, DeregisterError, GetError, Monitor, PerUse,
    RegisterError, Registrar,
};
use registrar_support::{
    Memory, Own, PAGE, alone, in_forked_child, live_under_a_limit, status_bytes,
};
use std::ffi::CStr;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use ways::{ENDS, End, child_does, end};

/// A domain of the first device, or a note why there is none.
fn domain() -> Option<Arc<Domain>> {
    let names = device_names().unwrap_or_default();
    let name = names.iter().find(|name| !name.starts_with(OwnDevice::PREFIX));
    match Device::open(name.map(String::as_str)) {
        Ok(device) => Some(Domain::new(device).unwrap()),
        Err(
            error @ (DeviceError::Library(_)
            | DeviceError::NoDevice
            | DeviceError::NoDeviceFile { .. }
            | DeviceError::Forbidden { .. }),
        ) => {
            eprintln!("skipped: no RDMA device: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

const REMOTE: Access = Access::REMOTE_WRITE;

fn remote() -> Access {
    Access::REMOTE_READ | Access::REMOTE_WRITE
}

fn register<R: Registrar>(
    registrar: &R,
    range: AddressRange,
    access: Access,
) -> Result<R::Handle, RegisterError> {
    // SAFETY: the ranges are the test's own memory, or no memory at all.
    unsafe { registrar.register(range, registrar.granted(access)) }
}

/// Memory at the other end, where the device writes to and reads from.
struct Far {
    registrar: Verbs,
    memory: Memory,
    region: MemoryRegion,
    loopback: Loopback,
}

impl Far {
    fn new(domain: &Arc<Domain>, length: usize) -> Self {
        let registrar = Verbs::new(Arc::clone(domain)).unwrap();
        let memory = Memory::new(length);
        let region = register(&registrar, memory.range(), remote()).unwrap();
        let loopback = Loopback::new(Arc::clone(domain)).unwrap();
        Self { registrar, memory, region, loopback }
    }

    /// Moves `range`, registered under `lkey`, and the beginning of the far memory.
    fn run(
        &self,
        direction: LoopbackDirection,
        range: AddressRange,
        lkey: u32,
    ) -> Result<(), LoopbackError> {
        // SAFETY: the memory at both ends is the test's own.
        unsafe { self.loopback.transfer(direction, &[self.moving(range, lkey)]) }
    }

    fn moving(&self, range: AddressRange, lkey: u32) -> Transfer {
        Transfer {
            lkey,
            address: range.start(),
            length: range.len(),
            rkey: self.region.rkey(),
            remote_address: self.memory.range().start(),
        }
    }

    /// What arrives when `range` is sent.
    fn sent(&self, range: AddressRange, lkey: u32) -> Vec<u8> {
        self.run(LoopbackDirection::Write, range, lkey).unwrap();
        self.memory.bytes()[..range.len()].to_vec()
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        self.registrar.deregister_own(self.region, self.memory.range()).unwrap();
    }
}

/// The bug that everything here is about, without a cache: were it gone, so were the need for one.
#[test]
fn fact_a_raw_registration_goes_stale_when_memory_is_mapped_anew() {
    let Some(domain) = domain() else { return };
    let (far, registrar) = (Far::new(&domain, PAGE), Verbs::new(domain).unwrap());
    let mut memory = Memory::new(PAGE);
    memory.fill(b'o');
    let region = register(&registrar, memory.range(), Access::READ).unwrap();
    memory.replace();
    memory.fill(b'n');
    assert!(far.sent(memory.range(), region.lkey()) == [b'o'; PAGE], "the old bytes, no error");
}

#[test]
fn bytes_go_out_and_come_back() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, 1 << 20);
    let registrar = Verbs::new(domain).unwrap();
    for length in [1, PAGE, 3 * PAGE + 17, 1 << 20] {
        let (mut source, target) = (Memory::new(length), Memory::new(length));
        source.fill(0x5a);
        let from = register(&registrar, source.range(), Access::READ).unwrap();
        let to = register(&registrar, target.range(), Access::WRITE).unwrap();
        assert!(far.sent(source.range(), from.lkey()) == source.bytes(), "{length} bytes");
        far.run(LoopbackDirection::Read, target.range(), to.lkey()).unwrap();
        assert!(target.bytes() == source.bytes(), "{length} bytes");
        registrar.deregister_own(from, source.range()).unwrap();
        registrar.deregister_own(to, target.range()).unwrap();
        let gone = far.run(LoopbackDirection::Write, source.range(), from.lkey()).unwrap_err();
        assert!(matches!(gone, LoopbackError::Failed { .. }), "{gone}");
    }
}

/// This thread on processor 0 alone, and where `late`, woken late there.
fn share_a_processor(late: bool) {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: all zeros is an empty set; both live across the calls, which concern this thread only.
    unsafe {
        let mut first: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(0, &mut first);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&first), &raw const first), 0);
        if late {
            assert_eq!(libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters), 0);
        }
    }
}

/// Of two threads on one processor, the one that transfers again at once leaves the other its turn. By the mutex
/// alone it went through some thousand transfers for one of the other's, on 6.12.
#[test]
fn threads_take_turns_at_a_loopback() {
    const TURNS: usize = 100;
    const MOST: usize = 20 * TURNS;
    let Some(domain) = domain() else { return };
    let (far, registrar) = (Far::new(&domain, PAGE), Verbs::new(domain).unwrap());
    let memory = Memory::new(PAGE);
    let region = register(&registrar, memory.range(), Access::READ).unwrap();
    let (loopback, move_page) = (&far.loopback, far.moving(memory.range(), region.lkey()));
    // SAFETY: the memory at both ends is the test's own.
    let transfer = || unsafe { loopback.transfer(LoopbackDirection::Write, &[move_page]) }.unwrap();
    // Relaxed below: counts that order nothing else.
    let (others, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            share_a_processor(false);
            while !is_over.load(Ordering::Relaxed) && others.load(Ordering::Relaxed) < 2 * MOST {
                transfer();
                others.fetch_add(1, Ordering::Relaxed);
            }
        });
        scope.spawn(|| {
            share_a_processor(true);
            (0..TURNS).for_each(|_| transfer());
            is_over.store(true, Ordering::Relaxed);
        });
    });
    let others = others.into_inner();
    assert!(others <= MOST, "{others} transfers beside {TURNS}");
    registrar.deregister_own(region, memory.range()).unwrap();
}

/// What a device may read it must not write.
#[test]
fn a_region_for_reading_is_not_written() {
    let Some(domain) = domain() else { return };
    let (far, registrar) = (Far::new(&domain, PAGE), Verbs::new(domain).unwrap());
    let memory = Memory::new(PAGE);
    let region = register(&registrar, memory.range(), Access::READ).unwrap();
    let refused = far.run(LoopbackDirection::Read, memory.range(), region.lkey()).unwrap_err();
    assert!(matches!(refused, LoopbackError::Failed { .. }), "{refused}");
    assert!(memory.bytes() == [0; PAGE]);
}

#[test]
fn a_region_goes_back_once() {
    let Some(domain) = domain() else { return };
    let (registrar, memory) = (Verbs::new(domain).unwrap(), Memory::new(PAGE));
    let region = register(&registrar, memory.range(), Access::READ).unwrap();
    registrar.deregister_own(region, memory.range()).unwrap();
    let twice = registrar.deregister_own(region, memory.range()).unwrap_err();
    assert!(matches!(twice, DeregisterError::Os { errno: libc::EINVAL, .. }), "{twice}");
}

#[test]
fn bad_addresses_are_told_apart_and_leave_nothing_behind() {
    alone("bad_addresses_are_told_apart_and_leave_nothing_behind", bad_addresses_are_told_apart);
}

fn bad_addresses_are_told_apart() {
    let Some(domain) = domain() else { return };
    let registrar = Verbs::new(domain).unwrap();
    let before = status_bytes("VmPin:");
    let reason = |range, access| match register(&registrar, range, access) {
        Err(RegisterError::BadAddress { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let mut holed = Memory::new(3 * PAGE);
    holed.unmap(PAGE, PAGE);
    let hole = BadAddress::Unmapped { at: holed.range().start() + PAGE };
    assert_eq!(reason(holed.range(), Access::READ), hole);
    let closed = Memory::with_protection(PAGE, libc::PROT_NONE);
    let none = BadAddress::NoAccess { at: closed.range().start() };
    match register(&registrar, closed.range(), Access::READ) {
        // Before Linux 6.2 the kernel forces its way into any private memory.
        Ok(region) => registrar.deregister_own(region, closed.range()).unwrap(),
        Err(RegisterError::BadAddress { reason, .. }) => assert_eq!(reason, none),
        Err(error) => panic!("{error}"),
    }
    let fixed = Memory::with_protection(PAGE, libc::PROT_READ);
    let read_only = BadAddress::NotWritable { at: fixed.range().start() };
    assert_eq!(reason(fixed.range(), Access::WRITE), read_only);
    let kernel = AddressRange::new(1 << 63, PAGE).unwrap();
    assert!(matches!(reason(kernel, Access::READ), BadAddress::Kernel { .. }));
    // Enough for a device that only reads, as which most of them are used.
    let region = register(&registrar, fixed.range(), Access::READ).unwrap();
    registrar.deregister_own(region, fixed.range()).unwrap();
    assert_eq!(status_bytes("VmPin:"), before);
}

#[test]
fn a_range_beyond_the_devices_largest_is_refused_beforehand() {
    let Some(domain) = domain() else { return };
    let registrar = Verbs::new(domain).unwrap();
    let most = registrar.limits().max_region_bytes;
    let range = AddressRange::new(PAGE, most + PAGE).unwrap();
    match register(&registrar, range, Access::READ) {
        Err(RegisterError::TooLarge { max_bytes, .. }) => assert_eq!(max_bytes, most),
        other => panic!("{other:?}"),
    }
}

#[test]
fn pinned_bytes_go_when_they_are_given_back_and_when_the_registrar_goes() {
    alone("pinned_bytes_go_when_they_are_given_back_and_when_the_registrar_goes", || {
        let Some(domain) = domain() else { return };
        let before = status_bytes("VmPin:");
        let registrar = Verbs::new(domain).unwrap();
        let memory = Memory::new(1 << 20);
        let whole = register(&registrar, memory.range(), Access::READ).unwrap();
        let half = register(&registrar, memory.part(0, 1 << 19), Access::READ).unwrap();
        assert_eq!(status_bytes("VmPin:"), before + (3 << 19));
        registrar.deregister_own(half, memory.part(0, 1 << 19)).unwrap();
        assert_eq!(status_bytes("VmPin:"), before + (1 << 20));
        let _left_to_the_registrar = whole;
        drop(registrar);
        assert_eq!(status_bytes("VmPin:"), before);
    });
}

// --- rows of the table of endings ----------------------------------------------------------------

#[test]
fn however_a_registrar_ends_what_it_pinned_goes_or_leaks_with_it() {
    alone("however_a_registrar_ends_what_it_pinned_goes_or_leaks_with_it", || {
        let Some(domain) = domain() else { return };
        for how in ENDS {
            let before = status_bytes("VmPin:");
            // For good: what leaks is pinned.
            let memory = Box::leak(Box::new(Memory::new(1 << 20)));
            let mut registrar = Verbs::new(Arc::clone(&domain)).unwrap();
            register(&registrar, memory.range(), Access::READ).unwrap();
            if how == End::InAForkedChild {
                registrar = child_does(registrar, drop);
                assert_eq!(status_bytes("VmPin:"), before + (1 << 20), "it is the parent's");
            }
            end(registrar, how);
            let left = if how.leaks() { 1 << 20 } else { 0 };
            assert_eq!(status_bytes("VmPin:"), before + left, "{how:?}");
        }
    });
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A domain is kept by its registrars; its device is closed with the last of them, or leaks.
#[test]
fn however_a_domain_ends_its_registrars_go_on_and_take_it_along() {
    alone("however_a_domain_ends_its_registrars_go_on_and_take_it_along", || {
        // What the library opens once for all.
        let Some(first) = domain() else { return };
        drop(first);
        for how in ENDS {
            let before = descriptors();
            let domain = domain().unwrap();
            let registrar = Verbs::new(Arc::clone(&domain)).unwrap();
            end(domain, how);
            let memory = Memory::new(PAGE);
            let region = register(&registrar, memory.range(), Access::READ).unwrap();
            registrar.deregister_own(region, memory.range()).unwrap();
            assert!(descriptors() > before);
            drop(registrar);
            assert_eq!(descriptors() > before, how.leaks(), "{how:?}");
        }
    });
}

/// Its queue pairs and its channel go with it, or stay. A child's copy ends nothing of its parent's.
#[test]
fn however_a_loopback_ends_its_queue_pairs_go_or_stay() {
    alone("however_a_loopback_ends_its_queue_pairs_go_or_stay", || {
        let Some(domain) = domain() else { return };
        for how in ENDS {
            let before = (descriptors(), Arc::strong_count(&domain));
            let mut loopback = Loopback::new(Arc::clone(&domain)).unwrap();
            if how == End::InAForkedChild {
                loopback = child_does(loopback, drop);
                assert!(descriptors() > before.0, "they are the parent's");
            }
            end(loopback, how);
            let left = (descriptors() > before.0, Arc::strong_count(&domain) > before.1);
            assert_eq!(left, (how.leaks(), how.leaks()), "{how:?}");
        }
    });
}

/// The queue pair is the program's: it goes on. What stays is the domain.
#[test]
fn however_a_connection_ends_its_queue_pair_goes_on() {
    alone("however_a_connection_ends_its_queue_pair_goes_on", || {
        let Some(domain) = domain() else { return };
        let far = Far::new(&domain, PAGE);
        for how in ENDS {
            let before = Arc::strong_count(&domain);
            let queue_pair = far.loopback.sender().unwrap();
            // SAFETY: the loopback outlives it.
            let connection = unsafe { Connection::lent(Arc::clone(&domain), queue_pair) };
            end(connection, how);
            assert_eq!(Arc::strong_count(&domain), before + usize::from(how.leaks()), "{how:?}");
            assert_eq!(far.sent(far.memory.range(), far.region.lkey()).len(), PAGE, "{how:?}");
        }
    });
}

/// Of whichever tier it is.
#[test]
fn however_a_lease_of_a_tier_ends_its_registration_goes_or_stays() {
    alone("however_a_lease_of_a_tier_ends_its_registration_goes_or_stays", || {
        let Some(domain) = domain() else { return };
        for how in ENDS {
            let monitor = Userfaultfd::shared().unwrap();
            let (domain, config) = (Arc::clone(&domain), Config::keeping_all());
            let tiers = OnDemandOrPinned::new(domain, Transport::Rc, monitor, config);
            let tiers: &'static OnDemandOrPinned<_> = Box::leak(Box::new(tiers.unwrap()));
            let memory = Box::leak(Box::new(Memory::new(PAGE)));
            // SAFETY: the test's own memory.
            let lease = unsafe { tiers.get(memory.pointer(), PAGE, Access::READ, RDMA) };
            end(lease.unwrap(), how);
            let left = tiers.on_demand().map_or(0, |cache| {
                cache.evict_idle();
                cache.statistics().regions
            });
            tiers.pinned().evict_idle();
            let left = left + tiers.pinned().statistics().regions;
            assert_eq!(left, u64::from(how.leaks()), "{how:?}");
        }
    });
}

/// A peer gets the bytes asked for, and not one more, whatever else is registered around them.
#[test]
fn a_peer_reaches_exactly_what_was_asked_for() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, PAGE);
    let registrar = Verbs::new(Arc::clone(&domain)).unwrap();
    let cache =
        Cache::new(registrar, Userfaultfd::shared().unwrap(), Config::keeping_all()).unwrap();
    let mut memory = Memory::new(4 * PAGE);
    memory.fill(b'a');
    let (start, length) = (memory.part(PAGE + 100, 200), 200);
    // SAFETY: the test's own memory.
    let around = unsafe { cache.get(memory.pointer(), 4 * PAGE, Access::READ_WRITE) }.unwrap();
    // SAFETY: the test's own memory.
    let lease = unsafe { cache.get(memory.pointer().add(PAGE + 100), length, REMOTE) }.unwrap();
    assert!(matches!(lease.per_use(), Some(PerUse::Remote(_))), "not kept unless asked for");
    let write = |offset: isize, length| {
        let transfer = Transfer {
            lkey: far.region.lkey(),
            address: far.memory.range().start(),
            length,
            rkey: lease.handle().rkey(),
            remote_address: start.start().wrapping_add_signed(offset),
        };
        // SAFETY: the test's own memory at both ends.
        unsafe { far.loopback.transfer(LoopbackDirection::Write, &[transfer]) }
    };
    write(0, length).unwrap();
    for (offset, length) in [(-1, 2), (199, 2), (0, 201), (200, 1), (-1, 1)] {
        let refused = write(offset, length).unwrap_err();
        assert!(matches!(refused, LoopbackError::Failed { .. }), "{refused}");
    }
    let mut expected = vec![b'a'; 4 * PAGE];
    expected[PAGE + 100..PAGE + 300].fill(0);
    assert!(memory.bytes() == expected);
    drop((lease, around));
    assert_eq!(cache.statistics().registrations, 2);
}

/// A key for reading is none for writing, and a local registration is no key at all.
#[test]
fn a_peer_gets_the_rights_asked_for() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, PAGE);
    let registrar = Verbs::new(domain).unwrap();
    let memory = Memory::new(PAGE);
    let attempt = |access, direction| {
        let region = register(&registrar, memory.range(), access).unwrap();
        let transfer = Transfer {
            lkey: far.region.lkey(),
            address: far.memory.range().start(),
            length: PAGE,
            rkey: if region.rkey() == 0 { region.lkey() } else { region.rkey() },
            remote_address: memory.range().start(),
        };
        // SAFETY: the test's own memory at both ends.
        let moved = unsafe { far.loopback.transfer(direction, &[transfer]) };
        registrar.deregister_own(region, memory.range()).unwrap();
        moved.is_ok()
    };
    assert!(attempt(Access::REMOTE_READ, LoopbackDirection::Read));
    assert!(!attempt(Access::REMOTE_READ, LoopbackDirection::Write));
    assert!(attempt(Access::REMOTE_WRITE, LoopbackDirection::Write));
    assert!(!attempt(Access::REMOTE_WRITE, LoopbackDirection::Read));
    assert!(!attempt(Access::READ_WRITE, LoopbackDirection::Write));
    assert!(!attempt(Access::READ_WRITE, LoopbackDirection::Read));
}

/// In a process of its own: a discard of another test's memory that is pending makes a registration serve one use.
#[test]
fn a_remote_registration_is_kept_on_request_for_its_own_bytes_alone() {
    alone("a_remote_registration_is_kept_on_request_for_its_own_bytes_alone", || {
        let Some(domain) = domain() else { return };
        let registrar = Verbs::new(domain).unwrap();
        let config = Config { cache_remote: true, ..Config::keeping_all() };
        let cache = Cache::new(registrar, Userfaultfd::shared().unwrap(), config).unwrap();
        let memory = Memory::new(4 * PAGE);
        let get = |offset, length, access| {
            // SAFETY: the test's own memory.
            let lease = unsafe { cache.get(memory.pointer().add(offset), length, access) }.unwrap();
            lease.handle()
        };
        let first = get(10, 100, REMOTE);
        assert_eq!(get(10, 100, REMOTE), first);
        assert_ne!(get(10, 50, REMOTE), first, "a part is another key");
        assert_ne!(get(10, 100, remote()), first, "other rights are another key");
        assert_eq!(cache.statistics().registrations, 3);
    });
}

/// The cache over this registrar never hands out what no longer matches, and registers once.
#[test]
fn what_the_cache_gives_is_fresh() {
    alone("what_the_cache_gives_is_fresh", || {
        let Some(domain) = domain() else { return };
        let far = Far::new(&domain, PAGE);
        let registrar = Verbs::new(domain).unwrap();
        let monitor = match Userfaultfd::shared() {
            Ok(monitor) => monitor,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let cache = pinfold::cache(registrar, monitor, Config::keeping_all()).unwrap();
        let mut memory = Memory::new(PAGE);
        for round in 0..10 {
            memory.replace();
            memory.fill(round);
            for _ in 0..3 {
                // SAFETY: the test's own memory.
                let lease = unsafe { cache.get(memory.pointer(), PAGE, Access::READ) }.unwrap();
                assert!(far.sent(memory.range(), lease.handle().lkey()) == [round; PAGE]);
            }
        }
        let statistics = cache.statistics();
        // A registration begun before the news of the change was applied serves its one use.
        let kept = statistics.registrations - statistics.per_use;
        assert_eq!((kept, statistics.hits + statistics.per_use), (10, 20), "{statistics:?}");
    });
}

/// Buffers of a pool go out and come back under their slab's keys, and the slab goes with the pool.
#[test]
fn a_pools_buffers_go_out_and_come_back() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, 1 << 20);
    let registrar = Arc::new(Verbs::new(domain).unwrap());
    let config = PoolConfig { max_bytes: 16 << 20, ..PoolConfig::default() };
    let pool = Pool::new(Arc::clone(&registrar), config).unwrap();
    let range = |buffer: &PoolBuffer<'_, Arc<Verbs>>| {
        AddressRange::new(buffer.as_ptr().addr(), buffer.len()).unwrap()
    };
    for (length, byte) in [(1, 1), (1500, 2), (PAGE, 3), (100_000, 4), (1 << 20, 5)] {
        let (mut source, mut target) = (pool.get(length).unwrap(), pool.get(length).unwrap());
        source.fill(byte);
        target.fill(0);
        assert!(far.sent(range(&source), source.handle().lkey()) == *source, "{length} bytes");
        let (target_range, lkey) = (range(&target), target.handle().lkey());
        let flying = target.in_flight();
        far.run(LoopbackDirection::Read, target_range, lkey).unwrap();
        // SAFETY: the loopback has waited for the transfer.
        let target = unsafe { flying.complete() };
        assert!(*target == *source, "{length} bytes");
    }
    let (buffer, statistics) = (pool.get(PAGE).unwrap(), pool.statistics());
    let (gone, lkey) = (range(&buffer), buffer.handle().lkey());
    assert!(statistics.in_use_bytes >= PAGE && statistics.grown >= 1, "{statistics:?}");
    drop(buffer);
    drop(pool);
    let refused = far.run(LoopbackDirection::Write, gone, lkey).unwrap_err();
    assert!(matches!(refused, LoopbackError::Failed { .. }), "{refused}");
}

#[test]
fn many_threads_register_at_once() {
    let Some(domain) = domain() else { return };
    let registrar = Verbs::new(domain).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let memory = Memory::new(4 * PAGE);
                for _ in 0..50 {
                    let region = register(&registrar, memory.range(), Access::READ).unwrap();
                    registrar.deregister_own(region, memory.range()).unwrap();
                }
            });
        }
    });
}

// --- limits ------------------------------------------------------------------------------------

#[test]
fn the_limit_on_pinned_memory_is_told_apart() {
    alone("the_limit_on_pinned_memory_is_told_apart", || {
        const LIMIT: u64 = 1 << 20;
        let Some(domain) = domain() else { return };
        let registrar = Verbs::new(domain).unwrap();
        let memory = Memory::new(2 << 20);
        if !live_under_a_limit(LIMIT, 54_876) {
            return;
        }
        let error = register(&registrar, memory.range(), Access::READ).unwrap_err();
        assert_eq!(
            error,
            RegisterError::PinnedMemoryLimit { limit_bytes: Some(LIMIT), errno: libc::ENOMEM }
        );
        assert!(error.to_string().contains("--ulimit memlock"), "{error}");
        let half = memory.part(0, 1 << 20);
        let region = register(&registrar, half, Access::READ).unwrap();
        let page = memory.part(1 << 20, PAGE);
        let full = register(&registrar, page, Access::READ).unwrap_err();
        assert!(full.is_about_room(), "{full}");
        registrar.deregister_own(region, half).unwrap();
        register(&registrar, page, Access::READ).unwrap();
    });
}

/// A cache that meets the limit gives up what is idle, and goes on.
#[test]
fn a_cache_makes_room_under_the_limit() {
    alone("a_cache_makes_room_under_the_limit", || {
        let Some(domain) = domain() else { return };
        let registrar = Verbs::new(domain).unwrap();
        let monitor = Userfaultfd::shared();
        if !live_under_a_limit(1 << 20, 54_876) {
            return;
        }
        let Ok(monitor) = monitor else { return eprintln!("skipped: no userfaultfd") };
        let cache = Cache::new(registrar, monitor, Config::keeping_all()).unwrap();
        let memory = Memory::new(4 << 20);
        for offset in (0..4 << 20).step_by(256 << 10) {
            // SAFETY: the test's own memory.
            drop(
                unsafe { cache.get(memory.pointer().add(offset), 256 << 10, Access::READ) }
                    .unwrap(),
            );
        }
        assert_eq!(cache.statistics().registrations, 16);
    });
}

#[test]
fn a_limit_of_zero_is_a_limit() {
    alone("a_limit_of_zero_is_a_limit", || {
        let Some(domain) = domain() else { return };
        let (registrar, memory) = (Verbs::new(domain).unwrap(), Memory::new(PAGE));
        if live_under_a_limit(0, 54_876) {
            let error = register(&registrar, memory.range(), Access::READ).unwrap_err();
            let limit =
                RegisterError::PinnedMemoryLimit { limit_bytes: Some(0), errno: libc::EPERM };
            assert_eq!(error, limit);
        }
    });
}

/// A container's own limit on objects of the device.
#[test]
fn a_control_groups_limit_is_told_apart() {
    alone("a_control_groups_limit_is_told_apart", || {
        let Some(domain) = domain() else { return };
        let group = Path::new("/sys/fs/cgroup/pinfold-test");
        let enter = || {
            fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+rdma")?;
            fs::create_dir_all(group)?;
            let limit = format!("{} hca_object=3", domain.device().name());
            fs::write(group.join("rdma.max"), limit)?;
            fs::write(group.join("cgroup.procs"), std::process::id().to_string())
        };
        if let Err(error) = enter() {
            return eprintln!("skipped: no control group for RDMA: {error}");
        }
        let (registrar, memory) = (Verbs::new(domain).unwrap(), Memory::new(PAGE));
        for _ in 0..3 {
            register(&registrar, memory.range(), Access::READ).unwrap();
        }
        let error = register(&registrar, memory.range(), Access::READ).unwrap_err();
        assert!(matches!(error, RegisterError::RegionLimit { held: 3, errno: libc::EAGAIN, .. }));
        assert!(error.is_about_room() && error.to_string().contains("rdma.max"), "{error}");
        drop(registrar);
        // A group with a process in it cannot be removed.
        fs::write("/sys/fs/cgroup/cgroup.procs", std::process::id().to_string()).unwrap();
        fs::remove_dir(group).unwrap();
    });
}

// --- opening -----------------------------------------------------------------------------------

#[test]
fn a_machine_without_a_device_says_what_to_do() {
    match device_names() {
        Ok(names) if !names.is_empty() => eprintln!("skipped: there are devices: {names:?}"),
        Ok(_) | Err(DeviceError::NoDevice) => {
            let error = Device::open(None).unwrap_err();
            assert_eq!(error, DeviceError::NoDevice);
            assert!(error.to_string().contains("rdma link add"));
        }
        Err(error) => assert!(error.to_string().contains("install"), "{error}"),
    }
}

/// A mount namespace whose `/dev/infiniband` is empty, or a note why there is none.
fn without_device_files() -> bool {
    // SAFETY: system calls without effect on memory; this process has one thread that matters.
    let done = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                std::ptr::null(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) == 0
            && libc::mount(
                c"none".as_ptr(),
                c"/dev/infiniband".as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                std::ptr::null(),
            ) == 0
    };
    if !done {
        eprintln!("skipped: no mount namespace: {}", std::io::Error::last_os_error());
    }
    done
}

#[test]
fn a_container_without_the_devices_file_is_told_apart() {
    alone("a_container_without_the_devices_file_is_told_apart", || {
        if domain().is_some() && without_device_files() {
            let error = Device::open(None).unwrap_err();
            assert!(matches!(error, DeviceError::NoDeviceFile { .. }), "{error:?}");
            assert!(error.to_string().contains("--device /dev/infiniband"));
        }
    });
}

#[test]
fn a_device_that_may_not_be_opened_is_told_apart() {
    alone("a_device_that_may_not_be_opened_is_told_apart", || {
        use std::os::linux::fs::MetadataExt;
        if domain().is_none() {
            return;
        }
        let file = fs::read_dir("/dev/infiniband").unwrap().find_map(|entry| {
            let path = entry.unwrap().path();
            path.to_string_lossy().contains("uverbs").then_some(path)
        });
        let path = file.unwrap();
        let number = fs::metadata(&path).unwrap().st_rdev();
        if !without_device_files() {
            return;
        }
        let name = std::ffi::CString::new(path.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: a system call without effect on memory.
        assert_eq!(unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o600, number) }, 0);
        if live_under_a_limit(1 << 20, 54_876) {
            let error = Device::open(None).unwrap_err();
            assert!(
                matches!(error, DeviceError::Forbidden { errno: libc::EACCES, .. }),
                "{error:?}"
            );
            assert!(error.to_string().contains("/dev/infiniband"));
        }
    });
}

/// The program's own domain is used, left alone, and can be given back: nothing of ours is in it.
#[test]
fn a_lent_domain_is_as_it_was_afterwards() {
    let Some(_) = domain() else { return };
    let library = Library::shared().unwrap();
    // SAFETY: as a program in C would, with the library's own functions; what is lent outlives the
    // registrar.
    unsafe {
        let list = (library.get_device_list)(std::ptr::null_mut());
        // There is one that does not go meanwhile, as those of other tests do.
        let mut device = list;
        while CStr::from_ptr((library.get_device_name)(*device))
            .to_bytes()
            .starts_with(OwnDevice::PREFIX.as_bytes())
        {
            device = device.add(1);
        }
        let context = (library.open_device)(*device);
        (library.free_device_list)(list);
        let pd = (library.alloc_pd)(context);
        let lent = Domain::lent(library, NonNull::new(pd).unwrap()).unwrap();
        let registrar = Verbs::new(Arc::clone(&lent)).unwrap();
        let memory = Memory::new(PAGE);
        let region = register(&registrar, memory.range(), Access::READ).unwrap();
        assert_eq!((*region.as_ptr()).pd, pd);
        assert_eq!((*region.as_ptr()).lkey, region.lkey());
        assert_eq!((library.dealloc_pd)(pd), libc::EBUSY, "something is registered in it");
        drop((registrar, lent));
        assert_eq!((library.dealloc_pd)(pd), 0);
        assert_eq!((library.close_device)(context), 0);
    }
}

#[test]
fn flags_that_a_device_may_ignore_do_no_harm() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, PAGE);
    let flags = ffi::IBV_ACCESS_RELAXED_ORDERING | ffi::IBV_ACCESS_ON_DEMAND;
    let registrar = Verbs::new(domain).unwrap().with_flags(flags);
    let mut memory = Memory::new(PAGE);
    memory.fill(7);
    let region = register(&registrar, memory.range(), Access::READ).unwrap();
    assert!(far.sent(memory.range(), region.lkey()) == [7; PAGE]);
}

// --- forks -------------------------------------------------------------------------------------

#[test]
fn a_forked_child_can_do_its_parent_no_harm() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, PAGE);
    let registrar = Verbs::new(domain).unwrap();
    let mut memory = Memory::new(PAGE);
    memory.fill(9);
    let region = register(&registrar, memory.range(), Access::READ).unwrap();
    let refused = in_forked_child(|| {
        let gone = register(&registrar, memory.range(), Access::READ);
        let kept = registrar.deregister_own(region, memory.range());
        // SAFETY: dropped once, in this child, which leaves without running destructors.
        drop(unsafe { std::ptr::read(&raw const registrar) });
        matches!(gone, Err(RegisterError::DeviceGone { errno: libc::ESRCH }))
            && matches!(kept, Err(DeregisterError::DeviceGone { errno: libc::ESRCH }))
    });
    assert!(refused);
    assert!(far.sent(memory.range(), region.lkey()) == [9; PAGE], "still the parent's");
    registrar.deregister_own(region, memory.range()).unwrap();
}

/// Each asks the library nothing, one of whose locks a thread of the parent may have held at the fork.
#[test]
fn a_forked_child_makes_nothing_of_its_parents() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, PAGE);
    let mut memory = Memory::new(PAGE);
    memory.fill(5);
    let registrar = Verbs::new(Arc::clone(&domain)).unwrap();
    let region = register(&registrar, memory.range(), Access::READ).unwrap();
    let is_gone = |error: Option<DeviceError>| {
        matches!(error, Some(DeviceError::Gone { errno: libc::ESRCH }))
    };
    let is_forked = |error: Option<LoopbackError>| {
        matches!(error, Some(LoopbackError::Os { errno: libc::ESRCH, .. }))
    };
    assert!(in_forked_child(|| is_gone(Domain::new(Arc::clone(domain.device())).err())), "domain");
    assert!(in_forked_child(|| is_gone(Verbs::new(Arc::clone(&domain)).err())), "registrar");
    assert!(in_forked_child(|| is_forked(Loopback::new(Arc::clone(&domain)).err())), "loopback");
    assert!(in_forked_child(|| {
        let sent = far.run(LoopbackDirection::Write, memory.range(), region.lkey());
        let ends = (far.loopback.sender(), far.loopback.receiver());
        is_forked(sent.err()) && ends == (None, None)
    }));
    assert!(far.sent(memory.range(), region.lkey()) == [5; PAGE], "still the parent's");
    registrar.deregister_own(region, memory.range()).unwrap();
}

/// In a process of its own: where another thread is inside libibverbs at the fork, the child waits for ever for a lock
/// of that library's.
#[test]
fn a_forked_child_may_have_a_device_of_its_own() {
    alone("a_forked_child_may_have_a_device_of_its_own", || {
        let Some(_parents) = domain() else { return };
        assert!(in_forked_child(|| {
            let domain = domain().unwrap();
            let far = Far::new(&domain, PAGE);
            let registrar = Verbs::new(domain).unwrap();
            let mut memory = Memory::new(PAGE);
            memory.fill(3);
            let region = register(&registrar, memory.range(), Access::READ).unwrap();
            far.sent(memory.range(), region.lkey()) == [3; PAGE]
        }));
    });
}

// --- on demand ---------------------------------------------------------------------------------

/// A registrar that pins nothing, behind what it is made of, or a note why there is none.
///
/// Soft-RoCE gets page-sized packets right that begin at a page, and nothing else; so it is refused,
/// and used by force here, for whole pages, where a device with such packets can be made.
fn on_demand(number: u8) -> Option<(Option<OwnDevice>, Arc<Domain>, OnDemand)> {
    let refused = match OnDemand::new(domain()?, Transport::Rc, RDMA) {
        Ok(registrar) => {
            let domain = Arc::clone(registrar.domain());
            return Some((None, domain, registrar));
        }
        Err(refused) => refused,
    };
    assert!(refused.to_string().contains("on demand"), "{refused}");
    if !matches!(refused, DeviceError::WrongBytes { .. }) {
        eprintln!("skipped: {refused}");
        return None;
    }
    let own = OwnDevice::new(number)?;
    let domain = own.domain();
    // SAFETY: these tests move whole pages only.
    let registrar = unsafe { OnDemand::untested(Arc::clone(&domain), Transport::Rc, RDMA) };
    Some((Some(own), domain, registrar.unwrap()))
}

const RDMA: Operations = Operations::WRITE;

/// A device that says it can page on demand is believed after it was tried; the bytes that the test
/// moves explicitly agree with what the registrar found.
#[test]
fn on_demand_is_tested_before_it_is_believed() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, PAGE);
    let believed = match OnDemand::new(Arc::clone(&domain), Transport::Rc, RDMA) {
        Ok(_) => true,
        Err(DeviceError::WrongBytes { what, .. }) => {
            eprintln!("this device moves the wrong bytes {what}");
            false
        }
        Err(error) => return eprintln!("skipped: {error}"),
    };
    // SAFETY: reads from the test's own page only.
    let registrar = unsafe { OnDemand::untested(domain, Transport::Rc, RDMA) }.unwrap();
    let mut memory = Memory::new(PAGE);
    memory.fill(1);
    // SAFETY: the test's own memory.
    unsafe { memory.pointer().add(512).write_bytes(2, 512) };
    let region = register(&registrar, memory.range(), Access::READ).unwrap();
    let right = far.sent(memory.part(512, 512), region.lkey()) == [2; 512];
    assert_eq!(right, believed);
    registrar.deregister_own(region, memory.range()).unwrap();
}

#[test]
fn on_demand_is_refused_for_what_the_device_cannot() {
    let Some(domain) = domain() else { return };
    let paging = domain.device().attributes().on_demand;
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud, Transport::Xrc] {
        let offered = paging.map(|paging| paging.operations(transport)).unwrap_or_default();
        let operation = Operations::ATOMIC;
        // SAFETY: nothing is registered with it.
        match unsafe { OnDemand::untested(Arc::clone(&domain), transport, operation) } {
            Ok(_) => assert!(offered.contains(operation)),
            Err(DeviceError::OnDemand { missing, .. }) => {
                assert!(!offered.contains(operation));
                assert_eq!(missing, operation);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Every change, with no monitor at all: the device follows, the registration stays.
#[test]
fn on_demand_follows_every_change_with_one_registration() {
    alone("on_demand_follows_every_change_with_one_registration", || {
        let Some((_own, domain, registrar)) = on_demand(2) else { return };
        let far = Far::new(&domain, 2 * PAGE);
        let pinned = status_bytes("VmPin:");
        let cache = pinfold::on_demand_cache(registrar, Config::keeping_all()).unwrap();
        let mut memory = Memory::new(2 * PAGE);
        let send = |memory: &mut Memory, byte: u8| {
            memory.fill(byte);
            // SAFETY: the test's own memory.
            let lease = unsafe { cache.get(memory.pointer(), 2 * PAGE, Access::READ) }.unwrap();
            assert!(far.sent(memory.range(), lease.handle().lkey()) == [byte; 2 * PAGE]);
        };
        send(&mut memory, 1);
        memory.replace();
        send(&mut memory, 2);
        // SAFETY: advice on the test's own memory.
        unsafe { libc::madvise(memory.pointer().cast(), 2 * PAGE, libc::MADV_DONTNEED) };
        send(&mut memory, 3);
        assert!(in_forked_child(|| true));
        send(&mut memory, 4);
        let statistics = cache.statistics();
        assert_eq!((statistics.registrations, statistics.hits), (1, 3));
        assert_eq!(status_bytes("VmPin:"), pinned, "nothing is pinned");
        assert!(in_forked_child(|| {
            // SAFETY: gives no lease.
            let refused = unsafe { cache.get(memory.pointer(), PAGE, Access::READ) };
            matches!(refused, Err(GetError::Forked))
        }));
    });
}

/// What no monitor sees is no exception: holes punched through the file of a shared mapping.
#[test]
fn on_demand_follows_a_hole_in_a_file() {
    let Some((_own, domain, registrar)) = on_demand(3) else { return };
    let far = Far::new(&domain, PAGE);
    let cache = pinfold::on_demand_cache(registrar, Config::keeping_all()).unwrap();
    let file = memfd();
    file.set_len(PAGE as u64).unwrap();
    let mut memory = Memory::shared_file(file.as_raw_fd(), PAGE);
    for byte in [5, 6] {
        memory.fill(byte);
        // SAFETY: the test's own memory.
        let lease = unsafe { cache.get(memory.pointer(), PAGE, Access::READ) }.unwrap();
        assert!(far.sent(memory.range(), lease.handle().lkey()) == [byte; PAGE]);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: changes the test's own file.
        let punched = unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, 4096) };
        assert_eq!(punched, 0);
    }
    assert_eq!(cache.statistics().registrations, 1);
    assert_eq!(cache.monitor().name(), "unneeded");
}

/// The device writes what it reads elsewhere into unpinned memory, fetched beforehand or not.
#[test]
fn on_demand_memory_can_be_fetched_beforehand() {
    let Some((_own, domain, registrar)) = on_demand(4) else { return };
    let mut far = Far::new(&domain, 4 * PAGE);
    far.memory.fill(8);
    let memory = Memory::new(4 * PAGE);
    let region = register(&registrar, memory.range(), Access::WRITE).unwrap();
    match registrar.prefetch(region, memory.range(), Access::WRITE) {
        Ok(()) => {}
        Err(error @ PrefetchError::Unsupported { .. }) => eprintln!("not prefetched: {error}"),
        Err(error) => panic!("{error}"),
    }
    far.run(LoopbackDirection::Read, memory.range(), region.lkey()).unwrap();
    assert!(memory.bytes() == [8; 4 * PAGE]);
    registrar.deregister_own(region, memory.range()).unwrap();
}

/// What is sent is right whichever tier it is, before and after a change of the mapping.
fn sends_fresh_bytes(
    tier: &OnDemandOrPinned<Arc<Userfaultfd>>,
    far: &Far,
    operations: Operations,
) -> bool {
    let mut memory = Memory::new(2 * PAGE);
    let mut on_demand = false;
    for byte in [1, 2, 3] {
        memory.fill(byte);
        // SAFETY: the test's own memory.
        let lease = unsafe { tier.get(memory.pointer(), 2 * PAGE, Access::READ, operations) };
        let lease = lease.unwrap();
        match tier.prefetch(&lease, Access::READ) {
            Ok(()) | Err(PrefetchError::Unsupported { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        assert_eq!(lease.range(), memory.range());
        assert!(far.sent(lease.range(), lease.handle().lkey()) == [byte; 2 * PAGE]);
        on_demand = lease.why_pinned().is_none();
        drop(lease);
        memory.replace();
    }
    on_demand
}

/// Where the device cannot, or moves the wrong bytes, everything is pinned, cached, and told why.
#[test]
fn what_cannot_be_on_demand_is_pinned_and_says_why() {
    let Some(domain) = domain() else { return };
    let far = Far::new(&domain, 2 * PAGE);
    let monitor = Userfaultfd::shared().unwrap();
    let config = Config::keeping_all();
    let tier = OnDemandOrPinned::new(domain, Transport::Rc, monitor, config).unwrap();
    let on_demand = sends_fresh_bytes(&tier, &far, RDMA);
    match tier.why_never_on_demand() {
        None => assert!(on_demand),
        Some(why) => {
            eprintln!("pinned: {why}");
            assert!(!on_demand && tier.on_demand().is_none());
            assert_eq!(tier.pinned().statistics().registrations, 3);
        }
    }
}

/// A key of one protection domain means nothing in another, or other memory.
#[test]
fn tiers_are_of_one_domain() {
    let Some((_own, domain, registrar)) = on_demand(5) else { return };
    let elsewhere = Domain::new(Arc::clone(domain.device())).unwrap();
    let pinned = Verbs::new(elsewhere).unwrap();
    let monitor = Userfaultfd::shared().unwrap();
    let refused = OnDemandOrPinned::of(Ok(registrar), pinned, monitor, Config::keeping_all());
    assert!(matches!(refused, Err(TierError::Domains)));
}

/// One device, both tiers: by what is asked of it, and by what the memory is.
#[test]
fn each_get_is_on_demand_or_pinned_by_itself() {
    let Some((_own, domain, registrar)) = on_demand(5) else { return };
    let far = Far::new(&domain, 2 * PAGE);
    let offered = registrar.operations();
    let monitor = Userfaultfd::shared().unwrap();
    let pinned = Verbs::new(domain).unwrap();
    let tier = OnDemandOrPinned::of(Ok(registrar), pinned, monitor, Config::keeping_all()).unwrap();
    assert!(sends_fresh_bytes(&tier, &far, RDMA));
    assert_eq!(tier.on_demand().unwrap().statistics().registrations, 1, "it followed");
    let all = [Operations::ATOMIC, Operations::SHARED_RECEIVE, Operations::READ];
    let lacks = all.into_iter().find(|one| !one.without(offered).is_empty());
    let memory = Memory::new(PAGE);
    let get = |access, operations| {
        // SAFETY: the test's own memory.
        unsafe { tier.get(memory.pointer(), PAGE, access, operations) }
    };
    match lacks {
        Some(missing) => {
            let lease = get(Access::READ, RDMA | missing).unwrap();
            assert_eq!(lease.why_pinned(), Some(&WhyPinned::Operations { missing }));
        }
        None => eprintln!("skipped: this device does everything on demand"),
    }
}

// --- dmabuf ------------------------------------------------------------------------------------

fn memfd() -> File {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name ends with a zero byte; the descriptor is new.
    unsafe { File::from_raw_fd(libc::memfd_create(c"pinfold".as_ptr(), flags)) }
}

/// A dmabuf of one page, made of a memfd.
fn dmabuf() -> Option<OwnedFd> {
    let maker = File::options().read(true).write(true).open("/dev/udmabuf").ok()?;
    let file = memfd();
    file.set_len(PAGE as u64).unwrap();
    let page = libc::off_t::try_from(PAGE).unwrap();
    let mut create: [u64; 3] = [0, 0, page as u64];
    create[0] = file.as_raw_fd() as u64;
    // SAFETY: `struct udmabuf_create` has two words of 32 bits (descriptor, flags), offset, length.
    let made = unsafe {
        libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK);
        libc::ioctl(maker.as_raw_fd(), 0x4018_7542, create.as_ptr())
    };
    // SAFETY: the descriptor is new.
    (made >= 0).then(|| unsafe { OwnedFd::from_raw_fd(made) })
}

#[test]
fn a_dmabuf_is_registered_or_refused_in_words() {
    let Some(domain) = domain() else { return };
    let registrar = Verbs::new(domain).unwrap();
    let part = DmabufPart { offset: 0, length: PAGE, address: 0 };
    let (buffer, file) = (dmabuf(), memfd());
    if buffer.is_none() {
        eprintln!("skipped: nothing here makes a dmabuf; another descriptor is refused");
    }
    let descriptor = buffer.as_ref().map_or(file.as_fd(), AsFd::as_fd);
    // SAFETY: that memory is not used.
    match unsafe { registrar.register_dmabuf(descriptor, part, Access::READ_WRITE) } {
        Ok(registered) => assert_ne!(registered.region().lkey(), 0),
        Err(error @ (DmabufError::Unsupported { .. } | DmabufError::BadDescriptor { .. })) => {
            eprintln!("not registered: {error}");
            assert!(buffer.is_none() || matches!(error, DmabufError::Unsupported { .. }));
        }
        Err(error) => panic!("{error}"),
    };
}

// --- devices that go away ----------------------------------------------------------------------

/// A Soft-RoCE device of a test's own, on a network interface of its own with large packets.
struct OwnDevice {
    number: u8,
}

impl OwnDevice {
    const PREFIX: &str = "own";

    /// One called `own` and `number`, or a note why there is none: devices are not made outside of
    /// the machine that `vm/run` boots.
    fn new(number: u8) -> Option<Self> {
        if std::env::var_os("PINFOLD_KERNEL").is_none() || device_names().is_err() {
            eprintln!("skipped: devices come and go in a machine of vm/run only");
            return None;
        }
        let device = Self { number };
        let made = tool("ip", &format!("link add own{number} mtu 9000 type dummy"))
            && tool("ip", &format!("address add 10.8.{number}.1/24 dev own{number}"))
            && tool("ip", &format!("link set own{number} up"))
            && tool("rdma", &format!("link add own{number} type rxe netdev own{number}"));
        assert!(made);
        Some(device)
    }

    fn domain(&self) -> Arc<Domain> {
        Domain::new(Device::open(Some(&format!("own{}", self.number))).unwrap()).unwrap()
    }

    /// Takes it away, as soon as the kernel lets it go.
    fn unplugging(&self) -> Child {
        let arguments = ["link", "delete", &format!("own{}", self.number)];
        Command::new("rdma").args(arguments).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Waits until it is not listed any more.
    fn until_unlisted(&self) {
        let name = format!("own{}", self.number);
        while device_names().unwrap().contains(&name) {
            std::thread::yield_now();
        }
    }
}

impl Drop for OwnDevice {
    fn drop(&mut self) {
        // It is not open any more, or it is gone already.
        let _ = self.unplugging().wait();
        tool("ip", &format!("link delete own{}", self.number));
    }
}

fn tool(name: &str, arguments: &str) -> bool {
    Command::new(name)
        .args(arguments.split(' '))
        .output()
        .inspect(|output| eprint!("{}", String::from_utf8_lossy(&output.stderr)))
        .is_ok_and(|output| output.status.success())
}

/// Soft-RoCE stays while it is open: leases work on, and the device goes when the last of
/// ours has closed it. That it goes at all shows that nothing of ours is left.
#[test]
fn a_device_unplugged_while_leases_live_goes_when_they_are_gone() {
    alone("a_device_unplugged_while_leases_live_goes_when_they_are_gone", || {
        let Some(own) = OwnDevice::new(1) else { return };
        let far = Far::new(&own.domain(), PAGE);
        let registrar = Verbs::new(own.domain()).unwrap();
        let monitor = Userfaultfd::shared().unwrap();
        let cache = pinfold::cache(registrar, monitor, Config::keeping_all()).unwrap();
        let mut memory = Memory::new(PAGE);
        memory.fill(6);
        let get = || {
            // SAFETY: the test's own memory.
            unsafe { cache.get(memory.pointer(), PAGE, Access::READ) }
        };
        let lease = get().unwrap();
        let mut unplugging = own.unplugging();
        own.until_unlisted();
        assert!(unplugging.try_wait().unwrap().is_none(), "it waits for us");
        match (get(), Device::open(Some("own1"))) {
            (Ok(_) | Err(GetError::Register(RegisterError::DeviceGone { .. })), Err(error)) => {
                assert!(error.to_string().contains("own1"), "{error}");
            }
            (again, opened) => panic!("{again:?}, {opened:?}"),
        }
        drop(lease);
        drop((cache, far));
        assert!(unplugging.wait().unwrap().success());
    });
}

/// A descriptor that is closed behind our back is a device that is gone, said in words.
#[test]
fn a_closed_device_is_noticed() {
    alone("a_closed_device_is_noticed", || {
        let Some(domain) = domain() else { return };
        let registrar = Verbs::new(Arc::clone(&domain)).unwrap();
        let memory = Memory::new(PAGE);
        let region = register(&registrar, memory.range(), Access::READ).unwrap();
        // SAFETY: the context is open; its descriptor is this process's alone.
        unsafe { libc::close((*domain.device().as_ptr()).cmd_fd) };
        let error = register(&registrar, memory.range(), Access::READ).unwrap_err();
        assert_eq!(error, RegisterError::DeviceGone { errno: libc::EBADF });
        assert!(error.to_string().contains("open it again"));
        let error = registrar.deregister_own(region, memory.range()).unwrap_err();
        assert_eq!(error, DeregisterError::DeviceGone { errno: libc::EBADF });
        assert!(matches!(Domain::new(Arc::clone(domain.device())), Err(DeviceError::Gone { .. })));
    });
}
