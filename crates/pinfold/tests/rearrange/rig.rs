//! A ring, a cache over it, and memory of small pages.

use super::registrar_support::{Memory, memory_file};
use io_uring::{opcode, types};
use pinfold::monitor::Userfaultfd;
use pinfold::registrar::IoUring;
use pinfold::suspend::{Gets, Suspend, Suspended, SuspensionTerms};
use pinfold::{Access, AddressRange, Cache, Config, Lease, Monitor, Registrar};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;

pub(crate) const HUGE: usize = 2 << 20;
pub(crate) const LONG: usize = 16 << 20;

/// Where the completions of ended registrations are counted in.
pub(crate) const TAGS: std::ops::Range<u64> = 1 << 63..u64::MAX;

pub(crate) type Rings = Cache<IoUring, Userfaultfd>;

/// A ring and a cache over it, with pieces as long as any region here; or a note why not.
pub(crate) fn rig() -> Option<(io_uring::IoUring, Rings)> {
    let ring = ring()?;
    // SAFETY: the ring's table of buffers is left to the registrar.
    let registrar = unsafe { IoUring::new(&ring, 1024) }.unwrap();
    Some((ring, cache(registrar)?))
}

pub(crate) fn ring() -> Option<io_uring::IoUring> {
    io_uring::IoUring::new(64).inspect_err(|error| eprintln!("skipped: no io_uring: {error}")).ok()
}

pub(crate) fn cache<R: Registrar>(registrar: R) -> Option<Cache<R, Userfaultfd>> {
    let monitor = Userfaultfd::new();
    let monitor =
        monitor.inspect_err(|error| eprintln!("skipped: no userfaultfd: {error}")).ok()?;
    let config = Config { piece_bytes: 2 * LONG, ..Config::keeping_all() };
    Some(pinfold::cache(registrar, monitor, config).unwrap())
}

/// Memory with room for `bytes` at a multiple of a huge page, each page small and filled, also where the
/// machine makes every page huge.
pub(crate) fn memory(bytes: usize) -> (Memory, AddressRange) {
    let memory = Memory::with_protection(bytes + HUGE, libc::PROT_READ | libc::PROT_WRITE);
    let start = memory.range().start();
    let range = memory.part(start.next_multiple_of(HUGE) - start, bytes);
    advise(memory.range(), libc::MADV_NOHUGEPAGE);
    for at in (range.start()..range.end()).step_by(8) {
        write(at, word(at));
    }
    advise(memory.range(), libc::MADV_HUGEPAGE);
    (memory, range)
}

/// Only for advice that keeps what the memory holds; a kernel without huge pages refuses it, and then pages
/// are small.
fn advise(range: AddressRange, advice: libc::c_int) {
    let start = std::ptr::with_exposed_provenance_mut::<u8>(range.start());
    // SAFETY: the tests' own memory.
    unsafe { libc::madvise(start.cast(), range.len(), advice) };
}

/// What stands at an address that was not written to since.
pub(crate) fn word(at: usize) -> u64 {
    (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub(crate) fn write(at: usize, word: u64) {
    // SAFETY: the tests pass words of memory of their own.
    unsafe { std::ptr::with_exposed_provenance_mut::<u64>(at).write_volatile(word) };
}

pub(crate) fn read(at: usize) -> u64 {
    // SAFETY: as above.
    unsafe { std::ptr::with_exposed_provenance::<u64>(at).read_volatile() }
}

pub(crate) fn is_whole(range: AddressRange) -> bool {
    (range.start()..range.end()).step_by(8).all(|at| read(at) == word(at))
}

pub(crate) fn get<R: Registrar, M: Monitor>(
    cache: &Cache<R, M>,
    range: AddressRange,
) -> Lease<'_, R, M> {
    let start = std::ptr::with_exposed_provenance(range.start());
    // SAFETY: the tests' memory outlives their caches' leases.
    unsafe { cache.get(start, range.len(), Access::READ_WRITE) }.unwrap()
}

/// Enough for any machine, and gets fail at once where a test would wait for itself.
pub(crate) fn terms() -> SuspensionTerms {
    let deadline = Duration::from_secs(60);
    SuspensionTerms { deadline, gets: Gets::Refuse, ..SuspensionTerms::default() }
}

pub(crate) fn suspend<'c, R: Suspend, M: Monitor>(
    cache: &'c Cache<R, M>,
    range: AddressRange,
    leases: Vec<Lease<'c, R, M>>,
) -> Suspended<'c, R, M> {
    cache.suspend(range, Vec::new(), leases, terms()).map_err(|refused| refused.why).unwrap()
}

pub(crate) fn memfd(bytes: usize) -> File {
    let file = memory_file();
    file.set_len(bytes as u64).unwrap();
    file
}

/// Sends `range` to the same offset of a file by the index, and tells whether its words are there.
pub(crate) fn sends(ring: &mut io_uring::IoUring, range: AddressRange, index: u16) -> bool {
    use std::os::unix::fs::FileExt;
    let file = memfd(range.len());
    let from = std::ptr::with_exposed_provenance(range.start());
    let length = u32::try_from(range.len()).unwrap();
    let entry = opcode::WriteFixed::new(types::Fd(file.as_raw_fd()), from, length, index).build();
    // SAFETY: memory and file outlive the request, which is waited for.
    unsafe { ring.submission().push(&entry).unwrap() };
    ring.submit_and_wait(1).unwrap();
    let sent = ring.completion().map(|it| it.result()).next();
    assert_eq!(sent, i32::try_from(range.len()).ok(), "a transfer failed");
    let mut bytes = vec![0; range.len()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let words = bytes.chunks_exact(8).zip((range.start()..).step_by(8));
    words.into_iter().all(|(bytes, at)| bytes == word(at).to_ne_bytes())
}
