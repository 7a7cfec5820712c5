//! The allocators' own functions, as the dynamic linker finds them.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call what symbols name. A symbol is taken for what
//! its name says: `mallctl` is jemalloc's, `mi_*` are mimalloc's, and `mallopt` is the C library's.

#![allow(unsafe_code)]

use libc::{c_char, c_int, c_long, c_void, size_t};
use pinfold_kernel::symbols::{Symbol, symbol};
use std::ffi::CString;
use std::mem::{size_of, transmute};
use std::ptr::{self, NonNull};

/// jemalloc's `mallctl`.
pub type MallCtl = unsafe extern "C" fn(
    name: *const c_char,
    old: *mut c_void,
    old_length: *mut size_t,
    new: *mut c_void,
    new_length: size_t,
) -> c_int;

/// mimalloc's `mi_option_get`.
pub type MiOptionGet = unsafe extern "C" fn(option: c_int) -> c_long;

/// mimalloc's `mi_option_set`.
pub type MiOptionSet = unsafe extern "C" fn(option: c_int, value: c_long);

type Mallopt = unsafe extern "C" fn(c_int, c_int) -> c_int;
type MallocTrim = unsafe extern "C" fn(size_t) -> c_int;
type MiVersion = unsafe extern "C" fn() -> c_int;

/// Whether `malloc` is in the same object.
fn serves_malloc(own: Symbol) -> bool {
    symbol(c"malloc").is_some_and(|malloc| malloc.object == own.object)
}

/// The C library's allocator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Glibc {
    mallopt: Mallopt,
    trim: MallocTrim,
}

impl Glibc {
    /// The C library's, if it is behind `malloc`: otherwise it is not used.
    pub(super) fn find() -> Option<Self> {
        // Only the GNU C library says this.
        let own = symbol(c"gnu_get_libc_version").filter(|&own| serves_malloc(own))?;
        let function = |name| symbol(name).filter(|symbol| symbol.object == own.object);
        let (mallopt, trim) = (function(c"mallopt")?.address, function(c"malloc_trim")?.address);
        // SAFETY: they are the C library's functions of these names.
        unsafe {
            Some(Self {
                mallopt: transmute::<NonNull<c_void>, Mallopt>(mallopt),
                trim: transmute::<NonNull<c_void>, MallocTrim>(trim),
            })
        }
    }

    /// False if it refuses.
    pub(super) fn set(self, parameter: c_int, value: c_int) -> bool {
        // SAFETY: mallopt takes any numbers.
        unsafe { (self.mallopt)(parameter, value) == 1 }
    }

    pub(super) fn give_back(self) {
        // SAFETY: malloc_trim may be called at any time.
        unsafe { (self.trim)(0) };
    }
}

/// jemalloc.
#[derive(Clone, Copy, Debug)]
pub(super) struct Jemalloc {
    mallctl: MallCtl,
}

impl Jemalloc {
    pub(super) fn find() -> Option<(Self, bool)> {
        let own = symbol(c"mallctl").or_else(|| symbol(c"_rjem_mallctl"))?;
        // SAFETY: the function of this name.
        let mallctl = unsafe { transmute::<NonNull<c_void>, MallCtl>(own.address) };
        Some((Self { mallctl }, serves_malloc(own)))
    }

    /// Reads the setting `name`, whose type is `T` in jemalloc's manual: a plain number.
    ///
    /// # Errors
    ///
    /// jemalloc's error number.
    pub(super) fn get<T: Copy + Default>(self, name: &str) -> Result<T, c_int> {
        let name = CString::new(name).map_err(|_| libc::EINVAL)?;
        let (mut value, mut length) = (T::default(), size_of::<T>());
        let old = ptr::from_mut(&mut value).cast();
        // SAFETY: the value has room for its own length, which jemalloc compares with the
        // setting's; nothing is written.
        match unsafe { (self.mallctl)(name.as_ptr(), old, &raw mut length, ptr::null_mut(), 0) } {
            0 => Ok(value),
            errno => Err(errno),
        }
    }

    /// Writes the setting `name`, whose type is `ssize_t`.
    ///
    /// # Errors
    ///
    /// jemalloc's error number.
    pub(super) fn set(self, name: &str, value: isize) -> Result<(), c_int> {
        let name = CString::new(name).map_err(|_| libc::EINVAL)?;
        let mut value = value;
        let (none, new) = (ptr::null_mut(), ptr::from_mut(&mut value).cast());
        // SAFETY: jemalloc compares the length with the setting's, and reads so much.
        match unsafe {
            (self.mallctl)(name.as_ptr(), none, ptr::null_mut(), new, size_of::<isize>())
        } {
            0 => Ok(()),
            errno => Err(errno),
        }
    }
}

/// mimalloc.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mimalloc {
    pub(super) version: i32,
    get: MiOptionGet,
    set: MiOptionSet,
}

impl Mimalloc {
    pub(super) fn find() -> Option<(Self, bool)> {
        let own = symbol(c"mi_version")?;
        let (get, set) = (symbol(c"mi_option_get")?.address, symbol(c"mi_option_set")?.address);
        // SAFETY: the functions of these names; the first takes nothing and may be called at any
        // time.
        let found = unsafe {
            Self {
                version: transmute::<NonNull<c_void>, MiVersion>(own.address)(),
                get: transmute::<NonNull<c_void>, MiOptionGet>(get),
                set: transmute::<NonNull<c_void>, MiOptionSet>(set),
            }
        };
        Some((found, serves_malloc(own)))
    }

    #[allow(clippy::useless_conversion)] // where words have 32 bits, it is one
    pub(super) fn get(self, option: c_int) -> i64 {
        // SAFETY: mimalloc answers 0 for an option that it does not have.
        i64::from(unsafe { (self.get)(option) })
    }

    /// Sets an option, and says what it is then.
    #[allow(clippy::cast_possible_truncation)] // where words have 32 bits, options have
    pub(super) fn set(self, option: c_int, value: i64) -> i64 {
        // SAFETY: mimalloc passes over an option that it does not have.
        unsafe { (self.set)(option, value as c_long) };
        self.get(option)
    }
}

/// The functions of an allocator that is linked into the program.
#[derive(Clone, Copy, Debug)]
pub struct Functions(pub(super) Linked);

#[derive(Clone, Copy, Debug)]
pub(super) enum Linked {
    Jemalloc(Jemalloc),
    Mimalloc(Mimalloc),
}

impl Functions {
    /// Those of jemalloc.
    ///
    /// # Safety
    ///
    /// `mallctl` is jemalloc's function, under whatever name.
    pub unsafe fn jemalloc(mallctl: MallCtl) -> Self {
        Self(Linked::Jemalloc(Jemalloc { mallctl }))
    }

    /// Those of mimalloc. `version` is what `mi_version` says: 209 is 2.0.9, 212 is 2.1.2.
    ///
    /// # Safety
    ///
    /// The functions are mimalloc's `mi_option_get` and `mi_option_set`, of that version.
    pub unsafe fn mimalloc(version: i32, get: MiOptionGet, set: MiOptionSet) -> Self {
        Self(Linked::Mimalloc(Mimalloc { version, get, set }))
    }
}
