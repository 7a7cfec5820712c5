//! A cache with everything that Linux offers: barriers that cost a hit nothing, and a reclaimer.

use crate::budget::{Share, ShareAccount};
use crate::monitor::{NoMonitor, StartError};
use crate::registrar::verbs::OnDemand;
use pinfold_core::foreign::ForeignPart;
use pinfold_core::{Cache, Clock, Config, ConfigError, Monitor, Registrar};
use pinfold_kernel::{FirstMade, membarrier, thread};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Why a cache could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The settings make no sense, or the monitor is lost, or simulated over a registrar that is not.
    #[error("{0}")]
    Config(#[source] ConfigError),
    /// The reclaimer's thread could not be started.
    #[error(
        "the reclaimer's thread could not be started ({error}): {advice}",
        error = .0,
        advice = advice_on_threads(.0)
    )]
    Thread(#[source] io::Error),
    /// The mark that a forked child finds could not be made.
    #[error("{0}")]
    ForkMark(#[source] StartError),
}

fn advice_on_threads(error: &io::Error) -> &'static str {
    // The standard library's stacks have room for the variables of threads, so this is the likely cause that is left.
    if error.raw_os_error() == Some(libc::EINVAL) {
        "the kernel starts none once children get another pid namespace (unshare(CLONE_NEWPID), setns): begin before"
    } else {
        "raise `ulimit -u` or the control group's pids.max"
    }
}

/// A cache over `registrar` and `monitor`, with its reclaimer running.
///
/// `config.max_bytes` is lowered where the device could not keep it: under a limit on pinned memory
/// that is smaller ([`Registrar::pinned_limit`]), to half of that limit, because other registrations
/// of the process or user count against it too. [`Cache::config`] has what came of it.
///
/// `config.barriers` is replaced by the cheapest pair that the kernel offers, and `config.clock` by the
/// system's clock, so that the cache learns what keeping costs here ([`Keep`](crate::Keep)). The reclaimer
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
    // Their destructors may panic because the registrar has.
    let (registrar, monitor) = (ForeignPart::new(registrar), ForeignPart::new(monitor));
    let (limit, page_bytes) = (registrar.pinned_limit(), registrar.limits().page_bytes);
    let max_bytes = affordable(config.max_bytes, limit, page_bytes);
    let config = on_linux(Config { max_bytes, ..config });
    started(Cache::new(registrar.into_inner(), monitor.into_inner(), config))
}

/// With what only the system has.
fn on_linux(config: Config) -> Config {
    Config { barriers: membarrier::barriers(), clock: Some(Clock::new(nanoseconds)), ..config }
}

/// Since it was first asked.
fn nanoseconds() -> u64 {
    // No cell that is being filled: a child that is forked then would wait for ever.
    static FIRST: FirstMade<Instant> = FirstMade::new();
    let first = FIRST.get_or_make(|| Box::new(Instant::now()));
    u64::try_from(first.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// What is wanted, or half of what the registrar may pin if that is all.
fn affordable(wanted: usize, limit: Option<usize>, page_bytes: usize) -> usize {
    match limit {
        Some(limit) if limit < wanted => (limit / 2).max(page_bytes).min(wanted),
        _ => wanted,
    }
}

/// As [`cache`], drawing on a budget that other caches, pools and reservations draw on as well. The
/// bounds of `config` hold besides.
///
/// # Errors
///
/// [`CacheError`].
pub fn cache_within<R: Registrar, M: Monitor>(
    share: Arc<Share>,
    registrar: R,
    monitor: M,
    config: Config,
) -> Result<Cache<R, M>, CacheError> {
    let config = on_linux(config);
    started(Cache::with_account(registrar, monitor, config, Arc::new(ShareAccount::new(share))))
}

/// The cache with its reclaimer.
fn started<R: Registrar, M: Monitor>(
    cache: Result<Cache<R, M>, ConfigError>,
) -> Result<Cache<R, M>, CacheError> {
    let mut cache = cache.map_err(CacheError::Config)?;
    cache
        .start_reclaimer(|reclaimer| thread::spawn("pinfold-reclaim", move || reclaimer.run()))
        .map_err(CacheError::Thread)?;
    Ok(cache)
}

/// A cache over a device that follows the process's page table: no monitor is needed, a hit makes
/// no system call, and memory of every kind is cached, files and shared memory too.
///
/// `config` is taken as by [`cache`]. Its budget bounds what is registered; nothing is pinned.
///
/// # Errors
///
/// [`CacheError`].
pub fn on_demand_cache(
    registrar: OnDemand,
    config: Config,
) -> Result<Cache<OnDemand, NoMonitor>, CacheError> {
    let monitor = registrar.monitor().map_err(CacheError::ForkMark)?;
    cache(registrar, monitor, config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_refused_has_the_advice_that_helps() {
        let text = |errno| CacheError::Thread(io::Error::from_raw_os_error(errno)).to_string();
        assert!(text(libc::EAGAIN).contains("ulimit -u"), "{}", text(libc::EAGAIN));
        let namespace = text(libc::EINVAL);
        assert!(namespace.contains("CLONE_NEWPID") && !namespace.contains("ulimit"), "{namespace}");
    }

    #[test]
    fn a_budget_that_the_device_could_not_keep_is_halved() {
        let of = |wanted, limit| affordable(wanted, limit, 4096);
        assert_eq!(of(1 << 30, Some(8 << 20)), 4 << 20);
        assert_eq!(of(6 << 20, Some(8 << 20)), 6 << 20);
        assert_eq!(of(1 << 30, None), 1 << 30);
        assert_eq!(of(1 << 30, Some(0)), 4096);
        assert_eq!(of(100, Some(0)), 100); // which no cache takes, and says so
    }
}
