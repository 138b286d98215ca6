"""Options of a simulated run."""

from accelerate.config.options.schema import ON, at_least, matching, rows

# For one launch only: a configuration file is for the real run.
_simulate = rows(
    "Simulation Arguments", "simulate", key="", env="ACCELERATE_SIMULATE*", before="deepspeed_config_file"
)

OPTIONS = (
    _simulate(
        "",
        "Run the script as one rank of machines x processes on this machine's CPU, simulate the others, and report layout, data, "
        "memory, collectives and checkpoints: 128x8.",
        check=matching(r"[1-9]\d{0,5}x[1-9]\d{0,5}", "write machines x processes of each, such as 128x8"),
    ),
    _simulate("_rank", "Which rank a simulated run is; 0 by default.", type="int", check=at_least(0)),
    _simulate("_steps", "End a simulated run after so many optimizer steps.", type="int", check=at_least(1)),
    _simulate(
        "_shapes_only",
        "Give tensors of a simulated run shapes without memory, so that the model may be larger than this machine's memory.",
        switch=True,
        style=ON,
    ),
    _simulate(
        "_device", "Compare a simulated run with a kind of device, such as h100-80gb, and estimate a step on it."
    ),
    _simulate("_report", "File for the report of a simulated run, as JSON."),
)
