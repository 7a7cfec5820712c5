//! A device of your own: a registrar of fifteen lines, and the cache over it.
//!
//!     cargo run --example device
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare `register`, which only counts here, and to get a buffer that outlives
//! its lease.

#![allow(unsafe_code, clippy::print_stdout)]

use pinfold::{
    Access, AddressRange, Config, DeregisterError, RegisterError, Registrar, RegistrarLimits,
    monitor::best,
};
use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};

/// A device that needs to be told of memory before it may use it, and answers with a key.
struct Device {
    last_key: AtomicU32,
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Device {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits::new(4096, 1 << 30, 1024) // page, longest registration, how many at once
    }

    unsafe fn register(&self, range: AddressRange, _: Access) -> Result<u32, RegisterError> {
        println!("pin {range:?} and program the device");
        Ok(self.last_key.fetch_add(1, Ordering::Relaxed)) // Relaxed: a number that is given once
    }

    unsafe fn deregister(&self, key: u32, _: AddressRange) -> Result<(), DeregisterError> {
        println!("key {key} means nothing any more");
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device { last_key: AtomicU32::new(1) };
    let cache = pinfold::cache(device, best()?, Config::default())?;
    let buffer = vec![1_u8; 10_000];
    for _ in 0..3 {
        // SAFETY: the buffer outlives the lease, and nothing writes it meanwhile.
        let lease = unsafe { cache.get(buffer.as_ptr(), buffer.len(), Access::READ) }?;
        println!("send with key {}", lease.handle());
    }
    drop(buffer);
    println!("{}", cache.statistics());
    Ok(())
}
