//! Defects on purpose.

/// One thing that the device, the monitor or the program gets wrong, to show that a check notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// The cache hears of no change of mappings.
    DeafCache,
    /// A renewed registration keeps the pages that it had.
    OldTranslation,
    /// The program forgets a connection that can touch the region that it suspends.
    ForgottenConnection,
    /// The device says that nothing is in flight while something is.
    EarlyQuiet,
    /// The device does not wait for its translation cache to be flushed.
    SlowFlush,
    /// A connection that died is silently re-established by its restart.
    CovertReconnect,
    /// What was posted on a connection that dies is never heard of again.
    SwallowedCompletions,
    /// A stopped connection is never restarted.
    NeverRestarted,
    /// The device changes a key when it renews, and says that it is the same.
    CovertKey,
    /// The program hears of every change of a key twice.
    Echo,
}

impl Mutant {
    /// Every one of them.
    pub const ALL: [Self; 10] = [
        Self::DeafCache,
        Self::OldTranslation,
        Self::ForgottenConnection,
        Self::EarlyQuiet,
        Self::SlowFlush,
        Self::CovertReconnect,
        Self::SwallowedCompletions,
        Self::NeverRestarted,
        Self::CovertKey,
        Self::Echo,
    ];

    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DeafCache => "deaf-cache",
            Self::OldTranslation => "old-translation",
            Self::ForgottenConnection => "forgotten-connection",
            Self::EarlyQuiet => "early-quiet",
            Self::SlowFlush => "slow-flush",
            Self::CovertReconnect => "covert-reconnect",
            Self::SwallowedCompletions => "swallowed-completions",
            Self::NeverRestarted => "never-restarted",
            Self::CovertKey => "covert-key",
            Self::Echo => "echo",
        }
    }
}
