//! Loading the programs and giving out views.
//!
//! The order of layers, each using only what stands before it: `sys`, `btf`, `object`, `hooks`,
//! `error`, `kernel`, `maps`, `setting`, `attach`, `instrument`, then this.

mod attach;
mod btf;
mod error;
mod hooks;
#[cfg(feature = "instrument")]
mod instrument;
mod kernel;
mod maps;
mod object;
mod setting;
mod sys;

pub use error::{ProgramsError, ViewError};
#[cfg(feature = "instrument")]
pub use instrument::{Instrument, Parting, Partings};

use crate::{View, ViewId};
use attach::{Attached, Loader};
use hooks::Hook;
use kernel::{Kernel, Preemption};
use maps::Maps;
use std::io::Read;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use sys::{Errno, Place};

/// The programs, loaded and attached: as long as this lives, or a [`View`] that it gave.
///
/// Loading takes a fraction of a second, most of which is the kernel's verifier's. One is enough for any
/// number of processes; two at a time do no harm, and each costs every change of a mapping on
/// this machine some tens of nanoseconds.
#[derive(Debug)]
pub struct Programs {
    /// Guards the table of views, and with it every change of `watched` that we make; the programs
    /// make theirs concurrently. Nothing else is locked while it is held.
    maps: Mutex<Maps>,
    attached: Vec<Attached>,
    /// Says which address space a process has.
    whose: OwnedFd,
    /// Says in a view that nothing more will be told there.
    close: OwnedFd,
    preemption: Preemption,
}

impl Programs {
    /// Loads the programs and attaches them.
    ///
    /// # Errors
    ///
    /// [`ProgramsError`] says what this machine or this process lacks. Nothing is left behind.
    pub fn load() -> Result<Self, ProgramsError> {
        Self::load_at(|_| true, true)
    }

    /// At the hooks that are wanted, and there at their ends as well, or at their beginnings alone.
    fn load_at(wanted: impl Fn(&&Hook) -> bool, ends: bool) -> Result<Self, ProgramsError> {
        if !cfg!(target_arch = "x86_64") {
            return Err(ProgramsError::OtherPages);
        }
        let kernel = Kernel::read()?;
        if let Some((change, function)) = hooks::unseen(|function| kernel.has(function)) {
            return Err(ProgramsError::UnknownFunction { change, function: function.into() });
        }
        let maps = Maps::new(&kernel.offsets()?)?;
        let targets = maps.targets();
        let loader = Loader { kernel: &kernel, object: object::CHANGES, targets, ends };
        let whose = loader.load("iter/whose", Place::Iterator, hooks::THREADS)?;
        let close = loader.load("call/close", Place::Nowhere, hooks::THREADS)?;
        let mut attached = vec![];
        for hook in hooks::HOOKS.iter().filter(wanted) {
            loader.attach(hook, &mut attached)?;
        }
        setting::is_followed(|| maps.setting_reads())?;
        // Last, because it cannot always be found out, and then another reason says more.
        let preemption = kernel.preemption();
        if let Some(model) = preemption.anywhere(|| word_on_preemption(&whose)) {
            return Err(ProgramsError::Preemptible { model });
        }
        Ok(Self { maps: Mutex::new(maps), attached, whose, close, preemption })
    }

    /// A view of the changes of one process. `process` is a pidfd, which names exactly one process:
    /// the number of one that ends, or runs another program, does not pass to another.
    ///
    /// Takes 130 KiB of kernel memory and some tens of milliseconds: for each of its three maps the
    /// kernel waits until no program is in the middle of something that is as it was before.
    ///
    /// A process that is just being made by `vfork` or `posix_spawn` still has its parent's address space;
    /// the view is of that one then.
    ///
    /// # Errors
    ///
    /// [`ViewError`]; the process is watched no more than before.
    pub fn view(&self, process: BorrowedFd<'_>) -> Result<View, ViewError> {
        let mm = self.address_space(process)?;
        let mut maps = self.lock();
        let number = maps.open(mm, &self.close)?;
        // The proof that every change in this view is `process`'s own. Let `mm` be entered at a
        // moment `t`. The address space that is `mm` at `t`, if there is one, is still the same one
        // when we find the entry below: had it ended, its entry would have gone with it. And between the
        // two the process has told us that it has `mm`. So the address space that is `mm` from the
        // moment that there is one is the process's, and changes are told of none before it. The process
        // cannot leave it and come back, because what it left by running another program ends
        // unless another process shares it, and then it is not given to the process again.
        if self.address_space(process) != Ok(mm) || !maps.is_open(number) {
            maps.close(number, &self.close);
            return Err(ViewError::Gone);
        }
        // From now on a switch-off of the programs closes this view before.
        if let Err(error) = self.programs_run() {
            maps.close(number, &self.close);
            return Err(error);
        }
        let links = self.attached.iter().map(|attached| attached.link.try_clone());
        let links = links.collect::<Result<Vec<_>, _>>();
        let view = links.map_err(|error| os("dup", error.raw_os_error().unwrap_or(libc::EMFILE)));
        let view = view.and_then(|links| maps.view(number, links));
        if view.is_err() {
            maps.close(number, &self.close);
        }
        view
    }

    /// Releases what a view still holds, that of a process that ended for instance. A process that has it
    /// and lives is notified that nothing more will be reported there.
    pub fn forget(&self, view: ViewId) {
        let mut maps = self.lock();
        if let Some(number) = maps.number_of(view) {
            maps.close(number, &self.close);
        }
    }

    /// How often the kernel skipped one of the programs, because a task was preempted in the middle of
    /// it. A change is lost only when it skips both programs of a function at once. For an operator to look
    /// at; nothing here acts on it (`bpf/changes.c`, 4, says why).
    pub fn misses(&self) -> u64 {
        let each = self.attached.iter().map(|attached| sys::misses(&attached.program));
        each.map(|misses| misses.unwrap_or(0)).sum()
    }

    /// Whether the kernel calls the programs, and lets none interrupt another.
    fn programs_run(&self) -> Result<(), ViewError> {
        if setting::read().map_err(|Errno(errno)| os("read", errno))? == Some(false) {
            return Err(ViewError::SwitchedOff);
        }
        let model = self.preemption.anywhere(|| word_on_preemption(&self.whose));
        model.map_or(Ok(()), |model| Err(ViewError::Preemptible { model }))
    }

    fn lock(&self) -> MutexGuard<'_, Maps> {
        // A thread that panicked left a view open at worst.
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address of the kernel's `mm_struct` that a process runs in.
    fn address_space(&self, process: BorrowedFd<'_>) -> Result<u64, ViewError> {
        let threads = sys::iterate(&self.whose, process).map_err(|Errno(errno)| match errno {
            libc::ESRCH => ViewError::Gone,
            errno => os("bpf(BPF_LINK_CREATE)", errno),
        })?;
        let answers = read_all(threads)?;
        // The first thread may have ended before the others, and has none then.
        answers.iter().map(|[mm, _]| *mm).find(|&mm| mm != 0).ok_or(ViewError::Gone)
    }
}

/// What the program `whose` wrote: for each thread its address space and how the kernel preempts.
fn read_all(mut file: std::fs::File) -> Result<Vec<[u64; 2]>, ViewError> {
    let mut bytes = vec![];
    file.read_to_end(&mut bytes)
        .map_err(|error| os("read", error.raw_os_error().unwrap_or(libc::EIO)))?;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    Ok(bytes
        .chunks_exact(16)
        .map(|answer| {
            let (mm, preemption) = answer.split_at(8);
            [word(mm), word(preemption)]
        })
        .collect())
}

fn os(operation: &'static str, errno: i32) -> ViewError {
    ViewError::Os { operation, errno }
}

/// What the kernel's word for its way of preempting holds.
fn word_on_preemption(whose: &OwnedFd) -> Option<u32> {
    let this = crate::this_process().ok()?;
    let threads = sys::iterate(whose, std::os::fd::AsFd::as_fd(&this)).ok()?;
    let [_, word] = *read_all(threads).ok()?.first()?;
    u32::try_from(word).ok()
}
