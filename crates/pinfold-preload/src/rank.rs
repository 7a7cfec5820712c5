//! Which rank of a parallel job this process is, as the launchers say it.

use std::ffi::OsString;

/// The variables of the launchers: a rank's number, and how many there are. In the script of a batch job Slurm sets the
/// number, too, but not the tasks of a step.
const LAUNCHERS: [[&str; 2]; 4] = [
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"], // Open MPI
    ["PMI_RANK", "PMI_SIZE"], // MPICH, Intel MPI, and what Slurm starts for them
    ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"], // MVAPICH
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
];

/// A rank of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rank {
    pub(crate) number: u64,
    /// How many the job has.
    pub(crate) of: u64,
}

impl Rank {
    /// Whether some launcher may have said it. Allocates nothing if `is_set` does not.
    pub(crate) fn is_set(is_set: impl Fn(&str) -> bool) -> bool {
        LAUNCHERS.as_flattened().iter().any(|name| is_set(name))
    }

    /// Fields of a JSON object.
    pub(crate) fn json(self) -> String {
        format!("\"rank\":{},\"ranks\":{},", self.number, self.of)
    }

    /// As the first launcher says that has set both variables. `None` outside of jobs.
    pub(crate) fn among(variable: impl Fn(&'static str) -> Option<OsString>) -> Option<Self> {
        let number = |name| variable(name)?.to_str()?.trim().parse().ok();
        let rank =
            |[its, of]: [&'static str; 2]| Some(Self { number: number(its)?, of: number(of)? });
        LAUNCHERS.into_iter().filter_map(rank).find(|rank| rank.number < rank.of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(variables: &[(&str, &str)]) -> Option<Rank> {
        Rank::among(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn a_rank_is_what_one_launcher_says_of_both() {
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
        assert_eq!(rank(&open_mpi), Some(Rank { number: 1, of: 4 }));
        assert_eq!(rank(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]), Some(Rank { number: 0, of: 2 }));
        let step = [("SLURM_PROCID", "7"), ("SLURM_STEP_NUM_TASKS", "8")];
        assert_eq!(rank(&step), Some(Rank { number: 7, of: 8 }));
        let both = [step, open_mpi].concat();
        assert_eq!(rank(&both).map(|rank| rank.of), Some(4), "mpirun inside of a step");
    }

    #[test]
    fn a_process_outside_of_jobs_is_none() {
        for variables in [
            &[][..],
            &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")],
            &[("PMI_RANK", "2"), ("PMI_SIZE", "2")],
            &[("PMI_RANK", "-1"), ("PMI_SIZE", "2")],
        ] {
            assert_eq!(rank(variables), None, "{variables:?}");
        }
    }
}
