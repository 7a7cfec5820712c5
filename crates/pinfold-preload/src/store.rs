//! The registrations that are watched: those that the program has, and those that it gave back and
//! may get again. A data structure without a lock, a device or a monitor of its own.
//!
//! It keeps no more than there is memory for (`heap`): what grows with the number of registrations has its room before anything
//! is noted, and lists that are taken out are as long as there is memory for.
//!
//! Each registration is libibverbs' own, and one handle's: a program never gets one that another
//! handle of it has. Only the very same bytes, rights and domain find an idle one.

use crate::device::Opening;
use crate::heap::secure_room;
use crate::reasons::Reason;
use libc::c_uint;
use pinfold::AddressRange;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};

/// A protection domain, told from one that had its address before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct DomainName {
    /// Of its `ibv_pd`.
    pub(crate) address: usize,
    /// Of its `ibv_context`.
    pub(crate) device: usize,
    /// The kernel's number.
    pub(crate) number: u32,
}

/// What a registration was asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Key {
    pub(crate) start: usize,
    pub(crate) length: usize,
    pub(crate) domain: DomainName,
    /// As libibverbs has them, hints included.
    pub(crate) flags: c_uint,
}

impl Key {
    /// `None` for no bytes, or for bytes that no memory has.
    pub(crate) fn range(&self) -> Option<AddressRange> {
        AddressRange::new(self.start, self.length).ok()
    }
}

/// libibverbs' registration, told from one that had its address before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Region {
    /// Of its `ibv_mr`.
    pub(crate) address: usize,
    /// The kernel's number.
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
}

/// What stands in a handle that the program gives back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HandleFields {
    pub(crate) region: Region,
    pub(crate) start: usize,
    pub(crate) length: usize,
    /// The address of the `ibv_pd`.
    pub(crate) domain: usize,
}

/// A registration out of the store, to be deregistered by its holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) struct Leaving {
    pub(crate) key: Key,
    pub(crate) region: Region,
    /// Of its device, when it was registered.
    pub(crate) opening: Opening,
}

/// Which registrations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scope {
    Everything,
    /// By the address of the `ibv_context`.
    Device(usize),
    /// The kernel's, whichever `ibv_pd` it was registered by: it may have several (`ibv_import_pd`, parent domains).
    Domain(DomainName),
}

impl Scope {
    pub(crate) fn holds(self, domain: &DomainName) -> bool {
        match self {
            Self::Everything => true,
            Self::Device(address) => domain.device == address,
            Self::Domain(DomainName { device, number, .. }) => {
                (domain.device, domain.number) == (device, number)
            }
        }
    }
}

/// What became of a registration that the program gave back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// It is not in the store: libibverbs ends it.
    Foreign,
    /// It stays, idle.
    Kept,
    /// The program has given it back before.
    Twice,
}

/// The most to keep idle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limit {
    pub(crate) bytes: usize,
    pub(crate) regions: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Asked of libibverbs at this moment.
    Registering,
    /// The program has it.
    Live,
    /// The program gave it back; a number for when.
    Idle(u64),
    /// Idle, and its bytes have changed.
    Dead,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    key: Key,
    region: Region,
    opening: Opening,
    phase: Phase,
    /// No change of its bytes has been seen since before it was registered.
    is_valid: bool,
    /// It was found at least once.
    was_found: bool,
}

impl Record {
    /// Whether the handle is this registration's. libibverbs and the kernel may use its address and its numbers again once
    /// it was deregistered by another route.
    fn has(&self, handle: &HandleFields) -> bool {
        let &HandleFields { region, start, length, domain } = handle;
        let Key { start: own_start, length: own_length, domain: own_domain, .. } = self.key;
        self.region == region
            && (start, length, domain) == (own_start, own_length, own_domain.address)
    }

    fn touches(&self, range: AddressRange) -> bool {
        self.key.range().is_some_and(|bytes| bytes.overlaps(&range))
    }

    fn is_idle_in(&self, scope: Scope) -> bool {
        matches!(self.phase, Phase::Idle(_) | Phase::Dead) && scope.holds(&self.key.domain)
    }
}

/// A place in [`Store::records`].
type Place = u32;

/// See the module.
#[derive(Debug)]
pub(crate) struct Store {
    limit: Limit,
    records: Vec<Option<Record>>,
    free: Vec<Place>,
    by_address: HashMap<usize, Place, BuildHasherDefault<DefaultHasher>>,
    /// Idle ones by what they serve, the number of [`Phase::Idle`] behind.
    idle: BTreeMap<(Key, u64), Place>,
    /// Idle ones in the order in which they were given back.
    order: BTreeMap<u64, Place>,
    /// All by the address of their first byte, in classes by length: class `n` has those of `2^n` to
    /// `2^(n+1) - 1` bytes. So those that touch a range lie in one stretch of each class.
    classes: Vec<BTreeSet<(usize, Place)>>,
    dead: Vec<Place>,
    /// Bytes of what is idle or dead.
    idle_bytes: usize,
    next_number: u64,
}

impl Store {
    pub(crate) fn new(limit: Limit) -> Self {
        Self {
            limit,
            records: Vec::new(),
            free: Vec::new(),
            by_address: HashMap::default(),
            idle: BTreeMap::new(),
            order: BTreeMap::new(),
            classes: vec![BTreeSet::new(); usize::BITS as usize],
            dead: Vec::new(),
            idle_bytes: 0,
            next_number: 0,
        }
    }

    /// Whether such a registration can be kept at all.
    pub(crate) fn has_room_for(&self, key: &Key) -> bool {
        footprint(key) <= self.limit.bytes
    }

    /// Nothing becomes idle any more but to be [taken](Self::take_excess) at once.
    pub(crate) fn keep_no_more(&mut self) {
        self.limit = Limit { bytes: 0, regions: 0 };
    }

    /// How many are idle, or were when their bytes changed and are not deregistered yet.
    #[cfg(test)]
    pub(crate) fn unused(&self) -> usize {
        self.order.len() + self.dead.len()
    }

    /// Notes a registration that is about to be asked of libibverbs: changes from now on count. `None` without memory.
    pub(crate) fn begin(&mut self, key: Key, opening: Opening) -> Option<u32> {
        if !secure_room() {
            return None;
        }
        let place = self.free_place()?;
        let record = Record {
            key,
            region: Region { address: 0, handle: 0, lkey: 0 },
            opening,
            phase: Phase::Registering,
            is_valid: true,
            was_found: false,
        };
        *self.records.get_mut(place as usize)? = Some(record);
        self.classes[class_of(key.length)].insert((key.start, place));
        Some(place)
    }

    /// The lists of places have room for all.
    fn free_place(&mut self) -> Option<Place> {
        if self.free.is_empty() {
            let place = Place::try_from(self.records.len()).ok()?;
            self.records.try_reserve(1).ok()?;
            for places in [&mut self.free, &mut self.dead] {
                places.try_reserve(self.records.len() + 1 - places.len()).ok()?;
            }
            self.records.push(None);
            self.free.push(place);
        }
        self.free.pop()
    }

    /// What was begun is not to be kept, or failed.
    pub(crate) fn abandon(&mut self, place: u32) {
        self.remove(place);
    }

    /// What was begun is registered.
    ///
    /// # Errors
    ///
    /// It cannot be kept, because its bytes have changed meanwhile or there is no memory; then the store knows nothing of it.
    pub(crate) fn land(&mut self, place: u32, region: Region) -> Result<(), Reason> {
        self.note_fresh(region.address);
        let has_room = self.by_address.try_reserve(1).is_ok();
        let record = self.record_mut(place).ok_or(Reason::Fault)?;
        record.region = region;
        record.phase = Phase::Live;
        let is_valid = record.is_valid;
        if !is_valid || !has_room {
            self.remove(place);
            return Err(if is_valid { Reason::NoRoom } else { Reason::Changing });
        }
        self.by_address.insert(region.address, place);
        Ok(())
    }

    /// libibverbs has just made a registration with a handle at this address. What had the address before was deregistered
    /// by another route.
    pub(crate) fn note_fresh(&mut self, address: usize) {
        if let Some(&stale) = self.by_address.get(&address) {
            self.remove(stale);
        }
    }

    /// Whether there is an idle registration of exactly this.
    pub(crate) fn has_idle(&self, key: &Key) -> bool {
        self.idle.range((*key, 0)..=(*key, u64::MAX)).next().is_some()
    }

    /// An idle registration of exactly this, which is the program's from now on; and whether this is
    /// the first time that it is found.
    pub(crate) fn take(&mut self, key: &Key) -> Option<(Region, bool)> {
        let (_, &place) = self.idle.range((*key, 0)..=(*key, u64::MAX)).next_back()?;
        self.leave_order(place);
        let record = self.record_mut(place)?;
        record.phase = Phase::Live;
        let is_first = !std::mem::replace(&mut record.was_found, true);
        Some((record.region, is_first))
    }

    /// The program gives `handle` back.
    pub(crate) fn release(&mut self, handle: &HandleFields) -> End {
        let address = handle.region.address;
        let Some(&place) = self.by_address.get(&address) else { return End::Foreign };
        let Some(record) = self.record(place) else { return End::Foreign };
        match record.phase {
            Phase::Live if record.is_valid && record.has(handle) && secure_room() => {
                self.idle_now(place);
                End::Kept
            }
            Phase::Idle(_) | Phase::Dead => End::Twice,
            // Changed meanwhile; deregistered by another route, and this one has its address; or there is no memory.
            Phase::Live | Phase::Registering => {
                self.remove(place);
                End::Foreign
            }
        }
    }

    /// Whether a registration with this handle is known.
    pub(crate) fn has(&self, address: usize) -> bool {
        self.by_address.contains_key(&address)
    }

    /// Forgets a registration that the program has: libibverbs alone knows it from now on. False if it
    /// was not known.
    pub(crate) fn forget(&mut self, address: usize) -> bool {
        let place = self.by_address.get(&address).copied();
        let live = place
            .filter(|&place| self.record(place).is_some_and(|record| record.phase == Phase::Live));
        live.is_some_and(|place| self.remove(place).is_some())
    }

    /// Forgets whatever the program has in `scope`.
    pub(crate) fn forget_live(&mut self, scope: Scope) {
        self.forget_all(|record| record.phase == Phase::Live && scope.holds(&record.key.domain));
    }

    /// Forgets what is idle in `scope`, whether or not its bytes have changed.
    pub(crate) fn forget_idle(&mut self, scope: Scope) {
        self.forget_all(|record| record.is_idle_in(scope));
    }

    /// Forgets what is idle of these, whether or not its bytes have changed.
    pub(crate) fn forget_idle_if(&mut self, is_wanted: impl Fn(&Key, &Region) -> bool) {
        self.forget_all(|record| {
            record.is_idle_in(Scope::Everything) && is_wanted(&record.key, &record.region)
        });
    }

    fn forget_all(&mut self, is_wanted: impl Fn(&Record) -> bool) {
        let mut from = 0;
        while let Some(place) = self.next_place(&mut from, &is_wanted) {
            self.remove(place);
        }
    }

    /// No registration that touches `range` is found again. Calls `in_vain` for each idle one that
    /// never was; says how many it concerned.
    pub(crate) fn invalidate(&mut self, range: AddressRange, in_vain: &mut dyn FnMut(&Key)) -> u64 {
        let mut touched = 0;
        // Nothing else looks at them, and none goes from them.
        let classes = std::mem::take(&mut self.classes);
        for place in near(&classes, range) {
            let is_concerned = |record: &&mut Record| record.is_valid && record.touches(range);
            let Some(record) = self.record_mut(place).filter(is_concerned) else { continue };
            record.is_valid = false;
            touched += 1;
            let Record { key, phase, was_found, .. } = *record;
            if matches!(phase, Phase::Idle(_)) {
                self.leave_order(place);
                self.bury(place);
            }
            if !was_found {
                in_vain(&key);
            }
        }
        self.classes = classes;
        touched
    }

    /// Whether something that touches `range` could be found, or kept when it is given back.
    pub(crate) fn holds_valid(&self, range: AddressRange) -> bool {
        let is_concerned = |record: &Record| record.is_valid && record.touches(range);
        near(&self.classes, range).any(|place| self.record(place).is_some_and(is_concerned))
    }

    /// Those whose bytes have changed while they were idle, `count` at most.
    pub(crate) fn take_dead(&mut self, count: usize) -> Vec<Leaving> {
        self.take_all(count, |store| store.dead.last().copied())
    }

    pub(crate) fn dead(&self) -> usize {
        self.dead.len()
    }

    /// Whether some are idle in `scope`, whether or not their bytes have changed.
    pub(crate) fn has_idle_in(&self, scope: Scope) -> bool {
        self.records.iter().flatten().any(|record| record.is_idle_in(scope))
    }

    /// Of what is idle, whether or not its bytes have changed, the openings of its devices.
    pub(crate) fn idle_openings(&self) -> impl Iterator<Item = Opening> {
        let is_idle = |record: &&Record| record.is_idle_in(Scope::Everything);
        self.records.iter().flatten().filter(is_idle).map(|record| record.opening)
    }

    /// Those that are idle in `scope`, whether or not their bytes have changed.
    pub(crate) fn take_idle(&mut self, scope: Scope) -> Vec<Leaving> {
        let mut from = 0;
        self.take_all(usize::MAX, |store| {
            store.next_place(&mut from, &|record| record.is_idle_in(scope))
        })
    }

    /// What is idle beyond the limit: the dead, then those that were given back longest ago. Calls
    /// `in_vain` for each that was never found.
    pub(crate) fn take_excess(&mut self, in_vain: &mut dyn FnMut(&Key)) -> Vec<Leaving> {
        self.take_all(usize::MAX, |store| {
            let place = store.excess()?;
            let vain = store.record(place).filter(|record| record.is_valid && !record.was_found);
            vain.iter().for_each(|record| in_vain(&record.key));
            Some(place)
        })
    }

    /// The next to go, where more are idle than may be.
    fn excess(&self) -> Option<Place> {
        let is_over = self.idle_bytes > self.limit.bytes
            || self.order.len() + self.dead.len() > self.limit.regions;
        let oldest = || self.order.first_key_value().map(|(_, &place)| place);
        is_over.then(|| self.dead.last().copied().or_else(oldest))?
    }

    /// Takes out one after the other as `next` says, `count` at most, and no more than the list has memory for.
    fn take_all(
        &mut self,
        count: usize,
        mut next: impl FnMut(&Self) -> Option<Place>,
    ) -> Vec<Leaving> {
        let mut taken = Vec::new();
        while taken.len() < count && taken.try_reserve(1).is_ok() {
            let Some(leaving) = next(self).and_then(|place| self.remove(place)) else { break };
            taken.push(leaving);
        }
        taken
    }

    /// The first that is wanted `from` there on, which goes on behind it.
    fn next_place(&self, from: &mut usize, is_wanted: &dyn Fn(&Record) -> bool) -> Option<Place> {
        let rest = self.records.get(*from..)?;
        let is_wanted = |record: &Option<Record>| record.as_ref().is_some_and(is_wanted);
        let found = *from + rest.iter().position(is_wanted)?;
        *from = found + 1;
        Place::try_from(found).ok()
    }

    fn record(&self, place: Place) -> Option<&Record> {
        self.records.get(place as usize)?.as_ref()
    }

    fn record_mut(&mut self, place: Place) -> Option<&mut Record> {
        self.records.get_mut(place as usize)?.as_mut()
    }

    fn idle_now(&mut self, place: Place) {
        let number = self.next_number;
        self.next_number += 1;
        let Some(record) = self.record_mut(place) else { return };
        record.phase = Phase::Idle(number);
        let key = record.key;
        self.idle.insert((key, number), place);
        self.order.insert(number, place);
        self.idle_bytes += footprint(&key);
    }

    /// Takes an idle one out of the order, and from among those that can be found.
    fn leave_order(&mut self, place: Place) {
        let Some(&Record { key, phase: Phase::Idle(number), .. }) = self.record(place) else {
            return;
        };
        self.idle.remove(&(key, number));
        self.order.remove(&number);
        self.idle_bytes -= footprint(&key);
    }

    fn bury(&mut self, place: Place) {
        let Some(record) = self.record_mut(place) else { return };
        record.phase = Phase::Dead;
        self.idle_bytes += footprint(&record.key);
        self.dead.push(place);
    }

    fn remove(&mut self, place: Place) -> Option<Leaving> {
        self.leave_order(place);
        let Record { key, region, opening, phase, .. } =
            self.records.get_mut(place as usize)?.take()?;
        if phase == Phase::Dead {
            self.idle_bytes -= footprint(&key);
            // Mostly the last, or the list is empty already.
            if let Some(position) = self.dead.iter().rposition(|&other| other == place) {
                self.dead.swap_remove(position);
            }
        }
        self.classes[class_of(key.length)].remove(&(key.start, place));
        if self.by_address.get(&region.address) == Some(&place) {
            self.by_address.remove(&region.address);
        }
        self.free.push(place);
        Some(Leaving { key, region, opening })
    }
}

/// Those that may touch `range`, and all that do.
fn near(classes: &[BTreeSet<(usize, Place)>], range: AddressRange) -> impl Iterator<Item = Place> {
    (0..).zip(classes).filter(|(_, starts)| !starts.is_empty()).flat_map(move |(class, starts)| {
        let longest = usize::MAX.checked_shr(usize::BITS - 1 - class).unwrap_or(0);
        let first = range.start().saturating_sub(longest);
        starts.range((first, 0)..(range.end(), 0)).map(|&(_, place)| place)
    })
}

/// What is pinned for it: whole pages, of the usual size.
fn footprint(key: &Key) -> usize {
    const PAGE: usize = 4096;
    key.range().map_or(0, |range| range.page_aligned(PAGE).len())
}

fn class_of(length: usize) -> usize {
    length.max(1).ilog2() as usize
}

#[cfg(test)]
#[cfg(not(loom))]
pub(crate) mod tests {
    use super::*;
    use std::collections::HashMap;

    pub(crate) fn key(domain: usize, start: usize, length: usize) -> Key {
        let number = u32::try_from(domain).unwrap();
        let domain = DomainName { address: domain, device: domain / 10, number };
        Key { start, length, domain, flags: 1 }
    }

    fn region(number: u32) -> Region {
        Region { address: 0x1000 + 64 * number as usize, handle: number, lkey: number << 8 }
    }

    const LIMIT: Limit = Limit { bytes: 1 << 20, regions: 4 };

    fn handle(key: Key, number: u32) -> HandleFields {
        let Key { start, length, domain, .. } = key;
        HandleFields { region: region(number), start, length, domain: domain.address }
    }

    fn registered(store: &mut Store, key: Key, number: u32) -> HandleFields {
        let place = store.begin(key, Opening::ANY).unwrap();
        assert_eq!(store.land(place, region(number)), Ok(()));
        handle(key, number)
    }

    fn change(store: &mut Store, start: usize, length: usize) -> u64 {
        store.invalidate(AddressRange::new(start, length).unwrap(), &mut |_| ())
    }

    #[test]
    fn only_what_is_idle_is_found_and_by_one_at_a_time() {
        let mut store = Store::new(LIMIT);
        let bytes = key(1, 0x10000, 4096);
        let first = registered(&mut store, bytes, 1);
        assert_eq!(store.take(&bytes), None, "the program has it");
        assert_eq!(store.release(&first), End::Kept);
        assert_eq!(store.take(&key(1, 0x10000, 4095)), None);
        assert_eq!(store.take(&key(2, 0x10000, 4096)), None);
        assert_eq!(store.take(&bytes), Some((first.region, true)));
        assert_eq!(store.take(&bytes), None);
        assert_eq!(store.release(&first), End::Kept);
        assert_eq!(store.take(&bytes), Some((first.region, false)));
    }

    #[test]
    fn handles_of_the_same_bytes_are_two() {
        let mut store = Store::new(LIMIT);
        let bytes = key(1, 0x10000, 4096);
        let (one, other) = (registered(&mut store, bytes, 1), registered(&mut store, bytes, 2));
        assert_eq!((store.release(&one), store.release(&other)), (End::Kept, End::Kept));
        let found: Vec<_> = std::iter::from_fn(|| store.take(&bytes)).map(|(it, _)| it).collect();
        assert_eq!(found, [other.region, one.region]);
    }

    #[test]
    fn a_change_ends_what_is_idle_and_marks_what_is_live_or_under_way() {
        let mut store = Store::new(LIMIT);
        let idle = registered(&mut store, key(1, 0x10000, 8192), 1);
        assert_eq!(store.release(&idle), End::Kept);
        let live = registered(&mut store, key(1, 0x11000, 4096), 2);
        let under_way = store.begin(key(1, 0x11fff, 1), Opening::ANY).unwrap();
        let apart = registered(&mut store, key(1, 0x12000, 4096), 3);
        assert_eq!(change(&mut store, 0x11fff, 1), 3);
        assert_eq!(store.take(&key(1, 0x10000, 8192)), None);
        assert_eq!(store.release(&live), End::Foreign);
        assert_eq!(store.land(under_way, region(4)), Err(Reason::Changing));
        assert_eq!(store.release(&apart), End::Kept);
        let dead: Vec<_> =
            store.take_dead(usize::MAX).iter().map(|leaving| leaving.region).collect();
        assert_eq!(dead, [idle.region]);
        assert!(store.take_dead(usize::MAX).is_empty() && store.dead() == 0);
        let holds = |start| store.holds_valid(AddressRange::new(start, 1).unwrap());
        assert!(!holds(0x11fff) && holds(0x12fff));
    }

    #[test]
    fn a_registration_ended_by_another_route_is_told_from_its_successor() {
        let mut store = Store::new(LIMIT);
        let gone = registered(&mut store, key(1, 0x10000, 4096), 1);
        let successor = HandleFields { region: Region { lkey: 77, ..gone.region }, ..gone };
        assert_eq!(store.release(&successor), End::Foreign);
        assert_eq!(store.release(&gone), End::Foreign, "forgotten");
        registered(&mut store, key(1, 0x10000, 4096), 1);
        let later = registered(&mut store, key(1, 0x20000, 4096), 1);
        assert_eq!(store.release(&later), End::Kept);
        assert_eq!(store.take(&key(1, 0x10000, 4096)), None);
    }

    /// libibverbs may use its address again, and the kernel its numbers, for other bytes or another domain.
    #[test]
    fn a_successor_with_the_same_numbers_is_told_by_what_it_registers() {
        let mut store = Store::new(LIMIT);
        let bytes = key(1, 0x10000, 4096);
        for other in [key(1, 0x20000, 4096), key(1, 0x10000, 8192), key(2, 0x10000, 4096)] {
            registered(&mut store, bytes, 1);
            assert_eq!(store.release(&handle(other, 1)), End::Foreign);
            assert!(!store.has(region(1).address) && store.take(&bytes).is_none());
        }
    }

    #[test]
    fn what_is_registered_by_another_route_ends_what_had_its_address() {
        let mut store = Store::new(LIMIT);
        let bytes = key(1, 0x10000, 4096);
        let stale = registered(&mut store, bytes, 1);
        store.note_fresh(stale.region.address);
        assert_eq!(store.release(&stale), End::Foreign);
        registered(&mut store, bytes, 1);
        let changed = store.begin(bytes, Opening::ANY).unwrap();
        change(&mut store, 0x10000, 1);
        assert_eq!(store.land(changed, region(1)), Err(Reason::Changing));
        assert!(!store.has(region(1).address));
    }

    #[test]
    fn what_is_given_back_twice_is_said_so() {
        let mut store = Store::new(LIMIT);
        let it = registered(&mut store, key(1, 0x10000, 4096), 1);
        assert_eq!((store.release(&it), store.release(&it)), (End::Kept, End::Twice));
    }

    #[test]
    fn the_limit_holds_and_the_oldest_goes() {
        let mut store = Store::new(LIMIT);
        let mut vain = 0;
        for number in 0..6 {
            let it = registered(&mut store, key(1, 0x10000 * (number as usize + 1), 4096), number);
            assert_eq!(store.release(&it), End::Kept);
            let excess = store.take_excess(&mut |_| vain += 1);
            assert_eq!(excess.len(), usize::from(number >= 4), "{number}");
            excess.iter().for_each(|leaving| assert_eq!(leaving.region, region(number - 4)));
        }
        assert_eq!((vain, store.unused()), (2, 4));
        let long = registered(&mut store, key(1, 0x1000_0000, (1 << 20) - 4096), 9);
        assert_eq!(store.release(&long), End::Kept);
        assert_eq!(store.take_excess(&mut |_| ()).len(), 3);
        assert!(!store.has_room_for(&key(1, 1, 1 << 20)));
    }

    #[test]
    fn a_domain_s_and_a_device_s_are_taken_alone() {
        let mut store = Store::new(LIMIT);
        for (number, domain) in [(1, 10), (2, 11), (3, 20)] {
            let it = registered(&mut store, key(domain, 0x10000, 4096), number);
            assert_eq!(store.release(&it), End::Kept);
        }
        let live = registered(&mut store, key(20, 0x50000, 4096), 4);
        // As it is named by another `ibv_pd` of it.
        let imported = DomainName { address: 99, device: 1, number: 10 };
        assert_eq!(store.take_idle(Scope::Domain(imported)).len(), 1);
        assert_eq!(store.take_idle(Scope::Device(1)).len(), 1);
        store.forget_live(Scope::Device(2));
        assert_eq!(store.release(&live), End::Foreign);
        assert_eq!(store.take_idle(Scope::Everything).len(), 1);
        assert_eq!(store.unused(), 0);
    }

    /// Against a list that is searched from end to end.
    #[test]
    fn a_plain_list_agrees() {
        let seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut state = seed;
        let mut any = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state >> 20).unwrap_or(0) % below
        };
        let mut store = Store::new(Limit { bytes: usize::MAX, regions: usize::MAX });
        // Region to key, and whether it is idle and valid.
        let mut plain: HashMap<u32, (Key, bool, bool)> = HashMap::new();
        for number in 0..4000_u32 {
            match any(4) {
                0 | 1 => {
                    let key = key(1 + any(2), 4096 * (1 + any(64)), 1 + (1 << any(18)) + any(9000));
                    let is_there = store.has_idle(&key);
                    let found = store.take(&key).map(|(it, _)| it);
                    assert_eq!(is_there, found.is_some(), "seed {seed:#x}");
                    let idle = |(_, it): &(&u32, &(Key, bool, bool))| it.0 == key && it.1 && it.2;
                    assert_eq!(found.is_some(), plain.iter().any(|it| idle(&it)), "seed {seed:#x}");
                    let it = found.unwrap_or_else(|| registered(&mut store, key, number).region);
                    plain.insert(it.handle, (key, false, true));
                }
                2 => {
                    let live: Vec<_> =
                        plain.iter().filter(|(_, it)| !it.1).map(|(n, _)| *n).collect();
                    let Some(&given_back) = live.get(any(live.len().max(1))) else { continue };
                    let valid = plain[&given_back].2;
                    let end = if valid { End::Kept } else { End::Foreign };
                    assert_eq!(
                        store.release(&handle(plain[&given_back].0, given_back)),
                        end,
                        "seed {seed:#x}"
                    );
                    if valid {
                        plain.entry(given_back).and_modify(|it| it.1 = true);
                    } else {
                        plain.remove(&given_back);
                    }
                }
                _ => {
                    let range = AddressRange::new(4096 * any(80) + 1, 1 + any(20_000)).unwrap();
                    store.invalidate(range, &mut |_| ());
                    let _ = store.take_dead(usize::MAX);
                    plain.retain(|_, (key, idle, valid)| {
                        *valid &= !key.range().unwrap().overlaps(&range);
                        *valid || !*idle
                    });
                }
            }
        }
        assert_eq!(store.unused(), plain.values().filter(|it| it.1).count());
    }
}
