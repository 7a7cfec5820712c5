//! A stack of our own for what needs more than a caller may have left.
//!
//! A thread may have 16 KiB of stack, and starting a monitor takes more. A thread of ours would do,
//! were it not for callers that hold the dynamic linker's lock (constructors of a library that is
//! being loaded): what starts asks the linker too, and would wait for its own caller. So the calling
//! thread goes on, on other memory. All signals are blocked meanwhile: a handler of the program finds
//! the stack that it knows.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to point the processor's register to it. What runs
//! on it returns before it is unmapped or left to another call, and does not unwind out of it.

#![allow(unsafe_code)]

use crate::heap::secure_room;
use pinfold_kernel::mapping::WalledMapping;
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::signal::SignalsBlocked;
use pinfold_kernel::thread::is_lean;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Whether the calling thread runs code of this library alone, whose calls of the C library no hook is
/// to take for the program's.
///
/// Uses no variable of threads, not on the program's threads either: the first use after the program has loaded many
/// libraries with such variables has the C library call the program's allocator, from which the hooked call may come.
pub(crate) fn is_ours() -> bool {
    // A lean thread is ours.
    is_lean() || StackPlace::all().any(|place| place.holds(stack_pointer()))
}

/// Runs `ours` on a stack of 256 KiB of its own. `None` if it panicked, or without memory for a stack.
///
/// Costs two system calls for the signals, three for the stack and a page fault for each page of it that is used.
/// Inside of another `run`, and on a thread of ours, it is a plain call.
pub(crate) fn run<T, F: FnOnce() -> T>(ours: F) -> Option<T> {
    run_on(Stack::new, ours, drop)
}

/// As [`run`], for what is called again and again: leaves the stack, with its pages, to the next call.
pub(crate) fn run_again<T, F: FnOnce() -> T>(ours: F) -> Option<T> {
    run_on(Stack::take, ours, Stack::leave)
}

fn run_on<T, F: FnOnce() -> T>(
    stack: impl FnOnce() -> Option<Stack>,
    ours: F,
    end: impl FnOnce(Stack),
) -> Option<T> {
    if is_ours() {
        return catch_unwind(AssertUnwindSafe(ours)).ok();
    }
    let _blocked = SignalsBlocked::new();
    let stack = stack()?;
    let mut call = Call { ours: Some(ours), result: None };
    // SAFETY: the stack is ours for as long as this function runs, and is mapped; `enter` gets the
    // call that it expects, and does not unwind.
    unsafe { switch(stack.top(), enter::<T, F>, (&raw mut call).cast()) };
    end(stack);
    call.result
}

/// The place of a stack that no call runs on; null where there is none. A forked child has the same one, at the same
/// address, as its own copy, and none if a thread of its parent had taken it.
static SPARE: AtomicPtr<StackPlace> = AtomicPtr::new(ptr::null_mut());

/// A stack, with a page below that nothing may touch, and one above. Of one thread alone.
struct Stack(&'static StackPlace);

impl Stack {
    /// With the pages at its ends.
    const BYTES: usize = 256 << 10;

    /// Without those.
    fn inside() -> usize {
        Self::BYTES - 2 * page_bytes()
    }

    /// The spare one, or a fresh one.
    fn take() -> Option<Self> {
        // Acquire: pairs with `leave`, whose thread ran on it before.
        // SAFETY: null, or a place, which stays; the swap gave its stack to this thread alone.
        let spare = unsafe { SPARE.swap(ptr::null_mut(), Ordering::Acquire).as_ref() };
        spare.map(Self).or_else(Self::new)
    }

    /// Nothing runs on it any more: the next call has it. Unmapped if another thread has left one meanwhile.
    fn leave(self) {
        let ours = ptr::from_ref(self.0).cast_mut();
        // Release: pairs with `take`. Relaxed where there is one: nothing of that is looked at.
        let left =
            SPARE.compare_exchange(ptr::null_mut(), ours, Ordering::Release, Ordering::Relaxed);
        if left.is_ok() {
            std::mem::forget(self);
        }
    }

    /// The first takes none of this library's heap, of which a block takes a chunk of addresses: programs of verbs have one
    /// as they start.
    fn new() -> Option<Self> {
        let memory = WalledMapping::new(Self::inside()).ok()?;
        let place = StackPlace::of(memory.start().as_ptr())?;
        memory.leak();
        Some(Self(place))
    }

    /// Its end, from which it grows down; aligned to a page.
    fn top(&self) -> *mut libc::c_void {
        // Relaxed: this thread has written it, or was given it with the stack.
        self.0.start.load(Ordering::Relaxed).wrapping_add(Self::inside()).cast()
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if let Some(start) = self.0.empty() {
            // SAFETY: leaked by `new`, for as many bytes, and nothing runs there any more.
            unsafe { WalledMapping::unmap_leaked(start, Self::inside()) };
        }
    }
}

/// Where a stack is mapped, by which a thread that runs on it is told from all others.
///
/// The places are a list that grows to the largest number of stacks that there were at the same time, and stays: another
/// thread may be reading it. A forked child has all of its parent's stacks, and no thread of its own where they are.
struct StackPlace {
    /// Its lowest address, null where no stack is.
    start: AtomicPtr<u8>,
    next: Option<&'static Self>,
}

/// The last of the list.
static LAST: StackPlace = StackPlace { start: AtomicPtr::new(ptr::null_mut()), next: None };

/// The first place of the list.
static PLACES: AtomicPtr<StackPlace> = AtomicPtr::new((&raw const LAST).cast_mut());

impl StackPlace {
    /// An empty place, or a new one, for a stack that begins at `start`. `None` without memory for it.
    fn of(start: *mut u8) -> Option<&'static Self> {
        // Relaxed, here and in `empty` and `holds`: the address stands for itself. A thread on a stack has written its place
        // or was given it with the stack. For any other, what a stale address covers is unmapped; its own stack can be
        // mapped there only behind the unmapping, which follows `empty`, and the kernel's lock of all mappings orders them.
        let take = |place: &&Self| {
            let (order, none) = (Ordering::Relaxed, ptr::null_mut());
            place.start.compare_exchange(none, start, order, order).is_ok()
        };
        Self::all().find(take).or_else(|| secure_room().then(|| Self::add(start)))
    }

    fn add(start: *mut u8) -> &'static Self {
        let fresh = Box::leak(Box::new(Self { start: AtomicPtr::new(start), next: None }));
        // Acquire, here and where it fails: as in `all`.
        let mut first = PLACES.load(Ordering::Acquire);
        loop {
            // SAFETY: static, or from a leaked box.
            fresh.next = unsafe { first.as_ref() };
            // Release: pairs with `all`, which reads `next`.
            let (success, failure) = (Ordering::Release, Ordering::Acquire);
            match PLACES.compare_exchange(first, fresh, success, failure) {
                Ok(_) => return fresh,
                Err(now) => first = now,
            }
        }
    }

    fn all() -> impl Iterator<Item = &'static Self> {
        // Acquire: pairs with `add`.
        // SAFETY: static, or from a leaked box that is not changed any more but for its atomic address.
        let first = unsafe { PLACES.load(Ordering::Acquire).as_ref() };
        std::iter::successors(first, |place| place.next)
    }

    fn holds(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::Relaxed).addr();
        start != 0 && address.wrapping_sub(start) < Stack::inside()
    }

    /// Where the stack was.
    fn empty(&self) -> Option<NonNull<u8>> {
        NonNull::new(self.start.swap(ptr::null_mut(), Ordering::Relaxed))
    }
}

/// The register, because a sanitizer may keep a function's variables elsewhere.
#[cfg(target_arch = "x86_64")]
#[inline]
fn stack_pointer() -> usize {
    let here;
    // SAFETY: reads a register.
    unsafe {
        core::arch::asm!("mov {}, rsp", out(reg) here, options(nomem, nostack, preserves_flags));
    }
    here
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
#[inline]
fn stack_pointer() -> usize {
    let here;
    // SAFETY: as on x86-64.
    unsafe {
        core::arch::asm!("mov {}, sp", out(reg) here, options(nomem, nostack, preserves_flags));
    }
    here
}

/// Nothing runs on a stack of ours: `switch` stays on the caller's.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const fn stack_pointer() -> usize {
    0
}

struct Call<T, F> {
    ours: Option<F>,
    result: Option<T>,
}

type Entry = unsafe extern "C" fn(*mut libc::c_void);

/// # Safety
///
/// `call` is a `Call<T, F>` that no other code uses.
unsafe extern "C" fn enter<T, F: FnOnce() -> T>(call: *mut libc::c_void) {
    // SAFETY: the caller's promise.
    let call = unsafe { &mut *call.cast::<Call<T, F>>() };
    if let Some(ours) = call.ours.take() {
        call.result = catch_unwind(AssertUnwindSafe(ours)).ok();
    }
}

/// Calls `entry(call)` with the stack pointer at `top`.
///
/// # Safety
///
/// Below `top`, which is aligned to 16 bytes, is an unused stack; `entry` may be called with
/// `call` and does not unwind.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn switch(top: *mut libc::c_void, entry: Entry, call: *mut libc::c_void) {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "endbr64",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov rsp, rdi",
        "mov rdi, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
    )
}

/// As on x86-64.
///
/// # Safety
///
/// As on x86-64.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn switch(top: *mut libc::c_void, entry: Entry, call: *mut libc::c_void) {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "hint #34", // bti c
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        ".cfi_def_cfa_register x29",
        "mov sp, x0",
        "mov x0, x2",
        "blr x1",
        "mov sp, x29",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa sp, 0",
        "ret",
        ".cfi_endproc",
    )
}

/// Where the instructions are not known, on the caller's stack.
///
/// # Safety
///
/// `entry` may be called with `call`.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn switch(_: *mut libc::c_void, entry: Entry, call: *mut libc::c_void) {
    // SAFETY: the caller's promise.
    unsafe { entry(call) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;
    use std::sync::Barrier;
    use std::thread;

    #[test]
    fn what_runs_is_elsewhere_and_comes_back_with_its_result() {
        let here = 0_u8;
        let distance = |there: &u8| (&raw const here).addr().abs_diff((&raw const *there).addr());
        let (result, apart) = run(|| {
            let there = 0_u8;
            (vec![1, 2, 3], distance(&there))
        })
        .unwrap();
        assert!(run(is_ours) == Some(true) && !is_ours());
        assert_eq!(result, [1, 2, 3]);
        assert!(apart > 65536, "{apart}");
    }

    #[test]
    fn a_thread_is_on_a_stack_of_ours_while_it_runs_there_and_no_other_is() {
        let both = Barrier::new(2);
        let others = || {
            both.wait();
            let are_ours = (is_ours(), run(|| run(is_ours)));
            both.wait();
            are_ours
        };
        thread::scope(|scope| {
            let other = scope.spawn(others);
            let wait_twice = || _ = (both.wait(), both.wait());
            assert_eq!(run(|| (is_ours(), wait_twice(), is_ours())), Some((true, (), true)));
            assert_eq!(other.join().unwrap(), (false, Some(Some(true))));
        });
        assert!(!is_ours());
    }

    #[test]
    fn a_place_holds_its_stack_until_that_is_unmapped() {
        let stack = Stack::new().unwrap();
        let (place, top) = (stack.0, stack.top().addr());
        let start = place.start.load(Ordering::Relaxed).addr();
        let bounds = [start - 1, start, top - 1, top].map(|address| place.holds(address));
        assert_eq!(bounds, [false, true, true, false]);
        assert!(StackPlace::all().any(|of_list| ptr::eq(of_list, place)));
    }

    /// Page faults of the calling thread so far that needed no disk.
    fn faults() -> i64 {
        // SAFETY: the kernel fills it; zeros are a value of it.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: it is there to be filled.
        assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
        usage.ru_minflt
    }

    /// Where other threads take the spare stack a call brings in a fresh one's pages, one at least. Under the address
    /// sanitizer each function's variables stand elsewhere, at a place that the last call did not use: all of these
    /// are brought in before the count begins.
    #[test]
    fn a_call_brings_in_no_page_of_a_stack() {
        const CALLS: i64 = 1000;
        let calls = || (0..CALLS).for_each(|_| _ = run_again(|| black_box([7_u8; 16 << 10])));
        calls();
        let before = faults();
        calls();
        assert!(faults() - before < CALLS, "{}", faults() - before);
    }

    #[test]
    fn a_panic_stays_there() {
        assert_eq!(run(|| -> u8 { panic!("on purpose") }), None);
        assert_eq!(run(|| run(|| 7)), Some(Some(7)));
    }

    /// On a thread with the smallest stack there is.
    #[test]
    fn a_small_stack_is_enough_for_what_needs_more() {
        let body =
            || run(|| black_box([7_u8; 100 << 10]).iter().map(|&it| u64::from(it)).sum::<u64>());
        let thread = thread::Builder::new().stack_size(16 << 10).spawn(body).unwrap();
        assert_eq!(thread.join().unwrap(), Some(7 * (100 << 10)));
    }
}
