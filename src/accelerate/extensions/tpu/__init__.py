"""TPUs: a process for each core of this machine, or the same launch on each machine of a pod."""

from accelerate.extension import Spec

SPEC = Spec(
    "tpu",
    options="accelerate.extensions.tpu.options",
    runners={"tpu": "accelerate.launch.runners.tpu", "tpu_pod": "accelerate.launch.runners.tpu_pod"},
    commands={"tpu-config": "accelerate.commands.tpu"},
)
