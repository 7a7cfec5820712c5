//! The environment of a program under `pinfold run`.

use crate::run::Scratch;
use std::process::Command;

/// Entries as `execve` takes them from a program, in this order.
const ENTRIES: [&str; 8] = ["Z=1", "A=1", "no mark", "A=2", "=", "=name", "", "B="];

#[test]
fn a_program_has_the_environment_that_it_would_have_without_the_command() {
    let Some(scratch) = Scratch::new("environment") else { return };
    let temporary = format!("TMPDIR={}", scratch.place("tmp").display());
    let entries = [&ENTRIES[..], &["LD_PRELOAD=", "PINFOLD_SUMMARY=mine", &temporary]].concat();
    let start = |words: &[&str]| {
        let script = "import os, sys, ctypes
entries = [os.fsencode(entry) for entry in sys.argv[1].split('\\n')]
words = [os.fsencode(word) for word in sys.argv[2:]]
array = lambda of: (ctypes.c_char_p * (len(of) + 1))(*of, None)
ctypes.CDLL(None).execve(words[0], array(words), array(entries))";
        let mut command = Command::new("python3");
        command.args(["-c", script, &entries.join("\n")]).args(words);
        let output = command.args(["/bin/cat", "/proc/self/environ"]).output().ok()?;
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    };
    let Some(alone) = start(&["/usr/bin/nice", "-n0"]) else {
        eprintln!("skipped: no python3 here");
        return;
    };
    let run = start(&[env!("CARGO_BIN_EXE_pinfold"), "run", "--quiet", "--"]).unwrap();
    let is_ours =
        |entry: &&str| ["LD_PRELOAD=", "PINFOLD_SUMMARY="].iter().any(|it| entry.starts_with(it));
    let others = |text: &str| {
        text.split('\0').filter(|it| !is_ours(it)).map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(others(&run), others(&alone));
    let ours: Vec<_> = run.split('\0').filter(is_ours).collect();
    assert!(ours.len() == 2 && !ours.contains(&"PINFOLD_SUMMARY=mine"), "{ours:?}");
}
