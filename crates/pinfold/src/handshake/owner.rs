//! The side whose region is to be suspended.

use super::message::{HandshakeError, KeyChange, MAX_KEYS, Message, TooManyKeys};
use pinfold_core::AddressRange;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// One channel to a peer, which may be asked again and again.
#[derive(Debug, Default)]
pub struct Owner {
    /// The number of the last request.
    asked: u64,
}

impl Owner {
    /// Asks the peer to keep off `range` for `allowed` from `now` on, by the registrar's clock
    /// ([`Suspend::now`](pinfold_core::Suspend::now)). The bytes are for the peer.
    ///
    /// `range` is the whole registrations whose keys change with the suspension
    /// ([`Lease::registered`](pinfold_core::Lease::registered)):
    /// [`Unsupported::PeerMayWrite`](pinfold_core::Unsupported::PeerMayWrite) names it. A suspension
    /// looks at the time where it begins, and not again: the peer ends the connection when its own is over, so
    /// `allowed` is longer than the [deadline](pinfold_core::SuspensionTerms::deadline).
    pub fn ask(
        &mut self,
        range: AddressRange,
        allowed: Duration,
        now: Duration,
    ) -> (Asking, Vec<u8>) {
        self.asked += 1;
        let number = self.asked;
        let request = Message::Request { number, range, allowed }.encode();
        (Asking { number, range, until: now.saturating_add(allowed) }, request)
    }
}

/// A request without an answer yet.
#[must_use = "a request that is not taken back by `cancel` has the peer wait for its own deadline"]
#[derive(PartialEq, Eq, Debug)]
pub struct Asking {
    number: u64,
    range: AddressRange,
    until: Duration,
}

/// What a message of the peer's means to who asked.
#[derive(Debug)]
pub enum Answer {
    /// The peer keeps still.
    Agreed(Consent),
    /// It does not want to.
    Declined,
    /// The message answers an earlier request, which was taken back.
    Stale(Asking),
}

impl Asking {
    /// Takes a message of the peer's.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`], with the request as it was.
    pub fn hear(self, bytes: &[u8]) -> Result<Answer, (Self, HandshakeError)> {
        let message = match Message::decode(bytes) {
            Ok(message) => message,
            Err(error) => return Err((self, error)),
        };
        let (theirs, kind) = (message.number(), message.kind());
        match message {
            Message::Agreed { number } if number == self.number => {
                Ok(Answer::Agreed(Consent::new(self)))
            }
            Message::Declined { number } if number == self.number => Ok(Answer::Declined),
            Message::Agreed { number } | Message::Declined { number } if number < self.number => {
                Ok(Answer::Stale(self))
            }
            Message::Agreed { .. } | Message::Declined { .. } => {
                let ours = self.number;
                Err((self, HandshakeError::ForeignSuspension { theirs, ours }))
            }
            Message::Request { .. } | Message::Resumed { .. } => {
                Err((self, HandshakeError::OutOfTurn { kind }))
            }
        }
    }

    /// Whether the time that was asked for is over, without an answer.
    pub fn is_overdue(&self, now: Duration) -> bool {
        now >= self.until
    }

    /// Takes the request back. The bytes are for the peer, also for one that never answered.
    pub fn cancel(self) -> Vec<u8> {
        Message::Resumed { number: self.number, keys: Vec::new() }.encode()
    }
}

/// The peer's word that it keeps off a range: what a connection needs to be stopped with it.
///
/// It ends with [`resumed`](Self::resumed), or when it is dropped: then connections that rely on it
/// cannot be suspended again, and the peer ends the connection at its deadline.
#[must_use = "a peer that is not told by `resumed` waits for its own deadline"]
#[derive(Debug)]
pub struct Consent {
    number: u64,
    agreement: Agreement,
}

/// A look at a [`Consent`], for connections.
#[derive(Clone, Debug)]
pub struct Agreement {
    range: AddressRange,
    until: Duration,
    /// False from the consent's end on.
    stands: Arc<AtomicBool>,
}

impl Agreement {
    /// Whether the peer keeps off all of `range` at `now`, on the clock that it was asked by.
    pub fn covers(&self, range: AddressRange, now: Duration) -> bool {
        // Acquire: pairs with the end of the consent, which the program orders before the message
        // that lets the peer go on.
        self.stands.load(Ordering::Acquire) && now < self.until && self.range.contains(&range)
    }
}

impl Consent {
    fn new(Asking { number, range, until }: Asking) -> Self {
        Self { number, agreement: Agreement { range, until, stands: Arc::new(true.into()) } }
    }

    /// A look at it.
    pub fn agreement(&self) -> Agreement {
        self.agreement.clone()
    }

    /// Lets the peer go on, with the keys that have changed. The bytes are for the peer.
    ///
    /// Call it when the suspension is over, also if it did not come about.
    ///
    /// # Errors
    ///
    /// [`TooManyKeys`], with the consent, which stands: the peer waits still. Tell it some of the keys
    /// in a message of the program's own, then let it go on with at most [`MAX_KEYS`](super::MAX_KEYS).
    pub fn resumed(self, keys: &[KeyChange]) -> Result<Vec<u8>, (Self, TooManyKeys)> {
        if keys.len() > MAX_KEYS {
            return Err((self, TooManyKeys { count: keys.len() }));
        }
        Ok(Message::Resumed { number: self.number, keys: keys.to_vec() }.encode())
    }
}

impl Drop for Consent {
    fn drop(&mut self) {
        // Release: see `Agreement::covers`.
        self.agreement.stands.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn range(pages: usize) -> AddressRange {
        AddressRange::new(1 << 16, pages << 12).unwrap()
    }

    fn agreed(number: u64) -> Vec<u8> {
        Message::Agreed { number }.encode()
    }

    #[test]
    fn a_consent_covers_its_range_and_its_time_until_it_ends() {
        let (asking, _) = Owner::default().ask(range(4), SECOND, SECOND);
        let Ok(Answer::Agreed(consent)) = asking.hear(&agreed(1)) else { panic!("not agreed") };
        let agreement = consent.agreement();
        assert!(agreement.covers(range(4), SECOND) && agreement.covers(range(1), SECOND));
        assert!(!agreement.covers(range(5), SECOND));
        assert!(!agreement.covers(range(4), 2 * SECOND));
        consent.resumed(&[]).unwrap();
        assert!(!agreement.covers(range(4), SECOND));
    }

    #[test]
    fn late_answers_are_told_apart() {
        let mut owner = Owner::default();
        let (first, _) = owner.ask(range(1), SECOND, Duration::ZERO);
        assert!(!first.is_overdue(SECOND / 2) && first.is_overdue(SECOND));
        let _taken_back = first.cancel();
        let (second, _) = owner.ask(range(1), SECOND, SECOND);
        let Ok(Answer::Stale(second)) = second.hear(&agreed(1)) else { panic!("not stale") };
        let (second, error) = second.hear(&agreed(3)).unwrap_err();
        assert_eq!(error, HandshakeError::ForeignSuspension { theirs: 3, ours: 2 });
        let (second, error) = second.hear(&first_request()).unwrap_err();
        assert_eq!(error, HandshakeError::OutOfTurn { kind: "request" });
        let (second, error) = second.hear(b"nonsense").unwrap_err();
        assert_eq!(error, HandshakeError::Garbled { length: 8 });
        let declined = Message::Declined { number: 2 }.encode();
        assert!(matches!(second.hear(&declined), Ok(Answer::Declined)));
    }

    fn first_request() -> Vec<u8> {
        Owner::default().ask(range(1), SECOND, SECOND).1
    }

    #[test]
    fn too_many_keys_are_refused() {
        let (asking, _) = Owner::default().ask(range(1), SECOND, SECOND);
        let Ok(Answer::Agreed(consent)) = asking.hear(&agreed(1)) else { panic!("not agreed") };
        let keys = vec![KeyChange { range: range(1), old: 1, new: 2 }; MAX_KEYS + 1];
        let agreement = consent.agreement();
        let (consent, refused) = consent.resumed(&keys).unwrap_err();
        assert_eq!(refused, TooManyKeys { count: MAX_KEYS + 1 });
        assert!(agreement.covers(range(1), Duration::ZERO), "not over yet");
        let told = consent.resumed(&keys[..MAX_KEYS]).unwrap();
        assert!(
            matches!(Message::decode(&told), Ok(Message::Resumed { keys, .. }) if keys.len() == MAX_KEYS)
        );
        assert!(!agreement.covers(range(1), Duration::ZERO));
    }
}
