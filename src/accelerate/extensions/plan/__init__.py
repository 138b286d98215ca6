"""Plans of a training on a cluster: the commands `accelerate plan` and `accelerate estimate-memory`."""

from accelerate.extension import Command, Spec

_HOME = "accelerate.extensions.plan"
SPEC = Spec(
    "plan",
    commands={
        "estimate-memory": Command(
            f"{_HOME}.estimate", "estimate_command_parser", "Estimate how much memory a model needs."
        ),
        "plan": Command(
            f"{_HOME}.command", "plan_command_parser", "List the layouts of a training that fit on a cluster."
        ),
    },
)
