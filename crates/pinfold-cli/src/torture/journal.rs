//! Where every thread of a trial is, kept in a file in memory that outlives the process: the parent that
//! started the trial reads it, also when the trial has died or hangs.
//!
//! Each thread has a row of its own, and so has the forked child that it may have. A row is written
//! by one process at a time and read by the supervisor, which needs it exact only once the writer
//! has ended.

use pinfold::listed;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::Stdio;

/// Words of a row.
const WORDS: usize = 8;
const ROW_BYTES: usize = WORDS * size_of::<u64>();

listed! {
    /// How far a trial, or a thread of it, has come.
    #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
    pub(super) enum Stage {
        #[default]
        NotBegun,
        Running,
        /// A trial whose threads are over and that prints its report, or has.
        Reporting,
        Over,
    }
}

/// Where a thread, a child or the whole trial is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Row {
    pub(super) stage: Stage,
    /// The operation under way, by its place in the program.
    pub(super) step: u64,
    pub(super) transfers: u64,
    pub(super) wrong: u64,
    /// A child's: its process, the seed of its program, and whether it may map nothing more.
    pub(super) process: u64,
    pub(super) seed: u64,
    pub(super) flood: bool,
}

impl Row {
    fn bytes(self) -> [u8; ROW_BYTES] {
        let flood = u64::from(self.flood);
        let words = [
            self.stage as u64,
            self.step,
            self.transfers,
            self.wrong,
            self.process,
            self.seed,
            flood,
            0,
        ];
        let mut bytes = [0; ROW_BYTES];
        for (place, word) in bytes.chunks_mut(size_of::<u64>()).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn of(bytes: &[u8; ROW_BYTES]) -> Self {
        let (words, _) = bytes.as_chunks();
        let word = |number: usize| words.get(number).map_or(0, |word| u64::from_le_bytes(*word));
        let stage = usize::try_from(word(0)).ok().and_then(|stage| Stage::ALL.get(stage).copied());
        Self {
            stage: stage.unwrap_or_default(),
            step: word(1),
            transfers: word(2),
            wrong: word(3),
            process: word(4),
            seed: word(5),
            flood: word(6) != 0,
        }
    }
}

/// Which thread's or process's row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Who {
    Trial,
    Thread(usize),
    /// The forked child of a thread.
    Child(usize),
}

impl Who {
    const fn place(self) -> u64 {
        let number = match self {
            Self::Trial => 0,
            Self::Thread(thread) => 1 + 2 * thread,
            Self::Child(thread) => 2 + 2 * thread,
        };
        (number * ROW_BYTES) as u64
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Journal(File);

impl Journal {
    /// An empty one.
    pub(super) fn new() -> io::Result<Self> {
        crate::device::memory_file().map(Self)
    }

    /// That of the supervisor who started this process, which has it as its standard input.
    pub(super) fn inherited() -> io::Result<Self> {
        io::stdin().as_fd().try_clone_to_owned().map(|file| Self(file.into()))
    }

    /// Another descriptor of the same file.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// For [`inherited`](Self::inherited).
    pub(super) fn to_inherit(&self) -> io::Result<Stdio> {
        self.0.try_clone().map(Stdio::from)
    }

    /// Writes a row: one system call.
    pub(super) fn write(&self, who: Who, row: Row) {
        // A file in memory refuses no write within the first page or two; were it to, the report of a
        // lost trial would say less.
        let _ = self.0.write_all_at(&row.bytes(), who.place());
    }

    /// What was never written reads as a row that has not begun.
    pub(super) fn read(&self, who: Who) -> Row {
        let mut bytes = [0; ROW_BYTES];
        let read = self.0.read_exact_at(&mut bytes, who.place());
        read.map(|()| Row::of(&bytes)).unwrap_or_default()
    }

    /// All that it holds, to be compared.
    pub(super) fn contents(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut copy = &self.0;
        let _ = std::io::Seek::rewind(&mut copy).and_then(|()| copy.read_to_end(&mut bytes));
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_as_they_were_written() {
        let journal = Journal::new().unwrap();
        let row = |step| Row {
            stage: Stage::Running,
            step,
            transfers: 2,
            wrong: 3,
            process: 4,
            seed: u64::MAX,
            flood: true,
        };
        let everyone = [Who::Trial, Who::Thread(0), Who::Child(0), Who::Thread(255)];
        for (who, step) in everyone.into_iter().zip(7..) {
            journal.write(who, row(step));
        }
        for (who, step) in everyone.into_iter().zip(7..) {
            assert_eq!(journal.read(who), row(step));
        }
        assert_eq!(journal.read(Who::Child(3)), Row::default());
        let before = journal.contents();
        journal.write(Who::Child(0), row(1));
        assert_ne!(journal.contents(), before);
    }
}
