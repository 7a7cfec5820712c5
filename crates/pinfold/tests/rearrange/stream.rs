//! A steady stream of transfers in both directions over a region that is made huge meanwhile, every
//! byte verified.

use super::rig::*;
use io_uring::{opcode, types};
use pinfold::rearrange::{
    HugePageWay, Obstacle, ResidentPages, Stepped, defragment, defragment_in_steps,
};
use pinfold::suspend::{Gets, Keys, SuspensionTerms};
use pinfold::{AddressRange, Lease};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;

/// Bytes of a transfer.
const MESSAGE: usize = 64 << 10;

/// Sends what a piece of the region holds, then receives something new into it; goes round and
/// round. The program itself writes nothing to the region.
struct Stream<'a> {
    ring: io_uring::IoUring,
    cache: &'a Rings,
    range: AddressRange,
    channel: File,
    /// How often each piece was received into.
    generations: Vec<u64>,
    /// Transfers so far, for the thread that waits for some.
    transfers: &'a AtomicUsize,
}

/// The word at `at` after so many messages.
fn stamp(at: usize, generation: u64) -> [u8; 8] {
    word(at).wrapping_add(generation.wrapping_mul(0xd6e8_feb8_6659_fd93)).to_ne_bytes()
}

impl Stream<'_> {
    fn piece(&self, number: usize) -> AddressRange {
        AddressRange::new(self.range.start() + number * MESSAGE, MESSAGE).unwrap()
    }

    fn message(&self, number: usize) -> Vec<u8> {
        let piece = self.piece(number);
        let words = (piece.start()..piece.end()).step_by(8);
        words.flat_map(|at| stamp(at, self.generations[number])).collect()
    }

    fn transfer(&mut self, entry: &io_uring::squeue::Entry) {
        // SAFETY: the lease outlives the request, which is waited for.
        unsafe { self.ring.submission().push(entry).unwrap() };
        self.ring.submit_and_wait(1).unwrap();
        let moved = self.ring.completion().next().map(|it| it.result());
        assert_eq!(moved, i32::try_from(MESSAGE).ok(), "a transfer failed");
        self.transfers.fetch_add(1, Ordering::Relaxed); // a count, read as such
    }

    fn visit(&mut self, number: usize) {
        let (cache, piece) = (self.cache, self.piece(number));
        let lease = get(cache, piece);
        let (index, length) = (lease.handle().get(), u32::try_from(MESSAGE).unwrap());
        let channel = types::Fd(self.channel.as_raw_fd());
        let at = std::ptr::with_exposed_provenance_mut(piece.start());
        self.transfer(&opcode::WriteFixed::new(channel, at, length, index).build());
        let mut sent = vec![0; MESSAGE];
        self.channel.read_exact_at(&mut sent, 0).unwrap();
        assert!(sent == self.message(number), "wrong bytes were sent from piece {number}");
        self.generations[number] += 1;
        self.channel.write_all_at(&self.message(number), MESSAGE as u64).unwrap();
        let receive = opcode::ReadFixed::new(channel, at, length, index).offset(MESSAGE as u64);
        self.transfer(&receive.build());
    }

    fn run(&mut self, stop: &AtomicBool) {
        for number in (0..self.generations.len()).cycle() {
            if stop.load(Ordering::Relaxed) {
                break; // nothing else hangs on it
            }
            self.visit(number);
        }
    }

    /// Whether the program finds what was received last.
    fn is_right(&self) -> bool {
        (0..self.generations.len()).all(|number| {
            let message = self.message(number);
            let words = message.chunks_exact(8).zip((self.piece(number).start()..).step_by(8));
            words.into_iter().all(|(bytes, at)| read(at).to_ne_bytes() == bytes)
        })
    }
}

/// A rig with room for the region, its copy and its renewal; or a note why not.
fn roomy_rig() -> Option<(io_uring::IoUring, Rings)> {
    let limit = pinfold::limits::Limits::read().enforced().bytes();
    if limit.is_some_and(|bytes| bytes < 4 * LONG as u64) {
        eprintln!("skipped: RLIMIT_MEMLOCK is too low");
        return None;
    }
    rig()
}

/// Runs `change` during a stream, and looks at everything afterwards.
fn beside_a_stream(change: impl FnOnce(&Rings, AddressRange)) {
    let Some((ring, cache)) = roomy_rig() else { return };
    let (_memory, range) = memory(LONG);
    let (stop, transfers) = (AtomicBool::new(false), AtomicUsize::new(0));
    let generations = vec![0; LONG / MESSAGE];
    let channel = memfd(2 * MESSAGE);
    let mut stream =
        Stream { ring, cache: &cache, range, channel, generations, transfers: &transfers };
    // Or until the stream has ended, which is a panic that joining it tells.
    let more = |count: usize, streaming: &ScopedJoinHandle<'_, ()>| {
        let now = transfers.load(Ordering::Relaxed);
        while transfers.load(Ordering::Relaxed) < now + count && !streaming.is_finished() {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        let streaming = scope.spawn(|| stream.run(&stop));
        more(2 * LONG / MESSAGE, &streaming);
        // Also if this panics, the stream ends.
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            change(&cache, range);
        }));
        more(64, &streaming);
        stop.store(true, Ordering::Relaxed);
        streaming.join().unwrap();
        changed.unwrap();
    });
    assert!(stream.is_right(), "the program finds wrong bytes");
    let made: u64 = stream.generations.iter().sum();
    assert!(made > LONG as u64 / MESSAGE as u64);
}

/// Gets wait, as those of a stream do that knows of nothing.
fn held() -> SuspensionTerms {
    SuspensionTerms { gets: Gets::Hold, ..terms() }
}

/// How many huge pages the kernel has split so far, on the whole machine: what was made may be among them.
fn huge_pages_split() -> u64 {
    let counters = std::fs::read_to_string("/proc/vmstat").unwrap();
    let splits = counters.lines().filter(|line| line.starts_with("thp_split_p"));
    splits.filter_map(|line| line.split(' ').nth(1)?.parse::<u64>().ok()).sum()
}

/// `split` is how many huge pages had been split when it began.
fn is_accounted_for(done: &pinfold::rearrange::Defragmented, range: AddressRange, split: u64) {
    let left: usize = done.left.iter().map(|(part, _)| part.len()).sum();
    assert_eq!(done.made + done.already + left, range.len(), "{done:?}");
    if let (Some(before), Some(after)) = (done.before, done.after) {
        let kept = after.huge >= before.huge && after.huge >= done.made;
        assert!(kept || huge_pages_split() != split, "{done:?}");
    }
    for (part, why) in &done.left {
        // The machine may be short of huge pages or hold a page at the wrong moment, no more.
        assert!(matches!(why, Obstacle::NoHugePage { .. } | Obstacle::Pinned), "{part}: {why}");
    }
}

fn in_steps<'c>(
    cache: &'c Rings,
    range: AddressRange,
    leases: Vec<Lease<'c, pinfold::registrar::IoUring, pinfold::monitor::Userfaultfd>>,
    way: HugePageWay,
) -> Option<Stepped<'c, pinfold::registrar::IoUring, pinfold::monitor::Userfaultfd>> {
    match defragment_in_steps(cache, range, &[], leases, held(), way) {
        Ok(done) => Some(done),
        Err(stopped) => {
            eprintln!("skipped: {stopped}");
            None
        }
    }
}

fn by_copy() -> HugePageWay {
    // SAFETY: the stream receives through the suspended cache, and nothing else writes.
    unsafe { HugePageWay::by_copy() }
}

#[test]
fn a_stream_goes_on_while_its_region_is_made_huge_in_steps() {
    for way in [HugePageWay::IN_PLACE, by_copy()] {
        beside_a_stream(|cache, range| {
            let split = huge_pages_split();
            let Some(done) = in_steps(cache, range, Vec::new(), way) else { return };
            is_accounted_for(&done.defragmented, range, split);
            assert!(done.suspensions * HUGE >= done.defragmented.made);
            assert_eq!(cache.suspension_statistics().resumed, done.suspensions as u64);
        });
    }
}

#[test]
fn a_stream_goes_on_during_a_lease_that_keeps_its_index() {
    for way in [HugePageWay::IN_PLACE, by_copy()] {
        beside_a_stream(|cache, range| {
            let lease = get(cache, range);
            let index = lease.handle();
            let split = huge_pages_split();
            let Some(done) = in_steps(cache, range, vec![lease], way) else { return };
            is_accounted_for(&done.defragmented, range, split);
            let [Ok(lease)] = done.leases.as_slice() else { panic!("{done:?}") };
            assert_eq!((lease.handle(), done.keys), (index, Keys::Same));
            assert!(!lease.is_invalidated());
        });
    }
}

#[test]
fn a_stream_waits_while_its_region_is_made_huge_at_once() {
    for way in [HugePageWay::IN_PLACE, by_copy()] {
        beside_a_stream(|cache, range| {
            let suspended = cache.suspend(range, Vec::new(), Vec::new(), held()).unwrap();
            let split = huge_pages_split();
            match defragment(&suspended, way) {
                Ok(done) => is_accounted_for(&done, range, split),
                Err(error) => eprintln!("skipped: {error}"),
            }
            let resumed = suspended.resume().unwrap();
            assert!(resumed.lost.is_empty());
        });
    }
}

#[test]
fn what_is_huge_already_is_left_in_peace() {
    let Some((mut ring, cache)) = roomy_rig() else { return };
    let (_memory, range) = memory(2 * HUGE);
    let Some(first) = in_steps(&cache, range, Vec::new(), HugePageWay::IN_PLACE) else { return };
    if !first.defragmented.left.is_empty() || ResidentPages::of(range).is_none() {
        eprintln!("skipped: {:?}", first.defragmented);
        return;
    }
    let Some(second) = in_steps(&cache, range, Vec::new(), by_copy()) else { return };
    assert_eq!((second.suspensions, second.defragmented.already), (0, 2 * HUGE));
    let lease = get(&cache, range);
    assert!(is_whole(range) && sends(&mut ring, range, lease.handle().get()));
}
