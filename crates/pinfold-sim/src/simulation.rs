//! Random programs on the real cache over the simulated fabric, every byte checked.
//!
//! A run is a sequence of episodes, each with its own world, cache and program. Everything in an
//! episode follows from its seed: the first episode's is that of the run, so whatever failed is
//! run again by its own seed and length, with the same faults ([`FailedStep::again`]).
//!
//! A step is one event of the fabric, or one thing that the program or a peer does. What is
//! checked: every cell that arrives anywhere; that every work ends in a completion, or in the open
//! with its connection; that no connection is there that the program did not ask for; that
//! suspensions end by their deadlines and leave nothing stopped; that no region's content changes
//! while it is suspended; that nothing stays registered; that the program is told of every
//! suspension and every key that changes, once and in order.

mod buffers;
mod checks;
mod notices;
mod program;
mod state;
mod suspension;

use crate::fabric::{Fabric, FabricRegistrar, Mutant, NicConfig, Weather};
use crate::monitor::SimMonitor;
use crate::random::Random;
use crate::space::AddressSpace;
use pinfold_core::listed;
use pinfold_core::{Cache, Config};
use state::Program;
use std::fmt;
use std::sync::Arc;

/// How many steps an episode has.
pub const EPISODE_STEPS: u64 = 20_000;

/// How many links the program has.
const LINKS: usize = 6;

listed! {
    /// A kind of fault.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum FaultKind {
        /// Registrations fail.
        Registration => "registration",
        /// Registrations are slow.
        SlowRegistration => "slow-registration",
        /// The device holds on to translations that were taken back.
        SlowFlush => "slow-flush",
        /// What was posted on a connection that dies is not flushed.
        LostCompletions => "lost-completions",
        /// Packets are lost, doubled, overtaken, and links cut.
        Network => "network",
        /// Stopped ends keep silent, or peers are impatient, so that connections time out.
        Impatience => "impatience",
        /// Connections are ended by either side.
        Disconnection => "disconnection",
        /// Suspensions are dropped, expire, or have their memory unmapped.
        Carelessness => "carelessness",
        /// The device panics while a suspension goes on or ends, and the program catches it.
        Panic => "panic",
    }
}

/// What to run.
#[derive(Clone, Debug)]
pub struct SimulationPlan {
    /// The seed of the first episode, from which those of the others follow.
    pub seed: u64,
    /// How many steps.
    pub steps: u64,
    /// What may go wrong.
    pub faults: Vec<FaultKind>,
    /// A defect on purpose.
    pub mutant: Option<Mutant>,
}

impl SimulationPlan {
    /// Everything may go wrong, and nothing is defective.
    pub fn new(seed: u64, steps: u64) -> Self {
        Self { seed, steps, faults: FaultKind::ALL.to_vec(), mutant: None }
    }

    /// The seed of episode `number`.
    fn episode_seed(&self, number: u64) -> u64 {
        let mut random = Random::new(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        if number == 0 { self.seed } else { random.next() }
    }
}

/// What was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finding {
    /// Bytes that should have been others.
    Wrong,
    /// A work that never ended.
    LostCompletion,
    /// A connection that no side asked for.
    CovertReconnect,
    /// A suspension that did not end, or left something stopped.
    Stuck,
    /// A registration that was not given back, or books that do not agree.
    Leaked,
    /// A change that was not told, told twice, or told otherwise.
    Untold,
}

/// The first thing that went wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailedStep {
    /// The seed that runs the episode again, with the faults of the run.
    pub seed: u64,
    /// How many steps the episode has.
    pub steps: u64,
    /// The step of that episode.
    pub step: u64,
    /// What it was.
    pub finding: Finding,
    /// In words.
    pub note: String,
}

impl FailedStep {
    /// What runs the episode again, one of `plan`'s.
    pub fn again(&self, plan: &SimulationPlan) -> SimulationPlan {
        SimulationPlan { seed: self.seed, steps: self.steps, ..plan.clone() }
    }
}

impl fmt::Display for FailedStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, steps, step, finding, note } = self;
        write!(f, "seed {seed}, step {step} of {steps}: {finding:?}: {note}")
    }
}

/// What a run did and found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Steps carried out.
    pub steps: u64,
    /// Findings of each kind.
    pub wrong: u64,
    /// Works that never ended.
    pub lost_completions: u64,
    /// Connections that no side asked for.
    pub covert_reconnects: u64,
    /// Suspensions that did not end, or left something stopped.
    pub stuck: u64,
    /// Registrations that were not given back.
    pub leaked: u64,
    /// Changes that were not told, told twice, or told otherwise.
    pub untold: u64,
    /// What happened, so that one can see that something did.
    pub happened: Happened,
    /// The first finding.
    pub first: Option<FailedStep>,
}

/// How often what happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)] // the names say it
pub struct Happened {
    pub sends: u64,
    pub receives: u64,
    pub peer_writes: u64,
    pub flushed: u64,
    pub connections_ended: u64,
    pub mapping_changes: u64,
    pub hits: u64,
    pub registrations: u64,
    pub invalidations: u64,
    pub evictions: u64,
    pub suspensions_begun: u64,
    pub suspensions_refused: u64,
    pub suspensions_resumed: u64,
    pub suspensions_killed: u64,
    pub suspensions_expired: u64,
    pub keys_changed: u64,
    pub notices: u64,
    pub device_panics: u64,
    pub simulated_nanoseconds: u64,
}

impl Happened {
    /// The counts by their names.
    pub fn counts(&self) -> [(&'static str, u64); 19] {
        [
            ("sends", self.sends),
            ("receives", self.receives),
            ("peer_writes", self.peer_writes),
            ("flushed", self.flushed),
            ("connections_ended", self.connections_ended),
            ("mapping_changes", self.mapping_changes),
            ("hits", self.hits),
            ("registrations", self.registrations),
            ("invalidations", self.invalidations),
            ("evictions", self.evictions),
            ("suspensions_begun", self.suspensions_begun),
            ("suspensions_refused", self.suspensions_refused),
            ("suspensions_resumed", self.suspensions_resumed),
            ("suspensions_killed", self.suspensions_killed),
            ("suspensions_expired", self.suspensions_expired),
            ("keys_changed", self.keys_changed),
            ("notices", self.notices),
            ("device_panics", self.device_panics),
            ("simulated_nanoseconds", self.simulated_nanoseconds),
        ]
    }
}

impl Outcome {
    /// Whether nothing was found.
    pub fn held(&self) -> bool {
        let Self { wrong, lost_completions, covert_reconnects, stuck, leaked, untold, .. } = self;
        wrong + lost_completions + covert_reconnects + stuck + leaked + untold == 0
    }

    /// Notes a finding.
    /// [`simulate`] adds how many steps there are.
    fn note(&mut self, seed: u64, step: u64, finding: Finding, note: impl fmt::Display) {
        let count = match finding {
            Finding::Wrong => &mut self.wrong,
            Finding::LostCompletion => &mut self.lost_completions,
            Finding::CovertReconnect => &mut self.covert_reconnects,
            Finding::Stuck => &mut self.stuck,
            Finding::Leaked => &mut self.leaked,
            Finding::Untold => &mut self.untold,
        };
        *count += 1;
        if self.first.is_none() {
            self.first = Some(FailedStep { seed, steps: 0, step, finding, note: note.to_string() });
        }
    }
}

/// Runs `plan`; `go_on` hears after every episode what has been found so far, and may end the run.
pub fn simulate(plan: &SimulationPlan, mut go_on: impl FnMut(&Outcome) -> bool) -> Outcome {
    let mut outcome = Outcome::default();
    for number in 0..plan.steps.div_ceil(EPISODE_STEPS) {
        let steps = EPISODE_STEPS.min(plan.steps - outcome.steps);
        let is_first = outcome.first.is_none();
        episode(plan, plan.episode_seed(number), steps, &mut outcome);
        outcome.steps += steps;
        if let Some(first) = outcome.first.as_mut().filter(|_| is_first) {
            first.steps = steps;
        }
        if !go_on(&outcome) {
            break;
        }
    }
    outcome
}

/// One world, from its beginning to its end.
fn episode(plan: &SimulationPlan, seed: u64, steps: u64, outcome: &mut Outcome) {
    let mut random = Random::new(seed);
    let log_capacity = if random.chance(20) { 4 } else { 256 };
    let space = Arc::new(AddressSpace::with_log_capacity(log_capacity));
    let nic = nic_config(&mut random, plan.mutant);
    let fabric = Fabric::new(&space, LINKS, nic, random.next(), plan.mutant);
    let monitor = SimMonitor::new(&space);
    if plan.mutant == Some(Mutant::DeafCache) {
        monitor.blindfold();
    }
    let registrar = FabricRegistrar::new(&fabric);
    let Ok(cache) = Cache::new(registrar, monitor, cache_config(&mut random)) else {
        return outcome.note(seed, 0, Finding::Leaked, "no cache could be made");
    };
    let mut program = Program::new(&cache, &fabric, plan, nic, random, seed, outcome);
    program.run(steps);
    checks::end(program);
    drop(cache);
    let left = fabric.with(|world| world.registrations());
    if left > 0 {
        outcome.note(seed, steps, Finding::Leaked, format_args!("{left} registrations are left"));
    }
}

fn nic_config(random: &mut Random, mutant: Option<Mutant>) -> NicConfig {
    let config = NicConfig {
        max_regions: if random.chance(30) { 16 } else { 512 },
        on_demand: random.chance(20),
        changes_keys: random.chance(25),
        withdraws: random.chance(50),
    };
    match mutant {
        // Defects of a device of one kind.
        Some(Mutant::OldTranslation) => {
            NicConfig { withdraws: false, changes_keys: false, ..config }
        }
        Some(Mutant::CovertKey | Mutant::Echo) => NicConfig { changes_keys: true, ..config },
        Some(Mutant::SlowFlush) => NicConfig { withdraws: true, changes_keys: false, ..config },
        _ => config,
    }
}

fn cache_config(random: &mut Random) -> Config {
    Config {
        max_regions: if random.chance(40) { 12 } else { 400 },
        max_bytes: if random.chance(30) { 40 * 4096 } else { 1 << 30 },
        cache_remote: random.chance(50),
        ..Config::default()
    }
}

/// What the weather is like from now on.
fn weather(random: &mut Random, faults: &[FaultKind]) -> Weather {
    let mut weather = Weather::default();
    let has = |kind| faults.contains(&kind);
    if has(FaultKind::Network) {
        weather.loss = [0, 0, 2, 10][random.below(4)];
        weather.doubled = [0, 3][random.below(2)];
        weather.latency = [2_000, 5_000, 30_000][random.below(3)];
        weather.cut = random.chance(5).then(|| random.below(LINKS));
    }
    if has(FaultKind::SlowRegistration) {
        weather.registration = [500, 1_000, 50_000][random.below(3)];
    }
    if has(FaultKind::SlowFlush) {
        weather.flush = [0, 5_000, 200_000][random.below(3)];
    }
    if has(FaultKind::LostCompletions) {
        weather.loses_completions = random.chance(30);
    }
    if has(FaultKind::Impatience) {
        weather.silent = random.chance(30);
        weather.patience = [None, Some(7), Some(2)][random.below(3)];
    }
    weather
}
