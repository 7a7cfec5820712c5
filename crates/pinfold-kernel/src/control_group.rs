//! Control groups: which ones count what this process uses, and the limits that they set. The one reader of these files.
//!
//! Both versions are read, each group where its hierarchy is mounted. `/proc` and `/sys` are below a root, which tests make
//! up. Every parser takes text and panics on none.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::{fs, iter};

/// A control group with a controller that counts what this process uses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ControlGroup {
    root: PathBuf,
    /// Below the root.
    directory: String,
    version: Version,
}

/// Of the interface to control groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// A hierarchy for each controller, or for some together.
    V1,
    /// One hierarchy of all controllers.
    V2,
}

/// A file of a group, read.
#[derive(Debug)]
pub struct GroupFile<T> {
    /// Where it is, below the root.
    pub path: String,
    /// `InvalidData` for a text that makes no sense.
    pub value: io::Result<T>,
}

/// What the kernel takes back before it ends a process.
const RECLAIMABLE: [&str; 3] = ["active_file", "inactive_file", "slab_reclaimable"];

impl ControlGroup {
    /// The groups in which `controller` counts the process that `/proc/self` below `root` describes: its own first, then
    /// those above it. `None` where that cannot be known.
    pub fn of_this_process(root: &Path, controller: &str) -> Option<Vec<Self>> {
        // A path may be any bytes.
        let read = |path: String| fs::read(root.join(path)).ok();
        let read = |path| read(path).map(|text| String::from_utf8_lossy(&text).into_owned());
        // By the calling thread: once the first one has ended the kernel shows no mounts there, and the topmost group.
        let read = |name| {
            read(format!("proc/thread-self/{name}")).or_else(|| read(format!("proc/self/{name}")))
        };
        let (groups, mounts) = (read("cgroup")?, read("mountinfo")?);
        let is_unified = |it: &Membership<'_>| it.controllers.is_empty();
        // Each controller is in one hierarchy only; where version 1 has it, version 2 has not.
        let membership = memberships(&groups)
            .find(|it| it.controllers.split(',').any(|name| name == controller))
            .or_else(|| memberships(&groups).find(is_unified))?;
        let (version, kind) = match is_unified(&membership) {
            true => (Version::V2, "cgroup2"),
            false => (Version::V1, "cgroup"),
        };
        let mut mounts = mounts.lines().filter_map(mount).filter(|mount| {
            let mut options = mount.options.split(',');
            mount.kind == kind && (version == Version::V2 || options.any(|it| it == controller))
        });
        let directories = mounts.find_map(|mount| directories(&mount, membership.path))?;
        let group = |directory| Self { root: root.to_owned(), directory, version };
        Some(directories.into_iter().map(group).collect())
    }

    /// Where it is, below the root.
    pub fn directory(&self) -> &str {
        &self.directory
    }

    /// The version of the interface.
    pub fn version(&self) -> Version {
        self.version
    }

    /// With more memory in use, the kernel ends a process of the group. `None` is no limit.
    pub fn memory_max(&self) -> GroupFile<Option<u64>> {
        match self.version {
            Version::V1 => self.read("memory.limit_in_bytes", number_or_huge),
            Version::V2 => self.limit("memory.max"),
        }
    }

    /// With more memory in use, the kernel slows every process of the group down: version 2 only. `None` is no limit.
    pub fn memory_high(&self) -> GroupFile<Option<u64>> {
        match self.version {
            Version::V1 => GroupFile { path: "memory.high".into(), value: Ok(None) },
            Version::V2 => self.limit("memory.high"),
        }
    }

    /// The memory that the group uses, in bytes.
    pub fn memory_in_use(&self) -> GroupFile<u64> {
        let file = match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        };
        self.read(file, |text| text.trim().parse().ok())
    }

    /// How much of that the kernel takes back before it ends a process, in bytes; 0 where it does not say.
    pub fn memory_reclaimable(&self) -> u64 {
        let sum = |text: &str| {
            let amounts = text.lines().filter_map(|line| line.split_once(' '));
            let amounts = amounts.filter(|(name, _)| RECLAIMABLE.contains(name));
            let amounts = amounts.filter_map(|(_, bytes)| bytes.parse().ok());
            Some(amounts.fold(0, u64::saturating_add))
        };
        self.read("memory.stat", sum).value.unwrap_or(0)
    }

    /// How many objects it grants on each RDMA device (`hca_object`); a device without a limit is left out.
    pub fn rdma_objects(&self) -> Vec<(String, u64)> {
        self.read("rdma.max", |text| Some(rdma_objects(text))).value.unwrap_or_default()
    }

    /// A limit of version 2. The topmost group has none, and no such file.
    fn limit(&self, file: &str) -> GroupFile<Option<u64>> {
        let mut limit = self.read(file, number_or_max);
        let kind = limit.value.as_ref().err().map(io::Error::kind);
        if matches!(kind, Some(ErrorKind::NotFound | ErrorKind::NotADirectory)) {
            limit.value = Ok(None);
        }
        limit
    }

    fn read<T>(&self, file: &str, parse: impl FnOnce(&str) -> Option<T>) -> GroupFile<T> {
        let path = format!("{}/{file}", self.directory);
        let text = fs::read_to_string(self.root.join(path.trim_start_matches('/')));
        let value = text.and_then(|text| parse(&text).ok_or_else(|| ErrorKind::InvalidData.into()));
        GroupFile { path, value }
    }
}

/// A number, or `max`, which is none.
fn number_or_max(text: &str) -> Option<Option<u64>> {
    match text.trim() {
        "max" => Some(None),
        digits => digits.parse().ok().map(Some),
    }
}

/// A limit of version 1, where a number beyond all memory is none.
fn number_or_huge(text: &str) -> Option<Option<u64>> {
    // The kernel rounds the largest signed number down to a page, of 64 KiB at most.
    const NONE: u64 = i64::MAX as u64 & !0xffff;
    text.trim().parse().ok().map(|bytes| Some(bytes).filter(|&bytes| bytes < NONE))
}

/// `hca_object` of each device in an `rdma.max`.
fn rdma_objects(text: &str) -> Vec<(String, u64)> {
    let of_device = |line: &str| {
        let mut words = line.split_whitespace();
        let device = words.next()?;
        let objects = words.find_map(|word| word.strip_prefix("hca_object="))?;
        Some((device.to_owned(), objects.parse().ok()?))
    };
    text.lines().filter_map(of_device).collect()
}

/// Where a process stands in one hierarchy.
#[derive(PartialEq, Eq, Debug)]
struct Membership<'t> {
    /// Those of a hierarchy of version 1, with commas; none for that of version 2.
    controllers: &'t str,
    path: &'t str,
}

/// `/proc/self/cgroup`; lines that make no sense are left out.
fn memberships(text: &str) -> impl Iterator<Item = Membership<'_>> {
    text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        number.parse::<u32>().ok().map(|_| Membership { controllers, path })
    })
}

/// Where a hierarchy is mounted.
struct Mount<'t> {
    /// The group that the mount point shows.
    root: String,
    point: String,
    /// `cgroup` or `cgroup2`.
    kind: &'t str,
    /// The options of the file system, which name the controllers of version 1.
    options: &'t str,
}

/// A line of `/proc/self/mountinfo`.
fn mount(line: &str) -> Option<Mount<'_>> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (unescaped(mount.next()?), unescaped(mount.next()?));
    let mut file_system = file_system.split(' ');
    let kind = file_system.next()?;
    Some(Mount { root, point, kind, options: file_system.nth(1).unwrap_or_default() })
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
fn directories(mount: &Mount<'_>, path: &str) -> Option<Vec<String>> {
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
        let above = iter::once(mount.point.as_str());
        directories.push(above.chain(names.iter().copied()).collect::<Vec<_>>().join("/"));
        if names.pop().is_none() {
            return Some(directories);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Files in the place of a machine's, until this is dropped.
    struct Machine(PathBuf);

    impl Machine {
        fn new(name: &str, groups: &str, mounts: &str) -> Self {
            let name = format!("pinfold-control-group-{name}-{}", std::process::id());
            let machine = Self(std::env::temp_dir().join(name));
            machine.write("/proc/self/cgroup", groups);
            machine.write("/proc/self/mountinfo", mounts);
            machine
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn groups(&self, controller: &str) -> Option<Vec<ControlGroup>> {
            ControlGroup::of_this_process(&self.0, controller)
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn value<T>(file: GroupFile<T>) -> Result<T, ErrorKind> {
        file.value.map_err(|error| error.kind())
    }

    const UNIFIED: &str = "24 1 0:22 / /proc rw - proc proc rw\n\
                           30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn the_groups_of_version_2_are_read_from_the_own_one_up() {
        let machine = Machine::new("v2", "1:name=systemd:/x\n0::/a/b\n", UNIFIED);
        machine.write("/sys/fs/cgroup/a/b/memory.max", "4096\n");
        machine.write("/sys/fs/cgroup/a/b/memory.high", "max\n");
        machine.write("/sys/fs/cgroup/a/b/memory.current", "1024\n");
        machine.write(
            "/sys/fs/cgroup/a/b/memory.stat",
            "anon 7\ninactive_file 30\nslab_reclaimable 3\nactive_file 20\n",
        );
        machine.write("/sys/fs/cgroup/a/memory.max", "lots\n");
        machine.write("/sys/fs/cgroup/a/rdma.max", "rxe0 hca_handle=max hca_object=300\n");
        let groups = machine.groups("memory").unwrap();
        assert!(groups.iter().all(|group| group.version() == Version::V2));
        let directories: Vec<_> = groups.iter().map(ControlGroup::directory).collect();
        assert_eq!(directories, ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]);
        let [own, above, top] = groups.try_into().unwrap();
        assert_eq!(own.memory_max().path, "/sys/fs/cgroup/a/b/memory.max");
        assert_eq!(value(own.memory_max()), Ok(Some(4096)));
        assert_eq!(value(own.memory_high()), Ok(None));
        assert_eq!((value(own.memory_in_use()), own.memory_reclaimable()), (Ok(1024), 53));
        assert_eq!(value(above.memory_max()), Err(ErrorKind::InvalidData));
        assert_eq!(value(above.memory_in_use()), Err(ErrorKind::NotFound));
        assert_eq!((value(top.memory_max()), top.memory_reclaimable()), (Ok(None), 0));
        assert_eq!(machine.groups("rdma").unwrap()[1].rdma_objects(), [("rxe0".to_owned(), 300)]);
    }

    #[test]
    fn a_controller_of_version_1_is_read_where_its_hierarchy_is_mounted() {
        let mounts = "35 31 0:32 /pod /groups/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                      36 31 0:33 /pod /groups/a\\040b rw shared:9 - cgroup none rw,memory\n\
                      41 31 0:38 / /groups/unified rw - cgroup2 cgroup2 rw\n";
        let machine = Machine::new("v1", "4:memory:/pod/x\n3:cpu,cpuacct:/pod\n0::/y\n", mounts);
        machine.write("/groups/a b/x/memory.limit_in_bytes", "9223372036854771712\n");
        machine.write("/groups/a b/memory.limit_in_bytes", "8192\n");
        machine.write("/groups/a b/memory.usage_in_bytes", "4096\n");
        let [own, above] = machine.groups("memory").unwrap().try_into().unwrap();
        assert_eq!((own.version(), own.directory()), (Version::V1, "/groups/a b/x"));
        assert_eq!(value(own.memory_max()), Ok(None));
        assert_eq!(value(own.memory_in_use()), Err(ErrorKind::NotFound));
        assert_eq!(value(above.memory_max()), Ok(Some(8192)));
        assert_eq!(value(above.memory_high()), Ok(None));
        assert_eq!(value(above.memory_in_use()), Ok(4096));
        let directory = |controller| Some(machine.groups(controller)?[0].directory().to_owned());
        assert_eq!(directory("cpuacct").as_deref(), Some("/groups/cpu"));
        assert_eq!(directory("rdma").as_deref(), Some("/groups/unified/y"));
    }

    #[test]
    fn groups_that_no_mount_shows_are_not_known() {
        for (name, groups, mounts) in [
            ("no-group", "", UNIFIED),
            ("no-mount", "0::/a\n", ""),
            ("elsewhere", "0::/../a\n", UNIFIED),
            ("other", "4:memory:/a\n0::/\n", UNIFIED),
        ] {
            assert_eq!(Machine::new(name, groups, mounts).groups("memory"), None, "{name}");
        }
        assert_eq!(ControlGroup::of_this_process(Path::new("/nonexistent"), "memory"), None);
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
        let text = "4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/user.slice/x:y\nnonsense\n";
        let found: Vec<_> = memberships(text).map(|it| (it.controllers, it.path)).collect();
        assert_eq!(found, [("memory", "/a/b"), ("cpu,cpuacct", "/a"), ("", "/user.slice/x:y")]);
    }

    #[test]
    fn a_mount_is_read_field_by_field() {
        let line =
            "35 31 0:32 /a\\040b /sys/fs/cgroup/memory rw,x shared:9 - cgroup none rw,memory";
        let mount = mount(line).unwrap();
        assert_eq!((mount.root.as_str(), mount.point.as_str()), ("/a b", "/sys/fs/cgroup/memory"));
        assert_eq!((mount.kind, mount.options), ("cgroup", "rw,memory"));
    }

    #[test]
    fn a_group_is_walked_up_to_what_the_mount_shows() {
        let up = |root: &str, path| {
            let (root, point) = (root.into(), "/g".into());
            directories(&Mount { root, point, kind: "cgroup2", options: "" }, path)
        };
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
            let _ = (number_or_max(&text), number_or_huge(&text), rdma_objects(&text));
            for membership in memberships(&text) {
                for mount in text.lines().filter_map(mount) {
                    let _ = directories(&mount, membership.path);
                }
            }
            let _ = unescaped(&text);
        }

        #[test]
        fn a_path_with_blanks_survives_the_kernels_spelling(path in "/[a-z \\\\]{1,20}") {
            let written = path.replace('\\', "\\134").replace(' ', "\\040");
            prop_assert_eq!(unescaped(&written), path);
        }
    }
}
