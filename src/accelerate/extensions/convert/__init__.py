"""Checkpoints without the run that wrote them: the commands `accelerate checkpoint` and `accelerate merge-weights`."""

from accelerate.extension import Command, Spec

_HOME = "accelerate.extensions.convert"
SPEC = Spec(
    "convert",
    commands={
        "checkpoint": Command(
            f"{_HOME}.command", "checkpoint_command_parser", "List, verify, convert and prune checkpoints."
        ),
        "merge-weights": Command(f"{_HOME}.merge", "merge_command_parser", "Merge the shards of an FSDP checkpoint."),
    },
)
