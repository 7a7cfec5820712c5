//! How the program suspends: whom it stops, what it does with the memory, how it ends.

use super::buffers::BUFFERS;
use super::state::{Holder, Pending, Program, SimCache, SimLease, State, Suspension, Told};
use super::{FaultKind, Finding};
use super::{checks, notices};
use crate::fabric::{ConnectionId, Mutant, WorkKind};
use crate::space::Protection;
use pinfold_core::{
    AddressRange, Gets, Keys, Leases, OnDrop, RegisterError, Revocation, SuspendProgress,
    SuspensionTerms,
};
use std::time::Duration;

impl Suspension<'_> {
    fn has_expired(&self) -> bool {
        matches!(&self.state, Some(State::Held(held, _)) if held.has_expired())
    }
}

type Returned<'c> = Vec<Result<SimLease<'c>, RegisterError>>;

impl<'c> Program<'c, '_> {
    pub(super) fn begin_suspension(&mut self) {
        let buffer = self.random.below(BUFFERS);
        let range = self.buffers[buffer].some_pages(&mut self.random);
        if self.suspensions.len() >= 3 || !self.buffers[buffer].is_usable(range) {
            return;
        }
        let connections = self.connections_of(range);
        let (holders, leases) = self.hand_over(range);
        let terms = self.some_terms();
        let on_drop = terms.on_drop;
        let cache: &'c SimCache = self.cache;
        let keys = leases.iter().map(SimLease::handle).collect();
        let (stopped, begin) = (connections.clone(), move || {
            cache.begin_suspension(range, connections, leases, terms)
        });
        match self.guarded(begin) {
            Some(Ok(pending)) => {
                let (id, state, connections) =
                    (pending.id(), Some(State::Pending(pending)), stopped);
                let it =
                    Suspension { range, buffer, holders, connections, id, keys, on_drop, state };
                self.suspensions.push(it);
            }
            Some(Err(not)) => {
                notices::hear_notices(self);
                notices::check_keys(self, &keys, &not.leases);
                self.take_back(&holders, not.leases);
            }
            None => self.do_without(&holders, &stopped),
        }
    }

    /// The leases have ended with a suspension that gave nothing back. Their works go on, or have
    /// ended with their connections; what they name is not registered any more, so a work that goes on is
    /// refused and ends in the open.
    fn do_without(&mut self, holders: &[Holder], connections: &[ConnectionId]) {
        notices::hear_notices(self);
        self.heed_hushed_panics();
        let lost = holders.iter().map(|_| Err(RegisterError::DeviceGone { errno: 0 })).collect();
        self.take_back(holders, lost);
        self.check_restarted(connections);
        // No use may rely on a lease that has ended.
        connections.iter().for_each(|it| self.fabric.with(|world| world.fail(*it)));
    }

    fn some_terms(&mut self) -> SuspensionTerms {
        let deadline = [20_000, 100_000, 400_000, 2_000_000][self.random.below(4)];
        SuspensionTerms {
            deadline: Duration::from_nanos(deadline),
            leases: if self.random.chance(20) { Leases::Refuse } else { Leases::Drain },
            gets: Gets::Refuse,
            on_drop: if self.random.chance(50) { OnDrop::Kill } else { OnDrop::Resume },
        }
    }

    /// Every connection that can touch `range`: only the program knows. Sometimes one more.
    fn connections_of(&mut self, range: AddressRange) -> Vec<ConnectionId> {
        let touches = |lease: &Option<SimLease<'c>>| {
            lease.as_ref().is_some_and(|lease| lease.registered().overlaps(&range))
        };
        let works = self.works.iter().filter(|it| touches(&it.lease)).map(|it| it.connection);
        let exposures =
            self.exposures.iter().filter(|it| touches(&it.lease)).map(|it| it.connection);
        let mut connections: Vec<_> = exposures.chain(works).collect();
        if self.random.chance(20) {
            connections.extend(self.connections[self.random.below(self.connections.len())]);
        }
        connections.sort_unstable_by_key(|it| (it.link, it.incarnation));
        connections.dedup();
        if self.mutant == Some(Mutant::ForgottenConnection) {
            connections.pop();
        }
        connections
    }

    /// The leases that are to survive. A device that changes keys cannot keep what is posted,
    /// which names them.
    fn hand_over(&mut self, range: AddressRange) -> (Vec<Holder>, Vec<SimLease<'c>>) {
        let with_sends = self.random.chance(60);
        let keeps_posted = !self.nic.changes_keys;
        let touches = |lease: &mut SimLease<'c>| lease.registered().overlaps(&range);
        let (mut holders, mut leases) = (Vec::new(), Vec::new());
        for exposure in &mut self.exposures {
            if let Some(lease) = exposure.lease.take_if(touches) {
                holders.push(Holder::Exposure(exposure.id));
                leases.push(lease);
            }
        }
        for work in &mut self.works {
            let keep = keeps_posted && (with_sends || work.kind == WorkKind::Receive);
            if let Some(lease) = work.lease.take_if(|lease| keep && touches(lease)) {
                holders.push(Holder::Work(work.id));
                leases.push(lease);
            }
        }
        (holders, leases)
    }

    /// Gives leases back to their holders, where these still exist. What could not be renewed
    /// the device refuses from now on, which ends the connection in the open.
    fn take_back(&mut self, holders: &[Holder], leases: Returned<'c>) {
        if holders.len() != leases.len() {
            return self.note(Finding::Stuck, "leases that were handed over did not come back");
        }
        for (holder, lease) in holders.iter().zip(leases) {
            match *holder {
                Holder::Work(id) => {
                    if let Some(work) = self.works.iter_mut().find(|it| it.id == id) {
                        work.lease = lease.ok();
                    }
                }
                Holder::Exposure(id) => self.give_exposure(id, lease.ok()),
            }
        }
    }

    fn give_exposure(&mut self, id: u64, lease: Option<SimLease<'c>>) {
        let Some(which) = self.exposures.iter().position(|it| it.id == id) else { return };
        match lease {
            Some(lease) => {
                // The peer is told.
                self.exposures[which].key = lease.handle();
                self.exposures[which].lease = Some(lease);
            }
            // The peer finds out with its next write.
            None => {
                let exposure = self.exposures.swap_remove(which);
                self.buffers[exposure.buffer].users -= 1;
            }
        }
    }

    pub(super) fn go_on_with_suspensions(&mut self) {
        if self.suspensions.is_empty() {
            return;
        }
        let which = self.random.below(self.suspensions.len());
        let mut suspension = self.suspensions.swap_remove(which);
        match suspension.state.take() {
            Some(State::Pending(pending)) => self.poll_one(suspension, pending),
            held => {
                suspension.state = held;
                self.go_on_with_held(suspension);
            }
        }
    }

    fn poll_one(&mut self, mut suspension: Suspension<'c>, pending: Pending<'c>) {
        suspension.state = match self.guarded(|| pending.poll()) {
            Some(Ok(SuspendProgress::Suspended(held))) => {
                notices::hear_notices(self);
                let content = self.fabric.with(|world| world.read(suspension.range));
                Some(State::Held(held, content))
            }
            Some(Ok(SuspendProgress::Pending(pending, _))) => Some(State::Pending(pending)),
            Some(Err(not)) => return self.not_suspended(&suspension, not.leases),
            None => return self.ended_by_panic(&suspension),
        };
        self.suspensions.push(suspension);
    }

    fn not_suspended(&mut self, suspension: &Suspension<'c>, leases: Returned<'c>) {
        notices::hear_notices(self);
        notices::check_keys(self, &suspension.keys, &leases);
        self.take_back(&suspension.holders, leases);
        self.check_restarted(&suspension.connections);
        let ends = [Told::Resumed, Told::Revoked(Revocation::Expired)];
        notices::check_end(self, suspension.id, |told| told.is_none_or(|it| ends.contains(&it)));
    }

    fn ended_by_panic(&mut self, suspension: &Suspension<'c>) {
        self.do_without(&suspension.holders, &suspension.connections);
        let ended = |told| !matches!(told, Some(Told::Suspended(_)));
        notices::check_end(self, suspension.id, ended);
    }

    fn go_on_with_held(&mut self, suspension: Suspension<'c>) {
        let expired = suspension.has_expired();
        match self.random.below(10) {
            // The region is not the program's to move any more.
            _ if expired => self.resume(suspension),
            0..4 => self.rearrange(suspension),
            4 if self.has(FaultKind::Carelessness) => self.be_careless(suspension),
            5..7 => self.resume(suspension),
            _ => self.suspensions.push(suspension),
        }
    }

    /// Nothing may have changed in the region but what the program did.
    fn check_untouched(&mut self, suspension: &Suspension<'c>) {
        let Some(State::Held(held, before)) = &suspension.state else { return };
        if held.has_expired() {
            return;
        }
        let now = self.fabric.with(|world| world.read(suspension.range));
        if !self.buffers[suspension.buffer].broken && now != *before {
            let range = suspension.range;
            self.note(Finding::Wrong, format_args!("{range} changed while it was suspended"));
        }
    }

    fn rearrange(&mut self, suspension: Suspension<'c>) {
        self.check_untouched(&suspension);
        if !self.buffers[suspension.buffer].broken {
            self.fabric.with(|world| world.migrate(suspension.range));
        }
        self.suspensions.push(suspension);
    }

    /// Drops it, lets it expire, or unmaps the memory and resumes.
    fn be_careless(&mut self, suspension: Suspension<'c>) {
        match self.random.below(4) {
            0 => {
                self.buffers[suspension.buffer].broken = true;
                let range = suspension.range;
                self.fabric.with(|world| world.change(range, |space| space.unmap(range)));
                self.resume(suspension);
            }
            1 => {
                self.fabric.with(|world| world.run_until(world.now() + 3_000_000));
                self.expire_suspensions();
                self.resume(suspension);
            }
            2 => {
                // Unmapped and mapped anew: the content is gone, and the program knows.
                let range = suspension.range;
                if suspension.holders.is_empty() {
                    let fresh = Protection::ReadWrite;
                    self.fabric.with(|world| world.change(range, |space| space.map(range, fresh)));
                    self.drop_suspension(suspension);
                } else {
                    self.drop_suspension(suspension);
                }
            }
            _ => self.drop_suspension(suspension),
        }
    }

    fn drop_suspension(&mut self, mut suspension: Suspension<'c>) {
        let (state, on_drop) = (suspension.state.take(), suspension.on_drop);
        if self.guarded(|| drop(state)).is_none() {
            return self.ended_by_panic(&suspension);
        }
        self.do_without(&suspension.holders, &suspension.connections);
        let as_told = match on_drop {
            OnDrop::Kill => Told::Revoked(Revocation::Dropped),
            OnDrop::Resume => Told::Resumed,
        };
        notices::check_end(self, suspension.id, |told| told == Some(as_told));
    }

    fn resume(&mut self, mut suspension: Suspension<'c>) {
        self.check_untouched(&suspension);
        let Some(State::Held(held, _)) = suspension.state.take() else { return };
        let Some(resumed) = self.guarded(|| held.resume()) else {
            return self.ended_by_panic(&suspension);
        };
        notices::hear_notices(self);
        self.heed_hushed_panics();
        let told = match resumed {
            Ok(resumed) => {
                self.outcome.happened.keys_changed += u64::from(resumed.keys == Keys::Changed);
                notices::check_keys(self, &suspension.keys, &resumed.leases);
                self.take_back(&suspension.holders, resumed.leases);
                Told::Resumed
            }
            Err(_expired) => {
                let lost = |_| Err(RegisterError::DeviceGone { errno: 0 });
                let lost = suspension.holders.iter().map(lost).collect();
                self.take_back(&suspension.holders, lost);
                Told::Revoked(Revocation::Expired)
            }
        };
        self.check_restarted(&suspension.connections);
        notices::check_end(self, suspension.id, |it| it == Some(told));
    }

    /// Whatever a suspension ended in, its connections go on or are dead.
    fn check_restarted(&mut self, connections: &[ConnectionId]) {
        checks::check_connections(self);
        for connection in connections {
            let elsewhere = self.suspensions.iter().any(|it| it.connections.contains(connection));
            let stopped = self.fabric.with(|world| {
                world.connected(connection.link) == Some(*connection)
                    && world.is_stopped(connection.link)
            });
            if stopped && !elsewhere {
                self.note(Finding::Stuck, format_args!("{connection:?} is stopped for good"));
            }
        }
    }

    /// Ends every suspension.
    pub(super) fn end_suspensions(&mut self) {
        while let Some(mut suspension) = self.suspensions.pop() {
            match suspension.state.take() {
                Some(State::Pending(pending)) => {
                    let not = pending.cancel();
                    self.not_suspended(&suspension, not.leases);
                }
                held => {
                    suspension.state = held;
                    self.resume(suspension);
                }
            }
        }
    }
}
