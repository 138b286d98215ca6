"""Reports of ranks that wait for missing ones: who is missing, where it is, and why."""

from accelerate.extension import Command, Spec

_DIAGNOSE = "accelerate.extensions.hang.diagnose"
SPEC = Spec(
    "hang",
    process="accelerate.extensions.hang.hang:HangDiagnosis",
    commands={
        "diagnose": Command(
            _DIAGNOSE, "diagnose_command_parser", "Print the reports and stacks of a hung or failed run."
        ),
        "stacks": Command(_DIAGNOSE, "stacks_command_parser", "Print the stacks of the ranks of a running job."),
    },
)
