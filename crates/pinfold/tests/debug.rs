//! What a program prints by `{:?}` while it looks for its own mistake: one short line for each thing of this library.

mod registrar_support;

use pinfold::monitor::{Feed, Userfaultfd, best};
use pinfold::pool::{Pool, PoolConfig};
use pinfold::{Config, Monitor};
use std::error::Error;
use std::fmt::Debug;
use std::sync::Arc;

fn is_one_short_line(what: &impl Debug) {
    let line = format!("{what:?}");
    assert!(line.len() <= 300 && !line.contains('\n'), "{} bytes: {line:.600}", line.len());
}

#[test]
fn monitors_and_feeds() -> Result<(), Box<dyn Error>> {
    is_one_short_line(Feed::of_process());
    is_one_short_line(&best()?.name());
    match Userfaultfd::shared() {
        Ok(monitor) => is_one_short_line(&monitor),
        Err(reason) => eprintln!("skipped: {reason}"),
    }
    Ok(())
}

#[test]
fn caches_registrars_and_pools() -> Result<(), Box<dyn Error>> {
    let Some((_ring, registrar)) = registrar_support::registrar_of_a_ring(1024) else {
        return Ok(());
    };
    let registrar = Arc::new(registrar);
    let cache = pinfold::cache(Arc::clone(&registrar), best()?, Config::keeping_all())?;
    let lease = cache.lease_buffer(vec![1_u8; 4 << 20]).map_err(|refused| refused.error)?;
    is_one_short_line(&registrar);
    is_one_short_line(&cache);
    let pool = Pool::new(registrar, PoolConfig { max_bytes: 8 << 20, ..PoolConfig::default() })?;
    let buffer = pool.get(1500)?;
    is_one_short_line(&pool);
    is_one_short_line(&buffer);
    drop((lease, buffer));
    Ok(())
}
