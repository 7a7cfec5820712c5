//! What a loaded module asks the dynamic linker for, read from its own tables in memory.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the tables that the dynamic linker itself has read, of a
//! module that stays loaded meanwhile. It believes them: a module with false tables would not
//! run.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // addresses have 64 bits here, see `lib.rs`

use std::ffi::CStr;

/// The tables of one module, as its dynamic section names them; zero where it has none.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Tables {
    /// Where the module was loaded, less where it was linked to be.
    base: usize,
    symbols: usize,
    strings: usize,
    versions: usize,
    needed_versions: usize,
    needed_version_files: usize,
    relocations: [Relocations; 2],
}

#[derive(Clone, Copy, Default, Debug)]
struct Relocations {
    start: usize,
    bytes: usize,
}

/// An entry of the dynamic section.
#[repr(C)]
#[derive(Clone, Copy, Hash)]
pub(crate) struct Dynamic {
    tag: i64,
    value: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Relocation {
    offset: u64,
    /// The symbol's index in the upper half.
    info: u64,
    addend: i64,
}

/// A file that the module needs versions of.
#[repr(C)]
#[derive(Clone, Copy)]
struct NeededFile {
    revision: u16,
    count: u16,
    file: u32,
    first: u32,
    next: u32,
}

/// One version that it needs.
#[repr(C)]
#[derive(Clone, Copy)]
struct NeededVersion {
    hash: u32,
    flags: u16,
    index: u16,
    name: u32,
    next: u32,
}

const DT_NULL: i64 = 0;
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;
const DT_VERSYM: i64 = 0x6fff_fff0;
const DT_VERNEED: i64 = 0x6fff_fffe;
const DT_VERNEEDNUM: i64 = 0x6fff_ffff;

/// A symbol that a module wants from elsewhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'m> {
    pub(crate) name: &'m CStr,
    /// The version that it was linked with, if it was.
    pub(crate) version: Option<&'m CStr>,
}

impl Dynamic {
    /// Those of the section.
    ///
    /// # Safety
    ///
    /// The section is that of a module that stays loaded meanwhile.
    pub(crate) unsafe fn entries(section: *const Self) -> impl Iterator<Item = Self> {
        // SAFETY: the caller's promise; the section is an array that ends with `DT_NULL`.
        let at = move |number| unsafe { section.add(number).read() };
        (0..).map(at).take_while(|entry| entry.tag != DT_NULL)
    }
}

impl Tables {
    /// The tables of the module loaded at `base`.
    ///
    /// # Safety
    ///
    /// `dynamic` is the dynamic section of a module that is loaded at `base` and stays so.
    pub(crate) unsafe fn of(base: usize, dynamic: *const Dynamic) -> Self {
        let mut tables = Self { base, ..Self::default() };
        // SAFETY: the caller's promises.
        let entries = unsafe { Dynamic::entries(dynamic) };
        entries.for_each(|Dynamic { tag, value }| tables.note(tag, value));
        tables
    }

    fn note(&mut self, tag: i64, value: usize) {
        match tag {
            DT_STRTAB => self.strings = self.address(value),
            DT_SYMTAB => self.symbols = self.address(value),
            DT_JMPREL => self.relocations[0].start = self.address(value),
            DT_PLTRELSZ => self.relocations[0].bytes = value,
            DT_RELA => self.relocations[1].start = self.address(value),
            DT_RELASZ => self.relocations[1].bytes = value,
            DT_VERSYM => self.versions = self.address(value),
            DT_VERNEED => self.needed_versions = self.address(value),
            DT_VERNEEDNUM => self.needed_version_files = value,
            _ => {}
        }
    }

    /// The dynamic linker has put addresses into the section, except where it is read-only.
    fn address(&self, value: usize) -> usize {
        if value < self.base { self.base + value } else { value }
    }

    /// Calls `visit` with every symbol that a relocation of this module binds to another module,
    /// once for each relocation.
    ///
    /// # Safety
    ///
    /// The module is still loaded.
    pub(crate) unsafe fn wanted(&self, mut visit: impl FnMut(Wanted<'_>)) {
        if self.symbols == 0 || self.strings == 0 {
            return;
        }
        for table in self.relocations.iter().filter(|table| table.start != 0) {
            let count = table.bytes / size_of::<Relocation>();
            let first = table.start as *const Relocation;
            for number in 0..count {
                // SAFETY: the table has that many entries.
                let info = unsafe { first.add(number).read() }.info;
                // SAFETY: the caller's promise; the linker resolved the same index.
                if let Some(wanted) = unsafe { self.wanted_symbol((info >> 32) as usize) } {
                    visit(wanted);
                }
            }
        }
    }

    /// The symbol at `index`, if it is wanted from elsewhere.
    ///
    /// # Safety
    ///
    /// The module is loaded and its symbols are more than `index`.
    unsafe fn wanted_symbol(&self, index: usize) -> Option<Wanted<'_>> {
        // SAFETY: the caller's promise; names are C strings in the table of strings.
        unsafe {
            let symbol = (self.symbols as *const Symbol).add(index).read();
            if index == 0 || symbol.section != 0 {
                return None;
            }
            let name = CStr::from_ptr((self.strings + symbol.name as usize) as *const _);
            Some(Wanted { name, version: self.version(index) })
        }
    }

    /// The version that the symbol at `index` was linked with.
    ///
    /// # Safety
    ///
    /// As for [`wanted_symbol`](Self::wanted_symbol).
    unsafe fn version(&self, index: usize) -> Option<&CStr> {
        if self.versions == 0 || self.needed_versions == 0 {
            return None;
        }
        let mut file = self.needed_versions as *const u8;
        // SAFETY: one number for each symbol; the chains of files and versions are as long as they
        // say, each entry telling its distance to the next.
        unsafe {
            let number = (self.versions as *const u16).add(index).read() & 0x7fff;
            for _ in 0..self.needed_version_files {
                let needed = file.cast::<NeededFile>().read();
                let mut version = file.add(needed.first as usize);
                for _ in 0..needed.count {
                    let aux = version.cast::<NeededVersion>().read();
                    if aux.index & 0x7fff == number {
                        let name = (self.strings + aux.name as usize) as *const _;
                        return Some(CStr::from_ptr(name));
                    }
                    version = version.add(aux.next as usize);
                }
                file = file.add(needed.next as usize);
            }
        }
        None
    }
}
