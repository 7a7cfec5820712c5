//! What the running kernel is like: its types, and how it preempts.

use super::btf::Btf;
use super::error::ProgramsError;
use super::hooks::{Hook, Shape};
use pinfold_kernel::Errno;
use pinfold_kernel::process::{kernel_version, random};
use std::fs::File;
use std::io::{BufRead, BufReader};

/// The running kernel.
#[derive(Debug)]
pub(super) struct Kernel {
    btf: Btf,
    release: Preemption,
}

/// How a kernel preempts itself, as far as its version tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Preemption {
    /// Only where it is asked to.
    Never,
    Full,
    Realtime,
    /// Decided when it boots; a word at this address says how.
    Dynamic {
        word: Option<u64>,
    },
}

/// The members of structures that the programs read, in the order of `struct offsets`, and whether the
/// kernel must have them. Which of two descriptions of the same thing it has, the hooks find out.
const MEMBERS: [(&str, &str, bool); 16] = [
    ("mmu_gather", "mm", true),
    ("vm_area_struct", "vm_mm", true),
    ("task_struct", "mm", true),
    ("bpf_iter_meta", "seq", true),
    ("unmap_desc", "vma_start", false),
    ("unmap_desc", "vma_end", false),
    ("pagetable_move_control", "old", false),
    ("pagetable_move_control", "old_addr", false),
    ("pagetable_move_control", "old_end", false),
    ("pagetable_move_control", "new_addr", false),
    ("pagetable_move_control", "len_in", false),
    ("vm_area_struct", "vm_ops", true),
    ("vm_area_struct", "vm_flags", true),
    ("ctl_table", "procname", true),
    ("vm_area_struct", "vm_start", true),
    ("vm_area_struct", "vm_end", true),
];

/// How many random words the owners of records are veiled by, as in `bpf/changes.h`.
pub(super) const VEIL_WORDS: usize = 8;
/// How many words `struct offsets` has: the members, the bit of a folio that has several pages, the address
/// of the word on preemption, and the veil.
pub(super) const OFFSETS: usize = MEMBERS.len() + 2 + VEIL_WORDS;

impl Kernel {
    pub(super) fn read() -> Result<Self, ProgramsError> {
        let bytes = std::fs::read("/sys/kernel/btf/vmlinux").map_err(|error| {
            ProgramsError::NoBtf { errno: error.raw_os_error().unwrap_or(libc::ENOENT) }
        })?;
        let btf = Btf::parse(bytes).ok_or(ProgramsError::UnknownBtf { wanted: "anything" })?;
        // An empty one would mean that the kernel never preempts.
        let version = kernel_version()
            .map_err(|Errno(errno)| ProgramsError::Os { operation: "uname", errno })?;
        Ok(Self { btf, release: preemption_by(&version, word_on_preemption) })
    }

    pub(super) fn has(&self, function: &str) -> bool {
        self.btf.function(function).is_some()
    }

    /// A function of this kind that the hook does not name.
    pub(super) fn unknown_kin(&self, hook: &Hook) -> Option<String> {
        let (head, tail) = hook.kin?;
        let is_kin = |name: &&str| name.starts_with(head) && name.ends_with(tail);
        let mut all = self.btf.functions().filter(is_kin);
        all.find(|name| !hook.functions.contains(name)).map(str::to_owned)
    }

    pub(super) fn number_of(&self, function: &str) -> Option<u32> {
        self.btf.function(function)
    }

    /// The shape that a function has, if the kernel has it.
    pub(super) fn shape_of(
        &self,
        function: &str,
        shapes: &'static [Shape],
    ) -> Option<&'static Shape> {
        let number = self.btf.function(function)?;
        shapes.iter().find(|shape| self.btf.takes(number, shape.parameters) && self.can_run(shape))
    }

    /// Whether the members are there that a program of this shape reads.
    fn can_run(&self, shape: &Shape) -> bool {
        let structure = match shape.program {
            "unmap_described" => "unmap_desc",
            "move_controlled" => "pagetable_move_control",
            _ => return true,
        };
        let needed = MEMBERS.iter().filter(|(found, ..)| *found == structure);
        needed.into_iter().all(|(_, member, _)| self.btf.offset(structure, member).is_some())
    }

    /// Where members of structures are, in bytes; 0 for those that this kernel need not have.
    pub(super) fn places(
        &self,
        members: &[(&str, &'static str, bool)],
    ) -> Result<Vec<u64>, ProgramsError> {
        let each = members.iter().map(|&(structure, member, needed)| {
            match self.btf.offset(structure, member) {
                None if needed => Err(ProgramsError::UnknownBtf { wanted: member }),
                found => Ok(found.unwrap_or(0)),
            }
        });
        each.collect()
    }

    /// `struct offsets`.
    pub(super) fn offsets(&self) -> Result<[u64; OFFSETS], ProgramsError> {
        let head = self.btf.enumerator("pageflags", "PG_head");
        let head = head.and_then(|bit| 1_u64.checked_shl(bit));
        let head = head.ok_or(ProgramsError::UnknownBtf { wanted: "PG_head" })?;
        let rest = [head, self.word_on_preemption().unwrap_or(0)];
        let places = self.places(&MEMBERS)?.into_iter().chain(rest).chain(veil()?);
        let mut offsets = [0; OFFSETS];
        offsets.iter_mut().zip(places).for_each(|(offset, place)| *offset = place);
        Ok(offsets)
    }

    fn word_on_preemption(&self) -> Option<u64> {
        if let Preemption::Dynamic { word } = self.release { word } else { None }
    }

    pub(super) fn preemption(&self) -> Preemption {
        self.release
    }
}

impl Preemption {
    /// How a kernel preempts that may take the processor from a program in the middle at any time; `None` for
    /// one that does not. `word` reads the word at the address that [`Kernel::offsets`] gave.
    pub(super) fn anywhere(self, word: impl Fn() -> Option<u32>) -> Option<&'static str> {
        match self {
            Self::Never => None,
            Self::Full => Some("full"),
            Self::Realtime => Some("rt"),
            // `PREEMPT_DYNAMIC`'s numbers: none, voluntary, full, lazy.
            Self::Dynamic { word: Some(_) } => match word() {
                Some(0 | 1 | 3) => None,
                Some(2) => Some("full"),
                _ => Some("unknown"),
            },
            Self::Dynamic { word: None } => Some("unknown"),
        }
    }
}

/// Each loader's own.
fn veil() -> Result<[u64; VEIL_WORDS], ProgramsError> {
    let mut veil = [0; VEIL_WORDS];
    for word in &mut veil {
        *word =
            random().map_err(|Errno(errno)| ProgramsError::Os { operation: "getrandom", errno })?;
    }
    Ok(veil)
}

fn preemption_by(version: &str, word: impl Fn() -> Option<u64>) -> Preemption {
    let has = |name: &str| version.split_whitespace().any(|found| found == name);
    if has("PREEMPT_RT") {
        Preemption::Realtime
    } else if has("PREEMPT_DYNAMIC") {
        Preemption::Dynamic { word: word() }
    } else if has("PREEMPT") {
        Preemption::Full
    } else {
        Preemption::Never
    }
}

/// Where the kernel keeps how it preempts; only who has `CAP_SYSLOG` is told.
fn word_on_preemption() -> Option<u64> {
    let symbols = BufReader::with_capacity(1 << 16, File::open("/proc/kallsyms").ok()?);
    let line = symbols
        .split(b'\n')
        .map_while(Result::ok)
        .find(|line| line.ends_with(b" preempt_dynamic_mode"))?;
    let address = std::str::from_utf8(line.get(..16)?).ok()?;
    u64::from_str_radix(address, 16).ok().filter(|&address| address != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_tells_how_a_kernel_preempts() {
        let by = |version| preemption_by(version, || Some(16));
        assert_eq!(by("#1 SMP Debian 6.1.1-1 (2023-01-01)"), Preemption::Never);
        assert_eq!(by("#1 SMP PREEMPT Thu"), Preemption::Full);
        assert_eq!(by("#1 SMP PREEMPT_RT Debian"), Preemption::Realtime);
        assert_eq!(by("#1 SMP PREEMPT_DYNAMIC Debian"), Preemption::Dynamic { word: Some(16) });
    }

    #[test]
    fn a_kernel_that_preempts_anywhere_is_recognised() {
        let judge = |release: Preemption, word| release.anywhere(|| word).is_none();
        let known = Preemption::Dynamic { word: Some(16) };
        assert!(judge(Preemption::Never, None));
        assert!(judge(known, Some(0)) && judge(known, Some(1)) && judge(known, Some(3)));
        assert!(!judge(known, Some(2)) && !judge(known, Some(u32::MAX)) && !judge(known, None));
        assert!(!judge(Preemption::Dynamic { word: None }, Some(1)));
        assert!(!judge(Preemption::Full, None) && !judge(Preemption::Realtime, None));
    }
}
