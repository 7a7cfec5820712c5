//! Random programs on the cache, compared with a model that is too simple to be wrong.
//!
//! The model keeps a plain list of the regions that may be handed out and knows nothing of
//! sequences, hazards or an index. It foretells for every `get` whether it is a hit, which it may
//! be served by, or which error it ends in; and the device tells whether the lease moves the
//! program's own pages. After a reclamation the device holds exactly what the model says.
//!
//! A failure prints the shortest program that shows it and leaves its seed next to this file, from
//! where it is tried first in the next run.

#![cfg(not(shuttle))]
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails loudly

mod common;

use common::{BROKEN, Rig, Setup, SimLease, bytes, pages};
use pinfold_core::{
    Access, AddressRange, BadAddress, Config, GetError, PerUse, RegisterError, Statistics,
    Uncovered,
};
use pinfold_sim::{Discard, Handle, PAGE_BYTES, Protection};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// The program's memory: few pages, so that ranges meet.
const PAGES: usize = 16;

/// The last pages of it cannot be watched.
const UNCOVERED_FROM: usize = 14;

/// One step of a program. Ranges are in pages, except where a `get` may ask for bytes.
#[derive(Clone, Debug)]
enum Step {
    Map(AddressRange, Protection),
    Unmap(AddressRange),
    Protect(AddressRange, Protection),
    Discard(AddressRange),
    BeginDiscard(AddressRange),
    EndDiscard(usize),
    Remap(AddressRange, usize),
    Get(AddressRange, Access),
    Hold(AddressRange, Access),
    Release(usize),
    Invalidate(AddressRange),
    Reclaim,
    FailNext,
}

fn some_pages() -> impl Strategy<Value = AddressRange> {
    (0..PAGES, 1..=4_usize).prop_map(|(first, count)| pages(first, count.min(PAGES - first)))
}

fn some_bytes() -> impl Strategy<Value = AddressRange> {
    let exact = (0..PAGES * PAGE_BYTES, 1..=4 * PAGE_BYTES)
        .prop_map(|(offset, length)| bytes(offset, length.min(PAGES * PAGE_BYTES - offset)));
    prop_oneof![exact, some_pages()]
}

fn some_access() -> impl Strategy<Value = Access> {
    prop_oneof![4 => Just(Access::READ), 1 => Just(Access::WRITE), 2 => Just(Access::READ_WRITE)]
}

fn some_protection() -> impl Strategy<Value = Protection> {
    prop_oneof![
        6 => Just(Protection::ReadWrite),
        1 => Just(Protection::ReadOnly),
        1 => Just(Protection::None),
    ]
}

fn some_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (some_pages(), some_protection()).prop_map(|(range, allow)| Step::Map(range, allow)),
        3 => some_pages().prop_map(Step::Unmap),
        1 => (some_pages(), some_protection()).prop_map(|(at, allow)| Step::Protect(at, allow)),
        3 => some_pages().prop_map(Step::Discard),
        2 => some_pages().prop_map(Step::BeginDiscard),
        3 => any::<usize>().prop_map(Step::EndDiscard),
        3 => (some_pages(), 0..PAGES).prop_map(|(from, to)| Step::Remap(from, to)),
        16 => (some_bytes(), some_access()).prop_map(|(range, access)| Step::Get(range, access)),
        8 => (some_bytes(), some_access()).prop_map(|(range, access)| Step::Hold(range, access)),
        6 => any::<usize>().prop_map(Step::Release),
        2 => some_bytes().prop_map(Step::Invalidate),
        2 => Just(Step::Reclaim),
        1 => Just(Step::FailNext),
    ]
}

/// A region that the cache may hand out.
#[derive(Clone, Copy, Debug)]
struct Live {
    handle: Handle,
    range: AddressRange,
    access: Access,
}

impl Live {
    fn serves(&self, range: AddressRange, access: Access) -> bool {
        self.range.contains(&range) && self.access.contains(access)
    }
}

/// A lease that the program keeps.
struct Held<'r> {
    lease: SimLease<'r>,
    /// Whether a change hit its region.
    invalidated: bool,
}

/// The naive cache, and what it says the real one has counted.
#[derive(Default)]
struct Model {
    live: Vec<Live>,
    /// What each page of the program allows; nothing where none is mapped.
    protections: [Option<Protection>; PAGES],
    failures_ordered: usize,
    counted: Statistics,
}

/// What the model foretells of a `get`.
#[derive(Debug)]
enum Foretold {
    HitOneOf(Vec<Handle>),
    Fails(RegisterError),
    /// Made new; why it is not kept, if it is not.
    Registered(Option<PerUse>),
}

impl Model {
    /// Changes the protection of what is mapped in `range` to what `new` says.
    fn protect(
        &mut self,
        range: AddressRange,
        new: impl Fn(Option<Protection>) -> Option<Protection>,
    ) {
        for page in page_numbers(range) {
            self.protections[page] = new(self.protections[page]);
        }
    }

    /// Other pages have come to `range`, or the program says so.
    fn event(&mut self, range: AddressRange) {
        let before = self.live.len();
        self.live.retain(|live| !live.range.overlaps(&range));
        self.counted.invalidations += (before - self.live.len()) as u64;
    }

    /// Why memory cannot be registered, if it cannot.
    fn bad_address(&self, range: AddressRange, access: Access) -> Option<BadAddress> {
        page_numbers(range).find_map(|page| {
            let at = pages(page, 1).start();
            match self.protections[page] {
                None => Some(BadAddress::Unmapped { at }),
                Some(Protection::None) => Some(BadAddress::NoAccess { at }),
                Some(Protection::ReadOnly) if access.writes() => {
                    Some(BadAddress::NotWritable { at })
                }
                Some(_) => None,
            }
        })
    }

    fn foretell(&self, range: AddressRange, access: Access, change_pending: bool) -> Foretold {
        let serving = self.live.iter().filter(|live| live.serves(range, access));
        let serving: Vec<_> = serving.map(|live| live.handle).collect();
        let registered = range.page_aligned(PAGE_BYTES);
        if !serving.is_empty() {
            Foretold::HitOneOf(serving)
        } else if self.failures_ordered > 0 {
            Foretold::Fails(BROKEN)
        } else if let Some(reason) = self.bad_address(registered, access) {
            Foretold::Fails(RegisterError::BadAddress { range: registered, reason, errno: 14 })
        } else if page_numbers(registered).any(|page| page >= UNCOVERED_FROM) {
            Foretold::Registered(Some(PerUse::Uncovered(Uncovered::NoMonitor)))
        } else {
            Foretold::Registered(change_pending.then_some(PerUse::ChangePending))
        }
    }

    /// A region was registered and kept: those that it makes needless go.
    fn publish(&mut self, new: Live) {
        let before = self.live.len();
        self.live.retain(|live| !new.serves(live.range, live.access));
        self.counted.superseded += (before - self.live.len()) as u64;
        self.live.push(new);
    }

    /// Takes out what was evicted: the device no longer has it.
    fn forget_evicted(&mut self, rig: &Rig) {
        let before = self.live.len();
        self.live.retain(|live| rig.is_registered(live.handle));
        self.counted.evictions += (before - self.live.len()) as u64;
    }
}

fn page_numbers(range: AddressRange) -> std::ops::Range<usize> {
    let first = (range.start() - common::BASE) / PAGE_BYTES;
    let last = (range.end() - 1 - common::BASE) / PAGE_BYTES;
    first..last + 1
}

/// A program with what it holds.
struct Program<'r> {
    rig: &'r Rig,
    model: Model,
    held: Vec<Held<'r>>,
    discards: Vec<(AddressRange, Discard)>,
}

impl<'r> Program<'r> {
    fn new(rig: &'r Rig) -> Self {
        rig.monitor.uncover(
            pages(UNCOVERED_FROM, common::MAPPED_PAGES - UNCOVERED_FROM),
            Uncovered::NoMonitor,
        );
        let protections = [Some(Protection::ReadWrite); PAGES];
        let model = Model { protections, ..Model::default() };
        Self { rig, model, held: Vec::new(), discards: Vec::new() }
    }

    fn run(&mut self, steps: &[Step]) {
        for step in steps {
            self.step(step);
        }
    }

    fn step(&mut self, step: &Step) {
        let space = &self.rig.space;
        match *step {
            Step::Map(range, protection) => {
                space.map(range, protection);
                self.model.protect(range, |_| Some(protection));
                self.changed(range);
            }
            Step::Unmap(range) => {
                space.unmap(range);
                self.model.protect(range, |_| None);
                self.changed(range);
            }
            Step::Protect(range, protection) => {
                space.protect(range, protection);
                self.model.protect(range, |mapped| mapped.map(|_| protection));
            }
            Step::Discard(range) => {
                space.discard(range);
                self.changed(range);
            }
            Step::BeginDiscard(range) => {
                self.discards.push((range, space.begin_discard(range)));
                self.changed(range);
            }
            Step::EndDiscard(which) => {
                drop(take(&mut self.discards, which));
            }
            Step::Remap(from, to) => self.remap(from, to),
            Step::Get(range, access) => drop(self.get(range, access)),
            Step::Hold(range, access) => {
                let lease = self.get(range, access);
                self.held.extend(lease.map(|lease| Held { lease, invalidated: false }));
            }
            Step::Release(which) => self.release(which),
            Step::Invalidate(range) => {
                self.rig.cache().invalidate(range);
                self.changed(range);
            }
            Step::Reclaim => self.reclaim(),
            Step::FailNext => {
                self.rig.device.fail_next(1, BROKEN);
                self.model.failures_ordered += 1;
            }
        }
    }

    fn changed(&mut self, range: AddressRange) {
        self.model.event(range);
        for held in &mut self.held {
            held.invalidated |= held.lease.registered().overlaps(&range);
        }
    }

    fn remap(&mut self, from: AddressRange, to: usize) {
        let to = pages(to.min(PAGES - from.len() / PAGE_BYTES), from.len() / PAGE_BYTES);
        if self.rig.space.remap(from, to.start()).is_err() {
            return;
        }
        let moved: Vec<_> =
            page_numbers(from).map(|page| self.model.protections[page].take()).collect();
        for (page, protection) in page_numbers(to).zip(moved) {
            self.model.protections[page] = protection;
        }
        self.changed(from);
        self.changed(to);
    }

    fn get(&mut self, range: AddressRange, access: Access) -> Option<SimLease<'r>> {
        let registered = range.page_aligned(PAGE_BYTES);
        let change_pending =
            self.discards.iter().any(|(discarded, _)| discarded.overlaps(&registered));
        let foretold = self.model.foretell(range, access, change_pending);
        let result = self.rig.get(range, access);
        self.model.forget_evicted(self.rig);
        match result {
            Ok(lease) => {
                self.rig.assert_fresh(&lease);
                self.note_lease(&lease, access, foretold);
                Some(lease)
            }
            Err(error) => {
                self.note_error(registered, error, &foretold);
                None
            }
        }
    }

    fn note_lease(&mut self, lease: &SimLease<'r>, access: Access, foretold: Foretold) {
        let (handle, counted) = (lease.handle(), &mut self.model.counted);
        match foretold {
            Foretold::HitOneOf(handles) => {
                assert!(handles.contains(&handle), "{lease:?} is none of {handles:?}");
                counted.hits += 1;
            }
            Foretold::Registered(per_use) => {
                assert_eq!(lease.per_use(), per_use);
                counted.misses += 1;
                counted.registrations += 1;
                counted.per_use += u64::from(per_use.is_some());
                if per_use.is_none() {
                    self.model.publish(Live { handle, range: lease.registered(), access });
                }
            }
            Foretold::Fails(error) => panic!("{lease:?} instead of {error}"),
        }
    }

    fn note_error(&mut self, registered: AddressRange, error: GetError, foretold: &Foretold) {
        self.model.counted.misses += 1;
        match (error, foretold) {
            (GetError::Exhausted(_), Foretold::HitOneOf(_)) => panic!("{error} for a hit"),
            (GetError::Exhausted(_), _) => self.assert_exhausted(registered),
            (GetError::Register(error), Foretold::Fails(foretold)) => {
                assert_eq!(error, *foretold);
                self.model.counted.registration_failures += 1;
                self.model.failures_ordered = self.model.failures_ordered.saturating_sub(1);
            }
            _ => panic!("{error} instead of {foretold:?}"),
        }
    }

    /// The budget may be called spent only if leases alone leave no room for `registered`.
    fn assert_exhausted(&self, registered: AddressRange) {
        let config = self.rig.cache().config();
        let leased = self.leased();
        let bytes: usize = leased.iter().map(|(_, range)| range.len()).sum();
        assert!(
            leased.len() >= config.max_regions || bytes + registered.len() > config.max_bytes,
            "exhausted by {leased:?}"
        );
    }

    /// The registrations in use, each once.
    fn leased(&self) -> Vec<(Handle, AddressRange)> {
        let mut leased: Vec<_> =
            self.held.iter().map(|held| (held.lease.handle(), held.lease.registered())).collect();
        leased.sort_unstable();
        leased.dedup();
        leased
    }

    /// A kept lease that was not called invalidated must still be right.
    fn release(&mut self, which: usize) {
        let Some(Held { lease, invalidated }) = take(&mut self.held, which) else { return };
        if !matches!(lease.per_use(), Some(PerUse::Uncovered(_))) {
            // Of what was registered while a discard was pending it is unknown.
            let doubtful = lease.per_use() == Some(PerUse::ChangePending);
            assert_eq!(lease.is_invalidated(), invalidated || doubtful, "{lease:?}");
        }
        if lease.is_cached() && !invalidated {
            self.rig.assert_fresh(&lease);
        }
    }

    /// Afterwards the device holds what is live and what is leased, and nothing else.
    fn reclaim(&mut self) {
        self.rig.cache().reclaim();
        let leased = self.leased();
        let live = self.model.live.iter().map(|live| live.handle);
        let mut expected: Vec<_> = live.chain(leased.iter().map(|(handle, _)| *handle)).collect();
        expected.sort_unstable();
        expected.dedup();
        let registrations = self.rig.device.registrations();
        let held: Vec<_> = registrations.iter().map(|(handle, _)| *handle).collect();
        assert_eq!(held, expected);
        self.assert_counters();
    }

    fn assert_counters(&self) {
        let (counted, real) = (self.model.counted, self.rig.statistics());
        assert_eq!((real.hits, real.misses), (counted.hits, counted.misses));
        assert_eq!(real.registrations, counted.registrations);
        assert_eq!(real.registration_failures, counted.registration_failures);
        assert_eq!(real.per_use, counted.per_use);
        assert_eq!(real.superseded, counted.superseded);
        assert_eq!(real.invalidations, counted.invalidations);
        assert_eq!(real.evictions, counted.evictions);
        assert_eq!(real.deregistrations, real.registrations - real.regions);
    }

    fn end(mut self) {
        self.reclaim();
        while !self.held.is_empty() {
            self.release(0);
        }
        self.reclaim();
        let config = self.rig.cache().config();
        let counts = self.rig.device.counts();
        assert!(counts.peak_live <= config.max_regions);
        assert!(counts.peak_pinned_bytes <= config.max_bytes as u64);
    }
}

/// One of `items`, if there is any.
fn take<T>(items: &mut Vec<T>, which: usize) -> Option<T> {
    let which = which.checked_rem(items.len())?;
    Some(items.swap_remove(which))
}

fn run(setup: Setup, steps: &[Step]) {
    let rig = setup.rig();
    let mut program = Program::new(&rig);
    program.run(steps);
    program.end();
    // The rig's own end drops the cache and finds nothing left on the device.
}

fn some_program() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(some_step(), 1..if cfg!(miri) { 30 } else { 80 })
}

fn settings() -> ProptestConfig {
    let persistence = FileFailurePersistence::WithSource("regressions");
    ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 256 },
        failure_persistence: if cfg!(miri) { None } else { Some(Box::new(persistence)) },
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(settings())]

    /// Room enough: the model is exact to the last counter.
    #[test]
    fn a_roomy_cache_agrees_with_the_model(steps in some_program()) {
        run(Setup::default(), &steps);
    }

    /// Few registrations: what is evicted is the cache's choice, everything else is foretold.
    #[test]
    fn a_cache_of_few_regions_agrees_with_the_model(
        steps in some_program(),
        max_regions in 1..6_usize,
    ) {
        run(Setup::regions(max_regions), &steps);
    }

    /// Few bytes, where one registration may need the room of several.
    #[test]
    fn a_cache_of_few_bytes_agrees_with_the_model(
        steps in some_program(),
        max_pages in 1..10_usize,
    ) {
        let max_bytes = max_pages * PAGE_BYTES;
        run(Setup::with(Config { max_bytes, ..Config::default() }), &steps);
    }
}
