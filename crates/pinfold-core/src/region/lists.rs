//! Lists of places: what is evicted next, what waits to be deregistered.
//!
//! A place is in at most one list, so lists are chains through one table of links: joining,
//! leaving and moving on are a few stores each and allocate nothing. The table costs 8 bytes a
//! place. All of it belongs to the holder of the writer's lock.
//!
//! In which list a place stands follows from its region's state, and is written nowhere else:
//! [`transit`](Lists::transit) changes both.

use super::Region;
use super::state::{List, Outside, State};
use crate::AddressRange;
use crate::chunked::{OTHERS, in_block};
use crate::hazard::{Idle, Unpublished};
use crate::range_index::{Cursor, RangeIndex};
use std::iter;

/// No place: one more than the highest number that a place can have.
const NONE: u32 = u32::MAX;
/// A place's neighbours.
#[derive(Clone, Copy)]
pub(crate) struct Link {
    ahead: u32,
    behind: u32,
}

/// Deregistrations in the order in which they began.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(crate) struct DepartureCount(u64);

/// Links made at once.
const CHUNK: usize = 1 << in_block::<Link>().ilog2();

/// Room for a longer list of chunks. It is to be freed where no lock is held.
pub(crate) type Room = Vec<Box<[Link; CHUNK]>>;

/// The links by place, two steps away: each change of a list looks at three of them.
#[derive(Default)]
struct Links {
    chunks: Room,
}

impl Links {
    /// How many chunks a list has room for that is to have one for place `number`.
    const fn room_for(number: usize) -> usize {
        let needed = (number / CHUNK + 1).next_power_of_two();
        if needed < 64 { 64 } else { needed }
    }

    fn move_to(&mut self, room: &mut Room) {
        if room.capacity() > self.chunks.capacity() {
            room.append(&mut self.chunks);
            std::mem::swap(room, &mut self.chunks);
        }
    }

    fn make(&mut self, number: usize) {
        if self.chunks.len() <= number / CHUNK {
            self.chunks.reserve_exact(Self::room_for(number) - self.chunks.len());
            let fresh = || Box::new([Link { ahead: NONE, behind: NONE }; CHUNK]);
            self.chunks.resize_with(number / CHUNK + 1, fresh);
        }
    }
}

/// The ends of a list.
#[derive(Clone, Copy)]
struct Ends {
    first: u32,
    last: u32,
    length: usize,
}

/// All lists.
pub(crate) struct Lists {
    links: Links,
    ends: [Ends; List::ALL.len()],
    /// The place that became free last, from which on `behind` leads to the others.
    free: u32,
    /// By [`Outside`].
    outside: [RangeIndex; 2],
    /// How many deregistrations were begun.
    departures: DepartureCount,
    /// How many deregistrations were not made.
    handed_back: u64,
}

impl Lists {
    pub(crate) fn new() -> Self {
        let ends = Ends { first: NONE, last: NONE, length: 0 };
        let outside = [RangeIndex::new(), RangeIndex::new()];
        Self {
            links: Links::default(),
            ends: [ends; List::ALL.len()],
            free: NONE,
            outside,
            departures: DepartureCount::default(),
            handed_back: 0,
        }
    }

    /// Makes sure that place `number` has a link.
    pub(crate) fn make(&mut self, number: u32) {
        self.links.make(number as usize);
    }

    /// Room for the links of the places from `next` on, if those will take a longer list of chunks than there is: too long
    /// to be made while the writer's lock is held.
    #[inline]
    pub(crate) fn room_for(next: usize) -> Room {
        // Mostly it is the same one.
        if next / CHUNK == (next + OTHERS) / CHUNK {
            return Room::new();
        }
        let (now, later) = (Links::room_for(next), Links::room_for(next + OTHERS));
        if later > now { Vec::with_capacity(later) } else { Vec::new() }
    }

    /// Moves the links there, if there is more room than they have.
    pub(crate) fn move_links(&mut self, room: &mut Room) {
        self.links.move_to(room);
    }

    #[inline]
    fn link(&self, number: u32) -> &Link {
        &self.links.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    #[inline]
    fn link_mut(&mut self, number: u32) -> &mut Link {
        &mut self.links.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    #[inline]
    pub(crate) fn len(&self, list: List) -> usize {
        self.ends[list as usize].length
    }

    /// The place that has been in `list` longest.
    #[inline]
    pub(crate) fn first(&self, list: List) -> Option<u32> {
        some(self.ends[list as usize].first)
    }

    /// The place that came into its list after `number`.
    #[inline]
    pub(crate) fn after(&self, number: u32) -> Option<u32> {
        some(self.link(number).behind)
    }

    /// All of `list`, first come first.
    pub(crate) fn iter(&self, list: List) -> impl Iterator<Item = u32> {
        iter::successors(self.first(list), |&number| self.after(number))
    }

    /// Changes the state of `region`, and its list with it: the one function that does. The
    /// writer's lock is held. The region stays where it is if its list is the same.
    fn transit<H: Copy>(&mut self, region: &Region<H>, to: State) {
        let from = region.state();
        debug_assert!(from.may_become(to), "{from:?} to {to:?}");
        let ((old, outside_before), (new, outside)) = (from.stands(), to.stands());
        if old != new {
            old.into_iter().for_each(|list| self.remove(list, region.number));
            new.into_iter().for_each(|list| self.append(list, region.number));
        }
        if outside_before != outside {
            self.move_outside(region, outside_before, outside);
        }
        region.set_state(to);
    }

    /// Its range stays the same as long as it stands in an index.
    fn move_outside<H: Copy>(
        &mut self,
        region: &Region<H>,
        from: Option<Outside>,
        to: Option<Outside>,
    ) {
        let Some(range) = region.range() else { return };
        if let Some(from) = from {
            self.outside[from as usize].remove(range, region.number);
        }
        if let Some(to) = to {
            self.outside[to as usize].insert(range, region.number);
        }
    }

    /// Whether there is any such region at all.
    #[inline]
    pub(crate) fn has_any(&self, outside: Outside) -> bool {
        !self.outside[outside as usize].is_empty()
    }

    /// The places of regions of an index that may touch `range`, from `cursor` on, each with the cursor
    /// behind it.
    pub(crate) fn near_from(
        &self,
        outside: Outside,
        range: AddressRange,
        cursor: Cursor,
    ) -> impl Iterator<Item = (Cursor, u32)> {
        self.outside[outside as usize].near_from(range, cursor)
    }

    /// A region that was just registered, or renewed, and put into the index: found by hits from
    /// now on, or closed.
    pub(crate) fn publish<H: Copy>(&mut self, region: &Region<H>, used_before: bool, closed: bool) {
        self.transit(region, in_order(used_before, closed));
    }

    /// A region of the order of eviction turned out to be in use: to the end of the main list. Hits
    /// find it as before.
    pub(crate) fn promote<H: Copy>(&mut self, region: &Region<H>) {
        match region.state() {
            State::Main | State::MainClosed => {
                self.remove(List::Main, region.number);
                self.append(List::Main, region.number);
            }
            State::SmallClosed => self.transit(region, State::MainClosed),
            _ => self.transit(region, State::Main),
        }
    }

    /// The same for one that was examined, of which nothing is known.
    pub(crate) fn keep_examined<H: Copy>(&mut self, region: &Region<H>, closed: bool) {
        self.transit(region, in_order(true, closed));
    }

    /// The same for one that was examined and found leased: it is not examined again before a lease
    /// of it has ended, unless it is `closed`, where nothing says so.
    pub(crate) fn await_room<H: Copy>(&mut self, region: &Region<H>, closed: bool) {
        self.transit(region, if closed { State::MainClosed } else { State::MainLeased });
    }

    /// Hits do not find the region any more, in whatever place of the order it stands.
    pub(crate) fn close<H: Copy>(&mut self, region: &Region<H>) {
        match region.state() {
            State::Small => self.transit(region, State::SmallClosed),
            State::Main | State::MainLeased | State::Examined => {
                self.transit(region, State::MainClosed);
            }
            _ => {}
        }
    }

    /// Takes that back. Nothing happens to a region that is not closed.
    pub(crate) fn open<H: Copy>(&mut self, region: &Region<H>) {
        match region.state() {
            State::SmallClosed => self.transit(region, State::Small),
            State::MainClosed => self.transit(region, State::Main),
            _ => {}
        }
    }

    /// Takes a region out of the order of eviction, for a scan: the one that is next, or under way. Hits
    /// do not find it any more.
    pub(crate) fn examine<'c, H: Copy>(
        &mut self,
        region: &'c Region<H>,
    ) -> Option<Unpublished<'c, Region<H>>> {
        self.transit(region, State::Examined);
        Unpublished::of(region)
    }

    /// The next to be evicted. The proof is kept by the state: nothing leases a region in it without
    /// taking it out of it.
    pub(crate) fn make_evictable<H: Copy>(&mut self, idle: Idle<'_, Region<H>>) {
        self.transit(idle.into_item(), State::Evictable);
    }

    /// The proof that was kept by the state of a region that is next to be evicted.
    pub(crate) fn evictable<'c, H: Copy>(region: &'c Region<H>) -> Option<Idle<'c, Region<H>>> {
        (region.state() == State::Evictable).then(|| Idle::kept_by_state(region))
    }

    /// The proof that was kept by the state of a region in the hands of a suspension.
    pub(crate) fn parked<'c, H: Copy>(region: &'c Region<H>) -> Option<Idle<'c, Region<H>>> {
        (region.state() == State::Parked).then(|| Idle::kept_by_state(region))
    }

    /// The mapping of a region changed.
    pub(crate) fn invalidate<H: Copy>(&mut self, region: &Region<H>) {
        let to = match region.state() {
            State::PerUse => State::PerUseInvalidated,
            State::SupersededLeased => State::InvalidatedLeased,
            _ => State::Invalidated,
        };
        self.transit(region, to);
    }

    /// A region is not to be found any more, though its pages are right.
    pub(crate) fn supersede<H: Copy>(&mut self, region: &Region<H>) {
        self.transit(region, State::Superseded);
    }

    /// The ends of leases of a region that is not to be found are awaited from now on, for a scan: the one
    /// that is next. Where that finds none, it is over; else it stays so until one ends.
    pub(crate) fn await_end<'c, H: Copy>(
        &mut self,
        region: &'c Region<H>,
    ) -> Option<Unpublished<'c, Region<H>>> {
        let superseded = region.state() == State::Superseded;
        let to = if superseded { State::SupersededLeased } else { State::InvalidatedLeased };
        self.transit(region, to);
        Unpublished::of(region)
    }

    /// A lease of a region ended: it is to be looked at once more, if its end was awaited. True if
    /// that is the reclaimer's to do. A region of which a part is suspended stays `closed`.
    pub(crate) fn look_again<H: Copy>(&mut self, region: &Region<H>, closed: bool) -> bool {
        match region.state() {
            // By the next that needs room.
            State::MainLeased | State::Examined => {
                self.transit(region, in_order(true, closed));
                return false;
            }
            State::InvalidatedLeased => self.transit(region, State::Invalidated),
            State::SupersededLeased => self.transit(region, State::Superseded),
            _ => return false,
        }
        true
    }

    /// How many regions there are of which the end of a lease is awaited: found leased, or being scanned.
    pub(crate) fn awaited(&self) -> usize {
        [List::MainLeased, List::Examined, List::InvalidatedLeased, List::SupersededLeased]
            .into_iter()
            .map(|list| self.len(list))
            .sum()
    }

    /// A registration for one lease, which may be wrong already.
    pub(crate) fn keep_per_use<H: Copy>(&mut self, region: &Region<H>, invalidated: bool) {
        self.transit(region, if invalidated { State::PerUseInvalidated } else { State::PerUse });
    }

    /// A suspension takes over a region whose leases were handed to it, all of them.
    pub(crate) fn park<H: Copy>(&mut self, idle: Idle<'_, Region<H>>) {
        self.transit(idle.into_item(), State::Parked);
    }

    /// Begins a deregistration, for which the proof is used up.
    pub(crate) fn deregister<'c, H: Copy>(
        &mut self,
        idle: Idle<'c, Region<H>>,
    ) -> Deregistering<'c, H> {
        let region = idle.into_item();
        self.transit(region, State::Deregistering);
        self.departures.0 += 1;
        region.set_mark(self.departures.0);
        Deregistering(region)
    }

    /// How many deregistrations were begun so far.
    pub(crate) const fn departures(&self) -> DepartureCount {
        self.departures
    }

    /// Whether one of the first `count` deregistrations is under way still; `place` finds a region by its number.
    pub(crate) fn are_departing<'c, H: Copy + 'c>(
        &self,
        count: DepartureCount,
        place: impl Fn(u32) -> Option<&'c Region<H>>,
    ) -> bool {
        // They stand in the order in which they began.
        let oldest = self.first(List::Deregistering).and_then(place);
        oldest.is_some_and(|region| region.mark() <= count.0)
    }

    /// The registration is gone, and its place may be filled again.
    pub(crate) fn free<H: Copy>(&mut self, gone: Deregistering<'_, H>) {
        let region = gone.into_region();
        self.transit(region, State::Free);
        self.give_place(region.number);
    }

    /// A place that was taken and not filled may be taken again.
    pub(crate) fn give_place(&mut self, number: u32) {
        self.link_mut(number).behind = std::mem::replace(&mut self.free, number);
    }

    /// A place that is to be filled: the one that became free last. `None` if none is.
    pub(crate) fn take_place(&mut self) -> Option<u32> {
        let number = some(self.free)?;
        self.free = self.link(number).behind;
        Some(number)
    }

    /// Nothing was done about a deregistration: the region is to be looked at once more.
    pub(crate) fn hand_back<H: Copy>(&mut self, undone: Deregistering<'_, H>) {
        self.handed_back += 1;
        self.transit(undone.into_region(), State::Invalidated);
    }

    /// How many deregistrations were not made so far: each took a region back to where it was before.
    pub(crate) const fn handed_back(&self) -> u64 {
        self.handed_back
    }

    /// Puts place `number`, which is in no list, last in `list`.
    #[inline]
    fn append(&mut self, list: List, number: u32) {
        let ends = &mut self.ends[list as usize];
        let last = std::mem::replace(&mut ends.last, number);
        ends.length += 1;
        match last {
            NONE => ends.first = number,
            _ => self.link_mut(last).behind = number,
        }
        let link = self.link_mut(number);
        (link.ahead, link.behind) = (last, NONE);
    }

    /// Takes place `number` out of `list`, in which it stands.
    #[inline]
    fn remove(&mut self, list: List, number: u32) {
        let Link { ahead, behind } = *self.link(number);
        match ahead {
            NONE => self.ends[list as usize].first = behind,
            _ => self.link_mut(ahead).behind = behind,
        }
        match behind {
            NONE => self.ends[list as usize].last = ahead,
            _ => self.link_mut(behind).ahead = ahead,
        }
        self.ends[list as usize].length -= 1;
    }
}

/// A region whose deregistration is the holder's duty: no lease is left, hits cannot find it, and
/// no other thread holds this duty.
#[must_use = "what is dropped here stays registered until the cache is dropped"]
pub(crate) struct Deregistering<'c, H>(&'c Region<H>);

impl<'c, H> Deregistering<'c, H> {
    pub(crate) const fn region(&self) -> &'c Region<H> {
        self.0
    }

    const fn into_region(self) -> &'c Region<H> {
        self.0
    }
}

/// The state of a region in the order of eviction.
const fn in_order(used_before: bool, closed: bool) -> State {
    match (used_before, closed) {
        (false, false) => State::Small,
        (false, true) => State::SmallClosed,
        (true, false) => State::Main,
        (true, true) => State::MainClosed,
    }
}

const fn some(number: u32) -> Option<u32> {
    if number == NONE { None } else { Some(number) }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const PLACES: u32 = 40;

    fn lists() -> (Lists, Vec<Region<u8>>) {
        let mut lists = Lists::new();
        (0..PLACES).for_each(|number| lists.make(number));
        (lists, (0..PLACES).map(Region::new).collect())
    }

    /// Random legal moves next to plain queues: membership follows from the state.
    #[test]
    fn agrees_with_plain_queues() {
        let (mut lists, regions) = lists();
        let mut model: [VecDeque<u32>; List::ALL.len()] = std::array::from_fn(|_| VecDeque::new());
        let mut random = 0x5eed_u64;
        let mut next = |bound: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(random >> 33).unwrap() % bound
        };
        for _ in 0..if cfg!(miri) { 200 } else { 20_000 } {
            let region = &regions[next(regions.len())];
            let successors = region.state().successors();
            let (from, to) = (region.state(), successors[next(successors.len())]);
            lists.transit(region, to);
            assert_eq!(region.state(), to);
            if from.list() != to.list() {
                model.iter_mut().for_each(|list| list.retain(|&other| other != region.number));
                to.list().iter().for_each(|&list| model[list as usize].push_back(region.number));
            }
            for list in List::ALL {
                assert!(lists.iter(list).eq(model[list as usize].iter().copied()));
                assert_eq!(lists.len(list), model[list as usize].len());
            }
        }
    }

    #[test]
    fn links_stay_what_they_are_as_their_list_grows() {
        let mut lists = Lists::new();
        let first = 64 * CHUNK;
        assert_eq!(Lists::room_for(0).capacity(), 0, "most gets make none");
        let numbers = 0..u32::try_from(3 * first).unwrap();
        for number in numbers.clone() {
            let mut room = Lists::room_for(number as usize);
            assert_eq!(
                room.capacity() > 0,
                [first, 2 * first]
                    .iter()
                    .any(|&end| { (end - OTHERS..end).contains(&(number as usize)) })
            );
            lists.move_links(&mut room);
            assert!(room.is_empty());
            lists.make(number);
            lists.give_place(number);
        }
        assert!(numbers.rev().all(|number| lists.take_place() == Some(number)));
        assert_eq!(lists.take_place(), None);
    }

    /// Every pair of states: a move that is not drawn is refused.
    #[test]
    #[cfg(debug_assertions)]
    #[cfg_attr(
        miri,
        ignore = "to interpret so many panics takes half a minute, and nothing here is unsafe"
    )]
    fn a_move_that_is_not_drawn_is_refused() {
        for from in State::ALL {
            for to in State::ALL {
                let (mut lists, regions) = lists();
                regions[3].set_state(from);
                from.list().iter().for_each(|&list| lists.append(list, 3));
                let moves = std::panic::AssertUnwindSafe(|| lists.transit(&regions[3], to));
                assert_eq!(std::panic::catch_unwind(moves).is_ok(), from.may_become(to));
            }
        }
    }

    #[test]
    fn what_was_closed_is_opened_as_it_was() {
        let (mut lists, regions) = lists();
        for (region, used_before) in [(&regions[0], false), (&regions[1], true)] {
            lists.publish(region, used_before, false);
            let before = region.state();
            lists.close(region);
            assert!(!region.is_live());
            lists.open(region);
            assert_eq!(region.state(), before);
        }
    }

    /// Hits do not find a region of which a part is suspended, also when it turns out to be in use.
    #[test]
    fn a_closed_region_that_is_in_use_stays_closed() {
        for used_before in [false, true] {
            let (mut lists, regions) = lists();
            lists.publish(&regions[0], used_before, true);
            lists.promote(&regions[0]);
            assert_eq!(regions[0].state(), State::MainClosed);
        }
    }

    /// A place whose region is gone and that is filled and cleared again is in another deregistration.
    #[test]
    fn a_place_that_is_used_again_is_not_waited_for() {
        let (mut lists, regions) = lists();
        let place = |number: u32| regions.get(number as usize);
        let begin = |lists: &mut Lists, number: usize| {
            lists.keep_per_use(&regions[number], false);
            lists.deregister(Idle::of_a_dropped_cache(&regions[number]))
        };
        let (first, second) = (begin(&mut lists, 1), begin(&mut lists, 2));
        let count = lists.departures();
        lists.free(first);
        let _again = begin(&mut lists, 1);
        assert!(lists.are_departing(count, place), "the second is under way");
        lists.free(second);
        assert!(!lists.are_departing(count, place));
        assert!(lists.are_departing(lists.departures(), place));
    }

    /// The region itself, whose handle may take 16 bytes, its link, and its entry in one block of the index.
    #[test]
    fn a_region_takes_80_bytes() {
        assert_eq!(size_of::<Region<[u64; 2]>>() + size_of::<Link>() + size_of::<u64>(), 80);
    }
}
