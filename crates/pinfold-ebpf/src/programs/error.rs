//! Why there are no programs, or no view, and what to do about it.

use std::fmt;
use std::io;

/// Why the programs could not be loaded.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramsError {
    /// The processor has pages of other sizes than those that the programs are made for.
    #[error(
        "the eBPF programs know pages of 4 KiB, 2 MiB and 1 GiB, as x86-64 has them, and no other processor's: \
         use userfaultfd"
    )]
    OtherPages,
    /// The kernel does not describe its own types.
    #[error(
        "this kernel does not describe its types (/sys/kernel/btf/vmlinux, errno {errno}): use one \
         with CONFIG_DEBUG_INFO_BTF, as distributions' are"
    )]
    NoBtf {
        /// The kernel's error number.
        errno: i32,
    },
    /// The kernel's description of its types could not be understood.
    #[error(
        "{wanted} is not in this kernel's description of its types as Linux 6.1 to 7.3 have it: \
         report this kernel's version to us"
    )]
    UnknownBtf {
        /// What was looked for.
        wanted: &'static str,
    },
    /// This process may not load programs.
    #[error(
        "loading eBPF programs is forbidden here (errno {errno}): run as root or with CAP_BPF, \
         CAP_PERFMON and CAP_SYSLOG, in no user namespace, without kernel lockdown; or run \
         `pinfold notifyd` that way"
    )]
    NotPermitted {
        /// The kernel's error number.
        errno: i32,
    },
    /// Programs may be loaded, but not attached to the kernel's functions.
    #[error(
        "this kernel lets no eBPF program run at its functions ({function}: errno {errno}): use one \
         with CONFIG_FUNCTION_TRACER, DYNAMIC_FTRACE_WITH_DIRECT_CALLS and BPF_JIT, without lockdown"
    )]
    AttachRefused {
        /// The function.
        function: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
    /// As many programs as the kernel allows are attached to one of its functions. Those of a helper that has ended stay
    /// as long as one of its clients lives, so this [passes with time](Self::passes_with_time).
    #[error(
        "no more eBPF programs fit at {function} (errno {errno}): those of ended helpers stay until their clients end \
         (`bpftool link show` lists both); end some, or other tracers, and try again"
    )]
    ManyPrograms {
        /// The function.
        function: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
    /// This kernel has no function to attach to that tells of one kind of change.
    #[error(
        "this kernel has no function to attach to that tells of {change} (looked for {}): report \
         this kernel's version to us",
        .functions.join(", ")
    )]
    NoHook {
        /// The kind of change.
        change: &'static str,
        /// The functions that were looked for.
        functions: &'static [&'static str],
    },
    /// This kernel has a function that makes one kind of change, and that the programs do not know in this shape.
    #[error(
        "this kernel has `{function}`, which makes changes ({change}) that the programs do not know of: report \
         this kernel's version to us"
    )]
    UnknownFunction {
        /// The kind of change.
        change: &'static str,
        /// The function.
        function: String,
    },
    /// The kernel's verifier refused a program.
    #[error(
        "this kernel's verifier refuses the program `{program}` (errno {errno}): report this \
         kernel's version to us, with: {log}"
    )]
    Rejected {
        /// The program.
        program: String,
        /// The kernel's error number.
        errno: i32,
        /// The last words of the verifier.
        log: String,
    },
    /// This kernel may take the processor away in the middle of a program, and then skips the
    /// program in another task, silently.
    #[error(fmt = preemptible)]
    Preemptible {
        /// How the kernel preempts: `full`, `rt`, or `unknown`.
        model: &'static str,
    },
    /// The kernel calls no program at its functions at the moment: `kernel.ftrace_enabled` is 0.
    #[error("{SWITCHED_OFF}")]
    SwitchedOff,
    /// Something else went wrong.
    #[error("{operation} failed: {}", io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

impl ProgramsError {
    /// Why a program was not attached to `function`.
    pub(super) fn attach(function: &'static str, errno: i32) -> Self {
        match errno {
            libc::E2BIG => Self::ManyPrograms { function, errno },
            errno => Self::AttachRefused { function, errno },
        }
    }

    /// Whether trying again later can help, though neither the machine nor this process's rights change.
    pub fn passes_with_time(&self) -> bool {
        matches!(self, Self::ManyPrograms { .. })
    }
}

const SWITCHED_OFF: &str = "kernel.ftrace_enabled is 0, so this kernel calls no eBPF program at its functions: \
                            set it to 1 (sysctl kernel.ftrace_enabled=1)";

/// Why a process could not be given a view.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// The process has ended, or has become another program meanwhile.
    #[error("the process has ended, or runs another program by now")]
    Gone,
    /// The process has as many views as it can have.
    #[error("the process has {most} views already: share one, or drop one")]
    ManyViews {
        /// How many that is.
        most: usize,
    },
    /// As many processes are watched as can be.
    #[error("{most} views are in use already: end a process that has one")]
    ManyProcesses {
        /// How many that is.
        most: usize,
    },
    /// As [`ProgramsError::SwitchedOff`], since the programs were loaded.
    #[error("{SWITCHED_OFF}")]
    SwitchedOff,
    /// As [`ProgramsError::Preemptible`], since the programs were loaded.
    #[error(
        "this kernel preempts anywhere by now ({model}), and may skip a program: set \
         /sys/kernel/debug/sched/preempt to lazy, voluntary or none"
    )]
    Preemptible {
        /// How the kernel preempts.
        model: &'static str,
    },
    /// Something else went wrong.
    #[error("{operation} failed: {}", io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

fn preemptible(model: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match model {
        "unknown" => f.write_str(
            "how this kernel preempts itself cannot be told, and it may be in a way by which a \
             change could go unseen: run with CAP_SYSLOG, which shows that (/proc/kallsyms), and \
             with kernel.kptr_restrict below 2",
        ),
        model => write!(
            f,
            "this kernel's preemption model ({model}) may skip a program that it interrupted \
             in another task, so a change could go unseen: boot with preempt=lazy, \
             preempt=voluntary or preempt=none"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_has_its_own_way_out() {
        let refusals = [
            (ProgramsError::NoBtf { errno: libc::ENOENT }, "CONFIG_DEBUG_INFO_BTF"),
            (ProgramsError::NotPermitted { errno: libc::EPERM }, "CAP_BPF"),
            (
                ProgramsError::AttachRefused { function: "unmap_vmas", errno: libc::EPERM },
                "CONFIG_FUNCTION_TRACER",
            ),
            (ProgramsError::attach("unmap_vmas", libc::E2BIG), "until their clients end"),
            (
                ProgramsError::NoHook { change: "moving", functions: &["a", "b"] },
                "(looked for a, b)",
            ),
            (
                ProgramsError::UnknownFunction { change: "moving", function: "move_it".into() },
                "report this kernel's version",
            ),
            (ProgramsError::Preemptible { model: "full" }, "preempt=lazy"),
            (ProgramsError::SwitchedOff, "sysctl kernel.ftrace_enabled=1"),
        ];
        for (refusal, word) in refusals {
            assert!(refusal.to_string().contains(word), "{refusal}");
            let passes = matches!(refusal, ProgramsError::ManyPrograms { .. });
            assert_eq!(refusal.passes_with_time(), passes, "{refusal}");
        }
    }
}
