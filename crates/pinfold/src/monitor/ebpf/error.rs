//! Why the eBPF monitor could not start, and what to do about it.

use crate::monitor::notify::ConnectError;
use crate::monitor::start::children_get_another_namespace;
use pinfold_kernel::Errno;

/// Why the eBPF monitor could not start.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EbpfError {
    /// The helper gave no view.
    #[error("the helper, `pinfold notifyd`: {0}")]
    Helper(ConnectError),
    /// Neither this process nor a helper can load the programs.
    #[cfg(feature = "ebpf")]
    #[error("{own}; and the helper, `pinfold notifyd`: {helper}")]
    NoWay {
        /// Why this process cannot.
        own: Box<EbpfError>,
        /// Why the helper did not.
        helper: ConnectError,
    },
    /// The programs could not be loaded.
    #[cfg(feature = "ebpf")]
    #[error("{0}")]
    Load(pinfold_ebpf::ProgramsError),
    /// The programs are loaded and do not show this process its changes.
    #[cfg(feature = "ebpf")]
    #[error("{0}")]
    View(pinfold_ebpf::ViewError),
    /// What was to be shared with the programs could not be mapped.
    #[error(
        "what the eBPF programs share with this process cannot be mapped ({}): they and this \
         library must be of one version",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Map {
        /// The kernel's error number.
        errno: i32,
    },
    /// No memory, or no more mappings allowed.
    #[error(
        "no memory for the monitor (errno {errno}): the process may have as many mappings as \
         vm.max_map_count allows"
    )]
    NoMemory {
        /// The kernel's error number.
        errno: i32,
    },
    /// The thread that keeps the programs could not be started, or get a table of descriptors of
    /// its own.
    #[error(
        "the thread that keeps the eBPF programs could not be started (errno {errno}): raise \
         RLIMIT_NPROC (`ulimit -u`) or the control group's pids.max, and allow close_range"
    )]
    Thread {
        /// The kernel's error number.
        errno: i32,
    },
    /// The children of the thread that starts the monitor are to have another pid namespace: the kernel starts no thread
    /// for it any more.
    #[error(
        "the thread that keeps the eBPF programs could not be started (errno {errno}): the kernel \
         starts none once children get another pid namespace (unshare(CLONE_NEWPID), setns): begin before"
    )]
    PidNamespace {
        /// The kernel's error number.
        errno: i32,
    },
    /// The programs do not tell what they should; nothing they say would be believed.
    #[error(
        "the eBPF programs do not tell of {missed} on this kernel, so nothing may be cached by \
         them: report this kernel's version to us"
    )]
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

    /// Why the thread has no table of descriptors of its own, or its end is not marked.
    pub(super) fn begun(Errno(errno): Errno) -> Self {
        Self::Thread { errno }
    }

    /// Why a thread was not started, from the calling thread.
    pub(super) fn thread(error: &std::io::Error) -> Self {
        match error.raw_os_error().unwrap_or(libc::EAGAIN) {
            // The standard library's stacks have room for the variables of threads.
            errno @ libc::EINVAL if children_get_another_namespace() => {
                Self::PidNamespace { errno }
            }
            errno => Self::Thread { errno },
        }
    }
}
