//! Symbols of the libraries in this process, as the dynamic linker finds them.
//!
//! # Safety
//!
//! The unsafe code of this file is there to ask the dynamic linker, which reads names and its own tables. What a symbol
//! is, and calling it, is its finder's responsibility.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

/// A symbol of this process, and the object that it is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Symbol {
    /// Where it is.
    pub address: NonNull<c_void>,
    /// Where its object begins; null if the linker does not know.
    pub object: *mut c_void,
}

/// Where `name` is found first. Takes the dynamic linker's lock.
pub fn address(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the name ends with a zero byte.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

/// As [`address`], with the object.
pub fn symbol(name: &CStr) -> Option<Symbol> {
    let address = address(name)?;
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` has room for the answer, and is valid as it is, all zero.
    let object = unsafe {
        match libc::dladdr(address.as_ptr(), info.as_mut_ptr()) {
            0 => ptr::null_mut(),
            _ => info.assume_init().dli_fbase,
        }
    };
    Some(Symbol { address, object })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malloc_is_found_and_nonsense_is_not() {
        let malloc = symbol(c"malloc").unwrap();
        assert_eq!(address(c"malloc"), Some(malloc.address));
        assert!(symbol(c"pinfold_no_such_symbol").is_none());
    }
}
