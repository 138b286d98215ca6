"""Accelerate's interface, implemented independently: every public name, imported when it is first used.

The package imports nothing heavy by itself, so that ``accelerate --help`` and ``import accelerate`` stay cheap; a name is
looked up in its home module at the first access (PEP 562).
"""

import importlib
from typing import Any

__version__ = "1.15.0+fork.1"

_HOMES = {
    "accelerate.accelerator": "Accelerator",
    "accelerate.big_modeling": (
        "cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights init_on_device "
        "load_checkpoint_and_dispatch"
    ),
    "accelerate.data_loader": "skip_first_batches",
    "accelerate.inference": "prepare_pippy",
    "accelerate.launchers": "debug_launcher notebook_launcher",
    "accelerate.parallelism_config": "ParallelismConfig",
    "accelerate.state": "PartialState",
    "accelerate.utils.dataclasses": (
        "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
        "DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs "
        "InitProcessGroupKwargs ProfileKwargs"
    ),
    "accelerate.utils.imports": "is_rich_available",
    "accelerate.utils.memory": "find_executable_batch_size",
    "accelerate.utils.modeling": "infer_auto_device_map load_checkpoint_in_model",
    "accelerate.utils.random": "synchronize_rng_states",
}

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_SUBMODULES = frozenset(
    [
        "accelerator",
        "backends",
        "big_modeling",
        "checkpointing",
        "commands",
        "data_loader",
        "hooks",
        "inference",
        "launchers",
        "local_sgd",
        "logging",
        "memory_utils",
        "optimizer",
        "parallelism_config",
        "process",
        "scheduler",
        "state",
        "test_utils",
        "tracking",
        "utils",
    ]
)
__all__ = [*_HOME_OF, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value  # the next look-up is an ordinary attribute access
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
