//! Regions of real RDMA devices that are suspended: their memory moves under a stream of transfers.
//!
//! Without a device every test says so and passes; `vm/run` boots a machine that has one.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register memory, to move it and what it maps, and to lend
//! queue pairs. A queue pair belongs to a [`Loopback`] that outlives its connection.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use pinfold::handshake::{Answer, Consent, Heard, Idle, KeyChange, Owner, PeerStopped};
use pinfold::monitor::Userfaultfd;
use pinfold::rearrange::{HugePageWay, defragment_in_steps};
use pinfold::registrar::verbs::ffi::{self, ibv_qp, ibv_send_wr, ibv_wc};
use pinfold::registrar::verbs::{
    Connection, Device, DeviceError, Domain, Loopback, LoopbackDirection, LoopbackError,
    MemoryRegion, Transfer, Verbs, device_names,
};
use pinfold::{Access, AddressRange, Cache, Config, GetError, Lease, RegisterError, Registrar};
use pinfold_core::{
    ConnectionLost, DeregisterError, Gets, Keys, NotSuspended, Renewed, Suspend, SuspendProgress,
    Suspended, SuspensionTerms, Unsupported, Why,
};
use registrar_support::{Memory, Own, PAGE, alone, in_forked_child};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

type VerbsCache = Cache<Verbs, Arc<Userfaultfd>>;
type VerbsLease<'c> = Lease<'c, Verbs, Arc<Userfaultfd>>;
type Held<'c> = Suspended<'c, Verbs, Arc<Userfaultfd>>;
type Refusal<'c> = Box<NotSuspended<'c, Verbs, Arc<Userfaultfd>>>;

/// A domain of the first device, or a note why there is none.
fn domain() -> Option<Arc<Domain>> {
    let names = device_names().unwrap_or_default();
    match Device::open(names.first().map(String::as_str)) {
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

/// A domain of a device that stops queue pairs, or the reason of the kernel that does not.
fn stopping_domain() -> Option<Arc<Domain>> {
    let domain = domain()?;
    let loopback = Loopback::new(Arc::clone(&domain)).unwrap();
    let connection = lend(&domain, loopback.sender());
    let registrar = Verbs::new(Arc::clone(&domain)).unwrap();
    match registrar.can_suspend(AddressRange::EVERYTHING, &[connection]) {
        Ok(()) => Some(domain),
        Err(reason @ Unsupported::Refused { .. }) => {
            eprintln!("skipped: this device stops no queue pair: {reason}");
            None
        }
        Err(reason) => panic!("{reason}"),
    }
}

fn lend(domain: &Arc<Domain>, queue_pair: Option<NonNull<ibv_qp>>) -> Connection {
    // SAFETY: every connection here goes, or is taken back, before its loopback.
    unsafe { Connection::lent(Arc::clone(domain), queue_pair.unwrap()) }
}

fn cache(domain: &Arc<Domain>) -> VerbsCache {
    let registrar = Verbs::new(Arc::clone(domain)).unwrap();
    let config = Config { piece_bytes: REGION, ..Config::keeping_all() };
    pinfold::cache(registrar, Userfaultfd::shared().unwrap(), config).unwrap()
}

fn get<'c>(cache: &'c VerbsCache, range: AddressRange, access: Access) -> VerbsLease<'c> {
    let start = std::ptr::with_exposed_provenance(range.start());
    // SAFETY: the tests' own memory, which outlives their caches' transfers.
    unsafe { cache.get(start, range.len(), access) }.unwrap()
}

/// Patience enough for an emulated machine; nothing here is about time but where a test says so.
const TERMS: SuspensionTerms = SuspensionTerms {
    deadline: Duration::from_secs(120),
    leases: pinfold_core::Leases::Drain,
    gets: Gets::Hold,
    on_drop: pinfold_core::OnDrop::Kill,
};

const SHORT: SuspensionTerms = SuspensionTerms { deadline: Duration::from_millis(20), ..TERMS };

/// Memory at the other end of a loopback.
struct Far {
    registrar: Verbs,
    memory: Memory,
    region: MemoryRegion,
    loopback: Loopback,
}

// SAFETY: the memory is written by one thread at a time: that which waits for the loopback.
unsafe impl Sync for Far {}

impl Far {
    fn new(domain: &Arc<Domain>, length: usize) -> Self {
        let registrar = Verbs::new(Arc::clone(domain)).unwrap();
        let memory = Memory::new(length);
        let access = registrar.granted(Access::REMOTE_READ | Access::REMOTE_WRITE);
        // SAFETY: the test's own memory.
        let region = unsafe { registrar.register(memory.range(), access) }.unwrap();
        Self { registrar, memory, region, loopback: Loopback::new(Arc::clone(domain)).unwrap() }
    }

    /// Sends `range` here.
    fn send(&self, range: AddressRange, lkey: u32) -> Result<(), LoopbackError> {
        let transfer = Transfer {
            lkey,
            address: range.start(),
            length: range.len(),
            rkey: self.region.rkey(),
            remote_address: self.memory.range().start(),
        };
        // SAFETY: the tests' own memory at both ends.
        unsafe { self.loopback.transfer(LoopbackDirection::Write, &[transfer]) }
    }

    fn connection(&self) -> Connection {
        lend(self.registrar.domain(), self.loopback.sender())
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        // The device may be gone: tests take it away.
        let _ = self.registrar.deregister_own(self.region, self.memory.range());
    }
}

// --- under a stream -----------------------------------------------------------------------------

const REGION: usize = 16 << 20;
const CHUNK: usize = 64 << 10;
/// How many transfers a stream makes between two suspensions.
const STEADY: usize = 40;

/// What a page of the region has in a version.
fn stamp(version: usize, page: usize) -> u8 {
    (page.wrapping_mul(31) ^ (page >> 8) ^ version.wrapping_mul(89)).to_le_bytes()[0]
}

fn fill(memory: &Memory, version: usize) {
    for page in 0..REGION / PAGE {
        // SAFETY: the test's own memory, which nothing transfers now.
        unsafe { memory.pointer().add(page * PAGE).write_bytes(stamp(version, page), PAGE) };
    }
}

/// Transfers of a region without an end, each under a lease, each compared.
struct Stream<'t> {
    cache: &'t VerbsCache,
    memory: AddressRange,
    version: &'t AtomicUsize,
    done: &'t AtomicUsize,
    /// The longest time between two transfers' ends, in microseconds.
    longest: &'t AtomicU64,
    over: &'t AtomicBool,
}

impl Stream<'_> {
    fn run(&self, far: &Far, mut chunk: usize) {
        let mut last = Instant::now();
        // SeqCst, here and where they are changed: so that no argument is needed.
        while !self.over.load(Ordering::SeqCst) {
            chunk = (chunk * 5 + 3) % (REGION / CHUNK);
            let start = self.memory.start() + chunk * CHUNK;
            let range = AddressRange::new(start, CHUNK).unwrap();
            let lease = get(self.cache, range, Access::READ);
            // Changed only where no lease is alive.
            let version = self.version.load(Ordering::SeqCst);
            far.send(range, lease.handle().lkey()).unwrap();
            let (first, bytes) = (chunk * (CHUNK / PAGE), far.memory.bytes());
            let right = |(page, bytes): (usize, &[u8])| {
                bytes.iter().all(|&byte| byte == stamp(version, first + page))
            };
            assert!(bytes.chunks(PAGE).enumerate().all(right), "wrong bytes in version {version}");
            let pause = u64::try_from(last.elapsed().as_micros()).unwrap();
            last = Instant::now();
            self.longest.fetch_max(pause, Ordering::SeqCst);
            self.done.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn until_more(&self, threads: &[ScopedJoinHandle<'_, ()>]) {
        let enough = self.done.load(Ordering::SeqCst) + STEADY;
        while self.done.load(Ordering::SeqCst) < enough {
            assert!(!threads.iter().any(ScopedJoinHandle::is_finished), "a stream has ended");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A region of version 0, and two queue pairs over which it is streamed as long as a test runs.
struct Rig {
    domain: Arc<Domain>,
    cache: VerbsCache,
    memory: Memory,
    fars: [Far; 2],
    version: AtomicUsize,
    done: AtomicUsize,
    longest: AtomicU64,
    over: AtomicBool,
}

impl Rig {
    fn new(domain: &Arc<Domain>) -> Self {
        let memory = Memory::new(REGION);
        fill(&memory, 0);
        Self {
            domain: Arc::clone(domain),
            cache: cache(domain),
            memory,
            fars: [Far::new(domain, CHUNK), Far::new(domain, CHUNK)],
            version: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            longest: AtomicU64::new(0),
            over: AtomicBool::new(false),
        }
    }

    fn connections(&self) -> Vec<Connection> {
        self.fars.iter().map(Far::connection).collect()
    }

    /// Runs `body` during the streams; what it is passed waits until they have gone on for a while.
    fn beside_streams<T>(&self, body: impl FnOnce(&dyn Fn()) -> T) -> T {
        let stream = &Stream {
            cache: &self.cache,
            memory: self.memory.range(),
            version: &self.version,
            done: &self.done,
            longest: &self.longest,
            over: &self.over,
        };
        thread::scope(|scope| {
            let _over = Over(&self.over);
            let threads = self.fars.iter().enumerate();
            let threads = threads.map(|(seed, far)| scope.spawn(move || stream.run(far, seed)));
            let threads: Vec<_> = threads.collect();
            body(&|| stream.until_more(&threads))
        })
    }
}

/// Ends a stream when its test ends, also by a panic.
struct Over<'t>(&'t AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Other pages at the same addresses, by a move of a mapping.
fn remap(memory: &Memory) -> bool {
    let fresh = std::mem::ManuallyDrop::new(Memory::new(REGION));
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: both mappings are the test's own; the fresh one has no user any more.
    let moved = unsafe {
        libc::mremap(fresh.pointer().cast(), REGION, REGION, flags, memory.pointer().cast::<u8>())
    };
    moved == memory.pointer().cast()
}

/// Huge pages instead of small ones, where the kernel has some.
fn collapse(memory: &Memory) -> bool {
    const MADV_COLLAPSE: i32 = 25;
    // SAFETY: advice on the test's own memory.
    unsafe {
        libc::madvise(memory.pointer().cast(), REGION, libc::MADV_HUGEPAGE);
        libc::madvise(memory.pointer().cast(), REGION, MADV_COLLAPSE) == 0
    }
}

fn discard(memory: &Memory) -> bool {
    // SAFETY: advice on the test's own memory.
    unsafe { libc::madvise(memory.pointer().cast(), REGION, libc::MADV_DONTNEED) == 0 }
}

/// How long registering and giving back the region take, pages there.
fn register_cost(domain: &Arc<Domain>, range: AddressRange) -> Duration {
    let registrar = Verbs::new(Arc::clone(domain)).unwrap();
    let began = Instant::now();
    // SAFETY: the test's own memory.
    let region = unsafe { registrar.register(range, Access::READ) }.unwrap();
    registrar.deregister_own(region, range).unwrap();
    began.elapsed()
}

/// Two caches stop it, and it goes on with the last.
#[test]
fn a_connection_that_two_caches_suspended_goes_on_with_the_last() {
    alone("a_connection_that_two_caches_suspended_goes_on_with_the_last", || {
        let Some(domain) = stopping_domain() else { return };
        let far = Far::new(&domain, CHUNK);
        let connection = far.connection();
        let (caches, memory) = ([cache(&domain), cache(&domain)], Memory::new(REGION));
        for order in [[0, 1], [1, 0]] {
            let [first, last] = order.map(|number| {
                let connections = vec![connection.clone()];
                caches[number].suspend(memory.range(), connections, Vec::new(), TERMS).unwrap()
            });
            assert_eq!(connection.in_flight().unwrap().count, 0, "it stands");
            first.resume().unwrap();
            assert_eq!(connection.in_flight().unwrap().count, 0, "it stands still");
            last.resume().unwrap();
            assert!(connection.in_flight().is_err(), "it runs");
            let range = AddressRange::new(memory.range().start(), CHUNK).unwrap();
            let lease = get(&caches[0], range, Access::READ);
            far.send(range, lease.handle().lkey()).unwrap();
        }
    });
}

#[test]
fn memory_moves_under_a_stream_of_transfers() {
    alone("memory_moves_under_a_stream_of_transfers", || {
        let Some(domain) = stopping_domain() else { return };
        let rig = Rig::new(&domain);
        let Rig { cache, memory, version, .. } = &rig;
        let mut lease = get(cache, memory.range(), Access::READ);
        rig.beside_streams(|until_more| {
            type Move = (&'static str, fn(&Memory) -> bool);
            let moves: [Move; 3] =
                [("mremap", remap), ("MADV_COLLAPSE", collapse), ("MADV_DONTNEED", discard)];
            for (round, (name, rearrange)) in moves.into_iter().enumerate() {
                until_more();
                let before = register_cost(&rig.domain, memory.range());
                let old = lease.handle();
                let began = Instant::now();
                let suspended =
                    cache.suspend(memory.range(), rig.connections(), vec![lease], TERMS).unwrap();
                let stopping = began.elapsed();
                let moved = rearrange(memory);
                assert!(moved || name == "MADV_COLLAPSE", "{name}");
                fill(memory, round + 1);
                version.store(round + 1, Ordering::SeqCst);
                let began = Instant::now();
                let mut resumed = suspended.resume().unwrap();
                let resuming = began.elapsed();
                assert!(resumed.lost.is_empty(), "{:?}", resumed.lost);
                assert_eq!(resumed.keys, Keys::Changed);
                lease = resumed.leases.pop().unwrap().unwrap();
                assert_ne!(lease.handle(), old);
                let part = get(
                    cache,
                    AddressRange::new(memory.range().start(), 9).unwrap(),
                    Access::READ,
                );
                assert_eq!(part.handle(), lease.handle(), "the new registration serves hits");
                let after = register_cost(&rig.domain, memory.range());
                eprintln!(
                    "16 MiB, {name}{}: suspending took {stopping:?}, resuming {resuming:?}, of a pause \
                     of {:?}; registering and giving back {before:?} before, {after:?} after",
                    if moved { "" } else { " (refused)" },
                    resumed.paused,
                );
            }
            until_more();
        });
        assert_eq!(cache.suspension_statistics().resumed, 3);
        eprintln!("{} transfers, every byte right", rig.done.into_inner());
    });
}

/// The same for a library call's sake: a huge page's worth at a time, and each time both queue pairs stop.
#[test]
fn a_region_is_made_huge_under_a_stream_of_transfers() {
    alone("a_region_is_made_huge_under_a_stream_of_transfers", || {
        let Some(domain) = stopping_domain() else { return };
        let rig = Rig::new(&domain);
        let (range, connections) = (rig.memory.range(), rig.connections());
        let price = register_cost(&rig.domain, range);
        let stepped = rig.beside_streams(|until_more| {
            until_more();
            let calm = rig.longest.swap(0, Ordering::SeqCst);
            // Not before: the kernel would make it huge by itself.
            // SAFETY: advice on the test's own memory.
            unsafe { libc::madvise(rig.memory.pointer().cast(), REGION, libc::MADV_HUGEPAGE) };
            let way = HugePageWay::IN_PLACE;
            let stepped =
                defragment_in_steps(&rig.cache, range, &connections, Vec::new(), TERMS, way);
            until_more();
            eprintln!(
                "16 MiB made huge: a stream paused for {} us at most, {calm} before; registering and \
                 giving back took {price:?}",
                rig.longest.load(Ordering::SeqCst),
            );
            stepped.unwrap_or_else(|stopped| panic!("{stopped}"))
        });
        assert!(stepped.lost.is_empty(), "{:?}", stepped.lost);
        let (suspensions, defragmented) = (stepped.suspensions, stepped.defragmented);
        assert_eq!(rig.cache.suspension_statistics().resumed, suspensions as u64);
        eprintln!(
            "{suspensions} suspensions, the longest {:?}; {} bytes made huge, left: {:?}; {} transfers, \
             every byte right",
            stepped.longest,
            defragmented.made,
            defragmented.left,
            rig.done.load(Ordering::SeqCst)
        );
        let left: usize = defragmented.left.iter().map(|(part, _)| part.len()).sum();
        assert_eq!(defragmented.made + defragmented.already + left, REGION);
    });
}

// --- two sides ----------------------------------------------------------------------------------

/// A peer that writes by key, without an end, and answers requests to stop.
struct Writer<'t> {
    connection: Connection,
    /// The side whose memory is the source.
    far: &'t Far,
    target: AddressRange,
    rkey: u32,
    written: &'t Mutex<Vec<u8>>,
    turns: &'t AtomicUsize,
}

impl Writer<'_> {
    /// Until the owner hangs up.
    fn run(mut self, from_owner: &Receiver<Vec<u8>>, to_owner: &Sender<Vec<u8>>) {
        let (mut idle, mut turn) = (Idle::default(), 0_usize);
        loop {
            self.write(turn);
            turn += 1;
            self.turns.store(turn, Ordering::SeqCst);
            idle = match from_owner.try_recv() {
                Ok(request) => self.obey(idle, &request, from_owner, to_owner),
                Err(std::sync::mpsc::TryRecvError::Empty) => idle,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
            };
        }
    }

    fn write(&self, turn: usize) {
        let chunk = turn * 7 % (self.target.len() / CHUNK);
        let byte = turn.to_le_bytes()[0] ^ 0x5a;
        // SAFETY: the test's own memory, which nothing transfers now.
        unsafe { self.far.memory.pointer().write_bytes(byte, CHUNK) };
        let transfer = Transfer {
            lkey: self.far.region.lkey(),
            address: self.far.memory.range().start(),
            length: CHUNK,
            rkey: self.rkey,
            remote_address: self.target.start() + chunk * CHUNK,
        };
        // SAFETY: the test's own memory at both ends.
        unsafe { self.far.loopback.transfer(LoopbackDirection::Write, &[transfer]) }.unwrap();
        self.written.lock().unwrap()[chunk] = byte;
    }

    /// Every write is complete when this is called: it waits for each.
    fn obey(
        &mut self,
        idle: Idle,
        request: &[u8],
        from_owner: &Receiver<Vec<u8>>,
        to_owner: &Sender<Vec<u8>>,
    ) -> Idle {
        let now = Duration::ZERO;
        let Ok(Heard::Asked(asked)) = idle.hear(request, now) else { panic!("no request") };
        assert!(self.target.overlaps(&asked.range()));
        self.connection.stop().unwrap();
        while self.connection.in_flight().unwrap().count > 0 {
            thread::yield_now();
        }
        let (stopped, agreed) = asked.agree();
        to_owner.send(agreed).unwrap();
        let (idle, keys) = PeerStopped::hear(stopped, &from_owner.recv().unwrap()).unwrap();
        if let Some(change) = keys.iter().find(|change| change.old == self.rkey) {
            self.rkey = change.new;
        }
        // SAFETY: nothing is suspended.
        unsafe { self.connection.restart() }.unwrap();
        idle
    }
}

/// Whether the region has what the peer says that it wrote.
fn holds(memory: &Memory, written: &Mutex<Vec<u8>>) -> bool {
    let (written, bytes) = (written.lock().unwrap(), memory.bytes());
    bytes.chunks(CHUNK).zip(written.iter()).all(|(chunk, byte)| chunk.iter().all(|it| it == byte))
}

/// New pages with the old content.
fn remap_with_content(memory: &mut Memory) {
    let bytes = memory.bytes();
    memory.replace();
    // SAFETY: as long as it was, and mapped again.
    unsafe { memory.pointer().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

#[test]
fn a_peer_that_writes_agrees_to_stop_and_goes_on_with_the_new_key() {
    alone("a_peer_that_writes_agrees_to_stop_and_goes_on_with_the_new_key", || {
        let Some(domain) = stopping_domain() else { return };
        const TARGET: usize = 1 << 20;
        let (cache, mut memory) = (cache(&domain), Memory::new(TARGET));
        let far = Far::new(&domain, CHUNK);
        let owner = lend(&domain, far.loopback.receiver());
        let mut lease = get(&cache, memory.range(), Access::REMOTE_WRITE);
        let (written, turns) = (Mutex::new(vec![0; TARGET / CHUNK]), AtomicUsize::new(0));
        let (to_peer, from_owner) = channel();
        let (to_owner, from_peer) = channel();
        let writer = Writer {
            connection: far.connection(),
            far: &far,
            target: memory.range(),
            rkey: lease.handle().rkey(),
            written: &written,
            turns: &turns,
        };
        // Kept until the peer has ended.
        let _lease = thread::scope(|scope| {
            // Moved here, so that the peer ends when this closure does, also by a panic.
            let to_peer = to_peer;
            let writing = scope.spawn(move || writer.run(&from_owner, &to_owner));
            let until_more = || {
                let enough = turns.load(Ordering::SeqCst) + 20;
                while turns.load(Ordering::SeqCst) < enough {
                    assert!(!writing.is_finished(), "the peer has ended");
                    thread::sleep(Duration::from_millis(1));
                }
            };
            let mut asking_side = Owner::default();
            for _ in 0..3 {
                until_more();
                let now = cache.registrar().now();
                let (asking, request) = asking_side.ask(memory.range(), TERMS.deadline, now);
                to_peer.send(request).unwrap();
                let Ok(Answer::Agreed(consent)) = asking.hear(&from_peer.recv().unwrap()) else {
                    panic!("not agreed")
                };
                let (range, old) = (memory.range(), lease.handle().rkey());
                // SAFETY: the consent is of this connection's peer, and stands until the suspension is over.
                let connections = vec![unsafe { owner.agreed(&consent) }];
                let suspended = cache.suspend(range, connections, vec![lease], TERMS).unwrap();
                assert!(holds(&memory, &written));
                remap_with_content(&mut memory);
                let mut resumed = suspended.resume().unwrap();
                assert!(resumed.lost.is_empty(), "{:?}", resumed.lost);
                lease = resumed.leases.pop().unwrap().unwrap();
                let new = lease.handle().rkey();
                to_peer.send(consent.resumed(&[KeyChange { range, old, new }]).unwrap()).unwrap();
            }
            until_more();
            lease
        });
        assert!(holds(&memory, &written));
    });
}

#[test]
fn a_peer_that_did_not_agree_makes_it_unsupported_and_goes_on() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory, far) = (cache(&domain), Memory::new(PAGE), Far::new(&domain, PAGE));
    let lease = get(&cache, memory.range(), Access::REMOTE_WRITE);
    let owner = lend(&domain, far.loopback.receiver());
    let mut owner_side = Owner::default();
    let now = cache.registrar().now();
    let (asking, _ignored) = owner_side.ask(memory.range(), Duration::ZERO, now);
    assert!(asking.is_overdue(cache.registrar().now()), "in the open, not for ever");
    let _taken_back = asking.cancel();
    let may_write = Unsupported::PeerMayWrite { range: memory.range() };
    let not = cache.suspend(memory.range(), vec![owner.clone()], vec![lease], TERMS).unwrap_err();
    assert_eq!(not.why, Why::Unsupported(may_write));
    let not = cache.suspend(memory.range(), Vec::new(), Vec::new(), TERMS).unwrap_err();
    assert_eq!(not.why, Why::Unsupported(may_write), "no peer agreed");
    // An agreement that is over is none.
    let consent = consent(&mut owner_side, memory.range(), now);
    // SAFETY: nothing is moved, and the peer writes nothing.
    let agreed = unsafe { owner.agreed(&consent) };
    let registrar = cache.registrar();
    assert_eq!(registrar.can_suspend(memory.range(), std::slice::from_ref(&agreed)), Ok(()));
    drop(consent);
    let over = registrar.can_suspend(memory.range(), &[agreed]);
    assert_eq!(over, Err(may_write));
    assert_eq!(cache.suspension_statistics().resumed, 0);
}

#[test]
fn a_peer_that_keeps_off_less_than_the_registrations_that_change_did_not_agree() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory, far) = (cache(&domain), Memory::new(4 * PAGE), Far::new(&domain, PAGE));
    let lease = get(&cache, memory.range(), Access::REMOTE_WRITE);
    let owner = lend(&domain, far.loopback.receiver());
    let part = AddressRange::new(memory.range().start() + PAGE, PAGE).unwrap();
    let mut owner_side = Owner::default();
    let now = cache.registrar().now();
    let consent_to_part = consent(&mut owner_side, part, now);
    // SAFETY: nothing is moved, and the peer writes nothing.
    let by_part = unsafe { owner.agreed(&consent_to_part) };
    // The key is over for all that is registered by it, so a peer that uses it beside the part breaks its connection.
    let not = cache.suspend(part, vec![by_part], vec![lease], TERMS).unwrap_err();
    let range = memory.range();
    assert_eq!(not.why, Why::Unsupported(Unsupported::PeerMayWrite { range }));
    // What is named, once agreed on, is enough.
    let whole = consent(&mut owner_side, range, now);
    // SAFETY: as above.
    let by_whole = unsafe { owner.agreed(&whole) };
    let leases = not.leases.into_iter().map(Result::unwrap).collect();
    let resumed = cache.suspend(part, vec![by_whole], leases, TERMS).unwrap().resume().unwrap();
    assert_eq!((resumed.leases.len(), resumed.lost.len()), (1, 0));
}

/// The word of a peer that it keeps off `range`.
fn consent(owner: &mut Owner, range: AddressRange, now: Duration) -> Consent {
    let (asking, request) = owner.ask(range, TERMS.deadline, now);
    let Ok(Heard::Asked(asked)) = Idle::default().hear(&request, now) else { panic!() };
    let (_stopped, agreed) = asked.agree();
    let Ok(Answer::Agreed(consent)) = asking.hear(&agreed) else { panic!() };
    consent
}

// --- the device ---------------------------------------------------------------------------------

/// Posts to a queue pair that has no other user now.
struct Raw(NonNull<ibv_qp>);

impl Raw {
    fn post(&self, opcode: u32, transfer: Transfer) {
        let length = u32::try_from(transfer.length).unwrap();
        let mut piece = ffi::ibv_sge { addr: transfer.address as u64, length, lkey: transfer.lkey };
        let mut request = ibv_send_wr {
            wr_id: 1,
            next: std::ptr::null_mut(),
            sg_list: &raw mut piece,
            num_sge: i32::from(length > 0),
            opcode,
            send_flags: ffi::IBV_SEND_SIGNALED,
            imm_data: 0,
            remote_addr: transfer.remote_address as u64,
            rkey: transfer.rkey,
            others: [0; 9],
        };
        let mut refused = std::ptr::null_mut();
        // SAFETY: the queue pair is live; the request is copied.
        let status = unsafe {
            let post = (*(*self.0.as_ptr()).context).ops.post_send.unwrap();
            post(self.0.as_ptr(), &raw mut request, &raw mut refused)
        };
        assert_eq!(status, 0);
    }

    /// The status of what is complete, if anything is.
    fn poll(&self) -> Option<u32> {
        let mut done = ibv_wc::default();
        // SAFETY: queue pair and completion queue are live, and there is room for one.
        let count = unsafe {
            let queue = (*self.0.as_ptr()).send_cq;
            ((*(*queue).context).ops.poll_cq.unwrap())(queue, 1, &raw mut done)
        };
        (count == 1).then_some(done.status)
    }

    fn wait(&self) -> u32 {
        let began = Instant::now();
        loop {
            match self.poll() {
                Some(status) => return status,
                None => thread::sleep(Duration::from_micros(100)),
            }
            assert!(began.elapsed() < Duration::from_secs(60), "nothing completes");
        }
    }
}

/// What is posted in `SQD` waits, and goes on without another post.
#[test]
fn what_is_posted_to_a_stopped_queue_pair_waits_and_goes_on() {
    let Some(domain) = stopping_domain() else { return };
    let (far, mut memory) = (Far::new(&domain, PAGE), Memory::new(PAGE));
    memory.fill(7);
    let registrar = Verbs::new(Arc::clone(&domain)).unwrap();
    // SAFETY: the test's own memory.
    let region = unsafe { registrar.register(memory.range(), Access::READ) }.unwrap();
    let connection = far.connection();
    connection.stop().unwrap();
    while connection.in_flight().unwrap().count > 0 {
        thread::yield_now();
    }
    let raw = Raw(far.loopback.sender().unwrap());
    let transfer = Transfer {
        lkey: region.lkey(),
        address: memory.range().start(),
        length: PAGE,
        rkey: far.region.rkey(),
        remote_address: far.memory.range().start(),
    };
    raw.post(ffi::IBV_WR_RDMA_WRITE, transfer);
    for _ in 0..100 {
        assert_eq!(raw.poll(), None);
        thread::yield_now();
    }
    assert!(far.memory.bytes() == [0; PAGE], "nothing moved");
    assert_eq!(connection.in_flight().unwrap().count, 0);
    // SAFETY: nothing is suspended.
    unsafe { connection.restart() }.unwrap();
    assert_eq!(raw.wait(), ffi::IBV_WC_SUCCESS);
    assert!(far.memory.bytes() == [7; PAGE]);
}

/// Why a registration is renewed by making it anew.
#[test]
fn fact_a_translation_is_not_changed_in_place() {
    let Some(domain) = domain() else { return };
    let (registrar, memory) = (Verbs::new(Arc::clone(&domain)).unwrap(), Memory::new(PAGE));
    // SAFETY: the test's own memory.
    let region = unsafe { registrar.register(memory.range(), Access::READ) }.unwrap();
    let library = domain.device().library();
    let Some(change) = library.rereg_mr else { return eprintln!("skipped: no ibv_rereg_mr") };
    let (flags, pd) = (ffi::IBV_REREG_MR_CHANGE_TRANSLATION, std::ptr::null_mut());
    // SAFETY: region and memory are the test's own; nothing is transferred.
    let status = unsafe { change(region.as_ptr(), flags, pd, memory.pointer().cast(), PAGE, 0) };
    eprintln!("ibv_rereg_mr of a translation: {status} ({})", std::io::Error::last_os_error());
    let name = domain.device().name();
    assert!(status != 0 || !name.starts_with("rxe"), "Soft-RoCE can: use it");
}

/// A handle that was withdrawn is given back without touching whatever came after it.
#[test]
fn a_withdrawn_region_is_renewed_or_given_back_once() {
    let Some(domain) = domain() else { return };
    let (registrar, memory) = (Verbs::new(domain).unwrap(), Memory::new(4 * PAGE));
    let range = memory.range();
    // SAFETY: the test's own memory.
    let register = || unsafe { registrar.register(range, Access::READ) }.unwrap();
    let first = register();
    registrar.withdraw_own(first, range).unwrap();
    // SAFETY: the test's own memory.
    let renewed = unsafe { registrar.renew(first, range, Access::READ) }.unwrap();
    let Renewed::Changed(second) = renewed else { panic!("{renewed:?}") };
    registrar.withdraw_own(second, range).unwrap();
    let third = register();
    assert_ne!(second, third);
    registrar.deregister_own(second, range).unwrap();
    assert!(registrar.deregister_own(second, range).is_err(), "twice");
    registrar.deregister_own(third, range).unwrap();
    assert!(registrar.deregister_own(first, range).is_err(), "renewed as the second");
}

// --- bad input ----------------------------------------------------------------------------------

fn suspend<'c>(
    cache: &'c VerbsCache,
    memory: &Memory,
    connection: &Connection,
    terms: SuspensionTerms,
) -> Result<Held<'c>, Refusal<'c>> {
    cache.suspend(memory.range(), vec![connection.clone()], Vec::new(), terms)
}

#[test]
fn a_region_is_suspended_once() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory, far) = (cache(&domain), Memory::new(PAGE), Far::new(&domain, PAGE));
    let connection = far.connection();
    let first = suspend(&cache, &memory, &connection, TERMS).unwrap();
    let second = suspend(&cache, &memory, &connection, TERMS).unwrap_err();
    assert_eq!(second.why, Why::AlreadySuspended { range: memory.range() });
    // Another range may share the connection, which goes on with the last.
    let other = Memory::new(PAGE);
    let third = suspend(&cache, &other, &connection, TERMS).unwrap();
    assert!(first.resume().unwrap().lost.is_empty());
    assert!(connection.in_flight().is_ok(), "stopped still");
    assert!(third.resume().unwrap().lost.is_empty());
    let lease = get(&cache, memory.range(), Access::READ);
    far.send(memory.range(), lease.handle().lkey()).unwrap();
}

#[test]
fn a_lease_that_does_not_end_refuses_it_and_stops_nothing() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory, far) = (cache(&domain), Memory::new(PAGE), Far::new(&domain, PAGE));
    let (connection, lease) = (far.connection(), get(&cache, memory.range(), Access::READ));
    let not = suspend(&cache, &memory, &connection, SHORT).unwrap_err();
    let Why::Refused(refused) = not.why else { panic!("{:?}", not.why) };
    assert_eq!((refused.outstanding.leases, refused.lost.len()), (1, 0));
    far.send(memory.range(), lease.handle().lkey()).unwrap();
}

/// A write whose receiver breaks in the middle: until its retries run out the send queue does not
/// drain, and what becomes of the connection is told.
#[test]
fn a_queue_that_does_not_drain_refuses_it_in_the_open() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory) = (cache(&domain), Memory::new(PAGE));
    let far = Far::new(&domain, REGION);
    let (connection, receiver) = (far.connection(), lend(&domain, far.loopback.receiver()));
    let mut source = Memory::new(REGION);
    source.fill(1);
    let lease = get(&cache, source.range(), Access::READ);
    let raw = Raw(far.loopback.sender().unwrap());
    let transfer = Transfer {
        lkey: lease.handle().lkey(),
        address: source.range().start(),
        length: REGION,
        rkey: far.region.rkey(),
        remote_address: far.memory.range().start(),
    };
    raw.post(ffi::IBV_WR_RDMA_WRITE, transfer);
    // SAFETY: mapped; the device may write it meanwhile, so it is read as it is.
    while unsafe { far.memory.pointer().read_volatile() } == 0 {
        std::hint::spin_loop();
    }
    receiver.fail();
    if raw.poll().is_some() {
        return eprintln!("skipped: 16 MiB were faster than this thread");
    }
    let at_once = SuspensionTerms { deadline: Duration::ZERO, ..TERMS };
    let not = suspend(&cache, &memory, &connection, at_once).unwrap_err();
    let Why::Refused(refused) = not.why else { panic!("{:?}", not.why) };
    assert_eq!(refused.outstanding.transfers, 1);
    assert!(refused.outstanding.oldest_transfer <= refused.waited);
    eprintln!("a queue that does not drain: {refused:?}");
    // Failed in the open: the program finds its write flushed. One that went on is retried for some
    // seconds more (Linux 6.1 does not report the end of that, suspended or not).
    if !refused.lost.is_empty() {
        assert_ne!(raw.wait(), ffi::IBV_WC_SUCCESS);
    }
}

#[test]
fn a_queue_pair_that_cannot_be_stopped_as_it_is_is_named() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory, far) = (cache(&domain), Memory::new(PAGE), Far::new(&domain, PAGE));
    let unfit = |connection: Connection| {
        let good = lend(&domain, far.loopback.sender());
        let not = cache.suspend(memory.range(), vec![good, connection], Vec::new(), TERMS);
        not.unwrap_err().why == Why::Unsupported(Unsupported::Connection { index: 1 })
    };
    let broken = Far::new(&domain, PAGE);
    let connection = broken.connection();
    connection.fail();
    assert!(unfit(connection.clone()), "broken");
    assert!(matches!(connection.stop(), Err(ConnectionLost::Broken { .. })));
    let own = Far::new(&domain, PAGE);
    let connection = own.connection();
    connection.take_back();
    assert!(unfit(connection), "taken back");
    let elsewhere = Domain::new(Arc::clone(domain.device())).unwrap();
    let foreign = Far::new(&elsewhere, PAGE);
    assert!(unfit(foreign.connection()), "of another domain");
}

/// What its program runs on it is not known: no memory is moved until it has been failed.
#[test]
fn a_queue_pair_that_is_taken_back_before_it_drained_is_waited_for() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory) = (cache(&domain), Memory::new(PAGE));
    let terms = SuspensionTerms { deadline: Duration::from_millis(500), ..TERMS };
    for fails_first in [false, true] {
        let far = Far::new(&domain, PAGE);
        let connection = far.connection();
        let lease = get(&cache, memory.range(), Access::READ);
        let begun =
            cache.begin_suspension(memory.range(), vec![connection.clone()], Vec::new(), terms);
        if fails_first {
            connection.fail();
        }
        connection.take_back();
        // Only now would the connection be stopped.
        drop(lease);
        let mut suspending = begun.unwrap();
        let refused = loop {
            match suspending.poll() {
                Ok(SuspendProgress::Pending(again, _)) => suspending = again,
                Ok(SuspendProgress::Suspended(suspended)) => {
                    assert!(fails_first, "the memory may be moved though the queue pair runs");
                    break suspended.resume().unwrap().lost;
                }
                Err(not) => {
                    let Why::Refused(refused) = not.why else { panic!("{:?}", not.why) };
                    assert_eq!((refused.outstanding.transfers, fails_first), (1, false));
                    break refused.lost;
                }
            }
        };
        assert_eq!(refused, vec![(connection, ConnectionLost::Gone)]);
    }
}

/// Queue pairs that break, or are destroyed, while they are stopped.
#[test]
fn a_queue_pair_that_goes_meanwhile_is_told() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory) = (cache(&domain), Memory::new(PAGE));
    let (broken, destroyed) = (Far::new(&domain, PAGE), Far::new(&domain, PAGE));
    let connections = vec![broken.connection(), destroyed.connection()];
    let suspended = cache.suspend(memory.range(), connections.clone(), Vec::new(), TERMS).unwrap();
    connections[0].fail();
    connections[1].take_back();
    drop(destroyed);
    let mut lost = suspended.resume().unwrap().lost;
    lost.sort_by_key(|(connection, _)| *connection == connections[1]);
    assert!(matches!(lost[0].1, ConnectionLost::Broken { .. }), "{lost:?}");
    assert_eq!(lost[1].1, ConnectionLost::Gone);
    assert_eq!(lost.len(), 2);
}

#[test]
fn an_overdue_suspension_fails_its_connections_in_the_open() {
    let Some(domain) = stopping_domain() else { return };
    let (cache, memory, far) = (cache(&domain), Memory::new(PAGE), Far::new(&domain, PAGE));
    let connection = far.connection();
    let terms = SuspensionTerms { deadline: Duration::from_secs(1), ..TERMS };
    let suspended = suspend(&cache, &memory, &connection, terms).unwrap();
    while cache.expire_suspensions() == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(suspended.resume().unwrap_err().failed, vec![connection.clone()]);
    assert!(matches!(connection.in_flight(), Err(ConnectionLost::Broken { .. })));
    let lease = get(&cache, memory.range(), Access::READ);
    connection.take_back();
    let error = far.send(memory.range(), lease.handle().lkey()).unwrap_err();
    assert!(matches!(error, LoopbackError::Failed { .. }), "{error}");
}

#[test]
fn a_device_that_goes_meanwhile_is_told() {
    alone("a_device_that_goes_meanwhile_is_told", || {
        let Some(domain) = stopping_domain() else { return };
        let (cache, memory, far) = (cache(&domain), Memory::new(PAGE), Far::new(&domain, PAGE));
        let connection = far.connection();
        let lease = get(&cache, memory.range(), Access::READ);
        let suspended =
            cache.suspend(memory.range(), vec![connection], vec![lease], TERMS).unwrap();
        close_device(&domain);
        let resumed = suspended.resume().unwrap();
        let [Err(error)] = &resumed.leases[..] else { panic!("{resumed:?}") };
        assert_eq!(*error, RegisterError::DeviceGone { errno: libc::EBADF });
        assert_eq!(resumed.lost[0].1, ConnectionLost::Gone);
        let start = memory.pointer().cast_const();
        // SAFETY: gives no lease.
        let refused = unsafe { cache.get(start, PAGE, Access::READ) };
        assert!(matches!(refused, Err(GetError::Register(RegisterError::DeviceGone { .. }))));
    });
}

/// Closes the device's descriptor, as `close_range` would; what libibverbs has mapped of it stays.
fn close_device(domain: &Domain) {
    // SAFETY: the context is open; its descriptor is this process's alone.
    unsafe { libc::close((*domain.device().as_ptr()).cmd_fd) };
}

/// The device lives on by its mappings, with its regions and their pins.
#[test]
fn a_region_behind_a_closed_descriptor_is_not_taken_for_withdrawn() {
    alone("a_region_behind_a_closed_descriptor_is_not_taken_for_withdrawn", || {
        let Some(domain) = domain() else { return };
        let (cache, memory) = (cache(&domain), Memory::new(PAGE));
        let far = Far::new(&domain, PAGE);
        let lease = get(&cache, memory.range(), Access::READ);
        close_device(&domain);
        let not = cache.suspend(memory.range(), Vec::new(), vec![lease], SHORT).unwrap_err();
        let Why::Refused(refused) = not.why else { panic!("{:?}", not.why) };
        assert!(refused.outstanding.translations, "{refused:?}");
        let own = Memory::new(PAGE);
        let (registrar, region) = (&far.registrar, far.region);
        let gone = Err(DeregisterError::DeviceGone { errno: libc::EBADF });
        assert_eq!(registrar.withdraw_own(region, far.memory.range()), gone);
        assert!(!registrar.quiet(far.memory.range()), "it is registered");
        assert!(registrar.quiet(own.range()));
    });
}

/// What was begun before the descriptor was closed goes on, and so may the queue pair.
#[test]
fn a_queue_pair_behind_a_closed_descriptor_is_not_taken_for_ended() {
    alone("a_queue_pair_behind_a_closed_descriptor_is_not_taken_for_ended", || {
        let Some(domain) = stopping_domain() else { return };
        let (cache, memory, far) = (cache(&domain), Memory::new(PAGE), Far::new(&domain, PAGE));
        let connection = far.connection();
        let lease = get(&cache, memory.range(), Access::READ);
        let terms = SuspensionTerms { deadline: Duration::from_millis(500), ..TERMS };
        let begun =
            cache.begin_suspension(memory.range(), vec![connection.clone()], Vec::new(), terms);
        close_device(&domain);
        // Only now would the connection be stopped.
        drop(lease);
        let mut suspending = begun.unwrap();
        let refused = loop {
            match suspending.poll() {
                Ok(SuspendProgress::Pending(again, _)) => suspending = again,
                Ok(SuspendProgress::Suspended(_)) => panic!("the queue pair runs"),
                Err(not) => {
                    let Why::Refused(refused) = not.why else { panic!("{:?}", not.why) };
                    break refused;
                }
            }
        };
        assert_eq!(refused.outstanding.transfers, 1);
        assert_eq!(refused.lost, vec![(connection.clone(), ConnectionLost::Gone)]);
        connection.fail();
        assert_eq!(connection.in_flight().unwrap().count, 1);
        connection.take_back();
        assert_eq!(connection.in_flight().unwrap().count, 1);
    });
}

#[test]
fn a_forked_child_leaves_its_parents_queue_pairs_alone() {
    let Some(domain) = stopping_domain() else { return };
    let far = Far::new(&domain, PAGE);
    let connection = far.connection();
    assert!(in_forked_child(|| {
        connection.fail();
        connection.stop() == Err(ConnectionLost::Gone)
            && connection.in_flight() == Err(ConnectionLost::Gone)
            // SAFETY: the suspension, if there is one, is the parent's.
            && unsafe { connection.restart() } == Err(ConnectionLost::Gone)
    }));
    connection.stop().unwrap();
    // SAFETY: nothing is suspended.
    unsafe { connection.restart() }.unwrap();
}
