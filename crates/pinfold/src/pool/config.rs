//! A pool's settings.

use super::classes::UNIT;
use super::error::PoolError;
use super::memory::{HUGE, Pages};
use pinfold_core::{Access, RegistrarLimits};
use std::time::Duration;

/// How a pool behaves. The default is bounded: 256 MiB, and grows as it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// The most bytes to have registered at once, in whole slabs. Each registrar pins that much, and of
    /// a budget that is shared each takes it.
    pub max_bytes: usize,
    /// How long the first slab is, in bytes. Each further one is as long as all before it
    /// together, so that the number of registrations stays small.
    pub first_slab_bytes: usize,
    /// How long a slab becomes at most, in bytes; a longer buffer still gets one of its own.
    /// Bounds what a buffer that stays can keep from being given back.
    pub max_slab_bytes: usize,
    /// How many bytes of empty slabs to keep. What is beyond is deregistered by the thread that puts the
    /// last buffer of a slab back.
    pub idle_bytes: usize,
    /// How many bytes a thread's cache may hold, all sizes together. Longer buffers than that go
    /// through the pool's lock each time.
    pub thread_cache_bytes: usize,
    /// What the devices may do with all of the pool's memory. Remote rights open every buffer of a
    /// slab to a peer that learned the key of one.
    pub access: Access,
    /// Which pages to ask for.
    pub pages: Pages,
    /// What to do when no buffer is free; each request may say otherwise.
    pub when_exhausted: WhenExhausted,
}

/// What a request does when nothing that is registered is free.
///
/// Threads that wait are served in the order of coming. What is put back meanwhile is theirs, so for
/// others it is not free, also if they would register a slab and cannot; a thread that registers one takes what is
/// left of it for its request, and registers another if others were quicker. A thread that waits for a long buffer delays those behind it,
/// until it is free or the time is up: but only while some slab is long enough for it. Until there
/// is one, those that wait for it delay no thread, and have no order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhenExhausted {
    /// It fails. Never registers memory: for threads that must not be held up.
    Fail,
    /// It registers another slab, and fails where the budget or the system allows none.
    #[default]
    Grow,
    /// It waits so long for a buffer to be put back, and registers nothing.
    Wait(Duration),
    /// It registers another slab, and where none is allowed it waits so long: for a buffer to be put back, or until a
    /// slab can be had because the pool has given others back, or another drawer of its
    /// [budget](super::Pool::within) has, or another pool of it has as much in empty slabs, which is due to this one. What makes room
    /// without a word, it does not notice before its time is up: a registration that a cache keeps and none has leased,
    /// buffers that another pool's threads cache, memory that another process unpins; nor what a budget of the program's
    /// own has, which says so by [`Lender::room_made`](crate::budget::Lender::room_made). Nor does it try before then whether a
    /// slab for this buffer alone can be had, where there is no room for one that holds several.
    ///
    /// Where it is a device that lacks bytes, what other pools give back is tried as it comes: of a pool that makes its slabs
    /// anew each time, one may go and come for each try, until the time is up.
    GrowOrWait(Duration),
}

impl WhenExhausted {
    pub(super) const fn grows(self) -> bool {
        matches!(self, Self::Grow | Self::GrowOrWait(_))
    }

    pub(super) const fn patience(self) -> Option<Duration> {
        match self {
            Self::Wait(patience) | Self::GrowOrWait(patience) => Some(patience),
            Self::Fail | Self::Grow => None,
        }
    }
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            max_bytes: 256 << 20,
            first_slab_bytes: 2 << 20,
            max_slab_bytes: 64 << 20,
            idle_bytes: 64 << 20,
            thread_cache_bytes: 4 << 20,
            access: Access::READ_WRITE,
            pages: Pages::Best,
            when_exhausted: WhenExhausted::Grow,
        }
    }
}

/// What a pool may register: its settings within its registrars' limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) config: PoolConfig,
    /// What the length of a slab is a multiple of.
    granule: usize,
    /// The longest slab that the registrars take.
    pub(super) longest: usize,
}

impl Bounds {
    pub(super) fn new(config: PoolConfig, limits: RegistrarLimits) -> Result<Self, PoolError> {
        let RegistrarLimits { page_bytes, max_region_bytes, max_regions } = limits;
        let granule = UNIT.max(page_bytes);
        let most = config.max_bytes.min(max_region_bytes);
        if !page_bytes.is_power_of_two() || granule > HUGE {
            return Err(PoolError::Registrar { page_bytes, max_region_bytes });
        }
        if most < granule || max_regions == 0 {
            let max_bytes = config.max_bytes;
            return Err(PoolError::Budget { max_bytes, max_region_bytes, least: granule });
        }
        Ok(Self { config, granule, longest: most - most % granule })
    }

    /// The length of the slab that holds `bytes`.
    pub(super) fn slab_holding(&self, bytes: usize) -> usize {
        bytes.next_multiple_of(self.granule)
    }

    /// How long the next slab should be for a buffer of `bytes`, `registered` being there and
    /// `room` being left. `None` if there is no room for it.
    pub(super) fn next_slab(&self, bytes: usize, registered: usize, room: usize) -> Option<usize> {
        let least = self.slab_holding(bytes);
        let aim = registered.clamp(
            self.config.first_slab_bytes.min(self.config.max_slab_bytes),
            self.config.max_slab_bytes,
        );
        let aim = aim.max(least).min(room).min(self.longest);
        self.rounded(aim, least)
    }

    /// The next to try when a slab of `bytes` could not be had.
    pub(super) fn smaller(&self, bytes: usize, buffer_bytes: usize) -> Option<usize> {
        let least = self.slab_holding(buffer_bytes);
        self.rounded((bytes / 2).max(least), least).filter(|&smaller| smaller < bytes)
    }

    /// Whole huge pages if that holds it, else whole granules.
    fn rounded(&self, bytes: usize, least: usize) -> Option<usize> {
        let huge = bytes - bytes % HUGE;
        let fine = bytes - bytes % self.granule;
        [huge, fine].into_iter().find(|&rounded| rounded >= least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RegistrarLimits =
        RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 30, max_regions: 7 };

    fn bounds(config: PoolConfig) -> Bounds {
        Bounds::new(config, LIMITS).unwrap()
    }

    #[test]
    fn slabs_grow_with_what_is_there_and_stay_within_bounds() {
        let bounds = bounds(PoolConfig::default());
        let next = |registered| bounds.next_slab(1, registered, (256 << 20) - registered);
        assert_eq!(next(0), Some(2 << 20));
        assert_eq!(next(2 << 20), Some(2 << 20));
        assert_eq!(next(8 << 20), Some(8 << 20));
        assert_eq!(next(200 << 20), Some(56 << 20), "what is left");
        assert_eq!(next(256 << 20), None);
        assert_eq!(bounds.next_slab(100 << 20, 0, 256 << 20), Some(100 << 20), "one of its own");
    }

    #[test]
    fn a_refused_slab_is_halved_down_to_what_is_needed() {
        let bounds = bounds(PoolConfig::default());
        let sizes: Vec<usize> =
            std::iter::successors(Some(16 << 20), |&bytes| bounds.smaller(bytes, 3 << 20))
                .collect();
        assert_eq!(sizes, [16 << 20, 8 << 20, 4 << 20, 3 << 20]);
    }

    #[test]
    fn less_than_a_huge_page_is_whole_granules() {
        let small = bounds(PoolConfig { max_bytes: 100_000, ..PoolConfig::default() });
        assert_eq!(small.next_slab(1, 0, 100_000), Some(6 * UNIT));
        assert_eq!(small.next_slab(1, 6 * UNIT, 100_000 - 6 * UNIT), None);
    }

    #[test]
    fn a_pool_of_nothing_is_refused() {
        let config = |max_bytes| PoolConfig { max_bytes, ..PoolConfig::default() };
        for max_bytes in [0, UNIT - 1] {
            let refused = Bounds::new(config(max_bytes), LIMITS).unwrap_err();
            assert!(matches!(refused, PoolError::Budget { .. }), "{refused}");
        }
        let none = RegistrarLimits { max_regions: 0, ..LIMITS };
        assert!(Bounds::new(config(1 << 20), none).is_err());
        let odd = RegistrarLimits { page_bytes: 4097, ..LIMITS };
        assert!(matches!(Bounds::new(config(1 << 20), odd), Err(PoolError::Registrar { .. })));
    }
}
