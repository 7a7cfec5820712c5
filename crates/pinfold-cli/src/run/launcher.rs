//! Launchers of parallel jobs, and how each sends variables to the ranks on other machines.

use pinfold_kernel::signal::SignalsBlocked;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Programs that start the ranks of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Launcher {
    /// Sends the variables along that `-x` names.
    OpenMpi,
    /// Sends all variables along: MPICH's, Intel's and MVAPICH's launcher, and Slurm's.
    SendsAll,
    /// Starts ranks, but what it sends along is not known.
    Unknown,
}

/// How the names of launchers begin that say by `--version` whose they are.
const LAUNCHERS: [&str; 7] = ["mpirun", "mpiexec", "orterun", "prterun", "prun", "oshrun", "srun"];

/// Launchers that are not asked.
const OTHERS: [&str; 6] = ["aprun", "flux", "ibrun", "jsrun", "poe", "shmemrun"];

/// Programs that start another one, which may be a launcher.
const WRAPPERS: [&str; 16] = [
    "bash", "chrt", "dash", "env", "ionice", "ksh", "nice", "nohup", "numactl", "setsid", "sh",
    "stdbuf", "taskset", "time", "timeout", "zsh",
];

/// How long a launcher may take to say its version.
const PATIENCE: Duration = Duration::from_secs(5);

fn file_name(program: &OsStr) -> String {
    Path::new(program).file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a name is that of `known`, without what Debian and others append (`mpirun.openmpi`, `mpirun-4.1`).
fn is(name: &str, known: &str) -> bool {
    let rest = name.strip_prefix(known);
    rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_alphanumeric()))
}

/// Whether a program, found as a shell finds it, starts another one: by its name, or as a script.
pub(super) fn is_wrapper(program: &OsStr) -> bool {
    let mut beginning = [0; 2];
    let read =
        |mut file: std::fs::File| file.read_exact(&mut beginning).is_ok() && beginning == *b"#!";
    WRAPPERS.contains(&&*file_name(program))
        || place(program).and_then(|path| std::fs::File::open(path).ok()).is_some_and(read)
}

/// The file that a program's name stands for.
pub(super) fn place(program: &OsStr) -> Option<std::path::PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|it| it.is_file())
}

impl Launcher {
    /// Whether a program of this name is a launcher, by its name alone.
    pub(super) fn is_one(program: &OsStr) -> bool {
        let name = file_name(program);
        LAUNCHERS.iter().chain(&OTHERS).any(|known| is(&name, known))
    }

    /// Which launcher a program is, by what it says of its version. `None` if it is none.
    pub(super) fn of(program: &OsStr) -> Option<Self> {
        let name = file_name(program);
        if LAUNCHERS.iter().any(|known| is(&name, known)) {
            return Some(Self::that_says(&version(program)));
        }
        Self::is_one(program).then_some(Self::Unknown)
    }

    fn that_says(version: &str) -> Self {
        let says = |names: &[&str]| names.iter().any(|name| version.contains(name));
        if says(&["Open MPI", "OpenRTE", "PRTE", "PRRTE"]) {
            Self::OpenMpi
        } else if says(&["HYDRA", "Hydra", "Intel(R) MPI", "slurm"]) {
            Self::SendsAll
        } else {
            Self::Unknown
        }
    }
}

/// What `--version` prints in the time that it has.
fn version(program: &OsStr) -> String {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = command.spawn() else { return String::new() };
    let (sender, receiver) = mpsc::channel();
    let streams: [Option<Box<dyn Read + Send>>; 2] = [
        child.stdout.take().map(|it| Box::new(it) as _),
        child.stderr.take().map(|it| Box::new(it) as _),
    ];
    // A grandchild may keep one of these threads for ever. Signals are the first thread's, which knows where to send them.
    let blocked = SignalsBlocked::new();
    for mut stream in streams.into_iter().flatten() {
        let sender = sender.clone();
        thread::spawn(move || {
            let mut said = Vec::new();
            let _ = stream.read_to_end(&mut said);
            sender.send(said)
        });
    }
    drop(blocked);
    drop(sender);
    let until = Instant::now() + PATIENCE;
    let next = || receiver.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
    let said: Vec<_> = std::iter::from_fn(next).flatten().collect();
    // One that has closed its output and goes on is not waited for either.
    let _ = child.kill();
    let _ = child.wait();
    String::from_utf8_lossy(&said).into_owned()
}

/// Open MPI's other way to send variables, which excludes `-x`: version 4 ends with an error where it is given both.
pub(super) const LIST: &str = "mca_base_env_list";
/// The same, as a variable.
pub(super) const LIST_VARIABLE: &str = "OMPI_MCA_mca_base_env_list";

/// Open MPI's arguments, with all variables of these names sent to the ranks of every program, which colons part. Where the
/// user has a list of variables, in the arguments or `elsewhere`, the names are in that list. The second is that list's new
/// value, where it is not in the arguments.
pub(super) fn forwarding(
    names: &[OsString],
    words: &[OsString],
    elsewhere: Option<OsString>,
) -> (Vec<OsString>, Option<OsString>) {
    if (0..words.len()).any(|at| is_list(words, at)) {
        let word = |(at, word): (usize, &OsString)| match is_list(words, at) {
            true => longer(word.clone(), names),
            false => word.clone(),
        };
        return (words.iter().enumerate().map(word).collect(), None);
    }
    if let Some(list) = elsewhere {
        return (words.to_vec(), Some(longer(list, names)));
    }
    let flags = || names.iter().flat_map(|name| ["-x".into(), name.clone()]);
    let begun = words.iter().flat_map(|word| {
        std::iter::once(word.clone()).chain((word == ":").then(flags).into_iter().flatten())
    });
    (flags().chain(begun).collect(), None)
}

/// Whether a word is the list of variables: behind an option and the parameter's name.
fn is_list(words: &[OsString], at: usize) -> bool {
    at >= 2
        && words[at - 1] == LIST
        && ["-mca", "--mca", "-gmca", "--gmca", "-omca", "--omca"]
            .iter()
            .any(|it| words[at - 2] == *it)
}

/// A list with those names that it has not: Open MPI 4 takes the last value of a variable, which is not the user's then, and
/// version 5 ends with an error where two differ.
fn longer(mut list: OsString, names: &[OsString]) -> OsString {
    let own = list.clone();
    let entries = own.as_encoded_bytes().split(|byte| *byte == b';');
    let listed: Vec<_> = entries.filter_map(|it| it.split(|byte| *byte == b'=').next()).collect();
    for name in names.iter().filter(|name| !listed.contains(&name.as_encoded_bytes())) {
        if !list.is_empty() {
            list.push(";");
        }
        list.push(name);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn launchers_are_told_by_their_name_and_version() {
        for name in [
            "mpirun",
            "/usr/bin/mpiexec.hydra",
            "mpirun.openmpi",
            "srun",
            "mpirun-4.1",
            "mpirun_rsh",
            "aprun",
        ] {
            assert!(Launcher::is_one(OsStr::new(name)), "{name}");
        }
        for name in ["./my_mpirun", "sruns", "prunes"] {
            assert!(!Launcher::is_one(OsStr::new(name)), "{name}");
        }
        assert_eq!(Launcher::of(OsStr::new("true")), None);
        assert_eq!(Launcher::of(OsStr::new("/no/such/flux")), Some(Launcher::Unknown));
        assert_eq!(Launcher::that_says("mpirun.openmpi (OpenRTE) 4.1.4"), Launcher::OpenMpi);
        assert_eq!(Launcher::that_says("mpirun (Open MPI) 5.0.7"), Launcher::OpenMpi);
        assert_eq!(Launcher::that_says("HYDRA build details:"), Launcher::SendsAll);
        assert_eq!(Launcher::that_says("slurm 22.05.8"), Launcher::SendsAll);
        assert_eq!(Launcher::that_says(""), Launcher::Unknown);
    }

    #[test]
    fn programs_that_start_others_are_shells_and_scripts() {
        assert!(is_wrapper(OsStr::new("/usr/bin/env")) && is_wrapper(OsStr::new("time")));
        assert!(!is_wrapper(OsStr::new("/proc/self/exe")) && !is_wrapper(OsStr::new("/no/such")));
    }

    #[test]
    fn open_mpi_wants_each_variable_named_for_each_program() {
        let names = words("LD_PRELOAD FI_X");
        let (two, list) = forwarding(&names, &words("-n 1 ./a : -n 1 ./b"), None);
        assert_eq!(two, words("-x LD_PRELOAD -x FI_X -n 1 ./a : -x LD_PRELOAD -x FI_X -n 1 ./b"));
        assert_eq!(list, None);
    }

    #[test]
    fn a_list_of_variables_excludes_naming_them_otherwise() {
        let names = words("LD_PRELOAD FI_X");
        let argument = words("-n 2 --mca mca_base_env_list A=1;B ./a");
        let longer = words("-n 2 --mca mca_base_env_list A=1;B;LD_PRELOAD;FI_X ./a");
        assert_eq!(forwarding(&names, &argument, Some("C".into())), (longer, None));
        let other = words("-n 2 ./a");
        for (list, now) in [
            ("C", "C;LD_PRELOAD;FI_X"),
            ("", "LD_PRELOAD;FI_X"),
            ("FI_X=1;LD_PRELOADS", "FI_X=1;LD_PRELOADS;LD_PRELOAD"),
        ] {
            let forwarded = forwarding(&names, &other, Some(list.into()));
            assert_eq!(forwarded, (other.clone(), Some(now.into())));
        }
    }
}
