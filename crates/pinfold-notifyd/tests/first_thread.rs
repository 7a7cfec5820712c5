//! A client whose first thread has ended, as one whose `main` leaves by `pthread_exit`: the process goes on, and its
//! other threads ask.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to end one thread of a process that was started for that.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)] // tests may fail loudly

mod support;

use pinfold::monitor::notify;
use pinfold_notifyd::ClientLimits;
use std::fs;
use std::path::PathBuf;
use support::{Served, eventually, report, reported};

/// Of a user other than root, if it can be had: what has no memory shows as root's.
const USER: u32 = 1204;

/// The first thread ends, and no other.
fn end_first_thread() {
    extern "C" fn leave(_: libc::c_int) {
        // SAFETY: this process does not end before another process kills it, and its first thread holds no lock:
        // it waits for the test.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let process = std::process::id();
    // SAFETY: the handler makes one system call; the signal goes to this process's first thread.
    unsafe {
        libc::signal(libc::SIGUSR1, leave as *const () as libc::sighandler_t);
        libc::syscall(libc::SYS_tgkill, process, process, libc::SIGUSR1);
    }
    let stat = || fs::read_to_string("/proc/self/stat").unwrap();
    eventually("the first thread has ended", || stat().contains(") Z "));
}

fn be_client(dumpable: bool) {
    end_first_thread();
    // SAFETY: the call takes numbers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, i32::from(dumpable)) };
    let path = PathBuf::from(std::env::var_os("PINFOLD_TEST_PATH").unwrap());
    let asked = notify::request(&path, notify::PATIENCE);
    let made_for = asked.map(|(view, _)| support::made_for(&view));
    report(&format!("{made_for:?}"));
    support::wait_for_parent();
}

/// Not a test by itself: what other processes of these tests do.
#[test]
fn in_another_process() {
    match support::role().as_deref() {
        Some("dumpable") => be_client(true),
        Some("not dumpable") => be_client(false),
        _ => {}
    }
}

/// What such a client, and its number, got from a helper.
fn asked(role: &str) -> (String, u32) {
    let served = Served::new(ClientLimits::default());
    let user = support::is_root().then_some(USER);
    let mut command = support::other("in_another_process", role, user);
    let mut client = command.env("PINFOLD_TEST_PATH", &served.path).spawn().unwrap();
    let answer = reported(&mut client).unwrap();
    client.kill().unwrap();
    client.wait().unwrap();
    (answer, client.id())
}

#[test]
fn a_process_whose_first_thread_has_ended_gets_its_view() {
    let (answer, number) = asked("dumpable");
    assert_eq!(answer, format!("Ok({number})"));
}

#[test]
fn and_none_if_it_is_not_dumpable() {
    let (answer, _) = asked("not dumpable");
    assert_eq!(answer, "Err(Refused(NotDumpable))");
}
