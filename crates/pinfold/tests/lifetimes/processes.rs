//! Children of every kind, what they may do, and how they end.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to make processes that share this or that with their parent, to hold their
//! threads, and for calls that change what this process may do. A child leaves by `_exit`; one that shares memory makes
//! system calls only.

#![allow(unsafe_code)]

use crate::support::wait_for;
use std::os::raw::{c_int, c_long, c_void};

/// A child that shares what `flags` say, but not the memory: runs `work` and is waited for.
pub(crate) fn cloned(flags: c_int, work: impl FnOnce()) -> c_int {
    // SAFETY: without CLONE_VM the child has a copy of everything, as after fork.
    unsafe {
        let child = libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0);
        if child == 0 {
            libc::alarm(300);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            libc::_exit(if outcome.is_ok() { 0 } else { 101 });
        }
        wait_for(c_int::try_from(child).unwrap())
    }
}

/// Makes system calls in a child that shares the memory and what `flags` say besides.
pub(crate) fn sharing_memory(flags: c_int, calls: &[Call]) -> c_int {
    let mut stack = vec![0_u8; 64 << 10];
    let mut arguments = calls;
    // SAFETY: the child has a stack of its own, and is waited for before that goes away.
    unsafe {
        let top = stack.as_mut_ptr().add(stack.len()).map_addr(|top| top & !15);
        let flags = flags | libc::CLONE_VM | libc::SIGCHLD;
        let child = libc::clone(run_calls, top.cast(), flags, (&raw mut arguments).cast());
        assert!(child > 0, "{}", std::io::Error::last_os_error());
        wait_for(child)
    }
}

/// A system call and its arguments.
pub(crate) type Call = (c_long, [usize; 6]);

extern "C" fn run_calls(calls: *mut c_void) -> c_int {
    // SAFETY: `sharing_memory` passes a slice that outlives the child. Nothing here touches
    // thread-local storage but the error number, which the waiting parent does not read.
    let calls = unsafe { &*calls.cast::<&[Call]>() };
    for &(number, [a, b, c, d, e, f]) in *calls {
        // SAFETY: the test's own calls.
        if unsafe { libc::syscall(number, a, b, c, d, e, f) } < 0 {
            return 1;
        }
    }
    0
}

/// Runs `body` when this process exits in the way that runs such functions.
pub(crate) fn at_exit(body: extern "C" fn()) {
    // SAFETY: the function lives as long as the process.
    assert_eq!(unsafe { libc::atexit(body) }, 0);
}

unsafe extern "C" {
    fn at_quick_exit(body: extern "C" fn()) -> c_int;
    fn quick_exit(status: c_int) -> !;
}

/// As [`at_exit`], for [`exit_quickly`].
pub(crate) fn at_exit_quickly(body: extern "C" fn()) {
    // SAFETY: as above.
    assert_eq!(unsafe { at_quick_exit(body) }, 0);
}

pub(crate) fn exit_quickly(status: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { quick_exit(status) }
}

pub(crate) fn exit(status: c_int) -> ! {
    // SAFETY: ends the process; the tests' other threads use nothing that is torn down.
    unsafe { libc::exit(status) }
}

pub(crate) fn exit_at_once(status: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(status) }
}

pub(crate) fn signal(process: c_int, signal: c_int) {
    // SAFETY: a child of this test that has not been waited for.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

/// Replaces this program by `/bin/sh -c SCRIPT`, or by one that does not exist.
pub(crate) fn execute(path: &std::ffi::CStr, script: &std::ffi::CStr) {
    let arguments = [path.as_ptr(), c"-c".as_ptr(), script.as_ptr(), std::ptr::null()];
    // SAFETY: the strings and their list end as they must.
    unsafe { libc::execv(path.as_ptr(), arguments.as_ptr()) };
}

pub(crate) fn new_session() {
    // SAFETY: no pointer.
    assert!(unsafe { libc::setsid() } > 0);
}

pub(crate) fn duplicate_to(from: c_int, to: c_int) {
    // SAFETY: the number is replaced on purpose.
    assert_eq!(unsafe { libc::dup2(from, to) }, to);
}

pub(crate) fn write_byte(to: c_int, byte: u8) {
    // SAFETY: one byte of our own.
    assert_eq!(unsafe { libc::write(to, (&raw const byte).cast(), 1) }, 1);
}

/// The next byte, or `None` at the end.
pub(crate) fn read_byte(from: c_int) -> Option<u8> {
    let mut byte = 0_u8;
    // SAFETY: one byte of our own.
    (unsafe { libc::read(from, (&raw mut byte).cast(), 1) } == 1).then_some(byte)
}

pub(crate) fn exit_code(status: c_int) -> Option<c_int> {
    libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
}

pub(crate) fn killed_by(status: c_int) -> Option<c_int> {
    libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
}

/// Stops a thread of a child's, as a debugger does.
pub(crate) fn hold(thread: c_int) {
    trace(libc::PTRACE_SEIZE, thread);
    trace(libc::PTRACE_INTERRUPT, thread);
    let mut status = 0;
    // SAFETY: a thread that we trace.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::WUNTRACED | libc::__WALL) };
    assert!(waited == thread && libc::WIFSTOPPED(status), "{status:#x}");
}

/// Ends [`hold`].
pub(crate) fn let_go(thread: c_int) {
    trace(libc::PTRACE_DETACH, thread);
}

fn trace(request: libc::c_uint, thread: c_int) {
    // SAFETY: requests that pass nothing.
    let done = unsafe { libc::ptrace(request, thread, 0, 0) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// Makes `user` the effective one.
pub(crate) fn act_as(user: libc::uid_t) {
    // SAFETY: the C library changes every thread of the process, the library's own included.
    assert_eq!(unsafe { libc::seteuid(user) }, 0);
}

/// Makes `user` the only one, and its group as well.
pub(crate) fn give_up_root(user: libc::uid_t) {
    // SAFETY: as above.
    unsafe {
        assert_eq!(libc::setresgid(user, user, user), 0);
        assert_eq!(libc::setresuid(user, user, user), 0);
    }
}

/// Moves this process, or its next child, to name spaces of their own. Whether it may.
pub(crate) fn enter_name_spaces() -> bool {
    let spaces = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWPID;
    // SAFETY: no pointer; no memory depends on where a process is.
    unsafe { libc::unshare(spaces | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS) == 0 }
}

/// From now on the kernel answers these calls with `errno`, on every thread.
pub(crate) fn refuse(calls: &[c_long], errno: c_int) {
    assert!(errno > 0, "a call that is refused has not succeeded");
    let statement = |code: u32, k: u32, jt: u8| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt,
        jf: 0,
        k,
    };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (index, &call) in calls.iter().enumerate() {
        let to_refusal = u8::try_from(calls.len() - index).unwrap();
        let is_this = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        filter.push(statement(is_this, u32::try_from(call).unwrap(), to_refusal));
    }
    let answer = libc::BPF_RET | libc::BPF_K;
    filter.push(statement(answer, libc::SECCOMP_RET_ALLOW, 0));
    filter.push(statement(answer, libc::SECCOMP_RET_ERRNO | errno.unsigned_abs(), 0));
    let len = u16::try_from(filter.len()).unwrap();
    let program = libc::sock_fprog { len, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its statements are read during the calls.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let all_threads = libc::SECCOMP_FILTER_FLAG_TSYNC;
        let set = libc::SECCOMP_SET_MODE_FILTER;
        let done = libc::syscall(libc::SYS_seccomp, set, all_threads, &raw const program);
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }
}
