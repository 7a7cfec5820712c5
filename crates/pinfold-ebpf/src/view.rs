//! Everything that a process needs to follow its own changes.

use std::os::fd::OwnedFd;

/// Which view.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ViewId(pub u64);

/// A process's view of its own changes; descriptors only, so it can be sent to it.
#[derive(Debug)]
pub struct View {
    /// Read-only.
    pub changes: OwnedFd,
    /// What matters to the process.
    pub wishes: OwnedFd,
    /// Readable when the bell is rung.
    pub bell: OwnedFd,
    /// Keep the programs attached.
    pub links: Vec<OwnedFd>,
}

/// These descriptors make no view.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WrongDescriptors;

impl View {
    /// In the order in which [`Self::from_descriptors`] takes them.
    pub fn into_descriptors(self) -> Vec<OwnedFd> {
        let mut all = vec![self.changes, self.wishes, self.bell];
        all.extend(self.links);
        all
    }

    /// The reverse of [`Self::into_descriptors`].
    ///
    /// # Errors
    ///
    /// [`WrongDescriptors`] when there are too few.
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Result<Self, WrongDescriptors> {
        let mut rest = descriptors.into_iter();
        let mut next = || rest.next().ok_or(WrongDescriptors);
        let (changes, wishes, bell) = (next()?, next()?, next()?);
        Ok(Self { changes, wishes, bell, links: rest.collect() })
    }
}
