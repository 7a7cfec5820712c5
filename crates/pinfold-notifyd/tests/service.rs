//! The server with its real socket and real clients, in this process and in others.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // tests may fail loudly

mod support;

use pinfold::monitor::notify::{self, ConnectError};
use pinfold_ebpf::protocol::{BYTES, ToClient, ToHelper, ViewRefusal};
use pinfold_kernel::socket;
use pinfold_notifyd::ClientLimits;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::{
    Served, ask, challenge, connect, eventually, heard, made_for, report, reported, say,
};

fn small() -> ClientLimits {
    let patience = Duration::from_millis(200);
    ClientLimits { views: 6, views_per_user: 3, waiting: 6, waiting_per_user: 3, patience }
}

/// Root has the numbers for all users.
fn views_here(limits: ClientLimits) -> usize {
    if support::is_root() { limits.views } else { limits.views_per_user }
}

fn refusal(answer: Option<(ToClient, Vec<OwnedFd>)>) -> Option<ViewRefusal> {
    match answer?.0 {
        ToClient::Refused(refusal) => Some(refusal),
        _ => None,
    }
}

fn served_path() -> PathBuf {
    std::env::var_os("PINFOLD_TEST_PATH").unwrap().into()
}

/// Another process in this role, with a connection of ours as its standard input or none.
fn start(role: &str, path: &Path, input: Option<OwnedFd>) -> Child {
    let mut command = support::other("in_another_process", role, None);
    command.env("PINFOLD_TEST_PATH", path);
    if let Some(input) = input {
        command.stdin(input);
    }
    command.spawn().unwrap()
}

/// Not a test by itself: what other processes of these tests do.
#[test]
fn in_another_process() {
    match support::role().as_deref() {
        Some("holder") => {
            let view = notify::request(&served_path(), notify::PATIENCE);
            report(&view.as_ref().map_or(0, |(view, _)| made_for(view)).to_string());
            support::wait_for_parent();
        }
        Some("unread") => {
            let connection = connect(&served_path());
            let challenge = challenge(&connection).unwrap();
            say(&connection, &ToHelper::Ask(challenge).encode());
            report("asked");
            support::wait_for_parent();
        }
        Some("sharer") => {
            let connection = connect(&served_path());
            let challenge = challenge(&connection).unwrap();
            say(&connection, &ToHelper::Ask(challenge).encode());
            say(&connection, b"no word of the protocol");
            socket::send(std::io::stdin().as_fd(), b"", &[connection.as_fd()]).unwrap();
            report("shared");
            support::wait_for_parent();
        }
        Some("impostor") => {
            let listener = socket::bind(&served_path(), 0o666).unwrap();
            socket::listen(listener.as_fd(), 1).unwrap();
            report("listening");
            support::wait_for_parent();
        }
        Some("refused") => {
            let refused = notify::request(&served_path(), notify::PATIENCE).map(drop);
            report(&format!("{refused:?}"));
        }
        Some("full") => {
            let refused = notify::request(&served_path(), notify::PATIENCE).map(drop);
            report(&format!("{refused:?}"));
            support::wait_for_parent();
        }
        Some("heir") => {
            let connection = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
            let challenge = challenge(&connection).unwrap();
            say(&connection, &ToHelper::Ask(challenge).encode());
            report(&format!("{:?}", refusal(heard(&connection))));
        }
        _ => {}
    }
}

#[test]
fn a_process_gets_the_view_of_itself() {
    let served = Served::new(ClientLimits::default());
    let (view, connection) = notify::request(&served.path, notify::PATIENCE).unwrap();
    assert_eq!((view.len(), made_for(&view)), (support::PARTS, std::process::id()));
    assert!(connection.helper_is_there());
    let mut other = start("holder", &served.path, None);
    assert_eq!(reported(&mut other), Some(other.id().to_string()));
    drop(other.stdin.take());
    other.wait().unwrap();
}

#[test]
fn a_connection_that_was_passed_on_gets_nothing() {
    let served = Served::new(ClientLimits::default());
    let mut heir = start("heir", &served.path, Some(connect(&served.path)));
    assert_eq!(reported(&mut heir), Some("Some(NotTheConnector)".into()));
    heir.wait().unwrap();
    assert_eq!(served.tally.opened(), 0);
}

/// An executable that its user may not read makes a process that its user may not look into.
#[test]
fn a_process_that_is_not_dumpable_gets_nothing() {
    if !support::is_root() {
        eprintln!("skipped: only root can start a process of another user");
        return;
    }
    let served = Served::new(ClientLimits::default());
    let secret = served.path.with_file_name("secret");
    // Not by this process: a child forked meanwhile would hold the copy open for writing, and it could
    // not be executed.
    let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&secret).status();
    assert!(copied.unwrap().success());
    let answers = [0o711, 0o755].map(|mode| {
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(mode)).unwrap();
        let usual = support::other("in_another_process", "refused", Some(1203));
        let mut command = Command::new(&secret);
        command.args(usual.get_args()).stdout(Stdio::piped()).uid(1203).gid(1203).current_dir("/");
        command.env("PINFOLD_TEST_ROLE", "refused").env("PINFOLD_TEST_PATH", &served.path);
        let mut asker = command.spawn().unwrap();
        let answer = reported(&mut asker);
        asker.wait().unwrap();
        answer.unwrap()
    });
    assert_eq!(answers[0], "Err(Refused(NotDumpable))");
    assert_eq!(answers[1], "Ok(())");
}

#[test]
fn a_client_that_is_killed_leaves_nothing() {
    let served = Served::new(ClientLimits::default());
    let mut holder = start("holder", &served.path, None);
    reported(&mut holder).unwrap();
    assert_eq!(served.tally.held(), 1);
    holder.kill().unwrap();
    holder.wait().unwrap();
    eventually("the view is given back", || served.tally.held() == 0);
}

#[test]
fn a_view_counts_until_its_process_ends_or_gives_it_back() {
    let limits = small();
    let served = Served::new(limits);
    let most = views_here(limits);
    // Closing the connection changes nothing: the process may still believe its view.
    for _ in 1..most {
        assert!(matches!(ask(&served.path), (_, Some((ToClient::Granted { .. }, _)))));
    }
    let (_, kept) = notify::request(&served.path, notify::PATIENCE).unwrap();
    let full = ViewRefusal::UserFull { limit: most as u64 };
    assert_eq!(
        notify::request(&served.path, notify::PATIENCE).unwrap_err(),
        ConnectError::Refused(full)
    );
    kept.give_back();
    eventually("one is free", || notify::request(&served.path, notify::PATIENCE).is_ok());
}

/// A process may have few descriptors; it may try again when it has more.
#[test]
fn a_view_that_its_process_has_no_room_for_counts_no_more() {
    let served = Served::new(ClientLimits::default());
    let harness = support::other("in_another_process", "full", None);
    let mut full = Command::new("bash")
        .args(["-c", r#"ulimit -n 6 && exec "$0" "$@""#])
        .arg(harness.get_program())
        .args(harness.get_args())
        .env("PINFOLD_TEST_ROLE", "full")
        .env("PINFOLD_TEST_PATH", &served.path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let refused = reported(&mut full).unwrap();
    assert!(refused.contains("NotAView"), "{refused}");
    eventually("it is given back", || served.tally.opened() == 1 && served.tally.held() == 0);
    drop(full.stdin.take());
    full.wait().unwrap();
}

#[test]
fn what_a_dead_client_alone_has_not_read_is_counted_no_more() {
    let limits = ClientLimits { views: 1, views_per_user: 1, ..small() };
    let served = Served::new(limits);
    let mut asker = start("unread", &served.path, None);
    reported(&mut asker).unwrap();
    eventually("it has a view", || served.tally.held() == 1);
    asker.kill().unwrap();
    asker.wait().unwrap();
    eventually("the view is given back", || served.tally.held() == 0);
    eventually("another one may have one", || {
        notify::request(&served.path, notify::PATIENCE).is_ok()
    });
}

/// The process that asked says something that the protocol does not have, so the helper hangs up; it ends, and another
/// process keeps what was sent to it on its way.
#[test]
fn what_another_process_has_not_read_is_counted_after_the_helper_hung_up() {
    let limits = ClientLimits { views: 1, views_per_user: 1, ..small() };
    let served = Served::new(limits);
    let (here, there) = socket::pair().unwrap();
    let mut asker = start("sharer", &served.path, Some(there));
    reported(&mut asker).unwrap();
    let shared = socket::receive(here.as_fd(), &mut [0; 4]).unwrap().descriptors;
    let [connection] = <[OwnedFd; 1]>::try_from(shared).unwrap();
    eventually("the helper hangs up", || !socket::is_connected(connection.as_raw_fd()));
    asker.kill().unwrap();
    asker.wait().unwrap();
    eventually("the view is given back", || served.tally.held() == 0);
    let (_, answer) = ask(&served.path);
    assert_eq!(refusal(answer), Some(ViewRefusal::UserFull { limit: 1 }));
    drop(connection);
    eventually("another one may have one", || {
        notify::request(&served.path, notify::PATIENCE).is_ok()
    });
}

#[test]
fn a_client_that_says_nothing_is_sent_away() {
    let served = Served::new(small());
    let connection = connect(&served.path);
    assert!(challenge(&connection).is_some());
    assert_eq!(refusal(heard(&connection)), Some(ViewRefusal::TooSlow));
    assert!(heard(&connection).is_none());
}

#[test]
fn nonsense_is_refused_and_another_version_told() {
    let served = Served::new(ClientLimits::default());
    let answer_to = |packet: &dyn Fn([u8; 32]) -> Vec<u8>| {
        let connection = connect(&served.path);
        let proper = ToHelper::Ask(challenge(&connection).unwrap()).encode();
        say(&connection, &packet(proper));
        refusal(heard(&connection))
    };
    assert_eq!(answer_to(&|_| vec![]), Some(ViewRefusal::Malformed));
    assert_eq!(answer_to(&|ask| ask[..31].to_vec()), Some(ViewRefusal::Malformed));
    assert_eq!(answer_to(&|ask| [ask.as_slice(), &[0]].concat()), Some(ViewRefusal::Malformed));
    let wrong_challenge = |mut ask: [u8; 32]| {
        ask[16] ^= 1;
        ask.to_vec()
    };
    assert_eq!(answer_to(&wrong_challenge), Some(ViewRefusal::Malformed));
    let old = |mut ask: [u8; 32]| {
        ask[8] = 0;
        ask.to_vec()
    };
    assert_eq!(answer_to(&old), Some(ViewRefusal::Version { helper: 1 }));
    assert_eq!(served.tally.opened(), 0);
}

#[test]
fn unexpected_descriptors_are_not_kept() {
    let served = Served::new(ClientLimits::default());
    let (mut reader, writer) = std::io::pipe().unwrap();
    let connection = connect(&served.path);
    let ask = ToHelper::Ask(challenge(&connection).unwrap()).encode();
    match socket::send(connection.as_fd(), &ask, &[writer.as_fd()]) {
        // The kernel refuses them (6.16).
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied),
        Ok(()) => assert_eq!(refusal(heard(&connection)), Some(ViewRefusal::Malformed)),
    }
    drop(writer);
    // The end comes when no process has the other side any more.
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

#[test]
fn too_many_at_once_are_told_so_and_others_are_served() {
    let limits = ClientLimits { patience: Duration::from_secs(600), ..small() };
    let served = Served::new(limits);
    let most = if support::is_root() { limits.waiting } else { limits.waiting_per_user };
    let mut idle: Vec<_> = (0..most).map(|_| connect(&served.path)).collect();
    assert!(idle.iter().all(|connection| challenge(connection).is_some()));
    let busy = Some(ViewRefusal::Busy { limit: most as u64 });
    assert_eq!(refusal(heard(&connect(&served.path))), busy);
    idle.pop();
    notify::request(&served.path, notify::PATIENCE).unwrap();
}

/// Forgetting takes the kernel its time. Many processes that end at once are forgotten by turns.
#[test]
fn many_that_end_at_once_delay_another_user_by_few() {
    if !support::is_root() {
        eprintln!("skipped: only root can start a process of another user");
        return;
    }
    let served = Served::new(ClientLimits::default());
    let mut ending: Vec<_> = (0..8)
        .map(|_| {
            let mut other = support::other("in_another_process", "holder", Some(1201));
            other.env("PINFOLD_TEST_PATH", &served.path).spawn().unwrap()
        })
        .collect();
    ending.iter_mut().for_each(|other| assert!(reported(other).is_some()));
    served.tally.hold_up();
    for other in &mut ending {
        other.kill().unwrap();
        other.wait().unwrap();
    }
    served.tally.await_held_up();
    let connection = connect(&served.path);
    // It is greeted before the second is forgotten, asks before the third, and then it is its turn.
    let next = || {
        served.tally.let_pass(Some(1));
        served.tally.await_held_up();
        let mut packet = [0; BYTES];
        socket::receive(connection.as_fd(), &mut packet)
            .ok()
            .and_then(|_| ToClient::decode(&packet).ok())
    };
    let Some(ToClient::Hello(challenge)) = next() else { panic!("not greeted") };
    say(&connection, &ToHelper::Ask(challenge).encode());
    assert_eq!(next(), None);
    assert!(matches!(next(), Some(ToClient::Granted { .. })));
    assert_eq!(served.tally.held(), 8 + 1 - 3);
}

#[test]
fn a_restart_is_noticed_and_the_new_one_serves() {
    let mut served = Served::new(ClientLimits::default());
    let (view, connection) = notify::request(&served.path, notify::PATIENCE).unwrap();
    assert!(connection.helper_is_there());
    served.stop();
    assert!(!connection.helper_is_there());
    assert_eq!(made_for(&view), std::process::id());
    assert!(matches!(
        notify::request(&served.path, notify::PATIENCE),
        Err(ConnectError::Absent { .. })
    ));
    served.start_again(ClientLimits::default());
    notify::request(&served.path, notify::PATIENCE).unwrap();
}

/// Whatever it would say: it is not even asked.
#[test]
fn what_listens_for_another_user_is_not_believed() {
    const OTHER: u32 = 1203;
    if !support::is_root() {
        eprintln!("skipped: only root can have another user listen");
        return;
    }
    let path = std::env::temp_dir().join(format!("pinfold-impostor-{}", std::process::id()));
    let mut impostor = support::other("in_another_process", "impostor", Some(OTHER));
    let mut impostor = impostor.env("PINFOLD_TEST_PATH", &path).spawn().unwrap();
    assert_eq!(reported(&mut impostor).as_deref(), Some("listening"));
    let refused = notify::request(&path, notify::PATIENCE).map(drop);
    std::fs::remove_file(&path).unwrap();
    drop(impostor.stdin.take());
    impostor.wait().unwrap();
    assert_eq!(refused, Err(ConnectError::Stranger { uid: OTHER }));
}

#[test]
fn what_is_no_view_is_not_taken_for_one() {
    let served = Served::new(ClientLimits::default());
    assert!(matches!(notify::connect(&served.path), Err(ConnectError::NotAView { .. })));
}
