//! What MPI, UCX and libfabric need so that registrations come down to this library: their own caches off.
//!
//! A middleware's cache above this one would keep registrations that it believes to be current, and none of
//! them sees every change of a mapping. So `pinfold run --for` switches those caches off by the variables
//! that each version knows. A variable that the user has set already keeps the user's value; where that value
//! leaves a cache on, this is reported before the job starts.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, Stdio};

/// Which layer's registrations a job makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Middleware {
    /// Any MPI, over whatever it uses: UCX, libfabric, libibverbs itself
    Mpi,
    /// Programs that use UCX themselves
    Ucx,
    /// Programs that use libfabric themselves
    Libfabric,
}

/// Which library reads a variable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reader {
    Pinfold,
    Ucx,
    Libfabric,
    /// Open MPI: the value of an MCA parameter, whose name follows `OMPI_MCA_`.
    OpenMpi,
    Mvapich,
}

/// A variable that is set for a job.
#[derive(Clone, Copy, Debug)]
struct Setting {
    reader: Reader,
    name: &'static str,
    value: &'static str,
    /// What goes on if the variable has another value. Empty: nothing dangerous.
    otherwise: &'static str,
}

const fn setting(
    reader: Reader,
    name: &'static str,
    value: &'static str,
    otherwise: &'static str,
) -> Setting {
    Setting { reader, name, value, otherwise }
}

/// Every variable, for all versions: one that a version does not know is ignored by it.
///
/// `UCX_IB_REG_METHODS` is known until 1.15, `UCX_RCACHE_ENABLE` from 1.11 on (tried with 1.13.1), and with
/// both an old and a new version caches nothing. `FI_MR_CACHE_MAX_COUNT` is known from 1.5 on (tried with
/// 1.17). The parameters of Open MPI are those of 4.1 and 5.0 (tried with 4.1.4).
const SETTINGS: [Setting; 12] = [
    setting(Reader::Pinfold, "PINFOLD_CACHE_REMOTE", "on", ""),
    // Heeded where libfabric's cache stays on: of no use to other jobs.
    setting(Reader::Libfabric, "PINFOLD_LIBFABRIC", "on", ""),
    setting(Reader::Ucx, "UCX_RCACHE_ENABLE", "n", "UCX keeps registrations itself"),
    setting(
        Reader::Ucx,
        "UCX_IB_REG_METHODS",
        "direct",
        "UCX before 1.16 keeps registrations itself",
    ),
    setting(Reader::Ucx, "UCX_MEM_EVENTS", "n", "UCX patches the C library's functions"),
    setting(Reader::Ucx, "UCX_WARN_UNUSED_ENV_VARS", "n", ""),
    setting(
        Reader::Libfabric,
        "FI_MR_CACHE_MAX_COUNT",
        "0",
        "libfabric keeps registrations itself, and asks Pinfold's monitor where it can",
    ),
    setting(
        Reader::OpenMpi,
        "OMPI_MCA_memory",
        "^patcher",
        "Open MPI patches the C library's functions",
    ),
    setting(
        Reader::OpenMpi,
        "OMPI_MCA_opal_common_ucx_opal_mem_hooks",
        "0",
        "Open MPI patches the C library's functions for UCX",
    ),
    setting(
        Reader::OpenMpi,
        "OMPI_MCA_mpi_leave_pinned",
        "0",
        "Open MPI keeps registrations itself where it uses libibverbs without UCX",
    ),
    setting(
        Reader::OpenMpi,
        "OMPI_MCA_mpi_leave_pinned_pipeline",
        "0",
        "Open MPI keeps registrations of long messages itself",
    ),
    setting(
        Reader::Mvapich,
        "MV2_USE_LAZY_MEM_UNREGISTER",
        "0",
        "MVAPICH keeps registrations itself",
    ),
];

/// What `pinfold run --for` does to a job before it starts.
#[derive(Debug, Default)]
pub(crate) struct Preparation {
    /// Variables to set.
    pub(crate) variables: Vec<(&'static str, &'static str)>,
    /// What stays dangerous or unclear, a sentence each.
    pub(crate) warnings: Vec<String>,
}

impl Middleware {
    /// Whether a variable of `reader` is set for this kind of job.
    fn needs(self, reader: Reader) -> bool {
        match (self, reader) {
            (Self::Mpi, _) | (_, Reader::Pinfold) => true,
            (Self::Ucx, reader) => reader == Reader::Ucx,
            (Self::Libfabric, reader) => reader == Reader::Libfabric,
        }
    }

    /// The variables for a job, each as `set` says that the user has set it or not, the arguments as the user gave
    /// them, and the text of [`OVERRIDE`].
    pub(crate) fn prepare(
        self,
        set: impl Fn(&str) -> Option<OsString>,
        arguments: &[OsString],
        overriding: &str,
    ) -> Preparation {
        let mut preparation = Preparation::default();
        for setting in SETTINGS.iter().filter(|setting| self.needs(setting.reader)) {
            let overridden = setting.parameter().and_then(|it| value_in_file(overriding, it));
            let given = overridden.map(OsString::from).or_else(|| setting.among(arguments));
            match given.or_else(|| set(setting.name)) {
                None => preparation.variables.push((setting.name, setting.value)),
                Some(value) => preparation.warnings.extend(setting.conflict(&value)),
            }
        }
        preparation
    }
}

impl Setting {
    /// The parameter of Open MPI that the variable sets.
    fn parameter(&self) -> Option<&'static str> {
        self.name.strip_prefix("OMPI_MCA_")
    }

    /// The value that an argument of a launcher gives to the same variable or parameter: `--mca NAME VALUE` and
    /// `-x NAME=VALUE` of Open MPI, `-genv NAME VALUE` and `-env NAME VALUE` of MPICH.
    fn among(&self, arguments: &[OsString]) -> Option<OsString> {
        let parameter = self.parameter();
        (0..arguments.len()).find_map(|at| match &arguments[at..] {
            [flag, pair, ..] if flag == "-x" => value_in(pair, self.name),
            [flag, name, value, ..] => match flag.to_str()? {
                "--mca" | "-mca" | "--gmca" | "-gmca" => parameter.is_some_and(|it| name == it),
                "-genv" | "-env" => name == self.name,
                _ => false,
            }
            .then(|| value.clone()),
            _ => None,
        })
    }

    /// What the user's own value leaves on.
    fn conflict(&self, value: &OsStr) -> Option<String> {
        if value == self.value || self.otherwise.is_empty() {
            return None;
        }
        let value = value.to_string_lossy();
        Some(format!(
            "{name} is set to {value:?}, so {what}, and what it keeps may be stale; unset it or say {name}={wanted}",
            name = self.name,
            what = self.otherwise,
            wanted = self.value,
        ))
    }
}

/// The value of `name` in `NAME=VALUE`.
fn value_in(pair: &OsStr, name: &str) -> Option<OsString> {
    let value = pair.to_str()?.strip_prefix(name)?.strip_prefix('=')?;
    Some(value.into())
}

/// What Open MPI reads last: a parameter in it counts whatever the environment says. All other files, and UCX's,
/// give way to the environment.
pub(crate) const OVERRIDE: &str = "/etc/openmpi/openmpi-mca-params-override.conf";

/// The value of `parameter` in a file of Open MPI's parameters.
fn value_in_file(text: &str, parameter: &str) -> Option<String> {
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let mut ours = pairs.filter(|(name, _)| name.trim() == parameter);
    ours.next().map(|(_, value)| value.trim().into())
}

/// Programs that start the ranks of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Launcher {
    /// Sends the variables along that `-x` names.
    OpenMpi,
    /// Sends all variables along: MPICH's, Intel's and MVAPICH's launcher, and Slurm's.
    SendsAll,
    /// Starts ranks, but what it sends along is not known.
    Unknown,
}

/// The names of launchers, without what Debian and others append behind a dot.
const LAUNCHERS: [&str; 8] =
    ["mpirun", "mpiexec", "orterun", "prterun", "prun", "srun", "mpiexec_mpt", "jsrun"];

impl Launcher {
    /// Whether a program of this name is a launcher, by its name alone.
    pub(crate) fn is_one(program: &OsStr) -> bool {
        let name = Path::new(program).file_name().unwrap_or_default().to_string_lossy();
        let base = name.split('.').next().unwrap_or_default();
        LAUNCHERS.contains(&base)
    }

    /// Which launcher a program is, by what it says of its version. `None` if it is none.
    pub(crate) fn of(program: &OsStr) -> Option<Self> {
        if !Self::is_one(program) {
            return None;
        }
        let said = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok();
        let said = said.map(|said| [said.stdout, said.stderr].concat()).unwrap_or_default();
        Some(Self::that_says(&String::from_utf8_lossy(&said)))
    }

    fn that_says(version: &str) -> Self {
        if ["Open MPI", "OpenRTE", "PRTE", "PRRTE"].iter().any(|name| version.contains(name)) {
            Self::OpenMpi
        } else if ["HYDRA", "Hydra", "Intel(R) MPI", "slurm"]
            .iter()
            .any(|name| version.contains(name))
        {
            Self::SendsAll
        } else {
            Self::Unknown
        }
    }

    /// The arguments that have these variables sent to ranks on other machines.
    pub(crate) fn forwarding(self, names: impl Iterator<Item = &'static str>) -> Vec<OsString> {
        match self {
            Self::OpenMpi => names.flat_map(|name| ["-x".into(), name.into()]).collect(),
            Self::SendsAll | Self::Unknown => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn names(middleware: Middleware) -> Vec<&'static str> {
        let preparation = middleware.prepare(|_| None, &[], "");
        assert!(preparation.warnings.is_empty());
        preparation.variables.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn each_kind_of_job_gets_its_own_variables() {
        assert_eq!(names(Middleware::Mpi).len(), SETTINGS.len());
        let ucx = names(Middleware::Ucx);
        assert!(ucx.contains(&"UCX_RCACHE_ENABLE") && ucx.contains(&"PINFOLD_CACHE_REMOTE"));
        assert!(!ucx.iter().any(|name| name.starts_with("FI_") || name.starts_with("OMPI_")));
        let libfabric = names(Middleware::Libfabric);
        assert_eq!(
            libfabric,
            ["PINFOLD_CACHE_REMOTE", "PINFOLD_LIBFABRIC", "FI_MR_CACHE_MAX_COUNT"]
        );
    }

    #[test]
    fn what_the_user_has_set_stays_and_is_named_where_it_is_dangerous() {
        let set = |name: &str| match name {
            "UCX_RCACHE_ENABLE" => Some("y".into()),
            "FI_MR_CACHE_MAX_COUNT" => Some("0".into()),
            "UCX_WARN_UNUSED_ENV_VARS" => Some("y".into()),
            _ => None,
        };
        let preparation = Middleware::Mpi.prepare(set, &[], "");
        assert_eq!(preparation.variables.len(), SETTINGS.len() - 3);
        let [warning] = &preparation.warnings[..] else { panic!("{:?}", preparation.warnings) };
        assert!(warning.contains("UCX_RCACHE_ENABLE=n") && warning.contains("\"y\""), "{warning}");
        assert!(warning.len() < 200, "{}", warning.len());
    }

    #[test]
    fn a_launcher_s_own_parameter_counts_as_set() {
        let arguments = words("--mca memory patcher -n 2 ./a.out");
        let preparation = Middleware::Mpi.prepare(|_| None, &arguments, "");
        assert!(!preparation.variables.iter().any(|&(name, _)| name == "OMPI_MCA_memory"));
        assert!(preparation.warnings[0].contains("\"patcher\""), "{:?}", preparation.warnings);
        let same = Middleware::Mpi.prepare(|_| None, &words("-mca memory ^patcher ./a.out"), "");
        assert!(same.warnings.is_empty());
    }

    #[test]
    fn what_a_launcher_is_to_set_in_the_ranks_counts_as_set() {
        for arguments in [
            "-n 2 -x UCX_RCACHE_ENABLE=y -x LD_PRELOAD ./a.out",
            "-genv UCX_RCACHE_ENABLE y ./a.out",
            "-n 2 -env UCX_RCACHE_ENABLE y ./a.out",
        ] {
            let preparation = Middleware::Mpi.prepare(|_| None, &words(arguments), "");
            let is_ours = |&(name, _): &(&str, &str)| name == "UCX_RCACHE_ENABLE";
            assert!(!preparation.variables.iter().any(is_ours), "{arguments}");
            assert!(preparation.warnings[0].contains("\"y\""), "{:?}", preparation.warnings);
        }
        let longer = words("-x UCX_RCACHE_ENABLE_MORE=y -x");
        assert!(Middleware::Mpi.prepare(|_| None, &longer, "").warnings.is_empty());
    }

    /// Before a command line's own value, which Open MPI does not heed then.
    #[test]
    fn a_parameter_in_the_overriding_file_counts_as_set() {
        let file = "# memory = patcher\nmemory_more = 1\n memory = patcher \n";
        let own = words("--mca memory ^patcher ./a.out");
        let preparation = Middleware::Mpi.prepare(|_| None, &own, file);
        let [warning] = &preparation.warnings[..] else { panic!("{:?}", preparation.warnings) };
        assert!(warning.contains("\"patcher\""), "{warning}");
        assert!(Middleware::Ucx.prepare(|_| None, &own, file).warnings.is_empty());
    }

    #[test]
    fn launchers_are_told_by_their_name_and_version() {
        for name in ["mpirun", "/usr/bin/mpiexec.hydra", "mpirun.openmpi", "srun"] {
            assert!(Launcher::is_one(OsStr::new(name)), "{name}");
        }
        assert!(!Launcher::is_one(OsStr::new("./my_mpirun")));
        assert_eq!(Launcher::of(OsStr::new("true")), None);
        assert_eq!(Launcher::that_says("mpirun.openmpi (OpenRTE) 4.1.4"), Launcher::OpenMpi);
        assert_eq!(Launcher::that_says("mpirun (Open MPI) 5.0.7"), Launcher::OpenMpi);
        assert_eq!(Launcher::that_says("HYDRA build details:"), Launcher::SendsAll);
        assert_eq!(Launcher::that_says("slurm 22.05.8"), Launcher::SendsAll);
        assert_eq!(Launcher::that_says(""), Launcher::Unknown);
    }

    #[test]
    fn only_open_mpi_wants_each_variable_named() {
        let forwarded = Launcher::OpenMpi.forwarding(["LD_PRELOAD", "UCX_MEM_EVENTS"].into_iter());
        assert_eq!(forwarded, words("-x LD_PRELOAD -x UCX_MEM_EVENTS"));
        assert!(Launcher::SendsAll.forwarding(["LD_PRELOAD"].into_iter()).is_empty());
    }
}
