//! `pinfold notifyd`: the helper that gives unprivileged programs their own mapping changes.
//!
//! A service: it reports nothing on standard output, and few lines for the operator on standard
//! error. Exit status 0 when it was asked to end, 1 when it could not go on, 2 when it cannot listen
//! where it should, 77 when this machine or this user may not load the programs.

use crate::output::{Failure, Output, Verdict};
use pinfold::monitor::notify;
use pinfold_ebpf::Programs;
use pinfold_notifyd::{
    Limits, ListenError, Listener, MOST_VIEWS, Server, StopSignals, make_room, tell_service_manager,
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
    #[arg(long, value_name = "N", default_value_t = Limits::default().views, value_parser = count)]
    max_views: usize,
    /// Views that one user's processes hold
    #[arg(long, value_name = "N", default_value_t = Limits::default().views_per_user, value_parser = count)]
    max_views_per_user: usize,
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
    let programs = Programs::load().map_err(Failure::unavailable)?;
    let listener = arguments.listener(output).map_err(Failure::usage)?;
    let log = Output::new(false);
    let mut server = Server::new(listener, programs, limits, move |line| log.note(line))
        .map_err(Failure::unavailable)?;
    if let Err(error) = tell_service_manager() {
        output.note(format_args!("the service manager was not told: {error}"));
    }
    Ok(conclude(&server.run(stop.as_fd()), output))
}

fn conclude(end: &io::Result<()>, output: &Output) -> Verdict {
    match end {
        Ok(()) => output.note("asked to end; programs that have a view keep it"),
        Err(error) => output.note(format_args!("cannot go on: {error}")),
    }
    Verdict::of(end.is_ok())
}

fn call_failed(operation: &'static str) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::unavailable(format_args!("{operation} failed: {error}"))
}

impl Arguments {
    fn limits(&self) -> Limits {
        Limits {
            views: self.max_views,
            views_per_user: self.max_views_per_user,
            ..Limits::default()
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

    #[test]
    fn counts_that_make_no_sense_are_refused() {
        assert_eq!(count("256"), Ok(256));
        for text in ["0", "-1", "513", "many"] {
            assert!(count(text).is_err(), "{text}");
        }
    }
}
