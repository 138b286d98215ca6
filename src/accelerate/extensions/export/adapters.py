"""Adapters of PEFT, gathered from the ranks and written as PEFT reads them."""

import copy
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import formats, fsdp
from accelerate.checkpoint import state as states
from accelerate.checkpoint.model_io import io_of
from accelerate.extensions.export.files import replace_weights
from accelerate.modules.unwrap import canonical_name, clean_state_dict_for_safetensors
from accelerate.runtime.torch_private import box, local_part

# Without this file PEFT finds no adapter in a folder.
_CONFIG = "adapter_config.json"


def save_adapter(accelerator: Any, model: nn.Module, save_directory: str | os.PathLike[str]) -> None:
    """Save the adapters of a model that PEFT has extended, whole, as ``PeftModel.from_pretrained`` reads them.

    Rank 0 writes ``adapter_model.safetensors`` and ``adapter_config.json``; an adapter that is not called "default" goes into a
    folder of its name. Each rank first compares its DTensors with what was gathered. The configuration is written last, and that of an
    earlier adapter goes first: a save that is killed leaves the former adapter, the new one, or none that loads.

    Collective: call on every rank.

    Args:
        model: A prepared model with adapters, such as LoRA, around its layers or in their place; its layers may be quantised,
            sharded or split.
        save_directory: The folder.

    Raises:
        ValueError: The model has no adapters, or learnt prompts.
        RuntimeError: What was gathered contradicts the shard of some rank, or rank 0 could not write; raised on all ranks.

    Example:
        >>> import os, tempfile
        >>> from peft import LoraConfig, get_peft_model  # doctest: +SKIP
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> model = accelerator.prepare(get_peft_model(net, LoraConfig(r=2, target_modules=["0"])))  # doctest: +SKIP
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     accelerator.save_adapter(model, folder)  # doctest: +SKIP
        ...     sorted(os.listdir(folder))  # doctest: +SKIP
        ['adapter_config.json', 'adapter_model.safetensors']

    Source:
        https://huggingface.co/docs/peft/developer_guides/checkpoint
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
        problems += _misfit(name, value, own.get(name, value))
        if accelerator.is_main_process:
            state[name] = value.to("cpu", copy=True)
    if problems := list(itertools.chain.from_iterable(states.gather_from_all_ranks(problems))):
        raise RuntimeError(f"The adapters were not saved: {'; '.join(problems[:5])}.")

    def write() -> None:
        for adapter, file in files.items() if accelerator.is_main_process else ():
            tensors = {key: state[name] for key, name in file.items()}
            _write_adapter(
                inner, adapter, tensors, os.path.join(save_directory, adapter if adapter != "default" else "")
            )

    states.run_on_all_ranks(write)


def _misfit(name: str, whole: torch.Tensor, local: torch.Tensor) -> list[str]:
    """Say how a gathered tensor contradicts this rank's part of it: another size, or zeros in its place.

    Not a collective.
    """
    shape = getattr(local, "ds_shape", local.shape)
    if whole.shape != shape:
        return [f"{name} has the shape {tuple(whole.shape)} instead of {tuple(shape)}"]
    return [f"{name} is zero where a shard is not"] if local_part(local).any() and not whole[box(local)].any() else []


def _write_adapter(inner: Any, adapter: str, tensors: dict[str, torch.Tensor], folder: str) -> None:
    """Write an adapter's files; a folder has the former adapter, the new one, or none that PEFT would load. One process."""
    config = copy.copy(inner.peft_config[adapter])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or inner.__dict__.get("name_or_path")
    # Adapters in the place of layers: PEFT loads them into a model that it wraps.
    if not hasattr(inner, "get_base_model"):
        tensors = {f"base_model.model.{name}": value for name, value in tensors.items()}
    with tempfile.TemporaryDirectory() as aside:
        config.save_pretrained(aside)
        text = Path(aside, _CONFIG).read_bytes()
    path = Path(folder, _CONFIG)
    if path.exists() and path.read_bytes() != text:  # of another adapter, whose weights go
        path.unlink()
    replace_weights(folder, clean_state_dict_for_safetensors(tensors), "adapter_model{suffix}.safetensors")
    formats.write_bytes(path, text)
