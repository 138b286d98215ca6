"""A model's weights outside of checkpoints: gathered, streamed, and saved for other programs."""

import copy
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.base._warn import warn_user
from accelerate.base.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accelerate.base.text import convert_file_size_to_int
from accelerate.checkpoint import formats, fsdp
from accelerate.checkpoint import state as states
from accelerate.checkpoint.model_io import io_of
from accelerate.checkpoint.save import plain_names, writes
from accelerate.modules import tensor_kinds
from accelerate.modules.offloaded import has_offloaded_params
from accelerate.modules.unwrap import canonical_name, canonical_names, clean_state_dict_for_safetensors
from accelerate.runtime.torch_private import local_part
from accelerate.strategies import shard
from accelerate.training.run import TrainingRun

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]
# Without this file PEFT finds no adapter in a folder.
_ADAPTER = "adapter_config.json"


def get_state_dict(
    accelerator: TrainingRun, model: nn.Module, unwrap: bool, offloaded: Callable[[nn.Module], dict[str, Any]]
) -> dict[str, Any]:
    """Return the full state dict of a model; `offloaded` collects that of offloaded weights.

    Collective: call on every rank.
    """
    for module in model.modules():
        # Of several hooks of a module, one may keep its weights elsewhere.
        hooked = "_hf_hook" in module.__dict__
        if hooked and (has_offloaded_params(module) or any(w.is_meta for w in module.parameters(recurse=False))):
            return offloaded(model)
    state = accelerator._state_io.model_state(accelerator, model, unwrap=unwrap)
    return plain_names(state) if unwrap and state is not None else state


def _refuse_meta(state: Mapping[str, Any]) -> None:
    if meta := [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise RuntimeError(
            f"{len(meta)} weights are on the meta device and have no values, {meta[0]!r} for one. Load them before saving."
        )


def stream_weights(
    accelerator: TrainingRun, model: nn.Module, dtype: torch.dtype | None, limit: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield copies of a model's full tensors in buckets of at most so many bytes, or of one tensor.

    Collective: call on every rank, in step.
    """
    # A cast must not change packed weights and their scales.
    scales = canonical_names(tensor_kinds.of_model(accelerator._strategy.unwrap_model(model)))
    packed = tuple([name.rpartition(".")[0] for name in scales])
    inner = (*model.parameters(), *model.buffers()) if accelerator._state_io.gathers_new_memory else ()
    own = {local_part(tensor).data_ptr() for tensor in inner}
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, value in accelerator._state_io.whole_tensors(accelerator, model):
        if not isinstance(value, torch.Tensor):  # an extra state of a module
            continue
        _refuse_meta({name: value})
        kept = dtype if dtype and value.is_floating_point() and not name.startswith(packed) else value.dtype
        if bucket and size + value.numel() * kept.itemsize > limit:
            yield bucket
            bucket.clear()  # the caller's variable would hold its memory while the next one is filled
            size = 0
        bucket[name] = value.detach().to(kept, copy=not own or value.data_ptr() in own)
        size += bucket[name].nbytes
    if bucket:
        yield bucket
        bucket.clear()


def save_model(
    accelerator: TrainingRun,
    model: nn.Module,
    save_directory: Folder,
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Save a model's weights alone, in shards if they are large.

    Collective: call on every rank, one process writes.
    """
    if os.path.isfile(save_directory):
        raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file; pass a folder.")
    convert_file_size_to_int(max_shard_size)  # refused on all ranks, not by the one that writes alone
    state = accelerator.get_state_dict(model)
    _refuse_meta(state or {})
    if not writes(accelerator.project_configuration.save_on_each_node):
        return
    if accelerator._state_io.saves_shards and not accelerator.is_main_process:
        warn_user(
            "save_model with save_on_each_node=True writes on the first node only here: the weights are gathered by the main "
            f"process. Copy {os.fspath(save_directory)!r} from there if other nodes need it."
        )
        return
    if safe_serialization:
        state = clean_state_dict_for_safetensors(state)
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else WEIGHTS_PATTERN_NAME
    formats.replace_weights(save_directory, state, pattern, convert_file_size_to_int(max_shard_size))
    readers_first = [os.path.join(save_directory, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    if not safe_serialization and any(map(os.path.exists, readers_first)):
        warn_user(
            f"save_model wrote {WEIGHTS_NAME}, but {os.fspath(save_directory)!r} also has safetensors of an earlier save, which "
            "readers prefer. Remove them, or save with safe_serialization=True."
        )


# -- adapters of PEFT ----------------------------------------------------------------------------------------------


def save_adapter(accelerator: TrainingRun, model: nn.Module, folder: Folder) -> None:
    """Gather a model's adapters, compare them with the shards of each rank, and let rank 0 write them.

    Collective: call on every rank.
    """
    inner = accelerator._strategy.unwrap_model(model, keep_torch_compile=False)
    adapters = getattr(inner, "peft_config", None) or {}
    if not adapters or any(config.is_prompt_learning for config in adapters.values()):
        raise ValueError(
            f"save_adapter got {type(inner).__name__} with the adapters {list(adapters)}, and saves those that PEFT has put into "
            "layers. Add one with peft.get_peft_model before `prepare`; save_model saves whole models, save_pretrained learnt prompts."
        )
    names: list[str] = []
    any(accelerator._state_io.whole_tensors(accelerator, model, names.append))  # which wants none of them
    # PEFT chooses by names, on all ranks, as it may ask units for their states. Rank 0's choice counts, as it may ask the hub.
    marks = {name: torch.tensor([number]) for number, name in enumerate(names)}
    chosen = {adapter: fsdp.adapter_entries(model, marks, adapter) for adapter in adapters}
    files = {adapter: {key: names[int(mark)] for key, mark in marks.items()} for adapter, marks in chosen.items()}
    files = states.from_first_rank(files)
    wanted = {name for file in files.values() for name in file.values()}
    own: dict[str, torch.Tensor] = (
        {} if io_of(model).gives_copies else {canonical_name(name): value for name, value in inner.named_parameters()}
    )
    state, problems = {}, []
    value: torch.Tensor
    for name, value in accelerator._state_io.whole_tensors(accelerator, model, wanted.__contains__):
        problems += shard.misfit(name, value, own.get(name, value))
        if accelerator.is_main_process:
            state[name] = value.to("cpu", copy=True)
    if problems := list(itertools.chain.from_iterable(states.gather_from_all_ranks(problems))):
        raise RuntimeError(f"The adapters were not saved: {'; '.join(problems[:5])}.")

    def write() -> None:
        for adapter, file in files.items() if accelerator.is_main_process else ():
            tensors = {key: state[name] for key, name in file.items()}
            _write_adapter(inner, adapter, tensors, os.path.join(folder, adapter if adapter != "default" else ""))

    states.run_on_all_ranks(write)


def _write_adapter(inner: Any, adapter: str, tensors: dict[str, torch.Tensor], folder: str) -> None:
    """Write an adapter's files; a folder has the former adapter, the new one, or none that PEFT would load. One process."""
    config = copy.copy(inner.peft_config[adapter])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or inner.__dict__.get("name_or_path")
    if not hasattr(
        inner, "get_base_model"
    ):  # adapters in the place of layers: PEFT loads them into a model that it wraps
        tensors = {f"base_model.model.{name}": value for name, value in tensors.items()}
    with tempfile.TemporaryDirectory() as aside:
        config.save_pretrained(aside)
        text = Path(aside, _ADAPTER).read_bytes()
    path = Path(folder, _ADAPTER)
    if path.exists() and path.read_bytes() != text:  # of another adapter, whose weights go
        path.unlink()
    formats.replace_weights(folder, clean_state_dict_for_safetensors(tensors), "adapter_model{suffix}.safetensors")
    formats.write_bytes(path, text)
