//! Whether the calling thread is where a call on the same thread would wait for it: it has the keeper's books, or the
//! lock of this library's memory, or deregisters.
//!
//! A handler of the program may interrupt it there and never return, by `exit`, whose functions call this library
//! again. Such a call finds no books, and the kernel ends what is registered with the process.

use crate::heap;
use pinfold_kernel::thread::is_lean;
use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    /// No destructor and a constant: reading it allocates nothing. Of the program's threads only: no handler interrupts
    /// one of ours.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is there until it is dropped.
#[derive(Debug)]
pub(crate) struct Holding(PhantomData<*const ()>);

impl Holding {
    /// `None` if it is there already.
    pub(crate) fn begin() -> Option<Self> {
        let begins = is_lean() || !(heap::is_interrupted() || HOLDS.replace(true));
        // Not made in vain: its end would be that of the other one.
        begins.then(|| Self(PhantomData))
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        if !is_lean() {
            HOLDS.set(false);
        }
    }
}

/// Whether the calling thread was interrupted there, and this call is of what interrupted it.
pub(crate) fn is_interrupted() -> bool {
    !is_lean() && (heap::is_interrupted() || HOLDS.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_there_once() {
        let holding = Holding::begin();
        assert!(holding.is_some() && Holding::begin().is_none() && is_interrupted());
        assert!(Holding::begin().is_none(), "the one in vain has ended nothing");
        let other = std::thread::spawn(|| Holding::begin().is_some());
        assert!(other.join().is_ok_and(|begins| begins));
        drop(holding);
        assert!(!is_interrupted());
    }
}
