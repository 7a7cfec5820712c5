//! The one reader of limits: `/proc` and `/sys` below a root, which tests make up, and what is read there. Those of control
//! groups are read in [`pinfold_kernel::control_group`], which the helper has, too.
//!
//! Every parser takes text and panics on none.

use pinfold_kernel::Errno;
use pinfold_kernel::control_group::ControlGroup;
use pinfold_kernel::descriptor::read_link;
use pinfold_kernel::process::Resource;
use pinfold_kernel::thread::{self, IpcLock};
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

/// How `CAP_IPC_LOCK` stands, which waives `RLIMIT_MEMLOCK`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Privilege {
    /// Effective where it counts: nothing is refused for that limit.
    Effective,
    /// Effective in a user namespace of the process's own (a rootless container), where the kernel does not honour it.
    Inert,
    /// Permitted, but not effective: the program has to raise it (`capset`) first.
    Lowered,
    /// Not there.
    Absent {
        /// The process, or one that it came from, has given up gaining any (`no_new_privs`), so file
        /// capabilities and set-user-id programs will not give it.
        no_new_privileges: bool,
    },
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

    /// The groups in which `controller` counts this process, its own first; `None` where that cannot be known.
    pub(crate) fn control_groups(&self, controller: &str) -> Option<Vec<ControlGroup>> {
        ControlGroup::of_this_process(&self.root, controller)
    }

    /// Whether this is the machine that this process runs on, so that the kernel can be asked without a file.
    fn is_this(&self) -> bool {
        self.root == Path::new("/")
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// What is in the file `path`, which begins with a slash. The kernel prints names of programs, which it cuts, and of
    /// files as they are: bytes that are no UTF-8 are replaced.
    pub(crate) fn text(&self, path: &str) -> Result<String, Unread> {
        let bytes = fs::read(self.path(path)).map_err(|error| unread(&error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
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
        if !self.is_this() {
            return self.parsed("/proc/self/limits", |text| limit(text, "Max locked memory"));
        }
        let limit = Resource::LockedMemory.limit();
        let limit = limit.map_err(|errno| Unread::Failed { errno: errno.0 })?;
        Ok((Memlock::of(limit.soft), Memlock::of(limit.hard)))
    }

    /// What the file `name` of `/proc/self` says of this process, by its calling thread: once the first one has ended
    /// (`pthread_exit` in `main`) the kernel says nothing there. That file where the thread's own cannot be read: in a root
    /// that was made up, or under a security module that allows the one alone.
    pub(crate) fn own_text(&self, name: &str) -> Result<String, Unread> {
        let of = |task| self.text(&format!("/proc/{task}/{name}"));
        of("thread-self").or_else(|_| of("self"))
    }

    /// `/proc/self/status`.
    pub(crate) fn status(&self) -> Result<String, Unread> {
        self.own_text("status")
    }

    /// How `CAP_IPC_LOCK` stands for the calling thread. The kernel is asked itself, so that without `/proc`, too, a limit
    /// is known to hold; in a root that was made up this [`status`](Self::status) says it.
    pub(crate) fn privilege(&self, status: &Result<String, Unread>) -> Result<Privilege, Unread> {
        let asked = self.is_this().then(Capability::of_this_thread).transpose().ok().flatten();
        let capability = match (asked, status) {
            (Some(capability), _) => capability,
            (None, Ok(status)) => Capability::in_status(status)?,
            (None, Err(why)) => return Err(*why),
        };
        Ok(match (capability.sets.is_effective, capability.sets.is_permitted) {
            (true, _) if self.is_in_initial_namespace("self")? => Privilege::Effective,
            (true, _) => Privilege::Inert,
            (false, true) => Privilege::Lowered,
            (false, false) => Privilege::Absent { no_new_privileges: capability.no_new_privileges },
        })
    }

    /// Whether that process is in the machine's own user namespace, where capabilities count against its limits.
    pub(crate) fn is_in_initial_namespace(&self, process: &str) -> Result<bool, Unread> {
        let target = self.link(&format!("/proc/{process}/ns/user"))?;
        Ok(target == INITIAL_USER_NAMESPACE)
    }
}

/// `CAP_IPC_LOCK`, in whichever user namespace.
struct Capability {
    sets: IpcLock,
    no_new_privileges: bool,
}

impl Capability {
    fn of_this_thread() -> Result<Self, Errno> {
        let no_new_privileges = thread::gains_no_privileges()?;
        Ok(Self { sets: thread::ipc_lock()?, no_new_privileges })
    }

    fn in_status(status: &str) -> Result<Self, Unread> {
        let has = |key| match capabilities(status, key) {
            Some(_) => Ok(has_ipc_lock(status, key)),
            None => Err(Unread::Missing),
        };
        let sets = IpcLock { is_effective: has("CapEff:")?, is_permitted: has("CapPrm:")? };
        Ok(Self { sets, no_new_privileges: word(status, "NoNewPrivs:") == Some("1") })
    }
}

pub(crate) fn unread(error: &io::Error) -> Unread {
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

    proptest! {
        #[test]
        fn no_text_harms_a_parser(text in "[ -~\n\t\\\\:/é]{0,200}") {
            let _ = limit(&text, "Max");
            let _ = (kilobytes(&text, "Vm"), capabilities(&text, "Cap"), number(&text));
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
    }
}
