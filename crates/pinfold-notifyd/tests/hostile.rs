//! Thousands of hostile sessions against the real server on its real socket, while an honest client
//! wants to be served.
//!
//! Where the test runs as root, the hostile processes are one user, the honest one another, and the
//! hostile do as much as they can; otherwise all are one user, and the hostile leave room for one more,
//! because a user's processes share its allowance. `PINFOLD_HOSTILE_SECONDS` makes it last longer than
//! eight seconds, `PINFOLD_HOSTILE_SEED` repeats what the hostile do.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for an allocator that counts.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // tests may fail loudly

mod support;

use fastrand::Rng;
use pinfold::monitor::notify;
use pinfold_ebpf::protocol::{Challenge, ToHelper};
use pinfold_kernel::socket;
use pinfold_notifyd::ClientLimits;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{Served, challenge, connect, eventually, heard, made_for, report, reported, say};

const HOSTILE_USER: u32 = 1201;
const HONEST_USER: u32 = 1202;
/// Sessions of one hostile process before it is killed.
const SESSIONS: usize = 150;
/// What may stay allocated: the server's tables for as many clients as there ever were at once.
const KEPT_BYTES: usize = 256 << 10;

/// Bytes of this process's memory in use.
static IN_USE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is the system allocator's; besides it only a number changes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Relaxed, here and below: a count that nothing is ordered by.
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller promises what the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn in_use() -> usize {
    IN_USE.load(Ordering::Relaxed)
}

fn limits() -> ClientLimits {
    // Not so short that an honest client on a busy machine is taken for an idle one.
    let patience = Duration::from_secs(3);
    // One user's hostile processes keep their views until they are killed: two of them, one each session.
    let views_per_user = if support::is_root() { 32 } else { 2 * SESSIONS + 8 };
    let views = 2 * views_per_user;
    ClientLimits { views, views_per_user, waiting: 64, waiting_per_user: 32, patience }
}

fn served_path() -> PathBuf {
    std::env::var_os("PINFOLD_TEST_PATH").unwrap().into()
}

// --- the hostile ----------------------------------------------------------------------------------

/// A hostile process: its connections stay open until there are too many of them.
struct Hostile {
    random: Rng,
    path: PathBuf,
    kept: Vec<OwnedFd>,
    /// How many it keeps.
    most: usize,
}

impl Hostile {
    fn session(&mut self) {
        let Ok(connection) = socket::connect(&self.path, Duration::from_secs(5)) else { return };
        match self.random.u8(..12) {
            0 => {} // no word at all
            1 => self.garbage(&connection),
            2 => self.flood(&connection),
            3 => self.nearly(&connection),
            4 => self.descriptors(&connection),
            5 => self.other_version(&connection),
            6 => socket::shutdown(connection.as_fd()),
            7 => self.wrong_challenge(&connection),
            8 => self.ask_and_rave(&connection),
            9 => self.ask_and_leave(&connection),
            10 => self.give_back_early(&connection),
            _ => self.itself(&connection),
        }
        if self.random.bool() {
            self.keep(connection);
        }
    }

    fn keep(&mut self, connection: OwnedFd) {
        if self.kept.len() >= self.most {
            let which = self.random.usize(..self.kept.len());
            self.kept.swap_remove(which);
        }
        self.kept.push(connection);
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        let length = self.random.usize(..most);
        (0..length).map(|_| self.random.u8(..)).collect()
    }

    fn garbage(&mut self, connection: &OwnedFd) {
        let most = if self.random.bool() { 40 } else { 100_000 };
        say(connection, &self.bytes(most));
    }

    fn flood(&mut self, connection: &OwnedFd) {
        let packet = self.bytes(64);
        for _ in 0..1000 {
            if !say(connection, &packet) {
                break;
            }
        }
    }

    /// A proper request, whose challenge was heard if there was one in time.
    fn request(&mut self, connection: &OwnedFd) -> [u8; 32] {
        let heard = challenge(connection).unwrap_or(Challenge(0));
        ToHelper::Ask(heard).encode()
    }

    fn nearly(&mut self, connection: &OwnedFd) {
        let mut packet = self.request(connection).to_vec();
        let at = self.random.usize(..packet.len());
        packet[at] ^= self.random.u8(1..);
        if self.random.bool() {
            packet.resize(self.random.usize(..64), 0);
        }
        say(connection, &packet);
    }

    fn descriptors(&mut self, connection: &OwnedFd) {
        let file = File::open("/dev/null").unwrap();
        let count = self.random.usize(1..60);
        let request = self.request(connection);
        let packet = if self.random.bool() { &request[..] } else { &[] };
        let _ = socket::send(connection.as_fd(), packet, &vec![file.as_fd(); count]);
    }

    /// The connection, sent over itself.
    fn itself(&mut self, connection: &OwnedFd) {
        let _ = socket::send(connection.as_fd(), b"me", &[connection.as_fd()]);
    }

    fn other_version(&mut self, connection: &OwnedFd) {
        let mut packet = self.request(connection);
        packet[8] = self.random.u8(2..);
        say(connection, &packet);
    }

    fn wrong_challenge(&mut self, connection: &OwnedFd) {
        say(connection, &ToHelper::Ask(Challenge(self.random.u64(..))).encode());
    }

    fn ask_and_rave(&mut self, connection: &OwnedFd) {
        let request = self.request(connection);
        say(connection, &request);
        for _ in 0..self.random.usize(..20) {
            let packet = if self.random.bool() { request.to_vec() } else { self.bytes(40) };
            say(connection, &packet);
        }
    }

    fn ask_and_leave(&mut self, connection: &OwnedFd) {
        let request = self.request(connection);
        say(connection, &request);
        if self.random.bool() {
            socket::shutdown(connection.as_fd());
        } else if self.random.bool() && heard(connection).is_some() {
            say(connection, &ToHelper::GiveBack.encode());
        }
    }

    fn give_back_early(&mut self, connection: &OwnedFd) {
        let request = self.request(connection);
        say(connection, &ToHelper::GiveBack.encode());
        say(connection, &request);
    }
}

fn be_hostile() {
    let number = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let mut hostile = Hostile {
        random: Rng::with_seed(number("PINFOLD_TEST_SEED")),
        path: served_path(),
        kept: Vec::new(),
        most: usize::try_from(number("PINFOLD_TEST_KEEP")).unwrap(),
    };
    for _ in 0..SESSIONS {
        hostile.session();
    }
    report("done");
    // It is killed here, in the middle of all that it has kept.
    support::wait_for_parent();
}

// --- the honest -----------------------------------------------------------------------------------

/// Asks again and again until it is told to end, and says how often it was served.
fn be_honest() {
    let path = served_path();
    let (told, is_told) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        support::wait_for_parent();
        drop(told);
    });
    report("begun");
    let (mut served, mut slowest) = (0_u64, Duration::ZERO);
    while is_told.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
        let began = Instant::now();
        match notify::request(&path, notify::PATIENCE) {
            Ok((view, connection)) => {
                assert_eq!(made_for(&view), std::process::id());
                connection.give_back();
            }
            Err(error) => return report(&format!("refused after {served}: {error}")),
        }
        slowest = slowest.max(began.elapsed());
        served += 1;
    }
    report(&format!("served {served} slowest {slowest:?}"));
}

/// Not a test by itself: what other processes of these tests do.
#[test]
fn in_another_process() {
    match support::role().as_deref() {
        Some("hostile") => be_hostile(),
        Some("honest") => be_honest(),
        _ => {}
    }
}

// --- the test -------------------------------------------------------------------------------------

fn start(role: &str, path: &Path, user: u32, seed: u64, keep: usize) -> Child {
    let user = support::is_root().then_some(user);
    let mut command = support::other("in_another_process", role, user);
    command.env("PINFOLD_TEST_PATH", path);
    command.env("PINFOLD_TEST_SEED", seed.to_string());
    command.env("PINFOLD_TEST_KEEP", keep.to_string());
    command.spawn().unwrap()
}

/// Two concurrent hostile processes, from the beginning to their sudden end.
fn round(path: &Path, seed: u64) {
    // One user's processes share 32 if they are not root's: two times 10, and the honest one.
    let keep = if support::is_root() { 200 } else { 10 };
    let mut both = [0, 1].map(|which| start("hostile", path, HOSTILE_USER, seed + which, keep));
    for hostile in &mut both {
        let end = reported(hostile);
        hostile.kill().unwrap();
        hostile.wait().unwrap();
        assert_eq!(end.as_deref(), Some("done"), "seed {seed}");
    }
}

fn number_from(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn an_honest_client_is_served_among_hostile_ones_and_nothing_is_left_behind() {
    let seed = number_from("PINFOLD_HOSTILE_SEED").unwrap_or_else(|| fastrand::u64(..1 << 32));
    let seconds = number_from("PINFOLD_HOSTILE_SECONDS").unwrap_or(8);
    eprintln!("PINFOLD_HOSTILE_SEED={seed}");
    let served = Served::new(limits());
    round(&served.path, seed);
    eventually("all views are given back", || served.tally.held() == 0);
    let (descriptors, bytes) = (settled_descriptors(), in_use());

    let mut honest = start("honest", &served.path, HONEST_USER, 0, 0);
    assert_eq!(reported(&mut honest).as_deref(), Some("begun"));
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut rounds = 0;
    while rounds == 0 || Instant::now() < deadline {
        rounds += 1;
        round(&served.path, seed + 2 * rounds);
    }
    drop(honest.stdin.take());
    let verdict = reported(&mut honest).unwrap_or_default();
    honest.wait().unwrap();
    drop(honest);
    let sessions = 2 * SESSIONS as u64 * (rounds + 1);
    eprintln!(
        "{sessions} hostile sessions, {} views made; the honest one: {verdict}",
        served.tally.opened()
    );

    assert!(verdict.starts_with("served ") && !verdict.starts_with("served 0 "), "{verdict}");
    assert!(served.is_running());
    eventually("all views are given back", || served.tally.held() == 0);
    eventually("all descriptors are closed", || support::descriptors() <= descriptors);
    assert!(in_use() < bytes + KEPT_BYTES, "{} bytes in use, {bytes} before", in_use());
    connect(&served.path);
}

/// The number of this process's descriptors once it has not changed for a while.
fn settled_descriptors() -> usize {
    let least = std::cell::Cell::new((support::descriptors(), 0));
    eventually("the number of descriptors settles", || {
        let (before, times) = least.get();
        let now = support::descriptors();
        least.set((now, if now == before { times + 1 } else { 0 }));
        times > 100
    });
    least.get().0
}
