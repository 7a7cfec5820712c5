//! Builds the peer's side of the loops, if it is asked for.

fn main() {
    println!("cargo::rerun-if-changed=src/peer/ucx.c");
    #[cfg(feature = "peers")]
    peer();
}

/// Compiles the loops around UCX's cache, or says what is missing.
#[cfg(feature = "peers")]
fn peer() {
    let mut build = cc::Build::new();
    build.file("src/peer/ucx.c").opt_level(2).warnings(true).cargo_warnings(false);
    if !has_header(&build) {
        println!(
            "cargo::error=the feature `peers` needs a C compiler and UCX's header \
             <ucs/memory/rcache.h>: apt-get install libucx-dev"
        );
        return;
    }
    match build.try_compile("peer") {
        Ok(()) => println!("cargo::rustc-link-lib=ucs\ncargo::rustc-link-lib=ucm"),
        Err(error) => println!(
            "cargo::error=src/peer/ucx.c does not compile against this UCX (it was written for \
             1.13, Debian's libucx-dev): {error}"
        ),
    }
}

/// Asked of the preprocessor, which knows the compiler's own search path.
#[cfg(feature = "peers")]
fn has_header(build: &cc::Build) -> bool {
    build.try_expand().is_ok()
}
