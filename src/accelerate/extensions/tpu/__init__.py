"""TPUs: a process for each core of this machine, or the same launch on each machine of a pod."""

from accelerate.extension import Command, Spec

SPEC = Spec(
    "tpu",
    options="accelerate.extensions.tpu.options",
    runners={"tpu": "accelerate.launch.runners.tpu", "tpu_pod": "accelerate.launch.runners.tpu_pod"},
    commands={
        "tpu-config": Command(
            "accelerate.commands.tpu", "tpu_command_parser", "Run commands on the machines of a TPU pod."
        )
    },
)
