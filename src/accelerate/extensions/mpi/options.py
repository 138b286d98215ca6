"""Options of a launch through mpirun."""

from accelerate.config.options.schema import Chapter, Feature, existing_file, matching, rows

_mpi = rows("MPI Arguments", section="mpirun_config", chapter="mpi", before="compute_environment")

OPTIONS = (
    _mpi("mpirun_hostfile", "Host file of mpirun, to start CPU processes through it.", check=existing_file),
    _mpi(
        "mpirun_ccl",
        "Workers of oneCCL for each process.",
        flags=(),
        feature="mpi",
        offer="1",
        check=matching(r"[0-9]+", "it must be a whole number"),
    ),
)
FEATURES = {"mpi": Feature("Launching through mpirun", "mpirun_hostfile", section="mpirun_config", runners=("mpi",))}
CHAPTERS = (
    Chapter(
        "mpi",
        "Should mpirun start the processes?",
        when={"kind": ("MULTI_CPU",)},
        was="mpirun_hostfile",
        before="processes",
    ),
)
