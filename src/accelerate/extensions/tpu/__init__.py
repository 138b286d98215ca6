"""TPUs: a process for each core of this machine, or the same launch on each machine of a pod."""

from accelerate.extension import Command, Spec

SPEC = Spec(
    "tpu",
    options="accelerate.extensions.tpu.options",
    runners={"tpu": "accelerate.extensions.tpu.cores", "tpu_pod": "accelerate.extensions.tpu.pod"},
    commands={
        "tpu-config": Command(
            "accelerate.extensions.tpu.command", "tpu_command_parser", "Run commands on the machines of a TPU pod."
        )
    },
)
