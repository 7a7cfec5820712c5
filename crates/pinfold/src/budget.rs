//! How much may be pinned, which cache or pool gets it, and what is promised.
//!
//! ```
//! use pinfold::budget::{Budget, Kind, Terms, Watermark};
//! use pinfold::registrar::IoUring;
//! use pinfold::{Config, Registrar, monitor::Userfaultfd};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(ring) = io_uring::IoUring::new(8) else { return Ok(()) };
//! # if Userfaultfd::shared().is_err() { return Ok(()) }
//! // SAFETY: the ring's table of buffers is left to the registrar.
//! let registrar = unsafe { IoUring::new(&ring, 1024) }?;
//! // What the kernel will really let this process pin by io_uring, less what it must be left.
//! let budget = Budget::discover(Kind::IoUring, registrar.limits())?;
//! let _watch = budget.watch(Watermark::Percent(80), |told| {
//!     // On the thread whose get made the difference, with no lock held.
//!     let _nearly_full = (told.held, told.total);
//! });
//! let share = budget.share(Terms::default())?;
//! let cache = pinfold::cache_within(share, registrar, Userfaultfd::shared()?, Config::default())?;
//! # drop(cache);
//! # Ok(())
//! # }
//! ```
//!
//! # What it costs
//!
//! A hit asks no budget. A registration takes the budget's own lock twice, for some
//! tens of nanoseconds. [`Budget::discover`] reads some dozens of files, a millisecond.
//!
//! # Which promise is worth what
//!
//! | promise | kept against | by |
//! |---|---|---|
//! | [`Terms::minimum`] | the other drawers of this budget | arithmetic |
//! | [`Budget::discover`] | what was there when it was called | the kernel's own figures |
//! | [`Reservation`] | all, other processes of the same user included | memory that is registered now |
//!
//! There is no way to hold a place in the kernel's count and fill it with other memory later. A
//! slot of an io_uring table that is updated has the new pages counted *before* the old ones are
//! released, so a spare registration makes no room for its own replacement; and what is released first
//! may be taken by another in between. A later registration that cannot fail is therefore one that has been
//! made: a [`Reservation`] is real registered pages, handed out later.
//!
//! # Where to look next
//!
//! [`Discovery`] has every figure with its source, and [`BudgetAdvice`] says what to do. [`Share`] is
//! what a cache or a pool draws on; anything else draws by [`Share::draw`], and is asked to give
//! back if it attaches a [`Lender`].

mod advice;
mod discovery;
mod figure;
mod ledger;
mod memory;
mod readings;
mod reservation;
mod share;
mod watermark;

pub use advice::BudgetAdvice;
pub use discovery::{
    Beyond, Bound, Discovery, Group, HugePages, Kind, MemlockLimit, Privilege, RdmaObjects,
};
pub use figure::{Figure, SharedWith, Unread};
pub use ledger::Terms;
pub(crate) use memory::is_reserved;
pub use pinfold_core::{Account, Amount, Lender, Recalls, Refusal};
pub use reservation::{Reservation, Reserve, ReserveError, Reserved};
pub use share::{Budget, BudgetError, BudgetWatch, Drawn, Share};
pub(crate) use share::{DeviceRequest, ShareAccount};
pub use watermark::{BudgetNotice, Watermark, WatermarkEvent};
