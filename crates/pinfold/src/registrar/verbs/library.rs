//! libibverbs itself: found at run time, called through here.
//!
//! Nothing is linked: a program that uses Pinfold runs on machines without RDMA, where
//! [`Library::shared`] says what to install.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to load a library, to take its symbols for what their names say,
//! and to follow the header's inline functions, which look into an opened device. The library is
//! never unloaded, so its functions live as long as the process.

#![allow(unsafe_code)]

use super::ffi::*;
use libc::{c_char, c_int, c_uint, c_void, size_t};
use pinfold_kernel::FirstMade;
use std::ffi::CStr;
use std::mem::{self, MaybeUninit};
use std::ptr::{self, NonNull};

/// Declares [`Library`]: one field for each function, how it is found, and whether it must be.
macro_rules! library {
    (
        required { $($need:ident: $need_name:literal, $need_version:literal, fn($($need_type:ty),*) $(-> $need_result:ty)?;)* }
        optional { $($may:ident: $may_name:literal, $may_version:literal, fn($($may_type:ty),*) $(-> $may_result:ty)?;)* }
    ) => {
        /// The functions of a libibverbs, under their names without `ibv_`; those that older
        /// versions lack may be absent.
        ///
        /// Each is as the manual page of its name says; calling one is unsafe as calling C is.
        #[derive(Clone, Copy, Debug)]
        #[non_exhaustive]
        #[allow(missing_docs)]
        pub struct Library {
            $(pub $need: unsafe extern "C" fn($($need_type),*) $(-> $need_result)?,)*
            $(pub $may: Option<unsafe extern "C" fn($($may_type),*) $(-> $may_result)?>,)*
        }

        impl Library {
            /// The library whose symbols `find` knows: called with the name and the version of
            /// each, it gives the function's address, or nothing.
            ///
            /// The version is the one that every libibverbs since 2007 has as its default, or the
            /// one that the function came with; a `find` by name alone will do.
            ///
            /// # Errors
            ///
            /// [`LibraryError::Symbol`]: a function is missing that must be there.
            ///
            /// # Safety
            ///
            /// What `find` gives for a name is libibverbs' function of that name, and stays.
            pub unsafe fn from_symbols(
                mut find: impl FnMut(&CStr, &CStr) -> Option<NonNull<c_void>>,
            ) -> Result<Self, LibraryError> {
                Ok(Self {
                    $($need: {
                        let found = find($need_name, $need_version)
                            .ok_or(LibraryError::Symbol { name: $need_name })?;
                        // SAFETY: the caller's word, and the declaration above is the header's.
                        unsafe {
                            mem::transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($need_type),*) $(-> $need_result)?,
                            >(found)
                        }
                    },)*
                    $($may: find($may_name, $may_version).map(|found| {
                        // SAFETY: as above.
                        unsafe {
                            mem::transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($may_type),*) $(-> $may_result)?,
                            >(found)
                        }
                    }),)*
                })
            }
        }
    };
}

library! {
    required {
        get_device_list: c"ibv_get_device_list", c"IBVERBS_1.1", fn(*mut c_int) -> *mut *mut ibv_device;
        free_device_list: c"ibv_free_device_list", c"IBVERBS_1.1", fn(*mut *mut ibv_device);
        get_device_name: c"ibv_get_device_name", c"IBVERBS_1.1", fn(*mut ibv_device) -> *const c_char;
        open_device: c"ibv_open_device", c"IBVERBS_1.1", fn(*mut ibv_device) -> *mut ibv_context;
        close_device: c"ibv_close_device", c"IBVERBS_1.1", fn(*mut ibv_context) -> c_int;
        query_device: c"ibv_query_device", c"IBVERBS_1.1", fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        query_port: c"ibv_query_port", c"IBVERBS_1.1", fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        query_gid: c"ibv_query_gid", c"IBVERBS_1.1", fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        alloc_pd: c"ibv_alloc_pd", c"IBVERBS_1.1", fn(*mut ibv_context) -> *mut ibv_pd;
        dealloc_pd: c"ibv_dealloc_pd", c"IBVERBS_1.1", fn(*mut ibv_pd) -> c_int;
        reg_mr: c"ibv_reg_mr", c"IBVERBS_1.1", fn(*mut ibv_pd, *mut c_void, size_t, c_int) -> *mut ibv_mr;
        dereg_mr: c"ibv_dereg_mr", c"IBVERBS_1.1", fn(*mut ibv_mr) -> c_int;
        create_cq: c"ibv_create_cq", c"IBVERBS_1.1", fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        destroy_cq: c"ibv_destroy_cq", c"IBVERBS_1.1", fn(*mut ibv_cq) -> c_int;
        create_comp_channel: c"ibv_create_comp_channel", c"IBVERBS_1.0", fn(*mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel: c"ibv_destroy_comp_channel", c"IBVERBS_1.0", fn(*mut ibv_comp_channel) -> c_int;
        get_cq_event: c"ibv_get_cq_event", c"IBVERBS_1.1", fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events: c"ibv_ack_cq_events", c"IBVERBS_1.1", fn(*mut ibv_cq, c_uint);
        create_qp: c"ibv_create_qp", c"IBVERBS_1.1", fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp: c"ibv_modify_qp", c"IBVERBS_1.1", fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        query_qp: c"ibv_query_qp", c"IBVERBS_1.1", fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        destroy_qp: c"ibv_destroy_qp", c"IBVERBS_1.1", fn(*mut ibv_qp) -> c_int;
        wc_status_str: c"ibv_wc_status_str", c"IBVERBS_1.1", fn(c_uint) -> *const c_char;
    }
    optional {
        rereg_mr: c"ibv_rereg_mr", c"IBVERBS_1.1", fn(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, size_t, c_int) -> c_int;
        reg_mr_iova: c"ibv_reg_mr_iova", c"IBVERBS_1.7", fn(*mut ibv_pd, *mut c_void, size_t, u64, c_int) -> *mut ibv_mr;
        reg_mr_iova2: c"ibv_reg_mr_iova2", c"IBVERBS_1.8", fn(*mut ibv_pd, *mut c_void, size_t, u64, c_uint) -> *mut ibv_mr;
        reg_dmabuf_mr: c"ibv_reg_dmabuf_mr", c"IBVERBS_1.12", fn(*mut ibv_pd, u64, size_t, u64, c_int, c_int) -> *mut ibv_mr;
        is_fork_initialized: c"ibv_is_fork_initialized", c"IBVERBS_1.13", fn() -> c_uint;
    }
}

/// The version 1 ABI, which every libibverbs since 2005 has had.
const FILE_NAME: &CStr = c"libibverbs.so.1";

impl Library {
    /// This machine's libibverbs, loaded at the first call and kept.
    ///
    /// # Errors
    ///
    /// [`LibraryError`] says what to install.
    pub fn shared() -> Result<&'static Self, LibraryError> {
        static LOADED: FirstMade<Result<Library, LibraryError>> = FirstMade::new();
        LOADED.get_or_make(|| Box::new(Self::load())).as_ref().map_err(|error| *error)
    }

    fn load() -> Result<Self, LibraryError> {
        // SAFETY: the name is a C string. Loading runs the library's initialisers, as it does in
        // every program that links it.
        let handle = unsafe { libc::dlopen(FILE_NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(LibraryError::Absent);
        }
        // By name alone: that is the default version, of the 1.1 ABI in every library that has it.
        let find = |name: &CStr, _: &CStr| {
            // SAFETY: `handle` is an open library's and is never closed.
            NonNull::new(unsafe { libc::dlsym(handle, name.as_ptr()) })
        };
        // SAFETY: the symbols are those of libibverbs, which is never unloaded.
        unsafe { Self::from_symbols(find) }
    }

    /// `ibv_reg_mr` as the header's macro has it: what a device may ignore goes through
    /// `ibv_reg_mr_iova2`, which knows whether the kernel does; a library without that function
    /// knows no such flags either, and they are left out.
    ///
    /// # Safety
    ///
    /// As for `ibv_reg_mr`: `pd` is live, and the device may use the memory as `access` says.
    pub unsafe fn register(
        &self,
        pd: *mut ibv_pd,
        address: *mut c_void,
        length: size_t,
        access: c_uint,
    ) -> *mut ibv_mr {
        let demanded = access & !IBV_ACCESS_OPTIONAL_RANGE;
        // SAFETY: the caller's promise.
        unsafe {
            match self.reg_mr_iova2 {
                Some(register) if access != demanded => {
                    register(pd, address, length, address.addr() as u64, access)
                }
                // Lossless: the flags demanded end below bit 20.
                _ => (self.reg_mr)(pd, address, length, demanded.cast_signed()),
            }
        }
    }

    /// `ibv_query_device_ex`, an inline function of the header: what the device can do. Fields that
    /// the device, the kernel or the library does not know are zero. An error number otherwise.
    ///
    /// # Safety
    ///
    /// `context` is an opened device of this library.
    pub unsafe fn query_device_ex(
        &self,
        context: *mut ibv_context,
    ) -> Result<ibv_device_attr_ex, c_int> {
        let mut attributes = MaybeUninit::<ibv_device_attr_ex>::zeroed();
        // SAFETY: the caller's promise; there is room for as much as is said.
        let status = unsafe {
            extended_operation(context, mem::offset_of!(verbs_context, query_device_ex))
                .and_then(|extended| (*extended.as_ptr()).query_device_ex)
                .map_or(libc::EOPNOTSUPP, |query| {
                    let size = size_of::<ibv_device_attr_ex>();
                    query(context, ptr::null(), attributes.as_mut_ptr(), size)
                })
        };
        // SAFETY: it was all zero, which is valid; whatever was written since is numbers.
        let mut attributes = unsafe { attributes.assume_init() };
        match status {
            0 => Ok(attributes),
            libc::EOPNOTSUPP | libc::ENOSYS => {
                // SAFETY: the caller's promise; the plain attributes are the extended ones' first.
                match unsafe { (self.query_device)(context, &raw mut attributes.orig_attr) } {
                    0 => Ok(attributes),
                    errno => Err(errno),
                }
            }
            errno => Err(errno),
        }
    }

    /// `ibv_query_port`, an inline function of the header. An error number if it fails.
    ///
    /// # Safety
    ///
    /// `context` is an opened device of this library.
    pub unsafe fn query_port(
        &self,
        context: *mut ibv_context,
        port: u8,
    ) -> Result<ibv_port_attr, c_int> {
        let mut attributes = MaybeUninit::<ibv_port_attr>::zeroed();
        // SAFETY: the caller's promise; there is room for as much as is said, and the function of
        // the old ABI fills less.
        let status = unsafe {
            let extended = extended_operation(context, mem::offset_of!(verbs_context, query_port))
                .and_then(|extended| (*extended.as_ptr()).query_port);
            match extended {
                Some(query) => {
                    query(context, port, attributes.as_mut_ptr(), size_of::<ibv_port_attr>())
                }
                None => (self.query_port)(context, port, attributes.as_mut_ptr()),
            }
        };
        // SAFETY: it was all zero, which is valid; whatever was written since is numbers.
        if status == 0 { Ok(unsafe { attributes.assume_init() }) } else { Err(status) }
    }

    /// `ibv_advise_mr`, an inline function of the header; `EOPNOTSUPP` where there is none.
    ///
    /// # Safety
    ///
    /// `pd` is a protection domain of this library.
    pub unsafe fn advise_mr(
        &self,
        pd: *mut ibv_pd,
        advice: c_uint,
        flags: u32,
        pieces: &mut [ibv_sge],
    ) -> c_int {
        let count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        // SAFETY: the caller's promise; the pieces are as many as is said.
        unsafe {
            extended_operation((*pd).context, mem::offset_of!(verbs_context, advise_mr))
                .and_then(|extended| (*extended.as_ptr()).advise_mr)
                .map_or(libc::EOPNOTSUPP, |advise| {
                    advise(pd, advice, flags, pieces.as_mut_ptr(), count)
                })
        }
    }
}

/// The extended part of `context`, if it has one that reaches as far forward as the operation at
/// `offset` (`verbs_get_ctx_op` of the header).
///
/// # Safety
///
/// `context` is an opened device of libibverbs.
unsafe fn extended_operation(
    context: *mut ibv_context,
    offset: usize,
) -> Option<NonNull<verbs_context>> {
    // SAFETY: the mark says that the context lies at the end of a structure which has `sz` right
    // before it, and `sz` says how much of the rest is there.
    unsafe {
        if (*context).abi_compat.addr() != ABI_IS_EXTENDED {
            return None;
        }
        let whole = context.byte_sub(mem::offset_of!(verbs_context, context));
        let whole = whole.cast::<verbs_context>();
        let reaches = (&raw const (*whole).sz).read() >= size_of::<verbs_context>() - offset;
        if reaches { NonNull::new(whole) } else { None }
    }
}

/// Why there is no libibverbs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// No such library is installed where the dynamic linker looks.
    #[error(
        "no libibverbs.so.1: install rdma-core's library (Debian and Ubuntu: libibverbs1 and \
         ibverbs-providers; Fedora and RHEL: libibverbs), in the container too"
    )]
    Absent,
    /// The library lacks a function that every version since 1.1 has.
    #[error(
        "libibverbs.so.1 has no function {}: it is older than 1.1 or not rdma-core's; install the \
         distribution's own",
        .name.to_string_lossy()
    )]
    Symbol {
        /// The function's name.
        name: &'static CStr,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_function_is_named() {
        // SAFETY: nothing is found, so nothing is taken for a function.
        let error = unsafe { Library::from_symbols(|_, _| None) }.unwrap_err();
        assert_eq!(error, LibraryError::Symbol { name: c"ibv_get_device_list" });
        assert!(error.to_string().contains("ibv_get_device_list"));
    }

    #[test]
    fn the_library_is_loaded_or_advice_given() {
        match Library::shared() {
            Ok(library) => {
                // SAFETY: asks for the text of a number.
                let text = unsafe { CStr::from_ptr((library.wc_status_str)(IBV_WC_SUCCESS)) };
                assert_eq!(text, c"success");
            }
            Err(error) => {
                eprintln!("skipped: {error}");
                assert!(error.to_string().contains("install"));
            }
        }
    }
}
