//! The process's table of mappings, as the kernel tells it.
