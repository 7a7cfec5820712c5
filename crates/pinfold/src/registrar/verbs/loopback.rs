//! Two queue pairs of one device, connected to each other: what goes out comes back in.
//!
//! For programs that want to see what a registration really moves: probes, tests, demonstrations.
//! The way is the one that data takes between machines, keys, page translation and all.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the calls of libibverbs. Completion queue and queue pairs
//! live as long as [`Pair`], which holds the domain and destroys them in order, or leaves them where the device's
//! descriptor was found closed; work requests point to memory that outlives the posting, which copies them.

#![allow(unsafe_code)]

use super::device::{DeviceError, Domain, has_ended};
use super::ffi::*;
use crate::fork_mark::FORKED;
use libc::{c_int, c_uint};
use pinfold_kernel::{Errno, errno::last_errno};
use std::ffi::CStr;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How many work requests may be under way at once; longer lists go in several rounds.
const DEPTH: u32 = 64;

/// How long a transfer may take before the device counts as stuck.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// How long a thread sleeps between two looks at a queue that does not wake it.
const PAUSE: Duration = Duration::from_millis(1);

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoopbackDirection {
    /// From the local memory into the remote (`IBV_WR_RDMA_WRITE`).
    Write,
    /// From the remote memory into the local (`IBV_WR_RDMA_READ`).
    Read,
}

/// One move of bytes between two registrations of the domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The local registration's key.
    pub lkey: u32,
    /// Where the bytes are in it.
    pub address: usize,
    /// How many bytes; at most what one message of the port holds (2 GiB mostly).
    pub length: usize,
    /// The remote registration's key.
    pub rkey: u32,
    /// Where the bytes are in that.
    pub remote_address: usize,
}

/// A device's connection to itself. Threads take turns: one that goes on at once does not pass one that waits.
pub struct Loopback {
    domain: Arc<Domain>,
    /// Held while waiting for `pair`, and no longer: the thread that waits is the next. It guards nothing else. A
    /// mutex alone goes to the thread that asks first, and one that sleeps for each completion, on the processor of
    /// one that is woken late, would be the first for seconds. Rank: before `pair`.
    turn: Mutex<()>,
    /// Guards the queues. Empty after a transfer failed, which breaks a connection for good; the
    /// next one makes another. Held while transfers are under way, with no other lock inside. Taken by `lock`.
    pair: Mutex<Option<Pair>>,
}

impl Loopback {
    /// Connects `domain`'s device to itself by its first active port.
    ///
    /// # Errors
    ///
    /// [`LoopbackError`]; [`LoopbackError::Os`] with `ESRCH` in a forked child, whose parent's the device is.
    pub fn new(domain: Arc<Domain>) -> Result<Self, LoopbackError> {
        reachable(&domain)?;
        let pair = Pair::connected(&domain)?;
        Ok(Self { domain, turn: Mutex::default(), pair: Mutex::new(Some(pair)) })
    }

    /// Moves all `transfers` and waits until they are done.
    ///
    /// # Errors
    ///
    /// [`LoopbackError`] of the first that failed. No transfer is under way then, except after [`LoopbackError::Stuck`]: no call
    /// ends transfers once another thread has closed the device's descriptor, and a driver may refuse to end them. The caller
    /// must assume then that they go on for as long as the process lives.
    ///
    /// # Safety
    ///
    /// The caller that registered the memory behind the keys lets the device read it, or write it where
    /// bytes arrive, until this returns, and after [`LoopbackError::Stuck`] for as long as the process lives.
    pub unsafe fn transfer(
        &self,
        direction: LoopbackDirection,
        transfers: &[Transfer],
    ) -> Result<(), LoopbackError> {
        reachable(&self.domain)?;
        let mut slot = self.lock();
        // Taken out, so that an error leaves it empty, and the pair is destroyed.
        let mut pair = match slot.take() {
            Some(pair) => pair,
            None => Pair::connected(&self.domain)?,
        };
        for batch in transfers.chunks(DEPTH as usize) {
            // Again: another thread's transfers, or those before, may have taken long.
            reachable(&self.domain)?;
            // SAFETY: the caller's promise, which lasts until this returns, and longer if it returns `Stuck`. Otherwise the batch
            // has ended.
            unsafe { pair.carry_out(direction, batch) }?;
        }
        *slot = Some(pair);
        Ok(())
    }

    /// The queue pair that transfers are posted to; `None` after one failed, and in a forked child. It is there
    /// until a transfer fails or this is dropped.
    pub fn sender(&self) -> Option<NonNull<ibv_qp>> {
        reachable(&self.domain).ok()?;
        self.lock().as_ref().map(|pair| pair.sender.pointer)
    }

    /// The queue pair at the other end, as [`sender`](Self::sender).
    pub fn receiver(&self) -> Option<NonNull<ibv_qp>> {
        reachable(&self.domain).ok()?;
        self.lock().as_ref().map(|pair| pair.receiver.pointer)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Pair>> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.pair.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loopback").field("domain", &self.domain).finish_non_exhaustive()
    }
}

/// Not in a forked child, where a thread that is not there may hold the lock of the queues, nor behind a descriptor that was
/// found closed: its number may be another file's.
fn reachable(domain: &Domain) -> Result<(), LoopbackError> {
    let device = domain.device();
    if device.forked() {
        return Err(LoopbackError::Os { operation: "fork", errno: FORKED });
    }
    if !device.is_there() {
        return Err(LoopbackError::Os { operation: "reaching the device", errno: libc::EBADF });
    }
    Ok(())
}

/// The two queue pairs and their completion queue.
struct Pair {
    // In the order in which they must go.
    sender: QueuePair,
    receiver: QueuePair,
    completions: CompletionQueue,
}

impl Pair {
    fn connected(domain: &Arc<Domain>) -> Result<Self, LoopbackError> {
        let port = Port::first_active(domain)?;
        let completions = CompletionQueue::new(domain)?;
        let sender = QueuePair::new(domain, &completions)?;
        let receiver = QueuePair::new(domain, &completions)?;
        sender.connect(&port, receiver.number())?;
        receiver.connect(&port, sender.number())?;
        Ok(Self { sender, receiver, completions })
    }

    /// Posts requests and waits until the last one is done, or one has failed. None is under way when this returns, except
    /// after [`LoopbackError::Stuck`].
    ///
    /// # Safety
    ///
    /// As for [`Loopback::transfer`].
    unsafe fn carry_out(
        &mut self,
        direction: LoopbackDirection,
        batch: &[Transfer],
    ) -> Result<(), LoopbackError> {
        // SAFETY: the caller's promise.
        let posted = unsafe { self.post(direction, batch) };
        match posted.and_then(|()| self.completions.next()) {
            // One that failed has put the connection into its error state: the device carries out none behind it.
            Ok(completion) => self.sender.judge(&completion),
            Err(error) => Err(self.end(error)),
        }
    }

    /// Posts requests of which the last one is reported, or the first one that fails: a connection
    /// carries them out in order. After an error those before the one refused are under way.
    ///
    /// # Safety
    ///
    /// As for [`Loopback::transfer`].
    unsafe fn post(
        &self,
        direction: LoopbackDirection,
        batch: &[Transfer],
    ) -> Result<(), LoopbackError> {
        for (left, transfer) in (0..batch.len()).rev().zip(batch) {
            let flags = if left == 0 { IBV_SEND_SIGNALED } else { 0 };
            // SAFETY: the caller's promise.
            unsafe { self.sender.post(direction, transfer, flags) }?;
        }
        Ok(())
    }

    /// Ends what is under way after `error`, and returns that. Where the queue pairs cannot be destroyed, it waits for the
    /// report instead, and returns [`LoopbackError::Stuck`] if none comes.
    fn end(&mut self, error: LoopbackError) -> LoopbackError {
        // Both: what was sent may still arrive at the receiver.
        let is_destroyed = self.sender.destroy() & self.receiver.destroy();
        let has_waited = error == LoopbackError::STUCK;
        if is_destroyed || has_waited || self.completions.reports_within(PATIENCE) {
            error
        } else {
            LoopbackError::STUCK
        }
    }
}

/// Completions, and the channel that wakes who waits for one. A device in software does its work on
/// the processors that a waiting thread would keep busy.
struct CompletionQueue {
    domain: Arc<Domain>,
    channel: NonNull<ibv_comp_channel>,
    pointer: NonNull<ibv_cq>,
}

// SAFETY: as for `Device`: any thread may call the library.
unsafe impl Send for CompletionQueue {}

impl CompletionQueue {
    fn new(domain: &Arc<Domain>) -> Result<Self, LoopbackError> {
        let (device, library) = (domain.device(), domain.device().library());
        // SAFETY: the device is open.
        let made = device.ask_for(|| unsafe { (library.create_comp_channel)(device.as_ptr()) });
        let channel = made.map_err(|errno| LoopbackError::os("ibv_create_comp_channel", errno))?;
        let entries = c_int::try_from(2 * DEPTH).unwrap_or(c_int::MAX);
        // SAFETY: device and channel are open.
        let made = device.ask_for(|| unsafe {
            let null = ptr::null_mut();
            (library.create_cq)(device.as_ptr(), entries, null, channel.as_ptr(), 0)
        });
        let pointer = made.map_err(|errno| {
            // SAFETY: the channel is not used.
            device.ask(|| unsafe { (library.destroy_comp_channel)(channel.as_ptr()) });
            LoopbackError::os("ibv_create_cq", errno)
        })?;
        Ok(Self { domain: Arc::clone(domain), channel, pointer })
    }

    /// The next completion; [`LoopbackError::Stuck`] if there is none for a long time.
    fn next(&self) -> Result<ibv_wc, LoopbackError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Asked first, and again when the channel has been told to wake us: what completes in
            // between is found here.
            if let Some(done) = self.poll()? {
                return Ok(done);
            }
            self.arm()?;
            if let Some(done) = self.poll()? {
                return Ok(done);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LoopbackError::STUCK);
            }
            self.be_woken(left)?;
        }
    }

    /// Whether anything completes before `limit` is over. It makes no call that needs the device's descriptor: the queue is
    /// memory that the library has mapped.
    fn reports_within(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            if matches!(self.poll(), Ok(Some(_))) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(PAUSE);
        }
    }

    /// What is complete, if anything is.
    fn poll(&self) -> Result<Option<ibv_wc>, LoopbackError> {
        let mut done = ibv_wc::default();
        // SAFETY: the queue is live, and there is room for one.
        let count = unsafe {
            let poll = (*(*self.pointer.as_ptr()).context).ops.poll_cq;
            poll.map_or(-1, |poll| poll(self.pointer.as_ptr(), 1, &raw mut done))
        };
        match count {
            0 => Ok(None),
            1.. => Ok(Some(done)),
            _ => Err(LoopbackError::os("ibv_poll_cq", Errno(libc::EIO))),
        }
    }

    /// Has the next completion make the channel readable.
    fn arm(&self) -> Result<(), LoopbackError> {
        // SAFETY: the queue is live.
        let status = self.domain.device().ask(|| unsafe {
            let arm = (*(*self.pointer.as_ptr()).context).ops.req_notify_cq;
            arm.map_or(libc::EOPNOTSUPP, |arm| arm(self.pointer.as_ptr(), 0))
        });
        if status == 0 {
            Ok(())
        } else {
            Err(LoopbackError::os("ibv_req_notify_cq", Errno(status)))
        }
    }

    /// Waits until the channel says something, for `limit` at most, and takes it. The channel has a descriptor of its own. What
    /// its number stands for is not looked at: by its inode a channel is no other than an `eventfd`.
    fn be_woken(&self, limit: Duration) -> Result<(), LoopbackError> {
        // SAFETY: the channel is live.
        let descriptor = unsafe { (*self.channel.as_ptr()).fd };
        if !readable_within(descriptor, limit)? {
            return Ok(());
        }
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is live, and there is room for what it says, which is acknowledged at
        // once: destroying the queue waits for that.
        unsafe {
            let library = self.domain.device().library();
            if (library.get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut context) != 0
            {
                return Err(LoopbackError::os("ibv_get_cq_event", last_errno()));
            }
            (library.ack_cq_events)(queue, 1);
        }
        Ok(())
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let device = self.domain.device();
        if device.forked() {
            return;
        }
        let library = device.library();
        // SAFETY: the queue pairs that use it are gone: see the order of `Pair`'s fields. Where one could not be destroyed, the
        // kernel refuses.
        device.ask(|| unsafe { (library.destroy_cq)(self.pointer.as_ptr()) });
        // SAFETY: nor is the channel used any more.
        device.ask(|| unsafe { (library.destroy_comp_channel)(self.channel.as_ptr()) });
    }
}

/// Whether the channel `descriptor` becomes readable before `limit` is over, or a signal comes. `EIO` where it never will again,
/// as when the device was taken away.
fn readable_within(descriptor: c_int, limit: Duration) -> Result<bool, LoopbackError> {
    let limit = c_int::try_from(limit.as_millis()).unwrap_or(c_int::MAX);
    let mut asked = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel reads and writes one `pollfd`.
    let answered = unsafe { libc::poll(&raw mut asked, 1, limit) } > 0;
    let is_readable = asked.revents & libc::POLLIN != 0;
    if answered && !is_readable {
        return Err(LoopbackError::os("poll", Errno(libc::EIO)));
    }
    Ok(answered && is_readable)
}

struct QueuePair {
    domain: Arc<Domain>,
    /// Not followed once it is destroyed.
    pointer: NonNull<ibv_qp>,
    is_destroyed: bool,
}

// SAFETY: as for `Device`: any thread may call the library.
unsafe impl Send for QueuePair {}

impl QueuePair {
    fn new(domain: &Arc<Domain>, completions: &CompletionQueue) -> Result<Self, LoopbackError> {
        let mut wanted = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completions.pointer.as_ptr(),
            recv_cq: completions.pointer.as_ptr(),
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: DEPTH,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let device = domain.device();
        let create = device.library().create_qp;
        // SAFETY: domain and completion queue are live.
        let made = device.ask_for(|| unsafe { create(domain.as_ptr(), &raw mut wanted) });
        let pointer = made.map_err(|errno| LoopbackError::os("ibv_create_qp", errno))?;
        Ok(Self { domain: Arc::clone(domain), pointer, is_destroyed: false })
    }

    fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.pointer.as_ptr()).qp_num }
    }

    /// Connects it to the queue pair `peer` of the same port.
    fn connect(&self, port: &Port, peer: u32) -> Result<(), LoopbackError> {
        let (mut attributes, mask) = port.initial();
        self.modify(&mut attributes, mask)?;
        let (mut attributes, mask) = port.ready_to_receive(peer);
        self.modify(&mut attributes, mask)?;
        let (mut attributes, mask) = ready_to_send();
        self.modify(&mut attributes, mask)
    }

    fn modify(&self, attributes: &mut ibv_qp_attr, mask: c_int) -> Result<(), LoopbackError> {
        let device = self.domain.device();
        let modify = device.library().modify_qp;
        // SAFETY: the queue pair is live; the mask names fields that are set.
        let status = device.ask(|| unsafe { modify(self.pointer.as_ptr(), attributes, mask) });
        if status == 0 { Ok(()) } else { Err(LoopbackError::os("ibv_modify_qp", Errno(status))) }
    }

    /// # Safety
    ///
    /// As for [`Loopback::transfer`].
    unsafe fn post(
        &self,
        direction: LoopbackDirection,
        transfer: &Transfer,
        send_flags: c_uint,
    ) -> Result<(), LoopbackError> {
        let mut piece = piece(transfer)?;
        let mut request = request(direction, transfer, send_flags);
        request.sg_list = &raw mut piece;
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair is live; request and piece outlive the call, which copies them;
        // the memory is as the caller promises.
        let status = unsafe {
            let post = (*(*self.pointer.as_ptr()).context).ops.post_send;
            post.map_or(libc::EOPNOTSUPP, |post| {
                post(self.pointer.as_ptr(), &raw mut request, &raw mut refused)
            })
        };
        if status == 0 { Ok(()) } else { Err(LoopbackError::os("ibv_post_send", Errno(status))) }
    }

    fn judge(&self, completion: &ibv_wc) -> Result<(), LoopbackError> {
        if completion.status == IBV_WC_SUCCESS {
            return Ok(());
        }
        let status = completion.status;
        // SAFETY: asks for the text of a number, which the library keeps for ever.
        let text = unsafe {
            let text = (self.domain.device().library().wc_status_str)(status);
            if text.is_null() { c"unknown" } else { CStr::from_ptr(text) }
        };
        Err(LoopbackError::Failed { status, text: text.to_str().unwrap_or("unknown") })
    }
}

impl QueuePair {
    /// Ends what is under way. If this is true, nothing of it touches memory of this process afterwards; a forked child has other
    /// memory than its parent, whose the queue pair is.
    fn destroy(&mut self) -> bool {
        let device = self.domain.device();
        if !self.is_destroyed && !device.forked() {
            // SAFETY: it is destroyed here only, and once.
            let status =
                device.ask(|| unsafe { (device.library().destroy_qp)(self.pointer.as_ptr()) });
            self.is_destroyed = status == 0 || has_ended(status);
        }
        self.is_destroyed || device.forked()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// The local end of a transfer.
fn piece(transfer: &Transfer) -> Result<ibv_sge, LoopbackError> {
    let Transfer { lkey, address, length, .. } = *transfer;
    let length = u32::try_from(length).map_err(|_| LoopbackError::TooLong { length })?;
    Ok(ibv_sge { addr: address as u64, length, lkey })
}

/// The request for a transfer, but for its local end.
fn request(direction: LoopbackDirection, transfer: &Transfer, send_flags: c_uint) -> ibv_send_wr {
    ibv_send_wr {
        wr_id: 0,
        next: ptr::null_mut(),
        sg_list: ptr::null_mut(),
        num_sge: 1,
        opcode: match direction {
            LoopbackDirection::Write => IBV_WR_RDMA_WRITE,
            LoopbackDirection::Read => IBV_WR_RDMA_READ,
        },
        send_flags,
        imm_data: 0,
        remote_addr: transfer.remote_address as u64,
        rkey: transfer.rkey,
        others: [0; 9],
    }
}

/// The port that both ends use.
struct Port {
    number: u8,
    attributes: ibv_port_attr,
    gid: ibv_gid,
    gid_index: u8,
}

impl Port {
    fn first_active(domain: &Domain) -> Result<Self, LoopbackError> {
        let mut why = LoopbackError::NoPort;
        // Ports are counted from 1, and asking for one too many is an error.
        for number in 1..=u8::MAX {
            reachable(domain)?;
            // SAFETY: the device is open.
            match unsafe { domain.device().library().query_port(domain.device().as_ptr(), number) }
            {
                Ok(attributes) if attributes.state == IBV_PORT_ACTIVE => {
                    let (gid_index, gid) = best_gid(domain, number, &attributes)?;
                    return Ok(Self { number, attributes, gid, gid_index });
                }
                Ok(_) => {}
                Err(libc::EINVAL) => break,
                Err(errno) => {
                    why = LoopbackError::os("ibv_query_port", Errno(errno));
                    break;
                }
            }
        }
        Err(why)
    }

    fn initial(&self) -> (ibv_qp_attr, c_int) {
        let attributes = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            port_num: self.number,
            qp_access_flags: REMOTE,
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        (attributes, mask)
    }

    fn ready_to_receive(&self, peer: u32) -> (ibv_qp_attr, c_int) {
        let attributes = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: self.attributes.active_mtu,
            dest_qp_num: peer,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ah_attr: self.to_itself(),
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        (attributes, mask)
    }

    /// The way from this port to this port: by its local identifier on InfiniBand, by its global
    /// address elsewhere.
    fn to_itself(&self) -> ibv_ah_attr {
        let global = self.attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
        ibv_ah_attr {
            dlid: self.attributes.lid,
            port_num: self.number,
            is_global: u8::from(global),
            grh: ibv_global_route {
                dgid: self.gid,
                sgid_index: self.gid_index,
                hop_limit: 64,
                ..ibv_global_route::default()
            },
            ..ibv_ah_attr::default()
        }
    }
}

/// What a peer may do through the queue pair at all; the registrations say where.
const REMOTE: c_uint = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

fn ready_to_send() -> (ibv_qp_attr, c_int) {
    let attributes = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        // 4.096 µs times 2 to this power: a second, seven times, until the device gives up.
        timeout: 18,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 1,
        ..ibv_qp_attr::default()
    };
    let mask = IBV_QP_STATE
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_SQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC;
    (attributes, mask)
}

/// The port's address that most networks route: an IPv4 address, else the last one it has (the
/// first is often of the older protocol), else none, which InfiniBand does not need.
fn best_gid(
    domain: &Domain,
    port: u8,
    attributes: &ibv_port_attr,
) -> Result<(u8, ibv_gid), LoopbackError> {
    const IPV4: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let length = u8::try_from(attributes.gid_tbl_len).unwrap_or(u8::MAX);
    let (mut last, mut ipv4) = (None, None);
    for index in 0..length {
        reachable(domain)?;
        let mut gid = ibv_gid::default();
        // SAFETY: the device is open, and there is room for the answer.
        let status = unsafe {
            let device = domain.device();
            (device.library().query_gid)(device.as_ptr(), port, index.into(), &raw mut gid)
        };
        if status == 0 && gid != ibv_gid::default() {
            last = Some((index, gid));
            ipv4 = if gid.raw.starts_with(&IPV4) { last } else { ipv4 };
        }
    }
    let needed = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
    match ipv4.or(last) {
        None if needed => Err(LoopbackError::NoAddress),
        found => Ok(found.unwrap_or_default()),
    }
}

/// Why nothing was moved, or not all of it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoopbackError {
    /// No port of the device is active.
    #[error(
        "no port of the RDMA device is active: bring its network interface up (`rdma link` shows \
         the state)"
    )]
    NoPort,
    /// The port has no address.
    #[error(
        "the RDMA device's port has no address: give its network interface one (`ip address add`)"
    )]
    NoAddress,
    /// A transfer is longer than a message can be.
    #[error("a message of {length} bytes is too long: send pieces")]
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
    /// The device ended a transfer with an error: the keys, the addresses or the rights are wrong,
    /// or the memory behind them is gone.
    #[error("the device ended the transfer with {text} (status {status})")]
    Failed {
        /// `enum ibv_wc_status`.
        status: c_uint,
        /// The same in words.
        text: &'static str,
    },
    /// The device said nothing for a long time. It may move the bytes later: see [`Loopback::transfer`].
    #[error("the device has said nothing for {} s: was it taken away?", .after.as_secs())]
    Stuck {
        /// How long.
        after: Duration,
    },
    /// A call of the library failed.
    #[error("{operation} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call.
        operation: &'static str,
        /// Its error number.
        errno: i32,
    },
}

impl LoopbackError {
    const STUCK: Self = Self::Stuck { after: PATIENCE };

    const fn os(operation: &'static str, Errno(errno): Errno) -> Self {
        Self::Os { operation, errno }
    }
}

impl From<DeviceError> for LoopbackError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Os { operation, errno } => Self::Os { operation, errno },
            DeviceError::Gone { errno } => Self::Os { operation: "reaching the device", errno },
            _ => Self::NoPort,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registrar::verbs::library::Library;
    use libc::{c_char, c_void};
    use std::cell::Cell;
    use std::fs::File;
    use std::mem::MaybeUninit;
    use std::os::fd::AsRawFd;
    use std::sync::OnceLock;

    thread_local! {
        /// What this test's device does, and what was asked of it.
        static DEVICE: Cell<Fake> = const { Cell::new(WELL) };
    }

    #[derive(Clone, Copy)]
    struct Fake {
        /// How many requests it takes before it closes its descriptor.
        posts: usize,
        /// The error number with which it answers the request after that, or 0.
        refusal: c_int,
        /// How often its queue is empty before something completes.
        empty: usize,
        /// The error number with which it arms its queue, or 0.
        arm: c_int,
        /// The descriptor of what wakes who waits for it, or -1.
        channel: c_int,
        /// How many addresses it tells before it closes its descriptor.
        addresses: c_int,
        /// For how many addresses it was asked.
        asked: usize,
        /// How often its queue was looked at.
        looks: usize,
        /// How many queue pairs were destroyed.
        destroyed: usize,
    }

    const WELL: Fake = Fake {
        posts: usize::MAX,
        refusal: 0,
        empty: 0,
        arm: 0,
        channel: -1,
        addresses: c_int::MAX,
        asked: 0,
        looks: 0,
        destroyed: 0,
    };

    fn set(change: impl FnOnce(&mut Fake)) -> Fake {
        let mut fake = DEVICE.get();
        change(&mut fake);
        DEVICE.set(fake);
        fake
    }

    /// As another thread of the program may at any time.
    ///
    /// # Safety
    ///
    /// `context` is that of a test.
    unsafe fn close_descriptor(context: *mut ibv_context) {
        // SAFETY: the caller's promise.
        unsafe { (*context).cmd_fd = -1 };
    }

    unsafe extern "C" fn post(
        pair: *mut ibv_qp,
        _: *mut ibv_send_wr,
        _: *mut *mut ibv_send_wr,
    ) -> c_int {
        let fake = set(|fake| fake.posts = fake.posts.saturating_sub(1));
        if fake.posts > 0 {
            return 0;
        }
        // SAFETY: the test's.
        unsafe { close_descriptor((*pair).context) };
        fake.refusal
    }

    unsafe extern "C" fn poll(_: *mut ibv_cq, _: c_int, _: *mut ibv_wc) -> c_int {
        let fake = set(|fake| fake.looks += 1);
        (fake.looks > fake.empty).into()
    }

    unsafe extern "C" fn arm(_: *mut ibv_cq, _: c_int) -> c_int {
        DEVICE.get().arm
    }

    unsafe extern "C" fn port(_: *mut ibv_context, _: u8, port: *mut ibv_port_attr) -> c_int {
        // SAFETY: the caller's room for the answer.
        unsafe {
            (*port).state = IBV_PORT_ACTIVE;
            (*port).gid_tbl_len = 9;
        }
        0
    }

    unsafe extern "C" fn gid(
        context: *mut ibv_context,
        _: u8,
        index: c_int,
        _: *mut ibv_gid,
    ) -> c_int {
        let fake = set(|fake| fake.asked += 1);
        if index + 1 == fake.addresses {
            // SAFETY: the test's.
            unsafe { close_descriptor(context) };
        }
        0
    }

    /// What the library makes for a test.
    #[repr(C)]
    struct Made {
        // First, so that the address of one is that of the other.
        context: ibv_context,
        domain: ibv_pd,
        channel: ibv_comp_channel,
        queue: ibv_cq,
        // Both ends of the connection: the device does not tell them apart.
        pair: ibv_qp,
    }

    unsafe extern "C" fn make_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
        // SAFETY: the test's.
        unsafe { &raw mut (*context.cast::<Made>()).channel }
    }

    unsafe extern "C" fn make_queue(
        context: *mut ibv_context,
        _: c_int,
        _: *mut c_void,
        _: *mut ibv_comp_channel,
        _: c_int,
    ) -> *mut ibv_cq {
        // SAFETY: the test's.
        unsafe { &raw mut (*context.cast::<Made>()).queue }
    }

    unsafe extern "C" fn make_pair(domain: *mut ibv_pd, _: *mut ibv_qp_init_attr) -> *mut ibv_qp {
        // SAFETY: the test's.
        unsafe { &raw mut (*(*domain).context.cast::<Made>()).pair }
    }

    unsafe extern "C" fn modify(_: *mut ibv_qp, _: *mut ibv_qp_attr, _: c_int) -> c_int {
        0
    }

    unsafe extern "C" fn end_pair(_: *mut ibv_qp) -> c_int {
        set(|fake| fake.destroyed += 1);
        0
    }

    unsafe extern "C" fn end_other(_: *mut c_void) -> c_int {
        0
    }

    unsafe extern "C" fn attributes(_: *mut ibv_context, _: *mut ibv_device_attr) -> c_int {
        0
    }

    unsafe extern "C" fn name(_: *mut ibv_device) -> *const c_char {
        c"fake".as_ptr()
    }

    unsafe extern "C" fn not_called() {
        std::process::abort()
    }

    fn library() -> &'static Library {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let find = |name: &CStr, _: &CStr| {
            let function = match name.to_bytes() {
                b"ibv_query_device" => attributes as *mut c_void,
                b"ibv_get_device_name" => self::name as *mut c_void,
                b"ibv_query_port" => port as *mut c_void,
                b"ibv_query_gid" => gid as *mut c_void,
                b"ibv_create_comp_channel" => make_channel as *mut c_void,
                b"ibv_create_cq" => make_queue as *mut c_void,
                b"ibv_create_qp" => make_pair as *mut c_void,
                b"ibv_modify_qp" => modify as *mut c_void,
                b"ibv_destroy_qp" => end_pair as *mut c_void,
                b"ibv_destroy_cq" | b"ibv_destroy_comp_channel" => end_other as *mut c_void,
                _ => not_called as *mut c_void,
            };
            NonNull::new(function)
        };
        // SAFETY: those that are called have the types of their names, or take any pointer; all others end the process.
        LIBRARY.get_or_init(|| unsafe { Library::from_symbols(find) }.unwrap())
    }

    /// Freed when it is dropped.
    struct Memory(NonNull<Made>);

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: made by `Memory::new`; a test drops its loopback before.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }

    impl Memory {
        /// Of a device whose descriptor is that of `file`, and whose calls are those above.
        fn new(file: &File) -> Self {
            // SAFETY: numbers, pointers and functions that may be absent.
            let mut made = Box::new(unsafe { MaybeUninit::<Made>::zeroed().assume_init() });
            made.context.cmd_fd = file.as_raw_fd();
            made.context.ops.post_send = Some(post);
            made.context.ops.poll_cq = Some(poll);
            made.context.ops.req_notify_cq = Some(arm);
            made.channel.fd = -1;
            let made = Box::into_raw(made);
            // SAFETY: just made.
            unsafe {
                let context = made.cast::<ibv_context>();
                (*made).domain.context = context;
                (*made).queue.context = context;
                (*made).pair.context = context;
            }
            Self(NonNull::new(made).unwrap())
        }

        /// # Safety
        ///
        /// The loopback is dropped before this.
        unsafe fn loopback(&self) -> Result<Loopback, LoopbackError> {
            // SAFETY: the domain goes with the loopback.
            let domain = unsafe {
                let domain = &raw mut (*self.0.as_ptr()).domain;
                Domain::lent(library(), NonNull::new(domain).unwrap())
            };
            Loopback::new(domain.unwrap())
        }
    }

    /// The file whose descriptor stands for the device's.
    fn file() -> File {
        File::open("/dev/null").unwrap()
    }

    /// Moves nothing, `count` times.
    fn transfer(fake: Fake, count: usize) -> Result<(), LoopbackError> {
        DEVICE.set(WELL);
        let file = file();
        let memory = Memory::new(&file);
        // SAFETY: dropped in reverse order.
        let loopback = unsafe { memory.loopback() }.unwrap();
        DEVICE.set(fake);
        // SAFETY: the test's.
        unsafe { (*memory.0.as_ptr()).channel.fd = fake.channel };
        let nothing = Transfer { lkey: 0, address: 0, length: 0, rkey: 0, remote_address: 0 };
        // SAFETY: there is no memory.
        unsafe { loopback.transfer(LoopbackDirection::Write, &vec![nothing; count]) }
    }

    const CLOSED: Result<(), LoopbackError> =
        Err(LoopbackError::Os { operation: "ibv_req_notify_cq", errno: libc::EBADF });

    /// The device goes on behind its closed descriptor, and the queue pairs cannot be destroyed.
    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn a_transfer_whose_descriptor_is_closed_is_waited_for() {
        assert_eq!(transfer(Fake { posts: 1, empty: 2, ..WELL }, 1), CLOSED);
        let fake = DEVICE.get();
        assert_eq!((fake.looks, fake.destroyed), (3, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn what_was_posted_before_a_refusal_is_waited_for() {
        let fake = Fake { posts: 2, refusal: libc::ENOMEM, empty: 2, ..WELL };
        let refused = LoopbackError::os("ibv_post_send", Errno(libc::ENOMEM));
        assert_eq!(transfer(fake, 2), Err(refused));
        let fake = DEVICE.get();
        assert_eq!((fake.looks, fake.destroyed), (3, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn a_transfer_that_may_be_under_way_is_called_stuck() {
        let began = Instant::now();
        let end = transfer(Fake { posts: 1, empty: usize::MAX, ..WELL }, 1);
        assert_eq!(end, Err(LoopbackError::STUCK));
        assert!(began.elapsed() >= PATIENCE);
        assert_eq!(DEVICE.get().destroyed, 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn a_transfer_that_was_ended_is_not_waited_for() {
        let refused = LoopbackError::os("ibv_req_notify_cq", Errno(libc::ENOMEM));
        let fake = Fake { empty: usize::MAX, arm: libc::ENOMEM, ..WELL };
        assert_eq!(transfer(fake, 1), Err(refused));
        let fake = DEVICE.get();
        assert_eq!((fake.looks, fake.destroyed), (1, 2), "each is destroyed once");
    }

    /// Its channel says that it has nothing to say any longer: nothing would come of waiting.
    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn a_device_that_is_taken_away_is_not_waited_for() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ended = LoopbackError::os("poll", Errno(libc::EIO));
        let fake = Fake { empty: usize::MAX, channel: writer.as_raw_fd(), ..WELL };
        assert_eq!(transfer(fake, 1), Err(ended));
        assert_eq!(DEVICE.get().destroyed, 2);
    }

    #[test]
    #[cfg_attr(miri, ignore = "a device has a fork mark, which is the kernel's")]
    fn no_address_is_asked_for_behind_a_closed_descriptor() {
        DEVICE.set(Fake { addresses: 3, ..WELL });
        let file = file();
        // SAFETY: there is no loopback.
        let refused = unsafe { Memory::new(&file).loopback() }.err();
        let closed = LoopbackError::Os { operation: "reaching the device", errno: libc::EBADF };
        assert_eq!(refused, Some(closed));
        assert_eq!(DEVICE.get().asked, 3);
    }

    #[test]
    fn a_device_that_is_gone_is_not_one_without_a_port() {
        let gone = LoopbackError::from(DeviceError::Gone { errno: libc::ENODEV });
        assert!(matches!(gone, LoopbackError::Os { errno: libc::ENODEV, .. }), "{gone}");
        assert_eq!(LoopbackError::from(DeviceError::NoDevice), LoopbackError::NoPort);
    }
}
