//! Memory of this library's own: nothing here asks the program's allocator for any.
//!
//! The C library sets 64 MiB of addresses aside for each thread that allocates or frees, and a program may see
//! what another one of its allocations changes in its heap. So this library's values lie in mappings of their
//! own, in blocks of powers of two, with a list of free ones for each size.
//!
//! # Forks
//!
//! Another thread may have held the lock when a process was forked. The lock and the mark that the lists are
//! whole stand in a page that a child finds wiped: it begins with empty lists. Blocks that its parent used can be
//! used and released in the child as before; blocks that were free in the parent are never used there.
//!
//! # Without memory
//!
//! Collections of the standard library end the process where they get none. So what keeps registrations asks for each one
//! whether there is [room](secure_room) for all that it takes in small blocks, and keeps it only if there is. What grows with
//! the number of registrations is asked for by `try_reserve`, which returns.
//!
//! # Signals
//!
//! A handler of the program may interrupt a thread that has the lock, and call this library again there: at the latest by
//! `exit`, whose functions do. The lock names its thread, so such a call is told from one that may wait: what it asks
//! for is the system allocator's, and what it releases stays unused.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to be the global allocator. A block is in one list or in use, the lists are
//! read and written under the lock, and every block is a multiple of its own size into a mapping, up to a page.

#![allow(unsafe_code)]

use pinfold_kernel::mapping::{AtomicPage, WalledMapping};
use pinfold_kernel::thread;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// The allocator. Unit tests are the standard library's, so that sanitizers and Miri know what they allocate.
#[cfg_attr(not(test), global_allocator)]
static HEAP: Heap = Heap::new();

/// The smallest block.
const SMALLEST: usize = 16;
/// The largest block; what is longer is a mapping of its own.
const LARGEST: usize = 256 << 10;
/// One list for each power of two from the smallest to the largest.
const CLASSES: usize = (LARGEST / SMALLEST).ilog2() as usize + 1;
/// Blocks are cut out of mappings of this size.
const CHUNK: usize = 1 << 20;
/// What is free for small blocks where there is room: the nodes that some insertions into trees take, and what a monitor takes
/// to watch something.
const RESERVE: usize = 256 << 10;
/// How many chunks are told from other memory; beyond, the system's allocator serves.
const CHUNKS: usize = 256;
/// The alignment of the largest blocks.
const MOST_ALIGNED: usize = 4096;

/// Whether there is memory in small blocks for what one registration takes that is kept; it is taken from the kernel if
/// there is not.
#[cfg(not(test))]
pub(crate) fn secure_room() -> bool {
    HEAP.secure_room()
}

/// The standard library's has none to set aside.
#[cfg(test)]
pub(crate) const fn secure_room() -> bool {
    true
}

/// See the module.
struct Heap {
    /// In a page that forked children find wiped: the lock, which is the name of the thread that has it, whether the lists
    /// are whole, and whether there is room. Null until it is needed.
    words: AtomicPtr<[AtomicU64; 4]>,
    lists: UnsafeCell<Lists>,
    /// Where each chunk begins, in the order in which they were mapped.
    chunks: [AtomicUsize; CHUNKS],
    count: AtomicUsize,
}

struct Lists {
    free: [*mut Free; CLASSES],
    /// What is left of the last chunk: zeros.
    rest: *mut u8,
    left: usize,
    /// A chunk of which nothing is used yet; null without one.
    next: *mut u8,
}

/// A free block's first word.
struct Free {
    next: *mut Free,
}

// SAFETY: the lists are used under the lock, everything else is atomic.
unsafe impl Sync for Heap {}
// SAFETY: memory belongs to the process, not to a thread.
unsafe impl Send for Heap {}

impl Lists {
    const EMPTY: Self = Self {
        free: [ptr::null_mut(); CLASSES],
        rest: ptr::null_mut(),
        left: 0,
        next: ptr::null_mut(),
    };

    fn have_room(&self) -> bool {
        self.left >= RESERVE || !self.next.is_null()
    }
}

/// A mapping of its own; null if there is no memory.
fn whole(layout: Layout) -> *mut u8 {
    WalledMapping::new(layout.size()).map_or(ptr::null_mut(), |mapping| mapping.leak().as_ptr())
}

/// # Safety
///
/// `block` is from [`whole`] for the same layout, and in no use any more.
unsafe fn unmap_whole(block: *mut u8, layout: Layout) {
    if let Some(block) = NonNull::new(block) {
        // SAFETY: the caller's promise.
        unsafe { WalledMapping::unmap_leaked(block, layout.size()) };
    }
}

/// The calling thread in the lock.
fn own_word() -> u64 {
    thread::own_name() as u64
}

/// Whether the calling thread was interrupted where it had the lock, and this call is of what interrupted it.
pub(crate) fn is_interrupted() -> bool {
    HEAP.is_interrupted()
}

/// A block, and whether it is known to be all zeros.
struct Block {
    start: *mut u8,
    is_zero: bool,
}

impl Heap {
    const fn new() -> Self {
        Self {
            words: AtomicPtr::new(ptr::null_mut()),
            lists: UnsafeCell::new(Lists::EMPTY),
            chunks: [const { AtomicUsize::new(0) }; CHUNKS],
            count: AtomicUsize::new(0),
        }
    }

    /// Which list has the blocks for this; `None` if none has.
    fn class_of(layout: Layout) -> Option<usize> {
        let bytes = layout.size().max(layout.align()).max(SMALLEST);
        let fits = bytes <= LARGEST && layout.align() <= MOST_ALIGNED;
        fits.then(|| (bytes.next_power_of_two() / SMALLEST).ilog2() as usize)
    }

    /// Whether the system's allocator serves this: nothing here asks for such an alignment.
    const fn is_too_aligned(layout: Layout) -> bool {
        layout.align() > MOST_ALIGNED
    }

    /// `None` without memory for the page.
    fn words(&self) -> Option<&'static [AtomicU64; 4]> {
        // Acquire: the page is mapped and marked.
        let words = self.words.load(Ordering::Acquire);
        // SAFETY: null, or a page that stays.
        unsafe { words.as_ref() }.or_else(|| self.make_words())
    }

    #[cold]
    fn make_words(&self) -> Option<&'static [AtomicU64; 4]> {
        let page = AtomicPage::new().ok()?;
        page.wipe_on_fork().ok()?;
        // A page that another thread's comes before is not given back; that happens once at most.
        let fresh = ptr::from_ref(page.leak()).cast_mut();
        let (order, none) = (Ordering::AcqRel, ptr::null_mut());
        // AcqRel: releases the page, acquires another thread's.
        let had = self.words.compare_exchange(none, fresh, order, Ordering::Acquire);
        // SAFETY: as in `words`.
        unsafe { had.map_or_else(|winner| winner, |_| fresh).as_ref() }
    }

    /// Whether the calling thread was interrupted while it had the lists.
    fn is_interrupted(&self) -> bool {
        // Acquire: as in `words`.
        // SAFETY: null, or a page that stays.
        let words = unsafe { self.words.load(Ordering::Acquire).as_ref() };
        // Relaxed: a thread sees what it has stored itself, and no other stores its name.
        words.is_some_and(|[lock, ..]| lock.load(Ordering::Relaxed) == own_word())
    }

    /// Runs `use_lists` with the lists; `None` if there can be none, or if the thread was interrupted while it had them.
    fn with_lists<T>(&self, use_lists: impl FnOnce(&mut Lists) -> T) -> Option<T> {
        let [lock, are_whole, have_room, _] = self.words()?;
        let own = own_word();
        // Relaxed: as in `is_interrupted`.
        if lock.load(Ordering::Relaxed) == own {
            return None;
        }
        // It is held for some ten instructions, or for a system call that maps memory. Sleeping lets a thread of
        // lower priority go on that holds it. Acquire: what the last holder did to the lists.
        let mut tries = 0_u32;
        while lock.compare_exchange_weak(0, own, Ordering::Acquire, Ordering::Relaxed).is_err() {
            tries = tries.saturating_add(1);
            if tries < 64 { spin_loop() } else { thread::sleep(Duration::from_micros(50)) }
        }
        // SAFETY: under the lock.
        let lists = unsafe { &mut *self.lists.get() };
        // Relaxed, both: under the lock, and in a child the page was wiped before its first instruction.
        if are_whole.load(Ordering::Relaxed) == 0 {
            *lists = Lists::EMPTY;
            are_whole.store(1, Ordering::Relaxed);
        }
        let result = use_lists(lists);
        // Relaxed: a hint to `secure_room`.
        have_room.store(lists.have_room().into(), Ordering::Relaxed);
        // Release: pairs with the acquire above.
        lock.store(0, Ordering::Release);
        Some(result)
    }

    fn take(&self, class: usize) -> Option<Block> {
        self.with_lists(|lists| {
            let free = lists.free[class];
            if free.is_null() {
                return self.cut(lists, SMALLEST << class);
            }
            // SAFETY: a block in a list is in no use, and its first word names the next.
            lists.free[class] = unsafe { (*free).next };
            Some(Block { start: free.cast(), is_zero: false })
        })?
    }

    /// A block of `bytes` out of the rest of the last chunk, or of a new one.
    fn cut(&self, lists: &mut Lists, bytes: usize) -> Option<Block> {
        let before = |rest: *mut u8| rest.align_offset(bytes.min(MOST_ALIGNED));
        if before(lists.rest).saturating_add(bytes) > lists.left {
            (lists.rest, lists.left) = (self.next_chunk(lists)?, CHUNK);
        }
        let start = lists.rest.wrapping_add(before(lists.rest));
        lists.left -= before(lists.rest) + bytes;
        lists.rest = start.wrapping_add(bytes);
        Some(Block { start, is_zero: true })
    }

    /// The one that was set aside, or a new one.
    fn next_chunk(&self, lists: &mut Lists) -> Option<*mut u8> {
        let set_aside = std::mem::replace(&mut lists.next, ptr::null_mut());
        if set_aside.is_null() { self.map_chunk() } else { Some(set_aside) }
    }

    /// See [`secure_room`].
    fn secure_room(&self) -> bool {
        // Relaxed: another thread may use it up at any moment.
        let has_room =
            |[_, _, have_room, _]: &[AtomicU64; 4]| have_room.load(Ordering::Relaxed) == 1;
        self.words().is_some_and(has_room) || self.set_chunk_aside()
    }

    #[cold]
    fn set_chunk_aside(&self) -> bool {
        let set_aside = |lists: &mut Lists| {
            if !lists.have_room() {
                lists.next = self.map_chunk().unwrap_or(ptr::null_mut());
            }
            lists.have_room()
        };
        self.with_lists(set_aside).unwrap_or(false)
    }

    fn map_chunk(&self) -> Option<*mut u8> {
        // Relaxed: changed under the lock. A child's lock is another, and its memory too.
        let count = self.count.load(Ordering::Relaxed);
        let entry = self.chunks.get(count)?;
        let chunk = WalledMapping::new(CHUNK).ok()?.leak().as_ptr();
        entry.store(chunk.expose_provenance(), Ordering::Relaxed);
        // Release: a thread that counts the chunk finds where it is.
        self.count.store(count + 1, Ordering::Release);
        Some(chunk)
    }

    /// Whether a block is out of a chunk.
    fn is_ours(&self, block: *mut u8) -> bool {
        // Acquire: pairs with the store in `map_chunk`. A thread that has a block got it after that.
        let chunks = &self.chunks[..self.count.load(Ordering::Acquire)];
        // Relaxed: as above.
        chunks.iter().any(|chunk| block.addr().wrapping_sub(chunk.load(Ordering::Relaxed)) < CHUNK)
    }

    fn put_back(&self, class: usize, block: *mut u8) {
        self.with_lists(|lists| {
            let free = block.cast::<Free>();
            // SAFETY: the block is in no use any more, is aligned to its size and has room for a word.
            unsafe { free.write(Free { next: lists.free[class] }) };
            lists.free[class] = free;
        });
    }
}

// SAFETY: a block is as long and as aligned as was asked for, and in no other's hands: see the module. Nothing
// here unwinds.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match Self::class_of(layout) {
            Some(class) => self.take(class).map_or_else(
                // SAFETY: the caller's promise.
                || unsafe { System.alloc(layout) },
                |block| block.start,
            ),
            // SAFETY: the caller's promise.
            None if Self::is_too_aligned(layout) => unsafe { System.alloc(layout) },
            None => whole(layout),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match Self::class_of(layout) {
            Some(class) => match self.take(class) {
                Some(block) => {
                    if !block.is_zero {
                        // SAFETY: the block is as long.
                        unsafe { block.start.write_bytes(0, layout.size()) };
                    }
                    block.start
                }
                // SAFETY: the caller's promise.
                None => unsafe { System.alloc_zeroed(layout) },
            },
            // SAFETY: the caller's promise.
            None if Self::is_too_aligned(layout) => unsafe { System.alloc_zeroed(layout) },
            None => whole(layout),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match Self::class_of(layout) {
            Some(class) if self.is_ours(block) => self.put_back(class, block),
            // SAFETY: it was the system's allocator that gave it.
            Some(_) => unsafe { System.dealloc(block, layout) },
            // SAFETY: as above.
            None if Self::is_too_aligned(layout) => unsafe { System.dealloc(block, layout) },
            // SAFETY: `whole` made it for the same layout, and it is in no use any more.
            None => unsafe { unmap_whole(block, layout) },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's promise: it does not overflow.
        let wider = unsafe { Layout::from_size_align_unchecked(bytes, layout.align()) };
        let class = Self::class_of(layout);
        if class.is_some() && class == Self::class_of(wider) && self.is_ours(block) {
            return block;
        }
        // SAFETY: the caller's promises; the new block is another one.
        unsafe {
            let moved = self.alloc(wider);
            if !moved.is_null() {
                ptr::copy_nonoverlapping(block, moved, layout.size().min(bytes));
                self.dealloc(block, layout);
            }
            moved
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::thread::scope;

    static TRIED: Heap = Heap::new();

    fn layout(bytes: usize, align: usize) -> Layout {
        Layout::from_size_align(bytes, align).unwrap()
    }

    #[test]
    fn each_layout_has_a_list_or_a_mapping() {
        let class = |bytes, align| Heap::class_of(layout(bytes, align));
        assert_eq!((class(1, 1), class(16, 8), class(17, 1)), (Some(0), Some(0), Some(1)));
        assert_eq!((class(8, 64), class(LARGEST, 8)), (Some(2), Some(CLASSES - 1)));
        assert_eq!((class(LARGEST + 1, 1), class(8, 8192)), (None, None));
    }

    /// Blocks of all sizes on some threads, each filled with its own pattern as long as it is in use.
    #[test]
    fn no_block_is_in_two_hands() {
        let heap = &TRIED;
        let work = |seed: usize| {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut held: Vec<(*mut u8, Layout, u8)> = Vec::new();
            for round in 0..2_000_u32 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                if held.len() > 40 || (state.is_multiple_of(3) && !held.is_empty()) {
                    let (block, layout, pattern) = held.swap_remove(state / 8 % held.len());
                    // SAFETY: the block is this thread's, of that length, and is given back once.
                    unsafe {
                        let bytes = std::slice::from_raw_parts(block, layout.size());
                        assert!(bytes.iter().all(|byte| *byte == pattern), "seed {seed}");
                        heap.dealloc(block, layout);
                    }
                    continue;
                }
                let bytes = 1 + state / 64 % [32, 300, 9000, 70_000, LARGEST + 5000][state % 5];
                let layout = layout(bytes, 1 << (state / 7 % 8));
                let pattern = (round % 251) as u8;
                // SAFETY: as long as asked for, and this thread's.
                unsafe {
                    let block = heap.alloc_zeroed(layout);
                    assert!(!block.is_null() && block.align_offset(layout.align()) == 0);
                    let zeros = std::slice::from_raw_parts(block, bytes);
                    assert!(zeros.iter().all(|byte| *byte == 0), "seed {seed}, {bytes}");
                    block.write_bytes(pattern, bytes);
                    held.push((block, layout, pattern));
                }
            }
            for (block, layout, _) in held {
                // SAFETY: as above.
                unsafe { heap.dealloc(block, layout) };
            }
        };
        scope(|scope| (1..4).for_each(|seed| _ = scope.spawn(move || work(seed))));
        assert!(heap.count.load(Ordering::Relaxed) < 16, "what was given back is used again");
    }

    #[test]
    fn a_block_that_grows_keeps_its_bytes() {
        // SAFETY: the block is ours, with the layout that is said.
        unsafe {
            let mut block = TRIED.alloc(layout(10, 1));
            block.write_bytes(7, 10);
            let mut bytes = 10;
            for next in [12, 100, 5000, LARGEST + 1, 300_000, 20] {
                block = TRIED.realloc(block, layout(bytes, 1), next);
                bytes = next;
                let kept = std::slice::from_raw_parts(block, 10);
                assert_eq!(kept, [7; 10], "{next}");
            }
            TRIED.dealloc(block, layout(bytes, 1));
        }
    }

    #[test]
    fn there_is_room_until_no_chunk_is_left() {
        static FULL: Heap = Heap::new();
        let cut = || FULL.take(CLASSES - 1).is_some();
        FULL.count.store(CHUNKS - 2, Ordering::Relaxed);
        assert!(FULL.secure_room() && FULL.secure_room());
        assert_eq!(FULL.count.load(Ordering::Relaxed), CHUNKS - 1, "one was set aside");
        // Two chunks, and the last block is no more than what is always free.
        (1..2 * CHUNK / LARGEST).for_each(|_| assert!(FULL.secure_room() && cut()));
        assert!(FULL.secure_room() && cut());
        assert!(!FULL.secure_room() && !cut());
    }

    /// What a handler would do that leaves by `exit`.
    #[test]
    fn a_thread_that_was_interrupted_with_the_lock_does_not_wait_for_itself() {
        static INTERRUPTED: Heap = Heap::new();
        let small = layout(40, 8);
        // SAFETY: the blocks are this test's, and given back once.
        unsafe {
            let had = INTERRUPTED.alloc(small);
            assert!(!INTERRUPTED.is_interrupted());
            let interrupted = INTERRUPTED.with_lists(|_| {
                let fresh = INTERRUPTED.alloc(small);
                assert!(!fresh.is_null() && !INTERRUPTED.is_ours(fresh));
                INTERRUPTED.dealloc(fresh, small);
                INTERRUPTED.dealloc(had, small);
                let other = scope(|scope| scope.spawn(|| INTERRUPTED.is_interrupted()).join());
                (INTERRUPTED.is_interrupted(), other.unwrap())
            });
            assert_eq!(interrupted, Some((true, false)));
            assert_ne!(INTERRUPTED.alloc(small), had, "it stays unused");
        }
    }

    /// The lock is held and the lists are anything at the moment of a fork: the child finds neither.
    #[test]
    fn a_child_begins_with_empty_lists_and_releases_what_its_parent_had() {
        static FORKED: Heap = Heap::new();
        let small = layout(40, 8);
        // SAFETY: the blocks are ours. The child uses the heap and ends.
        unsafe {
            let had = FORKED.alloc(small);
            let free = FORKED.alloc(small);
            FORKED.dealloc(free, small);
            let lock = &FORKED.words().unwrap()[0];
            lock.store(1, Ordering::Relaxed);
            let child = libc::fork();
            if child == 0 {
                let fresh = FORKED.alloc(small);
                let is_another = fresh != free && fresh != had && !fresh.is_null();
                FORKED.dealloc(had, small);
                let again = FORKED.alloc(small);
                libc::_exit(i32::from(!(is_another && again == had)));
            }
            lock.store(0, Ordering::Relaxed);
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0);
            assert_eq!(FORKED.alloc(small), free, "the parent's lists are as they were");
        }
    }
}
