//! What a thread does with buffers of the pool that all threads share.

use super::stock::{Filled, range};
use super::tally::{Judged, WrongBytes};
use super::worker::Worker;
use crate::change::{Specimen, difference};
use crate::races::Stop;
use pinfold::Monitor;
use pinfold::pool::WhenExhausted;

impl<'p, M: Monitor + Clone> Worker<'_, 'p, M> {
    pub(super) fn take_buffer(
        &mut self,
        place: usize,
        length: usize,
        when: WhenExhausted,
        zeroed: bool,
    ) -> Judged {
        let before = self.put_back(place);
        let key = self.next_key();
        let buffer = self.grounds.stock.take(length, when, zeroed)?;
        let dirty = buffer.iter().position(|&byte| zeroed && byte != 0);
        let note = "a buffer of zeros was none";
        let range = range(&buffer)?;
        self.set_buffer(place, Filled::new(buffer, key)?);
        let dirty = dirty.map(|first| WrongBytes { range, first, note: note.into() });
        Ok(before.unwrap_or(None).or(dirty))
    }

    /// The buffer's own registration and the cache's, of which the cache does not know that the
    /// pool gives memory back, move the same bytes.
    pub(super) fn send_buffer(&mut self, place: usize, refill: bool, port: usize) -> Judged {
        let key = self.next_key();
        let mut filled = self.buffer(place)?;
        let wrong = filled.wrong()?;
        if refill {
            filled = Filled::new(filled.buffer, key)?;
        }
        let (range, pattern) = (range(&filled.buffer)?, filled.pattern()?);
        let sent = self.grounds.stock.send(&filled, self.lane());
        let sent_by_cache = self.port(port).send(range, self.lane());
        self.set_buffer(place, filled);
        let wrong = wrong.or(self.moved(range, difference(&sent?, &pattern))?);
        Ok(wrong.or(self.moved(range, difference(&sent_by_cache?.bytes, &pattern))?))
    }

    pub(super) fn receive_buffer(&mut self, place: usize, as_word: bool) -> Judged {
        let key = self.next_key();
        let filled = self.buffer(place)?;
        let (before, range) = (filled.wrong()?, range(&filled.buffer)?);
        let incoming = Specimen::pattern(range, key);
        let lane = self.lane();
        let buffer = self.grounds.stock.receive(filled.buffer, lane, &incoming, as_word)?;
        let wrong = difference(&buffer, &incoming);
        self.set_buffer(place, Filled { buffer, key });
        Ok(before.or(self.moved(range, wrong)?))
    }

    pub(super) fn put_back(&mut self, place: usize) -> Judged {
        self.buffer(place)?.wrong()
    }

    pub(super) fn pass_on(&mut self, place: usize) -> Judged {
        let filled = self.buffer(place)?;
        let other = self.grounds.passed.pass_on(filled);
        other.map_or(Ok(None), |other| other.wrong())
    }

    pub(super) fn trim(&mut self, down_to: usize) -> Judged {
        self.grounds.stock.pool.trim(down_to);
        Ok(None)
    }

    /// Takes a buffer out of its place.
    fn buffer(&mut self, place: usize) -> Result<Filled<'p>, Stop> {
        self.buffers.get_mut(place).and_then(Option::take).ok_or(Stop::Gone)
    }

    fn set_buffer(&mut self, place: usize, filled: Filled<'p>) {
        if let Some(place) = self.buffers.get_mut(place) {
            *place = Some(filled);
        }
    }
}
