//! How much one user, and all users, may have.

use pinfold_ebpf::protocol::MAX_DESCRIPTORS;
use pinfold_kernel::process::Resource;
use std::io;
use std::time::Duration;

/// How much of the helper one user, and all users together, may have. Root's processes have the
/// numbers for all to themselves, and are counted in no other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientLimits {
    /// Views that all users together hold.
    pub views: usize,
    /// Views that one user holds.
    pub views_per_user: usize,
    /// Connections of all users that have not got their answer.
    pub waiting: usize,
    /// Connections of one user that have not got their answer.
    pub waiting_per_user: usize,
    /// How long a client may take to ask.
    pub patience: Duration,
}

/// As many views as users other than root may have together, and root.
pub const MOST_VIEWS: usize = 512;

impl Default for ClientLimits {
    /// For some hundred processes of each user. The programs have room for 1024 views: half of them
    /// for root, so that the users cannot take those.
    fn default() -> Self {
        Self {
            views: MOST_VIEWS,
            views_per_user: MOST_VIEWS / 2,
            waiting: 512,
            waiting_per_user: 128,
            patience: Duration::from_secs(5),
        }
    }
}

impl ClientLimits {
    /// The descriptors that clients up to these limits take, root's counted with them: for each that
    /// waits its connection and its process, for each view those two and the descriptors that are
    /// on their way to a client that does not read. (The kernel counts what is on its way against
    /// the same limit.)
    pub fn descriptors(&self) -> u64 {
        let waiting = self.waiting.saturating_mul(2);
        let each = self.views.saturating_mul(2 + MAX_DESCRIPTORS).saturating_add(waiting);
        (each as u64).saturating_mul(2).saturating_add(RESERVE + LEAST_SPARE)
    }

    /// As many connections as may be open that count for no client, where there may be so many descriptors.
    pub(crate) fn spare(&self, descriptors: u64) -> usize {
        let left = descriptors.saturating_sub(self.descriptors());
        usize::try_from(left.saturating_add(LEAST_SPARE)).unwrap_or(usize::MAX)
    }
}

/// The helper's own: the programs, their maps, the standard streams.
const RESERVE: u64 = 512;
/// For connections that were turned away and cannot be closed yet, however few descriptors there may be.
const LEAST_SPARE: u64 = 256;

/// Raises this process's limit on descriptors as far as it goes, and lowers `limits` to what fits.
///
/// # Errors
///
/// The kernel's.
pub fn make_room(limits: ClientLimits) -> io::Result<ClientLimits> {
    let raised = Resource::Descriptors.raise()?;
    Ok(fitting(limits, raised.soft.unwrap_or(u64::MAX)))
}

fn fitting(limits: ClientLimits, descriptors: u64) -> ClientLimits {
    let mut limits = limits;
    while limits.descriptors() > descriptors && limits.views > 1 {
        limits.views = limits.views.div_ceil(2);
        limits.waiting = limits.waiting.div_ceil(2);
    }
    limits.views_per_user = limits.views_per_user.min(limits.views);
    limits.waiting_per_user = limits.waiting_per_user.min(limits.waiting);
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_lowered_and_what_fits_is_not() {
        let usual = ClientLimits::default();
        assert_eq!(fitting(usual, usual.descriptors()), usual);
        let small = fitting(usual, 4096);
        assert!(small.descriptors() <= 4096 && small.views >= 1, "{small:?}");
        assert!(small.views_per_user <= small.views && small.waiting_per_user <= small.waiting);
        assert_eq!(fitting(usual, 0).views, 1);
    }

    #[test]
    fn what_clients_do_not_need_is_spare() {
        let limits = ClientLimits::default();
        assert_eq!(limits.spare(limits.descriptors() + 1000), 1256);
        assert_eq!(limits.spare(0), 256);
    }
}
