//! Which arguments mean a change that must be told, and of which addresses.

#![allow(clippy::cast_possible_truncation)] // where the kernel truncates

use super::{aside, pinfold_process_feed, pinfold_process_hooks};
use libc::{c_int, c_long};
use pinfold::AddressRange;
use pinfold_kernel::errno::{last_errno, set_errno};

/// `MADV_GUARD_INSTALL` of `linux/mman.h` (Linux 6.13).
pub(super) const GUARD_INSTALL: c_int = 102;

/// The kernel ignores what a program keeps in the highest byte of an address where the processor
/// does (arm64, and x86-64 since Linux 6.2).
const ADDRESS_BITS: u32 = 56;

/// Pages have 4 to 64 KiB; rounding too far drops a neighbour without need, no more.
const LARGEST_PAGE: usize = if cfg!(target_arch = "x86_64") { 4096 } else { 65536 };

/// The address that the kernel makes of `start`.
fn untagged(start: usize) -> usize {
    start & ((1 << ADDRESS_BITS) - 1)
}

/// Rounded down to a page; never 0.
fn page_of(start: usize) -> usize {
    (untagged(start) & !(LARGEST_PAGE - 1)).max(1)
}

/// The addresses that `madvise` takes pages from: rounded outwards, whatever the kernel will say to
/// crooked ones.
pub(super) fn guarded(start: usize, length: usize) -> Option<AddressRange> {
    let end = untagged(start).checked_add(length)?.checked_next_multiple_of(LARGEST_PAGE)?;
    AddressRange::between(page_of(start), end).filter(|_| length != 0)
}

/// Memory that leaves its protection key as it is.
pub(super) const NO_KEY: c_int = -1;

/// The addresses of kept registrations that `mprotect` or `pkey_mprotect` takes rights from, which these may need.
fn revoked(start: usize, length: usize, rights: c_int, key: c_int) -> Option<AddressRange> {
    if takes_rights(rights, key) { aside::kept(guarded(start, length)?) } else { None }
}

/// What a key allows, each thread says for itself, so any key may take rights; the first is all memory's.
fn takes_rights(rights: c_int, key: c_int) -> bool {
    const ALL: c_int = libc::PROT_READ | libc::PROT_WRITE;
    rights & ALL != ALL || !matches!(key, NO_KEY | 0)
}

/// The addresses that `process_madvise` takes pages from. They stand in memory that may be
/// anything, or change before the kernel reads it, and no program is known to do this often.
pub(super) const GUARDED_SOMEWHERE: AddressRange = AddressRange::EVERYTHING;

/// The addresses that `shmat` maps a segment over. How long that is, the kernel alone knows for
/// certain; a program that uses this loses what is cached above.
pub(super) fn attached_over(start: usize) -> AddressRange {
    let above = AddressRange::between(page_of(start), AddressRange::EVERYTHING.end());
    above.unwrap_or(AddressRange::EVERYTHING)
}

/// What a system call changes that must be told, by its number and arguments.
pub(super) fn change_of(number: c_long, [a, b, c, d, _]: [usize; 5]) -> Option<AddressRange> {
    // The kernel takes the number and such arguments as 32 bits.
    let word = |argument: usize| argument as c_int;
    match c_long::from(number as c_int) {
        libc::SYS_madvise if word(c) == GUARD_INSTALL => guarded(a, b),
        libc::SYS_process_madvise if word(d) == GUARD_INSTALL => Some(GUARDED_SOMEWHERE),
        libc::SYS_shmat if word(c) & libc::SHM_REMAP != 0 => Some(attached_over(b)),
        libc::SYS_mprotect => revoked(a, b, word(c), NO_KEY),
        libc::SYS_pkey_mprotect => revoked(a, b, word(c), word(d)),
        _ => None,
    }
}

/// Runs `change` between the marks of its beginning and its end. The error number is left as it was.
pub(super) fn told<T>(range: Option<AddressRange>, change: impl FnOnce() -> T) -> T {
    let Some(range) = range else { return change() };
    let errno = last_errno();
    let changing = pinfold_process_feed.begin(range);
    let result = change();
    drop(changing);
    pinfold_process_hooks.count();
    set_errno(errno);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_kernel::Errno;

    const PAGE: usize = LARGEST_PAGE;

    #[test]
    fn a_guard_s_range_holds_every_byte_that_the_kernel_may_take() {
        for (start, length) in [(PAGE, PAGE), (3 * PAGE, 1), (PAGE + 1, 2 * PAGE), (1, PAGE)] {
            let range = guarded(start, length).unwrap();
            assert!(range.start() <= start && range.end() >= start + length, "{range:?}");
        }
        assert_eq!(guarded(PAGE, PAGE), AddressRange::between(PAGE, 2 * PAGE), "and no more");
        assert_eq!(guarded(PAGE, 0), None);
        assert_eq!(guarded(PAGE, usize::MAX), None, "the kernel refuses what wraps");
        let tagged = guarded((0x7f << 57) | (2 * PAGE), PAGE).unwrap();
        assert!(tagged.start() <= 2 * PAGE && tagged.end() >= 3 * PAGE, "{tagged:?}");
    }

    #[test]
    fn a_segment_of_unknown_length_reaches_to_the_end() {
        let over = attached_over(5 * PAGE + 7);
        assert_eq!((over.start(), over.end()), (5 * PAGE, AddressRange::EVERYTHING.end()));
        assert_eq!(attached_over(0), AddressRange::EVERYTHING);
    }

    #[test]
    fn only_the_changes_that_no_monitor_reports_are_reported() {
        let madvise =
            |advice: c_int| change_of(libc::SYS_madvise, [PAGE, PAGE, advice as usize, 0, 0]);
        assert!(madvise(GUARD_INSTALL).is_some());
        for advice in [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_HUGEPAGE, 103, -1] {
            assert_eq!(madvise(advice), None);
        }
        let shmat = |flags: c_int| change_of(libc::SYS_shmat, [0, PAGE, flags as usize, 0, 0]);
        assert!(shmat(libc::SHM_REMAP | libc::SHM_RDONLY).is_some());
        assert_eq!(shmat(libc::SHM_RND), None);
        let of_process = [0, 0, 0, GUARD_INSTALL as usize, 0];
        assert_eq!(change_of(libc::SYS_process_madvise, of_process), Some(GUARDED_SOMEWHERE));
        assert_eq!(change_of(libc::SYS_munmap, [PAGE, PAGE, GUARD_INSTALL as usize, 0, 0]), None);
        let high_bits = 1 << 32 | libc::SYS_madvise;
        assert!(change_of(high_bits, [PAGE, PAGE, GUARD_INSTALL as usize, 0, 0]).is_some());
    }

    #[test]
    fn rights_are_taken_by_what_lacks_one_and_by_keys() {
        let all = libc::PROT_READ | libc::PROT_WRITE;
        for key in [NO_KEY, 0] {
            assert!(!takes_rights(all, key) && !takes_rights(all | libc::PROT_EXEC, key));
            assert!(takes_rights(libc::PROT_NONE, key) && takes_rights(libc::PROT_READ, key));
        }
        assert!(takes_rights(all, 1));
    }

    #[test]
    fn the_error_number_survives_the_marks() {
        set_errno(Errno(libc::EXDEV));
        let result = told(guarded(PAGE, PAGE), || {
            set_errno(Errno(libc::EPERM));
            7
        });
        assert_eq!((result, last_errno()), (7, Errno(libc::EXDEV)));
    }
}
