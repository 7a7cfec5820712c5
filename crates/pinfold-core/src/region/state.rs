//! The one state of a region, the list that follows from it, and the moves that are legal.
//!
//! The state is the low byte of the region's word. [`Lists`](super::Lists) is the only writer; it
//! changes the state and the membership in one function, which allows what
//! [`State::successors`] names and nothing else.
//!
//! ```text
//!          registered                   used again
//!   Free ─────────────▶ Small ─────────────────────────▶ Main ◀──────────────┐
//!    │ ▲                 │ ▲                               │ ▲ ▲             │ leased again, a lease
//!    │ │                 ▼ │  suspended                    ▼ │ │ a lease     │ ended, nothing known
//!    │ │            SmallClosed ─────────────────▶ MainClosed  │ ended       │
//!    │ │                 │    room is needed             │     │             │
//!    │ │                 └───────────▶ Examined ◀────────┘  MainLeased       │
//!    │ │                                  │ │ └── scanned, leased ──▲         │
//!    │ │                                  │ └────────────────────────────────┤
//!    │ │                                  ▼ scanned: no lease                │
//!    │ │                              Evictable ─────────────────────────────┘
//!    │ │
//!    │ │  a change of its mapping: Small, Main*, closed, Examined, Evictable, Superseded ──▶ Invalidated
//!    │ │  a larger region:         Small, Main*, closed, Examined, Evictable   ──▶ Superseded
//!    │ │  suspended:               MainLeased, Examined ──▶ MainClosed
//!    │ │  being scanned:           Invalidated ─▶ InvalidatedLeased, Superseded ─▶ SupersededLeased,
//!    │ │                           and back when a lease ends
//!    │ │  a lease handed over:     closed, Examined, PerUse, invalidated, superseded ──▶ Parked ──▶ renewed
//!    │ │
//!    ├─│─▶ PerUse ──▶ PerUseInvalidated     one lease, never findable
//!    │ │
//!    │ └─── Deregistering ◀── with a proof that no lease is left (`Idle`): Examined, Evictable,
//!    │           │            invalidated, superseded, PerUse, PerUseInvalidated, Parked
//!    │           └──▶ Invalidated   the registrar panicked at an earlier one: the reclaimer's again
//! ```

use crate::listed::listed;

listed! {
    /// What may be done with a region, and in which list it stands.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u8)]
    pub(crate) enum State {
        /// Nothing is registered here, as far as the cache knows.
        Free = 0,
        /// May be found and leased by a hit; not used since it was registered, as far as is known.
        Small = LIVE | QUIET | 1,
        /// May be found and leased by a hit; used again since it was registered.
        Main = LIVE | QUIET | 2,
        /// As `Main`, and a scan for room found it leased: the end of a lease is awaited, so that the
        /// next that needs room does not look at it again before.
        MainLeased = LIVE | 3,
        /// As `Small`, but only a holder of the writer's lock finds it: part of it is suspended.
        SmallClosed = 1,
        /// As `Main`, and closed in the same way.
        MainClosed = 2,
        /// Taken out of the order of eviction while the hazards are scanned, which takes no lock. Only a
        /// holder of the writer's lock leases it, and it leaves this state then; and when a lease of it ends.
        Examined = 3,
        /// The next to be evicted: a scan found no lease after hits could not find it any more. Only a
        /// holder of the writer's lock leases it, and it leaves this state then.
        Evictable = 4,
        /// Its mapping changed: not to be found; whether it is leased has not been looked at.
        Invalidated = 5,
        /// Its mapping changed, and it is leased, or the hazards are being scanned: the end of a lease is awaited.
        InvalidatedLeased = 6,
        /// Not to be found, because a larger region serves its uses, or it was suspended; its pages are
        /// right. Whether it is leased has not been looked at.
        Superseded = 7,
        /// As `Superseded`, and the end of a lease is awaited in the same way.
        SupersededLeased = 8,
        /// Registered for one lease alone.
        PerUse = 9,
        /// As `PerUse`, and the mapping changed since.
        PerUseInvalidated = 10,
        /// In the hands of a suspension, which holds what its leases were.
        Parked = 11,
        /// Being deregistered; the duty is in one thread's hands.
        Deregistering = 12,
    }
}

/// An index of regions that are registered and not in the cache's index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outside {
    /// Their pages are right, as far as is known: a change concerns them.
    Valid,
    /// They are in the hands of a suspension, or wait to be deregistered.
    Other,
}

/// The bit of a state in which hits find the region.
pub(super) const LIVE: u8 = 1 << 7;

/// The bit of a state in which nothing waits for the end of a lease.
pub(super) const QUIET: u8 = 1 << 6;

listed! {
    /// A list of places.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u8)]
    pub(crate) enum List {
        /// In the order of eviction: not used since they were registered.
        Small,
        /// In the order of eviction: used again.
        Main,
        /// In use, and out of the order of eviction until a lease ends.
        MainLeased,
        /// In the hands of the thread that scans the hazards.
        Examined,
        Evictable,
        Invalidated,
        InvalidatedLeased,
        Superseded,
        SupersededLeased,
        /// Registered for one lease, whether the mapping changed or not.
        PerUse,
        Parked,
        Deregistering,
    }
}

/// The state that a byte stands for.
const OF_BYTE: [State; 1 << u8::BITS] = {
    let (mut states, mut next) = ([State::Free; 1 << u8::BITS], 0);
    while next < State::ALL.len() {
        states[State::ALL[next] as usize] = State::ALL[next];
        next += 1;
    }
    states
};

/// Where a region stands whose state a byte is: each move asks for two of them.
const STANDS: [(Option<List>, Option<Outside>); 1 << u8::BITS] = {
    let (mut places, mut next) = ([(None, None); 1 << u8::BITS], 0);
    while next < State::ALL.len() {
        let state = State::ALL[next];
        places[state as usize] = (state.list(), state.outside());
        next += 1;
    }
    places
};

impl State {
    #[inline]
    pub(super) const fn from_bits(bits: u64) -> Self {
        OF_BYTE[bits.to_le_bytes()[0] as usize]
    }

    /// Whether hits find the region, which they read from its word.
    #[cfg(test)]
    #[cfg(not(loom))]
    const fn is_live(self) -> bool {
        self as u8 & LIVE != 0
    }

    /// Whether the region is in the index.
    pub(crate) const fn is_indexed(self) -> bool {
        matches!(
            self,
            Self::Small
                | Self::Main
                | Self::MainLeased
                | Self::SmallClosed
                | Self::MainClosed
                | Self::Examined
                | Self::Evictable
        )
    }

    /// Whether the mapping changed since the region was registered, as far as is known.
    pub(crate) const fn is_invalidated(self) -> bool {
        matches!(self, Self::Invalidated | Self::InvalidatedLeased | Self::PerUseInvalidated)
    }

    /// Whether the thread that scans the hazards put it there, for as long as nothing else happens to it.
    pub(crate) const fn awaits_scan(self) -> bool {
        matches!(self, Self::Examined | Self::InvalidatedLeased | Self::SupersededLeased)
    }

    /// The list in which a region of this state stands.
    #[inline]
    pub(crate) const fn list(self) -> Option<List> {
        Some(match self {
            Self::Free => return None,
            Self::Small | Self::SmallClosed => List::Small,
            Self::Main | Self::MainClosed => List::Main,
            Self::MainLeased => List::MainLeased,
            Self::Examined => List::Examined,
            Self::Evictable => List::Evictable,
            Self::Invalidated => List::Invalidated,
            Self::InvalidatedLeased => List::InvalidatedLeased,
            Self::Superseded => List::Superseded,
            Self::SupersededLeased => List::SupersededLeased,
            Self::PerUse | Self::PerUseInvalidated => List::PerUse,
            Self::Parked => List::Parked,
            Self::Deregistering => List::Deregistering,
        })
    }

    /// Its list and its index outside of the cache's, looked up.
    #[inline]
    pub(super) const fn stands(self) -> (Option<List>, Option<Outside>) {
        STANDS[self as usize]
    }

    /// Whether a change concerns it although it is not in the cache's index.
    pub(crate) const fn is_outside_and_valid(self) -> bool {
        matches!(self.outside(), Some(Outside::Valid))
    }

    /// The index in which a region of this state stands: what is registered is in the cache's, in one of
    /// these, or, as long as it is being deregistered, in a list that is never long.
    #[inline]
    pub(super) const fn outside(self) -> Option<Outside> {
        match self {
            Self::Superseded | Self::SupersededLeased | Self::PerUse => Some(Outside::Valid),
            Self::Invalidated
            | Self::InvalidatedLeased
            | Self::PerUseInvalidated
            | Self::Parked => Some(Outside::Other),
            _ => None,
        }
    }

    /// The states that may follow this one.
    pub(super) const fn successors(self) -> &'static [Self] {
        use State::{
            Deregistering, Evictable, Examined, Free, Invalidated, InvalidatedLeased, Main,
            MainClosed, MainLeased, Parked, PerUse, PerUseInvalidated, Small, SmallClosed,
            Superseded, SupersededLeased,
        };
        match self {
            Free => &[Small, SmallClosed, Main, MainClosed, PerUse, PerUseInvalidated],
            Small => &[Main, SmallClosed, Examined, Invalidated, Superseded],
            Main => &[MainClosed, Examined, Invalidated, Superseded],
            MainLeased => &[Main, MainClosed, Examined, Invalidated, Superseded],
            SmallClosed => &[Small, MainClosed, Examined, Invalidated, Superseded, Parked],
            MainClosed => &[Main, Examined, Invalidated, Superseded, Parked],
            Examined => &[
                Main,
                MainLeased,
                MainClosed,
                Evictable,
                Invalidated,
                Superseded,
                Parked,
                Deregistering,
            ],
            Evictable => &[Main, Invalidated, Superseded, Deregistering],
            Invalidated => &[InvalidatedLeased, Parked, Deregistering],
            InvalidatedLeased => &[Invalidated, Parked, Deregistering],
            Superseded => &[SupersededLeased, Invalidated, Parked, Deregistering],
            SupersededLeased => &[Superseded, InvalidatedLeased, Parked, Deregistering],
            PerUse => &[PerUseInvalidated, Parked, Deregistering],
            PerUseInvalidated => &[Parked, Deregistering],
            Parked => &[
                Small,
                SmallClosed,
                Main,
                MainClosed,
                PerUse,
                PerUseInvalidated,
                Invalidated,
                Deregistering,
            ],
            Deregistering => &[Free, Invalidated],
        }
    }

    /// Whether `next` may follow.
    pub(super) fn may_become(self, next: Self) -> bool {
        self.successors().contains(&next)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_state_survives_its_word() {
        for state in State::ALL {
            for terms in [0, 0xff00_u64] {
                assert_eq!(State::from_bits(terms | u64::from(state as u8)), state);
            }
        }
    }

    /// Hits find a region in three states, and in two of them the end of a lease takes no lock.
    #[test]
    fn what_is_live_and_leased_by_hits_alone_is_quiet() {
        let quiet = State::ALL.into_iter().filter(|&state| state as u8 & QUIET != 0);
        assert_eq!(quiet.collect::<Vec<_>>(), [State::Small, State::Main]);
        let live = State::ALL.into_iter().filter(|state| state.is_live());
        assert_eq!(live.collect::<Vec<_>>(), [State::Small, State::Main, State::MainLeased]);
    }

    #[test]
    fn what_is_not_free_stands_in_a_list_and_no_list_is_without_a_state() {
        let lists = State::ALL.map(State::list);
        assert!(
            State::ALL.iter().zip(lists).all(|(&it, list)| list.is_none() == (it == State::Free))
        );
        assert!(List::ALL.into_iter().all(|list| lists.contains(&Some(list))));
    }

    #[test]
    fn what_a_change_or_a_scan_has_marked_is_known_by_its_state() {
        let of = |is: fn(State) -> bool| State::ALL.into_iter().filter(move |&state| is(state));
        let invalidated: Vec<_> = of(State::is_invalidated).collect();
        let gone = [State::Invalidated, State::InvalidatedLeased, State::PerUseInvalidated];
        assert_eq!(invalidated, gone);
        let awaiting: Vec<_> = of(State::awaits_scan).collect();
        let scanned = [State::Examined, State::InvalidatedLeased, State::SupersededLeased];
        assert_eq!(awaiting, scanned);
    }

    /// A change looks for the first three outside of the cache's index, and for the others nowhere.
    #[test]
    fn what_stands_outside_is_concerned_by_changes_or_waits() {
        let of = |outside| State::ALL.into_iter().filter(move |state| state.outside() == outside);
        let valid: Vec<_> = of(Some(Outside::Valid)).collect();
        assert_eq!(valid, [State::Superseded, State::SupersededLeased, State::PerUse]);
        assert!(State::ALL.iter().all(|it| it.is_outside_and_valid() == valid.contains(it)));
        let other: Vec<_> = of(Some(Outside::Other)).collect();
        let waits =
            [State::Invalidated, State::InvalidatedLeased, State::PerUseInvalidated, State::Parked];
        assert_eq!(other, waits);
        // Whatever is registered a walk meets: in an index, or among those that are being deregistered.
        let nowhere =
            State::ALL.into_iter().filter(|it| !it.is_indexed() && it.outside().is_none());
        let nowhere: Vec<_> = nowhere.collect();
        assert_eq!(nowhere, [State::Free, State::Deregistering]);
    }

    /// Every pair of states: what the table allows, and what it must never allow.
    #[test]
    fn every_move_is_drawn_or_refused() {
        let pairs = || State::ALL.into_iter().flat_map(|from| State::ALL.map(|to| (from, to)));
        for (from, to) in pairs().filter(|&(from, to)| from.may_become(to)) {
            assert_ne!(from, to);
            // What is being deregistered was made unfindable before.
            assert!(to != State::Deregistering || !from.is_live(), "{from:?}");
            // A place is free only behind its deregistration.
            assert!(to != State::Free || from == State::Deregistering, "{from:?}");
            // What is set aside, dead or registered for one use is never found again.
            let gone = !from.is_indexed() && !matches!(from, State::Free | State::Parked);
            assert!(!(gone && to.is_live()), "{from:?} to {to:?}");
            // What waits for a scan is found by no hit while that goes on.
            assert!(!to.awaits_scan() || !to.is_live(), "{to:?}");
            // The eviction list is entered behind a scan alone, and left when it is leased.
            assert!(to != State::Evictable || from == State::Examined, "{from:?}");
        }
        assert_eq!(pairs().filter(|&(from, to)| from.may_become(to)).count(), 72);
        assert!(!State::Evictable.may_become(State::Small), "a lease makes it a main region");
    }

    #[test]
    fn every_state_is_reached_and_left() {
        let mut reached = vec![State::Free];
        let mut next = 0;
        while let Some(&state) = reached.get(next) {
            next += 1;
            for &to in state.successors() {
                if !reached.contains(&to) {
                    reached.push(to);
                }
            }
        }
        assert_eq!(reached.len(), State::ALL.len());
        assert!(State::ALL.iter().all(|state| !state.successors().is_empty()));
    }
}
