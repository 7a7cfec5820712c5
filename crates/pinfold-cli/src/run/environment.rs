//! The environment that the program is started with: each entry of this process's own, as it is and in its order, and behind
//! them the variables that this command sets.
//!
//! Rust's library knows variables, in an order of its own: it loses one of two with the same name, and an entry without `=`.

use pinfold_kernel::child::environment;
use std::ffi::{CStr, CString, NulError, OsString};
use std::os::unix::ffi::OsStrExt;

/// What `execve` is given.
///
/// # Errors
///
/// A value has a zero byte in it.
pub(super) fn with(variables: &[(&'static str, OsString)]) -> Result<Vec<CString>, NulError> {
    let is_set = |entry: &CStr| variables.iter().any(|(name, _)| is_of(name, entry));
    let own = variables
        .iter()
        .map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()));
    let kept = environment().into_iter().filter(|entry| !is_set(entry));
    kept.map(Ok).chain(own).collect()
}

fn is_of(name: &str, entry: &CStr) -> bool {
    let rest = entry.to_bytes().strip_prefix(name.as_bytes());
    rest.is_some_and(|rest| rest.starts_with(b"="))
}
