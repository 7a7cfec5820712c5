//! What the program is told, compared with what happened.
//!
//! The truth about keys comes from the device, which notes every key that a renewal changed or
//! lost, whatever the cache makes of it; the truth about suspensions comes from the answers that
//! the program gets. The notices must agree with both: each change told once, in order, and
//! nothing else.

use super::Finding;
use super::state::{Listener, Program, SimCache, SimLease, Told};
use crate::fabric::{Fabric, Key, Mutant, Rekeyed, World};
use pinfold_core::{Keys, Notice, RegisterError, Revocation, SuspensionId};
use std::collections::{BTreeMap, HashMap};

impl<'c> Listener<'c> {
    pub(super) fn new(cache: &'c SimCache, capacity: usize) -> Self {
        let notices = cache.notices(capacity);
        Self { notices, told: BTreeMap::new(), keys: HashMap::new(), missed: false }
    }
}

/// What does not agree, in words.
type Objection = Option<String>;

impl<'c> Listener<'c> {
    fn hear(&mut self, fabric: &Fabric, notice: Notice<Key>) -> Objection {
        match notice {
            Notice::Suspended { suspension, .. } => self.suspended(suspension),
            Notice::Rekeyed { suspension, from, to, .. } => {
                self.rekeyed(fabric, suspension, from, to)
            }
            Notice::Lost { suspension, handle, .. } => self.lost(fabric, suspension, handle),
            Notice::Resumed { suspension, keys, .. } => self.resumed(suspension, keys),
            Notice::Revoked { suspension, by, .. } => self.revoked(suspension, by),
            Notice::Missed { .. } => {
                self.missed = true;
                None
            }
            _ => None,
        }
    }

    fn suspended(&mut self, id: SuspensionId) -> Objection {
        let before = self.told.insert(id, Told::Suspended(false));
        before.map(|told| format!("{id:?} was {told:?} and is told to be suspended"))
    }

    fn rekeyed(&mut self, fabric: &Fabric, id: SuspensionId, from: Key, to: Key) -> Objection {
        let told = self.told.get_mut(&id);
        let in_place = matches!(told, Some(Told::Suspended(_)));
        told.into_iter().for_each(|told| *told = Told::Suspended(true));
        self.keys.insert(from, Some(to));
        let truth = fabric.with(World::poll_rekeyed);
        let agrees = in_place && truth == Some(Rekeyed { from, to: Some(to) });
        (!agrees).then(|| format!("{from:?} is told to be {to:?} now: {truth:?}"))
    }

    /// Lost because it could not be renewed, or given up with its suspension.
    fn lost(&mut self, fabric: &Fabric, id: SuspensionId, key: Key) -> Objection {
        let in_place = matches!(self.told.get(&id), Some(Told::Suspended(_)));
        let before = self.keys.insert(key, None);
        let lives = fabric.with(|world| {
            let renewed = Rekeyed { from: key, to: None };
            if world.rekeyed.front() == Some(&renewed) {
                world.rekeyed.pop_front();
            }
            world.is_registered(key)
        });
        let agrees = in_place && before.is_none() && !lives;
        (!agrees).then(|| format!("{key:?} is told to be lost: {before:?}, lives: {lives}"))
    }

    fn resumed(&mut self, id: SuspensionId, keys: Keys) -> Objection {
        let before = self.told.insert(id, Told::Resumed);
        let changed = keys == Keys::Changed;
        (before != Some(Told::Suspended(changed)))
            .then(|| format!("{id:?} was {before:?} and is told to be resumed, keys {keys:?}"))
    }

    fn revoked(&mut self, id: SuspensionId, by: Revocation) -> Objection {
        let before = self.told.insert(id, Told::Revoked(by));
        let ended = !matches!(before, None | Some(Told::Suspended(_)));
        ended.then(|| format!("{id:?} was {before:?} and is told to be revoked"))
    }

    /// From here on the past is not judged.
    fn start_afresh(&mut self, fabric: &Fabric) {
        self.told.clear();
        self.keys.clear();
        fabric.with(|world| world.rekeyed.clear());
    }
}

/// Hears what there is, and judges it.
pub(super) fn hear_notices(program: &mut Program<'_, '_>) {
    while let Some(notice) = program.listener.notices.next() {
        program.outcome.happened.notices += 1;
        let mut objection = program.listener.hear(program.fabric, notice);
        if program.mutant == Some(Mutant::Echo) && matches!(notice, Notice::Rekeyed { .. }) {
            objection = objection.or(program.listener.hear(program.fabric, notice));
        }
        if !program.listener.missed {
            objection.into_iter().for_each(|it| program.note(Finding::Untold, it));
        }
    }
    if !program.listener.missed
        && let Some(rekeyed) = program.fabric.with(World::poll_rekeyed)
    {
        program.note(Finding::Untold, format_args!("no notice of {rekeyed:?}"));
    }
}

/// The leases that came back have the keys that the notices say.
pub(super) fn check_keys(
    program: &mut Program<'_, '_>,
    before: &[Key],
    leases: &[Result<SimLease<'_>, RegisterError>],
) {
    if program.listener.missed {
        return;
    }
    for (key, lease) in before.iter().zip(leases) {
        let expected = program.listener.keys.get(key).copied().unwrap_or(Some(*key));
        let there = lease.as_ref().ok().map(SimLease::handle);
        if there != expected {
            program.note(
                Finding::Untold,
                format_args!("{key:?} is told to be {expected:?} and is {there:?}"),
            );
        }
    }
}

/// A suspension that the program had in its hands has ended as it was told.
pub(super) fn check_end(
    program: &mut Program<'_, '_>,
    id: SuspensionId,
    as_told: impl Fn(Option<Told>) -> bool,
) {
    let told = program.listener.told.get(&id).copied();
    if !program.listener.missed && !as_told(told) {
        program.note(Finding::Untold, format_args!("{id:?} has ended, and is told: {told:?}"));
    }
    forget_the_past(program);
}

/// Between suspensions nothing is open, so what was missed does not matter any more.
fn forget_the_past(program: &mut Program<'_, '_>) {
    if program.suspensions.is_empty() {
        let open = program.listener.told.iter().find(|(_, it)| matches!(it, Told::Suspended(_)));
        if let Some((&id, _)) = open.filter(|_| !program.listener.missed) {
            program.note(Finding::Untold, format_args!("{id:?} is told to be suspended for good"));
        }
        program.listener.start_afresh(program.fabric);
        program.listener.missed = false;
    }
}
