//! The README's programs, compiled, run and compared with what stands there.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because the README's programs do: they hand memory of their own
//! to a ring, and each request is waited for in `submit`.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)] // helpers fail as loudly as tests

use io_uring::{opcode, types};
use pinfold::monitor::best;
use pinfold::pool::{Pool, PoolConfig};
use pinfold::registrar::IoUring;
use pinfold::strategy::{Costs, Door, Reuse};
use pinfold::suspend::SuspensionTerms;
use pinfold::{Access, AddressRange, Config};
use std::error::Error;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

const README: &str = include_str!("../../../README.md");
const HERE: &str = include_str!("readme.rs");

type Outcome = Result<(), Box<dyn Error>>;

/// A ring and both ends of a pipe, or a note why there is no ring.
fn ring() -> Option<(io_uring::IoUring, std::io::PipeReader, OwnedFd)> {
    let ring = io_uring::IoUring::new(8).map_err(|why| eprintln!("skipped: no io_uring: {why}"));
    let (reader, writer) = std::io::pipe().unwrap();
    Some((ring.ok()?, reader, writer.into()))
}

/// Submits a request and waits for its end: how many bytes were written.
fn run(ring: &mut io_uring::IoUring, request: opcode::WriteFixed) -> i32 {
    // SAFETY: the memory outlives the request, whose completion is awaited here.
    unsafe { ring.submission().push(&request.build()).unwrap() };
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

fn next(reader: &mut std::io::PipeReader) -> [u8; 5] {
    let mut bytes = [0; 5];
    reader.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn the_cache() -> Outcome {
    let Some((mut ring, mut reader, writer)) = ring() else { return Ok(()) };
    let (fd, buffer, len) = (types::Fd(writer.as_raw_fd()), b"hello".to_vec(), 5);
    // README
    let registrar = IoUring::new(&ring, 1024)?;
    let cache = pinfold::cache(registrar, best()?, Config::default())?;
    // end
    let mut submit = |request| assert_eq!(run(&mut ring, request), 5);
    // README
    // SAFETY: the buffer outlives the lease, and the request is waited for.
    let lease = unsafe { cache.get(buffer.as_ptr(), buffer.len(), Access::READ) }?;
    submit(opcode::WriteFixed::new(fd, buffer.as_ptr(), len, lease.handle().get()));
    // end
    assert_eq!(next(&mut reader), *b"hello");
    drop(lease);
    Ok(())
}

#[test]
fn the_pool() -> Outcome {
    let Some((mut ring, mut reader, writer)) = ring() else { return Ok(()) };
    let fd = types::Fd(writer.as_raw_fd());
    let registrar = IoUring::new(&ring, 64)?;
    let mut submit = |request| assert_eq!(run(&mut ring, request), 5);
    // README
    let pool = Pool::new(registrar, PoolConfig { max_bytes: 64 << 20, ..PoolConfig::default() })?;

    let mut buffer = pool.get(1500)?;
    buffer[..5].copy_from_slice(b"hello");
    let flying = buffer.in_flight();
    submit(opcode::WriteFixed::new(fd, flying.as_ptr(), 5, flying.handle().get()));
    // SAFETY: `submit` has waited for the request.
    drop(unsafe { flying.complete() });
    // end
    assert_eq!(next(&mut reader), *b"hello");
    assert_eq!(pool.statistics().in_use_bytes, 0);
    Ok(())
}

#[test]
#[allow(clippy::cast_possible_truncation)] // as the README has it: an entry's length is 32 bits wide
fn the_door() -> Outcome {
    let Some((mut ring, mut reader, writer)) = ring() else { return Ok(()) };
    let (fd, buffer) = (types::Fd(writer.as_raw_fd()), b"hello".to_vec());
    let registrar = Arc::new(IoUring::new(&ring, 64)?);
    let cache = pinfold::cache(Arc::clone(&registrar), best()?, Config::default())?;
    let pool = Pool::new(registrar, PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() })?;
    let mut submit = |request| assert_eq!(run(&mut ring, request), 5);
    // README
    let door = Door::new(&cache, Costs::stored("io_uring-userfaultfd")).with_pool(&pool);

    // SAFETY: the buffer outlives the place, and nobody writes it meanwhile.
    let place = unsafe { door.send(buffer.as_ptr(), buffer.len(), Reuse::Unknown) }?;
    for part in place.parts() {
        submit(opcode::WriteFixed::new(
            fd,
            part.range.start() as _,
            part.range.len() as _,
            part.handle.get(),
        ));
    }
    // SAFETY: `submit` has waited for the request.
    unsafe { place.complete() };
    // end
    assert_eq!(next(&mut reader), *b"hello");
    Ok(())
}

#[test]
fn memory_made_huge() -> Outcome {
    let Some((ring, ..)) = ring() else { return Ok(()) };
    let cache = pinfold::cache(IoUring::new(&ring, 64)?, best()?, Config::default())?;
    let buffer = vec![1_u8; 8 << 20];
    let range = AddressRange::new(buffer.as_ptr().expose_provenance(), buffer.len())?;
    // README
    use pinfold::rearrange::{Way, defragment_in_steps};

    let done = defragment_in_steps(
        &cache,
        range,
        &[],
        Vec::new(),
        SuspensionTerms::default(),
        Way::IN_PLACE,
    )
    .map_err(|refused| refused.to_string())?;
    println!(
        "{} bytes more are huge, {:?} are not",
        done.defragmented.made, done.defragmented.left
    );
    // end
    assert!(buffer.iter().all(|&byte| byte == 1));
    Ok(())
}

/// Without comments and white space, and the commas that come with lines of their own.
fn code(lines: impl Iterator<Item = &'static str>) -> String {
    let bare = lines.map(|line| line.split("//").next().unwrap_or(line));
    bare.flat_map(str::split_whitespace).collect::<String>().replace(",)", ")")
}

/// Program after program, as far as they can run here: not the one that needs an RDMA device.
#[test]
fn what_stands_in_the_readme_is_what_runs_here() {
    let blocks = README.split("```rust\n").skip(1);
    let blocks = blocks.map(|rest| rest.split("```").next().unwrap_or(rest));
    let readme: Vec<String> = blocks
        .filter(|block| !block.contains("Verbs::new"))
        .map(|block| code(block.lines()))
        .collect();
    assert_eq!(readme.len(), 4);
    let marked = HERE.split("    // README\n").skip(1);
    let here =
        code(marked.flat_map(|rest| rest.lines().take_while(|line| line.trim() != "// end")));
    assert_eq!(here, readme.concat());
}
