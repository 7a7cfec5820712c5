//! No peer: this build measures ours alone.

/// Nothing to keep out.
// A Result because the peer that is there can fail.
#[allow(clippy::unnecessary_wraps)]
pub(crate) fn keep_hooks_out() -> Result<(), String> {
    Ok(())
}

/// A cache that cannot be made.
pub(crate) enum Ucx {}

impl Ucx {
    /// Nothing.
    // A Result because the peer that is there can fail.
    #[allow(clippy::unnecessary_wraps)]
    pub(crate) fn open(_regions: u64, _bytes: u64) -> Result<Option<Self>, String> {
        Ok(None)
    }

    /// A cache that cannot be made.
    pub(crate) fn hooked(
        _registrar: pinfold::registrar::IoUring,
        _slots: u32,
    ) -> Result<Self, String> {
        Err("this build has no peer".into())
    }

    /// Never called.
    pub(crate) fn set_pause(&self, _nanoseconds: u64) {
        match *self {}
    }

    /// Never called.
    pub(crate) fn get_put(&self, _addresses: &[u64], _length: usize) -> Result<(), String> {
        match *self {}
    }

    /// Never called.
    pub(crate) fn get_put_held(
        &self,
        _addresses: &[u64],
        _length: usize,
        _held: usize,
    ) -> Result<(), String> {
        match *self {}
    }

    /// Never called.
    pub(crate) fn miss_destroy(&self, _addresses: &[u64], _length: usize) -> Result<(), String> {
        match *self {}
    }

    /// Never called.
    pub(crate) fn registered(&self) -> u64 {
        match *self {}
    }

    /// Nothing.
    // A Result because the other loops can fail.
    #[allow(clippy::unnecessary_wraps)]
    pub(crate) fn walk(_addresses: &[u64]) -> Result<(), String> {
        Ok(())
    }
}
