//! How a model is explored with loom, here and in the models of other crates.

use loom::model::Builder;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Explores `model` with at least `preemptions` involuntary switches, `LOOM_MAX_PREEMPTIONS` if that is more: bugs of
/// this kind show with two or three, and without a bound a real cache has too many interleavings. As
/// [`try_orders`] otherwise.
pub(crate) fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    // An eviction beside a lease comes to more than loom's 1,000, and ends.
    builder.max_branches = 4_000;
    let asked = builder.preemption_bound.unwrap_or(0);
    builder.preemption_bound = Some(asked.max(preemptions));
    try_orders(&builder, model);
}

/// Explores `model`, and fails if it tried one order only. Of an atomic's loads loom remembers the last: another thread's
/// earlier one counts for nothing behind a load of the writer's own, so a model whose reader comes first may show nothing.
pub(crate) fn try_orders(builder: &Builder, model: impl Fn() + Sync + Send + 'static) {
    // No atomic of the model's.
    let tried = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tried);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    assert!(tried.load(Ordering::Relaxed) > 1, "the model tried one order");
}
