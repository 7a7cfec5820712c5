//! What the helper and its clients say to each other, byte by byte.
//!
//! Every message has [`BYTES`] bytes and is one packet of a `SOCK_SEQPACKET` socket:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | [`MAGIC`] |
//! | 8..12 | the version that the sender speaks |
//! | 12..16 | the kind of message |
//! | 16..24, 24..32 | two words whose meaning is the kind's; zero where it has none |
//!
//! all numbers little-endian. The first three fields, and the kinds [`ToClient::Hello`] and
//! [`ToClient::Refused`], stay as they are in every later version, so that two sides of different
//! versions can still tell each other so.
//!
//! A conversation: the helper says hello with a number that cannot be guessed; the client asks with
//! that number; the helper grants, with the view's descriptors in the message, or refuses and
//! closes. Then both are silent. The client may give the view back; when the helper ends, the
//! client reads the end of the stream.

/// The bytes of every message.
pub const BYTES: usize = 32;
/// The version of this protocol.
pub const VERSION: u32 = 1;
/// How every message begins.
pub const MAGIC: [u8; 8] = *b"\x7fPINFOLD";
/// As many descriptors as ever come with one message; the kernel's own limit is 253.
pub const MAX_DESCRIPTORS: usize = 64;
/// Where the helper listens unless told otherwise.
pub const DEFAULT_PATH: &str = "/run/pinfold/notifyd.sock";

const HELLO: u32 = 1;
const ASK: u32 = 2;
const GRANTED: u32 = 3;
const REFUSED: u32 = 4;
const GIVE_BACK: u32 = 5;

/// A message as it travels.
pub type Packet = [u8; BYTES];

/// A number that the helper makes up for each connection. A process that repeats it was alive when it was
/// sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Challenge(pub u64);

/// What the helper says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ToClient {
    /// The first word on a connection.
    Hello(Challenge),
    /// Here is the view; so many descriptors come with it.
    Granted {
        /// At most [`MAX_DESCRIPTORS`].
        descriptors: u32,
    },
    /// There will be no view; the connection ends.
    Refused(ViewRefusal),
}

/// What a client says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ToHelper {
    /// A view of my own changes, please.
    Ask(Challenge),
    /// I do not use the view any more and will not again.
    GiveBack,
}

/// Why the helper gives no view.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ViewRefusal {
    /// It speaks another version.
    #[error(
        "the helper speaks version {helper}, this program {VERSION}: bring both to the same \
         release and restart the helper"
    )]
    Version {
        /// The helper's.
        helper: u32,
    },
    /// What it was asked makes no sense.
    #[error("the helper did not understand the request")]
    Malformed,
    /// The request came from another process than the one that connected.
    #[error(
        "the request came from another process than the one that connected: connect again after \
         fork()"
    )]
    NotTheConnector,
    /// The helper's pid namespace does not show the process.
    #[error(
        "the helper cannot see this process: run the helper in the machine's first pid namespace, \
         with /proc mounted without hidepid"
    )]
    NotVisible,
    /// The process is not dumpable: other processes of its user may not look at its addresses
    /// either.
    #[error(
        "this process is not dumpable (it has changed its user, or has rights from its \
         executable), so its addresses may not be looked at: connect before that, or allow it by \
         prctl(PR_SET_DUMPABLE, 1)"
    )]
    NotDumpable,
    /// The process ended, or executed another program, while it was asking.
    #[error("the process ended or executed another program meanwhile")]
    Gone,
    /// This user's processes have as many views as one user may have.
    #[error(
        "this user's processes have {limit} views already: let some end, or start the helper with \
         a higher --max-views-per-user"
    )]
    UserFull {
        /// How many that is.
        limit: u64,
    },
    /// All users together have as many views as there may be.
    #[error(
        "all users' processes have {limit} views already: let some end, or start the helper with a \
         higher --max-views"
    )]
    Full {
        /// How many that is.
        limit: u64,
    },
    /// Too many connections of this user, or in total, have not come to their end.
    #[error("{limit} connections are being served already: try again")]
    Busy {
        /// How many may be under way.
        limit: u64,
    },
    /// The client did not ask in time.
    #[error("this program took too long to ask: try again")]
    TooSlow,
    /// The kernel gave no view.
    #[error(
        "the kernel gave no view: {}; the helper's log may say more",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Kernel {
        /// Its error number.
        errno: i32,
    },
    /// This process has as many views as one process may have.
    #[error(
        "this process has {limit} views already: share one monitor, or drop one before another is \
         started"
    )]
    ProcessFull {
        /// How many that is.
        limit: u64,
    },
    /// The helper's control group is near its limit on memory. Views take some as long as any process holds their
    /// descriptors, also after they were given back.
    #[error(
        "the helper's control group is near its limit on memory: end processes that hold views or their descriptors, or \
         raise MemoryMax= of pinfold-notifyd.service and its slice"
    )]
    NoMemory,
    /// Something that a later version of the helper says.
    #[error("the helper refused for a reason unknown to this version ({reason}, {detail})")]
    Other {
        /// The reason's number.
        reason: u64,
        /// Its detail.
        detail: u64,
    },
}

/// Why a packet is no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// It is shorter or longer than [`BYTES`].
    #[error("a message that has not {BYTES} bytes")]
    Length,
    /// It does not begin as a message does.
    #[error("something that is no message of Pinfold's")]
    Magic,
    /// The other side speaks another version.
    #[error("a message of version {0}")]
    Version(u32),
    /// A field has a value that this version does not know.
    #[error("a message of unknown content")]
    Content,
}

/// The two words and the kind of a message, not looked at yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fields {
    version: u32,
    kind: u32,
    words: [u64; 2],
}

impl Fields {
    fn new(kind: u32, words: [u64; 2]) -> Self {
        Self { version: VERSION, kind, words }
    }

    fn encode(self) -> Packet {
        let mut packet = [0; BYTES];
        let fields: [&[u8]; 5] = [
            &MAGIC,
            &self.version.to_le_bytes(),
            &self.kind.to_le_bytes(),
            &self.words[0].to_le_bytes(),
            &self.words[1].to_le_bytes(),
        ];
        packet.iter_mut().zip(fields.into_iter().flatten()).for_each(|(to, from)| *to = *from);
        packet
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let packet = Packet::try_from(bytes).map_err(|_| DecodeError::Length)?;
        let (magic, rest) = take::<8>(&packet);
        let (version, rest) = take::<4>(rest);
        let (kind, rest) = take::<4>(rest);
        let (first, rest) = take::<8>(rest);
        let (second, _) = take::<8>(rest);
        if magic != MAGIC {
            return Err(DecodeError::Magic);
        }
        Ok(Self {
            version: u32::from_le_bytes(version),
            kind: u32::from_le_bytes(kind),
            words: [u64::from_le_bytes(first), u64::from_le_bytes(second)],
        })
    }

    /// These, if the sender speaks our version.
    fn of_our_version(self) -> Result<Self, DecodeError> {
        if self.version == VERSION { Ok(self) } else { Err(DecodeError::Version(self.version)) }
    }
}

/// The first `N` bytes, zero where there are none, and the rest.
fn take<const N: usize>(bytes: &[u8]) -> ([u8; N], &[u8]) {
    bytes.split_first_chunk().map_or(([0; N], &[]), |(first, rest)| (*first, rest))
}

impl ToClient {
    /// The message's bytes.
    pub fn encode(self) -> Packet {
        match self {
            Self::Hello(Challenge(number)) => Fields::new(HELLO, [number, 0]),
            Self::Granted { descriptors } => Fields::new(GRANTED, [descriptors.into(), 0]),
            Self::Refused(refusal) => Fields::new(REFUSED, refusal.words()),
        }
        .encode()
    }

    /// What the helper said. A refusal is understood in every version.
    ///
    /// # Errors
    ///
    /// [`DecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let fields = Fields::decode(bytes)?;
        if fields.kind == REFUSED {
            return Ok(Self::Refused(ViewRefusal::from_words(fields.words)));
        }
        let Fields { kind, words, .. } = fields.of_our_version()?;
        match (kind, words) {
            (HELLO, [number, 0]) => Ok(Self::Hello(Challenge(number))),
            (GRANTED, [descriptors, 0]) if descriptors <= MAX_DESCRIPTORS as u64 => {
                let descriptors = u32::try_from(descriptors).map_err(|_| DecodeError::Content)?;
                Ok(Self::Granted { descriptors })
            }
            _ => Err(DecodeError::Content),
        }
    }
}

impl ToHelper {
    /// The message's bytes.
    pub fn encode(self) -> Packet {
        match self {
            Self::Ask(Challenge(number)) => Fields::new(ASK, [number, 0]),
            Self::GiveBack => Fields::new(GIVE_BACK, [0, 0]),
        }
        .encode()
    }

    /// What the client said.
    ///
    /// # Errors
    ///
    /// [`DecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let Fields { kind, words, .. } = Fields::decode(bytes)?.of_our_version()?;
        match (kind, words) {
            (ASK, [number, 0]) => Ok(Self::Ask(Challenge(number))),
            (GIVE_BACK, [0, 0]) => Ok(Self::GiveBack),
            _ => Err(DecodeError::Content),
        }
    }
}

impl ViewRefusal {
    fn words(self) -> [u64; 2] {
        match self {
            Self::Version { helper } => [1, helper.into()],
            Self::Malformed => [2, 0],
            Self::NotTheConnector => [3, 0],
            Self::NotVisible => [4, 0],
            Self::NotDumpable => [5, 0],
            Self::Gone => [6, 0],
            Self::UserFull { limit } => [7, limit],
            Self::Full { limit } => [8, limit],
            Self::Busy { limit } => [9, limit],
            Self::TooSlow => [10, 0],
            Self::Kernel { errno } => [11, errno.unsigned_abs().into()],
            Self::ProcessFull { limit } => [12, limit],
            Self::NoMemory => [13, 0],
            Self::Other { reason, detail } => [reason, detail],
        }
    }

    fn from_words([reason, detail]: [u64; 2]) -> Self {
        let other = Self::Other { reason, detail };
        match (reason, detail) {
            (1, helper) => u32::try_from(helper).map_or(other, |helper| Self::Version { helper }),
            (2, 0) => Self::Malformed,
            (3, 0) => Self::NotTheConnector,
            (4, 0) => Self::NotVisible,
            (5, 0) => Self::NotDumpable,
            (6, 0) => Self::Gone,
            (7, limit) => Self::UserFull { limit },
            (8, limit) => Self::Full { limit },
            (9, limit) => Self::Busy { limit },
            (10, 0) => Self::TooSlow,
            (11, errno) => i32::try_from(errno).map_or(other, |errno| Self::Kernel { errno }),
            (12, limit) => Self::ProcessFull { limit },
            (13, 0) => Self::NoMemory,
            _ => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refusal() -> impl Strategy<Value = ViewRefusal> {
        (0..15_u64, prop_oneof![Just(0), any::<u64>()])
            .prop_map(|(reason, detail)| ViewRefusal::from_words([reason, detail]))
    }

    fn to_client() -> impl Strategy<Value = ToClient> {
        prop_oneof![
            any::<u64>().prop_map(|number| ToClient::Hello(Challenge(number))),
            (0..=u32::try_from(MAX_DESCRIPTORS).unwrap())
                .prop_map(|descriptors| ToClient::Granted { descriptors }),
            refusal().prop_map(ToClient::Refused),
        ]
    }

    fn to_helper() -> impl Strategy<Value = ToHelper> {
        prop_oneof![
            any::<u64>().prop_map(|number| ToHelper::Ask(Challenge(number))),
            Just(ToHelper::GiveBack),
        ]
    }

    /// Bytes that get past the first checks more often than chance.
    fn nearly_a_message() -> impl Strategy<Value = Vec<u8>> {
        let fields = (0..3_u32, 0..8_u32, 0..15_u64, prop_oneof![Just(0), any::<u64>()]);
        (fields, 0..BYTES, any::<u8>(), 0..BYTES + 2).prop_map(
            |((version, kind, first, second), at, flip, length)| {
                let mut bytes = Fields { version, kind, words: [first, second] }.encode().to_vec();
                if flip < 64 {
                    bytes[at] ^= flip;
                }
                if flip > 200 {
                    bytes.resize(length, 0);
                }
                bytes
            },
        )
    }

    /// Whatever is understood is what its own bytes say, and nothing else.
    fn judge(bytes: &[u8]) {
        if let Ok(message) = ToHelper::decode(bytes) {
            assert_eq!(message.encode().as_slice(), bytes);
        }
        match ToClient::decode(bytes) {
            // A refusal of another version has another version's number.
            Ok(message @ ToClient::Refused(_)) => assert_eq!(message.encode()[12..], bytes[12..]),
            Ok(message) => assert_eq!(message.encode().as_slice(), bytes),
            Err(_) => {}
        }
    }

    proptest! {
        #[test]
        fn messages_survive_the_journey(to_client in to_client(), to_helper in to_helper()) {
            prop_assert_eq!(ToClient::decode(&to_client.encode()), Ok(to_client));
            prop_assert_eq!(ToHelper::decode(&to_helper.encode()), Ok(to_helper));
        }

        #[test]
        fn any_bytes_are_judged(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            judge(&bytes);
        }

        #[test]
        fn nearly_messages_are_judged(bytes in nearly_a_message()) {
            judge(&bytes);
        }

        #[test]
        fn no_other_length_is_a_message(message in to_helper(), length in 0..200_usize) {
            let mut bytes = message.encode().to_vec();
            bytes.resize(length, 0);
            let judged = ToHelper::decode(&bytes);
            prop_assert_eq!(judged.is_ok(), length == BYTES);
        }

        #[test]
        fn another_version_is_told(message in to_helper(), version in 2_u32..) {
            let mut bytes = message.encode();
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            prop_assert_eq!(ToHelper::decode(&bytes), Err(DecodeError::Version(version)));
        }

        #[test]
        fn a_refusal_is_understood_in_every_version(refusal in refusal(), version: u32) {
            let mut bytes = ToClient::Refused(refusal).encode();
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            prop_assert_eq!(ToClient::decode(&bytes), Ok(ToClient::Refused(refusal)));
        }
    }

    #[test]
    fn the_bytes_are_what_they_were_in_version_1() {
        let bytes = ToHelper::Ask(Challenge(0x0102_0304_0506_0708)).encode();
        let expected =
            b"\x7fPINFOLD\x01\0\0\0\x02\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01\0\0\0\0\0\0\0\0";
        assert_eq!(&bytes, expected);
    }

    #[test]
    fn refusals_name_the_way_out() {
        assert!(ViewRefusal::NoMemory.to_string().contains("MemoryMax="));
        assert_eq!(ViewRefusal::from_words(ViewRefusal::NoMemory.words()), ViewRefusal::NoMemory);
        assert!(ViewRefusal::UserFull { limit: 7 }.to_string().contains("--max-views-per-user"));
        assert!(ViewRefusal::Version { helper: 9 }.to_string().contains('9'));
    }
}
