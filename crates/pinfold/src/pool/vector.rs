//! A vector of bytes in registered memory.

use super::buffer::{Pool, PoolBuffer};
use super::error::AllocateError;
use pinfold_core::Registrar;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};

/// Bytes that grow, in a pool's memory: within their buffer as long as it has room, else they move
/// to one of at least twice the size.
///
/// What [`Vec`] does when memory is exhausted, this says as an error.
///
/// It does not outlive its pool:
///
/// ```compile_fail,E0505
/// # use pinfold::{Registrar, pool::{Pool, PoolVec}};
/// # fn after_its_parent<R: Registrar>(pool: Pool<R>) {
/// let vector = PoolVec::new(&pool);
/// drop(pool);
/// drop(vector);
/// # }
/// ```
pub struct PoolVec<'p, R: Registrar> {
    pool: &'p Pool<R>,
    buffer: Option<PoolBuffer<'p, R>>,
}

impl<'p, R: Registrar> PoolVec<'p, R> {
    /// No bytes, and no memory yet.
    pub const fn new(pool: &'p Pool<R>) -> Self {
        Self { pool, buffer: None }
    }

    /// No bytes, with room for so many.
    ///
    /// # Errors
    ///
    /// [`AllocateError`].
    pub fn with_capacity(pool: &'p Pool<R>, capacity: usize) -> Result<Self, AllocateError> {
        let mut vector = Self::new(pool);
        vector.reserve(capacity)?;
        Ok(vector)
    }

    /// How many bytes there is room for before they move.
    pub fn capacity(&self) -> usize {
        self.buffer.as_ref().map_or(0, PoolBuffer::capacity)
    }

    /// Makes room for so many more bytes.
    ///
    /// # Errors
    ///
    /// [`AllocateError`]; the bytes are as they were.
    pub fn reserve(&mut self, more: usize) -> Result<(), AllocateError> {
        let capacity = self.capacity();
        let wanted = self.len().saturating_add(more);
        if wanted <= capacity {
            return Ok(());
        }
        let doubled = wanted.max(capacity.saturating_mul(2));
        // Where twice as much cannot be had, what is needed may.
        let larger = self.pool.get(doubled).or_else(|_| self.pool.get(wanted))?;
        self.move_to(larger);
        Ok(())
    }

    fn move_to(&mut self, mut larger: PoolBuffer<'p, R>) {
        let length = self.len();
        larger[..length].copy_from_slice(self);
        larger.set_len(length);
        self.buffer = Some(larger);
    }

    /// Adds a byte.
    ///
    /// # Errors
    ///
    /// [`AllocateError`]; the bytes are as they were.
    pub fn push(&mut self, byte: u8) -> Result<(), AllocateError> {
        self.extend_from_slice(&[byte])
    }

    /// Takes the last byte away.
    pub fn pop(&mut self) -> Option<u8> {
        let last = *self.last()?;
        self.truncate(self.len() - 1);
        Some(last)
    }

    /// Adds bytes.
    ///
    /// # Errors
    ///
    /// [`AllocateError`]; the bytes are as they were.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) -> Result<(), AllocateError> {
        self.reserve(bytes.len())?;
        let before = self.len();
        if let Some(buffer) = &mut self.buffer {
            buffer.set_len(before + bytes.len());
            buffer[before..].copy_from_slice(bytes);
        }
        Ok(())
    }

    /// Makes it so long; what is added is `byte`.
    ///
    /// # Errors
    ///
    /// [`AllocateError`]; the bytes are as they were.
    pub fn resize(&mut self, length: usize, byte: u8) -> Result<(), AllocateError> {
        let before = self.len();
        self.reserve(length.saturating_sub(before))?;
        if let Some(buffer) = &mut self.buffer {
            buffer.set_len(length);
            buffer[before.min(length)..].fill(byte);
        }
        Ok(())
    }

    /// Cuts it to at most so many bytes; the room stays.
    pub fn truncate(&mut self, length: usize) {
        let length = length.min(self.len());
        if let Some(buffer) = &mut self.buffer {
            buffer.set_len(length);
        }
    }

    /// Takes all bytes away; the room stays.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// The buffer that the bytes are in; `None` if there never were any.
    pub fn into_buffer(self) -> Option<PoolBuffer<'p, R>> {
        self.buffer
    }

    /// The same, to look at: its handle is what a device knows the bytes by.
    pub const fn buffer(&self) -> Option<&PoolBuffer<'p, R>> {
        self.buffer.as_ref()
    }
}

impl<R: Registrar> Deref for PoolVec<'_, R> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }
}

impl<R: Registrar> DerefMut for PoolVec<'_, R> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_deref_mut().unwrap_or_default()
    }
}

impl<R: Registrar> io::Write for PoolVec<'_, R> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let added = self.extend_from_slice(bytes);
        added.map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<R: Registrar> fmt::Debug for PoolVec<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolVec")
            .field("length", &self.len())
            .field("capacity", &self.capacity())
            .finish()
    }
}
