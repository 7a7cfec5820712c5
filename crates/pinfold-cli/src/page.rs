//! One page of the program's own, to try a registrar on.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for one call of [`Registrar::register`]: the page is owned here,
//! its bytes are not borrowed while it is registered, and the registration ends before the page does.

#![allow(unsafe_code)]

use pinfold::{Access, AddressRange, Registrar};

/// A page-aligned page.
#[derive(Debug)]
pub(crate) struct Page(Box<Aligned>);

#[derive(Debug)]
#[repr(align(4096))]
struct Aligned([u8; Page::BYTES]);

impl Page {
    /// The length of the page, in bytes.
    pub(crate) const BYTES: usize = 4096;

    /// A page full of `byte`.
    pub(crate) fn filled(byte: u8) -> Self {
        Self(Box::new(Aligned([byte; Self::BYTES])))
    }

    /// The address of its first byte, to be given to a device.
    pub(crate) fn address(&self) -> usize {
        (&raw const self.0.0).expose_provenance()
    }

    /// Calls `use_it` while the page is registered.
    ///
    /// # Errors
    ///
    /// What the registrar or `use_it` says, in words.
    pub(crate) fn registered<R: Registrar>(
        &self,
        registrar: &R,
        access: Access,
        use_it: impl FnOnce(R::Handle) -> Result<(), String>,
    ) -> Result<(), String> {
        let range = AddressRange::new(self.address(), Self::BYTES).map_err(|e| e.to_string())?;
        // SAFETY: the page lives until this function returns, see the file's header.
        let handle = unsafe { registrar.register(range, access) }.map_err(|e| e.to_string())?;
        let used = use_it(handle);
        // SAFETY: registered above, and `use_it` waited for what it began.
        unsafe { registrar.deregister(handle, range) }.map_err(|e| e.to_string())?;
        used
    }
}
