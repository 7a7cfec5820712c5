//! Random programs on the real cache over the simulated fabric: nothing is ever wrong, and where
//! something is defective on purpose, it is found.

#![allow(clippy::print_stderr, clippy::panic)] // tests may fail loudly

use pinfold_sim::fabric::Mutant;
use pinfold_sim::simulation::{EPISODE_STEPS, FaultKind, Outcome, SimulationPlan, simulate};
use std::time::{SystemTime, UNIX_EPOCH};

/// Seeds that failed once.
const FAILED_ONCE: [u64; 5] = [
    // A registration that reached into two ranges came back with the first of them.
    14_098_258_488_781_145_445,
    // A connection of two suspensions went on with the first of them.
    7_149_475_711_923_875_728,
    17_049_554_665_203_045_508,
    // The program moved memory of a suspension that had expired.
    15_546_549_158_718_448_303,
    // The program unmapped a message that it had not looked at, and blamed the device.
    920_982_423_977_495_394,
];

fn run(plan: &SimulationPlan) -> Outcome {
    simulate(plan, |_| true)
}

fn assert_held(plan: &SimulationPlan) -> Outcome {
    let outcome = run(plan);
    assert!(outcome.held(), "{}", outcome.first.map_or_else(String::new, |it| it.to_string()));
    outcome
}

fn steps(debug: u64) -> u64 {
    if cfg!(miri) {
        400
    } else if cfg!(debug_assertions) {
        debug
    } else {
        4 * debug
    }
}

#[test]
fn nothing_is_wrong_under_all_faults() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs());
    eprintln!("seed {now}");
    assert_held(&SimulationPlan::new(now, steps(200_000)));
}

/// One seed, because what is rare is missing from some runs.
#[test]
fn there_is_a_run_in_which_everything_happens_and_nothing_is_wrong() {
    let happened = assert_held(&SimulationPlan::new(20_261_126, steps(120_000))).happened;
    if cfg!(miri) {
        return;
    }
    let counts = [
        happened.sends,
        happened.receives,
        happened.peer_writes,
        happened.flushed,
        happened.connections_ended,
        happened.hits,
        happened.invalidations,
        happened.evictions,
        happened.suspensions_refused,
        happened.suspensions_resumed,
        happened.suspensions_killed,
        happened.suspensions_expired,
        happened.keys_changed,
        happened.notices,
        happened.device_panics,
    ];
    assert!(counts.iter().all(|&count| count > 0), "{happened:?}");
}

/// The last episode is as long as is left, and ends otherwise than a longer one.
#[test]
#[cfg_attr(miri, ignore = "too many steps")]
fn what_fails_in_a_shorter_episode_fails_again() {
    for mutant in [Mutant::OldTranslation, Mutant::DeafCache] {
        let in_the_last = |seed| {
            let plan = SimulationPlan {
                mutant: Some(mutant),
                ..SimulationPlan::new(seed, EPISODE_STEPS + 3_000)
            };
            let first = run(&plan).first.filter(|first| first.seed != plan.seed);
            first.map(|first| (plan, first))
        };
        let (plan, first) = (0..200).find_map(in_the_last).unwrap();
        assert_eq!(first.steps, 3_000);
        assert_eq!(run(&first.again(&plan)).first, Some(first), "{mutant:?}");
    }
}

#[test]
fn nothing_is_wrong_under_each_fault_alone() {
    for (seed, fault) in (100..).zip(FaultKind::ALL) {
        assert_held(&SimulationPlan {
            faults: vec![fault],
            ..SimulationPlan::new(seed, steps(40_000))
        });
    }
    assert_held(&SimulationPlan { faults: Vec::new(), ..SimulationPlan::new(99, steps(40_000)) });
}

#[test]
fn seeds_that_failed_once_do_not_fail_again() {
    let alone = FaultKind::ALL.map(|fault| vec![fault]);
    // What may go wrong draws numbers, so these run as they failed only with what there was then.
    let before_panics: Vec<_> =
        FaultKind::ALL.into_iter().filter(|&it| it != FaultKind::Panic).collect();
    for seed in FAILED_ONCE {
        for faults in alone.iter().cloned().chain([
            FaultKind::ALL.to_vec(),
            before_panics.clone(),
            Vec::new(),
        ]) {
            assert_held(&SimulationPlan {
                faults,
                ..SimulationPlan::new(seed, steps(EPISODE_STEPS).min(EPISODE_STEPS))
            });
        }
    }
}

#[test]
fn a_seed_replays_to_the_last_count() {
    let (first, second) =
        (run(&SimulationPlan::new(5, steps(60_000))), run(&SimulationPlan::new(5, steps(60_000))));
    assert_eq!(first, second);
    assert_ne!(first.happened, run(&SimulationPlan::new(6, steps(60_000))).happened);
}

/// What a mutant is found by: wrong, lost completions, covert reconnects, stuck, untold.
fn found(mutant: Mutant) -> [bool; 5] {
    let plan = SimulationPlan { mutant: Some(mutant), ..SimulationPlan::new(7, 1_000_000) };
    let outcome = simulate(&plan, Outcome::held);
    let Outcome { wrong, lost_completions, covert_reconnects, stuck, untold, .. } = outcome;
    eprintln!("{mutant:?}: {wrong} {lost_completions} {covert_reconnects} {stuck} {untold}");
    [wrong > 0, lost_completions > 0, covert_reconnects > 0, stuck > 0, untold > 0]
}

#[test]
fn every_mutant_is_found_for_what_it_is() {
    if cfg!(miri) {
        return;
    }
    for mutant in Mutant::ALL {
        let [wrong, lost, covert, stuck, untold] = found(mutant);
        let as_what_it_is = match mutant {
            Mutant::CovertReconnect => covert,
            Mutant::SwallowedCompletions => lost,
            Mutant::NeverRestarted => stuck,
            Mutant::CovertKey | Mutant::Echo => untold,
            _ => wrong,
        };
        assert!(as_what_it_is, "{mutant:?} was not found");
    }
}
