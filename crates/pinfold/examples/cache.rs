//! The bug and the cure in one program: a buffer is sent, its memory is replaced, it is sent again.
//!
//!     cargo run --example cache
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because it hands memory to a ring: each request is awaited before its lease ends,
//! and nothing else uses the memory meanwhile.

#![allow(unsafe_code, clippy::print_stdout)]

use io_uring::{IoUring, opcode, types};
use pinfold::{Access, Config, monitor::best, registrar};
use std::error::Error;
use std::io::Read;
use std::os::fd::AsRawFd;

const BYTES: u32 = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let Ok(mut ring) = IoUring::new(8) else {
        println!("skipped: no io_uring here; `pinfold probe` says why");
        return Ok(());
    };
    // SAFETY: the ring's table of buffers is left to the registrar.
    let registrar = unsafe { registrar::IoUring::new(&ring, 64) }?;
    let cache = pinfold::cache(registrar, best()?, Config::default())?;
    let (mut reader, writer) = std::io::pipe()?;
    let memory = map(std::ptr::null_mut())?;

    for round in 0..6_u8 {
        if round % 2 == 0 && round > 0 {
            map(memory)?; // new pages at the same address; the cache is not asked
        }
        // SAFETY: the memory is mapped, writable and this thread's.
        unsafe { memory.write_bytes(round, BYTES as usize) };
        // SAFETY: the memory stays mapped, and nothing writes it, until the lease ends.
        let lease = unsafe { cache.get(memory, BYTES as usize, Access::READ) }?;
        if let Some(why) = lease.per_use() {
            println!("registered for this use only: {why}");
        }
        let fd = types::Fd(writer.as_raw_fd());
        let request = opcode::WriteFixed::new(fd, memory, BYTES, lease.handle().get());
        // SAFETY: the completion is awaited below, while the lease lives.
        unsafe { ring.submission().push(&request.build())? };
        ring.submit_and_wait(1)?;
        let sent = ring.completion().next().map(|done| done.result());
        drop(lease);

        let mut arrived = vec![0; BYTES as usize];
        reader.read_exact(&mut arrived)?;
        assert!(arrived.iter().all(|&byte| byte == round), "old bytes arrived");
        println!("round {round}: {sent:?} bytes, all of them right; {}", cache.statistics());
    }
    Ok(())
}

/// Fresh pages, at `place` unless it is null.
fn map(place: *mut u8) -> std::io::Result<*mut u8> {
    let fixed = if place.is_null() { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: new memory, or in place of memory that this program alone uses.
    let memory = unsafe { libc::mmap(place.cast(), BYTES as usize, rights, flags, -1, 0) };
    if memory == libc::MAP_FAILED {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(memory.cast())
    }
}
