//! The decision: of the ways that are open, the one that costs least by what was measured.

use super::costs::{Costs, Way};
use super::curve::Spot;
use super::{Direction, Strategy, Uses};
use crate::Uncovered;
use crate::landing::Method;
use std::fmt;

/// What a decision depends on besides the [`Costs`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Question {
    /// How long the transfer is, in bytes.
    pub bytes: usize,
    /// Which way the data goes.
    pub direction: Direction,
    /// How often this memory will be used before it changes.
    pub uses: Uses,
    /// What the monitor says of this memory.
    pub coverage: Coverage,
    /// What the one who asks has besides a cache.
    pub means: Means,
}

/// Whether registrations of some memory can be kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Coverage {
    /// Every change that the monitor claims to see will be seen.
    Covered,
    /// The device follows the page table by itself.
    OnDemand,
    /// They cannot, for this reason; `None` if a planner remembers that it was so, not why.
    Uncovered(Option<Uncovered>),
}

/// What is available for a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Means {
    /// The longest buffer of a pool, in bytes; 0 without a pool.
    pub copy_bytes: usize,
    /// Whether the transfer can begin before everything is registered, and is more than one piece.
    pub overlap: bool,
    /// Whether there is a landing zone whose pages can change places with the target's.
    pub exchange: bool,
}

/// A way that was looked at.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Considered {
    /// Which.
    pub strategy: Strategy,
    /// What each use is expected to cost, in nanoseconds; `None` if it was not measured.
    pub ns: Option<f64>,
    /// Why it is not open.
    pub excluded: Option<Excluded>,
}

/// Why a way is not open to a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Excluded {
    /// Its registration could not be kept; see [`Coverage::Uncovered`].
    Uncovered(Option<Uncovered>),
    /// There is no pool, or no buffer of it is that long.
    TooLongToCopy {
        /// The longest, in bytes.
        longest: usize,
    },
    /// The transfer begins when everything is registered, or is one piece.
    NoOverlap,
    /// There is no landing zone.
    NoZone,
    /// It is for data that arrives.
    Leaving,
}

fn because(why: Option<Uncovered>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match why {
        Some(why) => write!(f, "{why}"),
        None => f.write_str("a registration of this memory was not kept the last time"),
    }
}

impl fmt::Display for Excluded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uncovered(why) => because(*why, f),
            Self::TooLongToCopy { longest: 0 } => f.write_str("there is no pool"),
            Self::TooLongToCopy { longest } => {
                write!(f, "the pool's longest buffer has {longest} bytes")
            }
            Self::NoOverlap => f.write_str("it is one piece, or has to be registered at once"),
            Self::NoZone => f.write_str("there is no landing zone"),
            Self::Leaving => f.write_str("for data that arrives"),
        }
    }
}

/// Which way a transfer should take, and why.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Advice {
    /// What was asked.
    pub question: Question,
    /// The way.
    pub strategy: Strategy,
    /// Every way, in the order of [`Strategy`].
    pub considered: [Considered; 5],
}

/// Why an advice is worse than it could be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handicap {
    /// Keeping the registration would be faster, but changes of this memory cannot be seen; see
    /// [`Coverage::Uncovered`].
    Uncovered(Option<Uncovered>),
    /// Copying would be faster, but there is no pool, or no buffer of it is that long.
    TooLongToCopy {
        /// The longest, in bytes.
        longest: usize,
    },
    /// Nothing was measured, so nothing was compared.
    Unmeasured,
}

impl fmt::Display for Handicap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uncovered(why) => {
                f.write_str("slower than it could be: ")?;
                because(*why, f)
            }
            Self::TooLongToCopy { longest } => write!(
                f,
                "slower than it could be, by copying: {}",
                Excluded::TooLongToCopy { longest: *longest }
            ),
            Self::Unmeasured => f.write_str(
                "nothing was measured here, so nothing was compared: measure \
                 (`strategy::measure`, `pinfold bench strategies`)",
            ),
        }
    }
}

/// What an advice comes to, without the reasons for and against each way: what a transfer needs of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Decision {
    pub(super) question: Question,
    pub(super) strategy: Strategy,
    /// As [`Advice::expected_ns`].
    pub(super) expected_ns: Option<f64>,
    /// As [`Advice::handicap`].
    pub(super) handicap: Option<Handicap>,
}

impl Costs {
    /// Of the ways that are open to `question`, the cheapest; the first of equals.
    ///
    /// Ways that were not measured lose to those that were. If none was, the registration is kept where it
    /// can be, and else ends with its use. Costs some ten nanoseconds.
    pub fn advise(&self, question: Question) -> Advice {
        let considered = question.ways().map(|strategy| self.consider(&question, strategy));
        let strategy = self.decide(question).strategy;
        Advice { question, strategy, considered }
    }

    /// The same without reasons, for the path of every transfer.
    #[inline]
    pub(super) fn decide(&self, question: Question) -> Decision {
        let (spot, uses) = (Spot::of(question.bytes), question.uses);
        let (mut least, mut best) = (f64::INFINITY, None);
        let mut consider = |strategy, way: &Option<Way>, uses| {
            if let Some(way) = way {
                let ns = way.of_each_at(&spot, uses);
                if ns < least {
                    (least, best) = (ns, Some(strategy));
                }
            }
        };
        // In the order of `ways`, and open as `excludes` has it.
        let Means { copy_bytes, overlap, exchange } = question.means;
        let arriving = question.direction == Direction::Arriving;
        if !matches!(question.coverage, Coverage::Uncovered(_)) {
            consider(question.keeping(), &self.cached, uses);
        }
        if question.bytes <= copy_bytes {
            consider(question.direction.copying(), &self.copy, uses);
        }
        consider(Strategy::PerUse, &self.per_use, uses);
        if overlap {
            consider(Strategy::Pieces, &self.pieces, question.uses_by(Strategy::Pieces));
        }
        if exchange && arriving {
            consider(Strategy::Landing(Method::Exchange), &self.exchange, uses);
        }
        let expected_ns = best.map(|_| least);
        let strategy = best.unwrap_or_else(|| question.unmeasured());
        let handicap = self.handicap(&question, expected_ns);
        Decision { question, strategy, expected_ns, handicap }
    }

    fn consider(&self, question: &Question, strategy: Strategy) -> Considered {
        let uses = question.uses_by(strategy);
        let ns = self.of(strategy).map(|way| way.of_each(question.bytes, uses));
        Considered { strategy, ns, excluded: question.excludes(strategy) }
    }

    /// Why what is expected is slower than the best for such a transfer.
    fn handicap(&self, question: &Question, expected_ns: Option<f64>) -> Option<Handicap> {
        let uncovered = matches!(question.coverage, Coverage::Uncovered(_));
        let all_open = !uncovered && question.bytes <= question.means.copy_bytes;
        if all_open && expected_ns.is_some() {
            return None;
        }
        let [kept, copy, ..] = question.ways().map(|strategy| self.consider(question, strategy));
        handicap(expected_ns, &kept, &copy)
    }
}

/// Why what is expected is slower than keeping the registration, or copying, would be.
fn handicap(expected_ns: Option<f64>, kept: &Considered, copy: &Considered) -> Option<Handicap> {
    let Some(expected) = expected_ns else { return Some(Handicap::Unmeasured) };
    match (kept.excluded, copy.excluded) {
        (Some(Excluded::Uncovered(why)), _) if kept.ns.is_none_or(|ns| ns < expected) => {
            Some(Handicap::Uncovered(why))
        }
        // A way that was not measured may be no better.
        (_, Some(Excluded::TooLongToCopy { longest }))
            if copy.ns.is_some_and(|ns| ns < expected) =>
        {
            Some(Handicap::TooLongToCopy { longest })
        }
        _ => None,
    }
}

impl Question {
    fn keeping(&self) -> Strategy {
        if self.coverage == Coverage::OnDemand { Strategy::OnDemand } else { Strategy::Cached }
    }

    fn ways(&self) -> [Strategy; 5] {
        let exchange = Strategy::Landing(Method::Exchange);
        [self.keeping(), self.direction.copying(), Strategy::PerUse, Strategy::Pieces, exchange]
    }

    /// How often the memory is used before a transfer by `strategy` costs as much as the first one did.
    fn uses_by(&self, strategy: Strategy) -> Uses {
        match (strategy, self.coverage) {
            // Nothing is found again: each transfer registers every piece.
            (Strategy::Pieces, Coverage::Uncovered(_)) => Uses::ONCE,
            _ => self.uses,
        }
    }

    fn excludes(&self, strategy: Strategy) -> Option<Excluded> {
        let Means { copy_bytes: longest, overlap, exchange } = self.means;
        match (strategy, self.coverage) {
            (Strategy::Cached, Coverage::Uncovered(why)) => Some(Excluded::Uncovered(why)),
            (Strategy::Copy | Strategy::Landing(Method::Copy), _) if self.bytes > longest => {
                Some(Excluded::TooLongToCopy { longest })
            }
            (Strategy::Pieces, _) if !overlap => Some(Excluded::NoOverlap),
            (Strategy::Landing(Method::Exchange), _) if self.direction == Direction::Leaving => {
                Some(Excluded::Leaving)
            }
            (Strategy::Landing(Method::Exchange), _) if !exchange => Some(Excluded::NoZone),
            _ => None,
        }
    }

    fn unmeasured(&self) -> Strategy {
        match self.coverage {
            Coverage::Uncovered(_) => Strategy::PerUse,
            _ => self.keeping(),
        }
    }
}

impl Advice {
    /// What was found out about `strategy`; `None` if it was not a candidate.
    pub fn about(&self, strategy: Strategy) -> Option<&Considered> {
        self.considered.iter().find(|each| each.strategy == strategy)
    }

    /// What each use is expected to cost, in nanoseconds; `None` if nothing was measured.
    pub fn expected_ns(&self) -> Option<f64> {
        self.about(self.strategy).and_then(|each| each.ns)
    }

    /// Why the way is slower than the best for a transfer like this; `None` if it is not.
    pub fn handicap(&self) -> Option<Handicap> {
        let [kept, copy, ..] = &self.considered;
        handicap(self.expected_ns(), kept, copy)
    }
}

impl fmt::Display for Considered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.strategy)?;
        match self.ns {
            Some(ns) => write!(f, "{:.2} us", ns / 1e3)?,
            None => f.write_str("not measured")?,
        }
        self.excluded.map_or(Ok(()), |why| write!(f, " ({why})"))
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Question { bytes, direction, uses, .. } = self.question;
        write!(f, "{bytes} bytes {direction}, used {uses}: {}", self.strategy)?;
        self.handicap().map_or(Ok(()), |handicap| write!(f, "; {handicap}"))?;
        self.considered.iter().try_for_each(|each| write!(f, "\n- {each}"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Strategy;
    use super::super::costs::Way;
    use super::super::curve::Curve;
    use super::*;
    use crate::{AddressRange, MappingKind};
    use proptest::prelude::*;
    use proptest::strategy::Strategy as Any;
    use std::num::NonZeroU32;

    const WHY: Option<Uncovered> = Some(Uncovered::Mapping(MappingKind::SharedMemory));

    fn curves() -> impl Any<Value = Curve> {
        proptest::collection::vec(0.0..1e6_f64, 1..12).prop_map(|ns| Curve::through(&ns).unwrap())
    }

    fn ways() -> impl Any<Value = Option<Way>> {
        proptest::option::weighted(
            0.8,
            (curves(), curves()).prop_map(|(first, again)| Way { first, again }),
        )
    }

    fn costs() -> impl Any<Value = Costs> {
        (ways(), ways(), ways(), ways(), ways()).prop_map(
            |(cached, copy, per_use, pieces, exchange)| Costs {
                cached,
                copy,
                per_use,
                pieces,
                exchange,
            },
        )
    }

    fn questions() -> impl Any<Value = Question> {
        let coverage = prop_oneof![
            Just(Coverage::Covered),
            Just(Coverage::OnDemand),
            Just(Coverage::Uncovered(WHY))
        ];
        let direction = prop_oneof![Just(Direction::Leaving), Just(Direction::Arriving)];
        let uses = prop_oneof![
            Just(Uses::Often),
            (1..50_u32).prop_map(|n| Uses::Times(NonZeroU32::new(n).unwrap()))
        ];
        let means = (0_usize..1 << 24, any::<bool>(), any::<bool>())
            .prop_map(|(copy_bytes, overlap, exchange)| Means { copy_bytes, overlap, exchange });
        (1_usize..1 << 26, direction, uses, coverage, means).prop_map(
            |(bytes, direction, uses, coverage, means)| Question {
                bytes,
                direction,
                uses,
                coverage,
                means,
            },
        )
    }

    type Open = (Strategy, fn(&Costs) -> Option<Way>);

    /// The rules, written down once more and in another way.
    fn open(question: &Question) -> Vec<Open> {
        let mut open: Vec<Open> = Vec::new();
        match question.coverage {
            Coverage::Covered => open.push((Strategy::Cached, |costs| costs.cached)),
            Coverage::OnDemand => open.push((Strategy::OnDemand, |costs| costs.cached)),
            Coverage::Uncovered(_) => {}
        }
        if question.bytes <= question.means.copy_bytes {
            let arriving = question.direction == Direction::Arriving;
            let copy = if arriving { Strategy::Landing(Method::Copy) } else { Strategy::Copy };
            open.push((copy, |costs| costs.copy));
        }
        open.push((Strategy::PerUse, |costs| costs.per_use));
        if question.means.overlap {
            open.push((Strategy::Pieces, |costs| costs.pieces));
        }
        if question.direction == Direction::Arriving && question.means.exchange {
            open.push((Strategy::Landing(Method::Exchange), |costs| costs.exchange));
        }
        open
    }

    fn naive_cost(strategy: Strategy, way: Way, question: &Question) -> f64 {
        let forgotten = matches!(question.coverage, Coverage::Uncovered(_));
        if forgotten && strategy == Strategy::Pieces {
            return way.first.at(question.bytes);
        }
        match question.uses {
            Uses::Often => way.again.at(question.bytes),
            Uses::Times(n) => {
                let each = (0..n.get()).map(|use_| match use_ {
                    0 => way.first.at(question.bytes),
                    _ => way.again.at(question.bytes),
                });
                each.sum::<f64>() / f64::from(n.get())
            }
        }
    }

    proptest! {
        /// Whatever was measured and whatever is available: no open way is cheaper, and what is advised is
        /// open.
        #[test]
        fn the_cheapest_open_way_is_advised(costs in costs(), question in questions()) {
            let advice = costs.advise(question);
            let decision = costs.decide(question);
            prop_assert_eq!(decision.strategy, advice.strategy);
            prop_assert_eq!(decision.expected_ns, advice.expected_ns());
            prop_assert_eq!(decision.handicap, advice.handicap());
            let open = open(&question);
            let measured: Vec<_> = open
                .iter()
                .filter_map(|(each, way)| Some((*each, naive_cost(*each, way(&costs)?, &question))))
                .collect();
            prop_assert!(open.iter().any(|(each, _)| *each == advice.strategy), "{advice}");
            match advice.expected_ns() {
                Some(ns) => for (other, cost) in measured {
                    prop_assert!(ns <= cost * (1.0 + 1e-9) + 1e-9, "{other} costs {cost}: {advice}");
                },
                None => prop_assert!(measured.is_empty(), "{advice}"),
            }
        }

        /// If one way costs more at once and less for each byte than another, it is chosen from one
        /// length on for good.
        #[test]
        fn a_crossover_is_crossed_once(
            fixed in 0.0..1e4_f64, more in 0.0..1e4_f64, slope in 1e-3..1.0_f64, less in 0.0..0.99_f64,
        ) {
            #[allow(clippy::cast_precision_loss)]
            let line = |fixed: f64, slope: f64| {
                let points = super::super::curve::LENGTHS.map(|bytes| fixed + slope * bytes as f64);
                let curve = Curve::through(&points)?;
                Some(Way { first: curve, again: curve })
            };
            let costs = Costs {
                copy: line(fixed, slope),
                per_use: line(fixed + more, slope * less),
                ..Costs::UNMEASURED
            };
            let chosen: Vec<Strategy> = (8..112).map(|step| {
                let bytes = (1 << (step / 4)) * (4 + step % 4) / 4;
                costs.advise(question(bytes, Coverage::Covered)).strategy
            }).collect();
            let first = chosen.iter().position(|&each| each == Strategy::PerUse);
            let after = &chosen[first.unwrap_or(chosen.len())..];
            prop_assert!(after.iter().all(|&each| each == Strategy::PerUse), "{chosen:?}");
        }
    }

    fn question(bytes: usize, coverage: Coverage) -> Question {
        let means = Means { copy_bytes: usize::MAX, overlap: false, exchange: false };
        Question { bytes, direction: Direction::Leaving, uses: Uses::Often, coverage, means }
    }

    fn flat(ns: f64) -> Option<Way> {
        let curve = Curve::through(&[ns])?;
        Some(Way { first: curve, again: curve })
    }

    #[test]
    fn memory_that_cannot_be_watched_is_said_to_be_slow() {
        let costs = Costs { cached: flat(1.0), per_use: flat(7.0), ..Costs::UNMEASURED };
        let advice = costs.advise(question(4096, Coverage::Uncovered(WHY)));
        assert_eq!(advice.strategy, Strategy::PerUse);
        assert_eq!(advice.handicap(), Some(Handicap::Uncovered(WHY)));
        assert!(advice.to_string().contains("memfd"), "{advice}");
        assert_eq!(costs.advise(question(4096, Coverage::Covered)).handicap(), None);
        // Where keeping it would not be faster nothing is lost.
        let costs = Costs { copy: flat(0.5), ..costs };
        let advice = costs.advise(question(4096, Coverage::Uncovered(WHY)));
        assert_eq!((advice.strategy, advice.handicap()), (Strategy::Copy, None));
    }

    #[test]
    fn a_pool_that_is_missed_is_said() {
        let costs = Costs { copy: flat(1.0), cached: flat(7.0), ..Costs::UNMEASURED };
        let advise = |costs: Costs, copy_bytes| {
            let means = Means { copy_bytes, ..Means::default() };
            costs.advise(Question { means, ..question(4096, Coverage::Covered) })
        };
        for longest in [0, 4095] {
            let advice = advise(costs, longest);
            assert_eq!(advice.strategy, Strategy::Cached);
            assert_eq!(advice.handicap(), Some(Handicap::TooLongToCopy { longest }));
        }
        assert_eq!(advise(costs, 4096).handicap(), None);
        // Where copying is slower, or unknown, nothing is missed.
        assert_eq!(advise(Costs { copy: flat(8.0), ..costs }, 0).handicap(), None);
        assert_eq!(advise(Costs { copy: None, ..costs }, 0).handicap(), None);
    }

    /// Pieces are kept like anything else: where that cannot be, the price of finding them is no price.
    #[test]
    fn pieces_that_cannot_be_kept_cost_what_the_first_ones_did() {
        let pieces = Curve::through(&[900.0]).zip(Curve::through(&[1.0]));
        let pieces = pieces.map(|(first, again)| Way { first, again });
        let costs = Costs { pieces, cached: flat(2.0), per_use: flat(50.0), ..Costs::UNMEASURED };
        let means = Means { overlap: true, ..Means::default() };
        let advise = |coverage| costs.advise(Question { means, ..question(1 << 24, coverage) });
        assert_eq!(advise(Coverage::Covered).strategy, Strategy::Pieces);
        let advice = advise(Coverage::Uncovered(WHY));
        assert_eq!((advice.strategy, advice.expected_ns()), (Strategy::PerUse, Some(50.0)));
        assert_eq!(advice.handicap(), Some(Handicap::Uncovered(WHY)));
    }

    #[test]
    fn what_was_not_measured_is_said() {
        let advise = |coverage| Costs::UNMEASURED.advise(question(4096, coverage));
        assert_eq!(advise(Coverage::Covered).strategy, Strategy::Cached);
        assert_eq!(advise(Coverage::OnDemand).strategy, Strategy::OnDemand);
        let blind = advise(Coverage::Uncovered(WHY));
        assert_eq!(
            (blind.strategy, blind.handicap()),
            (Strategy::PerUse, Some(Handicap::Unmeasured))
        );
        assert!(blind.to_string().contains("bench strategies"), "{blind}");
    }

    #[test]
    fn no_range_is_needed_to_ask() {
        assert!(AddressRange::new(0x1000, 0).is_err());
        let advice =
            Costs { copy: flat(1.0), ..Costs::UNMEASURED }.advise(question(0, Coverage::Covered));
        assert_eq!(advice.strategy, Strategy::Copy);
    }
}
