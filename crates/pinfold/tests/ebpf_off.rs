//! What keeps the kernel from calling the eBPF programs: no view answers "current" from then on; and what keeps more of
//! them from being loaded. Changes settings of the whole machine, so it is a program of its own and one test, and runs where no other program needs them: in the
//! virtual machine, or where `PINFOLD_CHANGE_SETTINGS` is set.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

#[allow(dead_code)]
#[path = "ebpf_support/mod.rs"]
mod support;

use pinfold::Monitor;
use pinfold::monitor::Ebpf;
use pinfold_ebpf::{Programs, ProgramsError, ViewError, ViewId};
use std::os::fd::AsFd;
use support::{Memory, pidfd};

/// A setting that is as before when this is dropped.
struct Setting {
    path: &'static str,
    before: String,
}

impl Setting {
    fn new(path: &'static str) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        // Of several, the one in force is in parentheses.
        let chosen = text.split_whitespace().find(|word| word.starts_with('(')).unwrap_or(&text);
        let before = chosen.trim_matches(|c: char| "()".contains(c) || c.is_whitespace()).into();
        Some(Self { path, before })
    }

    fn set(&self, value: &str) -> std::io::Result<()> {
        std::fs::write(self.path, value)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        self.set(&self.before).unwrap();
    }
}

/// A monitor whose view is given back when this is dropped.
struct Watching<'p> {
    programs: &'p Programs,
    view: ViewId,
    monitor: Ebpf,
}

impl<'p> Watching<'p> {
    fn by(programs: &'p Programs) -> Self {
        let view = programs.view(pidfd(std::process::id()).as_fd()).unwrap();
        Self { programs, view: view.id(), monitor: Ebpf::from_view(view).unwrap() }
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.programs.forget(self.view);
    }
}

#[test]
fn no_view_outlives_the_programs_calls() {
    let allowed = ["PINFOLD_KERNEL", "PINFOLD_CHANGE_SETTINGS"];
    if allowed.iter().all(|name| std::env::var_os(name).is_none()) {
        return eprintln!("skipped: this machine's settings are not ours to change");
    }
    let programs = match Programs::load() {
        Ok(programs) => programs,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    switched_off(&programs);
    preempted(&programs);
    crowded_out();
}

/// Clients keep the programs of helpers that have ended: as many generations fit at one function as the kernel has places.
fn crowded_out() {
    let mut kept = vec![];
    let refused = loop {
        assert!(kept.len() < 64, "the kernel has no limit");
        match Programs::load_only("unmapping") {
            Ok(programs) => kept.push(programs),
            Err(refused) => break refused,
        }
    };
    assert!(
        matches!(refused, ProgramsError::ManyPrograms { function: "unmap_vmas", .. }),
        "{refused}"
    );
    kept.pop();
    Programs::load_only("unmapping").unwrap();
}

/// A change after the switch would not be seen, so the check must say so before.
fn switched_off(programs: &Programs) {
    let watching = Watching::by(programs);
    let monitor = &watching.monitor;
    let Some(setting) = Setting::new("/proc/sys/kernel/ftrace_enabled") else {
        return eprintln!("skipped: programs cannot be switched off here");
    };
    assert!(monitor.check().is_ok(), "reading the setting changes nothing");
    let second = Watching::by(programs);
    if let Some(other) = Setting::new("/proc/sys/fs/lease-break-time") {
        // By the same function of the kernel.
        other.set(&other.before).unwrap();
        assert!(monitor.check().is_ok(), "writing another setting changes nothing");
    }
    let memory = Memory::private(1);
    let _ = monitor.watch(memory.range());
    let before = monitor.check().unwrap();
    let switched = setting.set("0");
    memory.raw_unmap();
    let after = monitor.check();
    assert!(after.is_err() || after.is_ok_and(|after| after != before), "the change is not seen");
    assert!(after.is_err(), "a write to the setting closes every view");
    assert!(second.monitor.check().is_err(), "the second as well");
    drop(second);
    match switched {
        Ok(()) => {
            let this = pidfd(std::process::id());
            assert_eq!(programs.view(this.as_fd()).unwrap_err(), ViewError::SwitchedOff);
            assert!(Programs::load().is_err());
        }
        Err(error) => eprintln!("this kernel refuses to switch programs off: {error}"),
    }
    setting.set("1").unwrap();
    drop(watching);
    assert!(
        Watching::by(programs).monitor.check().is_ok(),
        "once they run again, views can be had"
    );
}

fn preempted(programs: &Programs) {
    let _ = std::process::Command::new("mount")
        .args(["-t", "debugfs", "debugfs", "/sys/kernel/debug"])
        .status();
    let Some(setting) = Setting::new("/sys/kernel/debug/sched/preempt") else {
        return eprintln!("skipped: this kernel's way of preempting cannot be changed");
    };
    let watching = Watching::by(programs);
    let monitor = &watching.monitor;
    setting.set("full").unwrap();
    assert!(monitor.check().is_err());
    let this = pidfd(std::process::id());
    assert_eq!(programs.view(this.as_fd()).unwrap_err(), ViewError::Preemptible { model: "full" });
    drop(setting);
    drop(watching);
    assert!(Watching::by(programs).monitor.check().is_ok());
}
