//! The one reader of limits: `/proc` and `/sys` below a root, which tests make up, and what is read there.
//!
//! Every parser takes text and panics on none.

use pinfold_kernel::descriptor::read_link;
use pinfold_kernel::process::Resource;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A limit on locked memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memlock {
    /// There is none.
    Unlimited,
    /// This many bytes.
    Bytes(u64),
}

impl Memlock {
    /// The limit in bytes, if there is one.
    pub const fn bytes(self) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::Bytes(bytes) => Some(bytes),
        }
    }

    pub(crate) fn of(value: Option<u64>) -> Self {
        value.map_or(Self::Unlimited, Self::Bytes)
    }
}

/// Why a number is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unread {
    /// There is no such file, or no such line in it: an older kernel, or another set-up.
    #[error("not there")]
    Missing,
    /// This process may not read it.
    #[error("not readable by this process")]
    Forbidden,
    /// It is there and makes no sense.
    #[error("not understood")]
    Garbled,
    /// The kernel keeps it and reports it nowhere.
    #[error("known to the kernel alone")]
    Untold,
    /// Reading failed in another way.
    #[error("not read: {}", io::Error::from_raw_os_error(*.errno))]
    Failed {
        /// The kernel's error number.
        errno: i32,
    },
}

const CAP_IPC_LOCK: u32 = 14;

/// What `/proc/self/ns/user` leads to in the machine's own user namespace; part of the kernel's
/// interface.
const INITIAL_USER_NAMESPACE: &str = "user:[4026531837]";

/// Where `/proc` and `/sys` are.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    root: PathBuf,
}

impl Machine {
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The machine that this process runs on.
    pub(crate) fn this() -> Self {
        Self::at(Path::new("/"))
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// What is in the file `path`, which begins with a slash.
    pub(crate) fn text(&self, path: &str) -> Result<String, Unread> {
        fs::read_to_string(self.path(path)).map_err(|error| unread(&error))
    }

    /// What is in the file, understood.
    pub(crate) fn parsed<T>(
        &self,
        path: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, Unread> {
        let text = self.text(path)?;
        parse(&text).ok_or(Unread::Garbled)
    }

    /// Where a symbolic link leads, cut off behind 64 bytes.
    pub(crate) fn link(&self, path: &str) -> Result<String, Unread> {
        let path = CString::new(self.path(path).into_os_string().into_vec());
        let path = path.map_err(|_| Unread::Garbled)?;
        let mut target = [0; 64];
        // Not by the C library: a program may have a function of that name.
        let target = read_link(&path, &mut target).map_err(|errno| unread(&errno.into()))?;
        String::from_utf8(target.to_vec()).map_err(|_| Unread::Garbled)
    }

    /// The names in a directory, sorted; none if it cannot be read.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// `RLIMIT_MEMLOCK`, soft and hard: of this process the kernel is asked itself, which needs no `/proc`.
    pub(crate) fn memlock(&self) -> Result<(Memlock, Memlock), Unread> {
        if self.root != Path::new("/") {
            return self.parsed("/proc/self/limits", |text| limit(text, "Max locked memory"));
        }
        let limit = Resource::LockedMemory.limit();
        let limit = limit.map_err(|errno| Unread::Failed { errno: errno.0 })?;
        Ok((Memlock::of(limit.soft), Memlock::of(limit.hard)))
    }

    /// `/proc/self/status`.
    pub(crate) fn status(&self) -> Result<String, Unread> {
        self.text("/proc/self/status")
    }

    /// Whether this is the machine's own user namespace, where capabilities count against its limits.
    pub(crate) fn is_initial_namespace(&self) -> Result<bool, Unread> {
        self.link("/proc/self/ns/user").map(|target| target == INITIAL_USER_NAMESPACE)
    }
}

fn unread(error: &io::Error) -> Unread {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Unread::Missing,
        io::ErrorKind::PermissionDenied => Unread::Forbidden,
        io::ErrorKind::InvalidData => Unread::Garbled,
        _ => Unread::Failed { errno: error.raw_os_error().unwrap_or(0) },
    }
}

/// A line of `/proc/self/limits` by its name: the soft and the hard limit.
pub(crate) fn limit(text: &str, name: &str) -> Option<(Memlock, Memlock)> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = line.split_whitespace().map(|word| match word {
        "unlimited" => Some(Memlock::Unlimited),
        digits => digits.parse().ok().map(Memlock::Bytes),
    });
    Some((words.next()??, words.next()??))
}

/// The first word behind `key`, which ends with a colon, on a line of its own.
pub(crate) fn word<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    text.lines().find_map(|line| line.strip_prefix(key))?.split_whitespace().next()
}

/// An amount that the kernel gives in kB, in bytes.
pub(crate) fn kilobytes(text: &str, key: &str) -> Option<u64> {
    word(text, key)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// A set of capabilities.
pub(crate) fn capabilities(text: &str, key: &str) -> Option<u64> {
    u64::from_str_radix(word(text, key)?, 16).ok()
}

/// Whether `CAP_IPC_LOCK` is in the set that `key` names.
pub(crate) fn has_ipc_lock(status: &str, key: &str) -> bool {
    capabilities(status, key).is_some_and(|set| set >> CAP_IPC_LOCK & 1 == 1)
}

/// The major and the minor number of a kernel.
pub(crate) fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The bytes of all mappings of rings of io_uring in `/proc/self/maps`.
pub(crate) fn ring_bytes(maps: &str) -> u64 {
    let rings = maps.lines().filter(|line| line.ends_with("anon_inode:[io_uring]"));
    let bytes = rings.filter_map(|line| {
        let (start, rest) = line.split_once('-')?;
        let (end, _) = rest.split_once(' ')?;
        u64::from_str_radix(end, 16).ok()?.checked_sub(u64::from_str_radix(start, 16).ok()?)
    });
    bytes.fold(0, u64::saturating_add)
}

/// One number in a file.
pub(crate) fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// A number, or `max`, which is none.
pub(crate) fn number_or_max(text: &str) -> Option<Option<u64>> {
    match text.trim() {
        "max" => Some(None),
        digits => digits.parse().ok().map(Some),
    }
}

/// A limit of the first version of control groups, where a number beyond all memory is none.
pub(crate) fn number_or_huge(text: &str) -> Option<Option<u64>> {
    // The kernel rounds the largest signed number down to a page, of 64 KiB at most.
    const NONE: u64 = i64::MAX as u64 & !0xffff;
    number(text).map(|bytes| Some(bytes).filter(|&bytes| bytes < NONE))
}

/// `hca_object` of each device in an `rdma.max`; a device without a limit is left out.
pub(crate) fn rdma_objects(text: &str) -> Vec<(String, u64)> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let device = words.next()?;
            let objects = words.find_map(|word| word.strip_prefix("hca_object="))?;
            Some((device.to_owned(), objects.parse().ok()?))
        })
        .collect()
}

/// Where a process stands in one hierarchy of control groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Membership {
    /// The one hierarchy of version 2.
    Unified { path: String },
    /// A hierarchy of version 1 with these controllers.
    Legacy { controllers: Vec<String>, path: String },
}

/// `/proc/self/cgroup`; lines that make no sense are passed over.
pub(crate) fn memberships(text: &str) -> Vec<Membership> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            number.parse::<u32>().ok()?;
            let path = path.to_owned();
            let controllers: Vec<String> =
                controllers.split(',').filter(|name| !name.is_empty()).map(Into::into).collect();
            Some(match controllers.is_empty() {
                true => Membership::Unified { path },
                false => Membership::Legacy { controllers, path },
            })
        })
        .collect()
}

/// Where a hierarchy of control groups is mounted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mount {
    /// The group that the mount point shows.
    pub(crate) root: String,
    pub(crate) point: String,
    /// `cgroup` or `cgroup2`.
    pub(crate) kind: String,
    /// The options of the file system, which name the controllers of version 1.
    pub(crate) options: String,
}

/// The hierarchies of control groups in `/proc/self/mountinfo`.
pub(crate) fn group_mounts(text: &str) -> Vec<Mount> {
    text.lines().filter_map(group_mount).collect()
}

fn group_mount(line: &str) -> Option<Mount> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (unescaped(mount.next()?), unescaped(mount.next()?));
    let mut file_system = file_system.split(' ');
    let kind = file_system.next().filter(|kind| matches!(*kind, "cgroup" | "cgroup2"))?;
    let options = file_system.nth(1).unwrap_or_default();
    Some(Mount { root, point, kind: kind.to_owned(), options: options.to_owned() })
}

/// The kernel writes blanks in paths as `\040`.
fn unescaped(field: &str) -> String {
    let mut parts = field.split('\\');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let octal = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) if byte.is_ascii() => {
                text.push(char::from(byte));
                text.push_str(&part[3..]);
            }
            _ => {
                text.push('\\');
                text.push_str(part);
            }
        }
    }
    text
}

/// The directories of a group and of all above it, up to the mount point: the group's own first.
///
/// `None` if the mount does not show the group: it lies above or next to what the mount shows.
pub(crate) fn directories(mount: &Mount, path: &str) -> Option<Vec<String>> {
    let below = match mount.root.as_str() {
        "/" => path,
        root => path.strip_prefix(root).filter(|rest| rest.is_empty() || rest.starts_with('/'))?,
    };
    let mut names: Vec<&str> = below.split('/').filter(|name| !name.is_empty()).collect();
    if names.contains(&"..") {
        return None;
    }
    let mut directories = Vec::with_capacity(names.len() + 1);
    loop {
        let mut directory = mount.point.clone();
        names.iter().for_each(|name| {
            directory.push('/');
            directory.push_str(name);
        });
        directories.push(directory);
        if names.pop().is_none() {
            return Some(directories);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn limits_have_a_soft_and_a_hard_side() {
        let text = "Limit   Soft Limit   Hard Limit   Units\n\
                    Max locked memory         65536                unlimited            bytes\n";
        let found = limit(text, "Max locked memory");
        assert_eq!(found, Some((Memlock::Bytes(65536), Memlock::Unlimited)));
        assert_eq!(limit(text, "Max open files"), None);
        assert_eq!(limit("Max locked memory  lots  bytes", "Max locked memory"), None);
    }

    #[test]
    fn rings_are_told_from_other_mappings() {
        let maps = "7f00-8f00 rw-s 00000000 00:10 1 anon_inode:[io_uring]\n\
                    a000-c000 rw-s 10000000 00:10 1 anon_inode:[io_uring]\n\
                    c000-f000 rw-p 00000000 00:00 0 \nbroken anon_inode:[io_uring]\n";
        assert_eq!(ring_bytes(maps), 0x3000);
        assert_eq!((release("6.1.0-28-amd64\n"), release("7.3.4")), (Some((6, 1)), Some((7, 3))));
        assert_eq!((release("Linux"), release("")), (None, None));
    }

    #[test]
    fn a_status_is_read_by_its_keys() {
        let text = "VmLck:\t  12 kB\nCapEff:\t0000000000004000\nNoNewPrivs:\t1\n";
        assert_eq!(kilobytes(text, "VmLck:"), Some(12 << 10));
        assert_eq!(kilobytes(text, "VmPin:"), None);
        assert_eq!(kilobytes("VmLck: 18446744073709551615 kB", "VmLck:"), None);
        assert_eq!(capabilities(text, "CapEff:"), Some(1 << 14));
        assert_eq!(word(text, "NoNewPrivs:"), Some("1"));
    }

    #[test]
    fn no_limit_has_two_spellings() {
        assert_eq!(number_or_max("max\n"), Some(None));
        assert_eq!(number_or_max("4096\n"), Some(Some(4096)));
        assert_eq!(number_or_max("lots"), None);
        assert_eq!(number_or_huge("9223372036854771712\n"), Some(None));
        assert_eq!(number_or_huge("9223372036854710272\n"), Some(None));
        assert_eq!(number_or_huge("1073741824\n"), Some(Some(1 << 30)));
    }

    #[test]
    fn both_versions_of_control_groups_are_told_apart() {
        let found = memberships("4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/user.slice/x:y\nnonsense\n");
        let legacy = |names: &[&str], path: &str| Membership::Legacy {
            controllers: names.iter().map(|&name| name.into()).collect(),
            path: path.into(),
        };
        let unified = Membership::Unified { path: "/user.slice/x:y".into() };
        assert_eq!(
            found,
            [legacy(&["memory"], "/a/b"), legacy(&["cpu", "cpuacct"], "/a"), unified]
        );
    }

    #[test]
    fn mounts_of_control_groups_are_found_among_others() {
        let text = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                    35 31 0:32 /a\\040b /sys/fs/cgroup/memory rw,x shared:9 - cgroup none rw,memory\n\
                    41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let mounts = group_mounts(text);
        let (kinds, roots): (Vec<_>, Vec<_>) =
            mounts.iter().map(|mount| (mount.kind.as_str(), mount.root.as_str())).unzip();
        assert_eq!((kinds, roots), (vec!["cgroup", "cgroup2"], vec!["/a b", "/"]));
        assert_eq!(mounts[0].options, "rw,memory");
    }

    #[test]
    fn a_group_is_walked_up_to_what_the_mount_shows() {
        let mount = |root: &str| Mount {
            root: root.into(),
            point: "/g".into(),
            kind: "cgroup2".into(),
            options: String::new(),
        };
        let up = |root, path| directories(&mount(root), path);
        let words = |names: &[&str]| Some(names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>());
        assert_eq!(up("/", "/"), words(&["/g"]));
        assert_eq!(up("/", "/a/b"), words(&["/g/a/b", "/g/a", "/g"]));
        assert_eq!(up("/pod", "/pod/a"), words(&["/g/a", "/g"]));
        assert_eq!(up("/pod", "/podium"), None);
        assert_eq!(up("/", "/../other"), None);
    }

    #[test]
    fn limits_of_rdma_objects_name_their_device() {
        let text = "mlx5_0 hca_handle=2 hca_object=2000\nrxe0 hca_handle=max hca_object=max\n";
        assert_eq!(rdma_objects(text), [("mlx5_0".to_owned(), 2000)]);
    }

    proptest! {
        #[test]
        fn no_text_harms_a_parser(text in "[ -~\n\t\\\\:/é]{0,200}") {
            let _ = limit(&text, "Max");
            let _ = (kilobytes(&text, "Vm"), capabilities(&text, "Cap"), number(&text));
            let _ = (number_or_max(&text), number_or_huge(&text), rdma_objects(&text));
            for membership in memberships(&text) {
                let (Membership::Unified { path } | Membership::Legacy { path, .. }) = membership;
                for mount in group_mounts(&text) {
                    let _ = directories(&mount, &path);
                }
            }
            let _ = unescaped(&text);
        }

        #[test]
        fn what_the_kernel_writes_is_what_is_read(
            soft in any::<u64>(), kilo in 0..u64::MAX / 1024, caps in any::<u64>(),
        ) {
            let limits = format!("Max locked memory         {soft:<20} {:<20} bytes     \n", "unlimited");
            let read = limit(&limits, "Max locked memory");
            prop_assert_eq!(read, Some((Memlock::Bytes(soft), Memlock::Unlimited)));
            let status = format!("Name:\tx\nVmPin:\t{kilo:>8} kB\nCapEff:\t{caps:016x}\n");
            prop_assert_eq!(kilobytes(&status, "VmPin:"), Some(kilo * 1024));
            prop_assert_eq!(capabilities(&status, "CapEff:"), Some(caps));
        }

        #[test]
        fn a_path_with_blanks_survives_the_kernels_spelling(path in "/[a-z \\\\]{1,20}") {
            let written = path.replace('\\', "\\134").replace(' ', "\\040");
            prop_assert_eq!(unescaped(&written), path);
        }
    }
}
