//! The machine that is measured: which processors there are, how much memory this process uses, what it is in
//! words.

use pinfold_kernel::thread;
use std::fs;

/// The processors that this thread may run on.
pub(crate) fn processors() -> Result<Vec<usize>, String> {
    thread::processors().map_err(|errno| failed("sched_getaffinity", errno))
}

/// Keeps the calling thread on `processor`.
pub(crate) fn stay_on(processor: usize) -> Result<(), String> {
    let what = format!("to stay on processor {processor}");
    thread::stay_on(processor).map_err(|errno| failed(&what, errno))
}

/// What the kernel said to `what`.
pub(crate) fn failed(what: &str, errno: pinfold_kernel::Errno) -> String {
    format!("{what}: {}", std::io::Error::from(errno))
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

/// The bytes in use on the C library's heap, the heap's own included, and what is mapped outside it:
/// a cache may map memory itself. Only differences mean anything.
///
/// Both sides are measured by it, because small allocations pay for the heap's words too.
///
/// # Errors
///
/// Only the GNU C library tells.
pub(crate) fn memory_used() -> Result<f64, String> {
    let heap = pinfold_kernel::process::heap()
        .ok_or("this C library does not tell how much memory is in use")?;
    Ok(writable_bytes()? - heap.taken as f64 + heap.used as f64)
}

/// The process's private writable memory.
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
    fn siblings_are_read_from_lists_and_ranges() {
        assert!(contains("3", 3) && contains("0-3", 2));
        assert!(!contains("3", 2) && !contains("0-3", 4) && !contains("", 0));
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn memory_in_use_is_seen_to_grow() {
        // Far more than what the concurrent tests take and give back meanwhile.
        const BYTES: usize = 1 << 30;
        let before = memory_used().unwrap();
        let bytes = std::hint::black_box(vec![0_u8; BYTES]);
        let share = (memory_used().unwrap() - before) / BYTES as f64;
        assert!((0.9..1.1).contains(&share), "{share} of {}", bytes.len());
    }
}
