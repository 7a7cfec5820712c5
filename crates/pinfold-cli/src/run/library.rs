//! Where the library is that programs are started with.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{env, fmt};

const NAME: &str = "libpinfold_preload.so";

/// The library is in none of the places.
#[derive(Debug)]
pub(crate) struct NotFound(Vec<PathBuf>);

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{NAME} is not there; PINFOLD_PRELOAD names it, or it lies in one of")?;
        self.0.iter().try_for_each(|place| write!(f, " {}", place.display()))?;
        f.write_str(" (`cargo build --release -p pinfold-preload` makes it)")
    }
}

/// The library's absolute path.
pub(crate) fn find() -> Result<PathBuf, NotFound> {
    let command = env::current_exe().ok();
    let places = places(env::var_os("PINFOLD_PRELOAD"), command.as_deref());
    let found = places.iter().find(|place| place.is_file());
    let found = found.and_then(|place| place.canonicalize().ok());
    found.ok_or(NotFound(places))
}

/// What the environment names; else next to the command, in the `lib` of its installation, or where
/// cargo leaves what it builds for tests.
fn places(named: Option<OsString>, command: Option<&Path>) -> Vec<PathBuf> {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return vec![named.into()];
    }
    let beside = command.and_then(Path::parent);
    let around = |directory: &Path| {
        let installed = directory
            .parent()
            .map(|prefix| [prefix.join("lib").join(NAME), prefix.join("lib/pinfold").join(NAME)]);
        let built = [directory.join(NAME), directory.join("deps").join(NAME)];
        built.into_iter().chain(installed.into_iter().flatten())
    };
    beside.into_iter().flat_map(around).collect()
}

/// How many directories deep a program may lie; from there the way goes up to the root.
const DEPTH: usize = 48;

/// `LD_PRELOAD` with this library first, by a name that only glibc's linker understands: `$ORIGIN` is the
/// directory of the program that it starts. The linker of another C library (musl) looks for a file of that
/// name, finds none, and starts its program without; it could load the library, but not what that needs, and
/// the program would not start.
pub(crate) fn before_others(library: &Path, others: Option<OsString>) -> OsString {
    let mut all = OsString::from("$ORIGIN");
    all.push("/..".repeat(DEPTH));
    all.push(library);
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        all.push(OsStr::new(":"));
        all.push(others);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_environment_names_is_the_only_place() {
        assert_eq!(places(Some("/x.so".into()), None), [Path::new("/x.so")]);
    }

    #[test]
    fn else_it_lies_around_the_command() {
        let all = places(Some(OsString::new()), Some(Path::new("/opt/bin/pinfold")));
        assert!(all.contains(&Path::new("/opt/bin").join(NAME)));
        assert!(all.contains(&Path::new("/opt/lib").join(NAME)));
        let text = NotFound(all).to_string();
        assert!(text.contains("PINFOLD_PRELOAD") && text.contains("/opt/lib/"), "{text}");
    }

    #[test]
    fn other_libraries_stay() {
        let ours = before_others(Path::new("/a.so"), None).into_string().unwrap();
        assert!(ours.starts_with("$ORIGIN/../..") && ours.ends_with("/../a.so"), "{ours}");
        let both = before_others(Path::new("/a.so"), Some("/b.so".into()));
        assert_eq!(both, OsString::from(ours + ":/b.so"));
    }
}
