//! Why the eBPF monitor could not start, and what to do about it.

use crate::monitor::notify::ConnectError;
use pinfold_kernel::Errno;
use std::fmt;

/// Why the eBPF monitor could not start.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum EbpfError {
    /// The helper gave no view.
    Helper(ConnectError),
    /// Neither this process nor a helper can load the programs.
    #[cfg(feature = "ebpf")]
    NoWay {
        /// Why this process cannot.
        own: Box<EbpfError>,
        /// Why the helper did not.
        helper: ConnectError,
    },
    /// The programs could not be loaded.
    #[cfg(feature = "ebpf")]
    Load(pinfold_ebpf::LoadError),
    /// The programs are loaded and do not show this process its changes.
    #[cfg(feature = "ebpf")]
    View(pinfold_ebpf::ViewError),
    /// What was to be shared with the programs could not be mapped.
    Map {
        /// The kernel's error number.
        errno: i32,
    },
    /// No memory, or no more mappings allowed.
    NoMemory {
        /// The kernel's error number.
        errno: i32,
    },
    /// The thread that keeps the programs could not be started, or get a table of descriptors of
    /// its own.
    Thread {
        /// The kernel's error number.
        errno: i32,
    },
    /// The programs do not tell what they should; nothing they say would be believed.
    SelfTest {
        /// What was not told.
        missed: &'static str,
    },
}

impl EbpfError {
    pub(super) fn map(Errno(errno): Errno) -> Self {
        match errno {
            libc::ENOMEM => Self::NoMemory { errno },
            errno => Self::Map { errno },
        }
    }

    pub(super) fn memory(Errno(errno): Errno) -> Self {
        Self::NoMemory { errno }
    }

    pub(super) fn thread(errno: i32) -> Self {
        Self::Thread { errno }
    }
}

impl fmt::Display for EbpfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Helper(error) => write!(f, "the helper, `pinfold notifyd`: {error}"),
            #[cfg(feature = "ebpf")]
            Self::NoWay { own, helper } => {
                write!(f, "{own}; and the helper, `pinfold notifyd`: {helper}")
            }
            #[cfg(feature = "ebpf")]
            Self::Load(error) => error.fmt(f),
            #[cfg(feature = "ebpf")]
            Self::View(error) => error.fmt(f),
            Self::Map { errno } => write!(
                f,
                "what the eBPF programs share with this process cannot be mapped ({}): they and \
                 this library must be of one version",
                std::io::Error::from_raw_os_error(*errno)
            ),
            Self::NoMemory { errno } => write!(
                f,
                "no memory for the monitor (errno {errno}): the process may have as many mappings \
                 as vm.max_map_count allows"
            ),
            Self::Thread { errno } => write!(
                f,
                "the thread that keeps the eBPF programs could not be started (errno {errno}): \
                 raise RLIMIT_NPROC (`ulimit -u`) or the control group's pids.max, and allow \
                 close_range"
            ),
            Self::SelfTest { missed } => write!(
                f,
                "the eBPF programs do not tell of {missed} on this kernel, so nothing may be \
                 cached by them: report this kernel's version to us"
            ),
        }
    }
}

impl std::error::Error for EbpfError {}
