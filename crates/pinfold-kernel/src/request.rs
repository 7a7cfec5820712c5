//! Numbers of `ioctl` requests.

/// `_IOWR(kind, number, argument)` as every architecture we run on encodes it, except the MIPS,
/// PowerPC and SPARC families, which Pinfold does not build for.
pub(crate) const fn request(kind: u8, number: u8, argument_bytes: usize) -> libc::c_ulong {
    let both_ways = 3 << 30;
    both_ways
        | (argument_bytes as libc::c_ulong) << 16
        | (kind as libc::c_ulong) << 8
        | number as libc::c_ulong
}
