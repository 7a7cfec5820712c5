//! Files of Open MPI's parameters: what in them counts before the variables of `pinfold run --for`.

use super::launcher::{LIST, place};
use super::settings::Middleware;
use super::warnings::sets;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

/// Where they are.
pub(super) struct Files {
    directories: Vec<PathBuf>,
}

/// What Open MPI reads last: a parameter in it counts whatever the environment says. All other files, and UCX's,
/// give way to the environment.
const OVERRIDE: &str = "openmpi-mca-params-override.conf";

impl Files {
    /// Those of a launcher, which is in the `bin` of its installation, and those of the whole machine.
    pub(super) fn of(launcher: &OsStr) -> Self {
        let place = place(launcher).and_then(|place| place.canonicalize().ok());
        let installed = place.as_deref().and_then(Path::parent).and_then(Path::parent);
        let named = std::env::var_os("OPAL_PREFIX").filter(|it| !it.is_empty()).map(PathBuf::from);
        let prefixes = named.iter().map(PathBuf::as_path).chain(installed);
        let beside = prefixes.flat_map(|it| [it.join("etc"), it.join("etc/openmpi")]);
        Self { directories: std::iter::once("/etc/openmpi".into()).chain(beside).collect() }
    }

    fn texts(&self, name: &str) -> impl Iterator<Item = (PathBuf, String)> {
        let paths = self.directories.iter().map(move |it| it.join(name));
        paths.filter_map(|path| fs::read_to_string(&path).ok().map(|text| (path, text)))
    }

    /// What parameters count whatever the environment says.
    pub(super) fn warnings(&self, middleware: Middleware) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for (path, text) in self.texts(OVERRIDE) {
            let how = format!("is set in {}", path.display());
            let set = parameters(&text);
            all.extend(set.filter_map(|(name, value)| {
                sets(middleware, &format!("OMPI_MCA_{name}"), value, &how)
            }));
        }
        all
    }

    /// The list of variables that a file has, for want of one in the environment: the user's, or a launcher's. The last line
    /// of a file counts.
    pub(super) fn list(&self) -> Option<OsString> {
        let home =
            std::env::var_os("HOME").map(|home| Path::new(&home).join(".openmpi/mca-params.conf"));
        let own = home.and_then(|path| fs::read_to_string(path).ok());
        let texts =
            own.into_iter().chain(self.texts("openmpi-mca-params.conf").map(|(_, text)| text));
        let list = |text: String| {
            parameters(&text)
                .filter(|(name, _)| *name == LIST)
                .last()
                .map(|(_, value)| value.into())
        };
        texts.filter_map(list).next()
    }
}

/// The lines `NAME = VALUE` of a file of Open MPI's parameters.
fn parameters(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.trim(), value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before a command line's own value, which Open MPI does not heed then.
    #[test]
    fn a_parameter_in_the_overriding_file_is_named_wherever_open_mpi_is() {
        let prefix = std::env::temp_dir().join(format!("pinfold-openmpi.{}", std::process::id()));
        let [bin, etc] = ["bin", "etc"].map(|name| prefix.join(name));
        [&bin, &etc].into_iter().for_each(|directory| fs::create_dir_all(directory).unwrap());
        let launcher = bin.join("mpirun");
        fs::write(&launcher, "").unwrap();
        fs::write(etc.join(OVERRIDE), "# memory = patcher\nmemory_more = 1\n memory = patcher \n")
            .unwrap();
        let lists = "mca_base_env_list = C\nmca_base_env_list = A;B\n";
        fs::write(etc.join("openmpi-mca-params.conf"), lists).unwrap();
        let files = Files::of(launcher.as_os_str());
        let warnings = files.warnings(Middleware::Mpi);
        let (list, ucx) = (files.list(), files.warnings(Middleware::Ucx));
        fs::remove_dir_all(&prefix).unwrap();
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        assert!(warning.contains(OVERRIDE) && warning.contains("\"patcher\""), "{warning}");
        assert!(list.is_some_and(|list| list == "A;B") && ucx.is_empty());
    }
}
