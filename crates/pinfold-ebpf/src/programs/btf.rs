//! The kernel's description of its own types (`/sys/kernel/btf/vmlinux`), as far as we ask it.

use std::ops::Range;

/// A kernel's types.
#[derive(Debug)]
pub(super) struct Btf {
    bytes: Vec<u8>,
    strings: Range<usize>,
    types: Vec<Type>,
}

/// One type: what it begins with, and where the rest stands.
#[derive(Clone, Copy, Debug)]
struct Type {
    kind: u32,
    name: u32,
    /// How many members or parameters follow.
    count: usize,
    /// Whether offsets of members share their word with the width of a bit field.
    bit_fields: bool,
    /// A size, or another type's number.
    third: u32,
    rest: usize,
}

const INTEGER: u32 = 1;
const POINTER: u32 = 2;
const STRUCTURE: u32 = 4;
const UNION: u32 = 5;
const ENUMERATION: u32 = 6;
const FUNCTION: u32 = 12;

/// What a parameter of a function is, as far as we tell them apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Parameter {
    /// A number of the size of an address.
    Word,
    /// A pointer to a structure of this name.
    PointerTo(&'static str),
    /// Whatever it is.
    Any,
}

impl Btf {
    /// Understands a description; `None` if it is not one.
    pub(super) fn parse(bytes: Vec<u8>) -> Option<Self> {
        let mut btf = Self { bytes, strings: 0..0, types: vec![] };
        if btf.word(0)? & 0xffff != 0xeb9f {
            return None;
        }
        let types = btf.section(8)?;
        btf.strings = btf.section(16)?;
        // Number 0 is `void`.
        btf.types.push(Type { kind: 0, name: 0, count: 0, bit_fields: false, third: 0, rest: 0 });
        let mut at = types.start;
        while at < types.end {
            let (found, next) = btf.type_at(at)?;
            btf.types.push(found);
            at = next;
        }
        Some(btf)
    }

    fn word(&self, offset: usize) -> Option<u32> {
        let bytes = self.bytes.get(offset..offset.checked_add(4)?)?;
        bytes.try_into().ok().map(u32::from_ne_bytes)
    }

    /// Where a section is whose offset and length the header gives at `field`.
    fn section(&self, field: usize) -> Option<Range<usize>> {
        let start = self.word(4)? as usize + self.word(field)? as usize;
        let end = start + self.word(field + 4)? as usize;
        (end <= self.bytes.len()).then_some(start..end)
    }

    fn type_at(&self, at: usize) -> Option<(Type, usize)> {
        let information = self.word(at + 4)?;
        let (kind, count) = (information >> 24 & 0x1f, (information & 0xffff) as usize);
        let found = Type {
            kind,
            name: self.word(at)?,
            count,
            bit_fields: information >> 31 != 0,
            third: self.word(at + 8)?,
            rest: at + 12,
        };
        Some((found, found.rest + 4 * words_after(kind, count)?))
    }

    fn name(&self, offset: u32) -> Option<&[u8]> {
        let strings = self.bytes.get(self.strings.clone())?;
        strings.get(offset as usize..)?.split(|&byte| byte == 0).next()
    }

    fn find(&self, kind: u32, name: &str) -> Option<usize> {
        let is_it =
            |found: &Type| found.kind == kind && self.name(found.name) == Some(name.as_bytes());
        self.types.iter().position(is_it)
    }

    /// The number of a function.
    pub(super) fn function(&self, name: &str) -> Option<u32> {
        self.find(FUNCTION, name).and_then(|number| u32::try_from(number).ok())
    }

    /// The names of all functions.
    pub(super) fn functions(&self) -> impl Iterator<Item = &str> {
        let functions = self.types.iter().filter(|found| found.kind == FUNCTION);
        functions.filter_map(|found| std::str::from_utf8(self.name(found.name)?).ok())
    }

    /// Whether a function's parameters begin with these.
    pub(super) fn takes(&self, function: u32, wanted: &[Parameter]) -> bool {
        let prototype = |number: u32| {
            let function = self.types.get(number as usize)?;
            self.types.get(function.third as usize)
        };
        let Some(prototype) = prototype(function) else { return false };
        let parameter = |index: usize| self.word(prototype.rest + 8 * index + 4);
        prototype.count >= wanted.len()
            && wanted.iter().enumerate().all(|(index, wanted)| {
                parameter(index).is_some_and(|number| self.is(number, *wanted))
            })
    }

    fn is(&self, number: u32, wanted: Parameter) -> bool {
        let found = self.plain(number);
        match wanted {
            Parameter::Any => true,
            Parameter::Word => found.is_some_and(|found| found.kind == INTEGER && found.third == 8),
            Parameter::PointerTo(name) => {
                let target = found.filter(|found| found.kind == POINTER);
                target.and_then(|pointer| self.plain(pointer.third)).is_some_and(|target| {
                    target.kind == STRUCTURE && self.name(target.name) == Some(name.as_bytes())
                })
            }
        }
    }

    /// A type without its other names and qualifiers.
    fn plain(&self, mut number: u32) -> Option<Type> {
        // No chain is that long; a circle would be.
        for _ in 0..32 {
            let found = self.types.get(number as usize)?;
            match found.kind {
                8..=11 | 18 => number = found.third,
                _ => return Some(*found),
            }
        }
        None
    }

    /// Where in a structure a member is, in bytes.
    pub(super) fn offset(&self, structure: &str, member: &str) -> Option<u64> {
        let structure = self.types.get(self.find(STRUCTURE, structure)?)?;
        self.offset_in(*structure, member.as_bytes(), 4).map(|bits| u64::from(bits / 8))
    }

    /// The value of one of an enumeration's names.
    pub(super) fn enumerator(&self, enumeration: &str, name: &str) -> Option<u32> {
        let found = self.types.get(self.find(ENUMERATION, enumeration)?)?;
        (0..found.count).map(|index| found.rest + 8 * index).find_map(|at| {
            let is_it = self.name(self.word(at)?)? == name.as_bytes();
            is_it.then(|| self.word(at + 4)).flatten()
        })
    }

    /// As [`offset`](Self::offset), in bits; members of nameless members are members too.
    fn offset_in(&self, structure: Type, member: &[u8], depth: u32) -> Option<u32> {
        (0..structure.count).find_map(|index| {
            let at = structure.rest + 12 * index;
            let offset = self.word(at + 8)?;
            let offset = if structure.bit_fields { offset & 0xff_ffff } else { offset };
            let name = self.name(self.word(at)?)?;
            if name == member {
                return Some(offset);
            }
            let inner = self.plain(self.word(at + 4)?)?;
            let nameless = name.is_empty() && matches!(inner.kind, STRUCTURE | UNION) && depth > 0;
            let within = if nameless { self.offset_in(inner, member, depth - 1) } else { None };
            within.map(|within| offset + within)
        })
    }
}

/// How many words follow the first three of a type; `None` for a kind that we do not know.
fn words_after(kind: u32, count: usize) -> Option<usize> {
    match kind {
        2 | 7..=12 | 16 | 18 => Some(0),
        1 | 14 | 17 => Some(1),
        6 | 13 => Some(2 * count),
        3 => Some(3),
        4 | 5 | 15 | 19 => Some(3 * count),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> Option<Btf> {
        let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            eprintln!("skipped: this kernel does not describe its types");
            return None;
        };
        Some(Btf::parse(bytes).unwrap())
    }

    #[test]
    fn the_running_kernel_is_understood() {
        let Some(btf) = kernel() else { return };
        let exit = btf.function("exit_mmap").unwrap();
        assert!(btf.takes(exit, &[Parameter::PointerTo("mm_struct")]));
        assert!(!btf.takes(exit, &[Parameter::PointerTo("task_struct")]));
        assert!(!btf.takes(exit, &[Parameter::Word]));
        assert!(!btf.takes(exit, &[Parameter::Any, Parameter::Any]));
        assert_eq!(btf.offset("list_head", "prev"), Some(8));
        // In a union without a name.
        assert_eq!(btf.offset("bpf_iter_meta", "seq"), Some(0));
        assert_eq!(btf.offset("list_head", "no such member"), None);
        assert!(btf.enumerator("pageflags", "PG_head").is_some_and(|bit| bit < 64));
        assert_eq!(btf.enumerator("pageflags", "PG_no_such_flag"), None);
        assert_eq!(btf.function("no such function"), None);
    }

    #[test]
    fn half_a_description_is_none() {
        let Ok(mut bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else { return };
        bytes.truncate(bytes.len() / 2);
        assert!(Btf::parse(bytes).is_none());
        assert!(Btf::parse(vec![]).is_none());
        assert!(Btf::parse(vec![0; 64]).is_none());
    }
}
