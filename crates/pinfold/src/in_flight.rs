//! What a device may be using, and what keeps it: one owner for pieces, landing, pools and the
//! planner.
//!
//! Two types, and every way to end them keeps memory that a device may still touch:
//!
//! | | it is | what ends it | dropped, by a panic too | forgotten |
//! |---|---|---|---|---|
//! | [`InUse`] | one thing handed to a device | the caller's word that the device is done | **leaks**: [`Kept::abandon`] leaves it to the device for good | leaks |
//! | [`Window`] | requests that a [`Mover`] has begun | their completions | **waits** for every completion | cannot be: it never leaves the function that made it |
//!
//! A window waits, because the memory may be its caller's, which frees it as soon as the function is
//! left, however it is left: such memory cannot be leaked. A guard that the program holds cannot wait,
//! because nothing tells it of the end: so it leaks.

mod in_use;
mod mover;
mod window;

pub(crate) use in_use::{InUse, Kept};
pub use mover::{Completion, Mover, Reason, Request};
pub(crate) use window::{Stopped, Window};
