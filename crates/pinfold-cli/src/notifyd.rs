//! `pinfold notifyd`: the helper that gives unprivileged programs their own mapping changes.
//!
//! A service: it reports nothing on standard output, and few lines for the operator on standard
//! error. Exit status 0 when it was asked to end, 1 when it could not go on, 2 when it cannot listen
//! where it should, 75 when the programs cannot be loaded for now, 77 when this machine or this user may not load them.

use crate::output::{Failure, Output, Verdict};
use pinfold::monitor::notify;
use pinfold_ebpf::{Instrument, Programs, ProgramsError};
use pinfold_notifyd::{
    ClientLimits, ListenError, Listener, MOST_VIEWS, Server, StopSignals, make_room,
    tell_service_manager,
};
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

/// Options of `pinfold notifyd`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// Listen here, unless the service manager passes a socket [default: what PINFOLD_NOTIFYD says, or
    /// /run/pinfold/notifyd.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Views that all users but root hold together (130 KiB of kernel memory each)
    #[arg(long, value_name = "N", default_value_t = ClientLimits::default().views, value_parser = count)]
    max_views: usize,
    /// Views that one user's processes hold
    #[arg(long, value_name = "N", default_value_t = ClientLimits::default().views_per_user, value_parser = count)]
    max_views_per_user: usize,
    /// Also check that the programs tell of every pinned page that is parted from its address, and say at the end
    /// whether they did: exit status 1 if not
    #[arg(long, hide = true)]
    instrument: bool,
}

/// As many views as make sense.
fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=MOST_VIEWS) => Ok(number),
        _ => Err(format!("a number from 1 to {MOST_VIEWS} is wanted")),
    }
}

/// Serves until a signal asks it to end.
pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<Verdict, Failure> {
    let stop = StopSignals::new().map_err(call_failed("signalfd"))?;
    let wanted = arguments.limits();
    let limits = make_room(wanted).map_err(call_failed("setrlimit"))?;
    if limits != wanted {
        output.note(format_args!(
            "{} views at most, {} for each user: for more raise the hard limit on descriptors \
             (LimitNOFILE=) to {}",
            limits.views,
            limits.views_per_user,
            wanted.descriptors()
        ));
    }
    let programs = Programs::load().map_err(|error| not_loaded(&error))?;
    let instrument = arguments.instrument.then(|| programs.instrument()).transpose();
    let instrument = instrument.map_err(Failure::unavailable)?;
    let listener = arguments.listener(output).map_err(Failure::usage)?;
    let log = Output::new(false);
    let mut server = Server::new(listener, programs, limits, move |line| log.note(line))
        .map_err(Failure::unavailable)?;
    if let Err(error) = tell_service_manager() {
        output.note(format_args!("the service manager was not told: {error}"));
    }
    let verdict = conclude(&server.run(stop.as_fd()), output);
    match instrument {
        Some(instrument) if !tells_all(&instrument, output)? => Ok(Verdict::of(false)),
        _ => Ok(verdict),
    }
}

/// Whether pinned pages were parted from their addresses, all of them in changes that were told.
fn tells_all(instrument: &Instrument, output: &Output) -> Result<bool, Failure> {
    let seen = instrument.partings().map_err(call_failed("reading what the instrument saw"))?;
    output.note(format_args!(
        "pinned pages parted from their addresses: {} in told changes, {} while everything was pending, {} in none; \
         the kernel skipped {} programs",
        seen.told, seen.crowded, seen.untold, seen.skipped
    ));
    seen.ways.iter().for_each(|way| {
        let judgement = match way.is_replaced() {
            true => "the page stays",
            false if seen.holes().any(|hole| std::ptr::eq(hole, way)) => "UNTOLD",
            false => "told at its end, where the beginning was skipped",
        };
        output.note(format_args!("{judgement}: {way}"));
    });
    Ok(seen.told > 0 && seen.is_complete() && seen.holes().next().is_none())
}

fn conclude(end: &io::Result<()>, output: &Output) -> Verdict {
    match end {
        Ok(()) => output.note("asked to end; programs that have a view keep it"),
        Err(error) => output.note(format_args!("cannot go on: {error}")),
    }
    Verdict::of(end.is_ok())
}

fn not_loaded(error: &ProgramsError) -> Failure {
    if error.passes_with_time() { Failure::for_now(error) } else { Failure::unavailable(error) }
}

fn call_failed(operation: &'static str) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::unavailable(format_args!("{operation} failed: {error}"))
}

impl Arguments {
    fn limits(&self) -> ClientLimits {
        ClientLimits {
            views: self.max_views,
            views_per_user: self.max_views_per_user,
            ..ClientLimits::default()
        }
    }

    fn listener(&self, output: &Output) -> Result<Listener, ListenError> {
        let listening = |place: &dyn fmt::Display| {
            output.note(format_args!("the programs are loaded; listening at {place}"));
        };
        if let Some(passed) = Listener::passed()? {
            listening(&"the service manager's socket");
            return Ok(passed);
        }
        let path = self.socket.clone().unwrap_or_else(notify::path);
        let listener = Listener::at(&path)?;
        listening(&path.display());
        Ok(listener)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exit statuses at which systemd does not start the helper again.
    fn final_statuses() -> Vec<u8> {
        let unit = "../pinfold-notifyd/systemd/pinfold-notifyd.service";
        let unit = std::fs::read_to_string(unit).unwrap();
        let line = unit.lines().find_map(|line| line.strip_prefix("RestartPreventExitStatus="));
        line.unwrap().split(' ').map(|status| status.parse().unwrap()).collect()
    }

    #[test]
    fn systemd_tries_again_where_that_helps_and_nowhere_else() {
        let crowded = ProgramsError::ManyPrograms { function: "unmap_vmas", errno: libc::E2BIG };
        let forbidden = ProgramsError::NotPermitted { errno: libc::EPERM };
        let is_final = |error| final_statuses().contains(&not_loaded(error).exit_status());
        assert!(!is_final(&crowded) && is_final(&forbidden));
    }

    #[test]
    fn counts_that_make_no_sense_are_refused() {
        assert_eq!(count("256"), Ok(256));
        for text in ["0", "-1", "513", "many"] {
            assert!(count(text).is_err(), "{text}");
        }
    }
}
