//! A program run to its end as if in our place: signals reach it, and its end is ours.

use super::{signals, wait};
use pinfold_kernel::child::{ChildState, send, start};
use pinfold_kernel::signal::end_by;
use std::ffi::CString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

/// Ends this process as another one ended: by the same signal, or with the exit status that is returned. The program's core
/// dump is enough.
pub(super) fn end_as(status: ExitStatus) -> u8 {
    if let Some(signal) = status.signal() {
        end_by(signal);
    }
    as_exit_status(status)
}

/// Runs the program that is prepared; how it ended.
///
/// # Errors
///
/// It could not be started.
pub(super) fn run(
    prepare: impl FnOnce() -> io::Result<(Command, Vec<CString>)>,
) -> io::Result<ExitStatus> {
    // Until it is known where to send them: a second one would end this process alone.
    let before = signals::hold();
    let mut missed = Vec::new();
    let started = prepare().and_then(|(program, environment)| {
        let (dispositions, closed) = (signals::as_it_began(), signals::closed_streams());
        // Last: of what a terminal sends behind this, the program hears nothing until it is there.
        missed = signals::take_held();
        start(program, ChildState { environment, dispositions, blocked: before, closed })
    });
    if let Ok(child) = &started {
        signals::send_to_program(child.id().cast_signed());
        missed.into_iter().for_each(|signal| send(child.id().cast_signed(), signal));
    }
    before.block_alone();
    let mut child = started?;
    let program = child.id().cast_signed();
    signals::send_what_was_noted(program);
    wait::for_end(program);
    signals::send_to_none();
    child.wait()
}

/// As shells have it.
fn as_exit_status(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_s_number_is_added_to_128() {
        assert_eq!(as_exit_status(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(as_exit_status(ExitStatus::from_raw(libc::SIGKILL)), 137);
    }
}
