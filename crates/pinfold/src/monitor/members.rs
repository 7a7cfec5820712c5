//! Values that threads find without a lock around them all: each stays until it is removed.
//!
//! # What a thread may believe
//!
//! *If a value was entered before a look, and no removal of it happened before the look's end, the look finds it. A thread
//! that finds it removed, or finds the count without it, has seen what the removing thread did before.* Places are only
//! added, and never freed; a look goes through all that there are.
//!
//! "Before" is the language's: what orders the two may be a lock of the kernel's.

use crate::sync::{AtomicUsize, FirstMade, Mutex, Ordering};
use std::iter::successors;
use std::sync::{Arc, PoisonError};

#[derive(Debug)]
pub(super) struct Members<T: 'static> {
    /// How many there are, not less.
    count: AtomicUsize,
    first: Place<T>,
}

#[derive(Debug)]
struct Place<T: 'static> {
    /// Guards the pointer: as long as it takes to copy or exchange it. No memory is mapped, allocated or freed then, and no other
    /// lock is taken.
    member: Mutex<Option<Arc<T>>>,
    next: FirstMade<Self>,
}

impl<T> Place<T> {
    fn new() -> Self {
        Self { member: Mutex::new(None), next: FirstMade::new() }
    }

    /// Runs `change` under the lock.
    fn with<A>(&self, change: impl FnOnce(&mut Option<Arc<T>>) -> A) -> A {
        change(&mut self.member.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T> Members<T> {
    pub(super) fn new() -> Self {
        Self { count: AtomicUsize::new(0), first: Place::new() }
    }

    fn places(&self) -> impl Iterator<Item = &Place<T>> {
        successors(Some(&self.first), |place| place.next.get())
    }

    /// How many there are, or more: entered ones count from before they can be found, until they cannot be.
    pub(super) fn count(&self) -> usize {
        // Acquire: pairs with the subtraction in `remove`.
        self.count.load(Ordering::Acquire)
    }

    /// Puts `member` in. May allocate, under no lock.
    pub(super) fn enter(&self, member: &Arc<T>) {
        // Relaxed: who must find the member is ordered behind this call.
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut place = &self.first;
        loop {
            let entered = place.with(|found| {
                let is_free = found.is_none();
                if is_free {
                    *found = Some(Arc::clone(member));
                }
                is_free
            });
            if entered {
                return;
            }
            place = place.next.get_or_make(|| Box::new(Place::new()));
        }
    }

    /// Takes `member` out. False if it was not there.
    pub(super) fn remove(&self, member: &Arc<T>) -> bool {
        let take = |place: &Place<T>| {
            place.with(|found| found.take_if(|found| Arc::ptr_eq(found, member)))
        };
        // What is taken out is dropped under no lock.
        let removed = self.places().find_map(take).is_some();
        if removed {
            // Release: a thread that counts one less sees what this thread did before.
            self.count.fetch_sub(1, Ordering::Release);
        }
        removed
    }

    /// Runs `code` while the first place is locked.
    #[cfg(test)]
    pub(super) fn while_locked<A>(&self, code: impl FnOnce() -> A) -> A {
        self.first.with(|_| code())
    }

    /// Whether `is_so` says yes of one of them. It is asked under no lock.
    pub(super) fn any(&self, mut is_so: impl FnMut(&Arc<T>) -> bool) -> bool {
        self.places().filter_map(|place| place.with(|found| found.clone())).any(|it| is_so(&it))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::LazyLock;

    fn all(members: &Members<u32>) -> Vec<u32> {
        let mut all = Vec::new();
        assert!(!members.any(|member| {
            all.push(**member);
            false
        }));
        all
    }

    #[test]
    fn what_was_entered_is_found_until_it_is_removed() {
        // Its places stay as long as the process.
        static MEMBERS: LazyLock<Members<u32>> = LazyLock::new(Members::new);
        let members = &*MEMBERS;
        let [one, two, three] = [1, 2, 3].map(Arc::new);
        [&one, &two].iter().for_each(|member| members.enter(member));
        assert_eq!((all(members), members.count()), (vec![1, 2], 2));
        assert!(members.any(|member| **member == 2));
        assert!(members.remove(&one) && !members.remove(&one));
        assert_eq!((all(members), members.count()), (vec![2], 1));
        members.enter(&three);
        assert_eq!((all(members), members.count()), (vec![3, 2], 2));
        assert!(!members.remove(&Arc::new(2)), "another of the same value");
    }

    /// A member is dropped, and is asked, under no lock.
    #[test]
    fn a_member_may_use_the_list() {
        struct Leaves(Arc<Members<Self>>);
        impl Drop for Leaves {
            fn drop(&mut self) {
                assert!(!self.0.any(|_| true));
            }
        }
        let members = Arc::new(Members::new());
        let member = Arc::new(Leaves(Arc::clone(&members)));
        members.enter(&member);
        drop(member);
        assert!(members.any(|member| members.remove(member)));
        assert_eq!(members.count(), 0);
    }
}
