//! A real server on a real socket, which hands out files that name the process they were made for.

#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // each test uses a part

use pinfold_ebpf::protocol::{BYTES, Challenge, ToClient, ToHelper};
use pinfold_kernel::socket;
use pinfold_notifyd::{ClientLimits, Listener, NoView, Server, Views};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// As many descriptors as each view has.
pub(crate) const PARTS: usize = 4;

/// How many views were made and given back.
#[derive(Default, Debug)]
pub(crate) struct Tally {
    opened: AtomicU64,
    forgotten: AtomicU64,
    gate: Gate,
}

/// What the server goes through to forget a view. Open, unless a test holds it.
#[derive(Default, Debug)]
struct Gate {
    /// How many may pass, if not all, and whether one waits.
    passes: Mutex<(Option<u64>, bool)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut passes = self.passes.lock().unwrap();
        while passes.0 == Some(0) {
            passes.1 = true;
            self.changed.notify_all();
            passes = self.changed.wait(passes).unwrap();
        }
        passes.0 = passes.0.map(|left| left - 1);
    }
}

impl Tally {
    // SeqCst throughout: tests ask about both counts together, and nothing here is hot.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::SeqCst)
    }

    /// The next view that is to be forgotten holds the server up, until it is let pass.
    pub(crate) fn hold_up(&self) {
        self.gate.passes.lock().unwrap().0 = Some(0);
    }

    /// Waits until the server is held up.
    pub(crate) fn await_held_up(&self) {
        let mut passes = self.gate.passes.lock().unwrap();
        while !passes.1 {
            passes = self.gate.changed.wait(passes).unwrap();
        }
    }

    /// Lets so many pass, or all.
    pub(crate) fn let_pass(&self, count: Option<u64>) {
        *self.gate.passes.lock().unwrap() = (count, false);
        self.gate.changed.notify_all();
    }

    pub(crate) fn held(&self) -> u64 {
        let forgotten = self.forgotten.load(Ordering::SeqCst);
        self.opened() - forgotten
    }
}

/// Files in the place of views: each holds the number of the process that it was made for.
pub(crate) struct Files {
    directory: PathBuf,
    tally: Arc<Tally>,
}

impl Views for Files {
    type Id = u64;

    fn open(&mut self, process: BorrowedFd<'_>) -> Result<(u64, Vec<OwnedFd>), NoView> {
        let id = self.tally.opened.fetch_add(1, Ordering::SeqCst);
        let name = self.directory.join(format!("view-{id}"));
        fs::write(&name, pid_of(process)).unwrap();
        let parts = (0..PARTS).map(|_| File::open(&name).unwrap().into()).collect();
        fs::remove_file(&name).unwrap();
        Ok((id, parts))
    }

    fn forget(&mut self, _view: u64) {
        self.tally.gate.pass();
        self.tally.forgotten.fetch_add(1, Ordering::SeqCst);
    }
}

fn pid_of(process: BorrowedFd<'_>) -> String {
    let told = fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).unwrap();
    let line = told.lines().find_map(|line| line.strip_prefix("Pid:")).unwrap();
    line.trim().to_owned()
}

/// The process that a view was made for.
pub(crate) fn made_for(view: &[OwnedFd]) -> u32 {
    let mut text = String::new();
    let file = view[0].try_clone().unwrap();
    File::from(file).read_to_string(&mut text).unwrap();
    text.parse().unwrap()
}

/// A server on a thread of this process; it ends with this.
pub(crate) struct Served {
    pub(crate) path: PathBuf,
    pub(crate) tally: Arc<Tally>,
    directory: PathBuf,
    stop: Option<std::io::PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub(crate) fn new(limits: ClientLimits) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        let name = format!("pinfold-notifyd-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
        let path = directory.join("socket");
        let tally = Arc::new(Tally::default());
        let (stop, thread) = serve(&path, &directory, &tally, limits);
        Self { path, tally, directory, stop: Some(stop), thread: Some(thread) }
    }

    /// Ends the server; clients find no listener.
    pub(crate) fn stop(&mut self) {
        drop(self.stop.take());
        self.tally.let_pass(None);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    /// A new server in the place of one that was stopped.
    pub(crate) fn start_again(&mut self, limits: ClientLimits) {
        let (stop, thread) = serve(&self.path, &self.directory, &self.tally, limits);
        (self.stop, self.thread) = (Some(stop), Some(thread));
    }

    pub(crate) fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

fn serve(
    path: &Path,
    directory: &Path,
    tally: &Arc<Tally>,
    limits: ClientLimits,
) -> (std::io::PipeWriter, JoinHandle<()>) {
    let (stopped, stop) = std::io::pipe().unwrap();
    let views = Files { directory: directory.into(), tally: tally.clone() };
    let listener = Listener::at(path).unwrap();
    let mut server = Server::new(listener, views, limits, |_| {}).unwrap();
    let thread = thread::spawn(move || server.run(stopped.as_fd()).unwrap());
    (stop, thread)
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

// --- clients by hand ------------------------------------------------------------------------------

pub(crate) fn connect(path: &Path) -> OwnedFd {
    socket::connect(path, Duration::from_secs(5)).unwrap()
}

/// What the helper says next; `None` at the end.
pub(crate) fn heard(connection: &OwnedFd) -> Option<(ToClient, Vec<OwnedFd>)> {
    let mut packet = [0; BYTES];
    loop {
        match socket::receive(connection.as_fd(), &mut packet) {
            Ok(received) if received.length == 0 => return None,
            Ok(received) => {
                let message = ToClient::decode(&packet[..received.length]).unwrap();
                return Some((message, received.descriptors));
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

pub(crate) fn challenge(connection: &OwnedFd) -> Option<Challenge> {
    match heard(connection)? {
        (ToClient::Hello(challenge), _) => Some(challenge),
        _ => None,
    }
}

pub(crate) fn say(connection: &OwnedFd, packet: &[u8]) -> bool {
    socket::send(connection.as_fd(), packet, &[]).is_ok()
}

/// Connects, asks properly, and gives what the helper answers.
pub(crate) fn ask(path: &Path) -> (OwnedFd, Option<(ToClient, Vec<OwnedFd>)>) {
    let connection = connect(path);
    let answer = match heard(&connection) {
        Some((ToClient::Hello(challenge), _)) => {
            say(&connection, &ToHelper::Ask(challenge).encode());
            heard(&connection)
        }
        other => other,
    };
    (connection, answer)
}

// --- other processes ------------------------------------------------------------------------------

/// What this process is to be, if it was started by [`other`].
pub(crate) fn role() -> Option<String> {
    std::env::var("PINFOLD_TEST_ROLE").ok()
}

/// Starts this executable once more to run the one test `test`, in the given role.
pub(crate) fn other(test: &str, role: &str, user: Option<u32>) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--quiet"]);
    command.env("PINFOLD_TEST_ROLE", role).stdin(Stdio::piped()).stdout(Stdio::piped());
    if let Some(user) = user {
        command.uid(user).gid(user).current_dir("/");
    }
    command
}

/// Says a line to the process that started this one.
pub(crate) fn report(line: &str) {
    let mut out = std::io::stdout();
    // Not by `println!`, which the test harness may capture.
    out.write_all(format!("\nreport {line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// The next line that `child` reports.
pub(crate) fn reported(child: &mut Child) -> Option<String> {
    let out = child.stdout.as_mut()?;
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        if out.read(&mut byte).ok()? == 0 {
            return None;
        }
        if byte != [b'\n'] {
            line.push(byte[0]);
            continue;
        }
        match String::from_utf8_lossy(&line).strip_prefix("report ") {
            Some(report) => return Some(report.to_owned()),
            None => line.clear(),
        }
    }
}

/// Until the process that started this one closes its standard input.
pub(crate) fn wait_for_parent() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Waits for what must come about; a minute is taken for never.
pub(crate) fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|status| std::os::unix::fs::MetadataExt::uid(&status) == 0)
}

/// Descriptors of this process.
pub(crate) fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}
