"""Checkpoints of engines: DeepSpeed writes into the folder that is staged, and reads from one that is verified.

Source: https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

import glob
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from accelerate.checkpoint.manifest import model_file
from accelerate.checkpoint.optimizers import Deferred
from accelerate.checkpoint.state import on_all, together
from accelerate.runtime.durable import STAGING_PREFIX

logger = logging.getLogger(__name__)

_UNIVERSAL = "universal"
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
        RuntimeError: it could not be converted for this number of ranks.
    """
    place = os.path.join(folder, tag(index))
    if not os.path.isdir(place):
        raise FileNotFoundError(
            f"{folder!r} has no {tag(index)}/, the folder of engine number {index}: it was not saved with DeepSpeed, or with fewer engines."
        )
    shards = glob.glob(os.path.join(glob.escape(place), "*zero_pp_rank_*_optim_states.pt"))
    ranks = engine.seq_dp_world_size
    load = partial(engine.load_checkpoint, load_module_strict=strict, **options)
    if not shards or len(shards) == ranks:
        return Deferred(None, partial(load, folder, tag(index)))
    logger.info("%s has the optimizer's shards of %d ranks, and is converted for %d.", place, len(shards), ranks)
    universal = together(lambda: _converted(place) if engine.global_rank == 0 else None)
    return Deferred(None, partial(_load_universal, engine, on_all(universal)[0], load))


def _converted(place: str) -> str:
    """Write a checkpoint in DeepSpeed's format for any number of ranks into a new folder beside it, and return that."""
    made = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=os.path.dirname(os.path.dirname(os.path.abspath(place))))
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", place, "--output_folder", os.path.join(made, _UNIVERSAL)]
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    if done.returncode:
        shutil.rmtree(made, ignore_errors=True)
        raise RuntimeError(f"{place!r} could not be converted for another number of ranks: {done.stderr[-2000:]}")
    return made


def _load_universal(engine: Any, folder: str, load: Callable[..., Any]) -> None:
    """Load what `_converted` has written, and remove it. All ranks."""
    settings = engine._config
    before, settings.load_universal_checkpoint = settings.load_universal_checkpoint, True
    try:
        together(lambda: None)
        load(folder, _UNIVERSAL)
    finally:
        settings.load_universal_checkpoint = before
        together(lambda: None)
        if engine.global_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


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
