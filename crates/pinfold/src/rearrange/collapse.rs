//! One block put into a huge page by the kernel, and what can be in the way.

use super::pages;
use crate::machine::{self, Machine};
use crate::{AddressRange, mappings};
use pinfold_kernel::{Errno, memory};

/// Why a part of a region was left as it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// It does not fill a huge page.
    #[error("it does not fill a huge page: align it to 2 MiB")]
    Partial,
    /// Not all of it is mapped, or the program may neither read nor write it.
    #[error("not all of it is mapped and accessible")]
    Unmapped,
    /// The program has forbidden huge pages there (`MADV_NOHUGEPAGE`, `PR_SET_THP_DISABLE`).
    #[error("huge pages are forbidden there: look for MADV_NOHUGEPAGE and PR_SET_THP_DISABLE")]
    Forbidden,
    /// Some of its pages are pinned elsewhere, or in use by the kernel at this moment.
    #[error(
        "pages of it are pinned elsewhere, or in use just now: end other registrations, or try \
         again"
    )]
    Pinned,
    /// There is no huge page free, and none could be made free; or a control group allows none.
    #[error(
        "no huge page is free (errno {errno}): free memory, or raise the control group's memory.max"
    )]
    NoHugePage {
        /// The kernel's error number.
        errno: i32,
    },
    /// The mapping is of a kind that copying would change: locked, shared, a file's, not writable, with guard pages.
    #[error("the mapping is of a kind that copying would change: use HugePageWay::IN_PLACE")]
    OtherKind,
    /// By copying only: the kernel unmapped it, could not put the copy in its place, and neither
    /// could new pages be. Its content is elsewhere, in memory that is the program's from now on.
    #[error(
        "the kernel could not put its bytes back ({}), which are at {to} now: use them there, or \
         map its addresses (MAP_FIXED_NOREPLACE), copy them back and unmap the rest",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Displaced {
        /// Where its bytes are, as many.
        to: AddressRange,
        /// The kernel's error number.
        errno: i32,
    },
    /// The kernel refused for another reason.
    #[error("{operation} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

/// How often a block is tried whose pages the kernel has in its hands.
const ATTEMPTS: usize = 4;

pub(super) fn collapse(block: AddressRange, private: bool) -> Result<(), Obstacle> {
    let mut outcome = memory::collapse(block);
    if private && outcome == Err(Errno(libc::EINVAL)) && !is_forbidden(block) {
        // A page that is missing is in the way where a monitor watches. For another refusal, pages
        // that are made now are memory spent on nothing.
        let _ = memory::populate(block, true);
    }
    for _ in 1..ATTEMPTS {
        match outcome {
            Ok(()) | Err(Errno(libc::ENOMEM | libc::EBUSY)) => break,
            Err(_) => outcome = memory::collapse(block),
        }
    }
    outcome.map_err(|errno| explain(block, errno))
}

/// What the kernel's refusal to collapse means.
fn explain(block: AddressRange, Errno(errno): Errno) -> Obstacle {
    match errno {
        _ if !is_mapped(block) => Obstacle::Unmapped,
        libc::EAGAIN => Obstacle::Pinned,
        libc::ENOMEM | libc::EBUSY => Obstacle::NoHugePage { errno },
        libc::EINVAL if is_forbidden(block) => Obstacle::Forbidden,
        errno => Obstacle::Os { operation: "madvise(MADV_COLLAPSE)", errno },
    }
}

pub(super) fn is_mapped(block: AddressRange) -> bool {
    let Ok(mappings) = mappings::mappings_in(block) else { return true };
    let parts = mappings.iter().filter_map(|mapping| mapping.range.intersection(&block));
    parts.map(|part| part.len()).sum::<usize>() == block.len()
}

fn is_forbidden(block: AddressRange) -> bool {
    let entries = pages::entries(block).unwrap_or_default();
    entries.iter().any(|entry| entry.flags.iter().any(|flag| flag == "nh"))
        || Machine::this()
            .status()
            .is_ok_and(|status| machine::word(&status, "THP_enabled:") == Some("0"))
}
