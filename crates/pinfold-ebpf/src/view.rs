//! What one process holds to follow its own changes.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for what makes a view of bare descriptors: code that believes it rests on what
//! they are; and to promise that what is mapped of them bears being written by others.

#![allow(unsafe_code)]

use crate::layout::{Changes, WatchFilter};
use pinfold_kernel::mapping::Shareable;
use std::os::fd::OwnedFd;

// SAFETY: nothing but atomics and words that no code reads.
unsafe impl Shareable for Changes {}
// SAFETY: as above.
unsafe impl Shareable for WatchFilter {}

/// Tells a view from every other of the same [`Programs`](crate::Programs).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ViewId(pub(crate) u64);

/// Everything a process needs to follow its own changes: descriptors only, so that it can be sent
/// over a Unix socket.
///
/// Its holder can read where one process's mappings change and say which of them matter to
/// it; it can write nothing else that the programs believe, and sees no other process's changes.
///
/// As long as it is a view, nothing else can take back what its holder asks to be told:
///
/// ```compile_fail,E0616
/// # fn blinds(view: &pinfold_ebpf::View) {
/// let another = view.wishes.try_clone();
/// # }
/// ```
#[derive(Debug)]
pub struct View {
    pub(crate) parts: ViewParts,
    pub(crate) id: ViewId,
}

/// A view taken apart.
#[derive(Debug)]
pub struct ViewParts {
    /// Array map of one [`Changes`](crate::layout::Changes); can be mapped for reading only.
    pub changes: OwnedFd,
    /// Array map of one [`WatchFilter`](crate::layout::WatchFilter); can be mapped for reading and writing.
    pub wishes: OwnedFd,
    /// Ring buffer; readable when there is an entry for a sleeping thread.
    pub wakeups: OwnedFd,
    /// The attachments: as long as one process holds them, the programs stay, whatever becomes of
    /// the one who loaded them.
    pub links: Vec<OwnedFd>,
}

/// These descriptors cannot be a view: there are too few of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{descriptors} descriptors are too few for a view: both ends must be of one version")]
pub struct IncompleteView {
    /// How many there were.
    pub descriptors: usize,
}

impl View {
    /// Which view this is to the one who made it; zero for one made
    /// [from descriptors](Self::from_descriptors).
    pub fn id(&self) -> ViewId {
        self.id
    }

    /// The descriptors in the order that [`from_descriptors`](Self::from_descriptors) takes.
    pub fn into_descriptors(self) -> Vec<OwnedFd> {
        let ViewParts { changes, wishes, wakeups, links } = self.parts;
        let mut all = vec![changes, wishes, wakeups];
        all.extend(links);
        all
    }

    /// What it is made of, for those who follow it.
    pub fn into_parts(self) -> ViewParts {
        self.parts
    }

    /// A view from what [`into_descriptors`](Self::into_descriptors) gave, perhaps in another
    /// process. Whether they are of the right kinds shows when they are used.
    ///
    /// # Errors
    ///
    /// [`IncompleteView`] if there are too few.
    ///
    /// # Safety
    ///
    /// They are what it gave for one view, whose programs are this version's, and no other view is made of
    /// them or of copies of them: a second monitor over one view takes back what the first asked to be told.
    pub unsafe fn from_descriptors(descriptors: Vec<OwnedFd>) -> Result<Self, IncompleteView> {
        let count = descriptors.len();
        let mut each = descriptors.into_iter();
        match (each.next(), each.next(), each.next()) {
            (Some(changes), Some(wishes), Some(wakeups)) if count > 3 => {
                let parts = ViewParts { changes, wishes, wakeups, links: each.collect() };
                Ok(Self { parts, id: ViewId(0) })
            }
            _ => Err(IncompleteView { descriptors: count }),
        }
    }
}
