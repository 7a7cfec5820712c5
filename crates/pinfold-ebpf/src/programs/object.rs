//! The object files that the compiler made of `bpf/changes.c` and `bpf/partings.c`: as much of ELF as that takes.
//!
//! A program is a section named `begin/...`, `end/...`, `call/...` or `iter/...`, followed by the functions
//! that it calls or has called; these stand in `.text`, and call none themselves.

use std::collections::HashMap;

/// The object of the programs, checked in next to its source; `./check ebpf` rebuilds it.
pub(super) static CHANGES: &[u8] = include_bytes!("../../bpf/changes.o");
/// That of the instrument, likewise.
#[cfg(feature = "instrument")]
pub(super) static PARTINGS: &[u8] = include_bytes!("../../bpf/partings.o");

/// What an instruction's reference to a symbol is to be replaced with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// A map's descriptor.
    Map(i32),
    /// The value of an array map of one element.
    ValueOf(i32),
}

/// What the kernel is given.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) instructions: Vec<u64>,
    /// Where each of its functions begins, the program itself first.
    pub(super) functions: Vec<usize>,
    /// Whether one of them is called by a helper, for which the kernel wants them described.
    pub(super) calls_back: bool,
}

/// The instructions of the program in section `name` of an object, with the maps in place; `None` if it
/// has no such section, or refers to what `targets` does not know.
pub(super) fn program(
    object: &[u8],
    name: &str,
    targets: &HashMap<&str, Target>,
) -> Option<Program> {
    Object::new(object)?.program(name, targets)
}

struct Object<'b> {
    bytes: &'b [u8],
    sections: Vec<Section<'b>>,
    symbols: usize,
}

struct Section<'b> {
    name: &'b str,
    kind: u32,
    bytes: &'b [u8],
    /// For relocations: the section that they are for.
    information: usize,
}

struct Symbol<'b> {
    name: &'b str,
    kind: u8,
    section: usize,
    value: usize,
    size: usize,
}

/// Where a relocation is, of which kind, to which symbol.
struct Relocation {
    at: usize,
    kind: u32,
    symbol: usize,
}

const SYMBOLS: u32 = 2;
const NO_BYTES: u32 = 8;
const RELOCATIONS: u32 = 9;
const FUNCTION: u8 = 2;
const LOAD_64: u32 = 1;
const CALL: u32 = 10;
/// What a load's source says when it loads the address of one of the program's own functions.
const FUNCTION_HERE: u64 = 4;

impl<'b> Object<'b> {
    fn new(bytes: &'b [u8]) -> Option<Self> {
        let table = usize::try_from(u64_at(bytes, 40)?).ok()?;
        let entry = |index: usize| bytes.get(table + 64 * index..table + 64 * (index + 1));
        let count = u16_at(bytes, 60)?.into();
        let names = contents(bytes, entry(u16_at(bytes, 62)?.into())?)?;
        let sections: Option<Vec<_>> =
            (0..count).map(|index| section(bytes, entry(index)?, names)).collect();
        let sections = sections?;
        let symbols = sections.iter().position(|section| section.kind == SYMBOLS)?;
        Some(Self { bytes, sections, symbols })
    }

    fn program(&self, name: &str, targets: &HashMap<&str, Target>) -> Option<Program> {
        let number = self.sections.iter().position(|section| section.name == name)?;
        let length = self.sections.get(number)?.bytes.len();
        let mut program = Program {
            instructions: self.piece(number, 0..length, targets)?,
            functions: vec![0],
            calls_back: false,
        };
        let mut entries = HashMap::new();
        for found in self.relocations(number) {
            let Some(start) = self.function_at(&found, *program.instructions.get(found.at / 8)?)
            else {
                continue;
            };
            let entry = match entries.get(&start) {
                Some(&entry) => entry,
                None => self.append(&mut program, start, targets)?,
            };
            entries.insert(start, entry);
            let distance = i32::try_from(entry - found.at / 8 - 1).ok()?;
            let instruction = program.instructions.get_mut(found.at / 8)?;
            *instruction = with_immediate(*instruction, distance);
            if found.kind == LOAD_64 {
                *instruction = with_source(*instruction, FUNCTION_HERE);
                program.calls_back = true;
            }
        }
        Some(program)
    }

    /// Where in `.text` the function begins that an instruction, as the compiler left it, calls or has the address
    /// of; `None` if it means something else.
    fn function_at(&self, found: &Relocation, instruction: u64) -> Option<usize> {
        let symbol = self.symbol(found.symbol)?;
        let in_text = self.sections.get(symbol.section)?.name == ".text";
        let offset = usize::try_from(immediate(instruction)).ok();
        match found.kind {
            CALL => usize::try_from(immediate(instruction) + 1).ok().map(|index| index * 8),
            LOAD_64 if in_text => offset.map(|offset| symbol.value + offset),
            _ => None,
        }
    }

    /// Puts the function that begins there in `.text` behind the rest, and tells where it is now.
    fn append(
        &self,
        program: &mut Program,
        start: usize,
        targets: &HashMap<&str, Target>,
    ) -> Option<usize> {
        let text = self.sections.iter().position(|section| section.name == ".text")?;
        let function = self.all_symbols().find(|symbol| {
            symbol.kind == FUNCTION && symbol.section == text && symbol.value == start
        })?;
        let entry = program.instructions.len();
        program.instructions.extend(self.piece(text, start..start + function.size, targets)?);
        program.functions.push(entry);
        Some(entry)
    }

    /// Instructions of a section with what they refer to in place, functions excepted.
    fn piece(
        &self,
        number: usize,
        range: std::ops::Range<usize>,
        targets: &HashMap<&str, Target>,
    ) -> Option<Vec<u64>> {
        let bytes = self.sections.get(number)?.bytes.get(range.clone())?;
        let mut instructions: Vec<u64> =
            bytes.chunks_exact(8).filter_map(|chunk| u64_at(chunk, 0)).collect();
        for found in self.relocations(number) {
            if !range.contains(&found.at) || found.kind == CALL {
                continue;
            }
            let symbol = self.symbol(found.symbol)?;
            if self.sections.get(symbol.section).is_some_and(|section| section.name == ".text") {
                continue;
            }
            let place = (found.at - range.start) / 8;
            let (head, tail) = instructions.get_mut(place..place + 2)?.split_at_mut(1);
            if found.kind != LOAD_64 {
                return None;
            }
            refer(head.first_mut()?, tail.first_mut()?, *targets.get(symbol.name)?);
        }
        Some(instructions)
    }

    fn relocations(&self, number: usize) -> impl Iterator<Item = Relocation> {
        let tables = self
            .sections
            .iter()
            .filter(move |section| section.kind == RELOCATIONS && section.information == number);
        tables.flat_map(|table| table.bytes.chunks_exact(16)).filter_map(|entry| {
            Some(Relocation {
                at: usize::try_from(u64_at(entry, 0)?).ok()?,
                kind: u32_at(entry, 8)?,
                symbol: u32_at(entry, 12)? as usize,
            })
        })
    }

    fn all_symbols(&self) -> impl Iterator<Item = Symbol<'b>> {
        let count = self.sections.get(self.symbols).map_or(0, |table| table.bytes.len() / 24);
        (0..count).filter_map(|index| self.symbol(index))
    }

    fn symbol(&self, index: usize) -> Option<Symbol<'b>> {
        let table = self.sections.get(self.symbols)?;
        let entry = table.bytes.get(24 * index..24 * (index + 1))?;
        // A symbol table names the section of its strings where others name what they belong to;
        // here all strings are in one section.
        let strings = self.sections.iter().find(|section| section.name == ".strtab")?.bytes;
        debug_assert!(strings.len() < self.bytes.len());
        Some(Symbol {
            name: string(strings, u32_at(entry, 0)?)?,
            kind: entry.get(4)? & 0xf,
            section: u16_at(entry, 6)?.into(),
            value: usize::try_from(u64_at(entry, 8)?).ok()?,
            size: usize::try_from(u64_at(entry, 16)?).ok()?,
        })
    }
}

fn section<'b>(bytes: &'b [u8], entry: &[u8], names: &'b [u8]) -> Option<Section<'b>> {
    let kind = u32_at(entry, 4)?;
    Some(Section {
        name: string(names, u32_at(entry, 0)?)?,
        kind,
        bytes: if kind == NO_BYTES { &[] } else { contents(bytes, entry)? },
        information: u32_at(entry, 44)? as usize,
    })
}

fn contents<'b>(bytes: &'b [u8], entry: &[u8]) -> Option<&'b [u8]> {
    let start = usize::try_from(u64_at(entry, 24)?).ok()?;
    bytes.get(start..start + usize::try_from(u64_at(entry, 32)?).ok()?)
}

/// Makes a 64-bit load, two instructions long, refer to a map or to its value.
fn refer(head: &mut u64, tail: &mut u64, target: Target) {
    let (source, descriptor) = match target {
        Target::Map(descriptor) => (1, descriptor),
        Target::ValueOf(descriptor) => (2, descriptor),
    };
    // What was added to the symbol is where in the value to begin.
    let addend = immediate(*head);
    *head = with_immediate(with_source(*head, source), descriptor);
    *tail = with_immediate(*tail, if source == 2 { addend } else { 0 });
}

fn with_source(instruction: u64, source: u64) -> u64 {
    instruction & !0xf000 | source << 12
}

fn immediate(instruction: u64) -> i32 {
    ((instruction >> 32) as u32).cast_signed()
}

fn with_immediate(instruction: u64, value: i32) -> u64 {
    instruction & 0xffff_ffff | u64::from(value.cast_unsigned()) << 32
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

fn string(strings: &[u8], offset: u32) -> Option<&str> {
    let rest = strings.get(offset as usize..)?;
    let name = rest.split(|&byte| byte == 0).next()?;
    std::str::from_utf8(name).ok()
}
