//! `kernel.ftrace_enabled`: whether the kernel calls programs at its functions at all (`bpf/changes.c`, 6).

use super::error::ProgramsError;
use super::hooks::SWITCHING_OFF;
use super::sys::Errno;

const FILE: &str = "/proc/sys/kernel/ftrace_enabled";

/// Whether the setting is not 0; `None` where the kernel has no such setting. The kernel answers under the lock
/// under which a change of it takes effect.
pub(super) fn read() -> Result<Option<bool>, Errno> {
    match std::fs::read_to_string(FILE) {
        Ok(text) => Ok(Some(text.trim() != "0")),
        // Without `/proc` nothing can be said.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) && has_settings() => Ok(None),
        Err(error) => Err(Errno(error.raw_os_error().unwrap_or(libc::EIO))),
    }
}

fn has_settings() -> bool {
    std::fs::exists("/proc/sys/kernel/ostype").unwrap_or(false)
}

/// Makes certain that the program `setting` runs when the setting is read or written: it counts the former.
pub(super) fn is_followed(count: impl Fn() -> u32) -> Result<(), ProgramsError> {
    let before = count();
    let setting = read().map_err(|Errno(errno)| ProgramsError::Os { operation: "read", errno })?;
    match setting {
        None => Ok(()),
        Some(false) => Err(ProgramsError::SwitchedOff),
        Some(true) if count() == before => {
            Err(ProgramsError::NoHook { change: SWITCHING_OFF, functions: &["proc_dointvec"] })
        }
        Some(true) => Ok(()),
    }
}
