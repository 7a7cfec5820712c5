//! The process's table of mappings, as the kernel tells it.
//!
//! A monitor asks here what a range is made of before it watches it; a registrar asks why the
//! device refused an address. Both ask only when something is new or wrong, never on a hit: one
//! question costs one to three microseconds with the `PROCMAP_QUERY` request of Linux 6.11, and as
//! much as reading `/proc/self/maps` costs before that (a tenth of a millisecond for a few hundred
//! mappings).
//!
//! The table may change while it is read. An answer is true of some moment between call and
//! return, for each mapping by itself; a caller that needs more watches first and asks then.
//!
//! The public functions open `/proc/self/maps` for each question: a descriptor kept open would go
//! on showing the parent's mappings in a forked child. A monitor, which knows when it is in a
//! child, keeps it open and saves two thirds of the time. It is the calling thread's file that is
//! opened: the first thread's shows no mapping once that has ended (`pthread_exit` in `main`).

use crate::descriptor::KnownDescriptor;
use crate::{Access, AddressRange, BadAddress, MappingKind};
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::{Errno, descriptor, procmap, procmap::ProcmapQuery};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::sync::{Mutex, PoisonError};

/// One mapping of this process: what one line of `/proc/self/maps` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The whole mapping, in whole pages.
    pub range: AddressRange,
    /// Whether the program may read it.
    pub readable: bool,
    /// Whether the program may write it.
    pub writable: bool,
    /// Whether writes are shared with other mappings of the same memory (`MAP_SHARED`).
    pub shared: bool,
    /// What backs it. When unsure this says a kind that is watched less, never one watched more.
    pub kind: MappingKind,
}

impl Mapping {
    /// Whether the program may use it at all. A reservation of a device's addresses (a GPU's) cannot be told from
    /// other memory without access.
    pub(crate) const fn has_access(&self) -> bool {
        self.readable || self.writable
    }

    /// Whether a driver of the kernel may decide what is behind it, without a change of the mapping. A block device
    /// has pages as a file has them.
    pub(crate) fn is_driver_s(&self) -> bool {
        self.kind == MappingKind::Other && !self.is_of_block_device()
    }

    /// Asks the kernel for the file, not for a name; only a privileged process gets an answer.
    fn is_of_block_device(&self) -> bool {
        let path = format!("/proc/self/map_files/{:x}-{:x}", self.range.start(), self.range.end());
        std::fs::metadata(path).is_ok_and(|file| file.file_type().is_block_device())
    }
}

/// The mappings that share at least one byte with `range`, whole, in order of address.
///
/// Addresses between them are not mapped. Ask for [`AddressRange::EVERYTHING`] to get the table.
///
/// # Errors
///
/// The kernel's error if `/proc/self/maps` cannot be opened or read: `/proc` is not mounted, or no
/// descriptor is left.
pub fn mappings_in(range: AddressRange) -> io::Result<Vec<Mapping>> {
    Ok(ask_once(range)?)
}

/// Whether a mapping in `range` may have pages of a pool of huge pages (`hugetlbfs`). Those that are shared are told from others
/// since Linux 6.11.
pub(crate) fn may_have_hugetlb(range: AddressRange) -> Result<bool, Errno> {
    let maps = OpenMaps::new()?;
    let mut found = false;
    maps.visit(range, |mapping| {
        let bytes = || maps.page_bytes(mapping.range.start());
        found |= mapping.kind == MappingKind::PrivateHuge
            || bytes().is_some_and(|bytes| bytes > page_bytes());
    })?;
    Ok(found)
}

/// Why a device refused `range` for a use with the rights `access`, in so far as the table of
/// mappings shows a reason. The first address with something wrong is named.
///
/// Pass the rights that the device asks the kernel for, which may be more than the caller wants:
/// an io_uring buffer is always pinned for writing.
pub fn diagnose(range: AddressRange, access: Access) -> BadAddress {
    if range.end() > KERNEL_START {
        return BadAddress::Kernel { at: range.start().max(KERNEL_START) };
    }
    match mappings_in(range) {
        Ok(mappings) => find_fault(range, access, &mappings),
        Err(_) => BadAddress::Unknown,
    }
}

/// Addresses with the highest bit belong to the kernel on every 64-bit architecture.
const KERNEL_START: usize = 1 << (usize::BITS - 1);

fn find_fault(range: AddressRange, access: Access, mappings: &[Mapping]) -> BadAddress {
    let mut next = range.start();
    for mapping in mappings {
        if mapping.range.start() > next {
            return BadAddress::Unmapped { at: next };
        }
        if let Some(fault) = fault_of(mapping, next, access) {
            return fault;
        }
        next = mapping.range.end();
    }
    if next < range.end() {
        return BadAddress::Unmapped { at: next };
    }
    unsupported(range, mappings).unwrap_or(BadAddress::Unknown)
}

/// What the rights of `mapping`, entered at `at`, lack for `access`.
fn fault_of(mapping: &Mapping, at: usize, access: Access) -> Option<BadAddress> {
    if !mapping.readable && !mapping.writable {
        return Some(BadAddress::NoAccess { at });
    }
    (access.writes() && !mapping.writable).then_some(BadAddress::NotWritable { at })
}

/// The first address of a mapping that devices commonly refuse although its rights suffice.
fn unsupported(range: AddressRange, mappings: &[Mapping]) -> Option<BadAddress> {
    let refused = |kind| matches!(kind, MappingKind::SharedFile | MappingKind::Other);
    let mapping = mappings.iter().find(|mapping| refused(mapping.kind))?;
    Some(BadAddress::UnsupportedMapping { at: mapping.range.start().max(range.start()) })
}

/// The table, open for any number of questions by the process that opened it.
///
/// A forked child would go on seeing its parent's mappings. If the program closes or replaces the
/// descriptor, each question opens the table anew.
#[derive(Debug)]
pub(crate) struct OpenMaps {
    table: KnownDescriptor,
    /// Held while the table is read as text. The kernel goes on where the last read of the open file ended; after a
    /// read at another place it counts bytes from the beginning, in a table that has changed since, and gives parts of
    /// lines. The last lock that a thread takes: nothing is taken or waited for under it.
    reading: Mutex<()>,
}

impl OpenMaps {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self { table: KnownDescriptor::new(open_table_to_keep()?)?, reading: Mutex::new(()) })
    }

    pub(crate) fn descriptor(&self) -> pinfold_kernel::Descriptor {
        self.table.number()
    }

    /// Whether the kernel tells of single mappings, at a price that does not depend on how many there
    /// are.
    pub(crate) fn has_requests(&self) -> bool {
        self.table.is_ours() && !is_unknown(&self.open().query_one(0))
    }

    /// The size of the pages of the mapping at `address`, a power of two. `None` before Linux 6.11.
    pub(crate) fn page_bytes(&self, address: usize) -> Option<usize> {
        if !self.table.is_ours() {
            return None;
        }
        let found = procmap::procmap_query(self.table.number(), address, &mut []).ok()?;
        let bytes = usize::try_from(found.vma_page_size).ok().filter(|it| it.is_power_of_two());
        bytes.filter(|_| found.vma_start <= address as u64)
    }

    /// As [`mappings_in`].
    pub(crate) fn overlapping(&self, range: AddressRange) -> Result<Vec<Mapping>, Errno> {
        if !self.table.is_ours() {
            return ask_once(range);
        }
        match self.open().query(range) {
            answer if is_unknown(&answer) => self.in_text(range),
            answer => answer,
        }
    }

    /// Calls `visit` with each mapping that shares bytes with `range`, in order of address, or with what of it is new since the one
    /// before. With the kernel's requests it takes no memory, however many they are.
    pub(crate) fn visit(
        &self,
        range: AddressRange,
        visit: impl FnMut(Mapping),
    ) -> Result<(), Errno> {
        if self.has_requests() {
            return self.open().visit(range, visit);
        }
        self.overlapping(range)?.into_iter().for_each(visit);
        Ok(())
    }

    fn in_text(&self, range: AddressRange) -> Result<Vec<Mapping>, Errno> {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        match self.open().parse(range) {
            // The thread whose file it is has ended.
            Err(Errno(libc::ESRCH)) => ask_once(range),
            answer => answer,
        }
    }

    fn open(&self) -> Table<'_> {
        Table(self.table.lend())
    }
}

/// The calling thread's, or the first one's where that is not to be had: a security module may allow the one alone.
fn open_table() -> Result<OwnedFd, Errno> {
    descriptor::open_of_proc(c"/proc/thread-self/maps", 0).or_else(|_| open_first_thread_s())
}

/// The first thread's, if that has not ended yet: it stays good for the process's life. What another thread's shows as text
/// ends with that thread.
fn open_table_to_keep() -> Result<OwnedFd, Errno> {
    open_first_thread_s().ok().filter(shows_mappings).map_or_else(open_table, Ok)
}

fn open_first_thread_s() -> Result<OwnedFd, Errno> {
    descriptor::open_of_proc(c"/proc/self/maps", 0)
}

fn shows_mappings(table: &OwnedFd) -> bool {
    descriptor::read_at(table.as_fd(), &mut [0], 0) == Ok(1)
}

fn ask_once(range: AddressRange) -> Result<Vec<Mapping>, Errno> {
    let table = open_table()?;
    Table(table.as_fd()).overlapping(range)
}

/// Whether the kernel does not know the request.
fn is_unknown<T>(answer: &Result<T, Errno>) -> bool {
    matches!(answer, Err(Errno(libc::ENOTTY | libc::EINVAL | libc::ENOSYS)))
}

/// An open `/proc/PID/maps`.
#[derive(Clone, Copy)]
struct Table<'f>(BorrowedFd<'f>);

impl Table<'_> {
    fn overlapping(self, range: AddressRange) -> Result<Vec<Mapping>, Errno> {
        match self.query(range) {
            answer if is_unknown(&answer) => self.parse(range),
            answer => answer,
        }
    }

    fn query(self, range: AddressRange) -> Result<Vec<Mapping>, Errno> {
        let mut found = Vec::new();
        self.visit(range, |mapping| found.push(mapping))?;
        Ok(found)
    }

    /// Asks for one mapping after the other. One that has become one with the mapping before is new from the end of that on.
    fn visit(self, range: AddressRange, mut visit: impl FnMut(Mapping)) -> Result<(), Errno> {
        let (mut next, mut seen_up_to) = (range.start(), 0);
        while next < range.end() {
            match self.query_one(next) {
                Ok(mapping) if mapping.range.start() < range.end() => {
                    let fresh = mapping.range.start().max(seen_up_to);
                    seen_up_to = mapping.range.end();
                    next = seen_up_to;
                    let fresh = AddressRange::between(fresh, next);
                    fresh.into_iter().for_each(|range| visit(Mapping { range, ..mapping }));
                }
                Ok(_) | Err(Errno(libc::ENOENT)) => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// The mapping that covers `address`, or the next one.
    fn query_one(self, address: usize) -> Result<Mapping, Errno> {
        // Long enough for every name that tells a kind but a device's: a memfd's takes at most 266 bytes.
        match self.query_into(&mut [0; 512], address) {
            Err(Errno(libc::ENAMETOOLONG)) => {
                // Not on the stack, which may be small.
                self.query_into(&mut vec![0; libc::PATH_MAX as usize], address)
            }
            answer => answer,
        }
    }

    /// The same, with room for a name, which stays zeros where the mapping has none.
    fn query_into(self, name: &mut [u8], address: usize) -> Result<Mapping, Errno> {
        let answer = procmap::procmap_query(self.0.as_raw_fd(), address, name)?;
        from_query(&answer, until_zero(name))
    }

    /// Reads the table as text, for kernels without the request.
    fn parse(self, range: AddressRange) -> Result<Vec<Mapping>, Errno> {
        let text = self.read_to_end()?;
        let lines = text.split(|&byte| byte == b'\n').filter_map(parse_line);
        Ok(without_repeats(lines.filter(|mapping| mapping.range.overlaps(&range))))
    }

    fn read_to_end(self) -> Result<Vec<u8>, Errno> {
        let mut text = Vec::new();
        let mut chunk = [0; 8192];
        loop {
            match descriptor::read_at(self.0, &mut chunk, text.len())? {
                0 => return Ok(text),
                got => text.extend_from_slice(chunk.get(..got).unwrap_or_default()),
            }
        }
    }
}

/// Between two reads of the text a mapping may have grown over what was read already; only the
/// part that is new counts.
fn without_repeats(lines: impl Iterator<Item = Mapping>) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for mut mapping in lines {
        let seen_up_to = mappings.last().map_or(0, |last| last.range.end());
        let start = mapping.range.start().max(seen_up_to);
        if let Some(fresh) = AddressRange::between(start, mapping.range.end()) {
            mapping.range = fresh;
            mappings.push(mapping);
        }
    }
    mappings
}

fn from_query(answer: &ProcmapQuery, name: &[u8]) -> Result<Mapping, Errno> {
    let bound = |address: u64| usize::try_from(address).unwrap_or(usize::MAX);
    let range = from_first_byte(bound(answer.vma_start), bound(answer.vma_end));
    let has = |flag| answer.vma_flags & flag != 0;
    let shared = has(ProcmapQuery::SHARED);
    let backing = Backing { shared, device_major: answer.dev_major, inode: answer.inode, name };
    Ok(Mapping {
        range: range.ok_or(Errno(libc::ENOENT))?,
        readable: has(ProcmapQuery::READABLE),
        writable: has(ProcmapQuery::WRITABLE),
        shared,
        kind: backing.kind(),
    })
}

fn until_zero(name: &[u8]) -> &[u8] {
    name.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// One line: `start-end rwxp offset major:minor inode   name`.
///
/// Lines of the kernel's own pages (`[vsyscall]`) are left out, as `PROCMAP_QUERY` does.
fn parse_line(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.splitn(6, |&byte| byte == b' ');
    let bounds = std::str::from_utf8(fields.next()?).ok()?;
    let (start, end) = bounds.split_once('-')?;
    let rights = fields.next()?;
    let _offset = fields.next()?;
    let (major, _minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let inode = std::str::from_utf8(fields.next()?).ok()?;
    let name = fields.next().unwrap_or_default().trim_ascii_start();
    let range = from_first_byte(hexadecimal(start)?, hexadecimal(end)?)?;
    let shared = rights.get(3) == Some(&b's');
    let device_major = u32::from_str_radix(major, 16).ok()?;
    let backing = Backing { shared, device_major, inode: inode.parse().ok()?, name };
    (range.end() <= KERNEL_START).then_some(Mapping {
        range,
        readable: rights.first() == Some(&b'r'),
        writable: rights.get(1) == Some(&b'w'),
        shared,
        kind: backing.kind(),
    })
}

/// The bounds of a mapping. One that begins at 0, which takes a privilege, is not left out: its first byte is.
fn from_first_byte(start: usize, end: usize) -> Option<AddressRange> {
    AddressRange::between(start.max(1), end)
}

fn hexadecimal(digits: &str) -> Option<usize> {
    usize::from_str_radix(digits, 16).ok()
}

/// What the kernel says of the memory behind a mapping.
struct Backing<'a> {
    shared: bool,
    /// 0 for file systems without a device of their own: tmpfs, hugetlbfs, overlays, ...
    device_major: u32,
    /// 0 if there is no file, and for the first System V segment since the kernel started: theirs is the segment's number.
    inode: u64,
    name: &'a [u8],
}

impl Backing<'_> {
    fn kind(&self) -> MappingKind {
        let is_file = self.inode != 0 || self.name.starts_with(b"/");
        if is_file { self.kind_of_file() } else { self.kind_without_file() }
    }

    /// Without a file there is anonymous memory, or special pages that the kernel names. A
    /// program can name anonymous memory too, and that shows as `[anon:...]`.
    fn kind_without_file(&self) -> MappingKind {
        let anonymous = self.name.is_empty()
            || self.name == b"[heap]"
            || self.name.starts_with(b"[stack")
            || self.name.starts_with(b"[anon:");
        match (anonymous, self.shared) {
            (true, false) => MappingKind::PrivateAnonymous,
            _ => MappingKind::Other,
        }
    }

    /// The kernel makes a nameless file of its own for some kinds of memory. A file on a disk has
    /// a device number, so it cannot pass for one of those, whatever its path.
    fn kind_of_file(&self) -> MappingKind {
        let own = self.device_major == 0;
        match (self.shared, self.name) {
            (false, b"/anon_hugepage (deleted)") if own => MappingKind::PrivateHuge,
            (false, name) if is_device(name) && !in_memory(name) && name != b"/dev/zero" => {
                MappingKind::Other
            }
            // A file without a path, as drivers make: its pages may be a device's.
            (false, name) if !name.starts_with(b"/") => MappingKind::Other,
            (false, _) => MappingKind::PrivateFile,
            (true, b"/dev/zero (deleted)" | b"/anon_hugepage (deleted)") if own => {
                MappingKind::SharedAnonymous
            }
            (true, name) if own && name.starts_with(b"[anon_shmem:") => {
                MappingKind::SharedAnonymous
            }
            (true, name) if own && name.starts_with(b"/SYSV") => MappingKind::SystemV,
            (true, name) if own && in_memory(name) => MappingKind::SharedMemory,
            (true, name) if name.starts_with(b"/") && !is_device(name) => MappingKind::SharedFile,
            (true, _) => MappingKind::Other,
        }
    }
}

/// A memfd, or a file where tmpfs is mounted by convention. A tmpfs elsewhere counts as a file on
/// disk, which is not watched either.
fn in_memory(name: &[u8]) -> bool {
    name.starts_with(b"/memfd:") || name.starts_with(b"/dev/shm/")
}

fn is_device(name: &[u8]) -> bool {
    let in_dev = name.starts_with(b"/dev/") && !name.starts_with(b"/dev/hugepages/");
    in_dev || name.starts_with(b"/dmabuf:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of(line: &str) -> MappingKind {
        parse_line(line.as_bytes()).unwrap().kind
    }

    #[test]
    fn kinds_are_told_by_name_device_and_sharing() {
        use MappingKind as Kind;
        for (line, kind) in [
            ("1000-2000 rw-p 00000000 00:00 0 ", Kind::PrivateAnonymous),
            ("1000-2000 rw-p 00000000 00:00 0    [heap]", Kind::PrivateAnonymous),
            ("1000-2000 rw-p 00000000 00:00 0    [stack]", Kind::PrivateAnonymous),
            ("1000-2000 rw-p 00000000 00:00 0    [anon:arena one]", Kind::PrivateAnonymous),
            ("1000-2000 rw-p 00000000 00:0f 7  /anon_hugepage (deleted)", Kind::PrivateHuge),
            ("1000-2000 rw-p 00000000 fe:00 7  /anon_hugepage (deleted)", Kind::PrivateFile),
            ("1000-2000 rw-s 00000000 00:01 7  /dev/zero (deleted)", Kind::SharedAnonymous),
            ("1000-2000 rw-s 00000000 00:01 7  [anon_shmem:x]", Kind::SharedAnonymous),
            ("1000-2000 rw-s 00000000 00:01 7  /SYSV00000000 (deleted)", Kind::SystemV),
            ("1000-2000 rw-s 00000000 00:01 0  /SYSV00000000 (deleted)", Kind::SystemV),
            ("1000-2000 rw-s 00000000 00:01 7  /memfd:a b (deleted)", Kind::SharedMemory),
            ("1000-2000 rw-s 00000000 00:1a 7  /dev/shm/x", Kind::SharedMemory),
            ("1000-2000 rw-s 00000000 fe:00 7  /memfd:fake", Kind::SharedFile),
            ("1000-2000 rw-s 00000000 fe:00 7  /tmp/file", Kind::SharedFile),
            ("1000-2000 rw-s 00000000 00:06 7  /dev/infiniband/uverbs0", Kind::Other),
            ("1000-2000 rw-p 00000000 00:06 7  /dev/mem", Kind::Other),
            ("1000-2000 rw-s 00000000 00:06 7  /dev/nvidia-uvm", Kind::Other),
            ("1000-2000 rw-s 00000000 00:0c 7  /dmabuf:card0", Kind::Other),
            ("1000-2000 rw-p 00000000 00:06 7  /dev/zero", Kind::PrivateFile),
            ("1000-2000 rw-p 00000000 00:1a 7  /dev/shm/x", Kind::PrivateFile),
            ("1000-2000 rw-s 00000000 00:0e 7  anon_inode:[io_uring]", Kind::Other),
            ("1000-2000 rw-p 00000000 00:0e 7  anon_inode:[peer]", Kind::Other),
            ("1000-2000 rw-p 00000000 00:08 7  socket:[7]", Kind::Other),
            ("1000-2000 r-xp 00000000 fe:00 7  /usr/bin/cat", Kind::PrivateFile),
            ("1000-2000 rw-p 00000000 00:01 7  /memfd:x (deleted)", Kind::PrivateFile),
            ("1000-2000 r-xp 00000000 00:00 0  [vdso]", Kind::Other),
            ("1000-2000 r--p 00000000 00:00 0  [vvar_vclock]", Kind::Other),
        ] {
            assert_eq!(kind_of(line), kind, "{line}");
        }
    }

    #[test]
    fn lines_that_are_not_mappings_are_left_out() {
        assert_eq!(parse_line(b""), None);
        assert_eq!(parse_line(b"1000-2000"), None);
        assert_eq!(parse_line(b"2000-1000 rw-p 00000000 00:00 0 "), None);
        let gate = b"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0   [vsyscall]";
        assert_eq!(parse_line(gate), None);
    }

    #[test]
    fn a_mapping_that_grew_between_two_reads_counts_once() {
        let lines =
            ["1000-3000 rw-p 0 00:00 0 ", "2000-4000 rw-p 0 00:00 0 ", "2000-3000 rw-p 0 00:00 0 "];
        let mappings = without_repeats(lines.iter().filter_map(|line| parse_line(line.as_bytes())));
        let ranges: Vec<_> = mappings.iter().map(|m| (m.range.start(), m.range.end())).collect();
        assert_eq!(ranges, [(0x1000, 0x3000), (0x3000, 0x4000)]);
    }

    fn mapping(start: usize, end: usize, rights: &str, kind: MappingKind) -> Mapping {
        Mapping {
            range: AddressRange::between(start, end).unwrap(),
            readable: rights.contains('r'),
            writable: rights.contains('w'),
            shared: false,
            kind,
        }
    }

    #[test]
    fn the_first_fault_in_order_of_address_is_named() {
        let anonymous = MappingKind::PrivateAnonymous;
        let range = AddressRange::between(0x1800, 0x4000).unwrap();
        let whole =
            [mapping(0x1000, 0x2000, "r", anonymous), mapping(0x2000, 0x5000, "rw", anonymous)];
        let cases = [
            (Access::READ, &whole[..], BadAddress::Unknown),
            (Access::WRITE, &whole[..], BadAddress::NotWritable { at: 0x1800 }),
            (Access::READ, &whole[1..], BadAddress::Unmapped { at: 0x1800 }),
            (Access::READ, &whole[..1], BadAddress::Unmapped { at: 0x2000 }),
            (Access::READ, &[], BadAddress::Unmapped { at: 0x1800 }),
            (
                Access::READ,
                &[whole[0], mapping(0x2000, 0x5000, "", anonymous)],
                BadAddress::NoAccess { at: 0x2000 },
            ),
            (
                Access::READ,
                &[mapping(0x1000, 0x5000, "rw", MappingKind::SharedFile)],
                BadAddress::UnsupportedMapping { at: 0x1800 },
            ),
        ];
        for (access, mappings, fault) in cases {
            assert_eq!(find_fault(range, access, mappings), fault, "{access} {mappings:?}");
        }
    }

    #[test]
    fn kernel_addresses_are_named_as_such() {
        let range = AddressRange::between(KERNEL_START - 1, KERNEL_START + 1).unwrap();
        assert_eq!(diagnose(range, Access::READ), BadAddress::Kernel { at: KERNEL_START });
    }

    #[test]
    fn a_table_that_a_thread_opened_is_asked_after_its_end() {
        use pinfold_kernel::thread::{thread_exists, thread_id, yield_now};
        let opened = || (descriptor::open_of_proc(c"/proc/thread-self/maps", 0), thread_id());
        let (table, thread) = std::thread::spawn(opened).join().unwrap();
        let table = KnownDescriptor::new(table.unwrap()).unwrap();
        while thread_exists(thread) {
            yield_now();
        }
        let maps = OpenMaps { table, reading: Mutex::new(()) };
        let here = std::ptr::from_ref(&maps).addr();
        let here = AddressRange::between(here, here + 1).unwrap();
        assert_eq!(maps.in_text(here).unwrap().len(), 1);
        assert_eq!(maps.overlapping(here).unwrap().len(), 1);
    }

    #[test]
    fn the_table_to_keep_is_the_first_thread_s() {
        assert!(shows_mappings(&open_table_to_keep().unwrap()));
        let other = descriptor::open_of_proc(c"/proc/self/task", libc::O_DIRECTORY).unwrap();
        assert!(!shows_mappings(&other));
    }

    /// Before Linux 6.11 all threads read the one open text, while the table changes.
    #[test]
    fn threads_that_read_the_text_at_once_find_what_stays() {
        use pinfold_kernel::mapping::OwnedMapping;
        use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
        const BYTES: usize = 4096 * 16;
        // Each is a line of its own: no two neighbours have the same rights.
        let stay = OwnedMapping::inaccessible(512 * BYTES).unwrap();
        (0..256).for_each(|place| stay.allow(2 * place * BYTES, BYTES).unwrap());
        let range = stay.range().unwrap();
        let (maps, is_over) = (OpenMaps::new().unwrap(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    let passing: Vec<_> =
                        (0..64).map(|_| OwnedMapping::inaccessible(3 * BYTES).unwrap()).collect();
                    passing.iter().for_each(|mapping| mapping.allow(BYTES, BYTES).unwrap());
                }
            });
            let look = || {
                (0..400).all(|_| {
                    let found = maps.in_text(range).unwrap();
                    let writable = found.iter().filter(|mapping| mapping.writable).count();
                    writable == 256
                })
            };
            let others = [scope.spawn(look), scope.spawn(look)];
            let all = others.map(|other| other.join().unwrap());
            is_over.store(true, Relaxed);
            assert_eq!(all, [true, true]);
        });
    }

    /// Other tests map and unmap meanwhile, so the two answers are compared where nothing moves:
    /// at what is mapped before and after.
    #[test]
    fn request_and_text_agree() {
        let table = open_table().unwrap();
        let maps = Table(table.as_fd());
        let before = match maps.query(AddressRange::EVERYTHING) {
            Err(Errno(libc::ENOTTY)) => {
                eprintln!("skipped: this kernel has no PROCMAP_QUERY");
                return;
            }
            answer => answer.unwrap(),
        };
        let text = maps.parse(AddressRange::EVERYTHING).unwrap();
        let after = maps.query(AddressRange::EVERYTHING).unwrap();
        let steady: Vec<_> = before.iter().filter(|mapping| after.contains(mapping)).collect();
        assert!(steady.len() > 10, "{before:?}");
        for mapping in steady {
            assert!(text.contains(mapping), "{mapping:?} is missing from the text");
        }
    }
}
