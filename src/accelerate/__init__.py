"""Accelerate's interface, implemented independently: every public name, imported when it is first used.

The package imports nothing heavy itself, so that ``accelerate --help`` and ``import accelerate`` stay cheap. A name is
looked up in its home module at the first access (PEP 562).
"""

from accelerate.base._lazy import front as _front
from accelerate.base._lazy import require_torch as _require_torch

__version__ = "1.15.0+fork.1"

_require_torch((2, 7))

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
    "accelerate.base.imports": "is_rich_available",
    "accelerate.extensions.batch_size.search": "find_executable_batch_size",
    "accelerate.utils.modeling": "infer_auto_device_map load_checkpoint_in_model",
    "accelerate.runtime.random": "synchronize_rng_states",
}

_SUBMODULES = (
    "accelerator backends big_modeling checkpointing commands data_loader hooks inference launchers local_sgd logging "
    "memory_utils optimizer parallelism_config process scheduler state test_utils tracking utils"
)

__getattr__, __dir__, __all__ = _front(__name__, _HOMES, _SUBMODULES.split(), eager=["__version__"])
