//! Telling the service manager that clients can come.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells the service manager that started this process that it is ready, by the socket that
/// `NOTIFY_SOCKET` names; nothing if none is named.
///
/// # Errors
///
/// The kernel's.
pub fn tell_service_manager() -> io::Result<()> {
    std::env::var_os("NOTIFY_SOCKET").map_or(Ok(()), tell)
}

#[allow(clippy::needless_pass_by_value)] // what the environment gives
fn tell(name: OsString) -> io::Result<()> {
    let name = name.as_bytes();
    let address = match name.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_hears_it() {
        let name = format!("pinfold-ready-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        tell(format!("@{name}").into()).unwrap();
        let mut heard = [0; 16];
        let length = manager.recv(&mut heard).unwrap();
        assert_eq!(&heard[..length], b"READY=1");
        assert!(tell("/not/there".into()).is_err());
    }
}
