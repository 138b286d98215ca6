"""What the launcher can be asked to run, which option asks for it, and what can be run so far."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Feature:
    """A way of training that needs a runner or an engine of its own.

    Attributes:
        title: its name in messages.
        switch: the option that turns it on.
        wanted: the value of the switch that does so; None means any value that is set and not false, and an integer
            means any value above it.
        ready: False as long as this version cannot run it; asking for it is an error then, never ignored.
        instead: what works today, for that error.
    """

    title: str
    switch: str
    wanted: Any = None
    ready: bool = False
    instead: str = ""

    def is_on(self, value: Any) -> bool:
        """Tell whether this value of the switch asks for the feature."""
        if isinstance(self.wanted, int):
            return value is not None and value > self.wanted
        return bool(value) if self.wanted is None else value == self.wanted

    @property
    def request(self) -> str:
        """How to ask for the feature on the command line."""
        if self.wanted is None:
            return f"--{self.switch}"
        return f"--{self.switch} {'N' if isinstance(self.wanted, int) else self.wanted}"


FEATURES: dict[str, Feature] = {
    "deepspeed": Feature("DeepSpeed", "use_deepspeed", ready=True),
    "fsdp": Feature("FSDP", "use_fsdp", ready=True),
    "megatron": Feature(
        "Megatron-LM",
        "use_megatron_lm",
        instead="--use_fsdp, or --use_parallelism_config with --parallelism_config_tp_size for tensor parallelism",
    ),
    "parallelism": Feature("Parallelism along several dimensions", "use_parallelism_config", ready=True),
    "fp8": Feature("FP8 training", "mixed_precision", wanted="fp8", ready=True),
    "tpu": Feature("Training on TPUs", "tpu", ready=True),
    "machines": Feature(
        "Launching on several machines",
        "num_machines",
        wanted=1,
        ready=True,
    ),
    "mpi": Feature("Launching through mpirun", "mpirun_hostfile", ready=True),
    "sagemaker": Feature(
        "Amazon SageMaker",
        "compute_environment",
        wanted="AMAZON_SAGEMAKER",
        ready=True,
    ),
}

# What `distributed_type` in a configuration file means in terms of options; an unknown name is an error.
SWITCH_OF_DISTRIBUTED_TYPE: dict[str, str | None] = {
    "NO": None,
    "MULTI_CPU": None,
    "MULTI_GPU": "multi_gpu",
    "MULTI_NPU": "multi_gpu",
    "MULTI_MLU": "multi_gpu",
    "MULTI_SDAA": "multi_gpu",
    "MULTI_MUSA": "multi_gpu",
    "MULTI_XPU": "multi_gpu",
    "MULTI_HPU": "multi_gpu",
    "MULTI_NEURON": "multi_gpu",
    "DEEPSPEED": "use_deepspeed",
    "FSDP": "use_fsdp",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
}

# At most one of these is chosen; `--cpu` goes with all but the first two.
PARADIGMS = ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
NEEDS_DEVICES = ("multi_gpu", "tpu")

# The mappings of a configuration file, and the feature that reads each of them (None: every run).
SECTIONS: dict[str, str | None] = {
    "dynamo_config": None,
    "deepspeed_config": "deepspeed",
    "fsdp_config": "fsdp",
    "megatron_lm_config": "megatron",
    "fp8_config": "fp8",
    "mpirun_config": "mpi",
    "parallelism_config": "parallelism",
}
