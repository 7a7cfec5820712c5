//! Registered memory that the library owns: no registration on the path of a message.
//!
//!     cargo run --example pool
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because it hands memory to a ring: the request is awaited before the buffer is
//! used again.

#![allow(unsafe_code, clippy::print_stdout)]

use io_uring::{IoUring, opcode, types};
use pinfold::pool::{Pool, PoolConfig};
use pinfold::registrar;
use std::error::Error;
use std::io::Read;
use std::os::fd::AsRawFd;

fn main() -> Result<(), Box<dyn Error>> {
    let Ok(mut ring) = IoUring::new(8) else {
        println!("skipped: no io_uring here; `pinfold probe` says why");
        return Ok(());
    };
    // SAFETY: the ring's table of buffers is left to the registrar.
    let registrar = unsafe { registrar::IoUring::new(&ring, 64) }?;
    let config = PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() };
    let pool = Pool::new(registrar, config)?;
    let (mut reader, writer) = std::io::pipe()?;

    let mut buffer = pool.get(1500)?;
    buffer[..5].copy_from_slice(b"hello");
    let in_flight = buffer.in_flight(); // cannot be read, written or put back
    let fd = types::Fd(writer.as_raw_fd());
    let request = opcode::WriteFixed::new(fd, in_flight.as_ptr(), 5, in_flight.handle().get());
    // SAFETY: the completion is awaited below, and the buffer is in flight until then.
    unsafe { ring.submission().push(&request.build())? };
    ring.submit_and_wait(1)?;
    assert_eq!(ring.completion().next().map(|done| done.result()), Some(5));
    // SAFETY: the request has completed.
    drop(unsafe { in_flight.complete() });

    let mut arrived = [0; 5];
    reader.read_exact(&mut arrived)?;
    assert_eq!(&arrived, b"hello");
    assert_eq!(pool.statistics().in_use_bytes, 0);
    println!("{:?}", pool.statistics());
    Ok(())
}
