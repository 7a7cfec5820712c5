//! The simulated device, as the cache sees it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the unsafe function of [`Registrar`], and to call the cache's
//! `get` for ranges of simulated addresses. There is no memory behind one, so nothing can be touched through it.

#![allow(unsafe_code)]

use crate::device::{Handle, SimDevice};
use pinfold_core::{
    Access, AddressRange, Cache, DeregisterError, GetError, Lease, Monitor, RegisterError,
    Registrar, RegistrarLimits, Suspend,
};
use std::sync::Arc;

/// Registers with a [`SimDevice`]; clones share it.
#[derive(Clone, Debug)]
pub struct SimRegistrar {
    device: Arc<SimDevice>,
}

impl SimRegistrar {
    /// A registrar for `device`.
    pub fn new(device: &Arc<SimDevice>) -> Self {
        Self { device: Arc::clone(device) }
    }
}

/// A registrar of simulated addresses: no memory of this process is read or written for a registration.
///
/// # Safety
///
/// That holds for every range.
pub unsafe trait Simulated: Registrar {}

// SAFETY: the device is a table of numbers.
unsafe impl Simulated for SimRegistrar {}

/// The cache's `get` for simulated addresses, whose contract there is nothing to say for.
///
/// # Errors
///
/// As [`Cache::get`].
pub fn get_simulated<R: Simulated, M: Monitor>(
    cache: &Cache<R, M>,
    range: AddressRange,
    access: Access,
) -> Result<Lease<'_, R, M>, GetError> {
    let start = std::ptr::without_provenance(range.start());
    // SAFETY: there is no memory behind a simulated address.
    unsafe { cache.get(start, range.len(), access) }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for SimRegistrar {
    type Handle = Handle;

    fn limits(&self) -> RegistrarLimits {
        self.device.limits()
    }

    fn granted(&self, wanted: Access) -> Access {
        self.device.granted(wanted)
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Handle, RegisterError> {
        self.device.register(range, access)
    }

    unsafe fn deregister(
        &self,
        handle: Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        self.device.deregister(handle, range)
    }
}

/// A device without connections, which has nothing that it could stop.
// SAFETY: there is no connection, and no memory is touched through a handle.
unsafe impl Suspend for SimRegistrar {
    pinfold_core::no_connections!();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceConfig;
    use crate::space::{AddressSpace, Protection};

    #[test]
    fn clones_register_with_one_device() {
        let space = Arc::new(AddressSpace::new());
        let range = AddressRange::new(0x1000, 0x1000).unwrap();
        space.map(range, Protection::ReadWrite);
        let device = Arc::new(SimDevice::new(space, DeviceConfig::default()));
        let registrar = SimRegistrar::new(&device);
        assert_eq!(registrar.limits().max_regions, 16384);
        assert_eq!(registrar.granted(Access::READ), Access::READ);
        // SAFETY: there is no memory behind a simulated address.
        let handle = unsafe { registrar.clone().register(range, Access::READ) }.unwrap();
        assert_eq!(device.counts().live, 1);
        // SAFETY: as above.
        unsafe { registrar.deregister(handle, range) }.unwrap();
        assert_eq!(device.shut_down(), []);
    }
}
