//! Cached registrations with an RDMA device.
//!
//!     cargo run --example verbs
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because it takes leases of memory of its own, which outlives them and which
//! nothing writes.

#![allow(unsafe_code, clippy::print_stdout)]

use pinfold::registrar::verbs::{Device, Domain, Verbs};
use pinfold::{Access, Config, monitor::best};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let device = match Device::open(None) {
        Ok(device) => device,
        Err(reason) => {
            println!("skipped: {reason}");
            return Ok(());
        }
    };
    let domain = Domain::new(device)?; // or a protection domain that the program has, lent
    let cache = pinfold::cache(Verbs::new(domain)?, best()?, Config::default())?;
    let buffer = vec![7_u8; 1 << 20];
    for _ in 0..3 {
        // SAFETY: the buffer outlives the lease, and nothing writes it meanwhile.
        let lease = unsafe { cache.get(buffer.as_ptr(), buffer.len(), Access::READ) }?;
        println!("sge: address {:p}, lkey {}", buffer.as_ptr(), lease.handle().lkey());
    }
    println!("{}", cache.statistics());
    Ok(())
}
