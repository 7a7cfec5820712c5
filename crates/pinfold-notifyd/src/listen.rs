//! The socket that clients connect to: a file of our own, or one that the service manager passed.

use pinfold_kernel::process::effective_user;
use pinfold_kernel::socket;
use pinfold_kernel::{Descriptor, Errno, descriptor};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Connections that may wait to be accepted; the kernel lowers it to `net.core.somaxconn`.
pub(crate) const BACKLOG: u16 = 1024;
/// Every user may connect: what a process gets concerns itself.
const MODE: u32 = 0o666;
/// The bytes of a socket's path, without the zero behind it.
const LONGEST: usize = 107;
/// The first descriptor that a service manager passes. It stays open: nothing in this process has its number for
/// anything else.
const PASSED: Descriptor = 3;
/// The same as a file.
const FIRST_PASSED: &str = "/proc/self/fd/3";

/// A socket that clients can connect to.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// Where it is our own.
    _file: Option<SocketFile>,
}

/// Why clients cannot connect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The directory is not there and cannot be made, or cannot be used.
    #[error(
        "{0}: {1}: the socket needs a directory that the helper may write to, such as systemd's \
         RuntimeDirectory=, or another place by --socket"
    )]
    Directory(PathBuf, io::Error),
    /// Others could put their own socket in the place of ours.
    #[error(
        "{0}: others may exchange what is in this directory, so clients could be led to another \
         helper: only root or the helper's user may own it, and write to it (chown, chmod 755)"
    )]
    Unsafe(PathBuf),
    /// Something that is no socket has the name.
    #[error(
        "{0}: something that is no socket is there: remove it, or take another name by --socket"
    )]
    InTheWay(PathBuf),
    /// Another helper listens there.
    #[error("{0}: a helper listens there already; one is enough for all programs")]
    Running(PathBuf),
    /// What the service manager passed is no such socket.
    #[error(
        "the service manager's socket cannot be used: {0}; pass one ListenSequentialPacket= socket"
    )]
    Passed(&'static str),
    /// Something else went wrong.
    #[error("{1}: {0} failed: {2}")]
    Os(&'static str, PathBuf, io::Error),
}

impl Listener {
    /// Listens at `path`. A socket without a listener is replaced; the directory is
    /// made if only it is missing.
    ///
    /// # Errors
    ///
    /// [`ListenError`].
    pub fn at(path: &Path) -> Result<Self, ListenError> {
        let path = &settled(path)?;
        let lock = lock(path)?;
        clear(path)?;
        let os = |operation| move |error| ListenError::Os(operation, path.into(), error);
        let socket = socket::bind(path, MODE).map_err(os("bind"))?;
        let file = SocketFile::new(path, lock).map_err(os("stat"))?;
        // The process's mask may have taken something away. No client can connect yet, and nothing else can have the name.
        fs::set_permissions(path, fs::Permissions::from_mode(MODE)).map_err(os("chmod"))?;
        socket::listen(socket.as_fd(), BACKLOG).map_err(os("listen"))?;
        Self::prepared(socket, Some(file)).map_err(os("setsockopt"))
    }

    /// The socket that a service manager passed by `LISTEN_FDS`, if it did.
    ///
    /// # Errors
    ///
    /// [`ListenError::Passed`] if it is not what it should be.
    pub fn passed() -> Result<Option<Self>, ListenError> {
        let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
        match (number("LISTEN_PID"), number("LISTEN_FDS")) {
            (Some(pid), Some(1)) if pid == std::process::id() => Self::take_passed().map(Some),
            (Some(pid), Some(2..)) if pid == std::process::id() => {
                Err(ListenError::Passed("more than one socket was passed"))
            }
            _ => Ok(None),
        }
    }

    fn take_passed() -> Result<Self, ListenError> {
        let socket = socket::listener_at(PASSED)
            .map_err(|_| ListenError::Passed("descriptor 3 is not open"))?
            .ok_or(ListenError::Passed("it does not listen, or is no ListenSequentialPacket="))?;
        Self::prepared(socket, None)
            .map_err(|error| ListenError::Os("setsockopt", FIRST_PASSED.into(), error))
    }

    fn prepared(socket: OwnedFd, file: Option<SocketFile>) -> io::Result<Self> {
        socket::never_wait(socket.as_fd())?;
        // What connects from now on inherits it.
        prepare_connection(socket.as_fd())?;
        Ok(Self { socket, _file: file })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Has the kernel tell who sends a packet, and refuse descriptors.
pub(crate) fn prepare_connection(socket: BorrowedFd<'_>) -> io::Result<()> {
    // Older kernels cannot; `parting` is for them.
    let _ = socket::refuse_descriptors(socket);
    socket::pass_credentials(socket)
}

/// The directory that is named, or that a path begins in.
fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."))
}

/// The same path without symbolic links but for its name. Its directory is there, and from the root on only root and this user can
/// exchange what leads there: what is done under this path is done to what was made there.
fn settled(path: &Path) -> Result<PathBuf, ListenError> {
    let unusable = |kind| ListenError::Directory(path.into(), io::Error::from(kind));
    let name = path.file_name().ok_or(unusable(io::ErrorKind::InvalidInput))?;
    let directory = parent_of(path);
    let found = match fs::canonicalize(directory) {
        // Once more: another user's link may have been there first.
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::canonicalize(made(directory)?),
        found => found,
    };
    let place = found.map_err(|error| ListenError::Directory(directory.into(), error))?;
    if !place.is_dir() {
        return Err(unusable(io::ErrorKind::NotADirectory));
    }
    place.ancestors().try_for_each(trusted)?;
    let settled = place.join(name);
    if settled.as_os_str().len() > LONGEST {
        return Err(ListenError::Directory(settled, Errno(libc::ENAMETOOLONG).into()));
    }
    Ok(settled)
}

/// Makes the directory, for all users whatever the process's mask says, where only it is missing.
fn made(directory: &Path) -> Result<PathBuf, ListenError> {
    let unusable = |error| ListenError::Directory(directory.into(), error);
    let name = directory.file_name().ok_or(unusable(io::ErrorKind::InvalidInput.into()))?;
    let parent = fs::canonicalize(parent_of(directory)).map_err(unusable)?;
    parent.ancestors().try_for_each(trusted)?;
    let place = parent.join(name);
    match DirBuilder::new().mode(0o755).create(&place) {
        // Another helper was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made
            .and_then(|()| fs::set_permissions(&place, fs::Permissions::from_mode(0o755)))
            .map_err(unusable)?,
    }
    Ok(place)
}

/// Only root and this user can exchange what is in the directory.
fn trusted(directory: &Path) -> Result<(), ListenError> {
    let status =
        fs::metadata(directory).map_err(|error| ListenError::Directory(directory.into(), error))?;
    let is_ours = [0, effective_user()].contains(&status.uid());
    let (for_others, sticky) = (status.mode() & 0o022 != 0, status.mode() & 0o1000 != 0);
    if is_ours && (!for_others || sticky) {
        Ok(())
    } else {
        Err(ListenError::Unsafe(directory.into()))
    }
}

/// The lock of the listener at `path`; the kernel releases it when its holder ends.
fn lock(path: &Path) -> Result<File, ListenError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let name = PathBuf::from(name);
    let os = |operation| {
        let name = name.clone();
        move |error| ListenError::Os(operation, name, error)
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&name)
        .map_err(os("open"))?;
    match descriptor::lock(file.as_fd()) {
        Ok(()) => Ok(file),
        Err(Errno(libc::EWOULDBLOCK)) => Err(ListenError::Running(path.into())),
        Err(errno) => Err(os("flock")(errno.into())),
    }
}

/// Removes the socket of a helper that has ended.
fn clear(path: &Path) -> Result<(), ListenError> {
    let Ok(status) = fs::symlink_metadata(path) else { return Ok(()) };
    if !status.file_type().is_socket() {
        return Err(ListenError::InTheWay(path.into()));
    }
    // The lock is ours. But a service manager listens without one.
    match socket::connect(path, Duration::ZERO) {
        Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => {
            fs::remove_file(path).map_err(|error| ListenError::Os("unlink", path.into(), error))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => Err(ListenError::Running(path.into())),
    }
}

/// A socket's name, removed when we end, unless it is not ours any more.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
    /// Held until the name is gone.
    _lock: File,
}

impl SocketFile {
    fn new(path: &Path, lock: File) -> io::Result<Self> {
        Ok(Self { path: path.into(), identity: identity(path)?, _lock: lock })
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|status| (status.dev(), status.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            // What is left is cleared by the next helper.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// A directory of this test's own.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let name = format!("pinfold-listen-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_socket_is_there_for_all_users_and_goes_with_its_listener() {
        let directory = Directory::new("there");
        let path = directory.0.join("made").join("socket");
        let listener = Listener::at(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o666);
        assert_eq!(fs::metadata(parent_of(&path)).unwrap().mode() & 0o777, 0o755);
        assert!(socket::is_listener(listener.as_fd()));
        socket::connect(&path, Duration::ZERO).unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_second_helper_is_refused_and_the_first_one_s_remains_are_not_in_its_way() {
        let directory = Directory::new("second");
        let path = directory.0.join("socket");
        let first = Listener::at(&path).unwrap();
        assert!(matches!(Listener::at(&path), Err(ListenError::Running(_))));
        // As when the first one is killed: the name stays.
        fs::hard_link(&path, directory.0.join("kept")).unwrap();
        drop(first);
        fs::rename(directory.0.join("kept"), &path).unwrap();
        Listener::at(&path).unwrap();
    }

    #[test]
    fn what_others_own_is_left_alone() {
        let directory = Directory::new("others");
        let path = directory.0.join("file");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::at(&path), Err(ListenError::InTheWay(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let path = directory.0.join("stream");
        let _another = UnixListener::bind(&path).unwrap();
        assert!(matches!(Listener::at(&path), Err(ListenError::Running(_))));
        assert!(path.exists());
        let long = directory.0.join("s".repeat(LONGEST));
        assert!(matches!(Listener::at(&long), Err(ListenError::Directory(..))));
    }

    #[test]
    fn a_directory_that_others_write_to_is_refused() {
        let directory = Directory::new("rights");
        fs::set_permissions(&directory.0, fs::Permissions::from_mode(0o777)).unwrap();
        let error = Listener::at(&directory.0.join("socket")).unwrap_err();
        assert!(matches!(error, ListenError::Unsafe(_)), "{error}");
        let missing = directory.0.join("a/b/socket");
        assert!(matches!(Listener::at(&missing), Err(ListenError::Directory(..))));
        // One that they do not write to is exchanged with all that is in it; nothing is made there.
        let within = directory.0.join("ours");
        DirBuilder::new().mode(0o755).create(&within).unwrap();
        for path in [within.join("socket"), directory.0.join("new/socket")] {
            let error = Listener::at(&path).unwrap_err();
            assert!(matches!(error, ListenError::Unsafe(_)), "{error}");
            assert!(!directory.0.join("new").exists());
        }
    }

    /// As that of a shell for administration.
    #[test]
    fn a_strict_mask_shuts_no_user_out() {
        let test = "listen::tests::a_socket_is_there_for_all_users_and_goes_with_its_listener";
        let run = std::process::Command::new("sh")
            .args(["-c", "umask 077 && exec \"$@\"", "sh"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .output()
            .unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
        assert!(String::from_utf8_lossy(&run.stdout).contains("1 passed"));
    }
}
