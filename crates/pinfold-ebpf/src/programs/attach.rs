//! Loading programs and attaching them to the kernel's functions.

use super::error::ProgramsError;
use super::hooks::Hook;
use super::kernel::Kernel;
use super::object::{self, Target};
use super::sys::{self, Errno, Place};
use std::collections::HashMap;
use std::os::fd::OwnedFd;

/// A program and its attachment.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) program: OwnedFd,
    pub(super) link: OwnedFd,
}

/// What it takes to load the programs of one object.
pub(super) struct Loader<'k> {
    pub(super) kernel: &'k Kernel,
    pub(super) object: &'static [u8],
    pub(super) targets: HashMap<&'static str, Target>,
    /// Whether the programs for the ends are attached, too.
    pub(super) ends: bool,
}

impl Loader<'_> {
    /// Attaches to everything that `hook` names and this kernel has.
    pub(super) fn attach(
        &self,
        hook: &Hook,
        attached: &mut Vec<Attached>,
    ) -> Result<(), ProgramsError> {
        let kernel = self.kernel;
        if hook.if_there_is.is_some_and(|function| !kernel.has(function)) {
            return Ok(());
        }
        if let Some(function) = kernel.unknown_kin(hook) {
            return Err(ProgramsError::UnknownFunction { change: hook.change, function });
        }
        let before = attached.len();
        for &function in hook.functions.iter().filter(|function| kernel.has(function)) {
            let unknown = || ProgramsError::UnknownFunction {
                change: hook.change,
                function: function.into(),
            };
            let shape = kernel.shape_of(function, hook.shapes).ok_or_else(unknown)?;
            // The beginning first: a change that begins before both are there is told by its end.
            let both = [("end", Place::End), ("begin", Place::Begin)];
            let ends = if hook.both_ends && self.ends { &both[..] } else { &both[1..] };
            for &(end, place) in ends {
                let program = self.load(&format!("{end}/{}", shape.program), place, function)?;
                let link = sys::attach(&program)
                    .map_err(|Errno(errno)| ProgramsError::attach(function, errno))?;
                attached.push(Attached { program, link });
            }
        }
        if attached.len() == before {
            return Err(ProgramsError::NoHook { change: hook.change, functions: hook.functions });
        }
        Ok(())
    }

    /// Loads one program.
    pub(super) fn load(
        &self,
        section: &str,
        place: Place,
        function: &'static str,
    ) -> Result<OwnedFd, ProgramsError> {
        let missing = ProgramsError::UnknownBtf { wanted: function };
        let number = match place {
            Place::Nowhere => 0,
            _ => self.kernel.number_of(function).ok_or(missing.clone())?,
        };
        let program = object::program(self.object, section, &self.targets).ok_or(missing)?;
        let functions = described(&program)
            .map_err(|Errno(errno)| ProgramsError::Os { operation: "bpf(BPF_BTF_LOAD)", errno })?;
        let load = |log: &mut [u8]| {
            let instructions = &program.instructions;
            sys::load(c"pinfold", instructions, functions.as_ref(), place, number, log)
        };
        load(&mut []).map_err(|Errno(errno)| match errno {
            // A process that may load one program may load all, unless their place is the reason: a kernel without
            // the tracing of functions says the same.
            libc::EPERM if matches!(place, Place::Begin | Place::End) => {
                ProgramsError::AttachRefused { function, errno }
            }
            libc::EPERM => ProgramsError::NotPermitted { errno },
            errno => {
                let mut log = vec![0; 1 << 20];
                // The kernel truncates what does not fit.
                let _ = load(&mut log);
                ProgramsError::Rejected { program: section.into(), errno, log: last_words(&log) }
            }
        })
    }
}

/// A description of its functions, if it needs one.
fn described(program: &object::Program) -> Result<Option<sys::Functions>, Errno> {
    if !program.calls_back {
        return Ok(None);
    }
    let types = sys::function_type()?;
    let each = |&start: &usize| u32::try_from(start).map(|start| [start, 3]);
    let each: Result<Vec<_>, _> = program.functions.iter().map(each).collect();
    Ok(Some(sys::Functions { types, each: each.map_err(|_| Errno(libc::E2BIG))? }))
}

/// The end of what the verifier wrote.
fn last_words(log: &[u8]) -> String {
    let written = log.split(|&byte| byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(written);
    let lines: Vec<_> = text.lines().collect();
    lines.iter().skip(lines.len().saturating_sub(12)).copied().collect::<Vec<_>>().join("; ")
}
