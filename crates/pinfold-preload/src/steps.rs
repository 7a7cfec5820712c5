//! A deregistration in two steps: a thread of ours has the kernel end it, and a thread of the program has
//! libibverbs release what it has of it.
//!
//! libibverbs ends a registration by one `ioctl` and then frees a structure. A thread that frees memory has the
//! C library set 64 MiB of addresses aside for it, so libibverbs never runs on a thread of ours. In the first step
//! that thread makes the `ioctl` itself. In the second libibverbs runs on a thread of the program, and the hook on
//! `ioctl` answers this one call for the kernel: that it is done.
//!
//! The request names the device's driver by a number that libibverbs has and does not tell. The hook reads it from a
//! request by which libibverbs registers memory or deregisters it. No other will do: what libibverbs deregisters by
//! `write` the hook does not answer for the kernel, so the second step would end whatever has the number by then; and from
//! rdma-core 18 to 21 it deregisters by `write`, and makes completion queues by `ioctl`. It registers by `ioctl` from 22
//! on, with which it deregisters by `ioctl`, too. Where no such request was seen, because libibverbs' calls do not reach
//! the hook or it or its kernel has these by `write` only, and where the kernel refuses the first step, the second is all
//! of it.
//!
//! The hook also counts registrations that the kernel made while no call of this library asked libibverbs for one:
//! those of a libibverbs that is linked statically, or whose functions were taken from a private handle.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to make the request, and to read those that libibverbs makes.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // what has 32 bits in a word of 64

use crate::device::LentDevice;
use libc::c_int;
use pinfold::registrar::verbs::ffi::ibv_mr;
use pinfold_kernel::errno::{last_errno, set_errno};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use pinfold_kernel::raw::system_call;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// `struct ib_uverbs_ioctl_hdr` of `rdma/rdma_user_ioctl_cmds.h`, and its first attribute.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    length: u16,
    object: u16,
    method: u16,
    attributes: u16,
    reserved_1: u64,
    driver: u32,
    reserved_2: u32,
    attribute: u16,
    attribute_length: u16,
    flags: u16,
    reserved_3: u16,
    data: u64,
}

/// `RDMA_VERBS_IOCTL` of the same file.
pub(crate) const VERBS: u32 = 0xc018_1b01;
/// `UVERBS_OBJECT_MR`, its `UVERBS_METHOD_MR_DESTROY`, and that one's `UVERBS_ATTR_DESTROY_MR_HANDLE`
/// (`rdma/ib_user_ioctl_cmds.h`).
const REGION: u16 = 7;
const DESTROY: u16 = 1;
const HANDLE: u16 = 0;
/// `UVERBS_ATTR_F_MANDATORY`.
const MANDATORY: u16 = 1;

impl Request {
    fn deregistration(driver: u32, handle: u32) -> Self {
        Self {
            length: size_of::<Self>() as u16,
            object: REGION,
            method: DESTROY,
            attributes: 1,
            reserved_1: 0,
            driver,
            reserved_2: 0,
            attribute: HANDLE,
            attribute_length: 0,
            flags: MANDATORY,
            reserved_3: 0,
            data: handle.into(),
        }
    }

    /// Which handle what stands at `address` deregisters, if it does.
    ///
    /// # Safety
    ///
    /// A request is there, as long as it says.
    unsafe fn deregisters(address: *const Self) -> Option<u64> {
        // SAFETY: the caller's promise: the first fields are there, and the others if the length says so.
        unsafe {
            let deregisters = usize::from((*address).length) >= size_of::<Self>()
                && ((*address).object, (*address).method) == (REGION, DESTROY)
                && ((*address).attributes, (*address).attribute) == (1, HANDLE);
            deregisters.then(|| (*address).data)
        }
    }
}

/// Requests that register memory: `UVERBS_OBJECT_DEVICE` with `UVERBS_METHOD_INVOKE_WRITE`, of which the attribute
/// `UVERBS_ATTR_WRITE_CMD` says `IB_USER_VERBS_CMD_REG_MR`; and `UVERBS_METHOD_REG_MR` of `UVERBS_OBJECT_MR`.
const DEVICE: u16 = 0;
const INVOKE_WRITE: u16 = 0;
const WRITE_COMMAND: u16 = 2;
const REGISTER_COMMAND: u64 = 9;
const REGISTER: u16 = 5;

/// The attributes behind the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Attribute {
    name: u16,
    length: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

/// What comes before the attributes.
const HEADER: usize = 24;

impl Request {
    /// Whether what stands at `address` registers memory.
    ///
    /// # Safety
    ///
    /// The kernel has just taken it.
    unsafe fn registers(address: *const Self) -> bool {
        // SAFETY: the caller's promise: the header is there, and as many attributes as it says.
        unsafe {
            match ((*address).object, (*address).method) {
                (REGION, REGISTER) => true,
                (DEVICE, INVOKE_WRITE) => {
                    let first = address.byte_add(HEADER).cast::<Attribute>();
                    (0..usize::from((*address).attributes)).any(|number| {
                        let attribute = first.add(number).read_unaligned();
                        (attribute.name, attribute.data) == (WRITE_COMMAND, REGISTER_COMMAND)
                    })
                }
                _ => false,
            }
        }
    }
}

/// Registrations that no call of this library asked for.
static BYPASSED: AtomicU64 = AtomicU64::new(0);

/// How many registrations were made past this library, as far as the hook on `ioctl` sees. Forked children begin with
/// their parent's.
pub(crate) fn bypassed() -> u64 {
    // Relaxed: a count.
    BYPASSED.load(Ordering::Relaxed)
}

/// Has libibverbs register, by a call that came to this library.
pub(crate) fn through_us<T>(register: impl FnOnce() -> T) -> T {
    let before = STEP.replace(Step::Registering);
    let made = register();
    STEP.set(before);
    made
}

/// Whether the calling thread is in a registration that came to this library: what comes from within is libibverbs' own,
/// or that of a library before it.
pub(crate) fn is_registering() -> bool {
    STEP.get() == Step::Registering
}

/// Whether the calling thread is in a call of libibverbs that this library makes.
pub(crate) fn is_under_way() -> bool {
    STEP.get() != Step::None
}

/// The drivers of open devices, each in the slot of its descriptor: the descriptor and one, then the driver.
///
/// A device that is closed without `ibv_close_device` leaves its entry, and the next with that number may have another
/// driver: then the kernel refuses the request, and the entry goes.
static DRIVERS: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn slot_of(device: c_int) -> (&'static AtomicU64, u64) {
    let number = device.cast_unsigned();
    (&DRIVERS[number as usize % DRIVERS.len()], u64::from(number) + 1)
}

/// `None` if no request to that device was seen.
fn driver_of(device: c_int) -> Option<u32> {
    let (slot, name) = slot_of(device);
    // Relaxed, here and below: all is in the word.
    let word = slot.load(Ordering::Relaxed);
    (word >> 32 == name).then_some(word as u32)
}

/// The program closes the device. The next with its number may be one of another libibverbs, which deregisters by
/// `write`.
pub(crate) fn forget_driver(device: c_int) {
    if driver_of(device).is_some() {
        slot_of(device).0.store(0, Ordering::Relaxed);
    }
}

/// What becomes of the calling thread's deregistrations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// They are made.
    None,
    /// They are made, and so are registrations that came to this library.
    Registering,
    /// That of this handle is answered with success, and not made.
    Answered(u32),
}

thread_local! {
    /// No destructor and a constant: reading it allocates nothing. Of the program's threads only.
    static STEP: Cell<Step> = const { Cell::new(Step::None) };
}

/// What the first step did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// The kernel has ended it, and libibverbs has its structure still: [`in_library`] is to follow.
    InKernel,
    /// Nothing: libibverbs is to end it.
    Not,
}

/// The first step. Leaves the error number as it was.
///
/// # Safety
///
/// `mr` is a region of this device of which no other thread ends anything.
pub(crate) unsafe fn in_kernel(device: &LentDevice, mr: NonNull<ibv_mr>) -> Ended {
    let errno = last_errno();
    // SAFETY: the caller's promise.
    let handle = unsafe { (*mr.as_ptr()).handle };
    let ended = end(device.named, handle, |number, request| {
        // SAFETY: the request is whole, and the region in no use.
        unsafe { ioctl(device.number, number, request) }
    });
    set_errno(errno);
    ended
}

/// Whether the kernel did it. By the instruction: the hook is for calls of the program's threads, and by the program's
/// numbers.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe fn ioctl(device: c_int, number: u32, request: *mut Request) -> bool {
    let arguments = [device as usize, number as usize, request.expose_provenance(), 0, 0];
    // SAFETY: the caller's promise.
    !unsafe { system_call(libc::SYS_ioctl, arguments) }.has_failed()
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn ioctl(device: c_int, number: u32, request: *mut Request) -> bool {
    // SAFETY: the caller's promise.
    unsafe { libc::ioctl(device, number.into(), request) == 0 }
}

/// By `ioctl`, which makes the call. `device` is the program's number of it.
fn end(device: c_int, handle: u32, ioctl: impl FnOnce(u32, *mut Request) -> bool) -> Ended {
    let Some(driver) = driver_of(device) else { return Ended::Not };
    let mut request = Request::deregistration(driver, handle);
    if ioctl(VERBS, &raw mut request) {
        return Ended::InKernel;
    }
    slot_of(device).0.store(0, Ordering::Relaxed);
    Ended::Not
}

/// The second step, of what [`in_kernel`] ended in the kernel alone. `dereg` is libibverbs' deregistration.
pub(crate) fn in_library(handle: u32, dereg: impl FnOnce() -> bool) {
    STEP.set(Step::Answered(handle));
    dereg();
    STEP.set(Step::None);
}

/// The answer to an `ioctl` of verbs, as the kernel gives it; `call` makes it.
///
/// # Safety
///
/// As the call demands: `request` is what it has as its argument.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) unsafe fn answer(
    device: c_int,
    request: *const Request,
    call: impl FnOnce() -> isize,
) -> isize {
    if let Step::Answered(handle) = STEP.get()
        // SAFETY: in that step libibverbs alone makes requests on this thread, and its own are readable.
        && unsafe { Request::deregisters(request) } == Some(handle.into())
    {
        STEP.set(Step::None);
        return 0;
    }
    let answer = call();
    if answer < 0 {
        return answer;
    }
    // SAFETY: the kernel has just taken it.
    let (registers, deregisters) =
        unsafe { (Request::registers(request), Request::deregisters(request).is_some()) };
    if registers && STEP.get() != Step::Registering {
        // Relaxed: a count.
        BYPASSED.fetch_add(1, Ordering::Relaxed);
    }
    if (registers || deregisters) && driver_of(device).is_none() {
        let (slot, name) = slot_of(device);
        // SAFETY: the kernel has just read it.
        let driver = unsafe { (&raw const (*request).driver).read_unaligned() };
        slot.store(name << 32 | u64::from(driver), Ordering::Relaxed);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const DRIVER: u32 = 14;

    /// A library that asks something else first, and frees its structure when the kernel has ended the registration.
    struct Library {
        device: c_int,
        handle: u32,
        /// What reached the kernel: object, method and handle.
        asked: RefCell<Vec<(u16, u16, u64)>>,
        is_freed: Cell<bool>,
    }

    impl Library {
        fn new(device: c_int) -> Self {
            Self { device, handle: 77, asked: RefCell::new(Vec::new()), is_freed: Cell::new(false) }
        }

        fn asks(&self, request: Request) -> bool {
            let call = || {
                self.asked.borrow_mut().push((request.object, request.method, request.data));
                0
            };
            // SAFETY: the request is there.
            unsafe { answer(self.device, &raw const request, call) >= 0 }
        }

        fn dereg(&self) -> bool {
            let request = Request::deregistration(DRIVER, self.handle);
            let others = [
                Request { method: 3, ..request },
                Request { object: 8, ..request },
                Request { data: 78, ..request },
            ];
            assert!(others.map(|other| self.asks(other)) == [true; 3]);
            self.is_freed.set(self.asks(request));
            self.is_freed.get()
        }
    }

    #[test]
    fn the_structures_are_the_kernel_s() {
        assert_eq!((std::mem::offset_of!(Request, attribute), size_of::<Request>()), (24, 40));
    }

    #[test]
    fn the_kernel_is_asked_once_and_the_structure_freed_by_the_second_step() {
        let library = Library::new(901);
        assert!(library.dereg());
        library.asked.borrow_mut().clear();
        library.is_freed.set(false);
        let ended = end(901, 77, |number, request| {
            // SAFETY: it is there.
            let request = unsafe { *request };
            assert_eq!((number, request.driver), (VERBS, DRIVER));
            request.data == 77 && (request.object, request.method) == (REGION, DESTROY)
        });
        assert_eq!(ended, Ended::InKernel);
        in_library(77, || library.dereg());
        assert!(library.is_freed.get());
        let others = [(REGION, 3, 77), (8, DESTROY, 77), (REGION, DESTROY, 78)];
        assert_eq!(*library.asked.borrow(), others, "only that one is answered for the kernel");
        assert!(library.dereg());
        assert_eq!(library.asked.borrow().last(), Some(&(REGION, DESTROY, 77)), "and made again");
    }

    /// Its header, and attributes as libibverbs fills them.
    #[repr(C)]
    struct Long {
        header: [u8; HEADER],
        attributes: [Attribute; 3],
    }

    fn written(command: u64) -> Long {
        let mut header = [0; HEADER];
        header[0] = size_of::<Long>() as u8;
        header[6] = 3;
        let attribute = |name, data| Attribute { name, length: 8, flags: 1, reserved: 0, data };
        let attributes = [attribute(0, 9), attribute(1, 0), attribute(WRITE_COMMAND, command)];
        Long { header, attributes }
    }

    #[test]
    fn a_registration_that_did_not_come_through_here_is_counted() {
        let took = |request: *const Request| {
            let before = bypassed();
            // SAFETY: the request is there.
            assert_eq!(unsafe { answer(904, request, || 0) }, 0);
            bypassed() - before
        };
        let (registers, others) = (written(9), written(3));
        let asked = |long: &Long| took((&raw const *long).cast());
        assert_eq!((asked(&registers), asked(&others)), (1, 0));
        assert_eq!(through_us(|| asked(&registers)), 0);
        assert_eq!(asked(&registers), 1);
        let request = Request { method: REGISTER, ..Request::deregistration(DRIVER, 1) };
        assert_eq!(took(&raw const request), 1);
        let refused = bypassed();
        // SAFETY: the request is there.
        assert_eq!(unsafe { answer(904, (&raw const registers).cast(), || -12) }, -12);
        assert_eq!(bypassed(), refused);
    }

    #[test]
    fn a_device_that_nothing_was_asked_of_is_left_to_libibverbs() {
        assert_eq!(end(902, 1, |_, _| panic!("a call too many")), Ended::Not);
    }

    /// From rdma-core 18 to 21 it makes completion queues and registers a device's own memory by `ioctl`, and ends
    /// registrations by `write`, which no hook answers.
    #[test]
    fn a_library_that_may_deregister_by_write_is_left_to_itself() {
        let library = Library::new(905);
        assert!(library.asks(Request {
            object: 3,
            method: 0,
            ..Request::deregistration(DRIVER, 0)
        }));
        assert!(library.asks(Request { method: 0, ..Request::deregistration(DRIVER, 0) }));
        assert_eq!(end(905, 1, |_, _| panic!("a call too many")), Ended::Not);
        let refused = Request::deregistration(DRIVER, 1);
        // SAFETY: the request is there.
        assert_eq!(unsafe { answer(905, &raw const refused, || -2) }, -2);
        assert_eq!(end(905, 1, |_, _| panic!("a call too many")), Ended::Not);
        assert!(library.dereg());
        assert_eq!(end(905, 1, |_, _| true), Ended::InKernel);
    }

    /// As libibverbs registers from rdma-core 22 on: it deregisters by `ioctl` then.
    #[test]
    fn the_driver_is_learnt_from_a_registration_by_ioctl() {
        let (registers, others) = (written(9), written(3));
        for (request, ended) in [(&others, Ended::Not), (&registers, Ended::InKernel)] {
            // SAFETY: the request is there.
            assert_eq!(unsafe { answer(906, (&raw const *request).cast(), || 0) }, 0);
            assert_eq!(end(906, 1, |_, _| true), ended);
        }
    }

    /// The device's number may be that of one that another libibverbs opens.
    #[test]
    fn the_driver_of_a_device_that_is_closed_is_learnt_anew() {
        let library = Library::new(907);
        assert!(library.dereg());
        forget_driver(907 + 64);
        assert_eq!(end(907, 1, |_, _| true), Ended::InKernel);
        forget_driver(907);
        assert_eq!(end(907, 1, |_, _| panic!("a call too many")), Ended::Not);
    }

    /// Another device may have got the descriptor's number.
    #[test]
    fn what_the_kernel_refuses_is_left_to_libibverbs_and_the_driver_learnt_anew() {
        let library = Library::new(903);
        assert!(library.dereg());
        assert_eq!(end(903, 1, |_, _| false), Ended::Not);
        assert_eq!(end(903, 1, |_, _| panic!("a call too many")), Ended::Not);
        assert!(library.dereg());
        assert_eq!(end(903, 1, |_, _| true), Ended::InKernel);
    }
}
