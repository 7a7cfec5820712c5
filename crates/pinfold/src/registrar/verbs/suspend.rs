//! Suspending regions of RDMA devices.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to hand its caller's word on to the registering call.

#![allow(unsafe_code)]

use super::connection::{self, Connection, Verdict};
use super::on_demand::OnDemand;
use super::registrar::{MemoryRegion, Verbs};
use pinfold_core::{
    Access, AddressRange, ConnectionLost, DeregisterError, RegisterError, Renewed, Suspend,
    Transfers, Unsupported,
};

/// Whether the connections can be stopped, and their peers keep off what they may touch: what is `exposed`, if anything
/// is.
fn can_stop(
    verbs: &Verbs,
    exposed: Option<AddressRange>,
    connections: &[Connection],
) -> Result<(), Unsupported> {
    if let Some(range) = exposed.filter(|_| connections.is_empty()) {
        return Err(Unsupported::PeerMayWrite { range });
    }
    let now = verbs.now();
    for (index, connection) in connections.iter().enumerate() {
        connection.can_stop(index, verbs.domain(), exposed, now)?;
    }
    if connections.is_empty() { Ok(()) } else { stops_queue_pairs(verbs) }
}

/// Whether the device can: tried until it has said so itself, either way.
fn stops_queue_pairs(verbs: &Verbs) -> Result<(), Unsupported> {
    if let Some(&said) = verbs.stops.get() {
        return said;
    }
    match connection::test(verbs.domain()) {
        Verdict::Said(said) => *verbs.stops.get_or_init(|| said),
        Verdict::Untested(why) => Err(why),
    }
}

/// Queue pairs are stopped in `SQD`, tried beforehand with one of our own; regions are deregistered,
/// because their pages could not be moved otherwise, and registered anew: the keys change.
///
/// That a queue pair has drained is the driver's word, which the trial cannot test: drivers that never set `sq_draining`
/// (`bnxt_re`, `irdma`) say so of a busy one. Where the word is untrue a transfer in flight meets a region that was
/// deregistered, because those go before memory is moved: it fails, and the connection breaks. It moves no wrong bytes.
///
/// Without any connection named a suspension works on every device: it waits for the leases, which
/// are all that local transfers of a program have that takes one for each.
///
/// A region to which a memory window is bound cannot be withdrawn; the suspension then says that
/// translations are in flight, until its deadline. Behind that its range is registered anew, with other keys. The same holds
/// where the device's descriptor was closed (`close_range`): what the library has mapped keeps the device open, and no call
/// reaches what is registered with it. Queue pairs then have a transfer under way, because they may run on.
// SAFETY: a queue pair is stopped in SQD, or in ERR, and its work is under way until the device says that it is drained;
// a region that is withdrawn is deregistered.
unsafe impl Suspend for Verbs {
    type Connection = Connection;

    fn can_suspend(
        &self,
        range: AddressRange,
        connections: &[Connection],
    ) -> Result<(), Unsupported> {
        if self.forked() {
            return Err(Unsupported::Device);
        }
        // Whole registrations lose their keys, so a peer that keeps off no more than the range would break its
        // connection.
        can_stop(self, self.exposed_around(range), connections)
    }

    fn stop(&self, connection: &Connection) -> Result<(), ConnectionLost> {
        connection.stop()
    }

    fn in_flight(
        &self,
        connection: &Connection,
        _: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        connection.in_flight_or_failed()
    }

    unsafe fn withdraw(
        &self,
        handle: MemoryRegion,
        _: AddressRange,
    ) -> Result<(), DeregisterError> {
        self.take_out(handle)
    }

    fn quiet(&self, range: AddressRange) -> bool {
        !self.is_stuck(range)
    }

    unsafe fn renew(
        &self,
        handle: MemoryRegion,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<MemoryRegion>, RegisterError> {
        // What the device did not let go of (see `quiet`) may have other pages by now, so it is not used again.
        let _given_up = self.give_back(handle);
        // SAFETY: the caller's promise.
        unsafe { self.register_with(range, access, 0) }.map(Renewed::Changed)
    }

    unsafe fn restart(&self, connection: &Connection) -> Result<(), ConnectionLost> {
        // SAFETY: the caller's promise, passed on.
        unsafe { connection.restart() }
    }

    fn fail(&self, connection: &Connection) {
        connection.fail();
    }
}

/// Queue pairs are stopped as with [`Verbs`]; registrations stay, because the device follows the page
/// table, and so do the keys.
// SAFETY: queue pairs as with [`Verbs`]; the device follows the page table, so that nothing has to be withdrawn.
unsafe impl Suspend for OnDemand {
    type Connection = Connection;

    fn can_suspend(
        &self,
        range: AddressRange,
        connections: &[Connection],
    ) -> Result<(), Unsupported> {
        if self.verbs().forked() {
            return Err(Unsupported::Device);
        }
        // The keys stay, so what lies around the range may be touched.
        can_stop(self.verbs(), self.verbs().exposed_around(range).map(|_| range), connections)
    }

    fn stop(&self, connection: &Connection) -> Result<(), ConnectionLost> {
        connection.stop()
    }

    fn in_flight(
        &self,
        connection: &Connection,
        _: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        connection.in_flight_or_failed()
    }

    unsafe fn renew(
        &self,
        _: MemoryRegion,
        _: AddressRange,
        _: Access,
    ) -> Result<Renewed<MemoryRegion>, RegisterError> {
        Ok(Renewed::Same)
    }

    unsafe fn restart(&self, connection: &Connection) -> Result<(), ConnectionLost> {
        // SAFETY: the caller's promise, passed on.
        unsafe { connection.restart() }
    }

    fn fail(&self, connection: &Connection) {
        connection.fail();
    }
}
