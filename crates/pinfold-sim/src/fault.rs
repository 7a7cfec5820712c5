//! What a device is told to do wrong, and gates that put threads in order.

use crate::sync::lock;
use pinfold_core::{AddressRange, DeregisterError, RegisterError};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// When a call of the device stops at a gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// Before anything was done.
    Before,
    /// After the work (the pages are pinned, or released), before the caller learns of it.
    After,
}

/// What one call of the device does instead of, or besides, its work. `E` is the call's error.
#[derive(Clone, Debug)]
pub enum Fault<E> {
    /// It fails and leaves nothing behind.
    Fail(E),
    /// It panics and leaves nothing behind.
    Panic,
    /// It stops at a gate until the test opens it.
    Hold(FaultGate, Moment),
    /// It stops at a gate, then fails.
    HoldThenFail(FaultGate, E),
    /// It stops at a gate, then panics.
    HoldThenPanic(FaultGate),
}

/// A gate in the way of a thread: closed at first, opened once.
///
/// Clones are the same gate. A test waits for the [`arrival`](Self::wait_for_arrivals) of those
/// who stop there, does what it wants done meanwhile, and opens. There is no clock in it.
#[derive(Clone, Debug, Default)]
pub struct FaultGate {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Guards what follows; `changed` tells of every change.
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    open: bool,
    arrivals: usize,
}

impl FaultGate {
    /// A closed gate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        lock(&self.shared.state).open = true;
        self.shared.changed.notify_all();
    }

    /// Opens the gate when the answer is dropped: a failing test does not hang behind it.
    pub fn open_on_drop(&self) -> OpenOnDrop {
        OpenOnDrop(self.clone())
    }

    /// Arrives, and waits until the gate is open.
    pub fn pass(&self) {
        lock(&self.shared.state).arrivals += 1;
        self.shared.changed.notify_all();
        self.wait_until(|state| state.open);
    }

    /// Waits until `count` threads have arrived, those who passed included.
    pub fn wait_for_arrivals(&self, count: usize) {
        self.wait_until(|state| state.arrivals >= count);
    }

    /// How many threads have arrived, those who passed included.
    pub fn arrivals(&self) -> usize {
        lock(&self.shared.state).arrivals
    }

    fn wait_until(&self, reached: impl Fn(&GateState) -> bool) {
        let waiting =
            self.shared.changed.wait_while(lock(&self.shared.state), |state| !reached(state));
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Opens its gate when dropped.
#[must_use = "the gate opens where this is dropped"]
#[derive(Debug)]
pub struct OpenOnDrop(FaultGate);

impl Drop for OpenOnDrop {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// The orders a device was given.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// One for each of the next registrations.
    pub(crate) registrations: VecDeque<Fault<RegisterError>>,
    /// One for each of the next deregistrations.
    pub(crate) deregistrations: VecDeque<Fault<DeregisterError>>,
    /// Registrations that overlap such a range always fail.
    pub(crate) bad_ranges: Vec<(AddressRange, RegisterError)>,
    /// How long every registration spins.
    pub(crate) spins: u32,
}

impl Faults {
    /// The order for a registration of `range`; a bad range uses up no order.
    pub(crate) fn next_registration(
        &mut self,
        range: AddressRange,
    ) -> Option<Fault<RegisterError>> {
        let bad = self.bad_ranges.iter().find(|(bad, _)| bad.overlaps(&range));
        match bad {
            Some((_, error)) => Some(Fault::Fail(*error)),
            None => self.registrations.pop_front(),
        }
    }
}

impl<E> Fault<E> {
    /// Carries out the part of the order that comes before the work.
    pub(crate) fn before(order: Option<Self>) -> Result<Option<Self>, E> {
        match order {
            Some(Self::Fail(error)) => Err(error),
            Some(Self::Panic) => panic_as_told(),
            Some(Self::HoldThenFail(gate, error)) => {
                gate.pass();
                Err(error)
            }
            Some(Self::HoldThenPanic(gate)) => {
                gate.pass();
                panic_as_told()
            }
            Some(Self::Hold(gate, Moment::Before)) => {
                gate.pass();
                Ok(None)
            }
            rest => Ok(rest),
        }
    }

    /// Carries out the part of the order that comes after the work.
    pub(crate) fn after(order: Option<Self>) {
        if let Some(Self::Hold(gate, Moment::After)) = order {
            gate.pass();
        }
    }
}

#[expect(clippy::panic)] // it was asked for, to see whether the cache survives
fn panic_as_told() -> ! {
    panic!("the simulated device panics, as told")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_holds_until_it_is_opened() {
        let gate = FaultGate::new();
        let log = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                gate.pass();
                lock(&log).push("passed");
            });
            gate.wait_for_arrivals(1);
            lock(&log).push("opening");
            gate.open();
        });
        assert_eq!(*lock(&log), ["opening", "passed"]);
        gate.pass();
        assert_eq!(gate.arrivals(), 2);
    }

    #[test]
    fn a_guard_opens_its_gate() {
        let gate = FaultGate::new();
        drop(gate.open_on_drop());
        gate.pass();
    }

    #[test]
    fn a_bad_range_fails_only_what_touches_it() {
        let bad = AddressRange::new(0x1000, 0x1000).unwrap();
        let beside = AddressRange::new(0x2000, 0x1000).unwrap();
        let error = RegisterError::TableFull { capacity: 1 };
        let mut faults = Faults { bad_ranges: vec![(bad, error)], ..Faults::default() };
        assert!(matches!(faults.next_registration(bad), Some(Fault::Fail(_))));
        assert!(faults.next_registration(beside).is_none());
    }
}
