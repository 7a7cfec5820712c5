//! Monitors: who tells which addresses changed.
