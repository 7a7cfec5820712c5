//! What each allocator is asked for, in its own terms.

use super::functions::{Functions, Glibc, Jemalloc, Linked, Mimalloc};
use super::{Allocator, NotSet, Policy, Setting};
use libc::c_int;

/// An allocator with its functions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    functions: Calls,
    serves_malloc: bool,
}

#[derive(Clone, Copy, Debug)]
enum Calls {
    Glibc(Glibc),
    Jemalloc(Jemalloc),
    Mimalloc(Mimalloc),
    None,
}

// glibc's numbers of its parameters; part of its interface.
const M_TRIM_THRESHOLD: c_int = -1;
const M_MMAP_MAX: c_int = -4;
const M_ARENA_MAX: c_int = -8;

/// What glibc has unless told otherwise. (0 arenas: as many as it likes.)
const GLIBC_DEFAULTS: [(&str, c_int, c_int); 3] = [
    ("M_MMAP_MAX", M_MMAP_MAX, 65536),
    ("M_TRIM_THRESHOLD", M_TRIM_THRESHOLD, 128 << 10),
    ("M_ARENA_MAX", M_ARENA_MAX, 0),
];

const DECAYS: [&str; 2] = ["dirty_decay_ms", "muzzy_decay_ms"];

/// The first version of mimalloc whose option 15 delays every purge.
const MI_PURGE_SINCE: i32 = 210;
const MI_PURGE_DELAY: c_int = 15;
/// The version of mimalloc whose option 22 forbids to decommit, and the number itself, which other
/// versions give to other options.
const MI_DECOMMIT_VERSION: i32 = 209;
const MI_ALLOW_DECOMMIT: c_int = 22;

impl Found {
    /// All that the dynamic linker knows.
    pub(super) fn all() -> Vec<Self> {
        let glibc = Glibc::find().map(|it| (Calls::Glibc(it), true));
        let jemalloc = Jemalloc::find().map(|(it, serves)| (Calls::Jemalloc(it), serves));
        let mimalloc = Mimalloc::find().map(|(it, serves)| (Calls::Mimalloc(it), serves));
        let found = [glibc, jemalloc, mimalloc].into_iter().flatten();
        found.map(|(functions, serves_malloc)| Self { functions, serves_malloc }).collect()
    }

    pub(super) fn linked(functions: Functions) -> Self {
        let functions = match functions.0 {
            Linked::Jemalloc(jemalloc) => Calls::Jemalloc(jemalloc),
            Linked::Mimalloc(mimalloc) => Calls::Mimalloc(mimalloc),
        };
        Self { functions, serves_malloc: false }
    }

    pub(super) fn nothing() -> Self {
        Self { functions: Calls::None, serves_malloc: true }
    }

    pub(super) fn allocator(&self) -> Allocator {
        match self.functions {
            Calls::Glibc(_) => Allocator::Glibc,
            Calls::Jemalloc(_) => Allocator::Jemalloc,
            Calls::Mimalloc(_) => Allocator::Mimalloc,
            Calls::None => Allocator::Unknown,
        }
    }

    pub(super) fn serves_malloc(&self) -> bool {
        self.serves_malloc
    }

    pub(super) fn keep(&self, policy: Policy) -> Vec<Setting> {
        match self.functions {
            Calls::Glibc(glibc) => keep_glibc(glibc, policy),
            Calls::Jemalloc(jemalloc) => keep_jemalloc(jemalloc),
            Calls::Mimalloc(mimalloc) => vec![keep_mimalloc(mimalloc)],
            Calls::None => Vec::new(),
        }
    }

    /// Undoes those of `settings` that were set.
    pub(super) fn undo(&self, settings: &[Setting]) -> Vec<Setting> {
        let set = settings.iter().filter(|setting| setting.now.is_ok());
        let undone = |setting: &Setting| match self.functions {
            Calls::Glibc(glibc) => undo_glibc(glibc, setting),
            Calls::Jemalloc(jemalloc) => undo_jemalloc(jemalloc, setting),
            Calls::Mimalloc(mimalloc) => undo_mimalloc(mimalloc, setting),
            Calls::None => setting.clone(),
        };
        let mut undone: Vec<_> = set.map(undone).collect();
        match self.functions {
            Calls::Glibc(glibc) => glibc.give_back(),
            Calls::Jemalloc(jemalloc) => undone.extend(undo_new_arenas(jemalloc, settings)),
            Calls::Mimalloc(_) | Calls::None => {}
        }
        undone
    }
}

fn outcome(name: &str, before: Option<i64>, now: Result<i64, NotSet>) -> Setting {
    Setting { name: name.to_owned(), before, now }
}

fn set_glibc(glibc: Glibc, name: &str, parameter: c_int, value: c_int) -> Setting {
    let now = match glibc.set(parameter, value) {
        true => Ok(i64::from(value)),
        false => Err(NotSet::Refused { errno: 0 }),
    };
    outcome(name, None, now)
}

fn keep_glibc(glibc: Glibc, policy: Policy) -> Vec<Setting> {
    let mut settings = vec![
        set_glibc(glibc, "M_MMAP_MAX", M_MMAP_MAX, 0),
        // As a size, the largest there is.
        set_glibc(glibc, "M_TRIM_THRESHOLD", M_TRIM_THRESHOLD, -1),
    ];
    if policy.single_arena {
        settings.push(set_glibc(glibc, "M_ARENA_MAX", M_ARENA_MAX, 1));
    }
    settings
}

fn undo_glibc(glibc: Glibc, setting: &Setting) -> Setting {
    let default = GLIBC_DEFAULTS.iter().find(|(name, ..)| *name == setting.name);
    match default {
        Some(&(name, parameter, value)) => {
            let undone = set_glibc(glibc, name, parameter, value);
            Setting { before: setting.now.ok(), now: lasting(parameter, undone.now), ..undone }
        }
        None => setting.clone(),
    }
}

/// What becomes of an undone parameter: glibc reads how many arenas there may be when a thread first needs one, and never
/// again. Whether one has is not told; where none has, what was undone holds.
fn lasting(parameter: c_int, undone: Result<i64, NotSet>) -> Result<i64, NotSet> {
    if parameter == M_ARENA_MAX { undone.and(Err(NotSet::DecidedOnce)) } else { undone }
}

fn keep_jemalloc(jemalloc: Jemalloc) -> Vec<Setting> {
    let mut settings = Vec::new();
    for decay in DECAYS {
        settings.push(set_jemalloc(jemalloc, format!("arenas.{decay}"), -1));
    }
    let arenas = jemalloc.get::<u32>("arenas.narenas").unwrap_or(0);
    for (arena, decay) in (0..arenas).flat_map(|arena| DECAYS.map(|decay| (arena, decay))) {
        let name = format!("arena.{arena}.{decay}");
        // An unused arena is not there, and will begin as all do.
        if jemalloc.get::<isize>(&name).is_ok() {
            settings.push(set_jemalloc(jemalloc, name, -1));
        }
    }
    settings.push(retains(jemalloc));
    settings
}

/// Arenas that were made since began with what was set: they get what others began with before.
fn undo_new_arenas(jemalloc: Jemalloc, settings: &[Setting]) -> Vec<Setting> {
    let is_old = |name: &str| settings.iter().any(|setting| setting.name == name);
    let before = |decay: &str| {
        let of_all = settings.iter().find(|it| it.name == format!("arenas.{decay}"))?;
        of_all.now.as_ref().ok()?;
        isize::try_from(of_all.before?).ok()
    };
    let decays = DECAYS.iter().filter_map(|decay| Some((decay, before(decay)?)));
    let arenas = jemalloc.get::<u32>("arenas.narenas").unwrap_or(0);
    let all = decays.flat_map(|it| (0..arenas).map(move |arena| (arena, it)));
    all.map(|(arena, (decay, before))| (format!("arena.{arena}.{decay}"), before))
        .filter(|(name, _)| !is_old(name) && jemalloc.get::<isize>(name) == Ok(-1))
        .map(|(name, before)| set_jemalloc(jemalloc, name, before))
        .collect()
}

/// Whether what is purged, or was never used, stays mapped; decided at the program's start.
fn retains(jemalloc: Jemalloc) -> Setting {
    let retains = jemalloc.get::<bool>("opt.retain");
    let now = match retains {
        Ok(true) => Ok(1),
        Ok(false) => Err(NotSet::AtStartOnly { instead: "MALLOC_CONF=retain:true" }),
        Err(errno) => Err(NotSet::Refused { errno }),
    };
    outcome("opt.retain", retains.ok().map(i64::from), now)
}

fn set_jemalloc(jemalloc: Jemalloc, name: String, value: isize) -> Setting {
    let before = jemalloc.get::<isize>(&name);
    let now = match jemalloc.set(&name, value) {
        Ok(()) => Ok(value as i64),
        Err(libc::ENOENT) => {
            let instead = "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1 (jemalloc 5)";
            Err(NotSet::Version { instead })
        }
        Err(errno) => Err(NotSet::Refused { errno }),
    };
    Setting { name, before: before.ok().map(|value| value as i64), now }
}

fn undo_jemalloc(jemalloc: Jemalloc, setting: &Setting) -> Setting {
    let before = setting.before.and_then(|before| isize::try_from(before).ok());
    match before.filter(|_| setting.name != "opt.retain") {
        Some(before) => set_jemalloc(jemalloc, setting.name.clone(), before),
        None => setting.clone(),
    }
}

/// The option of this version that keeps memory, and the value that does.
fn mimalloc_option(version: i32) -> Option<(&'static str, c_int, i64)> {
    match version {
        MI_DECOMMIT_VERSION => Some(("allow_decommit", MI_ALLOW_DECOMMIT, 0)),
        version if version >= MI_PURGE_SINCE => Some(("purge_delay", MI_PURGE_DELAY, -1)),
        _ => None,
    }
}

fn keep_mimalloc(mimalloc: Mimalloc) -> Setting {
    match mimalloc_option(mimalloc.version) {
        Some((name, option, value)) => set_mimalloc(mimalloc, name, option, value),
        None => {
            let instead = "MIMALLOC_ALLOW_DECOMMIT=0 (2.0) or MIMALLOC_PAGE_RESET=0 (1.x)";
            outcome("purge_delay", None, Err(NotSet::Version { instead }))
        }
    }
}

fn set_mimalloc(mimalloc: Mimalloc, name: &str, option: c_int, value: i64) -> Setting {
    let before = mimalloc.get(option);
    let now = mimalloc.set(option, value);
    let now = if now == value { Ok(now) } else { Err(NotSet::Refused { errno: 0 }) };
    outcome(name, Some(before), now)
}

fn undo_mimalloc(mimalloc: Mimalloc, setting: &Setting) -> Setting {
    match (mimalloc_option(mimalloc.version), setting.before) {
        (Some((name, option, _)), Some(before)) => set_mimalloc(mimalloc, name, option, before),
        _ => setting.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_only_set_where_its_number_means_it() {
        assert_eq!(mimalloc_option(206), None);
        assert_eq!(mimalloc_option(17), None);
        assert_eq!(mimalloc_option(209).unwrap().0, "allow_decommit");
        assert_eq!(mimalloc_option(212).unwrap().0, "purge_delay");
        assert_eq!(mimalloc_option(3000).unwrap().0, "purge_delay");
    }
}
