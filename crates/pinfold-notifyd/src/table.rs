//! The clients, each under a key that no later client has.

use std::num::Wrapping;

/// A client's place, and which of those who had it in turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    place: u32,
    turn: u32,
}

/// What an event is about; the number under which a descriptor is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// A client wants to connect.
    Listener,
    /// The helper is to end.
    Stop,
    /// A client's connection.
    Connection(Key),
    /// A client's process.
    Process(Key),
}

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
/// Tells a client's process from its connection; turns have 31 bits.
const PROCESS: u64 = 1 << 63;

impl Source {
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Listener => LISTENER,
            Self::Stop => STOP,
            Self::Connection(key) => key.number(),
            Self::Process(key) => key.number() | PROCESS,
        }
    }

    pub(crate) fn from_number(number: u64) -> Self {
        match number {
            LISTENER => Self::Listener,
            STOP => Self::Stop,
            number if number & PROCESS == 0 => Self::Connection(Key::from_number(number)),
            number => Self::Process(Key::from_number(number)),
        }
    }
}

impl Key {
    fn number(self) -> u64 {
        u64::from(self.turn) << 32 | u64::from(self.place)
    }

    fn from_number(number: u64) -> Self {
        let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0);
        Self { place: half(number), turn: half((number & !PROCESS) >> 32) }
    }
}

/// As many places as there ever were clients at once.
#[derive(Debug)]
pub(crate) struct Table<C> {
    places: Vec<(Wrapping<u32>, Option<C>)>,
    free: Vec<u32>,
}

impl<C> Table<C> {
    pub(crate) fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn insert(&mut self, client: C) -> Key {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push((Wrapping(0), None));
            u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
        });
        let (turn, slot) = &mut self.places[place as usize];
        *slot = Some(client);
        Key { place, turn: turn.0 }
    }

    pub(crate) fn get(&mut self, key: Key) -> Option<&mut C> {
        let (turn, client) = self.places.get_mut(key.place as usize)?;
        if turn.0 == key.turn { client.as_mut() } else { None }
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<C> {
        let (turn, client) = self.places.get_mut(key.place as usize)?;
        if turn.0 != key.turn || client.is_none() {
            return None;
        }
        *turn = (*turn + Wrapping(1)) & Wrapping(u32::MAX >> 1);
        self.free.push(key.place);
        client.take()
    }

    /// The keys of all clients.
    pub(crate) fn keys(&self) -> Vec<Key> {
        let key = |(place, (turn, client)): (usize, &(Wrapping<u32>, Option<C>))| {
            let place = u32::try_from(place).ok()?;
            client.as_ref().map(|_| Key { place, turn: turn.0 })
        };
        self.places.iter().enumerate().filter_map(key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_key_finds_no_later_client() {
        let mut table = Table::new();
        let first = table.insert('a');
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b');
        assert_eq!(table.get(first), None);
        assert_eq!(table.remove(first), None);
        assert_eq!(table.get(second), Some(&mut 'b'));
        assert_eq!((table.keys(), table.places.len()), (vec![second], 1));
    }

    #[test]
    fn sources_survive_the_journey() {
        for (place, turn) in [(0, 0), (7, 3), (u32::MAX - 2, u32::MAX >> 1)] {
            let key = Key { place, turn };
            for source in [Source::Connection(key), Source::Process(key)] {
                assert_eq!(Source::from_number(source.number()), source);
            }
        }
        assert_eq!(Source::from_number(Source::Stop.number()), Source::Stop);
        assert_eq!(Source::from_number(Source::Listener.number()), Source::Listener);
    }
}
