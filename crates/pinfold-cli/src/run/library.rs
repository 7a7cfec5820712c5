//! Where the library is that programs are started with.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{env, fmt};

const NAME: &str = "libpinfold_preload.so";

/// No program can be started with the library.
#[derive(Debug)]
pub(crate) enum NoLibrary {
    /// It is in none of the places.
    NotFound(Vec<PathBuf>),
    /// The dynamic linker takes its path in `LD_PRELOAD` for something else.
    NotNamed(PathBuf),
}

impl fmt::Display for NoLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound(places) => {
                write!(f, "{NAME} is not there; PINFOLD_PRELOAD names it, or it lies in one of")?;
                places.iter().try_for_each(|place| write!(f, " {}", place.display()))?;
                f.write_str(" (`cargo build --release -p pinfold-preload` makes it)")
            }
            Self::NotNamed(place) => write!(
                f,
                "{}: a space, a colon or a dollar in this path has another meaning in LD_PRELOAD; have the library in \
                 another directory",
                place.display()
            ),
        }
    }
}

/// The library's absolute path.
pub(crate) fn find() -> Result<PathBuf, NoLibrary> {
    let command = env::current_exe().ok();
    let places = places(env::var_os("PINFOLD_PRELOAD"), command.as_deref());
    let found = places.iter().find(|place| place.is_file());
    let found = found.and_then(|place| place.canonicalize().ok());
    can_be_named(found.ok_or(NoLibrary::NotFound(places))?)
}

fn can_be_named(library: PathBuf) -> Result<PathBuf, NoLibrary> {
    let marks = b" \t\n:$";
    if library.as_os_str().as_encoded_bytes().iter().any(|byte| marks.contains(byte)) {
        return Err(NoLibrary::NotNamed(library));
    }
    Ok(library)
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
        let text = NoLibrary::NotFound(all).to_string();
        assert!(text.contains("PINFOLD_PRELOAD") && text.contains("/opt/lib/"), "{text}");
    }

    #[test]
    fn a_path_that_the_linker_takes_for_another_is_refused() {
        assert!(can_be_named("/opt/pinfold-1.0/lib%/x.so".into()).is_ok());
        for path in ["/opt/my tools/x.so", "/opt/a:b/x.so", "/opt/$LIB/x.so"] {
            let refused = can_be_named(path.into()).unwrap_err().to_string();
            assert!(refused.contains(path) && refused.contains("another directory"), "{refused}");
        }
    }

    #[test]
    fn other_libraries_stay() {
        let ours = before_others(Path::new("/a.so"), None).into_string().unwrap();
        assert!(ours.starts_with("$ORIGIN/../..") && ours.ends_with("/../a.so"), "{ours}");
        let both = before_others(Path::new("/a.so"), Some("/b.so".into()));
        assert_eq!(both, OsString::from(ours + ":/b.so"));
    }
}
