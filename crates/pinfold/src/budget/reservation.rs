//! Registrations that later cannot fail, because they have been made.
//!
//! # What it costs
//!
//! The memory, pinned, from the moment it is reserved; making it, what the registrar asks for that
//! many registrations. Taking a buffer and giving it back: a lock for the time of a push or a pop.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register memory of its own, and to lend a buffer of it to
//! the holder of its number, which is in the list of free ones or with one holder.

#![allow(unsafe_code)]

use super::memory::Memory;
use super::share::{Budget, BudgetError, DeviceRequest, ShareAccount};
use super::{Amount, Terms};
use pinfold_core::foreign::{self, ForeignPart};
use pinfold_core::{Access, Account, AddressRange, Recalls, RegisterError, Registrar};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is to be reserved: so many buffers of the same length, each with a registration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserve {
    /// How many buffers.
    pub buffers: usize,
    /// The length of each, in bytes; rounded up to whole pages.
    pub buffer_bytes: usize,
    /// What the device will do with them.
    pub access: Access,
}

impl Reserve {
    /// This many buffers of one page each, for the device to read and write.
    pub fn pages(count: usize) -> Self {
        Self { buffers: count, buffer_bytes: 1, access: Access::READ_WRITE }
    }
}

/// Why nothing was reserved. Nothing is left behind.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// No buffers, or buffers of no bytes, or of more than there are addresses.
    #[error(
        "{} buffers of {} bytes: reserve at least one of each, and no more than there are \
         addresses",
        .reserve.buffers,
        .reserve.buffer_bytes
    )]
    Size {
        /// What was asked for.
        reserve: Reserve,
    },
    /// The budget does not hold it.
    #[error("{0}")]
    Budget(#[source] BudgetError),
    /// The registrar refused, after as many as this.
    #[error("nothing is reserved: {made} buffers could be registered, then: {error}")]
    Register {
        /// How many buffers had been registered, and were given back.
        made: usize,
        /// Why not the next.
        #[source]
        error: RegisterError,
    },
    /// There is no memory.
    #[error("there is no memory to reserve: {}", io::Error::from_raw_os_error(*.errno))]
    Memory {
        /// The kernel's error number.
        errno: i32,
    },
}

/// Registered buffers, made when the reservation was, and taken one by one later.
///
/// Taking one that is free cannot fail, whatever other processes of the same user pin meanwhile and
/// however far the limit is lowered: the kernel has counted it. Clones are the same reservation.
#[derive(Debug)]
pub struct Reservation<R: Registrar> {
    inner: Arc<Inner<R>>,
}

impl<R: Registrar> Clone for Reservation<R> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

#[derive(Debug)]
struct Inner<R: Registrar> {
    registrar: ForeignPart<Arc<R>>,
    memory: Memory,
    /// The registration of each buffer.
    handles: Vec<(R::Handle, AddressRange)>,
    /// Guards the numbers of the free buffers. Rank: nothing is taken or called under it. It has
    /// room for all of them from the start.
    free: Mutex<Vec<usize>>,
    /// What it counts in the budget; given back last.
    share: ShareAccount,
}

impl Budget {
    /// Registers memory now, for uses that later cannot fail.
    ///
    /// It counts in the budget as a drawer of its own. What caches and pools that share the budget leave idle is given up
    /// for it, if the budget or the device has no room.
    ///
    /// # Errors
    ///
    /// [`ReserveError`]: what cannot be honoured is refused here.
    pub fn reserve<R: Registrar>(
        &self,
        registrar: &Arc<R>,
        reserve: Reserve,
    ) -> Result<Reservation<R>, ReserveError> {
        let page_bytes = registrar.limits().page_bytes;
        let pins = registrar.pins_per_page();
        let size = Size::of(reserve, page_bytes, pins).ok_or(ReserveError::Size { reserve })?;
        let amount = size.counted(reserve.buffers);
        let terms = Terms { minimum: amount, maximum: amount, weight: 0 };
        let share = ShareAccount::new(self.share_recalled(terms).map_err(ReserveError::Budget)?);
        take_promised(&share, amount).map_err(ReserveError::Budget)?;
        share.settle();
        let memory = Memory::new(reserve.buffers, size.part_bytes)
            .map_err(|errno| ReserveError::Memory { errno: errno.0 })?;
        let mut inner = Inner {
            registrar: ForeignPart::new(Arc::clone(registrar)),
            memory,
            handles: Vec::with_capacity(reserve.buffers),
            free: Mutex::new((0..reserve.buffers).rev().collect()),
            share,
        };
        let mut recalls = Recalls::new();
        for number in 0..reserve.buffers {
            inner.register_or_recall(number, (reserve, size), &mut recalls)?;
        }
        inner.share.settle();
        Ok(Reservation { inner: Arc::new(inner) })
    }
}

/// What a reservation takes.
#[derive(Clone, Copy)]
struct Size {
    /// The length of one buffer, in whole pages.
    part_bytes: usize,
    /// How many devices pin each page.
    pins: usize,
}

impl Size {
    /// `None` if there is none, or no sum of it.
    fn of(reserve: Reserve, page_bytes: usize, pins: usize) -> Option<Self> {
        let part_bytes = reserve.buffer_bytes.checked_next_multiple_of(page_bytes)?;
        let bytes = part_bytes.checked_mul(reserve.buffers)?;
        let sensible = bytes > 0 && bytes <= isize::MAX as usize;
        bytes.checked_mul(pins)?;
        sensible.then_some(Self { part_bytes, pins })
    }

    /// What one device pins of so many buffers, which are no more than are reserved.
    const fn pinned(self, buffers: usize) -> Amount {
        Amount { bytes: self.part_bytes * buffers, regions: buffers }
    }

    /// What they count in the budget: each page for each device.
    const fn counted(self, buffers: usize) -> Amount {
        Amount { bytes: self.part_bytes * buffers * self.pins, regions: buffers }
    }
}

/// Takes `amount` of the minimum. It is refused only if the budget has become less than all its minimums since they
/// were promised, and in a forked child.
fn take_promised(share: &ShareAccount, amount: Amount) -> Result<(), BudgetError> {
    share.take(amount).map_err(|refusal| match share.budget().forked() {
        true => BudgetError::Forked,
        false => BudgetError::Kept { minimum: amount, free: amount - refusal.missing },
    })
}

impl<R: Registrar> Inner<R> {
    /// Registers a buffer; where the device has no room for it, others give back what they leave idle, and it is tried
    /// again.
    ///
    /// What is not registered yet is not held while they are asked: what the device has taken is what all drawers hold
    /// without it. No other drawer can take it meanwhile, because it is of the minimum.
    fn register_or_recall(
        &mut self,
        number: usize,
        (reserve, size): (Reserve, Size),
        recalls: &mut Recalls,
    ) -> Result<(), ReserveError> {
        let missing = size.counted(reserve.buffers - number);
        let request = DeviceRequest { whole: size.pinned(reserve.buffers), missing };
        loop {
            // Forked inside a lender, or the registrar before.
            self.refuse_child()?;
            let Err(error) = self.register(number, reserve.access) else { return Ok(()) };
            self.refuse_child()?;
            let mut taken = Ok(());
            let gave = error.is_about_room()
                && recalls.ask(|| {
                    self.share.give_unused(missing);
                    let gave = self.share.make_room_on_device(error, request, true);
                    taken = take_promised(&self.share, missing);
                    gave
                });
            taken.map_err(ReserveError::Budget)?;
            if !gave {
                return Err(ReserveError::Register { made: number, error });
            }
        }
    }

    fn refuse_child(&self) -> Result<(), ReserveError> {
        match self.share.budget().forked() {
            true => Err(ReserveError::Budget(BudgetError::Forked)),
            false => Ok(()),
        }
    }

    fn register(&mut self, number: usize, access: Access) -> Result<(), RegisterError> {
        let Some(range) = self.memory.range(number) else { return Ok(()) };
        // SAFETY: the memory is this reservation's own; `Reserved` documents for its taker that the
        // device may touch it.
        let handle = unsafe { self.registrar.register(range, access) }?;
        self.handles.push((handle, range));
        Ok(())
    }

    /// `None` in a forked child, where a thread that does not exist may hold the lock.
    fn free(&self) -> Option<MutexGuard<'_, Vec<usize>>> {
        let is_ours = !self.share.budget().forked();
        is_ours.then(|| self.free.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<R: Registrar> Drop for Inner<R> {
    fn drop(&mut self) {
        let mut panicked = None;
        for &(handle, range) in &self.handles {
            // What a forked child inherited is its parent's to give back, also forked inside the registrar.
            if self.share.budget().forked() {
                break;
            }
            // A device that is gone has released everything. One that panics keeps none of the others.
            // SAFETY: the reservation registered it, and no buffer of it is taken any more: each holds
            // the reservation.
            let called = foreign::call(|| unsafe { self.registrar.deregister(handle, range) });
            panicked = panicked.or(called.err());
        }
        if let Some(panicked) = panicked {
            panicked.resume_unless_unwinding();
        }
    }
}

impl<R: Registrar> Reservation<R> {
    /// One of the free buffers. `None` only when all that were reserved are taken, and in a forked
    /// child: the registrations are of its parent's pages.
    pub fn take(&self) -> Option<Reserved<R>> {
        let number = self.inner.free()?.pop()?;
        Some(Reserved { inner: Arc::clone(&self.inner), number })
    }

    /// How many buffers are free; none in a forked child.
    pub fn remaining(&self) -> usize {
        self.inner.free().map_or(0, |free| free.len())
    }

    /// How many buffers there are.
    pub fn len(&self) -> usize {
        self.inner.handles.len()
    }

    /// Never: a reservation of nothing is refused.
    pub fn is_empty(&self) -> bool {
        self.inner.handles.is_empty()
    }
}

/// A buffer of a reservation with its registration; free again when it is dropped.
///
/// Its bytes are what the last user left. As with any buffer, the code that starts a transfer sees to it
/// that the bytes are not used, and that this lives, until the transfer has ended.
#[derive(Debug)]
pub struct Reserved<R: Registrar> {
    inner: Arc<Inner<R>>,
    number: usize,
}

impl<R: Registrar> Reserved<R> {
    /// What names the registration to the device.
    pub fn handle(&self) -> R::Handle {
        self.inner.handles[self.number].0
    }

    /// The registered bytes.
    pub fn range(&self) -> AddressRange {
        self.inner.handles[self.number].1
    }
}

impl<R: Registrar> Deref for Reserved<R> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the number left the list of free ones with this value.
        unsafe { &*self.inner.memory.part(self.number) }
    }
}

impl<R: Registrar> DerefMut for Reserved<R> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this value is borrowed exclusively.
        unsafe { &mut *self.inner.memory.part(self.number) }
    }
}

impl<R: Registrar> Drop for Reserved<R> {
    fn drop(&mut self) {
        if let Some(mut free) = self.inner.free() {
            free.push(self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::discovery::Kind;
    use super::*;
    use pinfold_core::RegistrarLimits;
    use std::fs;

    const PAGE: usize = 4096;

    /// The limit is lowered between the two.
    #[test]
    fn what_was_promised_is_refused_where_the_budget_has_become_less_since() {
        let root = std::env::temp_dir().join(format!("pinfold-promised-{}", std::process::id()));
        fs::create_dir_all(root.join("proc/self")).unwrap();
        let limit = |bytes: usize| {
            let text = format!("Max locked memory {bytes} {bytes} bytes\n");
            fs::write(root.join("proc/self/limits"), text).unwrap();
        };
        limit(16 * PAGE);
        let limits = RegistrarLimits::new(PAGE, 1 << 20, 16);
        let budget = Budget::discover_below(&root, Kind::Mlock, limits).unwrap();
        let minimum = Amount { bytes: 8 * PAGE, regions: 8 };
        let terms = Terms { minimum, maximum: minimum, weight: 0 };
        let share = ShareAccount::new(budget.share_recalled(terms).unwrap());
        limit(4 * PAGE);
        assert_eq!(budget.refresh().bytes, 4 * PAGE);
        let free = Amount { bytes: 4 * PAGE, regions: 8 };
        assert_eq!(take_promised(&share, minimum), Err(BudgetError::Kept { minimum, free }));
        assert_eq!(budget.held(), Amount::ZERO);
        limit(16 * PAGE);
        budget.refresh();
        assert_eq!(take_promised(&share, minimum), Ok(()));
        fs::remove_dir_all(root).unwrap();
    }
}
