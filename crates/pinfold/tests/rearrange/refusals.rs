//! What goes wrong while a region is suspended, and what is said then.

use super::registrar_support::{Memory, alone};
use super::rig::*;
use io_uring::{opcode, types};
use pinfold::rearrange::*;
use pinfold::registrar::{IoUring, IoUringError};
use pinfold::suspend::{Ended as Over, Expired, OnDrop, SuspendProgress, SuspensionTerms, Why};
use pinfold::{AddressRange, BadAddress, GetError, RegisterError};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

fn brief() -> SuspensionTerms {
    SuspensionTerms { deadline: Duration::from_millis(20), ..terms() }
}

#[test]
fn a_region_is_suspended_once() {
    let (Some((_ring, cache)), (_memory, range)) = (rig(), memory(HUGE)) else { return };
    let suspended = suspend(&cache, range, Vec::new());
    let page = AddressRange::new(range.start(), 4096).unwrap();
    let again = cache.suspend(page, Vec::new(), Vec::new(), terms()).unwrap_err();
    assert_eq!(again.why, Why::AlreadySuspended { range });
    let stopped =
        defragment_in_steps(&cache, range, &[], Vec::new(), terms(), HugePageWay::IN_PLACE);
    if let Err(stopped) = stopped {
        let already = Why::AlreadySuspended { range };
        let expected = StoppedBy::NotSuspended { range, why: already };
        let no_huge_pages = matches!(stopped.why, StoppedBy::Rearrange(_));
        assert!(stopped.why == expected || no_huge_pages, "{stopped}");
    }
    let start = std::ptr::with_exposed_provenance(range.start());
    // SAFETY: refused.
    let refused = unsafe { cache.get(start, 4096, pinfold::Access::READ) }.unwrap_err();
    assert!(matches!(refused, GetError::Suspended { .. }), "{refused}");
    suspended.resume().unwrap();
    drop(get(&cache, page));
}

#[test]
fn a_lease_that_never_ends_is_named_at_the_deadline() {
    let (Some((mut ring, cache)), (_memory, range)) = (rig(), memory(HUGE)) else { return };
    let page = AddressRange::new(range.start(), 4096).unwrap();
    let (kept, stubborn) = (get(&cache, range), get(&cache, page));
    let index = kept.handle();
    let stopped =
        defragment_in_steps(&cache, range, &[], vec![kept], brief(), HugePageWay::IN_PLACE)
            .unwrap_err();
    let mut leases = match &stopped.why {
        StoppedBy::NotSuspended { why: Why::Refused(refused), .. } => {
            assert_eq!(refused.outstanding.leases, 1);
            stopped.done.leases
        }
        other => {
            eprintln!("skipped: {other}");
            return;
        }
    };
    let kept = leases.pop().unwrap().map_err(|ended| ended.to_string()).unwrap();
    assert!(kept.handle() == index && is_whole(range));
    assert!(sends(&mut ring, range, index.get()), "everything goes on");
    drop((kept, stubborn));
    suspend(&cache, range, Vec::new()).resume().unwrap();
}

#[test]
fn a_suspension_past_its_deadline_is_over() {
    let (Some((_ring, cache)), (_memory, range)) = (rig(), memory(HUGE)) else { return };
    let lease = get(&cache, range);
    let suspended = cache.suspend(range, Vec::new(), vec![lease], brief()).unwrap();
    while cache.expire_suspensions() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(defragment(&suspended, HugePageWay::IN_PLACE).unwrap_err(), RearrangeError::Expired);
    assert_eq!(migrate(&suspended, Node(0)).unwrap_err(), RearrangeError::Expired);
    // SAFETY: refused.
    assert_eq!(unsafe { trim(&suspended, range) }.unwrap_err(), RearrangeError::Expired);
    assert_eq!(suspended.resume().unwrap_err().reason, Over::Deadline);
    drop(get(&cache, range));
    assert_eq!(cache.suspension_statistics().expired, 1);
}

/// Of which no list of pages or blocks has room in memory.
const RESERVED: usize = 1 << 42;

fn is_unsupported(error: &RearrangeError) {
    assert!(matches!(error, RearrangeError::Unsupported { .. }), "{error}");
    eprintln!("skipped: {error}");
}

#[test]
fn what_is_reserved_without_access_is_left_alone() {
    let Some((_ring, cache)) = rig() else { return };
    let reserved = Memory::with_protection(RESERVED, libc::PROT_NONE);
    let suspended = suspend(&cache, reserved.range(), Vec::new());
    match migrate(&suspended, Node(0)) {
        Ok(moved) => {
            assert_eq!((moved.after.absent, moved.left.len()), (RESERVED / 4096, 0));
            assert_eq!(moved.before, moved.after);
        }
        Err(error) => is_unsupported(&error),
    }
    match defragment(&suspended, HugePageWay::IN_PLACE) {
        Ok(done) => assert_eq!(done.left, [(reserved.range(), Obstacle::Unmapped)]),
        Err(error) => is_unsupported(&error),
    }
    suspended.resume().unwrap();
}

/// However much there is to do still.
#[test]
fn a_long_range_is_left_as_its_suspension_ends() {
    let Some((_ring, cache)) = rig() else { return };
    let memory = Memory::with_protection(RESERVED, libc::PROT_READ);
    let overdue = || cache.suspend(memory.range(), Vec::new(), Vec::new(), brief()).unwrap();
    let ends = |work: &dyn Fn() -> Option<RearrangeError>| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while cache.expire_suspensions() == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            match work() {
                Some(RearrangeError::Expired) => {}
                other => is_unsupported(&other.unwrap()),
            }
        });
    };
    let suspended = overdue();
    ends(&|| migrate(&suspended, Node(0)).err());
    drop(suspended);
    let suspended = overdue();
    ends(&|| defragment(&suspended, HugePageWay::IN_PLACE).err());
}

#[test]
fn memory_unmapped_while_suspended_is_an_error_for_its_lease_alone() {
    alone("refusals::memory_unmapped_while_suspended_is_an_error_for_its_lease_alone", || {
        let (Some((mut ring, cache)), (mut memory, range)) = (rig(), memory(2 * HUGE)) else {
            return;
        };
        let second = AddressRange::between(range.start() + HUGE, range.end()).unwrap();
        let first = AddressRange::between(range.start(), second.start()).unwrap();
        let leases = vec![get(&cache, second), get(&cache, first)];
        let suspended = suspend(&cache, range, leases);
        memory.unmap(second.start() - memory.range().start(), second.len());
        // SAFETY: no thread writes.
        for way in [HugePageWay::IN_PLACE, unsafe { HugePageWay::by_copy() }] {
            match defragment(&suspended, way) {
                Ok(done) => assert!(done.left.contains(&(second, Obstacle::Unmapped)), "{done:?}"),
                Err(error) => eprintln!("skipped: {error}"),
            }
        }
        let resumed = suspended.resume().unwrap();
        let Err(RegisterError::BadAddress { reason, .. }) = &resumed.leases[0] else {
            panic!("{resumed:?}");
        };
        assert!(matches!(reason, BadAddress::Unmapped { at } if second.start() == *at));
        let lease = resumed.leases[1].as_ref().unwrap();
        assert!(is_whole(first) && sends(&mut ring, first, lease.handle().get()));
    });
}

#[test]
fn a_ring_that_is_gone_is_told_when_its_region_is_resumed() {
    alone("refusals::a_ring_that_is_gone_is_told_when_its_region_is_resumed", || {
        let (Some((ring, cache)), (_memory, range)) = (rig(), memory(HUGE)) else { return };
        let suspended = suspend(&cache, range, vec![get(&cache, range)]);
        let number = ring.as_raw_fd().cast_unsigned();
        drop(ring);
        // SAFETY: this process's own descriptors; what they belong to finds out.
        assert_eq!(unsafe { libc::close_range(number, u32::MAX, 0) }, 0);
        let _still_possible = defragment(&suspended, HugePageWay::IN_PLACE);
        let resumed = suspended.resume().unwrap();
        assert!(
            matches!(resumed.leases[..], [Err(RegisterError::DeviceGone { .. })]),
            "{resumed:?}"
        );
        assert!(is_whole(range));
    });
}

#[test]
fn a_thread_that_panics_kills_or_resumes_as_it_said() {
    let (Some((mut ring, cache)), (_memory, range)) = (rig(), memory(HUGE)) else { return };
    for on_drop in [OnDrop::Resume, OnDrop::Kill] {
        let lease = get(&cache, range);
        let terms = SuspensionTerms { on_drop, ..terms() };
        let suspended = cache.suspend(range, Vec::new(), vec![lease], terms).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _suspended = suspended;
            let _ = defragment(&_suspended, HugePageWay::IN_PLACE);
            std::panic::resume_unwind(Box::new("half-way"));
        }));
        assert!(panicked.is_err());
        let lease = get(&cache, range);
        assert!(is_whole(range) && sends(&mut ring, range, lease.handle().get()));
    }
    let counts = cache.suspension_statistics();
    assert_eq!((counts.resumed, counts.killed, counts.begun), (1, 1, 2));
}

#[test]
fn a_request_in_flight_on_a_kept_lease_is_waited_for_by_its_tag() {
    let (Some(mut ring), (_memory, range)) = (ring(), memory(HUGE)) else { return };
    // SAFETY: the ring's table of buffers is left to the registrar, and no request has such a number.
    let registrar = unsafe { IoUring::new(&ring, 16).unwrap().with_tags(TAGS) }.unwrap();
    let registrar = std::sync::Arc::new(registrar);
    let Some(cache) = cache(std::sync::Arc::clone(&registrar)) else { return };
    let lease = get(&cache, range);
    let index = lease.handle();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let at = std::ptr::with_exposed_provenance_mut(range.start());
    let entry = opcode::ReadFixed::new(types::Fd(reader.as_raw_fd()), at, 8, index.get());
    // SAFETY: the memory outlives the request, which is waited for below.
    unsafe { ring.submission().push(&entry.build().user_data(7)).unwrap() };
    ring.submit().unwrap();
    let begun = cache.begin_suspension(range, Vec::new(), vec![lease], terms());
    let suspending = begun.map_err(|refused| refused.why).unwrap();
    let mut suspending = {
        let mut suspending = suspending;
        loop {
            match suspending.poll().map_err(|refused| refused.why).unwrap() {
                SuspendProgress::Pending(pending, it) if it.translations => break pending,
                SuspendProgress::Pending(pending, _) => suspending = pending,
                SuspendProgress::Suspended(_) => panic!("a request is in flight"),
            }
        }
    };
    writer.write_all(&[9; 8]).unwrap();
    let (mut arrived, mut ended) = (0, 0);
    let suspended = loop {
        while let Some(completion) = ring.completion().next() {
            // SAFETY: the completion is of the registrar's own ring.
            if unsafe { registrar.ended(completion.user_data()) } {
                ended += 1;
            } else {
                assert_eq!((completion.user_data(), completion.result()), (7, 8));
                arrived += 1;
            }
        }
        match suspending.poll().map_err(|refused| refused.why).unwrap() {
            SuspendProgress::Suspended(suspended) => break suspended,
            SuspendProgress::Pending(pending, _) => suspending = pending,
        }
        // Runs what the ring has to finish.
        ring.submit().unwrap();
    };
    assert_eq!((arrived, ended), (1, 1));
    assert_eq!(read(range.start()).to_ne_bytes(), [9; 8]);
    write(range.start(), word(range.start()));
    let mut resumed = suspended.resume().unwrap();
    let lease = resumed.leases.pop().unwrap().unwrap();
    assert_eq!(lease.handle(), index);
    assert!(sends(&mut ring, range, index.get()));
}

#[test]
fn a_forked_child_resumes_nothing_and_its_parent_does() {
    alone("refusals::a_forked_child_resumes_nothing_and_its_parent_does", || {
        let (Some((mut ring, cache)), (_memory, range)) = (rig(), memory(HUGE)) else { return };
        let lease = get(&cache, range);
        let index = lease.handle();
        let suspended = suspend(&cache, range, vec![lease]);
        let told = super::registrar_support::in_forked_child(|| {
            // SAFETY: the child's copy, which its parent does not miss, and which is not used in
            // this process again.
            let mine = unsafe { std::ptr::read(&raw const suspended) };
            let forked = RearrangeError::Forked;
            let refused = defragment(&mine, HugePageWay::IN_PLACE).unwrap_err() == forked
                && migrate(&mine, Node(0)).unwrap_err() == forked
                // SAFETY: refused.
                && unsafe { trim(&mine, range) }.unwrap_err() == forked;
            let resumed = mine.resume();
            let again = cache.suspend(range, Vec::new(), Vec::new(), terms());
            let again = matches!(again.unwrap_err().why, Why::Forked);
            let over = matches!(resumed, Err(Expired { reason: Over::Forked, .. }));
            refused && over && again && cache.expire_suspensions() == 0
        });
        assert!(told, "the child was not told");
        let dropped = super::registrar_support::in_forked_child(|| {
            // SAFETY: as above.
            drop(unsafe { std::ptr::read(&raw const suspended) });
            true
        });
        assert!(dropped);
        let mut resumed = suspended.resume().unwrap();
        let lease = resumed.leases.pop().unwrap().unwrap();
        assert_eq!(lease.handle(), index);
        assert!(is_whole(range) && sends(&mut ring, range, index.get()));
        assert_eq!(cache.suspension_statistics().resumed, 1);
    });
}

/// Why tags are given when slots are filled.
#[test]
fn fact_an_emptied_slot_takes_no_tag() {
    let Some(ring) = ring() else { return };
    ring.submitter().register_buffers_sparse(1).unwrap();
    let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    // SAFETY: no memory is concerned.
    let refused = unsafe { ring.submitter().register_buffers_update(0, &[empty], Some(&[7])) };
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn tags_need_room() {
    let Some(ring) = ring() else { return };
    // SAFETY: the ring's table of buffers is left to the registrar.
    let registrar = unsafe { IoUring::new(&ring, 4) }.unwrap();
    // SAFETY: no request is made.
    let refused = unsafe { registrar.with_tags(0..u64::MAX) }.unwrap_err();
    assert_eq!(refused, IoUringError::Tags);
}
