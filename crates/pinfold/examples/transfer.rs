//! A transfer whose way is chosen by measured costs: cached, copied, or registered for this one use.
//!
//!     cargo run --release -p pinfold-cli -- bench strategies    # once, to measure
//!     cargo run --example transfer
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because it hands memory to a ring: all requests of a transfer are awaited before
//! it is completed, and nothing writes the memory meanwhile.

#![allow(unsafe_code, clippy::print_stdout)]

use io_uring::{IoUring, opcode, types};
use pinfold::pool::{Pool, PoolConfig};
use pinfold::strategy::{Costs, Reuse, TransferPlanner};
use pinfold::{Config, Monitor, monitor::best, registrar};
use std::error::Error;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let Ok(mut ring) = IoUring::new(8) else {
        println!("skipped: no io_uring here; `pinfold probe` says why");
        return Ok(());
    };
    // The ring's table has one registrar, which the cache and the pool share.
    // SAFETY: the ring's table of buffers is left to the registrar.
    let registrar = Arc::new(unsafe { registrar::IoUring::new(&ring, 256) }?);
    let cache = pinfold::cache(Arc::clone(&registrar), best()?, Config::default())?;
    let pool = Pool::new(registrar, PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() })?;
    let costs = Costs::stored(&Costs::name("io_uring", cache.monitor().name()));
    // SAFETY: both are over one registrar.
    let planner = unsafe { TransferPlanner::new(&cache, costs).with_pool(&pool) };
    let (mut reader, writer) = std::io::pipe()?;

    for length in [100, 4096, 32768] {
        let buffer = vec![7_u8; length];
        for _ in 0..8 {
            // SAFETY: the buffer outlives the place, and nothing writes it meanwhile.
            let place = unsafe { planner.send(buffer.as_ptr(), buffer.len(), Reuse::Unknown) }?;
            for part in place.parts() {
                let fd = types::Fd(writer.as_raw_fd());
                let from = std::ptr::with_exposed_provenance(part.range.start());
                let bytes = u32::try_from(part.range.len())?;
                let request = opcode::WriteFixed::new(fd, from, bytes, part.handle.get());
                // SAFETY: the completion is awaited below, before the place is completed.
                unsafe { ring.submission().push(&request.build())? };
                ring.submit_and_wait(1)?;
                let sent = ring.completion().next().map(|done| done.result());
                assert_eq!(sent, Some(i32::try_from(bytes)?));
            }
            // SAFETY: every request has completed.
            unsafe { place.complete() };
            let mut arrived = vec![0; length];
            reader.read_exact(&mut arrived)?;
            assert_eq!(arrived, buffer);
        }
        println!("{length} bytes: {:?}", planner.statistics());
    }
    Ok(())
}
