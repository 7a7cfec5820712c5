//! The hooks themselves.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to export functions under the C library's names, with its types,
//! that do what the C library's do: the caller's arguments go to the kernel as they are, so the
//! caller's promises to the C library are those that the kernel needs.
//!
//! `syscall` is written in instructions, because it hands on arguments of which it is unknown how
//! many there are, and touches no stack, because there are callers that rely on that (a `clone`
//! whose child returns on another stack). It says so to unwinders, which a thread's cancellation
//! and profilers send through it.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // registers have 64 bits, see `lib.rs`

use super::aside::{self, When};
use super::told::{self, GUARD_INSTALL, NO_KEY, guarded, told};
use super::{self_test, userfaultfd};
use crate::apart::is_ours;
use crate::sandbox;
use libc::{c_int, c_long, c_uint, c_ulong, c_void, iovec, size_t, ssize_t};
use pinfold::AddressRange;
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::raw::{RawAnswer, system_call};

/// An argument that has 32 bits, as the C library hands it to the kernel.
fn widened(argument: c_int) -> usize {
    argument as isize as usize
}

#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(start: *mut c_void, length: size_t, advice: c_int) -> c_int {
    let arguments = [start.addr(), length, widened(advice), 0, 0];
    let answer = if advice == GUARD_INSTALL {
        // SAFETY: see the file's header.
        unsafe { watched_call(libc::SYS_madvise, arguments) }
    } else {
        // SAFETY: as above.
        unsafe { system_call(libc::SYS_madvise, arguments) }
    };
    answer.as_libc() as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn process_madvise(
    process: c_int,
    parts: *const iovec,
    count: size_t,
    advice: c_int,
    flags: c_uint,
) -> ssize_t {
    let arguments = [widened(process), parts.addr(), count, widened(advice), flags as usize];
    // SAFETY: see the file's header.
    unsafe { watched_call(libc::SYS_process_madvise, arguments) }.as_libc()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn shmat(segment: c_int, start: *const c_void, flags: c_int) -> *mut c_void {
    let arguments = [widened(segment), start.addr(), widened(flags), 0, 0];
    // SAFETY: see the file's header.
    let answer = unsafe { watched_call(libc::SYS_shmat, arguments) }.as_libc();
    std::ptr::with_exposed_provenance_mut(answer.cast_unsigned())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mprotect(start: *mut c_void, length: size_t, rights: c_int) -> c_int {
    let arguments = [start.addr(), length, widened(rights), 0, 0];
    // SAFETY: see the file's header.
    unsafe { watched_call(libc::SYS_mprotect, arguments) }.as_libc() as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pkey_mprotect(
    start: *mut c_void,
    length: size_t,
    rights: c_int,
    key: c_int,
) -> c_int {
    let arguments = [start.addr(), length, widened(rights), widened(key), 0];
    // As the C library does it, because a kernel without keys has the one call only.
    let number = if key == NO_KEY { libc::SYS_mprotect } else { libc::SYS_pkey_mprotect };
    // SAFETY: see the file's header.
    unsafe { watched_call(number, arguments) }.as_libc() as c_int
}

/// `void *mremap(void *, size_t, size_t, int, ...)`: the place is passed with the flags that name one.
#[unsafe(no_mangle)]
unsafe extern "C" fn mremap(
    from: *mut c_void,
    length: size_t,
    new_length: size_t,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let names_place = flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) != 0;
    let to = if names_place { to.addr() } else { 0 };
    let arguments = [from.addr(), length, new_length, widened(flags), to];
    // SAFETY: see the file's header.
    let answer = unsafe { moved_aside(arguments) }.as_libc();
    std::ptr::with_exposed_provenance_mut(answer.cast_unsigned())
}

/// `int ioctl(int, unsigned long, ...)`: what is not passed is not looked at.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(descriptor: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let arguments = [widened(descriptor), request as usize, argument.addr(), 0, 0];
    // SAFETY: see the file's header.
    unsafe { userfaultfd::ioctl(arguments) }.as_libc() as c_int
}

/// `int prctl(int, ...)`: as `ioctl`.
#[unsafe(no_mangle)]
unsafe extern "C" fn prctl(option: c_int, b: usize, c: usize, d: usize, e: usize) -> c_int {
    // SAFETY: see the file's header.
    unsafe { restricting_call(libc::SYS_prctl, [widened(option), b, c, d, e]) }.as_libc() as c_int
}

/// Makes the call, noted if it restricts the system calls that may be made.
unsafe fn restricting_call(number: c_long, arguments: [usize; 5]) -> RawAnswer {
    let word = arguments[0] as c_int;
    let restricts = match number {
        libc::SYS_prctl => word == libc::PR_SET_SECCOMP,
        // Of `seccomp`: the two operations that set something.
        _ => [libc::SECCOMP_SET_MODE_STRICT, libc::SECCOMP_SET_MODE_FILTER]
            .contains(&(word as c_uint)),
    };
    // SAFETY: see the file's header.
    let call = || unsafe { system_call(number, arguments) };
    let has_failed = |answer: &RawAnswer| has_refused_to_restrict(number, arguments, *answer);
    if restricts { sandbox::restricts(call, has_failed) } else { call() }
}

/// Whether the kernel has refused to restrict anything: by an error, or by the number of a thread that has filters which the
/// calling one lacks, where a filter was to be all threads'. What is a descriptor's number otherwise needs a flag more.
fn has_refused_to_restrict(number: c_long, arguments: [usize; 5], answer: RawAnswer) -> bool {
    let flags = arguments[1] as c_ulong;
    let is_of_all = number == libc::SYS_seccomp && flags & libc::SECCOMP_FILTER_FLAG_TSYNC != 0;
    let names_thread = is_of_all && flags & libc::SECCOMP_FILTER_FLAG_NEW_LISTENER == 0;
    answer.has_failed() || names_thread && answer.0 > 0
}

/// Makes the call, marked if it changes what must be told.
unsafe fn watched_call(number: c_long, arguments: [usize; 5]) -> RawAnswer {
    let change = told::change_of(number, arguments);
    if change.is_some() && self_test::is_a_trial(number, arguments) {
        return RawAnswer(-(libc::EINVAL as isize));
    }
    // SAFETY: see the file's header.
    told(change, || unsafe { system_call(number, arguments) })
}

/// One of the calls that `syscall` looks at, by its number.
unsafe extern "C" fn numbered(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
) -> c_long {
    let arguments = [a, b, c, d, e];
    let answer = match number as c_int as c_long {
        // SAFETY: see the file's header.
        libc::SYS_ioctl => unsafe { userfaultfd::ioctl(arguments) },
        // SAFETY: as above.
        libc::SYS_mremap => unsafe { moved_aside(arguments) },
        // SAFETY: as above.
        number @ (libc::SYS_prctl | libc::SYS_seccomp) => unsafe {
            restricting_call(number, arguments)
        },
        // SAFETY: as above.
        number => unsafe { watched_call(number, arguments) },
    };
    answer.as_libc() as c_long
}

/// What the kernel refused, in the C library's way.
extern "C" fn refused(answer: isize) -> c_long {
    RawAnswer(answer).as_libc() as c_long
}

/// `long syscall(long number, ...)`: shifts the arguments by one, as the C library's does.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(_number: c_long) -> c_long {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "endbr64",
        "cmp edi, {madvise}",
        "je 2f",
        "cmp edi, {shmat}",
        "je 2f",
        "cmp edi, {process_madvise}",
        "je 2f",
        "cmp edi, {ioctl}",
        "je 2f",
        "cmp edi, {mprotect}",
        "je 2f",
        "cmp edi, {pkey_mprotect}",
        "je 2f",
        "cmp edi, {mremap}",
        "je 2f",
        "cmp edi, {prctl}",
        "je 2f",
        "cmp edi, {seccomp}",
        "je 2f",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 3f",
        "ret",
        "2:",
        "jmp {numbered}",
        "3:",
        "mov rdi, rax",
        "jmp {refused}",
        ".cfi_endproc",
        madvise = const libc::SYS_madvise,
        shmat = const libc::SYS_shmat,
        process_madvise = const libc::SYS_process_madvise,
        ioctl = const libc::SYS_ioctl,
        mprotect = const libc::SYS_mprotect,
        pkey_mprotect = const libc::SYS_pkey_mprotect,
        mremap = const libc::SYS_mremap,
        prctl = const libc::SYS_prctl,
        seccomp = const libc::SYS_seccomp,
        numbered = sym numbered,
        refused = sym refused,
    )
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(_number: c_long) -> c_long {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "hint #34", // bti c
        "cmp w0, #{madvise}",
        "b.eq 2f",
        "cmp w0, #{shmat}",
        "b.eq 2f",
        "cmp w0, #{process_madvise}",
        "b.eq 2f",
        "cmp w0, #{ioctl}",
        "b.eq 2f",
        "cmp w0, #{mprotect}",
        "b.eq 2f",
        "cmp w0, #{pkey_mprotect}",
        "b.eq 2f",
        "cmp w0, #{mremap}",
        "b.eq 2f",
        "cmp w0, #{prctl}",
        "b.eq 2f",
        "cmp w0, #{seccomp}",
        "b.eq 2f",
        "uxtw x8, w0",
        "mov x0, x1",
        "mov x1, x2",
        "mov x2, x3",
        "mov x3, x4",
        "mov x4, x5",
        "mov x5, x6",
        "svc #0",
        "cmn x0, #4095",
        "b.cs 3f",
        "ret",
        "2:",
        "b {numbered}",
        "3:",
        "b {refused}",
        ".cfi_endproc",
        madvise = const libc::SYS_madvise,
        shmat = const libc::SYS_shmat,
        process_madvise = const libc::SYS_process_madvise,
        ioctl = const libc::SYS_ioctl,
        mprotect = const libc::SYS_mprotect,
        pkey_mprotect = const libc::SYS_pkey_mprotect,
        mremap = const libc::SYS_mremap,
        prctl = const libc::SYS_prctl,
        seccomp = const libc::SYS_seccomp,
        numbered = sym numbered,
        refused = sym refused,
    )
}

/// Makes the program's `mremap`: a move of several mappings at once, or of one that is two because a part of it is watched.
///
/// The kernel refuses (`EFAULT`) to move a range that is more than one mapping, until Linux 6.17 always, since then where
/// a userfaultfd watches one of them. So our watch ends: after the refusal, because the mappings become one then, unless
/// a part was first used beside a watched one; or before the call where the kernel moves several, because it moves those
/// before the watched one and refuses then. No thread has the range watched again before the program's call has returned.
/// What was registered in the range is told to change in any case.
///
/// The program's allocator may make this call with its lock held: nothing here asks it for memory ([`is_ours`]).
///
/// # Safety
///
/// As `mremap` demands.
unsafe fn moved_aside(arguments: [usize; 5]) -> RawAnswer {
    // SAFETY: the caller's promise.
    let call = || unsafe { system_call(libc::SYS_mremap, arguments) };
    let Some(range) = moved(arguments) else { return call() };
    if is_ours() {
        return call();
    }
    // Once: as the call is made, no other thread has the range watched again.
    let call_aside = |when| aside::step_aside_for(range, when, call);
    if is_of_several(arguments) {
        return call_aside(When::Ahead).unwrap_or_else(call);
    }
    let answer = call();
    let is_refused = answer.is(libc::EFAULT);
    is_refused.then(|| call_aside(When::Refused)).flatten().unwrap_or(answer)
}

/// What leaves its place, if something may be watched there.
fn moved([start, length, ..]: [usize; 5]) -> Option<AddressRange> {
    guarded(start, length).filter(|_| aside::is_anything_kept())
}

/// Whether the kernel may move several mappings by such a call, whose lengths it rounds to whole pages.
fn is_of_several([_, from, to, flags, _]: [usize; 5]) -> bool {
    let pages = |bytes: usize| bytes.div_ceil(page_bytes());
    pages(from) == pages(to) && flags as c_int & libc::MREMAP_FIXED != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_of_all_threads_is_refused_by_the_number_of_one() {
        const ALL: usize = libc::SECCOMP_FILTER_FLAG_TSYNC as usize;
        const LISTENER: usize = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER as usize;
        let is_refused = |number, flags, answer| {
            let operation = libc::SECCOMP_SET_MODE_FILTER as usize;
            has_refused_to_restrict(number, [operation, flags, 0, 0, 0], RawAnswer(answer))
        };
        let refused = [(ALL, 77), (ALL, -1), (0, -1), (LISTENER, -1)];
        assert!(refused.into_iter().all(|(flags, answer)| is_refused(
            libc::SYS_seccomp,
            flags,
            answer
        )));
        let set = [(ALL, 0), (0, 0), (LISTENER, 3), (ALL | LISTENER, 3)];
        assert!(!set.into_iter().any(|(flags, answer)| is_refused(
            libc::SYS_seccomp,
            flags,
            answer
        )));
        assert!(is_refused(libc::SYS_prctl, 2, -1) && !is_refused(libc::SYS_prctl, 2, 0));
    }

    #[test]
    fn a_move_of_nothing_is_the_kernel_s_alone() {
        assert_eq!(moved([0x1000, 0, 0x1000, 0, 0]), None, "no bytes");
        // SAFETY: nothing is mapped there.
        let answer =
            unsafe { moved_aside([0x1000, 0x1000, 0x1000, libc::MREMAP_MAYMOVE as usize, 0]) };
        assert!(answer.is(libc::EFAULT));
    }

    #[test]
    fn several_are_moved_by_a_call_that_names_the_place_and_keeps_the_length() {
        let fixed = (libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE) as usize;
        assert!(is_of_several([0, 8, 8, fixed, 0]));
        assert!(is_of_several([0, 8, 9, fixed, 0]));
        assert!(!is_of_several([0, 8, page_bytes() + 1, fixed, 0]));
        assert!(!is_of_several([0, 8, 8, libc::MREMAP_MAYMOVE as usize, 0]));
    }
}
