//! Questions of scale: the answers replay, no policy sends a wrong byte, and what must hold of them
//! holds.

use pinfold_sim::PAGE_BYTES;
use pinfold_sim::scale::{
    COSTS, CallCosts, Row, ScalePolicy, Scenario, SuspensionStopped, run, suspend,
};

fn scenario(peers: usize) -> Scenario {
    Scenario {
        peers,
        pages: 16,
        buffers: 2,
        budget: 40 * 16 * PAGE_BYTES,
        window: 8,
        hot: 10,
        hot_share: 90,
        churn: 20,
        transfers: if cfg!(miri) { 60 } else { 3000 },
        costs: CallCosts::default(),
        seed: 1,
    }
}

fn rows(scenario: &Scenario) -> [Row; 6] {
    ScalePolicy::ALL.map(|policy| run(scenario, policy))
}

#[test]
fn the_same_seed_gives_the_same_answers() {
    let scenario = scenario(50);
    assert_eq!(rows(&scenario), rows(&scenario));
    let other = Scenario { seed: 2, ..scenario };
    assert_ne!(run(&scenario, ScalePolicy::Cached), run(&other, ScalePolicy::Cached));
    let stopped = SuspensionStopped::Touching;
    assert_eq!(suspend(&scenario, stopped, 2), suspend(&scenario, stopped, 2));
}

#[test]
fn no_policy_sends_what_the_program_did_not_mean() {
    for row in rows(&scenario(50)) {
        assert_eq!((row.stale, row.refused), (0, 0), "{row:?}");
    }
}

#[test]
fn each_policy_pins_what_it_says() {
    let scenario = scenario(50);
    let message = scenario.pages * PAGE_BYTES;
    let pinned = |policy| run(&scenario, policy).pinned_bytes;
    assert!(pinned(ScalePolicy::PerUse) <= scenario.window * message);
    assert_eq!(pinned(ScalePolicy::CopyPerPeer), scenario.peers * message);
    assert_eq!(pinned(ScalePolicy::CopyShared), scenario.window * message);
    // What was freed is given back, so it is never more than there is.
    let there_is = scenario.peers * scenario.buffers * message;
    assert!(pinned(ScalePolicy::Cached) > scenario.budget || cfg!(miri));
    assert!(pinned(ScalePolicy::Cached) <= there_is);
    assert!(pinned(ScalePolicy::CachedInBudget) <= scenario.budget);
    assert_eq!(pinned(ScalePolicy::OnDemand), 0);
}

#[test]
fn books_agree() {
    let scenario = scenario(50);
    let transfers = scenario.transfers as u64;
    for policy in [ScalePolicy::Cached, ScalePolicy::CachedInBudget] {
        let row = run(&scenario, policy);
        assert_eq!(row.hits + row.registrations, transfers, "{row:?}");
        assert!(row.total >= row.busy && row.mean <= row.slowest_of_hundred, "{row:?}");
    }
    assert_eq!(run(&scenario, ScalePolicy::PerUse).registrations, transfers);
    assert!(run(&scenario, ScalePolicy::CachedInBudget).evictions > 0 || cfg!(miri));
}

#[test]
fn a_budget_below_one_message_is_refused_and_not_waited_for() {
    let scenario = Scenario { budget: PAGE_BYTES, ..scenario(4) };
    assert_eq!(run(&scenario, ScalePolicy::CachedInBudget).refused, scenario.transfers as u64);
}

#[test]
fn each_cost_makes_something_dearer() {
    if cfg!(miri) {
        return;
    }
    let scenario = Scenario { transfers: 500, ..scenario(50) };
    let paused = |scenario: &Scenario| suspend(scenario, SuspensionStopped::All, 2).connection_time;
    let (rows_before, paused_before) = (rows(&scenario), paused(&scenario));
    for cost in COSTS {
        let mut dear = scenario;
        *(cost.place)(&mut dear.costs) *= 3;
        let mut both = rows_before.into_iter().zip(rows(&dear));
        let dearer = both.any(|(a, b)| a.mean < b.mean || a.busy < b.busy);
        assert!(dearer || paused_before < paused(&dear), "{cost:?}");
    }
}

#[test]
fn a_suspension_stops_the_connections_that_it_must() {
    let scenario = scenario(50);
    let [all, touching] = SuspensionStopped::ALL.map(|stopped| suspend(&scenario, stopped, 3));
    assert_eq!((all.resumed, all.refused, all.connections), (3, 0, 50));
    assert_eq!((touching.resumed, touching.refused, touching.connections), (3, 0, 1));
    // The longest pause has all the stopping and restarting in it.
    let calls = 50 * (scenario.costs.stop + scenario.costs.restart) / 1000;
    assert!(all.longest_pause >= calls && all.mean_pause < all.longest_pause, "{all:?}");
    assert!(touching.longest_pause < all.longest_pause, "{touching:?}");
    // Besides the calls there is only the window to drain, and a copy.
    assert!(all.longest_pause < calls + 1_000_000, "{all:?}");
}
