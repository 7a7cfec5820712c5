//! Where views come from.

use pinfold_ebpf::protocol::ViewRefusal;
use pinfold_ebpf::{Programs, ViewError, ViewId};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Makes views: the loaded programs, or what a test has in their place.
pub trait Views {
    /// What a view is forgotten by.
    type Id: Copy + fmt::Debug + Send;

    /// Makes a view of the changes of one process, which the pidfd names.
    ///
    /// # Errors
    ///
    /// [`NoView`].
    fn open(&mut self, process: BorrowedFd<'_>) -> Result<(Self::Id, Vec<OwnedFd>), NoView>;

    /// Gives back what a view holds whose process has ended, or does not want it any more.
    fn forget(&mut self, view: Self::Id);
}

/// Why there is no view.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoView {
    /// What the client is told.
    pub refusal: ViewRefusal,
    /// The whole story, for the operator.
    pub what: String,
}

impl Views for Programs {
    type Id = ViewId;

    fn open(&mut self, process: BorrowedFd<'_>) -> Result<(ViewId, Vec<OwnedFd>), NoView> {
        let view = self.view(process)?;
        Ok((view.id(), view.into_descriptors()))
    }

    fn forget(&mut self, view: ViewId) {
        Programs::forget(self, view);
    }
}

impl From<ViewError> for NoView {
    fn from(error: ViewError) -> Self {
        let refusal = match &error {
            ViewError::Gone => ViewRefusal::Gone,
            ViewError::ManyViews { most } => ViewRefusal::ProcessFull { limit: *most as u64 },
            ViewError::ManyProcesses { most } => ViewRefusal::Full { limit: *most as u64 },
            // What the kernel answers where it attaches no programs.
            ViewError::SwitchedOff | ViewError::Preemptible { .. } => {
                ViewRefusal::Kernel { errno: libc::EOPNOTSUPP }
            }
            ViewError::Os { errno, .. } => ViewRefusal::Kernel { errno: *errno },
            _ => ViewRefusal::Kernel { errno: libc::EIO },
        };
        Self { refusal, what: error.to_string() }
    }
}
