//! How many mappings the process may still have watched.
//!
//! What grows next to a watched mapping is not watched, so the kernel does not make one mapping of both, also not when the
//! rest is watched later: an allocator's arena that grows as it is registered becomes as many mappings as it grew by. The kernel
//! allows a process so many (`vm.max_map_count`), and then its own `mmap`, `mprotect` and `malloc` fail. So nothing more is
//! watched once the process has half of them; what grows then becomes one mapping with what grew before.

use std::sync::atomic::{AtomicIsize, Ordering};

/// So many are watched, or refused, before the process's mappings are counted again, however few there is room for: to count
/// them takes as long as there are.
const STEP: isize = 256;

/// One part in so many of the room that there is may be watched before the mappings are counted again.
const PARTS: usize = 8;

/// What a process may have that says nothing else.
const USUAL: usize = 65_530;

/// See the module.
#[derive(Debug)]
pub(crate) struct MappingRoom {
    most: usize,
    /// How many more may be watched before the mappings are counted; below zero, how many are refused before that.
    left: AtomicIsize,
}

impl MappingRoom {
    /// Of a process that may have `allowed` mappings.
    pub(crate) fn of(allowed: Option<u64>) -> Self {
        let allowed = allowed.and_then(|allowed| usize::try_from(allowed).ok()).unwrap_or(USUAL);
        Self { most: allowed / 2, left: AtomicIsize::new(STEP) }
    }

    /// Whether one more may be watched. `count` counts the mappings of the process; what cannot be counted is not many.
    pub(crate) fn has_room(&self, count: impl FnOnce() -> Option<usize>) -> bool {
        // Relaxed: a count alone. Threads that meet here count twice, or watch some more.
        let left = self.left.load(Ordering::Relaxed);
        let (room, next) = match left {
            1.. => (true, left - 1),
            ..-1 => (false, left + 1),
            _ => {
                let mappings = count().unwrap_or(0);
                let room = self.most.saturating_sub(mappings);
                // A part of it, because the program makes mappings of its own meanwhile.
                let part = isize::try_from(room / PARTS).unwrap_or(isize::MAX);
                if room > 0 { (true, part.max(STEP)) } else { (false, -STEP) }
            }
        };
        self.left.store(next, Ordering::Relaxed);
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process each of whose watches makes one mapping more, and that makes so many of its own meanwhile.
    fn watches_no_further(allowed: usize, begun: usize, own: usize) {
        const TRIES: usize = 200_000;
        let step = usize::try_from(STEP).unwrap();
        let room = MappingRoom::of(Some(allowed as u64));
        let (mut mappings, mut counted, mut at_last) = (begun, 0, begun);
        for _ in 0..TRIES {
            let is_watched = room.has_room(|| {
                counted += 1;
                Some(mappings)
            });
            mappings += usize::from(is_watched) + own;
            at_last = if is_watched { mappings } else { at_last };
        }
        let most = (allowed / 2).max(begun);
        // Beside what was given out last, the program's own.
        let beyond = own * (allowed / 2 / PARTS) + (1 + own) * step;
        assert!(at_last <= most + beyond, "{at_last} of {allowed}, {own}");
        assert!(mappings >= most, "{mappings} of {allowed}");
        assert!(counted <= TRIES / step, "{counted} counts");
    }

    #[test]
    fn nothing_is_watched_far_beyond_half_of_what_is_allowed() {
        for (allowed, begun) in [(65_530, 100), (65_530, 40_000), (2_000, 10), (100, 0), (0, 0)] {
            (0..3).for_each(|own| watches_no_further(allowed, begun, own));
        }
    }

    #[test]
    fn where_mappings_go_there_is_room_again() {
        let room = MappingRoom::of(Some(1_000));
        let watched = |mappings: usize, tries: usize| {
            (0..tries).filter(|_| room.has_room(|| Some(mappings))).count()
        };
        watched(900, 1_000);
        assert_eq!(watched(900, 1_000), 0);
        assert!(watched(100, 1_000) > 700);
    }
}
