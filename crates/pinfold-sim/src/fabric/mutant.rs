//! Defects on purpose.

use pinfold_core::listed;

listed! {
    /// One thing that the device, the monitor or the program gets wrong, to show that a check notices.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Mutant {
        /// The cache hears of no change of mappings.
        DeafCache => "deaf-cache",
        /// A renewed registration keeps the pages that it had.
        OldTranslation => "old-translation",
        /// The program forgets a connection that can touch the region that it suspends.
        ForgottenConnection => "forgotten-connection",
        /// The device says that nothing is in flight while something is.
        EarlyQuiet => "early-quiet",
        /// The device does not wait for its translation cache to be flushed.
        SlowFlush => "slow-flush",
        /// A connection that died is silently re-established by its restart.
        CovertReconnect => "covert-reconnect",
        /// What was posted on a connection that dies is never heard of again.
        SwallowedCompletions => "swallowed-completions",
        /// A stopped connection is never restarted.
        NeverRestarted => "never-restarted",
        /// The device changes a key when it renews, and says that it is the same.
        CovertKey => "covert-key",
        /// The program hears of every change of a key twice.
        Echo => "echo",
    }
}
