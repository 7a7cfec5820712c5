//! Parallel jobs under `pinfold run --for mpi`, with scripts in the place of launchers: what they are started with, and
//! what is said before.

use crate::run::Scratch;
use crate::support::status;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A directory with a launcher that says this of its version, and prints its arguments and what these have it send.
struct Job {
    scratch: Scratch,
    launcher: PathBuf,
}

const PRINTS: &str = r#"for word; do
    echo "word $word"
    if [ "$before" = -x ]; then echo "sent $word=$(printenv "$word")"; fi
    before=$word
done
echo "list $OMPI_MCA_mca_base_env_list"
"#;

impl Job {
    /// `None` where the library is not built.
    fn new(name: &str, launcher: &str, version: &str) -> Option<Self> {
        let scratch = Scratch::new(name)?;
        let script =
            format!("#!/bin/sh\nif [ \"$1\" = --version ]; then {version}; exit; fi\n{PRINTS}");
        let launcher = scratch.program(launcher, &script);
        Some(Self { scratch, launcher })
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.scratch.command(&["--quiet", "--for", "mpi", "--"]);
        command.arg(&self.launcher).args(words);
        command
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn said(output: &Output) -> [String; 2] {
    [text(&output.stdout), text(&output.stderr)]
}

const OPEN_MPI: &str = "echo 'mpirun (Open MPI) 4.1.4'";

#[test]
fn open_mpi_sends_ours_and_the_user_s_variables_to_every_program() {
    let Some(job) = Job::new("sends", "mpirun", OPEN_MPI) else { return };
    let mut command =
        job.command(&["-n", "1", "./a", ":", "-n", "1", "./b", "-x", "UCX_MEM_EVENTS=y"]);
    let output =
        command.env("PINFOLD_KEEP_FROM", "1").env("UCX_RCACHE_ENABLE", "no").output().unwrap();
    let [words, errors] = said(&output);
    assert_eq!((status(&output), errors.as_str()), (0, ""));
    for sent in [
        "PINFOLD_KEEP_FROM=1",
        "UCX_RCACHE_ENABLE=no",
        "UCX_MEM_EVENTS=n",
        "FI_EFA_MR_CACHE_ENABLE=0",
        "PINFOLD_CACHE_REMOTE=on",
    ] {
        assert_eq!(words.matches(&format!("sent {sent}\n")).count(), 2, "{sent} in {words}");
    }
    assert_eq!(words.matches("sent LD_PRELOAD=$ORIGIN/").count(), 2, "{words}");
    assert_eq!(words.matches("sent PINFOLD_SUMMARY=/").count(), 2, "{words}");
    assert!(words.contains("word ./b\nword -x\nword UCX_MEM_EVENTS=y\n"), "{words}");
}

#[test]
fn a_list_of_variables_has_them_instead() {
    let Some(job) = Job::new("list", "mpirun", OPEN_MPI) else { return };
    let environment =
        job.command(&["./a"]).env("OMPI_MCA_mca_base_env_list", "A=1;B").output().unwrap();
    let [words, errors] = said(&environment);
    assert!(errors.contains("sent by your mca_base_env_list"), "{errors}");
    assert!(words.contains("list A=1;B;LD_PRELOAD;PINFOLD_SUMMARY;"), "{words}");
    assert!(!words.contains("word -x"), "{words}");
    let parameters = job.scratch.place(".openmpi");
    std::fs::create_dir(&parameters).unwrap();
    let listed = "mca_base_env_list = A;UCX_RCACHE_ENABLE=y\n";
    std::fs::write(parameters.join("mca-params.conf"), listed).unwrap();
    let file = job.command(&["./a"]).env("HOME", job.scratch.place("")).output().unwrap();
    let [words, errors] = said(&file);
    assert!(errors.contains("UCX_RCACHE_ENABLE is set by mca_base_env_list to \"y\""), "{errors}");
    assert!(words.contains("list A;UCX_RCACHE_ENABLE=y;LD_PRELOAD;"), "{words}");
    assert_eq!(words.matches("UCX_RCACHE_ENABLE").count(), 1, "{words}");
    let argument = job.command(&["--mca", "mca_base_env_list", "B", "./a"]).output().unwrap();
    let [words, _] = said(&argument);
    assert!(
        words.contains("word B;LD_PRELOAD;PINFOLD_SUMMARY;") && !words.contains("word -x"),
        "{words}"
    );
}

#[test]
fn what_stays_dangerous_is_said_and_the_launcher_s_arguments_stay() {
    let Some(job) = Job::new("stays", "mpiexec", "echo 'HYDRA build details:'") else { return };
    let output = job.command(&["-genv", "UCX_RCACHE_ENABLE", "y", "./a"]).output().unwrap();
    let [words, errors] = said(&output);
    assert!(words.starts_with("word -genv\nword UCX_RCACHE_ENABLE\nword y\nword ./a\n"), "{words}");
    assert!(errors.contains("UCX_RCACHE_ENABLE is set by an argument to \"y\""), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn a_launcher_that_does_not_say_its_version_is_not_waited_for() {
    let Some(job) = Job::new("mute", "mpirun_rsh", "exec sleep 1000") else { return };
    let output = job.command(&["./a"]).output().unwrap();
    let [words, errors] = said(&output);
    assert!(
        words.starts_with("word ./a\n") && errors.contains("not known to send variables"),
        "{errors}"
    );
}

#[test]
fn a_signal_while_a_launcher_is_asked_leaves_nothing() {
    let Some(job) = Job::new("asked", "mpirun", "touch \"$TMPDIR/../asked\"; exec sleep 20") else {
        return;
    };
    let mut child = job.command(&["./a"]).spawn().unwrap();
    job.scratch.await_file("asked");
    job.scratch.send(&child, libc::SIGTERM);
    child.wait().unwrap();
    assert_eq!(job.scratch.leftovers(), [""; 0]);
}

#[test]
fn a_script_may_start_a_launcher_and_a_rank_is_told_what_its_summary_is() {
    let Some(scratch) = Scratch::new("script") else { return };
    let script = scratch.program("job", "#!/bin/sh\nexit 3\n");
    let start = |set: &[(&str, &str)]| {
        let mut command = scratch.command(&["--for", "mpi", "--"]);
        command.arg(&script).envs(set.iter().copied()).output().unwrap()
    };
    let alone = start(&[]);
    assert_eq!(status(&alone), 3);
    assert!(text(&alone.stderr).contains("a launcher among that may not send them"), "{alone:?}");
    let first = start(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]);
    let second = start(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]);
    assert!(text(&first.stderr).contains("each rank has a summary of its own"), "{first:?}");
    let shell = start(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]);
    assert!(text(&shell.stderr).contains("a launcher among that may not send them"), "{shell:?}");
    assert!(!text(&second.stderr).contains("launcher"), "{second:?}");
    for output in [&first, &second] {
        assert!(!text(&output.stderr).contains("ranks reported"), "{output:?}");
    }
}

#[test]
fn a_job_that_is_started_in_a_step_has_a_summary_of_its_ranks() {
    let Some(scratch) = Scratch::new("step") else { return };
    let ranks = "for rank in 0 1 2; do PMI_RANK=$rank PMI_SIZE=3 cat /dev/null & done; wait";
    let launcher = scratch.program("mpirun", &format!("#!/bin/sh\n{ranks}\n"));
    for tasks in ["1", "2"] {
        let mut command = scratch.command(&["--"]);
        command.arg(&launcher).env("SLURM_PROCID", "0").env("SLURM_STEP_NUM_TASKS", tasks);
        let output = command.output().unwrap();
        assert!(text(&output.stderr).ends_with("all 3 ranks reported\n"), "{output:?}");
    }
}
