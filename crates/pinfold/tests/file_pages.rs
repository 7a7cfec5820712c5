//! Registered pages of files, on a real device under the eBPF monitor: what a lease names is what the program has
//! mapped, whatever reclaim, direct writes, truncation and splitting do in between. Needs an RDMA device, the
//! privilege to load programs, and the module `brd`; elsewhere it says what is missing.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr)]

mod registrar_support;

use pinfold::monitor::Ebpf;
use pinfold::registrar::verbs::{Device, Domain, Verbs};
use pinfold::{Access, Cache, Config};
use registrar_support::{Memory, PAGE};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

type VerbsCache = Cache<Verbs, Ebpf>;

#[repr(align(4096))]
struct Page([u8; PAGE]);

const DEVICE: &str = "/dev/ram1";

fn skipped<T>(what: &str, result: Result<T, impl std::fmt::Display>) -> Option<T> {
    result.inspect_err(|error| eprintln!("skipped: {what}: {error}")).ok()
}

fn cache() -> Option<VerbsCache> {
    let domain = Domain::new(skipped("an RDMA device", Device::open(None))?).unwrap();
    let monitor = skipped("the eBPF monitor", Ebpf::load())?;
    Some(pinfold::cache(Verbs::new(domain).unwrap(), monitor, Config::keeping_all()).unwrap())
}

fn block_device(flags: i32) -> Option<File> {
    let _ = std::process::Command::new("modprobe").args(["brd", "rd_nr=2"]).status();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(DEVICE);
    skipped(DEVICE, opened)
}

/// Reclaim takes the entry of a page that the device has pinned and leaves the page in the file; a direct write
/// then replaces it there.
#[test]
fn a_reclaimed_page_that_a_direct_write_replaces_is_registered_anew() {
    let (Some(direct), Some(file)) = (block_device(libc::O_DIRECT), block_device(0)) else {
        return;
    };
    let memory = Memory::shared_file(file.as_raw_fd(), PAGE);
    let Some(cache) = cache() else { return };
    let get = || memory.lease(&cache, 0..PAGE, Access::READ).unwrap();
    let first_byte = || memory.bytes()[0];
    for pageout in [false, true] {
        direct.write_all_at(&Page([b'A'; PAGE]).0, 0).unwrap();
        let (before, first) = (first_byte(), get().handle());
        assert_eq!(get().handle(), first, "cached");
        if pageout {
            assert!(memory.advise(0..PAGE, libc::MADV_PAGEOUT));
        }
        direct.write_all_at(&Page([b'B'; PAGE]).0, 0).unwrap();
        let after = first_byte();
        assert!(before == after || get().handle() != first, "stale; reclaimed: {pageout}");
    }
}
