//! Loading the programs and giving out views.

mod error;

pub use error::{LoadError, ViewError};

use crate::{View, ViewId};
use std::os::fd::BorrowedFd;

/// The programs, loaded and attached.
#[derive(Debug)]
pub struct Programs;

impl Programs {
    /// Loads the programs and attaches them.
    ///
    /// # Errors
    ///
    /// [`LoadError`] says what this machine or this process lacks.
    pub fn load() -> Result<Self, LoadError> {
        Err(LoadError::Os { operation: "bpf", errno: libc::ENOSYS })
    }

    /// A view of the changes of one process.
    ///
    /// # Errors
    ///
    /// [`ViewError`]
    pub fn view(&self, process: BorrowedFd<'_>) -> Result<View, ViewError> {
        let _ = process;
        Err(ViewError::Gone)
    }

    /// Gives back what a view of a process that ended still holds.
    pub fn forget(&self, view: ViewId) {
        let _ = view;
    }
}
