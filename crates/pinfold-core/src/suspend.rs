//! Suspending a region: the device stops touching it, its memory is re-arranged, access returns.
//!
//! What it costs first: gets of the region wait from the beginning to the resumption, and every
//! connection named stands still from the last lease's end on; draining takes as long as the
//! slowest transfer in flight, registrations of the region that
//! no handed-over lease keeps are deregistered and made again by the next `get`, and telling whether leases are left
//! costs one barrier on all processors for each [poll](Suspending::poll). A cache on which nothing
//! is suspended pays one comparison in a miss and nothing in a hit.
//!
//! ```text
//!            begin_suspension(range, connections, leases to keep, terms)
//!                 │
//!                 ├── the device cannot ───────────────▶ Unsupported(reason)   nothing touched
//!                 ├── leases alive, Leases::Refuse ────▶ Refused(in flight)    nothing touched
//!                 ▼
//!   ┌──────── Suspending ────────┐  poll: still in flight
//!   │ new gets held or refused;  │◀──┐
//!   │ leases end, then           │   │
//!   │ connections are stopped    │───┘
//!   └──┬───────────┬─────────┬───┘
//!      │ quiet     │ deadline│ cancelled, dropped; expire_suspensions() past the deadline
//!      │           ▼         ▼
//!      │        Refused(what, how long)        connections go on, keys as they were; if it withdrew
//!      ▼                                       them already, renewed, or by expire_suspensions() failed
//!   ┌──────── Suspended ─────────┐
//!   │ no registration is used,   │── dropped, or its thread panics ──▶ by OnDrop: killed openly
//!   │ no translation is held;    │                                     (connections failed), or
//!   │ the memory may be moved    │                                     resumed
//!   └──┬───────────┬─────────────┘
//!      │ resume    │ expire_suspensions() past the deadline
//!      ▼           ▼
//!   Resumed     connections failed, gets go on; resume() then says Expired
//!   (keys same or changed, connections lost, how late)
//! ```
//!
//! **What knows what.** Which connections can touch a region only the program knows, so it says so.
//! Which of its leases are to survive it says as well, by handing them over: a lease that a
//! [`Suspending`] or [`Suspended`] holds cannot be used meanwhile, and comes back with its
//! registration renewed. Every other lease of the region has to end first.
//!
//! **What `Suspended` promises.** Its value exists only after (1) every connection named was
//! stopped or is gone, (2) the device said of each that nothing of it is in flight, (3) no lease of
//! a byte of the range was left but those handed over, and none can come, (4) every other
//! registration of the range was given back, and (5) the device holds no translation of it any
//! more. (3) holds because the suspended range stands before regions are closed, a closed region
//! is leased under the writer's lock alone, and a thread that leases under that lock looks at the suspended
//! first. It is as true as the device's word in [`Suspend`], and the program's about its connections.
//!
//! **Leases first, then connections.** What is posted in the queue of a stopped connection stays
//! there, with its lease, for ever: so a connection is stopped when every lease that is not handed
//! over has ended. A lease that never ends stops none, and refuses the suspension at the deadline.
//!
//! **Several at once.** Suspensions of different ranges may share connections: one is stopped for
//! the first of them and goes on with the last. A registration that reaches into two ranges keeps
//! the second from coming about as long as the first has it.
//!
//! **Never silently.** There is no path on which a connection that died comes back
//! ([`Suspend::restart`] may not re-establish one), and every way out of the machine either gives
//! the connections back or fails them and counts it ([`SuspensionStatistics`]). Only a [`Suspending`]
//! or [`Suspended`] that is leaked (`mem::forget`) stays until [`Cache::expire_suspensions`] finds it
//! overdue or the cache is dropped.
//!
//! [`Cache::expire_suspensions`]: crate::Cache::expire_suspensions
//! [`Suspended`]: crate::Suspended
//! [`Suspending`]: crate::Suspending
//!
//! Where to look next: `device` (what a device must offer), `report` (the words of the answers),
//! `parked` (a registration that is withdrawn, renewed or lost), `ending` (of those that are overdue), `guard` (what a
//! suspension owns and must give back), `machine` (the states).

mod device;
mod ending;
mod guard;
mod machine;
mod parked;
mod report;
mod several;

pub use crate::board::Keys;
pub use crate::suspended_ranges::{Gets, SuspensionStatistics};
pub use device::{ConnectionLost, Renewed, Suspend, Transfers, Unsupported};
pub use machine::{SuspendProgress, Suspended, Suspending};
pub use report::{
    Ended, Expired, Leases, NotSuspended, OnDrop, Outstanding, Refused, Resumed, SuspensionTerms,
    Why,
};
pub use several::OfEither;
