//! The seam to the kernel: bpf(2), and a map in our memory.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. Every function here
//! is safe to call with any argument: pointers come from references that outlive the call, lengths
//! from slices, and where the kernel reads or writes as many bytes as a map's values have, the map
//! is a [`Map`], which knows how many these are.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// The kernel's error number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Errno(pub(super) i32);

fn last_errno() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// `union bpf_attr`, whose fields are at fixed offsets for each command.
#[repr(C, align(8))]
struct Attributes([u8; 144]);

impl Attributes {
    fn new() -> Self {
        Self([0; 144])
    }

    fn word(mut self, offset: usize, value: u32) -> Self {
        if let Some(field) = self.0.get_mut(offset..offset + 4) {
            field.copy_from_slice(&value.to_ne_bytes());
        }
        self
    }

    fn address<T: ?Sized>(mut self, offset: usize, value: *const T) -> Self {
        if let Some(field) = self.0.get_mut(offset..offset + 8) {
            field.copy_from_slice(&(value.cast::<u8>() as u64).to_ne_bytes());
        }
        self
    }

    fn descriptor(self, offset: usize, descriptor: &impl AsRawFd) -> Self {
        self.word(offset, descriptor.as_raw_fd().cast_unsigned())
    }

    /// # Safety
    ///
    /// Every address in here is good for what `command` does with it.
    unsafe fn call(&mut self, command: libc::c_long) -> Result<libc::c_long, Errno> {
        let attributes = self.0.as_mut_ptr();
        // SAFETY: the kernel reads and writes the attributes, whose size it is told, and what
        // their addresses point to, for which the caller answers.
        let done = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, self.0.len()) };
        if done < 0 { Err(last_errno()) } else { Ok(done) }
    }

    /// # Safety
    ///
    /// As [`call`](Self::call), for a command that gives a descriptor.
    unsafe fn open(&mut self, command: libc::c_long) -> Result<OwnedFd, Errno> {
        // SAFETY: the caller's.
        let opened = unsafe { self.call(command) }?;
        let number = i32::try_from(opened).map_err(|_| Errno(libc::EIO))?;
        // SAFETY: the kernel has just opened it for us.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}

const MAP_CREATE: libc::c_long = 0;
const MAP_LOOKUP: libc::c_long = 1;
const MAP_UPDATE: libc::c_long = 2;
const MAP_DELETE: libc::c_long = 3;
#[cfg(feature = "instrument")]
const MAP_NEXT_KEY: libc::c_long = 4;
const PROGRAM_LOAD: libc::c_long = 5;
const PROGRAM_RUN: libc::c_long = 10;
const INFORMATION: libc::c_long = 15;
const RAW_TRACEPOINT_OPEN: libc::c_long = 17;
const MAP_FREEZE: libc::c_long = 22;
const TYPES_LOAD: libc::c_long = 18;
const LINK_CREATE: libc::c_long = 28;
const ITERATOR_CREATE: libc::c_long = 33;

// --- maps ----------------------------------------------------------------------------------------

/// The kinds of maps, as `linux/bpf.h` numbers them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Hash = 1,
    Array = 2,
    ArrayOfMaps = 12,
    RingBuffer = 27,
}

/// Flags of maps.
pub(super) mod flag {
    /// Programs can only read it.
    pub(crate) const READ_ONLY_FOR_PROGRAMS: u32 = 1 << 7;
    /// It can be mapped.
    pub(crate) const MAPPABLE: u32 = 1 << 10;
}

/// How an element is to be put into a map.
#[derive(Clone, Copy, Debug)]
pub(super) enum Put {
    Any = 0,
    New = 1,
    Existing = 2,
}

/// What a new map is like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) kind: Kind,
    pub(super) key_bytes: u32,
    pub(super) value_bytes: u32,
    pub(super) elements: u32,
    pub(super) flags: u32,
}

/// A map whose keys and values are plain bytes of known sizes.
#[derive(Debug)]
pub(super) struct Map {
    descriptor: OwnedFd,
    shape: Shape,
}

impl AsRawFd for Map {
    fn as_raw_fd(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }
}

impl Map {
    /// A new map; `inner` is like those that a map of maps will hold.
    pub(super) fn new(name: &CStr, shape: Shape, inner: Option<&Self>) -> Result<Self, Errno> {
        let mut attributes = Attributes::new()
            .word(0, shape.kind as u32)
            .word(4, shape.key_bytes)
            .word(8, shape.value_bytes)
            .word(12, shape.elements)
            .word(16, shape.flags);
        if let Some(inner) = inner {
            attributes = attributes.descriptor(20, inner);
        }
        set_name(&mut attributes, 28, name);
        // SAFETY: no address is in there.
        let descriptor = unsafe { attributes.open(MAP_CREATE) }?;
        Ok(Self { descriptor, shape })
    }

    pub(super) fn into_descriptor(self) -> OwnedFd {
        self.descriptor
    }

    fn element(&self, key: &[u8]) -> Result<Attributes, Errno> {
        if key.len() != self.shape.key_bytes as usize {
            return Err(Errno(libc::EINVAL));
        }
        Ok(Attributes::new().descriptor(0, self).address(8, key.as_ptr()))
    }

    /// The value of `key`.
    pub(super) fn get(&self, key: &[u8]) -> Result<Vec<u8>, Errno> {
        let mut value = vec![0; self.shape.value_bytes as usize];
        let mut attributes = self.element(key)?.address(16, value.as_mut_ptr().cast_const());
        // SAFETY: the kernel reads a key and writes a value, of the sizes that they have.
        unsafe { attributes.call(MAP_LOOKUP) }.map(|_| value)
    }

    /// Puts `value` at `key`.
    pub(super) fn put(&self, key: &[u8], value: &[u8], how: Put) -> Result<(), Errno> {
        if value.len() != self.shape.value_bytes as usize {
            return Err(Errno(libc::EINVAL));
        }
        let mut attributes = self.element(key)?.address(16, value.as_ptr()).word(24, how as u32);
        // SAFETY: the kernel reads a key and a value, of the sizes that they have.
        unsafe { attributes.call(MAP_UPDATE) }.map(drop)
    }

    /// Takes `key` out.
    pub(super) fn delete(&self, key: &[u8]) -> Result<(), Errno> {
        let mut attributes = self.element(key)?;
        // SAFETY: the kernel reads a key of the size that it has.
        unsafe { attributes.call(MAP_DELETE) }.map(drop)
    }

    /// All keys. Those that are put or taken out meanwhile may be among them or not.
    #[cfg(feature = "instrument")]
    pub(super) fn keys(&self) -> Result<Vec<Vec<u8>>, Errno> {
        let mut keys: Vec<Vec<u8>> = vec![];
        loop {
            let mut next = vec![0; self.shape.key_bytes as usize];
            let before = keys.last().map_or(std::ptr::null(), |key| key.as_ptr());
            let mut attributes = Attributes::new()
                .descriptor(0, self)
                .address(8, before)
                .address(16, next.as_mut_ptr().cast_const());
            // SAFETY: the kernel reads a key, if there is one, and writes a key, of the size that they have.
            match unsafe { attributes.call(MAP_NEXT_KEY) } {
                Ok(_) => keys.push(next),
                Err(Errno(libc::ENOENT)) => return Ok(keys),
                Err(error) => return Err(error),
            }
        }
    }

    /// From now on it changes by programs only, not through a descriptor or a mapping. What they
    /// may not either, the verifier takes for constants.
    pub(super) fn freeze(&self) -> Result<(), Errno> {
        // SAFETY: no address is in there.
        unsafe { Attributes::new().descriptor(0, self).call(MAP_FREEZE) }.map(drop)
    }
}

fn set_name(attributes: &mut Attributes, offset: usize, name: &CStr) {
    let bytes = name.to_bytes();
    let bytes = bytes.get(..bytes.len().min(15)).unwrap_or_default();
    if let Some(field) = attributes.0.get_mut(offset..offset + bytes.len()) {
        field.copy_from_slice(bytes);
    }
}

/// The words of a mappable array of one element, as programs see them.
#[derive(Debug)]
pub(super) struct Words {
    start: NonNull<AtomicU32>,
    count: usize,
}

// SAFETY: atomic words; nothing about them belongs to one thread.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Maps the value of `map`, a mappable array of one element.
    pub(super) fn of(map: &Map) -> Result<Self, Errno> {
        let bytes = map.shape.value_bytes as usize;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: without MAP_FIXED the kernel picks addresses that nothing else uses.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), bytes, rights, libc::MAP_SHARED, map.as_raw_fd(), 0)
        };
        match NonNull::new(start.cast::<AtomicU32>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(Self { start, count: bytes / size_of::<AtomicU32>() })
            }
            _ => Err(last_errno()),
        }
    }

    fn word(&self, index: usize) -> Option<&AtomicU32> {
        // SAFETY: the words are mapped as long as `self` lives, aligned to a page, and read and
        // written as atomics only, also by the programs.
        let words = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) };
        words.get(index)
    }

    /// A word, or 0 if there is none.
    pub(super) fn get(&self, index: usize) -> u32 {
        // Relaxed: a thread that looks for a change by a program made that program run itself, by a system call.
        self.word(index).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Adds one to a word.
    pub(super) fn add(&self, index: usize) {
        // SeqCst: an address space is entered into a map, by a system call, after its word was
        // raised, and a program that does not see the word raised does not look for it.
        self.word(index).map(|word| word.fetch_add(1, Ordering::SeqCst));
    }

    /// Takes one from a word.
    pub(super) fn subtract(&self, index: usize) {
        // Relaxed: a word that is too high costs a look into a map.
        self.word(index).map(|word| word.fetch_sub(1, Ordering::Relaxed));
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and no reference outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.count * size_of::<AtomicU32>()) };
    }
}

// --- programs ------------------------------------------------------------------------------------

/// Where a program runs, as `linux/bpf.h` numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// At the beginning of a function.
    Begin = 24,
    /// At its end.
    End = 25,
    /// For each element of an iterator.
    Iterator = 28,
    /// Nowhere: it is called by us.
    Nowhere = 0,
}

/// Describes functions that take and say nothing of interest: type 3 is one of that kind.
pub(super) fn function_type() -> Result<OwnedFd, Errno> {
    const NAMES: &[u8; 12] = b"\0int\0whole\0\0";
    #[rustfmt::skip]
    const TYPES: [u32; 10] = [
        // Its name, kind, bytes; signed, 32 bits.
        1, 1 << 24, 4, 1 << 24 | 32,
        // A prototype without parameters, of type 1.
        0, 13 << 24, 1,
        // A function of type 2, known here only.
        5, 12 << 24, 2,
    ];
    let types = u32::try_from(size_of_val(&TYPES)).map_err(|_| Errno(libc::E2BIG))?;
    let names = u32::try_from(NAMES.len()).map_err(|_| Errno(libc::E2BIG))?;
    // Magic, version; the header's length; where types and names are.
    let header = [0x1_eb9f, 24, 0, types, types, names];
    let mut bytes: Vec<u8> =
        header.iter().chain(&TYPES).flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend(NAMES);
    let count = u32::try_from(bytes.len()).map_err(|_| Errno(libc::E2BIG))?;
    let mut attributes = Attributes::new().address(0, bytes.as_ptr()).word(16, count);
    // SAFETY: the kernel reads so many bytes.
    unsafe { attributes.open(TYPES_LOAD) }
}

/// The functions of a program, for a kernel that wants them described.
#[derive(Debug)]
pub(super) struct Functions {
    /// What [`function_type`] gave.
    pub(super) types: OwnedFd,
    /// For each where it begins, and its type.
    pub(super) each: Vec<[u32; 2]>,
}

/// Has the kernel verify and translate a program for the function with number `function` in the
/// kernel's own types. The verifier's words, if any, go to `log`.
pub(super) fn load(
    name: &CStr,
    instructions: &[u64],
    functions: Option<&Functions>,
    place: Place,
    function: u32,
    log: &mut [u8],
) -> Result<OwnedFd, Errno> {
    const TRACING: u32 = 26;
    const CALLED: u32 = 31;
    /// Programs of that kind must be able to sleep, whether they do or not.
    const CAN_SLEEP: u32 = 1 << 4;
    /// A licence that the kernel knows: the helpers ask for one that goes with its own.
    const LICENSE: &CStr = c"Dual MIT/GPL";
    let count = u32::try_from(instructions.len()).map_err(|_| Errno(libc::E2BIG))?;
    let (kind, flags) = if place == Place::Nowhere { (CALLED, CAN_SLEEP) } else { (TRACING, 0) };
    let mut attributes = Attributes::new()
        .word(0, kind)
        .word(44, flags)
        .word(4, count)
        .address(8, instructions.as_ptr())
        .address(16, LICENSE.as_ptr())
        .word(68, place as u32)
        .word(108, function);
    if !log.is_empty() {
        let room = u32::try_from(log.len()).map_err(|_| Errno(libc::E2BIG))?;
        let address = log.as_mut_ptr().cast_const();
        attributes = attributes.word(24, 1).word(28, room).address(32, address);
    }
    if let Some(functions) = functions {
        let described = u32::try_from(functions.each.len()).map_err(|_| Errno(libc::E2BIG))?;
        attributes = attributes
            .descriptor(72, &functions.types)
            .word(76, 8)
            .address(80, functions.each.as_ptr())
            .word(88, described);
    }
    set_name(&mut attributes, 48, name);
    // SAFETY: the kernel reads so many instructions of 8 bytes, as many descriptions of 8 bytes, and a name
    // that ends with zero, and writes at most `log.len()` bytes to `log`.
    unsafe { attributes.open(PROGRAM_LOAD) }
}

/// Attaches a program to the function that it was loaded for, until the descriptor is closed.
pub(super) fn attach(program: &OwnedFd) -> Result<OwnedFd, Errno> {
    // SAFETY: no address is in there: a name is wanted for other programs only.
    unsafe { Attributes::new().descriptor(8, program).open(RAW_TRACEPOINT_OPEN) }
}

/// Calls a program that stands nowhere with one word.
pub(super) fn call(program: &OwnedFd, argument: u32) -> Result<(), Errno> {
    let argument = [argument];
    let mut attributes =
        Attributes::new().descriptor(0, program).word(40, 4).address(48, argument.as_ptr());
    // SAFETY: the kernel reads 4 bytes.
    unsafe { attributes.call(PROGRAM_RUN) }.map(drop)
}

/// How often the kernel skipped a program because it was in the middle of it.
pub(super) fn misses(program: &OwnedFd) -> Result<u64, Errno> {
    const WHERE: usize = 208;
    let mut information = [0_u8; 232];
    let mut attributes = Attributes::new()
        .descriptor(0, program)
        .word(4, 232)
        .address(8, information.as_mut_ptr().cast_const());
    // SAFETY: the kernel writes at most 232 bytes.
    unsafe { attributes.call(INFORMATION) }?;
    let word = information.get(WHERE..WHERE + 8).and_then(|bytes| bytes.try_into().ok());
    Ok(word.map_or(0, u64::from_ne_bytes))
}

/// Runs an iterator's program for every thread of `process`; what it writes is read from the file.
pub(super) fn iterate(program: &OwnedFd, process: BorrowedFd<'_>) -> Result<File, Errno> {
    // `union bpf_iter_link_info`: a thread's number, a process's, a process's descriptor.
    let which = [0, 0, process.as_raw_fd(), 0_i32];
    let mut attributes = Attributes::new()
        .descriptor(0, program)
        .word(8, Place::Iterator as u32)
        .address(16, which.as_ptr())
        .word(24, 16);
    // SAFETY: the kernel reads 16 bytes.
    let link = unsafe { attributes.open(LINK_CREATE) }?;
    // SAFETY: no address is in there.
    unsafe { Attributes::new().descriptor(0, &link).open(ITERATOR_CREATE) }.map(File::from)
}
