//! Memory nodes: where pages are, and moving them.
//!
//! # Safety
//!
//! The unsafe code of this file is there because a system call is a foreign function. A page that is moved keeps its
//! content and its address, and the kernel writes to local memory only.

use crate::errno::{Errno, done, last_errno};
use crate::memory::pointer;
use pinfold_core::AddressRange;
use std::ptr;

/// Whether the mapping at `address` has a memory policy of its own (`mbind`), or may have.
pub fn has_policy(address: usize) -> bool {
    const OF_ADDRESS: libc::c_ulong = 2; // MPOL_F_ADDR
    const DEFAULT: libc::c_int = 0; // MPOL_DEFAULT
    let mut mode = DEFAULT;
    // SAFETY: the kernel writes to `mode`, and to no set of nodes.
    let asked = unsafe {
        let (mode, no_nodes) = (&raw mut mode, ptr::null_mut::<libc::c_ulong>());
        libc::syscall(libc::SYS_get_mempolicy, mode, no_nodes, 0_usize, address, OF_ADDRESS)
    };
    match asked {
        0 => mode != DEFAULT,
        // Without NUMA there are no policies, and a sandbox that keeps one from asking keeps one from
        // setting any.
        _ => !matches!(last_errno(), Errno(libc::ENOSYS | libc::EPERM)),
    }
}

/// Gives the mapping a policy of its own.
pub fn prefer_local(range: AddressRange) -> Result<(), Errno> {
    const PREFERRED: usize = 1; // MPOL_PREFERRED: of no nodes, the local one
    let (start, no_nodes) = (pointer(range.start()), ptr::null::<libc::c_ulong>());
    // SAFETY: no content is changed, and the kernel reads no set of nodes.
    let answer = unsafe {
        let length = range.len();
        libc::syscall(libc::SYS_mbind, start, length, PREFERRED, no_nodes, 0_usize, 0_usize)
    };
    done(answer)
}

/// Where the pages at `addresses` are: a node, or the kernel's error number, negative.
pub fn nodes_of(addresses: &[usize], answers: &mut [i32]) -> Result<(), Errno> {
    ask_about_pages(addresses, ptr::null(), answers)
}

/// Moves the pages at `addresses` to `node`. `answers` as by [`nodes_of`], for those that it tells
/// about.
pub fn move_to_node(addresses: &[usize], node: i32, answers: &mut [i32]) -> Result<(), Errno> {
    let nodes = vec![node; addresses.len()];
    ask_about_pages(addresses, nodes.as_ptr(), answers)
}

fn ask_about_pages(
    addresses: &[usize],
    nodes: *const i32,
    answers: &mut [i32],
) -> Result<(), Errno> {
    const MOVE: libc::c_int = 2; // MPOL_MF_MOVE: pages that this process alone has
    let count = addresses.len().min(answers.len());
    // SAFETY: the kernel reads `count` addresses and as many nodes, if any, and writes as many
    // answers; a page that is moved keeps its content and its address.
    let left = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            count,
            addresses.as_ptr(),
            nodes,
            answers.as_mut_ptr(),
            MOVE,
        )
    };
    done(left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{map, unmap};
    use crate::process::page_bytes;

    #[test]
    fn a_policy_is_seen_and_no_page_is_nowhere() {
        let range = map(page_bytes()).unwrap();
        let mut answers = [0];
        match (prefer_local(range), nodes_of(&[range.start()], &mut answers)) {
            (Ok(()), Ok(())) => {
                assert!(has_policy(range.start()));
                assert_eq!(answers, [-libc::ENOENT], "there is no page yet");
            }
            refused => eprintln!("skipped: no memory nodes here: {refused:?}"),
        }
        // SAFETY: the test's own.
        unsafe { unmap(range) };
    }
}
