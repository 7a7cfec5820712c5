//! The ways in which data lands, and why it does not.

/// How data gets from landing pages into its target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Method {
    /// Every byte is copied.
    Copy,
    /// Whole pages change places with the target's; ragged ends are copied.
    Exchange,
    /// Whole pages go to the target, whose own are given up; the zone's are made anew. Loses to one
    /// of the others everywhere we have measured, and is never chosen.
    Replace,
}

/// How a message has landed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Landed {
    /// Bytes that came with their pages.
    pub moved_bytes: usize,
    /// Bytes that were copied.
    pub copied_bytes: usize,
    /// Why some or all pages were copied that were to be exchanged.
    pub copied_because: Option<LandError>,
}

/// Why data does not land.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LandError {
    /// The target was unmapped, replaced or moved since its place was asked for; or the monitor has
    /// lost count, as one may when the machine is overloaded, and it is unknown. A caller that knows better
    /// vouches for the target ([`Arrived::vouch`](super::Arrived::vouch)).
    #[error("the target's mapping changed while the data was on its way: land it elsewhere")]
    TargetChanged,
    /// The target has no whole page.
    #[error("the target has no whole page to be exchanged")]
    NoWholePage,
    /// The target is not private, writable memory without a file, or its pages are huge pages of
    /// hugetlbfs.
    #[error("only pages of private anonymous memory can be exchanged: others are copied")]
    UnsuitableMapping,
    /// The target is a pool's or a reservation's: the registration of its buffers would go on naming the pages that
    /// were there.
    #[error(
        "buffers of pools and reservations are registered with the pages that they have: data is copied into them, \
         or received by the device itself"
    )]
    PoolMemory,
    /// The target consists of so many mappings that exchanging its pages does not pay.
    #[error(
        "the target consists of too many mappings for an exchange to pay: let messages begin and \
         end at the same addresses, or in whole pages"
    )]
    TooManyMappings,
    /// The kernel would not exchange the pages.
    #[error(
        "the kernel would not exchange the pages: {}",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Exchange {
        /// The kernel's error number (`ENOMEM`: too many mappings, `vm.max_map_count`, and the target is whole).
        errno: i32,
    },
    /// The kernel ran out of memory in the midst of an exchange: a part of the target is unmapped. What had come
    /// into the target by then is there, with all before it; the rest is in the place, and is all that
    /// [`Arrived`](super::Arrived) has and names from then on.
    #[error(
        "the kernel has unmapped a part of the target and could not go on ({}): map it anew, and \
         read the data in its place",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    TargetUnmapped {
        /// The kernel's error number.
        errno: i32,
    },
    /// The target was watched, and could not be watched again as it was [remapped](super::Place::remap): the monitor is lost, or
    /// changes of other watched memory followed one another without a pause, or a thread stood still as it reported one to a
    /// `Feed`. The pages are in the place again, which goes on
    /// receiving; the target reads as zeros where they were. What stands in it is unknown from then on: the data lands once it is
    /// vouched for, or is read in the place. A [`Remapped`](super::Remapped) that refuses `arrived` for this reason has lost its
    /// data: the kernel had no memory to move the pages back.
    #[error(
        "changes of the target would not be found out any more: read the data in its place, or \
         vouch for the target"
    )]
    TargetUnwatched,
    /// This process is a forked child: the data is its parent's, and lands there.
    #[error("this is a forked child, and its parent's data does not land here: make a zone here")]
    Forked,
}
