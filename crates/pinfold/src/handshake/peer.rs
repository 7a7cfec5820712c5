//! The side that is asked to keep still.

use super::message::{HandshakeError, KeyChange, Message};
use pinfold_core::AddressRange;
use std::time::Duration;

/// A peer of which nothing is asked.
#[must_use = "it remembers which requests were made already"]
#[derive(PartialEq, Eq, Debug, Default)]
pub struct Idle {
    /// The number of the last request.
    heard: u64,
}

/// What a message means to an idle peer.
#[derive(Debug)]
pub enum Heard {
    /// The owner asks for a range of its memory.
    Asked(Asked),
    /// It is the end of a request that this side had declined, or given up.
    Nothing(Idle),
}

impl Idle {
    /// Takes a message of the owner's, at `now` by any clock of this side.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`], with the state as it was.
    pub fn hear(self, bytes: &[u8], now: Duration) -> Result<Heard, (Self, HandshakeError)> {
        match Message::decode(bytes) {
            Err(error) => Err((self, error)),
            Ok(Message::Request { number, .. }) if number <= self.heard => {
                Err((self, HandshakeError::Repeated { number }))
            }
            Ok(Message::Request { number, range, allowed }) => {
                Ok(Heard::Asked(Asked { number, range, until: now.saturating_add(allowed) }))
            }
            Ok(Message::Resumed { number, .. }) if number <= self.heard => Ok(Heard::Nothing(self)),
            Ok(other) => Err((self, HandshakeError::OutOfTurn { kind: other.kind() })),
        }
    }
}

/// A request that was not answered yet. Stop posting what names the range, and wait for the
/// completions of what was posted; then [`agree`](Self::agree).
#[must_use = "the owner waits for an answer"]
#[derive(PartialEq, Eq, Debug)]
pub struct Asked {
    number: u64,
    range: AddressRange,
    until: Duration,
}

impl Asked {
    /// What to keep off, in the owner's addresses.
    pub const fn range(&self) -> AddressRange {
        self.range
    }

    /// When the owner's time is over, on this side's clock.
    pub const fn until(&self) -> Duration {
        self.until
    }

    /// This side keeps still from now on. The bytes are for the owner.
    pub fn agree(self) -> (PeerStopped, Vec<u8>) {
        let Self { number, until, .. } = self;
        (PeerStopped { number, until }, Message::Agreed { number }.encode())
    }

    /// This side goes on. The bytes are for the owner.
    pub fn decline(self) -> (Idle, Vec<u8>) {
        let number = self.number;
        (Idle { heard: number }, Message::Declined { number }.encode())
    }

    /// Takes a message that came before the answer was given: the request is taken back.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`], with the state as it was.
    pub fn hear(self, bytes: &[u8]) -> Result<Idle, (Self, HandshakeError)> {
        match end_of(self.number, bytes) {
            Ok(_) => Ok(Idle { heard: self.number }),
            Err(error) => Err((self, error)),
        }
    }
}

/// A peer that keeps off the range until it is told to go on.
#[must_use = "posting what names the range is safe only after `hear`"]
#[derive(PartialEq, Eq, Debug)]
pub struct PeerStopped {
    number: u64,
    until: Duration,
}

impl PeerStopped {
    /// Takes the owner's word to go on: the keys that have changed, if any.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`], with the state as it was.
    pub fn hear(self, bytes: &[u8]) -> Result<(Idle, Vec<KeyChange>), (Self, HandshakeError)> {
        match end_of(self.number, bytes) {
            Ok(keys) => Ok((Idle { heard: self.number }, keys)),
            Err(error) => Err((self, error)),
        }
    }

    /// Whether the owner's time is over, without its word.
    pub fn is_overdue(&self, now: Duration) -> bool {
        now >= self.until
    }

    /// Waits no longer. What this side knew the range by may be over: end the connection.
    pub fn give_up(self) -> Idle {
        Idle { heard: self.number }
    }
}

/// The keys in the word that ends suspension `ours`.
fn end_of(ours: u64, bytes: &[u8]) -> Result<Vec<KeyChange>, HandshakeError> {
    match Message::decode(bytes)? {
        Message::Resumed { number, keys } if number == ours => Ok(keys),
        Message::Resumed { number: theirs, .. } => {
            Err(HandshakeError::ForeignSuspension { theirs, ours })
        }
        other => Err(HandshakeError::OutOfTurn { kind: other.kind() }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Owner;
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn range() -> AddressRange {
        AddressRange::new(1 << 16, 1 << 12).unwrap()
    }

    fn asked(idle: Idle, request: &[u8]) -> Asked {
        match idle.hear(request, SECOND) {
            Ok(Heard::Asked(asked)) => asked,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_counts_once() {
        let (_, request) = Owner::default().ask(range(), SECOND, SECOND);
        let first = asked(Idle::default(), &request);
        assert_eq!((first.range(), first.until()), (range(), 2 * SECOND));
        let (idle, _) = first.decline();
        let (idle, error) = idle.hear(&request, SECOND).unwrap_err();
        assert_eq!((idle, error), (Idle { heard: 1 }, HandshakeError::Repeated { number: 1 }));
    }

    #[test]
    fn a_request_may_be_taken_back_before_and_after_the_answer() {
        let (asking, request) = Owner::default().ask(range(), SECOND, SECOND);
        let taken_back = asking.cancel();
        let early = asked(Idle::default(), &request).hear(&taken_back);
        assert_eq!(early, Ok(Idle { heard: 1 }));
        let (stopped, _) = asked(Idle::default(), &request).agree();
        assert_eq!(stopped.hear(&taken_back), Ok((Idle { heard: 1 }, Vec::new())));
        let (idle, _) = asked(Idle::default(), &request).decline();
        assert!(matches!(idle.hear(&taken_back, SECOND), Ok(Heard::Nothing(_))));
    }

    #[test]
    fn a_stopped_peer_hears_its_own_end_only() {
        let mut owner = Owner::default();
        let (first, request) = owner.ask(range(), SECOND, SECOND);
        let (second, another) = owner.ask(range(), SECOND, SECOND);
        let (stopped, agreed) = asked(Idle::default(), &request).agree();
        let foreign = HandshakeError::ForeignSuspension { theirs: 2, ours: 1 };
        let (stopped, error) = stopped.hear(&second.cancel()).unwrap_err();
        assert_eq!(error, foreign);
        let (stopped, error) = stopped.hear(&another).unwrap_err();
        assert_eq!(error, HandshakeError::OutOfTurn { kind: "request" });
        let (stopped, error) = stopped.hear(&agreed).unwrap_err();
        assert_eq!(error, HandshakeError::OutOfTurn { kind: "agreed" });
        let (stopped, error) = stopped.hear(&[0; 100]).unwrap_err();
        assert_eq!(error, HandshakeError::Garbled { length: 100 });
        assert!(!stopped.is_overdue(SECOND) && stopped.is_overdue(2 * SECOND));
        assert!(stopped.hear(&first.cancel()).is_ok());
    }

    #[test]
    fn an_idle_peer_hears_no_end_of_what_was_never_asked() {
        let (asking, _) = Owner::default().ask(range(), SECOND, SECOND);
        let (_, error) = Idle::default().hear(&asking.cancel(), SECOND).unwrap_err();
        assert_eq!(error, HandshakeError::OutOfTurn { kind: "resumed" });
    }
}
