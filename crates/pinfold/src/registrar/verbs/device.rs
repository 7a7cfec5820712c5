//! A device and its protection domain, opened by us or lent by the program.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the calls that open, ask and close. A [`Device`] and a
//! [`Domain`] hold pointers of libibverbs that stay valid as long as they live: those that they
//! opened because they close them when dropped, those that were lent because the lender promised.

#![allow(unsafe_code)]

use super::attributes::{Attributes, Operations, Transport};
use super::ffi::*;
use super::library::{Library, LibraryError};
use crate::fork_mark::{FORKED, ForkMark};
use libc::c_int;
use pinfold_kernel::Errno;
use pinfold_kernel::descriptor::{self, Identity};
use pinfold_kernel::errno::{last_errno, set_errno};
use std::ffi::CStr;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The names of this machine's RDMA devices, as the library lists them; also of those that this
/// process may not open.
///
/// # Errors
///
/// [`DeviceError::Library`], or [`DeviceError::NoDevice`] when the kernel has no verbs at all.
pub fn device_names() -> Result<Vec<String>, DeviceError> {
    let list = DeviceList::new(Library::shared()?)?;
    Ok(list.entries().map(|device| list.name(device)).collect())
}

/// The library's list, freed when dropped.
struct DeviceList {
    library: &'static Library,
    start: NonNull<*mut ibv_device>,
    length: usize,
}

impl DeviceList {
    fn new(library: &'static Library) -> Result<Self, DeviceError> {
        let mut length = 0;
        // SAFETY: there is room for the length.
        let start = unsafe { (library.get_device_list)(&raw mut length) };
        let start = NonNull::new(start).ok_or_else(|| match last_errno() {
            // No /sys/class/infiniband_verbs: the module ib_uverbs is not loaded.
            Errno(libc::ENOSYS | libc::ENOENT) => DeviceError::NoDevice,
            errno => DeviceError::os("ibv_get_device_list", errno),
        })?;
        Ok(Self { library, start, length: usize::try_from(length).unwrap_or(0) })
    }

    fn entries(&self) -> impl Iterator<Item = *mut ibv_device> {
        // SAFETY: the library made a list of that many, which lives until `drop`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }.iter().copied()
    }

    fn name(&self, device: *mut ibv_device) -> String {
        // SAFETY: the device is in the list, and its name a C string in it.
        let name = unsafe { CStr::from_ptr((self.library.get_device_name)(device)) };
        name.to_string_lossy().into_owned()
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: it is freed here only; devices that are open stay.
        unsafe { (self.library.free_device_list)(self.start.as_ptr()) }
    }
}

/// An opened device.
pub struct Device {
    library: &'static Library,
    context: NonNull<ibv_context>,
    /// Whether we opened it, and so close it.
    ours: bool,
    name: String,
    attributes: Attributes,
    /// A forked child has its parent's descriptor, and must not give back what is its parent's.
    fork_mark: ForkMark,
    /// Whether the descriptor was found closed, or its number another file's. It may be another file's at any time since: a device
    /// that was opened again has the same handles, so the next command would reach what is registered there.
    lost: AtomicBool,
    /// The file of its descriptor. `None` where that could not be asked for.
    file: Option<Identity>,
}

// SAFETY: libibverbs may be called from any thread (its manual page `ibv_open_device` and the
// kernel's locking say so for every verb used here).
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens the device called `name`, or the first one.
    ///
    /// # Errors
    ///
    /// [`DeviceError`] says what is missing: the library, a device, the right to use it.
    pub fn open(name: Option<&str>) -> Result<Arc<Self>, DeviceError> {
        let library = Library::shared()?;
        let list = DeviceList::new(library)?;
        let mut names = list.entries().map(|device| (device, list.name(device)));
        let wanted = |found: &str| name.is_none_or(|name| name == found);
        let (device, name) =
            names.find(|(_, found)| wanted(found)).ok_or_else(|| why_unlisted(name))?;
        // SAFETY: the device is in the list, which still lives.
        let opened = unsafe { (library.open_device)(device) };
        let context =
            NonNull::new(opened).ok_or_else(|| why_refused(name.clone(), last_errno()))?;
        // SAFETY: just opened, and without another owner.
        unsafe { Self::with(library, context, true, name) }.map(Arc::new)
    }

    /// The device behind a context that the program opened.
    ///
    /// # Safety
    ///
    /// `context` is an opened device of `library` and stays open as long as this lives.
    unsafe fn lent(
        library: &'static Library,
        context: NonNull<ibv_context>,
    ) -> Result<Arc<Self>, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe {
            let name = (library.get_device_name)((*context.as_ptr()).device);
            let name = CStr::from_ptr(name).to_string_lossy().into_owned();
            Self::with(library, context, false, name).map(Arc::new)
        }
    }

    /// # Safety
    ///
    /// As for [`lent`](Self::lent); if it is `ours`, no other code closes it.
    unsafe fn with(
        library: &'static Library,
        context: NonNull<ibv_context>,
        ours: bool,
        name: String,
    ) -> Result<Self, DeviceError> {
        let close_if_ours = |errno| {
            if ours {
                // SAFETY: no other code knows it.
                unsafe { (library.close_device)(context.as_ptr()) };
            }
            errno
        };
        // SAFETY: the caller's promise.
        let attributes = unsafe { library.query_device_ex(context.as_ptr()) }
            .map_err(|errno| DeviceError::os("ibv_query_device_ex", close_if_ours(Errno(errno))))?;
        let fork_mark =
            ForkMark::new(1).map_err(|errno| DeviceError::os("madvise", close_if_ours(errno)))?;
        let attributes = Attributes::of(&attributes);
        // SAFETY: the caller's promise.
        let file = descriptor::identity(unsafe { (*context.as_ptr()).cmd_fd }).ok();
        let lost = AtomicBool::new(false);
        Ok(Self { library, context, ours, name, attributes, fork_mark, lost, file })
    }

    /// The kernel's name of it: `mlx5_0`, `rxe0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it can do.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// The library's own handle, for queue pairs and completion queues.
    pub fn as_ptr(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    /// The library that it was opened with.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    pub(super) fn forked(&self) -> bool {
        self.fork_mark.forked()
    }

    /// Whether its descriptor was found closed, or its number another file's. No call of the library is made from then on.
    pub(super) fn is_lost(&self) -> bool {
        // Relaxed: no other data is published by it. A thread that opens a device because of the loss was notified of it
        // after it was noted, and each later load in that order sees it.
        self.lost.load(Ordering::Relaxed)
    }

    fn lose(&self) {
        // Relaxed: as in `is_lost`.
        self.lost.store(true, Ordering::Relaxed);
    }

    /// The error number of `call`, which asks the device, or 0. `EBADF` without a call if the descriptor was found closed, now
    /// or before; `ENODEV` if the device was taken away.
    pub(super) fn ask(&self, call: impl FnOnce() -> c_int) -> c_int {
        if !self.is_there() {
            return libc::EBADF;
        }
        self.note(Errno(call())).0
    }

    /// What `make` made, or the error number of the library; as [`ask`](Self::ask).
    pub(super) fn ask_for<T>(&self, make: impl FnOnce() -> *mut T) -> Result<NonNull<T>, Errno> {
        if !self.is_there() {
            return Err(Errno(libc::EBADF));
        }
        // A driver that makes nothing may not say why, and what stands there may be an old `EBADF`.
        set_errno(Errno(libc::EIO));
        NonNull::new(make()).ok_or_else(|| self.note(last_errno()))
    }

    /// Whether the descriptor's number still stands for the device's file. libibverbs writes its commands to that number,
    /// whatever file has it. One system call. The device's own file, opened again, is the same.
    pub(super) fn is_there(&self) -> bool {
        if self.is_lost() {
            return false;
        }
        // SAFETY: the library's structure stays as long as the device does.
        let number = unsafe { (*self.context.as_ptr()).cmd_fd };
        let is_there = self.file.is_none_or(|file| match descriptor::identity(number) {
            Ok(found) => found == file,
            // What else refuses to say, a filter of system calls or a file system, lets commands through.
            Err(Errno(errno)) => errno != libc::EBADF,
        });
        if !is_there {
            self.lose();
        }
        is_there
    }

    fn note(&self, errno: Errno) -> Errno {
        if errno.0 == libc::EBADF {
            self.lose();
        }
        self.meaning(errno)
    }

    /// `ENODEV` where the device was taken away. The kernel answers to its commands with `EIO` then, or, where it looks for an
    /// object of it, with `EINVAL` (until Linux 6.15); but a driver says `EIO` where its firmware refuses one (mlx5), and what the
    /// device has is registered then.
    pub(super) fn meaning(&self, errno: Errno) -> Errno {
        match errno.0 {
            libc::EIO | libc::EINVAL if self.was_taken_away() => Errno(libc::ENODEV),
            _ => errno,
        }
    }

    /// By the kernel's own word: a channel for completions is none of a driver's business, nor of its firmware's, and refused
    /// with `EIO` where there is no device any more. What refuses it for want of descriptors says nothing.
    fn was_taken_away(&self) -> bool {
        if !self.is_there() {
            return false;
        }
        set_errno(Errno(0));
        // SAFETY: the device is open.
        let made = unsafe { (self.library.create_comp_channel)(self.context.as_ptr()) };
        let Some(channel) = NonNull::new(made) else {
            let Errno(errno) = last_errno();
            if errno == libc::EBADF {
                self.lose();
            }
            return errno == libc::EIO;
        };
        // SAFETY: just made, and not used.
        unsafe { (self.library.destroy_comp_channel)(channel.as_ptr()) };
        false
    }
}

/// Whether the device was taken away, and with it what it had: regions, queue pairs. By what [`Device::ask`] has answered.
pub(super) const fn has_ended(errno: i32) -> bool {
    errno == libc::ENODEV
}

/// Whether the device was taken away, or its descriptor closed (`EBADF`). Behind a closed one it lives on, for as long as
/// something of it is mapped: queues, doorbells. No call reaches it, and what it had has not ended.
pub(super) const fn is_gone(errno: i32) -> bool {
    has_ended(errno) || errno == libc::EBADF
}

impl Drop for Device {
    /// Closes it if it is ours, except in a forked child, and where its descriptor was found closed: the library would close
    /// what has that number now.
    fn drop(&mut self) {
        if self.ours && !self.forked() && self.is_there() {
            // SAFETY: every domain and queue pair that we made holds a reference to this, so none
            // is left. A failure leaves nothing to do.
            unsafe { (self.library.close_device)(self.context.as_ptr()) };
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name).field("ours", &self.ours).finish()
    }
}

/// A protection domain: queue pairs use the registrations of their own domain, and no others.
#[derive(Debug)]
pub struct Domain {
    // Before the device, which must outlive it.
    pointer: NonNull<ibv_pd>,
    /// Whether we allocated it, and so give it back.
    ours: bool,
    device: Arc<Device>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Domain {}
// SAFETY: as for `Device`.
unsafe impl Sync for Domain {}

impl Domain {
    /// A new domain of `device`.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Gone`], also in a forked child, whose parent's the device is, or [`DeviceError::Os`].
    pub fn new(device: Arc<Device>) -> Result<Arc<Self>, DeviceError> {
        if device.forked() {
            return Err(DeviceError::Gone { errno: FORKED });
        }
        // SAFETY: the device is open.
        let allocated = device.ask_for(|| unsafe { (device.library.alloc_pd)(device.as_ptr()) });
        let pointer = allocated.map_err(|Errno(errno)| match errno {
            libc::ENODEV | libc::EBADF => DeviceError::Gone { errno },
            _ => DeviceError::Os { operation: "ibv_alloc_pd", errno },
        })?;
        Ok(Arc::new(Self { pointer, ours: true, device }))
    }

    /// The program's own domain `pd`, of a device that it opened with `library`. It is left alone
    /// when this is dropped, once nothing of ours is registered with it any more.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Gone`] or [`DeviceError::Os`], from asking what the device can do.
    ///
    /// # Safety
    ///
    /// `pd` is a protection domain made through `library`; it is not given back, nor its device
    /// closed, as long as this lives or anything made with it does.
    pub unsafe fn lent(
        library: &'static Library,
        pd: NonNull<ibv_pd>,
    ) -> Result<Arc<Self>, DeviceError> {
        // SAFETY: the caller's promise.
        let context = unsafe { (*pd.as_ptr()).context };
        let context = NonNull::new(context).ok_or(DeviceError::Gone { errno: libc::EBADF })?;
        // SAFETY: the caller's promise.
        let device = unsafe { Device::lent(library, context) }?;
        Ok(Arc::new(Self { pointer: pd, ours: false, device }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The library's own handle.
    pub fn as_ptr(&self) -> *mut ibv_pd {
        self.pointer.as_ptr()
    }
}

impl Drop for Domain {
    /// Gives it back if it is ours, except in a forked child, and where the device's descriptor was found closed.
    fn drop(&mut self) {
        if self.ours && !self.device.forked() {
            // SAFETY: whatever we made in it holds a reference to this, so none is left. Should the
            // program have made something in it, the kernel refuses, and it goes with the device.
            self.device.ask(|| unsafe { (self.device.library.dealloc_pd)(self.pointer.as_ptr()) });
        }
    }
}

/// Why a device could not be opened or used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no libibverbs.
    #[error("{0}")]
    Library(#[from] LibraryError),
    /// This machine shows no RDMA device.
    #[error(
        "no RDMA device: load the driver of the network card and ib_uverbs, or make a software \
         device (`modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0`); a container needs \
         the host's"
    )]
    NoDevice,
    /// It shows none of that name.
    #[error("no RDMA device is called {name}: `rdma link` lists them")]
    NoSuchDevice {
        /// The name asked for.
        name: String,
    },
    /// The device is there, its file is not: a container without it.
    #[error(
        "{name} has no file in /dev/infiniband (errno {errno}): load ib_uverbs, and give the file \
         to the container (`--device /dev/infiniband`)"
    )]
    NoDeviceFile {
        /// The device's name.
        name: String,
        /// The kernel's error number.
        errno: i32,
    },
    /// The device's file may not be opened.
    #[error(
        "{name} may not be opened (errno {errno}): look at the permissions of \
         /dev/infiniband/uverbs* (group `rdma`), and at the container's devices (`--device \
         /dev/infiniband`)"
    )]
    Forbidden {
        /// The device's name.
        name: String,
        /// The kernel's error number.
        errno: i32,
    },
    /// The device was taken away.
    #[error("the RDMA device was taken away (errno {errno}): open it again")]
    Gone {
        /// The kernel's error number.
        errno: i32,
    },
    /// The device cannot do without pinned pages what was asked for.
    #[error(
        "{name} pages on demand no {missing} over {transport}: pin the memory and watch it, or use \
         a device and kernel that do"
    )]
    OnDemand {
        /// The device's name.
        name: String,
        /// The transport asked for.
        transport: Transport,
        /// The operations that the device lacks on it.
        missing: Operations,
    },
    /// The device pages on demand, and moved other bytes than it was told to.
    #[error(
        "{name} claims to page on demand and moved the wrong bytes {what} (Soft-RoCE does, of \
         Linux 7.3 for one): pin the memory and watch it"
    )]
    WrongBytes {
        /// The device's name.
        name: String,
        /// When.
        what: &'static str,
    },
    /// Whether the device pages on demand as it should could not be tested.
    #[error("whether {name} pages on demand as it should cannot be tested: {why}")]
    Untestable {
        /// The device's name.
        name: String,
        /// What stood in the way.
        why: String,
    },
    /// Something else went wrong.
    #[error("{operation} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

impl DeviceError {
    pub(super) const fn os(operation: &'static str, Errno(errno): Errno) -> Self {
        match errno {
            libc::EIO | libc::ENODEV | libc::EBADF => Self::Gone { errno },
            _ => Self::Os { operation, errno },
        }
    }
}

/// Why the library would not open a device. It looks in several places, and tells the error of the
/// last; so the device's file is asked.
fn why_refused(name: String, last: Errno) -> DeviceError {
    let refusal = file_of(&name).and_then(|file| {
        File::options().read(true).write(true).open(file).err()?.raw_os_error().map(Errno)
    });
    refused(name, refusal.unwrap_or(last))
}

/// Why the library does not list the device called `name`, or any: it leaves out what has no file.
fn why_unlisted(name: Option<&str>) -> DeviceError {
    let known = kernel_devices().find(|(found, _)| name.is_none_or(|name| name == found));
    match (known, name) {
        (Some((name, _)), _) => DeviceError::NoDeviceFile { name, errno: libc::ENOENT },
        (None, Some(name)) => DeviceError::NoSuchDevice { name: name.to_owned() },
        (None, None) => DeviceError::NoDevice,
    }
}

/// The file of the device called `name`: the kernel counts them in an order of its own.
fn file_of(name: &str) -> Option<PathBuf> {
    kernel_devices().find(|(found, _)| found == name).map(|(_, file)| file)
}

/// The devices that the kernel knows, and where their files should be.
fn kernel_devices() -> impl Iterator<Item = (String, PathBuf)> {
    let classes = fs::read_dir("/sys/class/infiniband_verbs").into_iter().flatten();
    classes.filter_map(Result::ok).filter_map(|class| {
        let name = fs::read_to_string(class.path().join("ibdev")).ok()?;
        Some((name.trim().to_owned(), Path::new("/dev/infiniband").join(class.file_name())))
    })
}

fn refused(name: String, Errno(errno): Errno) -> DeviceError {
    match errno {
        libc::EACCES | libc::EPERM => DeviceError::Forbidden { name, errno },
        libc::ENOENT | libc::ENXIO => DeviceError::NoDeviceFile { name, errno },
        _ => DeviceError::os("ibv_open_device", Errno(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_names_its_way_out() {
        let name = || String::from("rxe0");
        let forbidden = refused(name(), Errno(libc::EACCES));
        assert_eq!(forbidden, DeviceError::Forbidden { name: name(), errno: libc::EACCES });
        assert!(forbidden.to_string().contains("--device /dev/infiniband"));
        let no_file = refused(name(), Errno(libc::ENOENT));
        assert!(no_file.to_string().contains("load ib_uverbs"));
        assert_eq!(refused(name(), Errno(libc::EIO)), DeviceError::Gone { errno: libc::EIO });
        assert!(DeviceError::NoDevice.to_string().contains("rdma link add"));
        assert!(DeviceError::from(LibraryError::Absent).to_string().contains("install"));
    }

    #[test]
    fn a_device_that_is_not_there_is_not_opened() {
        match Device::open(Some("no such device")) {
            Err(DeviceError::NoSuchDevice { name }) => assert_eq!(name, "no such device"),
            Err(DeviceError::Library(_) | DeviceError::NoDevice) => {}
            other => panic!("{other:?}"),
        }
    }
}
