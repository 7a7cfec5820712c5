//! Whether a leak sanitizer is in the process: then nothing is kept.
//!
//! At its check it stops all threads but one that it makes for that, which then unmaps memory of its own. Where that
//! lies in one mapping with memory of which something is kept, the kernel has the unmapping wait for the monitor's
//! thread, which is stopped: for ever. Nor does it find libibverbs' structures of idle registrations, which our memory
//! alone names.

use crate::linked;

/// Whether there is one.
pub(crate) fn is_here() -> bool {
    linked::leak_sanitizer()
}
