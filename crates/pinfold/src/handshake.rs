//! The peer's part of a suspension: messages by which the far end of a connection agrees to stop.
//!
//! An RDMA device serves what a peer writes and reads without asking its program. So a region that
//! peers may touch can be suspended only if they keep still, and this is how they are asked. The
//! program carries the messages, over whatever it has (a socket, the connection itself); which side sends
//! them is for the program to know, because nothing here proves it.
//!
//! ```text
//!        owner of the region                                   peer
//!   Owner ── ask() ── Asking ────── request(range, time) ─────▶ Idle ── hear() ── Asked
//!                       │                                                          │
//!                       │ hear() ◀───── agreed ──── agree(), once it keeps still ──┤
//!                       │        ◀───── declined ──────────────────── decline() ───┘──▶ Idle
//!                       ▼
//!                    Consent, with which its connection can be stopped    PeerStopped
//!                       │                                                          │
//!                       └─ resumed() ── resumed(new keys) ─────────────▶ hear() ───┴──▶ Idle
//! ```
//!
//! What it costs: one round trip before a suspension, one message after it, and the peer stands
//! still in between.
//!
//! - **A peer that agrees** has stopped posting what names the range, and has seen the completions of what it
//!   had posted; moving the queue pair to SQD is not enough, because what is left in its queue would
//!   go on later under keys that are no more.
//! - **A peer that ignores this** never makes a [`Consent`]: the owner's deadline comes
//!   ([`Asking::is_overdue`]), [`Asking::cancel`] takes the request back, and nothing was touched.
//! - **An owner that never comes back** makes the peer overdue ([`PeerStopped::is_overdue`]): its keys may
//!   be over, so it ends the connection in the open ([`PeerStopped::give_up`]).
//! - **Late answers** to a request that was taken back are told apart by its number.
//! - **What is garbled, of another version, out of turn or about another suspension** is a
//!   [`HandshakeError`], and the state stays what it was. A checksum finds accidents, not malice.
//!
//! ```
//! use pinfold::{AddressRange, handshake::{Answer, Heard, Idle, KeyChange, Owner}};
//! # use std::time::Duration;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (now, later) = (Duration::ZERO, Duration::from_millis(50));
//! # let range = AddressRange::new(0x10000, 0x4000)?;
//! let (asking, request) = Owner::default().ask(range, later, now);
//! // ... the request travels ...
//! let Ok(Heard::Asked(asked)) = Idle::default().hear(&request, now) else { panic!() };
//! let (stopped, agreement) = asked.agree();
//! // ... and back ...
//! let Ok(Answer::Agreed(consent)) = asking.hear(&agreement) else { panic!() };
//! // ... the owner suspends with it, moves the memory, resumes ...
//! let changes = [KeyChange { range, old: 0x1234, new: 0x5678 }];
//! let Ok(resumed) = consent.resumed(&changes) else { panic!() };
//! let Ok((_idle, told)) = stopped.hear(&resumed) else { panic!() };
//! assert_eq!(told, changes);
//! # Ok(())
//! # }
//! ```

mod message;
mod owner;
mod peer;

pub use message::{HandshakeError, KeyChange, MAX_KEYS, TooManyKeys};
pub use owner::{Agreement, Answer, Asking, Consent, Owner};
pub use peer::{Asked, Heard, Idle, PeerStopped};
