//! What becomes of memory: huge, moved, trimmed, or left, with the reason.

use super::registrar_support::{Memory, Own, alone, status_bytes};
use super::rig::*;
use pinfold::rearrange::*;
use pinfold::registrar::{IoUring, Mlock};
use pinfold::suspend::Keys;
use pinfold::{Access, AddressRange, Registrar};

fn by_copy() -> HugePageWay {
    // SAFETY: these tests write nothing while a way is in use.
    unsafe { HugePageWay::by_copy() }
}

/// What of `range` was left, and why; nothing where this kernel makes no huge pages.
fn left(range: AddressRange, way: HugePageWay) -> Option<Vec<(AddressRange, Obstacle)>> {
    let (_ring, cache) = rig()?;
    let suspended = suspend(&cache, range, Vec::new());
    let done = defragment(&suspended, way);
    suspended.resume().unwrap();
    let note = |error: &RearrangeError| eprintln!("skipped: {error}");
    done.inspect_err(note).ok().map(|done| done.left)
}

#[test]
fn the_ends_stay_small_and_are_told() {
    let (_memory, range) = memory(2 * HUGE);
    let crooked = AddressRange::between(range.start() + 4096, range.end() - 8192).unwrap();
    for way in [HugePageWay::IN_PLACE, by_copy()] {
        let Some(left) = left(crooked, way) else { return };
        let parts: Vec<_> = left.iter().map(|(part, why)| (part.len(), *why)).collect();
        assert_eq!(parts, [(HUGE - 4096, Obstacle::Partial), (HUGE - 8192, Obstacle::Partial)]);
    }
    assert!(is_whole(range));
}

#[test]
fn what_the_program_forbade_stays_small() {
    let memory = Memory::new(3 * HUGE); // MADV_NOHUGEPAGE
    let start = memory.range().start();
    let block = memory.part(start.next_multiple_of(HUGE) - start, HUGE);
    let before = ResidentPages::of(block);
    let Some(in_place) = left(block, HugePageWay::IN_PLACE) else { return };
    assert_eq!(in_place, [(block, Obstacle::Forbidden)]);
    assert_eq!(ResidentPages::of(block), before, "no page is made for what is refused");
    assert_eq!(left(block, by_copy()), Some(vec![(block, Obstacle::OtherKind)]));
}

#[test]
fn what_is_pinned_elsewhere_stays_and_is_reported() {
    let (Some(ring), (_memory, range)) = (ring(), memory(HUGE)) else { return };
    if ResidentPages::of(range).is_none_or(|pages| pages.huge > 0) {
        eprintln!("skipped: pages are huge from the start, or that is unknown");
        return;
    }
    // SAFETY: the ring's table of buffers is left to the registrar.
    let other = unsafe { IoUring::new(&ring, 4) }.unwrap();
    // SAFETY: no transfer uses it.
    let index = unsafe { other.register(range, Access::READ_WRITE) }.unwrap();
    let Some(pinned) = left(range, HugePageWay::IN_PLACE) else { return };
    assert_eq!(pinned, [(range, Obstacle::Pinned)]);
    other.deregister_own(index, range).unwrap();
    assert!(is_whole(range));
}

#[test]
fn locked_memory_is_made_huge_in_place_and_not_by_copying() {
    alone("huge::locked_memory_is_made_huge_in_place_and_not_by_copying", || {
        let (_memory, range) = memory(HUGE);
        let Some(ring) = ring() else { return };
        // SAFETY: the ring's table of buffers is left to the registrar.
        let registrars = (unsafe { IoUring::new(&ring, 16) }.unwrap(), Mlock::new().unwrap());
        let Some(cache) = cache(registrars) else { return };
        let lease = get(&cache, range);
        let (handle, locked) = (lease.handle(), status_bytes("VmLck:"));
        assert_eq!(locked, HUGE);
        let suspended = suspend(&cache, range, vec![lease]);
        let copied = defragment(&suspended, by_copy());
        if let Ok(copied) = copied {
            assert_eq!(copied.left, [(range, Obstacle::OtherKind)]);
        }
        let in_place = defragment(&suspended, HugePageWay::IN_PLACE);
        let mut resumed = suspended.resume().unwrap();
        let lease = resumed.leases.pop().unwrap().unwrap();
        assert_eq!((lease.handle(), resumed.keys), (handle, Keys::Same));
        assert_eq!(status_bytes("VmLck:"), locked);
        if let (Ok(done), Some(pages)) = (in_place, ResidentPages::of(range)) {
            assert_eq!(pages.huge, done.made + done.already);
        }
        assert!(is_whole(range));
        drop((lease, resumed));
        drop(cache);
        assert_eq!(status_bytes("VmLck:"), 0);
    });
}

#[test]
fn a_region_moves_to_a_node_that_there_is() {
    let (Some((mut ring, cache)), (_memory, range)) = (rig(), memory(HUGE)) else { return };
    let suspended = suspend(&cache, range, vec![get(&cache, range)]);
    let nowhere = migrate(&suspended, Node(4000));
    let nodes = match nowhere {
        Err(RearrangeError::NoSuchNode { node: Node(4000), nodes }) => nodes,
        Err(error @ RearrangeError::Unsupported { .. }) => {
            eprintln!("skipped: {error}");
            return;
        }
        other => panic!("{other:?}"),
    };
    for &node in &nodes {
        let moved = migrate(&suspended, node).unwrap();
        assert_eq!(moved.nodes, nodes);
        let elsewhere: usize = moved.after.pages.values().sum::<usize>()
            - moved.after.pages.get(&node).copied().unwrap_or(0);
        assert_eq!((elsewhere, moved.after.absent), (moved.left.len(), 0), "{moved:?}");
    }
    let mut resumed = suspended.resume().unwrap();
    let lease = resumed.leases.pop().unwrap().unwrap();
    assert!(is_whole(range) && sends(&mut ring, range, lease.handle().get()));
}

#[test]
fn a_tail_is_given_up_and_the_rest_keeps_its_bytes() {
    let (Some((mut ring, cache)), (_memory, range)) = (rig(), memory(2 * HUGE)) else { return };
    let middle = range.start() + HUGE;
    let head = AddressRange::between(range.start(), middle).unwrap();
    let tail = AddressRange::between(middle, range.end()).unwrap();
    let kept = get(&cache, head);
    let suspended = suspend(&cache, range, vec![kept]);
    let reaching = AddressRange::between(middle - 4096, range.end()).unwrap();
    // SAFETY: the test does not need the tail, and the page before it is registered.
    let trimmed = unsafe { trim(&suspended, reaching) }.unwrap();
    assert_eq!((trimmed.given_up, trimmed.left.len()), (HUGE, 0));
    assert_eq!(trimmed.held, [AddressRange::new(middle - 4096, 4096).unwrap()]);
    if let (Some(before), Some(after)) = (trimmed.before, trimmed.after) {
        assert_eq!((before.resident, after.resident), (2 * HUGE, HUGE));
    }
    let mut resumed = suspended.resume().unwrap();
    let lease = resumed.leases.pop().unwrap().unwrap();
    assert!(is_whole(head) && sends(&mut ring, head, lease.handle().get()));
    assert!((tail.start()..tail.end()).step_by(4096).all(|at| read(at) == 0));
}

#[test]
fn what_is_under_a_handle_that_others_hold_is_not_trimmed() {
    let (Some((mut ring, cache)), (_memory, range)) = (rig(), memory(HUGE)) else { return };
    let suspended = suspend(&cache, range, vec![get(&cache, range)]);
    let tail = AddressRange::between(range.start() + 4096, range.end()).unwrap();
    // SAFETY: all of it is registered, so nothing is given up.
    let trimmed = unsafe { trim(&suspended, tail) }.unwrap();
    assert_eq!((trimmed.given_up, trimmed.held), (0, vec![tail]));
    let outside = AddressRange::between(range.start(), range.end() + 4096).unwrap();
    // SAFETY: as above.
    let refused = unsafe { trim(&suspended, outside) };
    assert_eq!(refused.unwrap_err(), RearrangeError::Outside { range: outside, suspended: range });
    let mut resumed = suspended.resume().unwrap();
    let lease = resumed.leases.pop().unwrap().unwrap();
    assert!(is_whole(range) && sends(&mut ring, range, lease.handle().get()));
}
