//! A cache with everything that Linux offers: barriers that cost a hit nothing, and a reclaimer.

use crate::membarrier;
use crate::quiet_thread;
use pinfold_core::{Cache, Config, ConfigError, Monitor, Registrar};
use std::fmt;
use std::io;

/// Why a cache could not be started.
#[derive(Debug)]
#[non_exhaustive]
pub enum CacheError {
    /// The settings make no sense, or the monitor is lost.
    Config(ConfigError),
    /// The reclaimer's thread could not be started.
    Thread(io::Error),
}

impl fmt::Display for CacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Thread(error) => write!(
                f,
                "the reclaimer's thread could not be started ({error}): raise `ulimit -u` or the \
                 control group's pids.max"
            ),
        }
    }
}

impl std::error::Error for CacheError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Thread(error) => Some(error),
        }
    }
}

/// A cache over `registrar` and `monitor`, with its reclaimer running.
///
/// `config.barriers` is replaced by the cheapest pair that the kernel offers. The reclaimer
/// sleeps on a thread of its own with all signals blocked; it ends when the cache is dropped.
///
/// # Errors
///
/// [`CacheError`].
pub fn cache<R: Registrar, M: Monitor>(
    registrar: R,
    monitor: M,
    config: Config,
) -> Result<Cache<R, M>, CacheError> {
    let config = Config { barriers: membarrier::barriers(), ..config };
    let mut cache = Cache::new(registrar, monitor, config).map_err(CacheError::Config)?;
    cache
        .start_reclaimer(|reclaimer| {
            quiet_thread::spawn("pinfold-reclaim", move || reclaimer.run())
        })
        .map_err(CacheError::Thread)?;
    Ok(cache)
}
