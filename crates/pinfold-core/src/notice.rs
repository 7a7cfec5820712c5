//! What a program must react to, besides the answers of its own calls: few events, typed.
//!
//! A program with more than one part needs them: the part that suspends a region hears of it by the answers of
//! [`suspend`](crate::suspend); the one that told a peer a key, feeds a queue pair, or sizes its windows by the
//! budget does not. What it costs: a suspension takes one more lock for a moment for each notice,
//! hits and misses pay nothing. A queue's memory is there from the beginning, and nothing is
//! allocated when something is told.
//!
//! ```text
//!                     one suspension                                   the budget
//!
//!   In use ──Suspended──▶ Withdrawn ──┐ Rekeyed, Lost              Plenty ──┐
//!     ▲                    │  │   ▲   │ (each kept registration      ▲      │ BudgetShrank
//!     │                    │  │   └───┘  at most once)               │      │ (again only if
//!     │                    │  │                                      │      ▼  lower still)
//!     ├─────Resumed────────┘  └──Revoked──▶ Broken                  Less ◀──┘
//!     │                                      │
//!     └── the program connects again ◀───────┘
//!
//!   In use ──Revoked──▶ Broken    the device broke while it was being stopped
//! ```
//!
//! | notice | what is true from now on | what the program does |
//! |---|---|---|
//! | [`Suspended`](Notice::Suspended) | nothing uses the range; gets of it wait or fail | posts nothing that names it |
//! | [`Rekeyed`](Notice::Rekeyed) | a kept registration has another key, the old one is dead | tells the peers that know the old one |
//! | [`Lost`](Notice::Lost) | a kept registration is no more | forgets the key; what names it fails |
//! | [`Resumed`](Notice::Resumed) | connections go on | goes on; of `Keys::Changed` it has heard one by one |
//! | [`Revoked`](Notice::Revoked) | connections were failed; leases handed over have ended | connects again, registers again |
//! | [`BudgetShrank`](Notice::BudgetShrank) | less can be pinned | ends leases, makes windows and pools smaller |
//! | [`Missed`](Notice::Missed) | its queue was full | looks at all its leases' handles and connections |
//!
//! **What is promised.** Of one suspension the notices come in the order drawn, each in the same
//! critical section as the change that it tells, so two threads never see them the other way round.
//! A suspension that is refused before any registration was withdrawn tells nothing, because nothing
//! changed. One that tells `Suspended` tells exactly one of `Resumed` and `Revoked`. Every key of a
//! lease handed over is afterwards the same, or was named in exactly one `Rekeyed` or `Lost`; after
//! `Revoked` none of its leases lives, whatever was said of their keys before. Rekeyed comes
//! before connections go on. A full queue keeps what is in it, counts what comes, and says
//! [`Missed`](Notice::Missed) in the place of what is missing.
//!
//! **Polled, no callback**: code of the program's would run in the middle of a suspension, on
//! any thread. [`Notices::wait`] sleeps until there is something. Connections that end by
//! themselves are told by the device, as ever, and by [`Resumed::lost`](crate::Resumed).
//!
//! ```
//! # use pinfold_core::{Monitor, Notice, Notices, Registrar};
//! # fn tell_peers<H>(_: H, _: H) {}
//! # fn example<R: Registrar, M: Monitor>(mut notices: Notices<'_, R, M>) {
//! while let Some(notice) = notices.next() {
//!     match notice {
//!         Notice::Rekeyed { from, to, .. } => tell_peers(from, to),
//!         Notice::Revoked { .. } | Notice::Lost { .. } => { /* connect and register again */ }
//!         Notice::BudgetShrank { to, .. } => { /* fewer windows: to.bytes are left */ }
//!         _ => {}
//!     }
//! }
//! # }
//! ```

pub use crate::board::{MOST_NOTICES, Notice, Revocation, SuspensionId};

use crate::monitor::Monitor;
use crate::registrar::Registrar;
use crate::shared::Shared;
use std::fmt;
use std::time::Duration;

/// What hears the notices of one cache: one of its queues.
///
/// It does not outlive its cache:
///
/// ```compile_fail,E0505
/// # use pinfold_core::{Cache, Monitor, Registrar};
/// # fn after_its_parent<R: Registrar, M: Monitor>(cache: Cache<R, M>) {
/// let notices = cache.notices(1);
/// drop(cache);
/// drop(notices);
/// # }
/// ```
pub struct Notices<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    id: u64,
}

impl<'c, R: Registrar, M: Monitor> Notices<'c, R, M> {
    /// A queue for at most `capacity` notices at a time.
    pub(crate) fn of(shared: &'c Shared<R, M>, capacity: usize) -> Self {
        let id = shared.own_board().map_or(0, |board| board.subscribe(capacity));
        Self { shared, id }
    }

    /// The oldest that was not heard yet; nothing in a forked child, whose parent hears it.
    #[expect(clippy::should_implement_trait)] // there may be more after nothing
    pub fn next(&mut self) -> Option<Notice<R::Handle>> {
        self.shared.own_board().ok()?.take(self.id)
    }

    /// As [`next`](Self::next), waiting for at most `patience` if there is none.
    pub fn wait(&mut self, patience: Duration) -> Option<Notice<R::Handle>> {
        self.shared.own_board().ok()?.wait(self.id, patience)
    }
}

impl<R: Registrar, M: Monitor> Drop for Notices<'_, R, M> {
    fn drop(&mut self) {
        if let Ok(board) = self.shared.own_board() {
            board.unsubscribe(self.id);
        }
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for Notices<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notices").field("id", &self.id).finish_non_exhaustive()
    }
}
