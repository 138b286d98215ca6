"""Checkpoints of engines: DeepSpeed writes into the folder that is staged, and reads from one that is verified.

Source: https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

import glob
import os
from functools import partial
from typing import Any

import torch

from accelerate.checkpoint.manifest import model_file
from accelerate.checkpoint.optimizers import Deferred

_GATHER = "stage3_gather_16bit_weights_on_model_save"


def tag(index: int) -> str:
    """Return the name of the folder of engine number `index` in a checkpoint: `pytorch_model`, `pytorch_model_1`, ..."""
    return os.path.splitext(model_file(index, safe_serialization=False))[0]


def save(engine: Any, folder: str, index: int, **options: Any) -> None:
    """Let the engine write everything it has. All ranks."""
    engine.save_checkpoint(folder, tag(index), **options)


def read(engine: Any, folder: str, index: int, strict: bool = True, **options: Any) -> Deferred:
    """Check what an engine saved, and return what loads it. All ranks.

    Raises:
        FileNotFoundError: it is not there.
        RuntimeError: it is of another model, or of another number of ranks.
    """
    place = os.path.join(folder, tag(index))
    if not os.path.isdir(place):
        raise FileNotFoundError(
            f"{folder!r} has no {tag(index)}/, the folder of engine number {index}: it was not saved with DeepSpeed, or with fewer engines."
        )
    shards = glob.glob(os.path.join(glob.escape(place), "*zero_pp_rank_*_optim_states.pt"))
    ranks = engine.seq_dp_world_size
    if shards and len(shards) != ranks:
        raise RuntimeError(
            f"{place!r} has the optimizer's shards of {len(shards)} ranks, and there are {ranks} now. Resume with {len(shards)} ranks."
        )
    load = partial(engine.load_checkpoint, folder, tag(index), load_module_strict=strict, **options)
    return Deferred(None, load)


def whole(engine: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of the engine's module, on rank 0 at stage 3 and on every rank else. All ranks.

    Raises:
        ValueError: the stage is 3, and gathering is switched off.
    """
    if engine.zero_optimization_stage() < 3:
        return _compact(engine.module.state_dict())
    if not config.get("zero_optimization", {}).get(_GATHER):
        raise ValueError(
            f"The whole weights of ZeRO stage 3 are gathered only where zero_optimization.{_GATHER} is true. Set it (or "
            "zero3_save_16bit_model=True of DeepSpeedPlugin), or save shards with save_state and merge them with zero_to_fp32.py."
        )
    return _gathered(engine)


def _compact(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors are copies of their own: ZeRO keeps parameters as views of one buffer."""
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.shape)
        if not value.numel() or key not in copies:
            copies[key] = value.detach().clone()
        return copies[key]

    return {name: own(value) for name, value in state.items()}


def _gathered(engine: Any) -> dict[str, Any]:
    """Gather a module at a time into the host memory of rank 0; tied parameters stay one tensor."""
    import deepspeed

    first, state, seen = engine.global_rank == 0, {}, {}
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(list(own.values()), modifier_rank=None):
            for name, parameter in own.items() if first else ():
                if parameter.ds_id not in seen:
                    seen[parameter.ds_id] = parameter.detach().to("cpu", copy=True)
                state[f"{prefix}.{name}".removeprefix(".")] = seen[parameter.ds_id]
    if first:
        persistent = engine.module.state_dict().keys()
        buffers = {name: value.cpu() for name, value in engine.module.named_buffers(remove_duplicate=False)}
        state |= {name: value for name, value in buffers.items() if name in persistent}
    return state
