//! A cache's settings and their limits.

use crate::barrier::Barriers;
use crate::clock::Clock;
use crate::error::ConfigError;
use crate::registrar::RegistrarLimits;

/// How a cache behaves. The default is bounded: 1 GiB in 16384 registrations.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The most bytes to keep registered at once, pages counted whole, for each device that pins them.
    /// Overlapping regions are counted each. What the cache's own index takes is not counted: some 150 bytes for each
    /// 2 MiB of a long registration, kept until the cache is dropped.
    pub max_bytes: usize,
    /// The most registrations at once; the registrar's own maximum bounds it further.
    pub max_regions: usize,
    /// The longest piece of a range that is leased [in pieces](crate::GetRequest::pieces), in bytes: a power
    /// of two; they are cut at multiples of it. 2 MiB by default: long enough that registering it is
    /// cheap per byte, short enough to be given up and to overlap with transfers.
    pub piece_bytes: usize,
    /// What a `get` does when everything registered is in use.
    pub when_full: WhenFull,
    /// Whether registrations with remote rights are kept. Off by default: as long as it is
    /// kept, a peer that learned the key can use it.
    pub cache_remote: bool,
    /// Which ranges are kept. By default those of which keeping pays.
    pub keep: Keep,
    /// What [`Keep::WhenItPays`] measures with; without one nothing is compared, and every range is
    /// kept. `pinfold::cache` puts the system's clock here.
    pub clock: Option<Clock>,
    /// The pair of barriers between leases and reclamation.
    pub barriers: Barriers,
}

/// Which ranges are watched and kept registered.
///
/// It decides what is kept, not what is believed: a lease is as current with either. What is not kept is
/// registered for each use, and deregistered when its lease ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Keep {
    /// A range is kept once it has been used so often that keeping it cannot cost more than twice
    /// what registering for each use would; see [`admission`](crate::admission). The costs are learnt
    /// while running. Ranges for which the caller [vouches](crate::GetRequest::vouched) or that it
    /// [means to keep](crate::GetRequest::to_keep) are kept at once.
    #[default]
    WhenItPays,
    /// Every range is kept from its first use.
    Always,
    /// None is kept, but those for which the caller vouches or that it means to keep.
    Never,
}

/// What a `get` does when the budget is spent on regions in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhenFull {
    /// It fails with [`Exhausted`](crate::Exhausted): what is newly kept does not exceed the budget. A registration for one use counts
    /// what was planned for it; where its pages become part of a huge one at that moment, the system counts more while it lives.
    #[default]
    Refuse,
    /// It registers for that one use, past the budget; the device's own limits still hold.
    RegisterPerUse,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_bytes: 1 << 30,
            max_regions: 16384,
            piece_bytes: 2 << 20,
            when_full: WhenFull::Refuse,
            cache_remote: false,
            keep: Keep::WhenItPays,
            clock: None,
            barriers: Barriers::SYMMETRIC,
        }
    }
}

impl Config {
    /// The default, but that every range is kept from its first use.
    pub fn keeping_all() -> Self {
        Self { keep: Keep::Always, ..Self::default() }
    }

    /// These settings within the registrar's limits.
    pub(crate) fn within(self, limits: RegistrarLimits) -> Result<Self, ConfigError> {
        let RegistrarLimits { page_bytes, max_region_bytes, max_regions } = limits;
        if !page_bytes.is_power_of_two() || max_region_bytes < page_bytes {
            return Err(ConfigError::Registrar { page_bytes, max_region_bytes });
        }
        let piece_bytes = self.piece_bytes;
        if !piece_bytes.is_power_of_two() || piece_bytes < page_bytes {
            return Err(ConfigError::Piece { piece_bytes, page_bytes });
        }
        let max_regions = self.max_regions.min(max_regions);
        if self.max_bytes < page_bytes || max_regions == 0 {
            return Err(ConfigError::Budget { max_bytes: self.max_bytes, max_regions });
        }
        // A power of two again, so that a piece and its cuts stay aligned.
        let longest = 1 << max_region_bytes.ilog2();
        Ok(Self { max_regions, piece_bytes: piece_bytes.min(longest), ..self })
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const LIMITS: RegistrarLimits =
        RegistrarLimits { page_bytes: 4096, max_region_bytes: (1 << 20) + 4096, max_regions: 7 };

    #[test]
    fn the_registrar_bounds_the_settings() {
        let config = Config::default().within(LIMITS).unwrap();
        assert_eq!((config.piece_bytes, config.max_regions), (1 << 20, 7));
    }

    #[test]
    fn settings_that_hold_nothing_are_refused() {
        let refused = |config: Config| config.within(LIMITS).unwrap_err();
        let piece = refused(Config { piece_bytes: 3 << 20, ..Config::default() });
        assert!(matches!(piece, ConfigError::Piece { .. }));
        let bytes = refused(Config { max_bytes: 4095, ..Config::default() });
        assert!(matches!(bytes, ConfigError::Budget { .. }));
        let regions = refused(Config { max_regions: 0, ..Config::default() });
        assert!(matches!(regions, ConfigError::Budget { .. }));
    }
}
