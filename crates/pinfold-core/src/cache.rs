//! The cache's entry points.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the methods that take an address and a length.
//!
//! The contract of every one of them is this one paragraph. **The caller may let the device use
//! these bytes in the way asked for, for as long as the lease lives:** either the bytes stay
//! allocated to the caller and no code relies on their content while a device writes them, or, if it
//! frees, unmaps or remaps them earlier, it has made sure that no transfer is using them. That is
//! what any transfer demands of its buffer; nothing is demanded for the time after the lease, and
//! nothing about telling the cache of changes.

#![allow(unsafe_code)]

use crate::budget::{Account, Lender};
use crate::config::Config;
use crate::error::{ConfigError, GetError};
use crate::foreign::{self, discard, runs_through};
use crate::get::{GetRequest, Lookup};
use crate::lease::Lease;
use crate::miss::Uses;
use crate::monitor::Monitor;
use crate::notice::Notices;
use crate::reclaim::{Reclaim, Reclaimer, ReclaimingThread};
use crate::registrar::Registrar;
use crate::shared::Shared;
use crate::stable::{BufferError, BufferLease, StableBuffer};
use crate::statistics::Statistics;
use crate::sync::JoinHandle;
use crate::{Access, AddressRange};
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};

/// A registration cache over one device and one monitor.
///
/// Share it by reference; every method takes `&self` and may be called from any thread. Dropping
/// it ends every suspension that was forgotten, as if it were overdue, and deregisters everything; not in a
/// forked child, whose parent's they are.
pub struct Cache<R: Registrar, M: Monitor> {
    pub(crate) shared: Arc<Shared<R, M>>,
    reclaimer: Option<JoinHandle<()>>,
}

impl<R: Registrar, M: Monitor> Cache<R, M> {
    /// A cache without a reclaimer: invalidated memory is deregistered by
    /// [`reclaim`](Self::reclaim), or when room is needed.
    ///
    /// Costs some 20 KiB.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the settings make no sense, the monitor is lost already, or it is
    /// [simulated](Monitor::is_simulated) and the registrar is not.
    pub fn new(registrar: R, monitor: M, config: Config) -> Result<Self, ConfigError> {
        let shared = Arc::new(Shared::new(registrar, monitor, config, None)?);
        Ok(Self { shared, reclaimer: None })
    }

    /// As [`new`](Self::new), drawing on a budget that others draw on as well: `account` is asked
    /// before each registration, besides the bounds of `config`, and may have this cache give up
    /// what is idle.
    ///
    /// Another drawer that is recalling something from this cache while it is dropped keeps the
    /// registrar until that is done.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_account(
        registrar: R,
        monitor: M,
        config: Config,
        account: Arc<dyn Account>,
    ) -> Result<Self, ConfigError> {
        let shared = Arc::new(Shared::new(registrar, monitor, config, Some(account))?);
        let lender: Weak<dyn Lender> = Arc::<Shared<R, M>>::downgrade(&shared);
        shared.account.iter().for_each(|account| account.attach(Weak::clone(&lender)));
        Ok(Self { shared, reclaimer: None })
    }

    /// Has `spawn` run the reclaimer on a thread, which ends when the cache is dropped.
    ///
    /// The thread may be woken while memory is being unmapped anywhere in the process; let it
    /// block signals, so that no handler of the program runs on it. The cache waits for it as it is dropped, except
    /// on a reclaimer's thread, where two might wait for each other: it is to end when [`Reclaimer::run`] has
    /// returned.
    ///
    /// # Errors
    ///
    /// What `spawn` says; the cache works on without a reclaimer.
    pub fn start_reclaimer(
        &mut self,
        spawn: impl FnOnce(Reclaimer<R, M>) -> io::Result<JoinHandle<()>>,
    ) -> io::Result<()> {
        if self.reclaimer.is_none() {
            self.reclaimer = Some(spawn(Reclaimer::new(Arc::clone(&self.shared)))?);
        }
        Ok(())
    }

    /// A lease of a registration of `length` bytes from `start`: the one that is there, or a new
    /// one.
    ///
    /// A hit costs the monitor's check, a look-up, and one store to memory of this thread. A miss
    /// costs what the device asks for a registration, with no lock held meanwhile. `length` is at
    /// most what the device registers at once ([`RegistrarLimits`](crate::RegistrarLimits)); longer ranges come
    /// [in pieces](GetRequest::pieces).
    ///
    /// # Errors
    ///
    /// [`GetError`]; nothing is left behind, and no other region is given up unless the error was
    /// about room.
    ///
    /// # Safety
    ///
    /// The caller may let the device use these bytes as `access` says while the lease lives; the
    /// [module's contract](self) has it in full.
    #[inline]
    pub unsafe fn get(
        &self,
        start: *const u8,
        length: usize,
        access: Access,
    ) -> Result<Lease<'_, R, M>, GetError> {
        // SAFETY: the caller's promise.
        unsafe {
            Lookup(&self.shared).get(
                Lookup(&self.shared).wish(start, length, access),
                Uses::Unknown,
                None,
            )
        }
    }

    /// The same with something to say about it: for one use only, to be kept, vouched for, only if it is
    /// cached, in pieces. Nothing happens before the request's last call.
    #[inline]
    pub fn request(&self, start: *const u8, length: usize, access: Access) -> GetRequest<'_, R, M> {
        GetRequest::new(&self.shared, Lookup(&self.shared).wish(start, length, access), false)
    }

    /// One check of the monitor for several gets.
    ///
    /// The gets that follow count as begun now: they know every change that took effect before
    /// this call, and may miss one that comes between.
    ///
    /// # Errors
    ///
    /// [`GetError::Forked`] in a forked child.
    pub fn check(&self) -> Result<Checked<'_, R, M>, GetError> {
        Lookup(&self.shared).bring_up_to_date()?;
        Ok(Checked { cache: self })
    }

    /// The program's word that `range` changed, or is about to: no registration of it is handed
    /// out again. Those in use end with their last lease.
    ///
    /// It takes the cache's lock, under which a call may allocate and free. So no global allocator and no signal
    /// handler may call this, or anything else of a cache: it would wait for ever for a lock that its own thread
    /// holds. Such code reports to `pinfold::monitor::Feed`, which takes none, and the cache's monitor is combined
    /// with that feed.
    ///
    /// Does nothing in a forked child, where none is handed out.
    pub fn invalidate(&self, range: AddressRange) {
        self.shared.invalidate_now(range, None);
    }

    /// As [`invalidate`](Self::invalidate); `done` runs once, when the last registration that
    /// shares a byte with `range` has been given back: at once if there is none.
    ///
    /// It runs with no lock of the cache held, on this thread or on the one that gave the last
    /// registration back. A panic in it is caught and counted. In a forked child it is dropped.
    pub fn invalidate_then(&self, range: AddressRange, done: impl FnOnce() + Send + 'static) {
        self.shared.invalidate_now(range, Some(Box::new(done)));
    }

    /// Applies what the monitor saw and gives back every registration that is neither findable
    /// nor leased: one step of the reclaimer, explicitly. Says how many were deregistered.
    pub fn reclaim(&self) -> usize {
        Reclaim(&self.shared).reclaim()
    }

    /// Gives up every registration that is not leased, as if room were needed, and waits until
    /// those that other threads are giving back are gone. Says how many this call gave back.
    ///
    /// For the moments when other code needs the room, or the device is about to be closed.
    pub fn evict_idle(&self) -> usize {
        Reclaim(&self.shared).evict_idle()
    }

    /// Gives up the registrations that touch `range` and are not leased, for one who is about to have its
    /// pages moved or given up. Says how many this call gave back; others may be about to be.
    ///
    /// A hint: a get right behind it may register the range again.
    pub fn evict_idle_in(&self, range: AddressRange) -> usize {
        Reclaim(&self.shared).evict_idle_in(range)
    }

    /// Leases a buffer that this crate knows to be stable: the safe method. One lease, or several where
    /// the device registers no more at once.
    ///
    /// Gives all the rights that the kind of buffer allows: reading for shared ones, reading and
    /// writing for those with one owner.
    ///
    /// # Errors
    ///
    /// [`BufferError`], which holds the buffer; no lease is left.
    pub fn lease_buffer<B: StableBuffer>(
        &self,
        buffer: B,
    ) -> Result<BufferLease<'_, B, R, M>, BufferError<B>> {
        BufferLease::of(&self.shared, buffer)
    }

    /// A queue of what happens from now on, for at most `capacity` notices at a time (at least one, at
    /// most [`MOST_NOTICES`](crate::notice::MOST_NOTICES)).
    /// Each of several queues hears everything.
    pub fn notices(&self, capacity: usize) -> Notices<'_, R, M> {
        Notices::of(&self.shared, capacity)
    }

    /// What the cache has done and what it holds; zeros in a forked child.
    pub fn statistics(&self) -> Statistics {
        self.shared.statistics()
    }

    /// The settings in force, bounded by the registrar's limits.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The registrar.
    pub fn registrar(&self) -> &R {
        &self.shared.registrar
    }

    /// The monitor.
    pub fn monitor(&self) -> &M {
        &self.shared.monitor
    }

    /// Whether this is a forked child of the process whose cache it is. A monitor that panics over it has said no:
    /// destructors ask.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.shared.is_forked()
    }
}

/// Several gets behind one monitor check; made by [`Cache::check`].
#[derive(Clone, Copy)]
pub struct Checked<'c, R: Registrar, M: Monitor> {
    cache: &'c Cache<R, M>,
}

impl<'c, R: Registrar, M: Monitor> Checked<'c, R, M> {
    /// As [`Cache::get`], begun when the check was made.
    ///
    /// # Errors
    ///
    /// As [`Cache::get`].
    ///
    /// # Safety
    ///
    /// As [`Cache::get`].
    #[inline]
    pub unsafe fn get(
        &self,
        start: *const u8,
        length: usize,
        access: Access,
    ) -> Result<Lease<'c, R, M>, GetError> {
        let shared = &self.cache.shared;
        // SAFETY: the caller's promise.
        unsafe {
            Lookup(shared).get_checked(
                Lookup(shared).wish(start, length, access),
                Uses::Unknown,
                None,
            )
        }
    }

    /// As [`Cache::request`], begun when the check was made, however late it is asked for.
    #[inline]
    pub fn request(&self, start: *const u8, length: usize, access: Access) -> GetRequest<'c, R, M> {
        let shared = &self.cache.shared;
        GetRequest::new(shared, Lookup(shared).wish(start, length, access), true)
    }
}

impl<R: Registrar, M: Monitor> Drop for Cache<R, M> {
    fn drop(&mut self) {
        // In a forked child the reclaimer's thread does not exist, and what is registered is
        // the parent's.
        if self.shared.is_forked() {
            std::mem::forget(self.reclaimer.take());
            return;
        }
        let is_told = self.shared.close();
        // A callback that a reclaimer runs may hold the last reference to the cache. That reclaimer cannot wait for
        // itself, and another's not for this one: a callback there may be dropping the other cache. And one that was
        // not told sleeps on with what it shares, which is no harm.
        let waits = is_told && !ReclaimingThread::is_this();
        if let Some(reclaimer) = self.reclaimer.take().filter(|_| waits) {
            // A reclaimer that panicked in the monitor has nothing to add. The standard library panics where the thread
            // is this one.
            let _ended = runs_through(|| reclaimer.join().unwrap_or_else(discard));
        }
        // No suspension has an owner any more: those that were forgotten hold connections of the device's.
        let ended = foreign::call(|| {
            self.shared.end_suspensions.get().iter().for_each(|end| end(&self.shared));
        });
        Reclaim(&self.shared).deregister_all();
        if let Err(panicked) = ended {
            panicked.resume_unless_unwinding();
        }
    }
}

/// One short line; [`Cache::config`] and [`Cache::statistics`] have the rest.
impl<R: Registrar, M: Monitor> fmt::Debug for Cache<R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Statistics { regions, pinned_bytes, .. } = self.statistics();
        f.debug_struct("Cache")
            .field("monitor", &self.shared.monitor.name())
            .field("regions", &regions)
            .field("pinned_bytes", &pinned_bytes)
            .finish_non_exhaustive()
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for Checked<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked").finish_non_exhaustive()
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for Shared<R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;
    use crate::fake::{Calm, Fake, Willing};
    use crate::registrar::{DeregisterError, RegisterError, RegistrarLimits};
    use crate::{Uncovered, Watch};

    /// A registrar that does not say that it is simulated, as one of a real device.
    struct Real;

    // SAFETY: no device stands behind it, and no memory is touched through its handles.
    unsafe impl Registrar for Real {
        type Handle = ();

        fn limits(&self) -> RegistrarLimits {
            RegistrarLimits::new(4096, 1 << 20, 8)
        }

        unsafe fn register(&self, _: AddressRange, _: Access) -> Result<(), RegisterError> {
            Ok(())
        }

        unsafe fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
            Ok(())
        }
    }

    /// A monitor that covers nothing, and does not say that it is simulated.
    struct Blind;

    // SAFETY: it covers no range.
    unsafe impl Monitor for Blind {
        crate::forward_monitor!(self, Fake(Calm), is_simulated: false);

        fn watch(&self, _: AddressRange) -> Watch {
            Watch::Uncovered(Uncovered::NoMonitor)
        }
    }

    /// Why no cache is made of these.
    fn refusal<R: Registrar, M: Monitor>(registrar: R, monitor: M) -> Option<ConfigError> {
        Cache::new(registrar, monitor, Config::keeping_all()).err()
    }

    #[test]
    fn a_simulated_monitor_is_not_believed_of_memory_that_a_device_reaches() {
        let refused = Some(ConfigError::SimulatedMonitor);
        let (calm, device) = (Fake(Calm), Fake(Willing));
        assert_eq!(refusal(Real, calm), refused);
        assert_eq!(refusal(Arc::new(Real), Arc::new(calm)), refused);
        assert_eq!(refusal(Real, Arc::new(calm) as Arc<dyn Monitor>), refused);
        assert_eq!(refusal((device, Real), calm), refused);
        assert_eq!(refusal(Arc::new((Real, Arc::new(device))), calm), refused);
        assert_eq!(refusal([(device, Real), (device, Real)], calm), refused);
    }

    #[test]
    fn what_is_simulated_goes_together_and_a_real_monitor_with_either() {
        let (calm, device) = (Fake(Calm), Fake(Willing));
        assert_eq!(refusal(device, calm), None);
        assert_eq!(refusal(Arc::new((device, [device; 2])), Arc::new(calm)), None);
        assert_eq!(refusal(device, Blind), None);
        assert_eq!(refusal((device, Real), Blind), None);
    }
}
