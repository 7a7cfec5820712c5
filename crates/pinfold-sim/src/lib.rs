//! A simulated address space, device and monitor.
