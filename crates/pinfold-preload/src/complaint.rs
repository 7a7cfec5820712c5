//! What this library says on standard error: a line, and only where it stands for what the program was started
//! with. A program may close it and have a file of its own get the number.

use crate::sandbox;
use pinfold_kernel::words::NotedDescriptor;
use std::sync::OnceLock;

/// Filled once, as the library is loaded; a child only reads it, which waits for no thread.
static AT_START: OnceLock<NotedDescriptor> = OnceLock::new();

/// Remembers what standard error is. One system call.
pub(crate) fn note_start() {
    AT_START.get_or_init(NotedDescriptor::standard_error);
}

/// Says `line`, if that can be without waiting and the program has not restricted its system calls; what cannot be
/// said is no failure of the program.
pub(crate) fn complain(line: &str) {
    if sandbox::is_the_program_s() {
        return;
    }
    let _ = AT_START.get().map(|standard_error| standard_error.write(line));
}
