//! A device that pins pages: it keeps the translation of the moment, as hardware does.

use crate::fault::{Fault, Faults};
use crate::space::{AddressSpace, PAGE_BYTES, PhysicalPage};
use crate::sync::lock;
use pinfold_core::{Access, AddressRange, DeregisterError, RegisterError, RegistrarLimits};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const EFAULT: i32 = 14;
const ENOMEM: i32 = 12;
const EINVAL: i32 = 22;

/// What a device gave for a range; never given twice by one device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(pub u64);

/// What a device can take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// The longest registration, in bytes.
    pub max_region_bytes: usize,
    /// How many registrations its table holds.
    pub max_regions: usize,
    /// How many bytes it may pin: the `RLIMIT_MEMLOCK` of its program.
    pub max_pinned_bytes: u64,
    /// Whether it pins for writing whatever was asked, as io_uring does.
    pub always_writes: bool,
}

impl Default for DeviceConfig {
    /// An io_uring table's limits, no limit on pinned bytes, rights as asked.
    fn default() -> Self {
        Self {
            max_region_bytes: 1 << 30,
            max_regions: 16384,
            max_pinned_bytes: u64::MAX,
            always_writes: false,
        }
    }
}

/// A live registration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registration {
    /// The bytes it covers.
    pub range: AddressRange,
    /// What the device may do with them.
    pub access: Access,
    /// The pages that it holds, first to last.
    pub pages: Vec<PhysicalPage>,
}

/// What was done to a device, counted exactly.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Registrations that succeeded.
    pub registrations: u64,
    /// Registrations that failed, panics included.
    pub failures: u64,
    /// Deregistrations that succeeded.
    pub deregistrations: u64,
    /// Registrations that live now.
    pub live: usize,
    /// Bytes that are pinned now, in whole pages, once for each registration.
    pub pinned_bytes: u64,
    /// The most bytes ever pinned at once.
    pub peak_pinned_bytes: u64,
    /// The most registrations ever live at once.
    pub peak_live: usize,
}

/// A misuse of the device. A test ends with [`SimDevice::violations`] empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Violation {
    /// A handle was given back twice.
    DoubleDeregistration(Handle),
    /// A handle was given back or used that this device never gave.
    UnknownHandle(Handle),
    /// A handle was used after it was given back.
    UseAfterDeregistration(Handle),
    /// A handle was used outside its range.
    OutOfBounds(Handle, AddressRange),
    /// A handle was given back with a range that is not its own.
    WrongRange(Handle, AddressRange),
    /// A range for local rights was not made of whole pages.
    Unaligned(AddressRange),
    /// The registration was still alive when the device was shut down.
    Leaked(Handle),
}

/// A simulated device over an [`AddressSpace`].
#[derive(Debug)]
pub struct SimDevice {
    space: Arc<AddressSpace>,
    config: DeviceConfig,
    /// Guards the table, its counts and the violations. Taken before the lock of the space,
    /// never while a gate holds the call.
    ledger: Mutex<Ledger>,
    /// Guards the orders; no other lock is taken under it.
    faults: Mutex<Faults>,
}

#[derive(Debug, Default)]
struct Ledger {
    next_handle: u64,
    live: BTreeMap<Handle, Registration>,
    counts: Counts,
    violations: Vec<Violation>,
}

impl SimDevice {
    /// A device with an empty table.
    pub fn new(space: Arc<AddressSpace>, config: DeviceConfig) -> Self {
        Self { space, config, ledger: Mutex::default(), faults: Mutex::default() }
    }

    /// The address space that it translates.
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    /// Gives the next registrations that have no order yet the order `fault`.
    pub fn next_registrations(&self, count: usize, fault: &Fault<RegisterError>) {
        lock(&self.faults).registrations.extend(std::iter::repeat_n(fault.clone(), count));
    }

    /// Gives the next deregistrations that have no order yet the order `fault`.
    pub fn next_deregistrations(&self, count: usize, fault: &Fault<DeregisterError>) {
        lock(&self.faults).deregistrations.extend(std::iter::repeat_n(fault.clone(), count));
    }

    /// Fails the next `count` registrations with `error`.
    pub fn fail_next(&self, count: usize, error: RegisterError) {
        self.next_registrations(count, &Fault::Fail(error));
    }

    /// Fails every registration that overlaps `range` with `error`, until [`heal`](Self::heal).
    pub fn fail_in(&self, range: AddressRange, error: RegisterError) {
        lock(&self.faults).bad_ranges.push((range, error));
    }

    /// Makes every registration spin for `spins` rounds, outside every lock.
    pub fn slow_down(&self, spins: u32) {
        lock(&self.faults).spins = spins;
    }

    /// Takes all orders back.
    pub fn heal(&self) {
        *lock(&self.faults) = Faults::default();
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        lock(&self.ledger).counts
    }

    /// How it was misused so far.
    pub fn violations(&self) -> Vec<Violation> {
        lock(&self.ledger).violations.clone()
    }

    /// The live registrations.
    pub fn registrations(&self) -> Vec<(Handle, Registration)> {
        lock(&self.ledger).live.iter().map(|(handle, it)| (*handle, it.clone())).collect()
    }

    /// What `handle` stands for, if it lives.
    pub fn registration(&self, handle: Handle) -> Option<Registration> {
        lock(&self.ledger).live.get(&handle).cloned()
    }

    /// The pages that a transfer of `range` through `handle` really touches.
    ///
    /// `None`, and a [`Violation`], if the handle is dead or does not cover the range.
    pub fn translate(&self, handle: Handle, range: AddressRange) -> Option<Vec<PhysicalPage>> {
        lock(&self.ledger).translate(handle, range)
    }

    /// Whether a transfer of `range` through `handle` touches the program's own pages.
    pub fn is_fresh(&self, handle: Handle, range: AddressRange) -> bool {
        let pages = self.translate(handle, range);
        pages.is_some() && pages == self.space.translate(range)
    }

    /// Ends the test's use of the device: what still lives becomes a violation. All violations.
    pub fn shut_down(&self) -> Vec<Violation> {
        let mut ledger = lock(&self.ledger);
        let leaked: Vec<_> = ledger.live.keys().map(|handle| Violation::Leaked(*handle)).collect();
        ledger.violations.extend(leaked);
        ledger.violations.clone()
    }

    pub(crate) fn limits(&self) -> RegistrarLimits {
        RegistrarLimits {
            page_bytes: PAGE_BYTES,
            max_region_bytes: self.config.max_region_bytes,
            max_regions: self.config.max_regions,
        }
    }

    pub(crate) fn granted(&self, wanted: Access) -> Access {
        if self.config.always_writes { wanted | Access::WRITE } else { wanted }
    }

    /// What [`Registrar::register`](pinfold_core::Registrar::register) does with this device, without a promise:
    /// there is no memory behind a simulated address.
    ///
    /// # Errors
    ///
    /// What the device's configuration and its faults demand.
    pub fn register(&self, range: AddressRange, access: Access) -> Result<Handle, RegisterError> {
        let attempt = Attempt { device: self, succeeded: false };
        let order = self.registration_order(range);
        let order = Fault::before(order)?;
        self.spin();
        let handle = self.pin_and_enter(range, self.granted(access))?;
        attempt.succeed();
        Fault::after(order);
        Ok(handle)
    }

    /// Ends a registration.
    ///
    /// # Errors
    ///
    /// A fault that was asked for, or a handle that has none.
    pub fn deregister(&self, handle: Handle, range: AddressRange) -> Result<(), DeregisterError> {
        let order = lock(&self.faults).deregistrations.pop_front();
        let order = Fault::before(order)?;
        lock(&self.ledger).remove(handle, range)?;
        Fault::after(order);
        Ok(())
    }

    /// A function of its own, so that the lock is not held while the order is carried out.
    fn registration_order(&self, range: AddressRange) -> Option<Fault<RegisterError>> {
        lock(&self.faults).next_registration(range)
    }

    fn spin(&self) {
        let spins = lock(&self.faults).spins;
        for _ in 0..spins {
            std::hint::spin_loop();
        }
    }

    /// One step: a registration is in the table exactly if its pages are pinned.
    fn pin_and_enter(&self, range: AddressRange, access: Access) -> Result<Handle, RegisterError> {
        let mut ledger = lock(&self.ledger);
        ledger.note_alignment(range, access);
        self.check_room(&ledger, range)?;
        let pages = self.space.pin(range, access).map_err(|reason| RegisterError::BadAddress {
            range,
            reason,
            errno: EFAULT,
        })?;
        Ok(ledger.enter(Registration { range, access, pages }))
    }

    fn check_room(&self, ledger: &Ledger, range: AddressRange) -> Result<(), RegisterError> {
        let DeviceConfig { max_region_bytes, max_regions, max_pinned_bytes, .. } = self.config;
        if range.len() > max_region_bytes {
            Err(RegisterError::TooLarge { range, max_bytes: max_region_bytes })
        } else if ledger.live.len() >= max_regions {
            Err(RegisterError::TableFull { capacity: max_regions })
        } else if ledger.counts.pinned_bytes + whole_pages(range) > max_pinned_bytes {
            Err(RegisterError::PinnedMemoryLimit {
                limit_bytes: Some(max_pinned_bytes),
                errno: ENOMEM,
            })
        } else {
            Ok(())
        }
    }
}

/// Counts a registration as failed, also when it ends in a panic, unless it succeeded.
struct Attempt<'a> {
    device: &'a SimDevice,
    succeeded: bool,
}

impl Attempt<'_> {
    fn succeed(mut self) {
        self.succeeded = true;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.succeeded {
            lock(&self.device.ledger).counts.failures += 1;
        }
    }
}

fn whole_pages(range: AddressRange) -> u64 {
    range.page_aligned(PAGE_BYTES).len() as u64
}

impl Ledger {
    fn note_alignment(&mut self, range: AddressRange, access: Access) {
        if !access.is_remote() && range != range.page_aligned(PAGE_BYTES) {
            self.violations.push(Violation::Unaligned(range));
        }
    }

    fn enter(&mut self, registration: Registration) -> Handle {
        let handle = Handle(self.next_handle);
        self.next_handle += 1;
        self.counts.registrations += 1;
        self.counts.pinned_bytes += whole_pages(registration.range);
        self.live.insert(handle, registration);
        self.counts.live = self.live.len();
        self.counts.peak_live = self.counts.peak_live.max(self.counts.live);
        self.counts.peak_pinned_bytes = self.counts.peak_pinned_bytes.max(self.counts.pinned_bytes);
        handle
    }

    fn remove(&mut self, handle: Handle, range: AddressRange) -> Result<(), DeregisterError> {
        let Some(registration) = self.live.remove(&handle) else {
            self.violations.push(self.dead(handle, Violation::DoubleDeregistration));
            return Err(DeregisterError::Os { operation: "deregister", errno: EINVAL });
        };
        if registration.range != range {
            self.violations.push(Violation::WrongRange(handle, range));
        }
        self.counts.deregistrations += 1;
        self.counts.pinned_bytes -= whole_pages(registration.range);
        self.counts.live = self.live.len();
        Ok(())
    }

    /// Handles are counted up and never given twice: one below the next was given once.
    fn dead(&self, handle: Handle, given: fn(Handle) -> Violation) -> Violation {
        if handle.0 < self.next_handle { given(handle) } else { Violation::UnknownHandle(handle) }
    }

    fn translate(&mut self, handle: Handle, range: AddressRange) -> Option<Vec<PhysicalPage>> {
        let Some(registration) = self.live.get(&handle) else {
            self.violations.push(self.dead(handle, Violation::UseAfterDeregistration));
            return None;
        };
        if !registration.range.contains(&range) {
            self.violations.push(Violation::OutOfBounds(handle, range));
            return None;
        }
        Some(registration.pages_of(range).to_vec())
    }
}

impl Registration {
    fn pages_of(&self, part: AddressRange) -> &[PhysicalPage] {
        let base = self.range.start() / PAGE_BYTES;
        let first = part.start() / PAGE_BYTES - base;
        let last = (part.end() - 1) / PAGE_BYTES - base;
        &self.pages[first..=last]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{FaultGate, Moment};
    use crate::space::Protection;
    use pinfold_core::BadAddress;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn range(start: usize, length: usize) -> AddressRange {
        AddressRange::new(start, length).unwrap()
    }

    fn device(config: DeviceConfig) -> SimDevice {
        let space = Arc::new(AddressSpace::new());
        space.map(range(0x10000, 0x10000), Protection::ReadWrite);
        SimDevice::new(space, config)
    }

    fn register(device: &SimDevice, start: usize, length: usize) -> Result<Handle, RegisterError> {
        device.register(range(start, length), Access::READ_WRITE)
    }

    #[test]
    fn the_device_keeps_the_pages_of_the_moment() {
        let device = device(DeviceConfig::default());
        let buffer = range(0x10000, 0x3000);
        let handle = register(&device, 0x10000, 0x3000).unwrap();
        let pages = device.space().translate(buffer);
        assert!(device.is_fresh(handle, buffer));
        device.space().discard(range(0x11000, 1));
        assert_eq!(device.translate(handle, buffer), pages);
        assert!(!device.is_fresh(handle, buffer));
        assert!(device.is_fresh(handle, range(0x10000, 0x1000)));
        assert!(device.is_fresh(handle, range(0x12004, 8)));
        device.space().unmap(buffer);
        assert_eq!(device.translate(handle, buffer), pages);
        assert!(!device.is_fresh(handle, buffer));
        assert_eq!(device.violations(), []);
    }

    #[test]
    fn misuse_is_noted() {
        let device = device(DeviceConfig::default());
        let buffer = range(0x10000, 0x1000);
        let handle = register(&device, 0x10000, 0x1000).unwrap();
        assert_eq!(device.translate(handle, range(0x10000, 0x1001)), None);
        assert_eq!(device.deregister(handle, buffer), Ok(()));
        assert!(device.deregister(handle, buffer).is_err());
        assert_eq!(device.translate(handle, buffer), None);
        assert!(device.deregister(Handle(9), buffer).is_err());
        let next = register(&device, 0x10000, 0x800).unwrap();
        assert_eq!(device.deregister(next, buffer), Ok(()));
        let last = register(&device, 0x10000, 0x1000).unwrap();
        assert_eq!(
            device.shut_down(),
            [
                Violation::OutOfBounds(handle, range(0x10000, 0x1001)),
                Violation::DoubleDeregistration(handle),
                Violation::UseAfterDeregistration(handle),
                Violation::UnknownHandle(Handle(9)),
                Violation::Unaligned(range(0x10000, 0x800)),
                Violation::WrongRange(next, buffer),
                Violation::Leaked(last),
            ]
        );
    }

    #[test]
    fn limits_are_told_apart() {
        let device = device(DeviceConfig {
            max_region_bytes: 0x3000,
            max_regions: 2,
            max_pinned_bytes: 0x4000,
            always_writes: false,
        });
        assert!(matches!(register(&device, 0x10000, 0x4000), Err(RegisterError::TooLarge { .. })));
        register(&device, 0x10000, 0x3000).unwrap();
        assert_eq!(
            register(&device, 0x10000, 0x2000),
            Err(RegisterError::PinnedMemoryLimit { limit_bytes: Some(0x4000), errno: ENOMEM })
        );
        register(&device, 0x10000, 0x1000).unwrap();
        assert_eq!(
            register(&device, 0x10000, 0x1000),
            Err(RegisterError::TableFull { capacity: 2 })
        );
        let counts = device.counts();
        assert_eq!((counts.registrations, counts.failures, counts.live), (2, 3, 2));
        assert_eq!((counts.pinned_bytes, counts.peak_pinned_bytes), (0x4000, 0x4000));
    }

    #[test]
    fn a_device_that_always_writes_needs_writable_memory() {
        let device = device(DeviceConfig { always_writes: true, ..DeviceConfig::default() });
        let page = range(0x10000, 0x1000);
        device.space().protect(page, Protection::ReadOnly);
        assert_eq!(device.granted(Access::READ), Access::READ_WRITE);
        assert_eq!(
            device.register(page, Access::READ),
            Err(RegisterError::BadAddress {
                range: page,
                reason: BadAddress::NotWritable { at: 0x10000 },
                errno: EFAULT
            })
        );
    }

    #[test]
    fn orders_are_carried_out_in_turn_and_leave_nothing_behind() {
        let device = device(DeviceConfig::default());
        let error = RegisterError::TableFull { capacity: 7 };
        device.fail_next(1, error);
        device.next_registrations(1, &Fault::Panic);
        assert_eq!(register(&device, 0x10000, 0x1000), Err(error));
        assert!(catch_unwind(AssertUnwindSafe(|| register(&device, 0x10000, 0x1000))).is_err());
        assert_eq!(device.counts().failures, 2);
        assert!(device.registrations().is_empty());
        assert!(register(&device, 0x10000, 0x1000).is_ok());
    }

    #[test]
    fn a_bad_range_fails_until_healed() {
        let device = device(DeviceConfig::default());
        let error = RegisterError::DeviceGone { errno: 9 };
        device.fail_in(range(0x11000, 0x1000), error);
        assert_eq!(register(&device, 0x10000, 0x2000), Err(error));
        assert!(register(&device, 0x10000, 0x1000).is_ok());
        device.heal();
        assert!(register(&device, 0x10000, 0x2000).is_ok());
    }

    #[test]
    fn a_failed_deregistration_keeps_the_registration() {
        let device = device(DeviceConfig::default());
        let handle = register(&device, 0x10000, 0x1000).unwrap();
        let error = DeregisterError::Os { operation: "deregister", errno: 16 };
        device.next_deregistrations(1, &Fault::Fail(error));
        assert_eq!(device.deregister(handle, range(0x10000, 0x1000)), Err(error));
        assert_eq!(device.counts().live, 1);
    }

    #[test]
    fn a_gate_stops_a_registration_on_either_side_of_the_pinning() {
        let device = device(DeviceConfig::default());
        let buffer = range(0x10000, 0x1000);
        let [before, after] = [FaultGate::new(), FaultGate::new()];
        device.next_registrations(1, &Fault::Hold(before.clone(), Moment::Before));
        device.next_registrations(1, &Fault::Hold(after.clone(), Moment::After));
        let handles = std::thread::scope(|scope| {
            let early = scope.spawn(|| register(&device, 0x10000, 0x1000).unwrap());
            before.wait_for_arrivals(1);
            assert_eq!(device.counts().live, 0);
            let late = scope.spawn(|| register(&device, 0x10000, 0x1000).unwrap());
            after.wait_for_arrivals(1);
            assert_eq!(device.counts().live, 1);
            device.space().discard(buffer);
            before.open();
            after.open();
            [early.join().unwrap(), late.join().unwrap()]
        });
        assert_eq!(handles.map(|handle| device.is_fresh(handle, buffer)), [true, false]);
    }
}
