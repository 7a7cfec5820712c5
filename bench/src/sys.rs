//! What is asked of the kernel and the C library: which processors there are, to stay on one of
//! them, an empty system call, and how much memory this process uses.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for those calls. None of them is given memory but a processor
//! set of its own.

#![allow(unsafe_code)]

use std::fs;
use std::io;

/// The processors that this thread may run on.
pub(crate) fn processors() -> Result<Vec<usize>, String> {
    let mut set = empty_set();
    // SAFETY: the kernel fills a set whose size it is told.
    let asked = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    if asked != 0 {
        return Err(format!("sched_getaffinity: {}", io::Error::last_os_error()));
    }
    let most = usize::try_from(libc::CPU_SETSIZE).unwrap_or_default();
    // SAFETY: the numbers are below the set's size.
    Ok((0..most).filter(|&processor| unsafe { libc::CPU_ISSET(processor, &set) }).collect())
}

/// Keeps the calling thread on `processor`.
pub(crate) fn stay_on(processor: usize) -> Result<(), String> {
    let mut set = empty_set();
    // SAFETY: the number came from `processors`, so it is below the set's size.
    unsafe { libc::CPU_SET(processor, &mut set) };
    // SAFETY: the kernel reads a set whose size it is told.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(format!("to stay on processor {processor}: {}", io::Error::last_os_error())),
    }
}

fn empty_set() -> libc::cpu_set_t {
    // SAFETY: a set is an array of words, and zeros are the empty one.
    unsafe { std::mem::zeroed() }
}

/// Whether two processors are threads of one core; unknown where the kernel does not tell.
pub(crate) fn share_a_core(one: usize, other: usize) -> Option<bool> {
    let file = format!("/sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list");
    let list = fs::read_to_string(file).ok()?;
    Some(list.trim().split(',').any(|part| contains(part, other)))
}

/// Whether `part`, "3" or "0-3", contains `number`.
fn contains(part: &str, number: usize) -> bool {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let bounds = first.parse::<usize>().ok().zip(last.parse::<usize>().ok());
    bounds.is_some_and(|(first, last)| (first..=last).contains(&number))
}

/// How often the kernel took the processor away from this thread for another's sake.
pub(crate) fn processor_lost() -> libc::c_long {
    // SAFETY: the structure is plain numbers, and zeros are some.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the structure. It knows the calling thread, so it cannot fail.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nivcsw
}

/// Enters the kernel and leaves it.
pub(crate) fn empty_call() {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::syscall(libc::SYS_getppid) };
}

/// Takes the page at `address` away; it reads as zeros then.
///
/// Only for memory whose content nobody needs.
pub(crate) fn discard_page(address: usize) {
    let page = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the benches give the middle of buffers that are never read or written.
    unsafe { libc::madvise(page, 4096, libc::MADV_DONTNEED) };
}

/// A mapping that no monitor was told to watch.
pub(crate) struct UnwatchedPage(usize);

impl UnwatchedPage {
    /// Between two pages without access, so that it is a mapping of its own.
    pub(crate) fn new() -> Result<Self, String> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory anywhere, and rights of its middle page.
        unsafe {
            let start = libc::mmap(std::ptr::null_mut(), 3 * 4096, libc::PROT_NONE, flags, -1, 0);
            if start == libc::MAP_FAILED {
                return Err(format!("mmap: {}", io::Error::last_os_error()));
            }
            let page = start.byte_add(4096);
            libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_WRITE);
            Ok(Self(page.expose_provenance()))
        }
    }

    /// Takes it away, and gives a new one.
    pub(crate) fn discard(&self) {
        discard_page(self.0);
    }
}

impl Drop for UnwatchedPage {
    fn drop(&mut self) {
        // SAFETY: made by `new`, with a page on either side.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.0 - 4096), 3 * 4096) };
    }
}

/// The bytes in use on the C library's heap, the heap's own included, and what is mapped beside it:
/// a cache may map memory itself. Only differences mean anything.
///
/// Both sides are measured by it, for whoever allocates small things pays for the heap's words too.
#[cfg(target_env = "gnu")]
pub(crate) fn memory_used() -> Result<f64, String> {
    // SAFETY: the call looks at the heap and touches nothing else.
    let heap = unsafe { libc::mallinfo2() };
    let (used, taken) = (heap.uordblks + heap.hblkhd, heap.arena + heap.hblkhd);
    Ok(writable_bytes()? - taken as f64 + used as f64)
}

/// Only the GNU C library tells.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn memory_used() -> Result<f64, String> {
    Err("this C library does not tell how much memory is in use".into())
}

/// The process's private writable memory.
#[cfg(target_env = "gnu")]
fn writable_bytes() -> Result<f64, String> {
    let status = fs::read_to_string("/proc/self/status")
        .map_err(|error| format!("/proc/self/status: {error}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.map(|kib| kib * 1024.0).ok_or_else(|| "/proc/self/status has no VmData".into())
}

/// This machine in words.
pub(crate) fn machine() -> String {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    // What a distribution adds behind the number says nothing to others.
    let kernel = kernel.trim().split('-').next().unwrap_or_default();
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        processor.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("processor unknown", |(_, model)| model);
    let count = processors().map_or(0, |processors| processors.len());
    format!("Linux {kernel}, {count} processors, {model}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_told_to() {
        let all = processors().unwrap();
        let last = *all.last().unwrap();
        std::thread::spawn(move || {
            stay_on(last).unwrap();
            assert_eq!(processors().unwrap(), [last]);
        })
        .join()
        .unwrap();
        assert_eq!(processors().unwrap(), all, "other threads stay free");
    }

    #[test]
    fn siblings_are_read_from_lists_and_ranges() {
        assert!(contains("3", 3) && contains("0-3", 2));
        assert!(!contains("3", 2) && !contains("0-3", 4) && !contains("", 0));
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn memory_in_use_is_seen_to_grow() {
        // Far more than what the tests beside this one take and give back meanwhile.
        const BYTES: usize = 1 << 30;
        let before = memory_used().unwrap();
        let bytes = std::hint::black_box(vec![0_u8; BYTES]);
        let share = (memory_used().unwrap() - before) / BYTES as f64;
        assert!((0.9..1.1).contains(&share), "{share} of {}", bytes.len());
    }
}
