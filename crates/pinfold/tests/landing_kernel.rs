//! What this kernel does with pages that a device has pinned when they are moved: the facts that
//! landing is built on.

#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod registrar_support;

use pinfold::Access;
use registrar_support::{Memory, Own, PAGE, PageMover, registrar_of_a_ring};

/// `UFFDIO_MOVE` keeps mappings whole, but wants an empty target that no other userfaultfd watches,
/// and pages that are not pinned: landing pages would have to be deregistered before each move.
#[test]
fn userfaultfd_moves_no_pinned_page() {
    let Some(uffd) = PageMover::open() else {
        eprintln!("skipped: no UFFDIO_MOVE");
        return;
    };
    let Some((_ring, registrar)) = registrar_of_a_ring(1) else { return };
    let bytes = 4 * PAGE;
    let (mut from, to) = (Memory::new(bytes), Memory::new(bytes));
    from.fill(7);
    assert!(uffd.watch(&to));
    let index = from.register(&registrar, 0..bytes, Access::WRITE).unwrap();
    assert_eq!(uffd.move_pages(&from, &to, bytes), Err(libc::EBUSY));
    registrar.deregister_own(index, from.range()).unwrap();
    assert_eq!(uffd.move_pages(&from, &to, bytes), Ok(()));
    assert!(to.bytes().iter().all(|&byte| byte == 7));
}
