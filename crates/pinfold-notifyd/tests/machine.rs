//! The helper with the real programs, and clients of other users, where the kernel lets root load
//! them: started explicitly as root, and as a service manager starts it, with three capabilities and nothing
//! else.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // tests may fail loudly

mod support;

use pinfold::Monitor;
use pinfold::monitor::Ebpf;
use pinfold::monitor::notify::{self, HelperConnection};
use pinfold_ebpf::layout::{Changes, ENTRIES, WatchFilter, done};
use pinfold_ebpf::{Programs, ViewParts};
use pinfold_kernel::mapping::SharedValue;
use pinfold_kernel::socket;
use pinfold_kernel::trial::TrialArea;
use pinfold_notifyd::{ClientLimits, Listener, Server, StopSignals, make_room};
use std::fs;
use std::io::{BufRead, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Instant;
use support::{eventually, report, reported};

/// What the helper needs: to make maps, to attach to the kernel's functions, and to be told the
/// addresses of the kernel's symbols.
const CAPABILITIES: &str = "-all,+bpf,+perfmon,+syslog";

/// More views than any helper of these tests has memory for.
const MOST_KEPT: usize = 256;

// --- the client -----------------------------------------------------------------------------------

/// A view, mapped.
struct Followed {
    changes: SharedValue<Changes>,
    view: ViewParts,
    connection: HelperConnection,
}

impl Followed {
    fn new() -> Self {
        let began = Instant::now();
        let (view, connection) = notify::connect(&place()).unwrap();
        let view = view.into_parts();
        let took = began.elapsed();
        eprintln!("connected in {took:?}, {} descriptors", 3 + view.links.len() + 1);
        let changes = |writable| SharedValue::<Changes>::new(view.changes.as_fd(), 0, writable);
        assert!(changes(true).is_err());
        let changes = changes(false).unwrap();
        let wishes = SharedValue::<WatchFilter>::new(view.wishes.as_fd(), 0, true).unwrap();
        for word in &wishes.get().blocks {
            word.store(u32::MAX, Ordering::SeqCst);
        }
        Self { changes, view, connection }
    }

    /// Whether a change of exactly this range is in the log.
    fn saw(&self, start: usize, end: usize) -> bool {
        let sequence = self.changes.get().sequence.load(Ordering::SeqCst);
        let first = sequence.saturating_sub(ENTRIES as u64);
        (first..sequence).any(|index| {
            let entry = &self.changes.get().entries[usize::try_from(index).unwrap() % ENTRIES];
            entry.stamp.load(Ordering::SeqCst) == done(index)
                && entry.start.load(Ordering::SeqCst) <= start as u64
                && entry.end.load(Ordering::SeqCst) >= end as u64
        })
    }

    fn answer(&self, question: &str) -> String {
        let words: Vec<_> = question.split_whitespace().collect();
        match words[..] {
            ["change"] => {
                let (start, end) = change();
                format!("{start} {end} {}", self.saw(start, end))
            }
            ["saw", start, end] => {
                self.saw(start.parse().unwrap(), end.parse().unwrap()).to_string()
            }
            ["helper"] => self.connection.helper_is_there().to_string(),
            ["links"] => self.view.links.len().to_string(),
            _ => panic!("{question}"),
        }
    }
}

/// Maps two pages and unmaps them; where they were.
fn change() -> (usize, usize) {
    let area = TrialArea::private(2).unwrap();
    let range = area.range().unwrap();
    area.unmap();
    (range.start(), range.end())
}

fn place() -> PathBuf {
    std::env::var_os("PINFOLD_TEST_PATH").unwrap().into()
}

fn be_client() {
    let followed = Followed::new();
    report("ready");
    for question in std::io::stdin().lock().lines() {
        report(&followed.answer(&question.unwrap()));
    }
}

/// More monitors, one after the other, than a process can have at once.
fn be_monitors() {
    for _ in 0..4 {
        let monitor = Ebpf::from_helper(&place()).unwrap();
        let before = monitor.check().unwrap();
        let page = TrialArea::private(1).unwrap();
        monitor.watch(page.range().unwrap());
        page.advise(libc::MADV_DONTNEED).unwrap();
        assert_ne!(monitor.check().unwrap(), before);
    }
    report("four");
}

/// Takes views and gives them back, and keeps the kernel's memory behind them.
fn be_keeper() {
    let mut kept = vec![];
    let end = loop {
        if kept.len() == MOST_KEPT {
            break "never refused".into();
        }
        match notify::connect(&place()) {
            Ok((view, connection)) => {
                let ViewParts { changes, wishes, wakeups, .. } = view.into_parts();
                kept.push([changes, wishes, wakeups]);
                connection.give_back();
            }
            Err(error) => break format!("{error:?}"),
        }
    };
    eprintln!("kept the memory of {} views", kept.len());
    report(&end);
    support::wait_for_parent();
}

fn be_latecomer() {
    eventually("the helper gives a view", || notify::connect(&place()).is_ok());
    report("served");
}

fn be_helper() {
    let stop = StopSignals::new().unwrap();
    let limits = make_room(ClientLimits::default()).unwrap();
    let programs = match Programs::load() {
        Ok(programs) => programs,
        Err(error) => return report(&format!("no: {error}")),
    };
    let listener = Listener::passed().unwrap().map_or_else(|| Listener::at(&place()), Ok).unwrap();
    let mut server = Server::new(listener, programs, limits, |line| eprintln!("{line}")).unwrap();
    report("ready");
    server.run(stop.as_fd()).unwrap();
}

/// Not a test by itself: what other processes of these tests do.
#[test]
fn in_another_process() {
    match support::role().as_deref() {
        Some("client") => be_client(),
        Some("monitors") => be_monitors(),
        Some("keeper") => be_keeper(),
        Some("latecomer") => be_latecomer(),
        Some("helper") => be_helper(),
        _ => {}
    }
}

// --- the tests ------------------------------------------------------------------------------------

/// Another process; killed with this.
struct Process(Child);

impl Process {
    fn client(place: &Path, user: u32) -> Self {
        let mut command = support::other("in_another_process", "client", Some(user));
        let mut client = Self(command.env("PINFOLD_TEST_PATH", place).spawn().unwrap());
        assert_eq!(client.line().as_deref(), Some("ready"));
        client
    }

    fn line(&mut self) -> Option<String> {
        reported(&mut self.0)
    }

    fn ask(&mut self, question: &str) -> String {
        writeln!(self.0.stdin.as_mut().unwrap(), "{question}").unwrap();
        self.line().unwrap()
    }

    /// Whether it sees its own change and `other` does not.
    fn follows_itself_only(&mut self, other: &mut Self) {
        let change = self.ask("change");
        let (range, seen) = change.rsplit_once(' ').unwrap();
        assert_eq!(seen, "true", "its own change of {range}");
        assert_eq!(other.ask(&format!("saw {range}")), "false", "{range}");
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pinfold-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A helper that listens; `None`, and a word, where there can be none.
fn started(mut command: Command) -> Option<Process> {
    let mut helper = Process(command.spawn().unwrap());
    match helper.line().as_deref() {
        Some("ready") => Some(helper),
        Some(why) if why.starts_with("no: ") => {
            eprintln!("skipped: the programs cannot be loaded here: {why}");
            None
        }
        other => panic!("the helper said {other:?}"),
    }
}

fn able() -> bool {
    let able = support::is_root();
    if !able {
        eprintln!("skipped: only root can load the programs and be several users");
    }
    able
}

/// What clients go through while helpers come and go, whatever way they are started.
fn clients_outlive_helpers(place: &Path, start: impl Fn() -> Option<Process>) {
    let Some(helper) = start() else { return };
    let mut first = Process::client(place, 1001);
    let mut second = Process::client(place, 1002);
    first.follows_itself_only(&mut second);
    second.follows_itself_only(&mut first);
    assert_eq!(first.ask("helper"), "true");

    helper.kill();
    assert_eq!(first.ask("helper"), "false");
    first.follows_itself_only(&mut second);

    let again = start().expect("it could be started before");
    let mut third = Process::client(place, 1001);
    third.follows_itself_only(&mut first);
    first.follows_itself_only(&mut third);
    second.kill();
    third.kill();
    drop(again);
    first.follows_itself_only(&mut Process::client_without_helper(place, &start));
}

impl Process {
    /// A client of a helper that is gone by the time that it is returned.
    fn client_without_helper(place: &Path, start: &impl Fn() -> Option<Process>) -> Self {
        let helper = start().expect("it could be started before");
        let client = Self::client(place, 1003);
        helper.kill();
        client
    }
}

#[test]
fn clients_of_a_helper_that_root_started_see_themselves_and_outlive_it() {
    if !able() {
        return;
    }
    let directory = Directory::new("by-hand");
    let place = directory.0.join("socket");
    clients_outlive_helpers(&place, || {
        let mut command = support::other("in_another_process", "helper", None);
        command.env("PINFOLD_TEST_PATH", &place);
        started(command)
    });
}

#[test]
fn three_capabilities_are_enough_for_a_helper_that_is_not_root() {
    if !able() {
        return;
    }
    let directory = Directory::new("service");
    let place = directory.0.join("socket");
    let listener = socket::bind(&place, 0o666).unwrap();
    fs::set_permissions(&place, fs::Permissions::from_mode(0o666)).unwrap();
    socket::listen(listener.as_fd(), 16).unwrap();
    clients_outlive_helpers(&place, || started(as_service(&listener, &place)));
}

#[test]
fn a_monitor_without_privilege_works_and_gives_its_view_back() {
    if !able() {
        return;
    }
    let directory = Directory::new("monitors");
    let place = directory.0.join("socket");
    let mut helper = support::other("in_another_process", "helper", None);
    helper.env("PINFOLD_TEST_PATH", &place);
    let Some(_helper) = started(helper) else { return };
    let mut monitors = support::other("in_another_process", "monitors", Some(1001));
    let mut monitors = Process(monitors.env("PINFOLD_TEST_PATH", &place).spawn().unwrap());
    assert_eq!(monitors.line().as_deref(), Some("four"));

    // Once more where processes have other numbers.
    let within = support::other("in_another_process", "monitors", None);
    let mut contained = Command::new("unshare");
    contained.args(["--pid", "--fork", "--kill-child", "--", "setpriv", "--reuid", "1001"]);
    contained.args(["--regid", "1001", "--clear-groups", "--"]);
    contained.arg(within.get_program()).args(within.get_args()).current_dir("/");
    contained.env("PINFOLD_TEST_ROLE", "monitors").env("PINFOLD_TEST_PATH", &place);
    let mut contained = Process(contained.stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(contained.line().as_deref(), Some("four"));
}

/// As a service manager would start it: another user, few capabilities, the socket as descriptor 3.
fn as_service(listener: &OwnedFd, place: &Path) -> Command {
    const SCRIPT: &str = "exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec setpriv --reuid 65534 \
         --regid 65534 --clear-groups --inh-caps \"$0\" --ambient-caps \"$0\" --bounding-set \"$0\" \
         --no-new-privs -- \"$@\"";
    let helper = support::other("in_another_process", "helper", None);
    let mut command = Command::new("bash");
    command.args(["-c", SCRIPT, CAPABILITIES]).arg(helper.get_program()).args(helper.get_args());
    command.env("PINFOLD_TEST_ROLE", "helper").env("PINFOLD_TEST_PATH", place);
    command.stdin(listener.try_clone().unwrap()).stdout(Stdio::piped()).current_dir("/");
    command.process_group(0);
    command
}

#[test]
fn a_killed_client_s_view_is_free_again() {
    if !able() {
        return;
    }
    let directory = Directory::new("killed");
    let place = directory.0.join("socket");
    let mut command = support::other("in_another_process", "helper", None);
    let Some(helper) =
        started(std::mem::replace(command.env("PINFOLD_TEST_PATH", &place), Command::new("true")))
    else {
        return;
    };
    let base = open_descriptors(&helper);
    for _ in 0..8 {
        Process::client(&place, 1001).kill();
    }
    eventually("the helper has what it had before", || open_descriptors(&helper) <= base);
}

/// A control group that this machine's kernel limits the memory of; `None`, and a word, where there can be none.
struct Group(PathBuf);

impl Group {
    const ROOT: &str = "/sys/fs/cgroup";

    fn new() -> Option<Self> {
        if std::env::var_os("PINFOLD_KERNEL").is_none() {
            eprintln!("skipped: this machine's control groups are not ours to change");
            return None;
        }
        let group = Self(Path::new(Self::ROOT).join(format!("pinfold-{}", std::process::id())));
        fs::write(Path::new(Self::ROOT).join("cgroup.subtree_control"), "+memory").unwrap();
        fs::create_dir(&group.0).unwrap();
        Some(group)
    }

    fn of_helper(&self, place: &Path) -> Command {
        let helper = support::other("in_another_process", "helper", None);
        let mut command = Command::new("bash");
        command.args(["-c", r#"echo $$ >"$0/cgroup.procs" && exec "$@""#]).arg(&self.0);
        command.arg(helper.get_program()).args(helper.get_args());
        command.env("PINFOLD_TEST_ROLE", "helper").env("PINFOLD_TEST_PATH", place);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// So that the memory of some views is left before the reserve, and that of some more in it.
    fn limit(&self) {
        let used = fs::read_to_string(self.0.join("memory.current")).unwrap();
        let used: u64 = used.trim().parse().unwrap();
        let limit = (used + (4 << 20)) / 7 * 8;
        fs::write(self.0.join("memory.max"), limit.to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its last process is just being ended.
        eventually("the group is gone", || fs::remove_dir(&self.0).is_ok());
    }
}

/// A view's memory stays charged to the helper's control group as long as any process has it.
#[test]
fn a_user_that_keeps_the_memory_of_many_views_does_not_end_the_helper() {
    if !able() {
        return;
    }
    let Some(group) = Group::new() else { return };
    let directory = Directory::new("kept");
    let place = directory.0.join("socket");
    let Some(mut helper) = started(group.of_helper(&place)) else { return };
    group.limit();
    let client = |role| {
        let mut command = support::other("in_another_process", role, Some(1001));
        Process(command.env("PINFOLD_TEST_PATH", &place).spawn().unwrap())
    };
    let mut keeper = client("keeper");
    assert_eq!(keeper.line().as_deref(), Some("Refused(NoMemory)"));
    assert!(helper.0.try_wait().unwrap().is_none(), "the helper has ended");
    keeper.kill();
    assert_eq!(client("latecomer").line().as_deref(), Some("served"));
    drop(helper);
}

fn open_descriptors(process: &Process) -> usize {
    fs::read_dir(format!("/proc/{}/fd", process.0.id())).unwrap().count()
}
