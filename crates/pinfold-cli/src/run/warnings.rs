//! What a launcher's arguments and lists of variables do against the variables of `pinfold run --for`, said before the
//! job starts.
//!
//! Arguments are looked at up to the program's name. Which word that is depends on how many values each option has:
//! behind an option that is not in the table, what is found is only said to be possible.

use super::launcher::LIST;
use super::settings::Middleware;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// What an option of a launcher is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum About {
    /// A variable for the ranks: `NAME=VALUE`; `NAME` alone has the environment's value.
    Pair,
    /// The same, or `NAME VALUE`.
    Variable,
    /// A parameter of Open MPI: `NAME VALUE`.
    Parameter,
    /// No variables are sent.
    SendsNone,
    /// Only the variables that a list names are sent.
    SendsOnly,
    /// Slurm's: those that a list names, and all if it has `ALL`.
    Export,
    /// A file that sets parameters and variables.
    File,
    /// Open MPI's: a file that has the programs of the job, and all options.
    Programs,
    /// Nothing of interest, with one value, or with none.
    Other,
    Flag,
}

/// The options of Open MPI, MPICH and Slurm that are known, without their dashes.
const OPTIONS: [(About, &str); 10] = [
    (About::Pair, "x"),
    (About::Variable, "genv env"),
    // PRRTE's and PMIx's have no name that is looked for.
    (About::Parameter, "mca gmca omca gomca prtemca pmixmca gpmixmca"),
    (About::SendsNone, "genvnone envnone"),
    (About::SendsOnly, "genvlist envlist"),
    (About::Export, "export"),
    (About::File, "tune am amca configfile"),
    (About::Programs, "app"),
    (
        About::Other,
        "n np c N H f p t host hosts hostfile machinefile wdir wd path prefix ppn map-by bind-to \
         rank-by npernode ntasks nodes rankfile launcher",
    ),
    (
        About::Flag,
        "oversubscribe allow-run-as-root report-bindings tag-output l q v genvall envall",
    ),
];

/// An option before a program's name.
#[derive(Debug)]
struct Found {
    option: String,
    about: About,
    values: Vec<String>,
    /// Whether it is the launcher's for sure, and not the program's.
    sure: bool,
}

/// The options that a launcher's arguments have before the names of programs, which colons part.
fn options(words: &[OsString]) -> Vec<Found> {
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    words.split(|word| word == ":").flat_map(options_of_one).collect()
}

fn options_of_one(mut words: &[String]) -> Vec<Found> {
    let (mut all, mut sure) = (Vec::new(), true);
    while let [option, rest @ ..] = words {
        let Some(name) = option.strip_prefix('-') else { break };
        words = rest;
        let name = name.trim_start_matches('-');
        let (name, inline) =
            name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
        let Some((about, _)) =
            OPTIONS.iter().find(|(_, names)| names.split(' ').any(|it| it == name))
        else {
            let is_attached = !option.starts_with("--") && has_attached(name);
            if !is_attached
                && inline.is_none()
                && words.first().is_some_and(|next| !next.starts_with('-'))
            {
                (words, sure) = (&words[1..], false);
            }
            continue;
        };
        let mut values: Vec<String> = inline.map(String::from).into_iter().collect();
        while values.len() < about.values(&values) && !words.is_empty() {
            values.push(words[0].clone());
            words = &words[1..];
        }
        all.push(Found { option: option.clone(), about: *about, values, sure });
    }
    all
}

/// Whether an option's name is a letter with its value, as in `-n2`.
fn has_attached(name: &str) -> bool {
    matches!(name.as_bytes(), [letter, digit, ..] if letter.is_ascii_alphabetic() && digit.is_ascii_digit())
}

impl About {
    /// How many values the option has, of which these are the first.
    fn values(self, first: &[String]) -> usize {
        match self {
            Self::SendsNone | Self::Flag => 0,
            Self::Parameter => 2,
            Self::Variable if first.first().is_none_or(|it| !it.contains('=')) => 2,
            _ => 1,
        }
    }
}

/// What the arguments of a launcher do against the variables of these names.
pub(super) fn of_arguments(
    middleware: Middleware,
    words: &[OsString],
    names: &[OsString],
) -> Vec<String> {
    options(words).iter().flat_map(|found| found.warnings(middleware, names)).collect()
}

impl Found {
    fn warnings(&self, middleware: Middleware, names: &[OsString]) -> Vec<String> {
        let how = if self.sure { "is set by an argument" } else { "may be set by an argument" };
        let set = self.assigned().into_iter();
        let set = set.filter_map(|(name, value)| sets(middleware, &name, value, how));
        self.of_sending(names).into_iter().chain(set).collect()
    }

    /// The variables of the ranks that have a value by this.
    fn assigned(&self) -> Vec<(String, &str)> {
        match (self.about, &self.values[..]) {
            (About::Pair | About::Variable, [pair]) => pairs([&**pair]),
            (About::Variable, [name, value]) => vec![(name.clone(), value)],
            (About::Parameter, [name, list]) if name == LIST => pairs(list.split(';')),
            (About::Parameter, [name, value]) => vec![(format!("OMPI_MCA_{name}"), value)],
            (About::Export, [list]) => pairs(list.split(',')),
            _ => Vec::new(),
        }
    }

    /// What this does to the variables that are sent.
    fn of_sending(&self, names: &[OsString]) -> Option<String> {
        let (option, does) = (&self.option, if self.sure { "sends" } else { "may send" });
        let whose = if self.sure { "" } else { " (which may be the program's)" };
        let what = match (self.about, &self.values[..]) {
            (About::SendsNone, _) => "no variables",
            (About::SendsOnly, [list]) if !has_all(list, names) => "only some variables",
            (About::Export, [list]) if !exports_all(list) && !has_all(list, names) => {
                "only some variables"
            }
            (About::File, [file]) => {
                return Some(format!(
                    "{option} {file}{whose}: what this file sets counts before these variables, and is not looked at"
                ));
            }
            (About::Programs, [file]) => {
                return Some(format!(
                    "{option} {file}{whose}: no other option counts next to it, so each line of this file needs -x LD_PRELOAD, and \
                     -x for PINFOLD_* and the variables of its middleware, for ranks on other machines"
                ));
            }
            _ => return None,
        };
        Some(format!(
            "{option} {does} {what} to the ranks, which need LD_PRELOAD, PINFOLD_* and those of their middleware"
        ))
    }
}

/// Those that have a value.
fn pairs<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<(String, &'a str)> {
    let pairs = words.into_iter().filter_map(|word| word.split_once('='));
    pairs.map(|(name, value)| (name.into(), value)).collect()
}

fn has_all(list: &str, names: &[OsString]) -> bool {
    let listed = || list.split(',').map(|it| it.split_once('=').map_or(it, |(name, _)| name));
    names.iter().all(|name| listed().any(|listed| *name == *listed))
}

/// Whether a list of Slurm's sends all variables.
fn exports_all(list: &str) -> bool {
    list.split(',').any(|word| word.eq_ignore_ascii_case("all"))
}

/// What it means that a variable of the ranks is set.
pub(super) fn sets(middleware: Middleware, name: &str, value: &str, how: &str) -> Option<String> {
    if name == "LD_PRELOAD" {
        return Some(format!(
            "{name} {how} to {value:?}: the ranks are started without Pinfold's library"
        ));
    }
    middleware.setting(name)?.conflict(name, OsStr::new(value), how)
}

/// What variables other than those of a middleware do where the launcher sends all others: Slurm's list of those to send,
/// and MPICH's choice.
pub(super) fn of_environment(
    launcher: &OsStr,
    set: impl Fn(&str) -> Option<OsString>,
) -> Option<String> {
    let is_slurm = Path::new(launcher).file_name().is_some_and(|name| name == "srun");
    let (name, option) =
        if is_slurm { ("SLURM_EXPORT_ENV", "--export=ALL") } else { ("HYDRA_ENV", "-genvall") };
    let value = set(name)?.to_string_lossy().into_owned();
    let sends_all = value.is_empty() || if is_slurm { exports_all(&value) } else { value == "all" };
    (!sends_all).then(|| {
        let launcher = launcher.display();
        format!("{name}={value}: {launcher} does not send all variables to the ranks; say {option}")
    })
}

/// What Open MPI's list of variables does, which stands in a variable or in a file.
pub(super) fn of_list(middleware: Middleware, list: &OsStr) -> Vec<String> {
    let (list, how) = (list.to_string_lossy(), format!("is set by {LIST}"));
    let pairs = pairs(list.split(';')).into_iter();
    pairs.filter_map(|(name, value)| sets(middleware, name.trim(), value, &how)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn said(arguments: &str) -> Vec<String> {
        of_arguments(Middleware::Mpi, &words(arguments), &words("LD_PRELOAD FI_X"))
    }

    #[test]
    fn each_way_to_set_something_else_is_named_once() {
        for (arguments, part) in [
            (
                "--mca memory patcher -n 2 ./a.out",
                "OMPI_MCA_memory is set by an argument to \"patcher\"",
            ),
            ("-n 2 --omca opal_leave_pinned 1 ./a.out", "OMPI_MCA_opal_leave_pinned is set"),
            ("-n 2 -x UCX_RCACHE_ENABLE=y -x LD_PRELOAD ./a.out", "to \"y\""),
            ("--x UCX_RCACHE_ENABLE=y ./a.out", "to \"y\""),
            ("-x LD_PRELOAD=/b.so ./a.out", "without Pinfold's library"),
            ("-mca mca_base_env_list A;UCX_RCACHE_ENABLE=y ./a.out", "to \"y\""),
            ("-genv UCX_RCACHE_ENABLE y ./a.out", "to \"y\""),
            ("-genv UCX_RCACHE_ENABLE=y ./a.out", "to \"y\""),
            ("-n 2 -env UCX_RCACHE_ENABLE y ./a.out", "to \"y\""),
            ("-n 1 ./a.out : -n 1 -env UCX_RCACHE_ENABLE y ./b.out", "to \"y\""),
            ("-genvnone -n 2 ./a.out", "-genvnone sends no variables"),
            ("-envlist PATH,LD_PRELOAD ./a.out", "only some variables"),
            ("--export=NONE ./a.out", "--export=NONE sends only some"),
            ("--export PATH ./a.out", "only some variables"),
            ("--export=ALL,UCX_RCACHE_ENABLE=y ./a.out", "to \"y\""),
            ("--tune file ./a.out", "file: what this file sets"),
            ("--amca file ./a.out", "file: what this file sets"),
            ("-configfile file", "file: what this file sets"),
            ("--app file", "each line of this file needs -x LD_PRELOAD"),
            ("--frobnicate 3 --mca memory patcher ./a.out", "may be set by an argument"),
            ("--exclusive ./a.out --configfile b", "--configfile b (which may be the program's)"),
            ("--prtemca a b --pmixmca c d --mca memory patcher ./a.out", "memory is set by"),
        ] {
            let warnings = said(arguments);
            let [warning] = &warnings[..] else { panic!("{arguments}: {warnings:?}") };
            assert!(warning.contains(part) && warning.len() < 240, "{arguments}: {warning}");
        }
    }

    #[test]
    fn what_means_the_same_or_is_the_program_s_is_not_named() {
        for arguments in [
            "-n 2 ./a.out --mca memory patcher",
            "-n 1 ./a.out -x UCX_RCACHE_ENABLE=y : -n 1 ./b.out -genvnone",
            "-mca memory ^patcher,ucx -x FI_MR_CACHE_MAX_COUNT=0x0 ./a.out",
            "--export=ALL -n2",
            "-n2 -N1-2 -t1:00:00 ./a.out --configfile b --mca memory patcher",
            "-genvlist PATH,FI_X,LD_PRELOAD ./a.out",
            "--export=PATH,FI_X=1,LD_PRELOAD -n2 ./a.out",
            "-x UCX_RCACHE_ENABLE_MORE=y -x",
            "--mca",
        ] {
            assert_eq!(said(arguments), [""; 0], "{arguments}");
        }
    }

    #[test]
    fn lists_of_variables_in_the_environment_are_read() {
        let set = |name: &str| (name == "SLURM_EXPORT_ENV").then(|| "NONE".into());
        assert!(of_environment(OsStr::new("/usr/bin/srun"), set).is_some());
        assert!(of_environment(OsStr::new("mpirun"), set).is_none());
        assert!(of_environment(OsStr::new("srun"), |_| None).is_none());
        let said = |value: &'static str| {
            let set = |name: &str| (name == "HYDRA_ENV").then(|| value.into());
            of_environment(OsStr::new("mpiexec"), set)
        };
        assert!(said("all").is_none() && said("none").unwrap().ends_with("say -genvall"));
        let open_mpi = of_list(Middleware::Mpi, OsStr::new("A; UCX_RCACHE_ENABLE=y"));
        assert!(open_mpi.len() == 1 && open_mpi[0].contains("env_list to \"y\""), "{open_mpi:?}");
    }
}
