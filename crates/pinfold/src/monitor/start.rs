//! Why a monitor could not start, and what to do about it.

use crate::machine;
use pinfold_kernel::{Errno, userfaultfd, userfaultfd::feature};
use std::os::fd::AsFd;

/// Why a monitor could not start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The system call is forbidden here.
    #[error(
        "userfaultfd is forbidden here (errno {errno}), most likely by the container's seccomp \
         profile: allow the system call there. Without a monitor, memory is registered for each use"
    )]
    NotPermitted {
        /// The kernel's error number.
        errno: i32,
    },
    /// This kernel was built without userfaultfd.
    #[error(
        "this kernel has no userfaultfd for unprivileged users (errno {errno}): use Linux 5.19 or \
         later with CONFIG_USERFAULTFD. Without a monitor, memory is registered for each use"
    )]
    NotInKernel {
        /// The kernel's error number.
        errno: i32,
    },
    /// This kernel may copy a private page that a device has pinned when the program writes it, and report that to no
    /// monitor: it has no pages that are known to be exclusive (`PageAnonExclusive`).
    #[error(
        "Linux {major}.{minor} may copy a pinned page on a write after mprotect, and tells no monitor: use Linux 5.19 or \
         later. Without a monitor, memory is registered for each use"
    )]
    OldKernel {
        /// The kernel's version; 0 if it is not known.
        major: u32,
        /// The number behind it.
        minor: u32,
    },
    /// This kernel's userfaultfd cannot report all that is needed.
    #[error(
        "this kernel's userfaultfd lacks the features {missing:#x} (errno {errno}): use Linux 5.19 \
         or later on x86-64, 6.10 or later on arm64. Without a monitor, memory is registered for \
         each use"
    )]
    MissingFeatures {
        /// The missing bits, as `linux/userfaultfd.h` numbers them.
        missing: u64,
        /// The kernel's error number.
        errno: i32,
    },
    /// The process, or the machine, has no descriptor left.
    #[error(
        "no descriptor is left (errno {errno}): raise RLIMIT_NOFILE (`ulimit -n`) or close some"
    )]
    TooManyDescriptors {
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
    /// The thread that reads the events could not be started.
    #[error(
        "the thread that reads the events could not be started (errno {errno}): raise RLIMIT_NPROC \
         (`ulimit -u`), the control group's pids.max, or vm.max_map_count if the process has that many mappings"
    )]
    Thread {
        /// The kernel's error number.
        errno: i32,
    },
    /// The children of the thread that starts the monitor are to have another pid namespace: the kernel starts no thread
    /// for it any more.
    #[error(
        "the thread that reads the events could not be started (errno {errno}): the kernel \
         starts none once children get another pid namespace (unshare(CLONE_NEWPID), setns): begin before"
    )]
    PidNamespace {
        /// The kernel's error number.
        errno: i32,
    },
    /// The kernel does not report what it should; nothing it says would be believed.
    #[error(
        "this kernel's userfaultfd does not tell of {missed}, so nothing may be cached: use Linux \
         5.19 or later, and report this kernel's version to us"
    )]
    SelfTest {
        /// What was not seen.
        missed: &'static str,
    },
    /// Something else went wrong.
    #[error("{operation} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

impl StartError {
    /// What the monitor needs the kernel to report.
    pub(super) const FEATURES: u64 = feature::EVENT_UNMAP
        | feature::EVENT_REMAP
        | feature::EVENT_REMOVE
        | feature::WRITE_PROTECT;

    /// The first kernel that copies no exclusive page on a write, pinned or not. Those before look at the count of
    /// references, which a pin raises: a page that was write-protected (`mprotect`, twice) is copied then. There is nothing
    /// cheap to try it with: it takes a device, or what else pins for long.
    const FIRST_KERNEL: (u32, u32) = (5, 19);

    /// Whether a kernel of this release keeps pinned pages where they are.
    pub(super) fn of_kernel(release: &str) -> Result<(), Self> {
        let (major, minor) = machine::release(release).unwrap_or_default();
        if (major, minor) >= Self::FIRST_KERNEL {
            return Ok(());
        }
        Err(Self::OldKernel { major, minor })
    }

    pub(super) fn open(Errno(errno): Errno) -> Self {
        match errno {
            libc::EPERM | libc::EACCES => Self::NotPermitted { errno },
            // Before Linux 5.11 the flag that needs no privilege is unknown.
            libc::ENOSYS | libc::EINVAL => Self::NotInKernel { errno },
            libc::EMFILE | libc::ENFILE => Self::TooManyDescriptors { errno },
            libc::ENOMEM => Self::NoMemory { errno },
            errno => Self::Os { operation: "userfaultfd", errno },
        }
    }

    pub(super) fn memory(errno: Errno) -> Self {
        Self::change("mmap", errno)
    }

    /// Why `operation`, which maps memory or changes what is mapped, was refused.
    pub(super) fn change(operation: &'static str, Errno(errno): Errno) -> Self {
        match errno {
            libc::ENOMEM | libc::EAGAIN => Self::NoMemory { errno },
            errno => Self::Os { operation, errno },
        }
    }

    /// Why a thread was not started, from the calling thread.
    pub(super) fn thread(error: &std::io::Error) -> Self {
        match error.raw_os_error().unwrap_or(libc::EAGAIN) {
            errno @ libc::EINVAL if children_get_another_namespace() => {
                Self::PidNamespace { errno }
            }
            errno @ libc::EINVAL => Self::Os { operation: "pthread_create", errno },
            errno => Self::Thread { errno },
        }
    }

    pub(super) fn register(Errno(errno): Errno) -> Self {
        match errno {
            libc::ENOMEM => Self::NoMemory { errno },
            libc::EINVAL => Self::MissingFeatures { missing: feature::WRITE_PROTECT, errno },
            errno => Self::Os { operation: "UFFDIO_REGISTER", errno },
        }
    }

    /// The kernel refuses unknown features without saying which, so a second descriptor asks.
    pub(super) fn features(Errno(errno): Errno) -> Self {
        let known = userfaultfd::open().and_then(|asker| userfaultfd::api(asker.as_fd(), 0));
        match (errno, known) {
            (libc::EINVAL, Ok(known)) => {
                Self::MissingFeatures { missing: Self::FEATURES & !known, errno }
            }
            _ => Self::Os { operation: "UFFDIO_API", errno },
        }
    }
}

/// Whether children of the calling thread begin in another pid namespace than its own. One that has no process yet cannot
/// be read.
pub(super) fn children_get_another_namespace() -> bool {
    let own = std::fs::read_link("/proc/thread-self/ns/pid");
    let children_s = std::fs::read_link("/proc/thread-self/ns/pid_for_children");
    own.is_ok_and(|own| children_s.ok() != Some(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_refused_in_the_same_namespace_is_no_namespace_s_fault() {
        let refused = |errno| StartError::thread(&std::io::Error::from_raw_os_error(errno));
        assert_eq!(refused(libc::EAGAIN), StartError::Thread { errno: libc::EAGAIN });
        let (operation, errno) = ("pthread_create", libc::EINVAL);
        assert_eq!(refused(errno), StartError::Os { operation, errno });
    }

    #[test]
    fn a_kernel_that_copies_pinned_pages_is_refused() {
        for (release, version) in [
            ("4.18.0-553.el8_10.x86_64", (4, 18)),
            ("5.15.0-130-generic", (5, 15)),
            ("5.18.19\n", (5, 18)),
            ("2.6.72-56-amd64", (2, 6)),
            ("Linux", (0, 0)),
            ("", (0, 0)),
        ] {
            let (major, minor) = version;
            let refusal = StartError::OldKernel { major, minor };
            assert_eq!(StartError::of_kernel(release), Err(refusal), "{release}");
            let text = refusal.to_string();
            assert!(text.contains("use Linux 5.19"), "{text}");
        }
        for release in ["5.19.0", "5.20", "6.1.0-56-amd64", "7.3.4+deb13-amd64", "10.0-rc1"] {
            assert_eq!(StartError::of_kernel(release), Ok(()), "{release}");
        }
    }

    #[test]
    fn each_refusal_has_its_own_way_out() {
        for (errno, word) in [
            (libc::EPERM, "seccomp"),
            (libc::ENOSYS, "CONFIG_USERFAULTFD"),
            (libc::EMFILE, "RLIMIT_NOFILE"),
            (libc::ENOMEM, "vm.max_map_count"),
        ] {
            let text = StartError::open(Errno(errno)).to_string();
            assert!(text.contains(word), "{text}");
        }
    }
}
