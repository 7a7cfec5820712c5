//! A registration under way: others who want the same memory wait for it instead of repeating it.

use crate::AddressRange;
use crate::region::{Terms, Want};
use crate::sync::{Condvar, Mutex, ThreadMark, lock, wait};
use crate::unapplied::{ChangeCount, Unapplied};
use std::sync::Arc;

/// One registration under way. Belongs to the holder of the writer's lock.
pub(crate) struct Flight {
    pub(crate) range: AddressRange,
    pub(crate) terms: Terms,
    /// The place that the registration will fill.
    pub(crate) number: u32,
    /// Whether others may wait for it, because it is to serve more than one use.
    pub(crate) is_shared: bool,
    /// How many changes there were when it was enlisted.
    pub(crate) born: ChangeCount,
    /// Set when a change was applied that concerns it.
    pub(crate) tainted: bool,
    /// Where others wait for its end; made by the first of them.
    pub(crate) landing: Option<Arc<Landing>>,
    /// The thread that registers.
    pub(crate) thread: ThreadMark,
}

impl Flight {
    pub(crate) fn new(range: AddressRange, terms: Terms, number: u32, born: ChangeCount) -> Self {
        let thread = ThreadMark::of_this();
        Self { range, terms, number, is_shared: true, born, tainted: false, landing: None, thread }
    }

    /// One that serves a single use.
    pub(crate) fn for_one_use(
        range: AddressRange,
        terms: Terms,
        number: u32,
        born: ChangeCount,
    ) -> Self {
        Self { is_shared: false, ..Self::new(range, terms, number, born) }
    }

    /// Whether what is being registered would serve `want`.
    pub(crate) fn would_serve(&self, want: &Want) -> bool {
        want.served_by(self.range, self.terms)
    }

    /// Whether another thread makes it, and it is to serve `want` as well.
    pub(crate) fn is_of_others_for(&self, want: &Want) -> bool {
        self.is_shared && self.would_serve(want) && !self.is_of_this_thread()
    }

    /// Whether this very thread registers, which asks while it does: it must not wait.
    pub(crate) fn is_of_this_thread(&self) -> bool {
        self.thread.is_this()
    }

    /// What is being registered, and how many changes there were when that began.
    pub(crate) const fn filling(&self) -> (Want, ChangeCount) {
        (Want { range: self.range, terms: self.terms }, self.born)
    }

    /// Notes a change.
    pub(crate) fn taint_if_hit(&mut self, change: &Unapplied) {
        self.tainted |= change.concerns(self.range, self.born);
    }

    /// Where to wait for its end.
    pub(crate) fn await_landing(&mut self) -> Arc<Landing> {
        Arc::clone(self.landing.get_or_insert_with(|| Arc::new(Landing::new())))
    }
}

/// Where the end of a registration is waited for.
pub(crate) struct Landing {
    /// Whether the registration ended. Rank 3: taken with nothing else held.
    landed: Mutex<bool>,
    ended: Condvar,
}

impl Landing {
    fn new() -> Self {
        Self { landed: Mutex::new(false), ended: Condvar::new() }
    }

    /// Lets the waiting go on.
    pub(crate) fn land(&self) {
        *lock(&self.landed) = true;
        self.ended.notify_all();
    }

    /// Waits for the end of the registration, whichever it is.
    pub(crate) fn wait(&self) {
        let mut landed = lock(&self.landed);
        while !*landed {
            landed = wait(&self.ended, landed);
        }
    }
}
