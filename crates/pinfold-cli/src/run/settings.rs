//! What MPI, UCX and libfabric need so that registrations come down to this library: their own caches off.
//!
//! A middleware's cache above this one would keep registrations that it believes to be current, and none of
//! them sees every change of a mapping. So `pinfold run --for` switches those caches off by the variables
//! that each version knows. A variable that the user has set already keeps the user's value; where that value
//! leaves a cache on, this is reported before the job starts.

use std::ffi::{OsStr, OsString};

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

/// Which values of a variable leave nothing dangerous on, as its reader takes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Harmless {
    Any,
    /// A number that is zero, also in hexadecimal digits.
    Zero,
    /// One of these words in any case, and of those in this case.
    Words(&'static [&'static str], &'static [&'static str]),
    /// A list that does not have this word.
    Without(&'static str),
    /// Open MPI's choice of components: this one is not chosen.
    NotChosen(&'static str),
}

const UCX_NO: Harmless = Harmless::Words(&["n", "no"], &["off", "0"]);
const LIBFABRIC_NO: Harmless = Harmless::Words(&["false", "no", "off"], &["0"]);
const OPEN_MPI_NO: Harmless = Harmless::Words(&[], &["0", "false", "f", "disabled", "no", "n"]);

impl Harmless {
    fn has(self, value: &str) -> bool {
        let value = value.trim();
        let is_in = |list: &str, word| list.split(',').any(|other| other.trim() == word);
        match self {
            Self::Any => true,
            Self::Zero => {
                !value.is_empty() && value.trim_start_matches("0x").bytes().all(|it| it == b'0')
            }
            Self::Words(any_case, this_case) => {
                this_case.contains(&value)
                    || any_case.iter().any(|it| it.eq_ignore_ascii_case(value))
            }
            Self::Without(word) => !is_in(value, word),
            Self::NotChosen(component) => match value.strip_prefix('^') {
                Some(excluded) => is_in(excluded, component),
                None => !is_in(value, component),
            },
        }
    }
}

/// A variable that is set for a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    reader: Reader,
    pub(super) name: &'static str,
    value: &'static str,
    harmless: Harmless,
    /// What goes on with another value.
    otherwise: &'static str,
}

const fn setting(
    reader: Reader,
    name: &'static str,
    value: &'static str,
    harmless: Harmless,
    otherwise: &'static str,
) -> Setting {
    Setting { reader, name, value, harmless, otherwise }
}

/// Every variable, for all versions: one that a version does not know is ignored by it.
///
/// `UCX_IB_REG_METHODS` is known until 1.15, `UCX_RCACHE_ENABLE` from 1.11 on (tried with 1.13.1), and with
/// both an old and a new version caches nothing. `FI_MR_CACHE_MAX_COUNT` is known from 1.5 on (tried with
/// 1.17); the provider for EFA replaces it by a number of its own (read in 2.6). The parameters of Open MPI are those of
/// 4.1 and 5.0 (tried with 4.1.4).
const SETTINGS: [Setting; 13] = [
    setting(Reader::Pinfold, "PINFOLD_CACHE_REMOTE", "on", Harmless::Any, ""),
    // Heeded where libfabric's cache stays on: of no use to other jobs.
    setting(Reader::Libfabric, "PINFOLD_LIBFABRIC", "on", Harmless::Any, ""),
    setting(Reader::Ucx, "UCX_RCACHE_ENABLE", "n", UCX_NO, "UCX keeps registrations itself"),
    setting(
        Reader::Ucx,
        "UCX_IB_REG_METHODS",
        "direct",
        Harmless::Without("rcache"),
        "UCX before 1.16 keeps registrations itself",
    ),
    setting(Reader::Ucx, "UCX_MEM_EVENTS", "n", UCX_NO, "UCX patches the C library's functions"),
    setting(Reader::Ucx, "UCX_WARN_UNUSED_ENV_VARS", "n", Harmless::Any, ""),
    setting(
        Reader::Libfabric,
        "FI_MR_CACHE_MAX_COUNT",
        "0",
        Harmless::Zero,
        "libfabric keeps registrations itself, and asks Pinfold's monitor where it can",
    ),
    setting(
        Reader::Libfabric,
        "FI_EFA_MR_CACHE_ENABLE",
        "0",
        LIBFABRIC_NO,
        "libfabric's provider for EFA keeps registrations itself",
    ),
    setting(
        Reader::OpenMpi,
        "OMPI_MCA_memory",
        "^patcher",
        Harmless::NotChosen("patcher"),
        "Open MPI patches the C library's functions",
    ),
    setting(
        Reader::OpenMpi,
        "OMPI_MCA_opal_common_ucx_opal_mem_hooks",
        "0",
        OPEN_MPI_NO,
        "Open MPI patches the C library's functions for UCX",
    ),
    setting(
        Reader::OpenMpi,
        "OMPI_MCA_mpi_leave_pinned",
        "0",
        OPEN_MPI_NO,
        "Open MPI keeps registrations itself where it uses libibverbs without UCX",
    ),
    setting(
        Reader::OpenMpi,
        "OMPI_MCA_mpi_leave_pinned_pipeline",
        "0",
        OPEN_MPI_NO,
        "Open MPI keeps registrations of long messages itself",
    ),
    setting(
        Reader::Mvapich,
        "MV2_USE_LAZY_MEM_UNREGISTER",
        "0",
        Harmless::Zero,
        "MVAPICH keeps registrations itself",
    ),
];

/// Other names that Open MPI knows a parameter by, and whose values count as well. It has UCX read each variable with `MPI_`
/// before its name, too, and last.
const SYNONYMS: [[&str; 2]; 8] = [
    ["MPI_UCX_RCACHE_ENABLE", "UCX_RCACHE_ENABLE"],
    ["MPI_UCX_IB_REG_METHODS", "UCX_IB_REG_METHODS"],
    ["OMPI_MCA_pml_ucx_opal_mem_hooks", "OMPI_MCA_opal_common_ucx_opal_mem_hooks"],
    ["OMPI_MCA_osc_ucx_opal_mem_hooks", "OMPI_MCA_opal_common_ucx_opal_mem_hooks"],
    ["OMPI_MCA_spml_ucx_opal_mem_hooks", "OMPI_MCA_opal_common_ucx_opal_mem_hooks"],
    ["OMPI_MCA_atomic_ucx_opal_mem_hooks", "OMPI_MCA_opal_common_ucx_opal_mem_hooks"],
    ["OMPI_MCA_opal_leave_pinned", "OMPI_MCA_mpi_leave_pinned"],
    ["OMPI_MCA_opal_leave_pinned_pipeline", "OMPI_MCA_mpi_leave_pinned_pipeline"],
];

/// What `pinfold run --for` sets before a job starts.
#[derive(Debug, Default)]
pub(super) struct Preparation {
    /// Variables to set.
    pub(super) variables: Vec<(&'static str, &'static str)>,
    /// What the user's own variables leave on, a sentence each.
    pub(super) warnings: Vec<String>,
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

    /// The variables that are set for this kind of job.
    pub(super) fn settings(self) -> impl Iterator<Item = &'static Setting> {
        SETTINGS.iter().filter(move |setting| self.needs(setting.reader))
    }

    /// What is set for a job by the variable of this name, or by one that it is a synonym of.
    pub(super) fn setting(self, name: &str) -> Option<&'static Setting> {
        let synonym = SYNONYMS.iter().find(|[synonym, _]| *synonym == name);
        let name = synonym.map_or(name, |[_, name]| *name);
        self.settings().find(|setting| setting.name == name)
    }

    /// The variables for a job, each as `set` says that the user has set it or not; an empty one is not set.
    pub(super) fn prepare(self, set: impl Fn(&str) -> Option<OsString>) -> Preparation {
        let set = |name: &str| set(name).filter(|value| !value.is_empty());
        // Libfabric's own way to have no cache.
        let is_off = set("FI_MR_CACHE_MONITOR").is_some_and(|monitor| monitor == "disabled");
        let mut preparation = Preparation::default();
        for setting in self.settings() {
            match set(setting.name) {
                None => preparation.variables.push((setting.name, setting.value)),
                Some(_) if is_off && setting.reader == Reader::Libfabric => {}
                Some(value) => {
                    preparation.warnings.extend(setting.conflict(setting.name, &value, "is set"));
                }
            }
        }
        for [synonym, _] in SYNONYMS {
            let value = self.setting(synonym).zip(set(synonym));
            let conflict = value.and_then(|(it, value)| it.conflict(synonym, &value, "is set"));
            preparation.warnings.extend(conflict);
        }
        preparation
    }

    /// Whether libfabric may choose a provider whose cache stays on whatever is set: Omni-Path's, if the user
    /// names it, or names none where a machine `has_omni_path`.
    pub(super) fn omni_path(
        self,
        set: impl Fn(&str) -> Option<OsString>,
        has_omni_path: bool,
    ) -> Option<&'static str> {
        let set = |name| set(name).filter(|value: &OsString| !value.is_empty());
        let is_chosen = is_chosen("opx", set("FI_PROVIDER"), has_omni_path);
        let is_off =
            set("FI_OPX_TID_DISABLE").is_some_and(|it| !LIBFABRIC_NO.has(&it.to_string_lossy()));
        (self.needs(Reader::Libfabric) && is_chosen && !is_off).then_some(OMNI_PATH)
    }

    /// Whether libfabric may choose Slingshot's provider, for which these variables do only harm: as above.
    pub(super) fn slingshot(
        self,
        set: impl Fn(&str) -> Option<OsString>,
        has_slingshot: bool,
    ) -> Option<&'static str> {
        let set = |name| set(name).filter(|value: &OsString| !value.is_empty());
        let is_chosen = is_chosen("cxi", set("FI_PROVIDER"), has_slingshot);
        let count = set("FI_MR_CACHE_MAX_COUNT");
        let is_off = count.is_none_or(|it| Harmless::Zero.has(&it.to_string_lossy()));
        (self.needs(Reader::Libfabric) && is_chosen && is_off).then_some(SLINGSHOT)
    }
}

/// Whether libfabric may choose a provider, if these are named or none where a machine `has_device` of it.
fn is_chosen(provider: &str, named: Option<OsString>, has_device: bool) -> bool {
    named.map_or(has_device, |named| {
        let named = named.to_string_lossy();
        !named.starts_with('^') && named.split(',').any(|it| it == provider)
    })
}

const OMNI_PATH: &str = "libfabric's opx provider keeps what it pins whatever FI_MR_CACHE_MAX_COUNT says, and does not use \
                         libibverbs; FI_OPX_TID_DISABLE=1 has it pin nothing";

/// Read in 2.5 and 2.6, which take a monitor that is named, and not started because there is no cache, for one that failed.
const SLINGSHOT: &str = "libfabric's cxi provider does not use libibverbs, so nothing is cached with its own cache off \
                         (FI_MR_CACHE_MAX_COUNT=0), and it may refuse to start where FI_MR_CACHE_MONITOR is set; with \
                         another number it asks Pinfold's monitor where it can";

impl Setting {
    /// What another value than ours leaves on; `how` a variable has it: that it is set, or may be, and where.
    pub(super) fn conflict(&self, name: &str, value: &OsStr, how: &str) -> Option<String> {
        let value = value.to_string_lossy();
        (!self.harmless.has(&value)).then(|| {
            format!(
                "{name} {how} to {value:?}, so {what}, and what it keeps may be stale; leave it out or say \
                 {name}={wanted}",
                what = self.otherwise,
                wanted = self.value,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(middleware: Middleware) -> Vec<&'static str> {
        let preparation = middleware.prepare(|_| None);
        assert!(preparation.warnings.is_empty());
        preparation.variables.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn each_kind_of_job_gets_its_own_variables() {
        assert_eq!(names(Middleware::Mpi).len(), SETTINGS.len());
        let ucx = names(Middleware::Ucx);
        assert!(ucx.contains(&"UCX_RCACHE_ENABLE") && ucx.contains(&"PINFOLD_CACHE_REMOTE"));
        assert!(!ucx.iter().any(|name| name.starts_with("FI_") || name.starts_with("OMPI_")));
        assert_eq!(
            names(Middleware::Libfabric),
            [
                "PINFOLD_CACHE_REMOTE",
                "PINFOLD_LIBFABRIC",
                "FI_MR_CACHE_MAX_COUNT",
                "FI_EFA_MR_CACHE_ENABLE"
            ]
        );
    }

    #[test]
    fn what_the_user_has_set_stays_and_is_named_where_it_is_dangerous() {
        let set = |name: &str| match name {
            "UCX_RCACHE_ENABLE" => Some("y".into()),
            "FI_MR_CACHE_MAX_COUNT" => Some("0".into()),
            "UCX_WARN_UNUSED_ENV_VARS" => Some("y".into()),
            "UCX_MEM_EVENTS" => Some(OsString::new()),
            _ => None,
        };
        let preparation = Middleware::Mpi.prepare(set);
        assert_eq!(preparation.variables.len(), SETTINGS.len() - 3, "an empty one is not set");
        let [warning] = &preparation.warnings[..] else { panic!("{:?}", preparation.warnings) };
        assert!(warning.contains("UCX_RCACHE_ENABLE=n") && warning.contains("\"y\""), "{warning}");
        assert!(warning.len() < 200, "{}", warning.len());
    }

    #[test]
    fn ours_are_harmless_values() {
        assert!(SETTINGS.iter().all(|setting| setting.harmless.has(setting.value)));
    }

    #[test]
    fn values_are_compared_as_their_readers_take_them() {
        let conflicts = |name, value: &str| {
            Middleware::Mpi.setting(name).unwrap().conflict(name, OsStr::new(value), "is").is_some()
        };
        for (name, harmless, dangerous) in [
            (
                "UCX_RCACHE_ENABLE",
                &["no", "N", "0", "off"][..],
                &["try", "yes", "OFF", "false"][..],
            ),
            ("UCX_IB_REG_METHODS", &["direct", "odp,direct"], &["rcache,direct", "odp, rcache"]),
            ("FI_MR_CACHE_MAX_COUNT", &["0", "00", "0x0"], &["1024", "0x1", "10"]),
            ("FI_EFA_MR_CACHE_ENABLE", &["0", "No", "OFF", "false"], &["1", "n", "true"]),
            (
                "OMPI_MCA_memory",
                &["^patcher,ucx", "^ucx,patcher"],
                &["patcher", "^ucx", "ucx,patcher"],
            ),
            (
                "OMPI_MCA_mpi_leave_pinned",
                &["0", "false", "n", "disabled"],
                &["1", "-1", "auto", "off"],
            ),
            ("OMPI_MCA_opal_leave_pinned", &["0"], &["1"]),
            ("OMPI_MCA_pml_ucx_opal_mem_hooks", &["0", "false"], &["1", "true"]),
            ("MV2_USE_LAZY_MEM_UNREGISTER", &["0"], &["1"]),
        ] {
            harmless.iter().for_each(|value| assert!(!conflicts(name, value), "{name}={value}"));
            dangerous.iter().for_each(|value| assert!(conflicts(name, value), "{name}={value}"));
        }
    }

    #[test]
    fn a_synonym_counts_as_well() {
        let set = |name: &str| (name == "OMPI_MCA_opal_leave_pinned").then(|| "1".into());
        let preparation = Middleware::Mpi.prepare(set);
        let [warning] = &preparation.warnings[..] else { panic!("{:?}", preparation.warnings) };
        assert!(warning.starts_with("OMPI_MCA_opal_leave_pinned is set to \"1\""), "{warning}");
        assert!(Middleware::Ucx.prepare(set).warnings.is_empty());
        let set = |name: &str| (name == "MPI_UCX_RCACHE_ENABLE").then(|| "y".into());
        let preparation = Middleware::Mpi.prepare(set);
        let [warning] = &preparation.warnings[..] else { panic!("{:?}", preparation.warnings) };
        assert!(warning.starts_with("MPI_UCX_RCACHE_ENABLE is set to \"y\""), "{warning}");
    }

    #[test]
    fn a_libfabric_without_monitor_has_no_cache() {
        let set = |monitor: &'static str| {
            move |name: &str| match name {
                "FI_MR_CACHE_MAX_COUNT" => Some("7".into()),
                "FI_MR_CACHE_MONITOR" => Some(monitor.into()),
                _ => None,
            }
        };
        assert!(Middleware::Libfabric.prepare(set("disabled")).warnings.is_empty());
        assert_eq!(Middleware::Libfabric.prepare(set("memhooks")).warnings.len(), 1);
    }

    #[test]
    fn a_provider_whose_cache_stays_on_is_named() {
        let said = |providers: &'static str, disabled: &'static str, has_one| {
            let set = |name: &str| match name {
                "FI_PROVIDER" => Some(providers.into()),
                "FI_OPX_TID_DISABLE" => Some(disabled.into()),
                _ => None,
            };
            Middleware::Mpi.omni_path(set, has_one).is_some()
        };
        assert!(said("shm,opx", "", false) && said("", "", true) && said("opx", "0", false));
        assert!(!said("verbs", "", true) && !said("", "", false) && !said("opx", "1", true));
        assert!(!said("^opx", "", true));
        assert_eq!(Middleware::Ucx.omni_path(|_| None, true), None);
    }

    #[test]
    fn a_provider_that_these_variables_only_harm_is_named() {
        let said = |providers: &'static str, count: &'static str, has_one| {
            let set = |name: &str| match name {
                "FI_PROVIDER" => Some(providers.into()),
                "FI_MR_CACHE_MAX_COUNT" => Some(count.into()),
                _ => None,
            };
            Middleware::Libfabric.slingshot(set, has_one).is_some()
        };
        assert!(said("cxi", "", false) && said("", "0", true));
        assert!(!said("", "", false) && !said("verbs", "", true) && !said("cxi", "1024", true));
        assert!(!said("^cxi", "", true));
        assert_eq!(Middleware::Ucx.slingshot(|_| None, true), None);
    }
}
