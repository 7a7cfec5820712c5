#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]
use pinfold_sim::simulation::{FaultKind, Plan, simulate};
fn main() {
    let mut args = std::env::args().skip(1);
    let seed = args.next().unwrap().parse().unwrap();
    let steps = args.next().unwrap().parse().unwrap();
    let mut plan = Plan::new(seed, steps);
    if let Some(name) = args.next() {
        plan.faults = FaultKind::ALL.into_iter().filter(|f| f.name() == name).collect();
    }
    let t = std::time::Instant::now();
    let o = simulate(&plan, |_| {});
    println!("{o:#?} {:?}", t.elapsed());
}
