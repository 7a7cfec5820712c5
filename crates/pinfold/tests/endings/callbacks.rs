//! Callbacks and registrars of the program's that panic unexpectedly.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to lease memory of its own, which no device is told of.

#![allow(unsafe_code)]

use crate::device::{Silent, cache, device, panics_at};
use crate::ways::panics;
use pinfold::{Access, Config};

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("captured");
    }
}

#[test]
fn a_callback_whose_captures_panic_keeps_no_lease() {
    let (cache, records) = cache(Config::keeping_all());
    let buffer = vec![1_u8; 65536];
    for once in [false, true] {
        // SAFETY: no device is told of the memory.
        let lease = unsafe {
            match once {
                false => cache.get(buffer.as_ptr(), buffer.len(), Access::READ),
                true => cache.request(buffer.as_ptr(), buffer.len(), Access::READ).once().get(),
            }
        };
        let (mut lease, bomb) = (lease.unwrap(), Bomb);
        lease.on_invalidate(move || std::mem::forget(bomb));
        drop(lease);
        cache.evict_idle();
        assert_eq!(records.live(), 0, "once: {once}");
    }
}

#[test]
fn of_several_devices_none_keeps_what_another_panicked_over() {
    for n in 1..5 {
        let ((first, one), (second, two), (third, three)) = (device(), device(), device());
        panics_at(&two, n);
        let devices = (first, second, third);
        let cache = pinfold::cache(devices, Silent::new(), Config::keeping_all()).unwrap();
        for _ in 0..3 {
            let _panicked = panics(|| drop(cache.lease_buffer(vec![0_u8; 9000])));
            let _panicked = panics(|| assert!(cache.evict_idle() < usize::MAX));
        }
        let _panicked = panics(|| drop(cache));
        assert_eq!([one.leaked(), two.leaked(), three.leaked()], [0; 3], "call {n}");
    }
}
