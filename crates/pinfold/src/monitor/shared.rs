//! One value of a kind for the whole process: the monitor that its caches share, for instance.
//!
//! A lock around an [`Arc`] would be simpler, and would stay locked for ever in a child forked while another thread holds it.

use pinfold_core::first_made::FirstMade;
use std::sync::Arc;

/// A value that is made once and never given back; one that is of no use in this process is followed by another.
#[derive(Debug)]
pub(super) struct Kept<M: 'static> {
    first: Place<M>,
}

type Place<M> = FirstMade<Link<M>>;

#[derive(Debug)]
struct Link<M: 'static> {
    value: Arc<M>,
    next: Place<M>,
}

impl<M> Kept<M> {
    pub(super) const fn new() -> Self {
        Self { first: FirstMade::new() }
    }

    /// What is kept.
    pub(super) fn current(&self) -> Option<&'static M> {
        self.last().map(|link| &*link.value)
    }

    fn last(&self) -> Option<&'static Link<M>> {
        let mut last = self.first.get()?;
        while let Some(next) = last.next.get() {
            last = next;
        }
        Some(last)
    }

    /// Another handle to what is kept, if it is `usable` in this process, else to what `make` makes.
    pub(super) fn get<E>(
        &self,
        usable: impl Fn(&M) -> bool,
        make: impl FnOnce() -> Result<M, E>,
    ) -> Result<Arc<M>, E> {
        let current = self.last();
        if let Some(link) = current.filter(|link| usable(&link.value)) {
            return Ok(Arc::clone(&link.value));
        }
        let fresh = Arc::new(make()?);
        let link = || Box::new(Link { value: Arc::clone(&fresh), next: FirstMade::new() });
        // Other threads may have been faster with theirs, the last of which counts.
        let made = current.map_or(&self.first, |link| &link.next).get_or_make(link);
        let kept = self.last().unwrap_or(made);
        Ok(if usable(&kept.value) { Arc::clone(&kept.value) } else { fresh })
    }
}
