//! The device as the cache sees it: a registrar whose regions can be suspended.

use super::connection::ConnectionId;
use super::mutant::Mutant;
use super::nic::Key;
use super::world::{DeviceCall, DevicePanic, Event, Fabric, Rekeyed, World};
use crate::fake::{Fake, FakeDevice, FakeSuspend};
use crate::fault::Moment;
use crate::space::PAGE_BYTES;
use pinfold_core::{
    Access, AddressRange, ConnectionLost, DeregisterError, RegisterError, RegistrarLimits, Renewed,
    Transfers, Unsupported,
};
use std::panic::resume_unwind;
use std::time::Duration;

/// Registers with the device of a [`Fabric`], in its first protection domain.
pub type FabricRegistrar = Fake<Fabric>;

impl FabricRegistrar {
    /// The registrar of the device in `fabric`.
    pub fn new(fabric: &Fabric) -> Self {
        Self(fabric.clone())
    }
}

impl Fabric {
    /// Does `work`, and panics before or after it if that was ordered. No panic message is printed.
    fn call<T>(&self, call: DeviceCall, work: impl FnOnce(&mut World) -> T) -> T {
        let ordered = self.with(|world| world.panicking.take_if(|(it, _)| *it == call));
        let panic = || resume_unwind(Box::new(DevicePanic(call)));
        match ordered {
            Some((_, Moment::Before)) => panic(),
            Some((_, Moment::After)) => {
                self.with(work);
                panic()
            }
            None => self.with(work),
        }
    }
}

impl FakeDevice for Fabric {
    type Handle = Key;

    fn limits(&self) -> RegistrarLimits {
        let max_regions = self.with(|world| world.nic.config.max_regions);
        RegistrarLimits { page_bytes: PAGE_BYTES, max_region_bytes: 1 << 30, max_regions }
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        self.call(DeviceCall::Widen, |_| range)
    }

    fn register(&self, range: AddressRange, access: Access) -> Result<Key, RegisterError> {
        self.with(|world| {
            world.order_failure()?;
            let key = world.nic.register(range, access, 0)?;
            // The pages are pinned; the program hears of it later.
            world.run_until(world.now() + world.weather.registration);
            Ok(key)
        })
    }

    fn deregister(&self, key: Key, _range: AddressRange) -> Result<(), DeregisterError> {
        self.with(|world| {
            let range = world.nic.deregister(key)?;
            flush(world, key, range);
            Ok(())
        })
    }
}

impl FakeSuspend for Fabric {
    type Connection = ConnectionId;

    fn now(&self) -> Duration {
        Duration::from_nanos(self.with(|world| world.now()))
    }

    fn can_suspend(
        &self,
        _range: AddressRange,
        connections: &[ConnectionId],
    ) -> Result<(), Unsupported> {
        let links = self.with(|world| world.links.len());
        let stranger = connections.iter().position(|connection| connection.link >= links);
        stranger.map_or(Ok(()), |index| Err(Unsupported::Connection { index }))
    }

    fn stop(&self, connection: &ConnectionId) -> Result<(), ConnectionLost> {
        self.call(DeviceCall::Stop, |world| stop(world, *connection))
    }

    fn in_flight(
        &self,
        connection: &ConnectionId,
        _range: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        self.call(DeviceCall::InFlight, |world| in_flight(world, *connection))
    }

    fn withdraw(&self, key: Key, range: AddressRange) -> Result<(), DeregisterError> {
        self.call(DeviceCall::Withdraw, |world| {
            world.nic.withdraw(key)?;
            if world.nic.config.withdraws {
                flush(world, key, range);
            }
            Ok(())
        })
    }

    fn quiet(&self, range: AddressRange) -> bool {
        self.call(DeviceCall::Quiet, |world| {
            let now = world.now();
            world.nic.finish_flushes(now);
            world.mutant == Some(Mutant::SlowFlush) || world.nic.is_quiet(range)
        })
    }

    fn renew(
        &self,
        key: Key,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<Key>, RegisterError> {
        self.with(|world| {
            // What is renewed by a device that panics is lost.
            if matches!(world.panicking, Some((DeviceCall::Renew, _))) {
                lose(world, key);
                world.panicking = Some((DeviceCall::Renew, Moment::Before));
            }
        });
        self.call(DeviceCall::Renew, |world| renew(world, key, range, access))
    }

    fn restart(&self, connection: &ConnectionId) -> Result<(), ConnectionLost> {
        self.call(DeviceCall::Restart, |world| restart(world, *connection))
    }

    fn fail(&self, connection: &ConnectionId) {
        self.call(DeviceCall::Fail, |world| world.fail(*connection));
    }

    fn wait(&self, until: Duration) {
        let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        self.with(|world| {
            if world.agenda.next_at().is_none_or(|at| at > until) || !world.step() {
                world.run_until(until);
            }
        });
    }
}

fn flush(world: &mut World, key: Key, range: AddressRange) {
    let (now, delay) = (world.now(), world.weather.flush);
    world.nic.flush(key, range, now, now + delay);
    if delay > 0 {
        world.agenda.add(delay, Event::Flush);
    }
}

fn stop(world: &mut World, connection: ConnectionId) -> Result<(), ConnectionLost> {
    check_alive(world, connection)?;
    let silent = world.weather.silent;
    let link = &mut world.links[connection.link];
    let begun = link.local.queue.iter().filter(|it| it.first < link.local.begun);
    let limit = begun.map(super::connection::Sending::end).max();
    (link.stopped, link.silent) = (Some(limit.unwrap_or(link.local.sent)), silent);
    Ok(())
}

fn in_flight(world: &mut World, connection: ConnectionId) -> Result<Transfers, ConnectionLost> {
    check_alive(world, connection)?;
    if world.mutant == Some(Mutant::EarlyQuiet) {
        return Ok(Transfers::default());
    }
    let (now, link) = (world.now(), &world.links[connection.link]);
    let limit = link.stopped.unwrap_or(u32::MAX);
    let begun = link.local.queue.iter().filter(|it| it.first < limit);
    let transfers = Transfers::default();
    Ok(begun.fold(transfers, |sum, sending| Transfers {
        count: sum.count + 1,
        oldest: sum.oldest.max(Duration::from_nanos(now - sending.posted)),
    }))
}

fn renew(
    world: &mut World,
    key: Key,
    range: AddressRange,
    access: Access,
) -> Result<Renewed<Key>, RegisterError> {
    let renewed = world.order_failure().and_then(|()| {
        if world.nic.config.changes_keys {
            let renewed = world.nic.register(range, access, 0)?;
            give_back(world, key);
            world.rekeyed.push_back(Rekeyed { from: key, to: Some(renewed) });
            let covert = world.mutant == Some(Mutant::CovertKey);
            Ok(if covert { Renewed::Same } else { Renewed::Changed(renewed) })
        } else {
            world.nic.renew(key)?;
            world.nic.flush_renewed(key);
            Ok(Renewed::Same)
        }
    });
    if renewed.is_err() {
        lose(world, key);
    }
    renewed
}

/// The end of a key that could not be renewed.
fn lose(world: &mut World, key: Key) {
    if world.nic.is_live(key) {
        give_back(world, key);
        world.rekeyed.push_back(Rekeyed { from: key, to: None });
    }
}

fn give_back(world: &mut World, key: Key) {
    if let Ok(range) = world.nic.deregister(key) {
        flush(world, key, range);
    }
}

fn restart(world: &mut World, connection: ConnectionId) -> Result<(), ConnectionLost> {
    if world.mutant == Some(Mutant::CovertReconnect) && !world.is_alive(connection) {
        world.connect(connection.link);
    }
    check_alive(world, connection)?;
    if world.mutant != Some(Mutant::NeverRestarted) {
        world.links[connection.link].stopped = None;
        world.pump(connection, super::connection::Side::Local);
    }
    Ok(())
}

fn check_alive(world: &World, connection: ConnectionId) -> Result<(), ConnectionLost> {
    if world.is_alive(connection) { Ok(()) } else { Err(ConnectionLost::Gone) }
}
