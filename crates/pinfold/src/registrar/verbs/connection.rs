//! Queue pairs that can be stopped and restarted: the connections of a suspension.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to ask and to change queue pairs that the program lends. Each
//! pointer stands behind a lock that is held for the length of a call, and is gone from there when
//! the program has taken the queue pair back; the lender promises to do that before it destroys it.

#![allow(unsafe_code)]

use super::device::{Domain, has_ended};
use super::ffi::*;
use super::loopback::{Loopback, LoopbackError};
use crate::handshake::{Agreement, Consent};
use libc::{c_int, c_uint};
use pinfold_core::{AddressRange, ConnectionLost, Transfers, Unsupported};
use pinfold_kernel::soft_roce;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A queue pair, as what a suspension stops and restarts.
///
/// Stopping moves it to `SQD`, "send queue drained": what it had begun ends, and what is posted later,
/// or was not begun, waits in its queue. What its *peer* does is not stopped by that, in this queue
/// pair or any other: RDMA reads and writes are served, and messages arrive in what was posted for
/// them. So a range that was registered with remote rights needs the [`Consent`] of the peer of each
/// queue pair that grants such rights ([`agreed`](Self::agreed)); and the lease of a posted receive
/// must end, or the peer agree.
///
/// What waits in its queue goes on under the keys it was posted with. Requests whose registration is
/// renewed under other keys fail then; so complete them before, which leases see to unless they are
/// handed over.
#[derive(Clone)]
pub struct Connection {
    lent: Arc<Lent>,
    agreement: Option<Agreement>,
}

struct Lent {
    domain: Arc<Domain>,
    number: u32,
    /// Guards the queue pair for the length of a call of the library; nothing is locked inside.
    state: Mutex<State>,
}

struct State {
    queue_pair: Loan,
    stops: Stops,
}

/// Whose the queue pair is.
#[derive(Clone, Copy)]
enum Loan {
    /// Ours to stop.
    Lent(NonNull<ibv_qp>),
    /// The program's again, to run or to destroy.
    TakenBack {
        /// Whether it was in a state in which it touches no memory, or its device was taken away.
        at_rest: bool,
    },
}

/// How many suspensions stand on a stopped queue pair: two caches of one device may each have one, and it goes on
/// with the last.
#[derive(Debug, Default)]
struct Stops {
    count: usize,
    /// When the first of them stopped it.
    since: Option<Instant>,
}

impl Stops {
    /// One more has stopped it. If it was `running` before, those that were counted ended with a connection that is
    /// no more.
    fn begin(&mut self, running: bool) {
        if running {
            *self = Self::default();
        }
        self.count = self.count.saturating_add(1);
        self.since.get_or_insert_with(Instant::now);
    }

    /// One lets it go on. Whether it was the last, or none was counted: one that was failed is no longer.
    fn end(&mut self) -> bool {
        self.count = self.count.saturating_sub(1);
        if self.count == 0 {
            self.since = None;
        }
        self.count == 0
    }

    /// How long it has been stopped.
    fn age(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

// SAFETY: the pointer is followed by libibverbs alone, which any thread may call.
unsafe impl Send for State {}

impl State {
    /// The queue pair, unless it was taken back.
    fn queue_pair(&self) -> Result<NonNull<ibv_qp>, Refusal> {
        match self.queue_pair {
            Loan::Lent(queue_pair) => Ok(queue_pair),
            Loan::TakenBack { .. } => Err(Refusal::Gone),
        }
    }

    /// What is not known to have ended.
    fn under_way(&self) -> Transfers {
        Transfers { count: 1, oldest: self.stops.age() }
    }

    /// What a suspension is told that still has it: of what runs no one knows when it has ended, so it never
    /// has. `None` while it is lent.
    fn after_the_loan(&self) -> Option<Result<Transfers, ConnectionLost>> {
        match self.queue_pair {
            Loan::Lent(_) => None,
            Loan::TakenBack { at_rest: true } => Some(Err(ConnectionLost::Gone)),
            Loan::TakenBack { at_rest: false } => Some(Ok(self.under_way())),
        }
    }
}

/// Why a queue pair was neither asked nor changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Refusal {
    /// There is none: its device was taken away, or its program has taken it back.
    Gone,
    /// The device's descriptor was closed. What the library has mapped keeps the device open, so the queue pair may run on,
    /// and no call reaches it.
    Unreachable,
    /// The device refused.
    Device { errno: c_int },
}

impl Refusal {
    const fn of(errno: c_int) -> Self {
        match errno {
            libc::EBADF => Self::Unreachable,
            errno if has_ended(errno) => Self::Gone,
            errno => Self::Device { errno },
        }
    }
}

impl From<Refusal> for ConnectionLost {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Gone | Refusal::Unreachable => Self::Gone,
            Refusal::Device { errno } => Self::Broken { errno },
        }
    }
}

/// What was asked of a queue pair.
struct Status {
    state: c_uint,
    draining: bool,
    /// Whether its peer may read or write memory by keys.
    grants_remote: bool,
}

/// How long a queue pair that does not drain may keep us from letting it go on.
const PATIENCE: Duration = Duration::from_secs(1);

impl Connection {
    /// The program's own queue pair, of `domain`'s device.
    ///
    /// # Safety
    ///
    /// `queue_pair` was made by the library of `domain`, and is destroyed, if at all, after
    /// [`take_back`](Self::take_back) returned or after this and all its clones are gone. It is lent
    /// once: other connections of it are clones of this. No other code moves it out of or into `RTS` and
    /// `SQD` while it is stopped. One that broke where more than one cache had stopped it is made ready again when the
    /// suspensions of all of them are over: an earlier one's [`restart`](Self::restart) would end a later one's stop.
    pub unsafe fn lent(domain: Arc<Domain>, queue_pair: NonNull<ibv_qp>) -> Self {
        // SAFETY: the caller's promise.
        let number = unsafe { (*queue_pair.as_ptr()).qp_num };
        let queue_pair = Loan::Lent(queue_pair);
        let state = Mutex::new(State { queue_pair, stops: Stops::default() });
        Self { lent: Arc::new(Lent { domain, number, state }), agreement: None }
    }

    /// The same connection, whose peer has agreed to keep still.
    ///
    /// # Safety
    ///
    /// The consent is the word of the peer that this queue pair is connected to: the message that made it came from
    /// there. It is [over](Consent::resumed), or dropped, when each suspension that was begun with this
    /// connection is. Memory is moved on that word, into which the peer could write.
    ///
    /// ```compile_fail,E0133
    /// # use pinfold::{handshake::Consent, registrar::verbs::Connection};
    /// fn agree(connection: &Connection, consent: &Consent) -> Connection {
    ///     connection.agreed(consent)
    /// }
    /// ```
    #[must_use]
    pub unsafe fn agreed(&self, consent: &Consent) -> Self {
        Self { agreement: Some(consent.agreement()), ..self.clone() }
    }

    /// The queue pair's number.
    pub fn number(&self) -> u32 {
        self.lent.number
    }

    /// Ends the loan: from now on the connection, and its clones, count as gone. Waits for a call
    /// under way: a command to the device, or a [`restart`](Self::restart).
    ///
    /// A suspension that waits for it to drain does not come about: what the queue pair does from now on is not
    /// known here, so it counts as a transfer under way until the deadline. Not so if it touches no memory any
    /// more: [`fail`](Self::fail) it first, where the suspension is to go on without it. Nor does the queue pair go on by
    /// another hand while a suspension stands that has stopped it: until that has ended, memory moves.
    pub fn take_back(&self) {
        // In a forked child it counts as gone anyway.
        if let Ok(mut state) = self.state()
            && state.queue_pair().is_ok()
        {
            let at_rest = match self.query(&state) {
                Ok(status) => {
                    matches!(status.state, IBV_QPS_RESET | IBV_QPS_INIT | IBV_QPS_ERR)
                }
                Err(refusal) => refusal == Refusal::Gone,
            };
            state.queue_pair = Loan::TakenBack { at_rest };
        }
    }

    /// Moves it to `SQD`. Returns at once, with transfers under way.
    ///
    /// One that the device refuses to stop although it lives is failed: it must not go on unnoticed. One that was
    /// [taken back](Self::take_back) cannot be stopped, nor can one that the device refuses to fail as well, or whose device
    /// cannot be reached because its descriptor was closed: it has [transfers under way](Self::in_flight) for ever.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`].
    pub fn stop(&self) -> Result<(), ConnectionLost> {
        let mut state = self.state()?;
        if let Some(answer) = state.after_the_loan() {
            answer?;
            state.stops.begin(false);
            return Ok(());
        }
        let running = self.query(&state).is_ok_and(|status| status.state == IBV_QPS_RTS);
        if let Err(refusal) = self.modify(&state, IBV_QPS_SQD)
            && self.end(&mut state)
        {
            return Err(refusal.into());
        }
        state.stops.begin(running);
        Ok(())
    }

    /// What it still has under way: one, if the device has not drained its send queue, the program has
    /// [taken it back](Self::take_back) since, or the device's descriptor was closed, behind which it runs on.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`], if it is not stopped: it broke meanwhile, or runs.
    pub fn in_flight(&self) -> Result<Transfers, ConnectionLost> {
        self.transfers(&*self.state()?)
    }

    /// The same for a suspension that stands on it. One that is neither stopped nor broken is failed, because it may touch
    /// memory that is to be moved: its program has made it ready again, or the device does not say in which state it is. It
    /// has one under way if the device refuses that, or cannot be reached.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`], if it broke meanwhile, or was failed.
    pub(super) fn in_flight_or_failed(&self) -> Result<Transfers, ConnectionLost> {
        let mut state = self.state()?;
        let transfers = self.transfers(&state);
        let is_known = transfers.is_ok() || state.after_the_loan().is_some();
        if is_known || self.end(&mut state) {
            return transfers;
        }
        Ok(state.under_way())
    }

    fn transfers(&self, state: &State) -> Result<Transfers, ConnectionLost> {
        if let Some(answer) = state.after_the_loan() {
            return answer;
        }
        match self.stopped(state) {
            Ok(Status { draining: false, .. }) => Ok(Transfers::default()),
            Ok(_) | Err(Refusal::Unreachable) => Ok(state.under_way()),
            Err(refusal) => Err(refusal.into()),
        }
    }

    /// Moves it back to `RTS`, where what waits in its queue goes on. Where it was [stopped](Self::stop) more than
    /// once, as by two caches, it goes on with as many calls of this.
    ///
    /// A device may refuse that while it drains; then this waits, up to a second, and fails the
    /// connection in the open.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`]: it is not re-established.
    ///
    /// # Safety
    ///
    /// No memory is being re-arranged on the word that the connection stands still, on which the caller's `stop`
    /// stood; this is called once for each of those.
    pub unsafe fn restart(&self) -> Result<(), ConnectionLost> {
        const STEP: Duration = Duration::from_micros(50);
        let mut state = self.state()?;
        if !state.stops.end() {
            let stands = self.stopped(&state).map(drop);
            return stands.inspect_err(|_| _ = self.end(&mut state)).map_err(Into::into);
        }
        let began = Instant::now();
        while let Err(refusal) = self.modify(&state, IBV_QPS_RTS) {
            // Whether it drains is not asked: it may have ended since the refusal.
            if self.stopped(&state).is_err() || began.elapsed() > PATIENCE {
                self.end(&mut state);
                return Err(refusal.into());
            }
            std::thread::sleep(STEP);
        }
        self.ring(&state);
        Ok(())
    }

    /// Moves it to `ERR`: what was posted is reported as flushed, and the peer's retries run out.
    pub fn fail(&self) {
        // One that is gone has failed already.
        if let Ok(mut state) = self.state() {
            self.end(&mut state);
        }
    }

    /// Moves it to `ERR`, where no suspension stands on it any more, unless it is in `RESET`. False if the device refuses that,
    /// or cannot be reached.
    fn end(&self, state: &mut State) -> bool {
        let refused = !matches!(self.modify(state, IBV_QPS_ERR), Ok(()) | Err(Refusal::Gone));
        // There is no way from `RESET` to `ERR`, and in neither it touches anything.
        let is_at_rest = || self.query(state).is_ok_and(|status| status.state == IBV_QPS_RESET);
        let ended = !refused || is_at_rest();
        if ended {
            state.stops = Stops::default();
        }
        ended
    }

    /// How it is, if it is in `SQD`.
    fn stopped(&self, state: &State) -> Result<Status, Refusal> {
        let status = self.query(state)?;
        if status.state == IBV_QPS_SQD {
            Ok(status)
        } else {
            Err(Refusal::Device { errno: libc::ENOTCONN })
        }
    }

    /// Gone in a forked child, whose parent's the queue pair is: a thread that is not there may have
    /// held the lock, so that is asked first.
    fn state(&self) -> Result<MutexGuard<'_, State>, ConnectionLost> {
        if self.lent.domain.device().forked() {
            return Err(ConnectionLost::Gone);
        }
        Ok(self.lent.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn modify(&self, state: &State, to: c_uint) -> Result<(), Refusal> {
        let queue_pair = state.queue_pair()?;
        let mut attributes = ibv_qp_attr { qp_state: to, ..ibv_qp_attr::default() };
        let device = self.lent.domain.device();
        let modify = device.library().modify_qp;
        // SAFETY: the queue pair is live as long as the lock is held; the mask names what is set.
        let change = || unsafe { modify(queue_pair.as_ptr(), &raw mut attributes, IBV_QP_STATE) };
        match device.ask(change) {
            0 => Ok(()),
            errno => Err(Refusal::of(errno)),
        }
    }

    fn query(&self, state: &State) -> Result<Status, Refusal> {
        let queue_pair = state.queue_pair()?;
        let mut attributes = ibv_qp_attr::default();
        let mut initial = MaybeUninit::<ibv_qp_init_attr>::zeroed();
        let mask: c_int = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS;
        let device = self.lent.domain.device();
        let query = device.library().query_qp;
        // SAFETY: the queue pair is live as long as the lock is held; there is room for both answers.
        let status = device.ask(|| unsafe {
            let attributes = &raw mut attributes;
            query(queue_pair.as_ptr(), attributes, mask, initial.as_mut_ptr())
        });
        match status {
            0 => Ok(Status {
                state: attributes.qp_state,
                draining: attributes.sq_draining != 0,
                grants_remote: attributes.qp_access_flags & IBV_ACCESS_REMOTE != 0,
            }),
            errno => Err(Refusal::of(errno)),
        }
    }

    /// Has Soft-RoCE look at the queue, which it does when its doorbell is rung and not when a queue pair is back in `RTS`.
    /// Other drivers go on by themselves, and are left alone: not all of them take that command.
    fn ring(&self, state: &State) {
        let Ok(queue_pair) = state.queue_pair() else { return };
        if !self.lent.domain.device().is_there() {
            return;
        }
        // SAFETY: the queue pair is live as long as the lock is held, and its device open, unless its descriptor was closed.
        let _is_soft_roce = unsafe {
            let queue_pair = queue_pair.as_ptr();
            soft_roce::ring((*(*queue_pair).context).cmd_fd, (*queue_pair).handle)
        };
    }

    /// Whether it is a connection of `domain` that can be stopped as it is, and its peer keeps off what is `exposed` to
    /// peers, if anything is.
    pub(super) fn can_stop(
        &self,
        index: usize,
        domain: &Domain,
        exposed: Option<AddressRange>,
        now: Duration,
    ) -> Result<(), Unsupported> {
        let unfit = Unsupported::Connection { index };
        if self.lent.domain.as_ptr() != domain.as_ptr() {
            return Err(unfit);
        }
        let state = self.state().map_err(|_| unfit)?;
        let status = self.query(&state).map_err(|_| unfit)?;
        // SQD: another suspension has stopped it.
        if !matches!(status.state, IBV_QPS_RTS | IBV_QPS_SQD) {
            return Err(unfit);
        }
        let keeps_off = |range| self.agreement.as_ref().is_some_and(|it| it.covers(range, now));
        match exposed.filter(|&range| status.grants_remote && !keeps_off(range)) {
            Some(range) => Err(Unsupported::PeerMayWrite { range }),
            None => Ok(()),
        }
    }
}

impl PartialEq for Connection {
    /// Whether it is the same loan; which peer agreed to what is not compared.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.lent, &other.lent)
    }
}

impl Eq for Connection {}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("number", &self.lent.number)
            .field("agreement", &self.agreement)
            .finish_non_exhaustive()
    }
}

/// What the trial of a device came to.
pub(super) enum Verdict {
    /// The device's own word, which stands.
    Said(Result<(), Unsupported>),
    /// It was not asked, or not in a fair way: a port is down, memory is short, time ran out.
    Untested(Unsupported),
}

/// Whether the device really stops and restarts a queue pair: tried with one of our own, because many
/// claim the state and few have it. Some milliseconds. Whether it says of a busy queue that it drains is not tried: its word
/// is taken for that.
pub(super) fn test(domain: &Arc<Domain>) -> Verdict {
    let loopback = match Loopback::new(Arc::clone(domain)) {
        Ok(loopback) => loopback,
        Err(error) => return Verdict::Untested(untestable(&error)),
    };
    let Some(queue_pair) = loopback.sender() else {
        return Verdict::Untested(Unsupported::Device);
    };
    // SAFETY: the loopback, which has no other user, outlives the connection.
    let connection = unsafe { Connection::lent(Arc::clone(domain), queue_pair) };
    match connection.stop_and_restart() {
        Err(why @ Unsupported::Refused { errno, .. }) if is_passing(errno) => {
            Verdict::Untested(why)
        }
        said => Verdict::Said(said),
    }
}

impl Connection {
    /// For one to which nothing was posted.
    fn stop_and_restart(&self) -> Result<(), Unsupported> {
        self.stop().map_err(|lost| refused("ibv_modify_qp to SQD", lost))?;
        let draining = |lost| refused("ibv_query_qp in SQD", lost);
        // Nothing was posted, so this ends with the device's next look at the queue.
        let began = Instant::now();
        while self.in_flight().map_err(draining)?.count > 0 {
            if began.elapsed() > PATIENCE {
                return Err(Unsupported::Refused {
                    operation: "draining an empty queue",
                    errno: libc::ETIME,
                });
            }
            std::thread::yield_now();
        }
        // SAFETY: the queue pair is the trial's own, and no memory depends on it.
        unsafe { self.restart() }.map_err(|lost| refused("ibv_modify_qp from SQD to RTS", lost))
    }
}

/// Whether the kernel may say otherwise another time.
const fn is_passing(errno: c_int) -> bool {
    matches!(
        errno,
        libc::ENOMEM
            | libc::EAGAIN
            | libc::EINTR
            | libc::EBUSY
            | libc::ETIME
            | libc::EIO
            | libc::ENODEV
    )
}

fn refused(operation: &'static str, lost: ConnectionLost) -> Unsupported {
    let errno = match lost {
        ConnectionLost::Broken { errno } => errno,
        _ => libc::ENODEV,
    };
    Unsupported::Refused { operation, errno }
}

fn untestable(error: &LoopbackError) -> Unsupported {
    let errno = match *error {
        LoopbackError::Os { errno, .. } => errno,
        _ => libc::ENETDOWN,
    };
    Unsupported::Refused { operation: "connecting a queue pair to try SQD on", errno }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registrar::verbs::library::Library;
    use libc::{c_char, c_void};
    use std::cell::Cell;
    use std::ffi::CStr;
    use std::sync::OnceLock;

    thread_local! {
        /// The queue pair of this test's device.
        static QUEUE_PAIR: Cell<Fake> = const {
            Cell::new(Fake { state: IBV_QPS_RTS, query: 0, to_error: 0, to_drain: 0, device: 0 })
        };
    }

    /// The state of a queue pair, and the error numbers with which its device answers.
    #[derive(Clone, Copy)]
    struct Fake {
        state: c_uint,
        query: c_int,
        to_error: c_int,
        to_drain: c_int,
        device: c_int,
    }

    fn set(change: impl FnOnce(&mut Fake)) {
        let mut fake = QUEUE_PAIR.get();
        change(&mut fake);
        QUEUE_PAIR.set(fake);
    }

    unsafe extern "C" fn query(
        _: *mut ibv_qp,
        attributes: *mut ibv_qp_attr,
        _: c_int,
        _: *mut ibv_qp_init_attr,
    ) -> c_int {
        let fake = QUEUE_PAIR.get();
        // SAFETY: the caller's room for the answer.
        unsafe { (*attributes).qp_state = fake.state };
        fake.query
    }

    unsafe extern "C" fn modify(_: *mut ibv_qp, to: *mut ibv_qp_attr, _: c_int) -> c_int {
        // SAFETY: the caller's request.
        let to = unsafe { (*to).qp_state };
        let fake = QUEUE_PAIR.get();
        let refusal = match to {
            IBV_QPS_ERR => fake.to_error,
            IBV_QPS_SQD => fake.to_drain,
            _ => 0,
        };
        let stands = matches!(fake.state, IBV_QPS_RTS | IBV_QPS_SQD);
        match refusal {
            0 if stands || (to == IBV_QPS_ERR && fake.state != IBV_QPS_RESET) => {
                set(|fake| fake.state = to);
                0
            }
            0 => libc::EINVAL,
            errno => errno,
        }
    }

    unsafe extern "C" fn attributes(_: *mut ibv_context, _: *mut ibv_device_attr) -> c_int {
        0
    }

    unsafe extern "C" fn make_channel(_: *mut ibv_context) -> *mut ibv_comp_channel {
        match QUEUE_PAIR.get().device {
            0 => NonNull::dangling().as_ptr(),
            errno => {
                // SAFETY: this thread's own.
                unsafe { *libc::__errno_location() = errno };
                std::ptr::null_mut()
            }
        }
    }

    unsafe extern "C" fn end_channel(_: *mut ibv_comp_channel) -> c_int {
        0
    }

    unsafe extern "C" fn name(_: *mut ibv_device) -> *const c_char {
        c"fake".as_ptr()
    }

    unsafe extern "C" fn not_called() {
        std::process::abort()
    }

    /// A queue pair of a device whose calls are those above, and what it points to.
    struct Rig {
        connection: Connection,
        _context: Box<ibv_context>,
        _domain: Box<ibv_pd>,
        _queue_pair: Box<ibv_qp>,
    }

    impl std::ops::Deref for Rig {
        type Target = Connection;

        fn deref(&self) -> &Connection {
            &self.connection
        }
    }

    fn connection() -> Rig {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let find = |name: &CStr, _: &CStr| {
            let function = match name.to_bytes() {
                b"ibv_query_qp" => query as *mut c_void,
                b"ibv_modify_qp" => modify as *mut c_void,
                b"ibv_query_device" => attributes as *mut c_void,
                b"ibv_create_comp_channel" => make_channel as *mut c_void,
                b"ibv_destroy_comp_channel" => end_channel as *mut c_void,
                b"ibv_get_device_name" => self::name as *mut c_void,
                _ => not_called as *mut c_void,
            };
            NonNull::new(function)
        };
        // SAFETY: those that are called have the types of their names; all others end the process.
        let library = LIBRARY.get_or_init(|| unsafe { Library::from_symbols(find) }.unwrap());
        // SAFETY: numbers, pointers and functions that may be absent.
        let mut context = Box::new(unsafe { MaybeUninit::<ibv_context>::zeroed().assume_init() });
        context.cmd_fd = -1;
        let mut domain = Box::new(ibv_pd { context: &raw mut *context, handle: 0 });
        // SAFETY: as above.
        let mut queue_pair = Box::new(unsafe { MaybeUninit::<ibv_qp>::zeroed().assume_init() });
        queue_pair.context = &raw mut *context;
        // SAFETY: both live as long as the connection, and the queue pair is lent once.
        let connection = unsafe {
            let domain = Domain::lent(library, NonNull::from(&mut *domain)).unwrap();
            Connection::lent(domain, NonNull::from(&mut *queue_pair))
        };
        Rig { connection, _context: context, _domain: domain, _queue_pair: queue_pair }
    }

    const BROKEN: ConnectionLost = ConnectionLost::Broken { errno: libc::ENOTCONN };

    /// Its program made it ready again: it may touch anything, so it is no dead one.
    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn one_that_runs_under_a_suspension_is_ended() {
        let connection = connection();
        connection.stop().unwrap();
        assert_eq!(connection.in_flight_or_failed(), Ok(Transfers::default()));
        for state in [IBV_QPS_RTS, IBV_QPS_RTR, IBV_QPS_ERR] {
            set(|fake| fake.state = state);
            assert_eq!(connection.in_flight_or_failed(), Err(BROKEN));
            assert_eq!(QUEUE_PAIR.get().state, IBV_QPS_ERR);
        }
        connection.stop().unwrap_err();
        set(|fake| fake.state = IBV_QPS_RESET);
        assert_eq!(connection.in_flight_or_failed(), Err(BROKEN), "its program has only begun");
        connection.stop().unwrap_err();
    }

    /// A state that is unknown is none in which it touches nothing.
    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn one_that_cannot_be_asked_is_ended() {
        let connection = connection();
        let nomem = ConnectionLost::Broken { errno: libc::ENOMEM };
        connection.stop().unwrap();
        set(|fake| fake.query = libc::ENOMEM);
        assert_eq!(connection.in_flight_or_failed(), Err(nomem));
        assert_eq!(QUEUE_PAIR.get().state, IBV_QPS_ERR);
    }

    /// Nor does it stand still for ever behind a restart that says that it is lost.
    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn one_that_cannot_be_asked_at_its_restart_is_ended() {
        let nomem = ConnectionLost::Broken { errno: libc::ENOMEM };
        let connection = connection();
        connection.stop().unwrap();
        connection.stop().unwrap();
        set(|fake| fake.query = libc::ENOMEM);
        // SAFETY: there is no memory.
        assert_eq!(unsafe { connection.restart() }, Err(nomem));
        assert_eq!(QUEUE_PAIR.get().state, IBV_QPS_ERR);
        // SAFETY: as above.
        let again = unsafe { connection.restart() };
        assert_eq!(again, Err(ConnectionLost::Broken { errno: libc::EINVAL }));
    }

    /// It may run, so no memory is moved under it.
    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn one_that_cannot_be_ended_is_under_way() {
        let connection = connection();
        connection.stop().unwrap();
        set(|fake| (fake.query, fake.to_error) = (libc::ENOMEM, libc::ENOMEM));
        assert!(matches!(connection.in_flight_or_failed(), Ok(Transfers { count: 1, .. })));
        set(|fake| fake.to_error = libc::EIO);
        let alone = connection.in_flight_or_failed();
        assert!(matches!(alone, Ok(Transfers { count: 1, .. })), "of its firmware: {alone:?}");
        for errno in [libc::EIO, libc::EINVAL] {
            set(|fake| (fake.to_error, fake.device) = (errno, libc::EMFILE));
            assert!(matches!(connection.in_flight_or_failed(), Ok(Transfers { count: 1, .. })));
            set(|fake| fake.device = libc::EIO);
            assert!(connection.in_flight_or_failed().is_err(), "its device is gone");
        }
        set(|fake| fake.device = 0);
        let refusal = libc::ENOMEM;
        QUEUE_PAIR.set(Fake {
            state: IBV_QPS_RTS,
            query: 0,
            to_error: refusal,
            to_drain: refusal,
            device: 0,
        });
        connection.stop().unwrap();
        assert!(matches!(connection.in_flight_or_failed(), Ok(Transfers { count: 1, .. })));
        // SAFETY: there is no memory.
        unsafe { connection.restart() }.unwrap();
        assert_eq!(QUEUE_PAIR.get().state, IBV_QPS_RTS);
    }

    /// The device lives on behind a closed descriptor, by what is mapped of it, and the queue pair runs.
    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn one_behind_a_closed_descriptor_has_not_ended() {
        let (connection, closed) = (connection(), libc::EBADF);
        let is_under_way = || matches!(connection.in_flight(), Ok(Transfers { count: 1, .. }));
        QUEUE_PAIR.set(Fake {
            state: IBV_QPS_RTS,
            query: closed,
            to_error: closed,
            to_drain: closed,
            device: 0,
        });
        connection.stop().unwrap();
        assert!(is_under_way());
        connection.fail();
        assert!(is_under_way());
        connection.take_back();
        assert!(is_under_way());
        // SAFETY: there is no memory.
        assert_eq!(unsafe { connection.restart() }, Err(ConnectionLost::Gone));
    }

    /// What has the number of the descriptor since may be the same device, opened again, with a new queue pair under the old
    /// one's handle.
    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn what_is_behind_the_number_of_a_closed_descriptor_is_left_alone() {
        let (connection, closed) = (connection(), libc::EBADF);
        connection.stop().unwrap();
        QUEUE_PAIR.set(Fake {
            state: IBV_QPS_RTS,
            query: closed,
            to_error: closed,
            to_drain: 0,
            device: 0,
        });
        let is_under_way =
            || matches!(connection.in_flight_or_failed(), Ok(Transfers { count: 1, .. }));
        assert!(is_under_way());
        QUEUE_PAIR.set(Fake { state: IBV_QPS_RTS, query: 0, to_error: 0, to_drain: 0, device: 0 });
        assert!(is_under_way(), "the old one runs");
        connection.fail();
        // SAFETY: there is no memory.
        assert_eq!(unsafe { connection.restart() }, Err(ConnectionLost::Gone));
        connection.take_back();
        assert!(is_under_way());
        assert_eq!(QUEUE_PAIR.get().state, IBV_QPS_RTS, "the new one was changed");
    }

    /// Of two caches that have stopped it neither lets it go on under the other.
    #[test]
    fn it_goes_on_with_the_last_that_stopped_it() {
        let mut stops = Stops::default();
        stops.begin(true);
        let first = stops.since;
        stops.begin(false);
        assert_eq!(stops.since, first);
        assert!(!stops.end() && stops.since.is_some());
        assert!(stops.end() && stops.since.is_none());
    }

    /// Of what its program runs it is not known when it has ended, so no memory is moved under it.
    #[test]
    fn one_that_was_taken_back_is_under_way_unless_it_was_at_rest() {
        let taken_back = |at_rest| {
            let queue_pair = Loan::TakenBack { at_rest };
            State { queue_pair, stops: Stops::default() }.after_the_loan()
        };
        assert!(matches!(taken_back(false), Some(Ok(Transfers { count: 1, .. }))));
        assert_eq!(taken_back(true), Some(Err(ConnectionLost::Gone)));
        let queue_pair = Loan::Lent(NonNull::dangling());
        assert_eq!(State { queue_pair, stops: Stops::default() }.after_the_loan(), None);
    }

    /// A queue pair that failed was made ready again by its program: the suspensions of before are no more.
    #[test]
    fn one_that_runs_again_was_stopped_by_none() {
        let mut stops = Stops::default();
        stops.begin(true);
        stops.begin(false);
        stops.begin(true);
        assert!(stops.end(), "the only one");
        assert!(stops.end() && stops.count == 0, "one too many");
    }
}
