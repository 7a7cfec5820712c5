//! What a range is made of: how much of it is in memory, and how much of that in huge pages.

use crate::AddressRange;
use pinfold_kernel::{
    Errno,
    pages::{Present, present},
};
use std::fs;

/// What a range is made of, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ResidentPages {
    /// In memory, in pages of any size.
    pub resident: usize,
    /// Of that, mapped by huge pages.
    pub huge: usize,
}

impl ResidentPages {
    /// Looks at `range`. `None` where the kernel does not tell: no `/proc`, or, before Linux 6.7, a
    /// mapping that reaches beyond the range.
    ///
    /// Costs some nanoseconds a page, before Linux 6.7 a reading of `/proc/self/smaps`.
    pub fn of(range: AddressRange) -> Option<Self> {
        Self::scanned(range).or_else(|_| Self::summed(range)).ok()
    }

    fn scanned(range: AddressRange) -> Result<Self, Errno> {
        let Present { bytes: resident, huge } = present(range)?;
        Ok(Self { resident, huge })
    }

    fn summed(range: AddressRange) -> Result<Self, Errno> {
        let mut pages = Self::default();
        for Entry { mapping, resident, huge, .. } in entries(range)? {
            if !range.contains(&mapping) {
                return Err(Errno(libc::ENOTTY));
            }
            pages.resident += resident;
            pages.huge += huge;
        }
        Ok(pages)
    }
}

/// Tells which blocks of a range are huge pages.
pub(super) struct Look {
    /// Before Linux 6.7, where the kernel tells of whole mappings only.
    entries: Vec<Entry>,
}

impl Look {
    /// Asks the kernel whether it tells of single blocks, and if not, what it tells of `range`.
    pub(super) fn new(range: AddressRange, block: AddressRange) -> Self {
        let tells = ResidentPages::scanned(block).is_ok();
        let entries = if tells { Vec::new() } else { entries(range).unwrap_or_default() };
        Self { entries }
    }

    pub(super) fn is_huge(&self, block: AddressRange) -> bool {
        let whole = |entry: &Entry| entry.mapping.contains(&block) && entry.is_huge(block.len());
        match ResidentPages::scanned(block) {
            Ok(pages) => pages.huge == block.len(),
            Err(_) => self.entries.iter().any(whole),
        }
    }
}

/// One mapping's entry of `/proc/self/smaps`.
pub(super) struct Entry {
    pub(super) mapping: AddressRange,
    resident: usize,
    huge: usize,
    /// The kernel's flags, two letters each.
    pub(super) flags: Vec<String>,
    /// The protection key; zero is open to all threads.
    pub(super) key: u32,
}

/// The entries of the mappings that touch `range`, in order.
pub(super) fn entries(range: AddressRange) -> Result<Vec<Entry>, Errno> {
    // Of the first thread the kernel shows none once that has ended.
    let text = fs::read("/proc/thread-self/smaps")
        .or_else(|_| fs::read("/proc/self/smaps"))
        .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(parse(&String::from_utf8_lossy(&text), range))
}

fn parse(text: &str, range: AddressRange) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut current: Option<Entry> = None;
    for line in text.lines() {
        if let Some(mapping) = heading(line) {
            entries.extend(current.take());
            current = mapping.overlaps(&range).then(|| Entry::new(mapping));
        } else if let Some(entry) = &mut current {
            entry.read(line);
        }
    }
    entries.extend(current);
    entries
}

/// `start-end rwxp ...`, the first line of an entry.
fn heading(line: &str) -> Option<AddressRange> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let address = |digits| usize::from_str_radix(digits, 16).ok();
    AddressRange::between(address(start)?, address(end)?)
}

impl Entry {
    const fn new(mapping: AddressRange) -> Self {
        Self { mapping, resident: 0, huge: 0, flags: Vec::new(), key: 0 }
    }

    /// Whether each block of so many bytes that fits into the mapping is a huge page.
    fn is_huge(&self, bytes: usize) -> bool {
        let first = self.mapping.start().checked_next_multiple_of(bytes);
        let room = first.and_then(|first| self.mapping.end().checked_sub(first));
        room.is_some_and(|room| room >= bytes && self.huge == room / bytes * bytes)
    }

    fn read(&mut self, line: &str) {
        let Some((key, value)) = line.split_once(':') else { return };
        let kilobytes = || value.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0);
        match key {
            "Rss" => self.resident = kilobytes() << 10,
            "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => self.huge += kilobytes() << 10,
            // One that cannot be read is not known to be open to all threads.
            "ProtectionKey" => self.key = value.trim().parse().unwrap_or(u32::MAX),
            "VmFlags" => self.flags = value.split_whitespace().map(str::to_owned).collect(),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_kernel::memory;

    const TEXT: &str = "\
10000-20000 rw-p 00000000 00:00 0
Rss:                  64 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac
400000-800000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                4096 kB
AnonHugePages:      2048 kB
FilePmdMapped:         0 kB
VmFlags: rd wr mr mw me lo ac
";

    #[test]
    fn entries_are_those_that_touch_the_range() {
        let range = AddressRange::between(0x50_0000, 0x60_0000).unwrap();
        let entries = parse(TEXT, range);
        assert_eq!(entries.len(), 1);
        assert_eq!((entries[0].resident, entries[0].huge), (4 << 20, 2 << 20));
        assert!(entries[0].flags.iter().any(|flag| flag == "lo"));
        assert_eq!(parse(TEXT, AddressRange::EVERYTHING).len(), 2);
    }

    #[test]
    fn a_mapping_is_huge_if_all_of_its_blocks_are() {
        let whole = TEXT.replace("2048 kB", "4096 kB");
        let is_huge = |text: &str| {
            let entries = parse(text, AddressRange::EVERYTHING);
            entries.iter().map(|entry| entry.is_huge(2 << 20)).collect::<Vec<_>>()
        };
        assert_eq!(is_huge(TEXT), [false, false]);
        assert_eq!(is_huge(&whole), [false, true]);
        // Ends that no block fits into do not matter.
        let crooked = whole.replace("400000-800000", "3ff000-801000");
        assert_eq!(is_huge(&crooked), [false, true]);
    }

    #[test]
    fn protection_keys_are_read() {
        let text = format!("{TEXT}ProtectionKey:         3\n");
        let entries = parse(&text, AddressRange::EVERYTHING);
        assert_eq!(entries.iter().map(|entry| entry.key).collect::<Vec<_>>(), [0, 3]);
    }

    #[test]
    fn memory_is_counted_as_it_comes() {
        let range = memory::map(16 << 12).unwrap();
        let Some(empty) = ResidentPages::of(range) else {
            eprintln!("skipped: the kernel does not tell");
            return;
        };
        assert_eq!(empty, ResidentPages::default());
        if memory::populate(range, true).is_ok() {
            assert_eq!(ResidentPages::of(range).map(|it| it.resident), Some(16 << 12));
        }
    }
}
