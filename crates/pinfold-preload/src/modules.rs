//! The modules of this process, as the dynamic linker knows them: the one around an address, those that are loaded, and what
//! one asks the linker for.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have the dynamic linker find a module, or list what is loaded; it keeps the list
//! unchanged while it runs the callback. And to read the tables that the linker itself has read, of a module that stays
//! loaded meanwhile. It believes them: a module with false tables would not run.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // addresses have 64 bits here, see `lib.rs`

use libc::{Elf64_Phdr, PT_DYNAMIC, PT_LOAD, c_char, c_int, c_void, dl_phdr_info, size_t};
use pinfold_kernel::symbols;
use std::ffi::CStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::{self, MaybeUninit};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A loaded module: the linker's structure of it, its place, its file's name and what the linker reads of it. All are those of
/// another one only if it was unloaded, and a file of the same name, with the same numbers in its dynamic section, was loaded in
/// its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Module {
    structure: usize,
    start: usize,
    end: usize,
    /// A hash of the name and the dynamic section.
    file: u64,
}

impl Module {
    /// The one around `address`, which stays loaded for as long as the call lasts. `None` if there is none, and with a C
    /// library that cannot tell without the linker's lock (glibc before 2.35). Takes no lock and makes no system call.
    pub(crate) fn around(address: usize) -> Option<Self> {
        let found = find_object(search()?, address)?;
        // SAFETY: the module is loaded, as the caller says.
        unsafe { Self::of(&found) }
    }

    /// Whether it still is.
    pub(crate) fn is_loaded(&self) -> bool {
        let found = search().and_then(|find| find_object(find, self.start));
        let is_in_its_place = |found: &FoundObject| {
            (found.module.addr(), found.start, found.end) == (self.structure, self.start, self.end)
        };
        // SAFETY: the linker has a module in this place, with this structure. It is this one, which stays
        // loaded; or one that took its place, which a thread may be unloading at this very moment.
        found.filter(is_in_its_place).and_then(|found| unsafe { Self::of(&found) }) == Some(*self)
    }

    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// `None` where the linker has no structure of it.
    ///
    /// # Safety
    ///
    /// What was found is loaded.
    unsafe fn of(found: &FoundObject) -> Option<Self> {
        let &FoundObject { start, end, module, .. } = found;
        let mut hash = DefaultHasher::new();
        // SAFETY: so is the linker's structure of it, with its name, and the section, if it has one.
        unsafe {
            let LoadedModule { name, dynamic, .. } = module.as_ref()?;
            CStr::from_ptr(*name).hash(&mut hash);
            if !dynamic.is_null() {
                Dynamic::entries(*dynamic).for_each(|entry| entry.hash(&mut hash));
            }
        }
        Some(Self { structure: module.addr(), start, end, file: hash.finish() })
    }
}

/// Whose code lies at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whose {
    Ours,
    Other,
}

/// Calls `note` with every symbol that the module around `address` wants from others. `None` if
/// there is no module.
pub(crate) fn look_around(address: usize, note: &mut dyn FnMut(Wanted<'_>)) -> Option<Whose> {
    match search() {
        Some(find) => look_up(find, address, note),
        None => search_around(address, note),
    }
}

/// Of the GNU C library since 2.35: finds the module around an address, without a lock.
type FindObject = unsafe extern "C" fn(*mut c_void, *mut FoundObject) -> c_int;

/// Null where it was not found. Relaxed: code that was there before.
static FIND_OBJECT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// `struct dl_find_object`, and room for what later versions may add.
#[repr(C)]
struct FoundObject {
    flags: u64,
    start: usize,
    end: usize,
    module: *const LoadedModule,
    rest: [u64; 28],
}

/// The beginning of `struct link_map`.
#[repr(C)]
struct LoadedModule {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
}

/// Looks for the function that finds modules without the dynamic linker's lock, which a forked child may find taken for
/// ever, and a thread held by another one that waits for it. Takes that lock itself, the first time.
pub(crate) fn find_search() {
    if search().is_none() {
        let found = symbols::address(c"_dl_find_object");
        FIND_OBJECT.store(found.map_or(ptr::null_mut(), NonNull::as_ptr), Ordering::Relaxed);
    }
}

fn search() -> Option<FindObject> {
    let find = NonNull::new(FIND_OBJECT.load(Ordering::Relaxed))?;
    // SAFETY: the C library's function of that name, which has this type, and is there as long as the process.
    Some(unsafe { mem::transmute::<NonNull<c_void>, FindObject>(find) })
}

fn find_object(find: FindObject, address: usize) -> Option<FoundObject> {
    let mut found = MaybeUninit::<FoundObject>::zeroed();
    // SAFETY: the structure has room for the answer, and zeros are a value of it.
    unsafe {
        let is_found = find(ptr::without_provenance_mut(address), found.as_mut_ptr()) == 0;
        is_found.then(|| found.assume_init())
    }
}

fn look_up(find: FindObject, address: usize, note: &mut dyn FnMut(Wanted<'_>)) -> Option<Whose> {
    let FoundObject { start, end, module, .. } = find_object(find, address)?;
    // SAFETY: the module of the code that called this library is loaded for as long as the call lasts; one without a
    // structure of the linker's has a null pointer.
    unsafe {
        let module = module.as_ref()?;
        if !module.dynamic.is_null() {
            Tables::of(module.base, module.dynamic).wanted(note);
        }
    }
    let is_ours = (start..end).contains(&(look_around as fn(_, _) -> _ as usize));
    Some(if is_ours { Whose::Ours } else { Whose::Other })
}

/// The same by a walk through all modules, under the dynamic linker's lock.
fn search_around(address: usize, note: &mut dyn FnMut(Wanted<'_>)) -> Option<Whose> {
    let mut search = Search { address, note, found: None };
    // SAFETY: the callback gets `search` back as its argument, and only during this call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

struct Search<'s> {
    address: usize,
    note: &'s mut dyn FnMut(Wanted<'_>),
    found: Option<Whose>,
}

/// Looks whether this is the module, and at what it wants.
///
/// # Safety
///
/// Called by `dl_iterate_phdr` with a [`Search`] as its argument.
unsafe extern "C" fn visit(info: *mut dl_phdr_info, _: size_t, search: *mut c_void) -> c_int {
    // SAFETY: the linker describes a loaded module, which it keeps loaded during the call; the
    // argument is the search.
    unsafe {
        let search = &mut *search.cast::<Search<'_>>();
        let info = &*info;
        let base = info.dlpi_addr as usize;
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
        let is_around = |address| headers.iter().any(|header| holds(base, header, address));
        if !is_around(search.address) {
            return 0;
        }
        let ours = is_around(look_around as fn(_, _) -> _ as usize);
        search.found = Some(if ours { Whose::Ours } else { Whose::Other });
        if let Some(header) = headers.iter().find(|header| header.p_type == PT_DYNAMIC) {
            let dynamic = base.wrapping_add(header.p_vaddr as usize) as *const Dynamic;
            Tables::of(base, dynamic).wanted(&mut *search.note);
        }
        1
    }
}

fn holds(base: usize, header: &Elf64_Phdr, address: usize) -> bool {
    let start = base.wrapping_add(header.p_vaddr as usize);
    header.p_type == PT_LOAD && address.wrapping_sub(start) < header.p_memsz as usize
}

/// What `wanted` makes of the file of a module for which it makes something, of the latest first. The program itself has no
/// name; where it has libibverbs, nothing is looked for. Allocates nothing, and takes 5 KiB of stack, which its callers
/// otherwise do not.
///
/// From the last place down: what is unloaded meanwhile moves those above it down, into places that come yet, and what is loaded
/// comes above all. So none that stays is passed over.
#[inline(never)]
pub(crate) fn among_loaded<T>(mut wanted: impl FnMut(&CStr) -> Option<T>) -> Option<T> {
    let mut name = [0; libc::PATH_MAX as usize];
    (0..count_of_modules()).rev().find_map(|place| {
        name[0] = 0;
        name_at(place, &mut name);
        let file = CStr::from_bytes_until_nul(&name).ok().filter(|file| !file.is_empty());
        file.and_then(&mut wanted)
    })
}

fn count_of_modules() -> usize {
    usize::MAX - name_at(usize::MAX, &mut [])
}

/// A search for the module at a place in the order in which they were loaded.
struct AtPlace<'n> {
    /// How many are loaded before it, less one for each that was gone by.
    left: usize,
    /// Becomes its file, as a C string, if that fits.
    name: &'n mut [u8],
}

/// Writes the name of the file at this place, if there is one. How many places there are too few.
fn name_at(place: usize, name: &mut [u8]) -> usize {
    /// # Safety
    ///
    /// Called by `dl_iterate_phdr` with an [`AtPlace`] as its argument.
    unsafe extern "C" fn note(
        module: *mut libc::dl_phdr_info,
        _: size_t,
        at: *mut c_void,
    ) -> c_int {
        // SAFETY: the caller's promise; a module's name is a C string, as long as the module is loaded.
        let (at, module) = unsafe { (&mut *at.cast::<AtPlace<'_>>(), &*module) };
        if at.left > 0 {
            at.left -= 1;
            return 0;
        }
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(module.dlpi_name) }.to_bytes_with_nul();
        at.name.get_mut(..name.len()).into_iter().for_each(|place| place.copy_from_slice(name));
        1
    }
    let mut at = AtPlace { left: place, name };
    // SAFETY: `note` gets `at` back as its argument, and only during this call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut at).cast()) };
    at.left
}

/// A handle of a file that is loaded.
pub(crate) fn loaded(file: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a C string; nothing is loaded.
    NonNull::new(unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) })
}

/// Whether a function is not this library's own: the program itself was loaded with this library.
pub(crate) fn is_foreign(function: NonNull<c_void>) -> bool {
    let base = |address| module_of(address).map(|module| module.dli_fbase);
    base(function.addr().get()) != base(is_foreign as fn(_) -> _ as usize)
}

/// Has the module of a function stay loaded for good: its handle is never closed.
pub(crate) fn keep_loaded(function: NonNull<c_void>) {
    // SAFETY: the function's module is loaded, and its file's name with it.
    module_of(function.addr().get()).iter().for_each(|it| _ = loaded(unsafe { file_of(it) }));
}

/// What `made` makes of the file of the library around `address`, which stays loaded meanwhile. Nothing for the program
/// itself: the name that it was started by is none of a module, so that the linker would look for such a file.
pub(crate) fn library_around<T>(
    address: usize,
    made: impl FnOnce(&CStr) -> Option<T>,
) -> Option<T> {
    // SAFETY: takes a number.
    let header = usize::try_from(unsafe { libc::getauxval(libc::AT_PHDR) });
    let program = module_of(header.ok()?);
    let module = module_of(address)?;
    let is_program = program.is_some_and(|program| program.dli_fbase == module.dli_fbase);
    // SAFETY: the module is loaded, as the caller says.
    if is_program { None } else { made(unsafe { file_of(&module) }) }
}

/// # Safety
///
/// The module is loaded for as long as the name is used.
unsafe fn file_of(module: &libc::Dl_info) -> &CStr {
    // SAFETY: the linker's name of it, a C string.
    unsafe { CStr::from_ptr(module.dli_fname) }
}

fn module_of(address: usize) -> Option<libc::Dl_info> {
    let mut module = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the linker only looks the address up, and fills the structure, of which all zeros are one.
    unsafe {
        let found = libc::dladdr(ptr::without_provenance(address), module.as_mut_ptr()) != 0;
        found.then(|| module.assume_init())
    }
}

/// The tables of one module, as its dynamic section names them; zero where it has none.
#[derive(Clone, Copy, Default, Debug)]
struct Tables {
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
struct Dynamic {
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
    unsafe fn entries(section: *const Self) -> impl Iterator<Item = Self> {
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
    unsafe fn of(base: usize, dynamic: *const Dynamic) -> Self {
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
    unsafe fn wanted(&self, mut visit: impl FnMut(Wanted<'_>)) {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// One without the linker's lock, and one with it.
    #[test]
    fn both_ways_find_the_same() {
        find_search();
        let is_there = symbols::address(c"_dl_find_object").is_some();
        assert_eq!(FIND_OBJECT.load(Ordering::Relaxed).is_null(), !is_there);
        type Look = fn(usize, &mut dyn FnMut(Wanted<'_>)) -> Option<Whose>;
        let by = |look: Look, address| {
            let mut wanted = Vec::new();
            let found = look(address, &mut |Wanted { name, version }| {
                wanted.push((name.to_owned(), version.map(CStr::to_owned)));
            });
            (found, wanted)
        };
        let here = both_ways_find_the_same as fn() as usize;
        for address in [here, libc::getpid as *const () as usize, 1] {
            assert_eq!(by(look_around, address), by(search_around, address), "{address:#x}");
        }
        assert!(by(look_around, here).1.len() > 10 && by(look_around, 1).0.is_none());
    }

    #[test]
    fn a_module_s_relocations_name_what_it_wants_and_in_which_version() {
        let mut versions = Vec::new();
        let here = both_ways_find_the_same as fn() as usize;
        let found = look_around(here, &mut |wanted| {
            // No sanitizer brings a function of this name along.
            if wanted.name == c"__errno_location" {
                versions.push(wanted.version.expect("a version").to_owned());
            }
        });
        let version = versions.first().expect("this program calls the C library");
        assert!(version.to_bytes().starts_with(b"GLIBC_"), "{version:?}");
        assert_eq!(found, Some(Whose::Ours));
    }
}
