//! The simulated device, as the cache sees it.

use crate::device::{Handle, SimDevice};
use crate::fake::{Fake, FakeDevice, FakeSuspend};
use pinfold_core::{Access, AddressRange, DeregisterError, RegisterError, RegistrarLimits};
use std::convert::Infallible;
use std::sync::Arc;

/// Registers with a [`SimDevice`]; clones share it.
pub type SimRegistrar = Fake<Arc<SimDevice>>;

impl SimRegistrar {
    /// A registrar for `device`.
    pub fn new(device: &Arc<SimDevice>) -> Self {
        Self(Arc::clone(device))
    }
}

impl FakeDevice for SimDevice {
    type Handle = Handle;

    fn limits(&self) -> RegistrarLimits {
        self.limits()
    }

    fn granted(&self, wanted: Access) -> Access {
        self.granted(wanted)
    }

    fn register(&self, range: AddressRange, access: Access) -> Result<Handle, RegisterError> {
        self.register(range, access)
    }

    fn deregister(&self, handle: Handle, range: AddressRange) -> Result<(), DeregisterError> {
        self.deregister(handle, range)
    }
}

/// A device without connections, which has nothing that it could stop.
impl FakeSuspend for Arc<SimDevice> {
    type Connection = Infallible;
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
        let handle = registrar.clone().register(range, Access::READ).unwrap();
        assert_eq!(device.counts().live, 1);
        registrar.deregister(handle, range).unwrap();
        assert_eq!(device.shut_down(), []);
    }
}
