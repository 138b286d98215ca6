"""A model's full weights: written into files that the hub's libraries read, or streamed bucket by bucket."""

import os
from collections.abc import Iterator, Mapping
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
from accelerate.extensions.export.files import replace_weights
from accelerate.modules import tensor_kinds
from accelerate.modules.unwrap import canonical_names, clean_state_dict_for_safetensors
from accelerate.runtime.torch_private import local_part


def save_model(
    accelerator: Any,
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save a model's weights in shards with an index, as the hub's libraries read them.

    Collective: call on every rank.

    Args:
        model: The model, prepared or not.
        save_directory: The folder.
        max_shard_size: Largest size of a file, in bytes or as text such as ``"5GB"``.
        safe_serialization: Whether to write safetensors.

    Example:
        >>> import os, tempfile
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     accelerator.save_model(accelerator.prepare(torch.nn.Linear(1, 1)), folder)
        ...     os.listdir(folder)
        ['model.safetensors']
    """
    if os.path.isfile(save_directory):
        raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file; pass a folder.")
    convert_file_size_to_int(max_shard_size)  # refused on all ranks, not by the one that writes alone
    state = accelerator.get_state_dict(model)
    _refuse_meta(state or {})
    on_each_node = accelerator.project_configuration.save_on_each_node
    if not (accelerator.is_local_main_process if on_each_node else accelerator.is_main_process):
        return
    if accelerator._state_io.gathers and not accelerator.is_main_process:
        warn_user(
            "save_model with save_on_each_node=True writes on the first node only here: the weights are gathered by the main "
            f"process. Copy {os.fspath(save_directory)!r} from there if other nodes need it."
        )
        return
    if safe_serialization:
        state = clean_state_dict_for_safetensors(state)
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else WEIGHTS_PATTERN_NAME
    replace_weights(save_directory, state, pattern, convert_file_size_to_int(max_shard_size))
    readers_first = [os.path.join(save_directory, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    if not safe_serialization and any(map(os.path.exists, readers_first)):
        warn_user(
            f"save_model wrote {WEIGHTS_NAME}, but {os.fspath(save_directory)!r} also has safetensors of an earlier save, which "
            "readers prefer. Remove them, or save with safe_serialization=True."
        )


def stream_weights(
    accelerator: Any, model: nn.Module, dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 30
) -> Iterator[dict[str, torch.Tensor]]:
    """Return an iterator over a model's full weights, bucket by bucket, for an inference engine or an average on the host.

    Every rank gets every tensor, and holds one bucket and the tensor that comes next; under FSDP1 also the unit that is gathered.
    The ranks gather together: each takes all buckets, and does not run the model before the last one.

    Collective: call on every rank.

    Args:
        model: A prepared model, under any strategy.
        dtype: What floating tensors are cast to; packed 4-bit weights and their scales stay. None keeps what they are trained in.
        bucket_bytes: Largest size of a bucket, in bytes; a larger tensor fills one bucket.

    Returns:
        An iterator over dicts: names of the model's own state dict, without wrappers, and copies of the full tensors on the device.
        Of tied names the first one comes. A dict is emptied when the next one is requested; a tensor that is kept stays.

    Raises:
        ValueError: ``bucket_bytes`` is below 1.
        RuntimeError: Weights are on the meta device.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
        >>> for bucket in accelerator.stream_weights(model, dtype=torch.bfloat16, bucket_bytes=16):
        ...     print({name: (value.dtype, value.nbytes) for name, value in bucket.items()})
        {'weight': (torch.bfloat16, 16)}
        {'bias': (torch.bfloat16, 4)}
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} holds no tensor. Give at least 1; a larger tensor comes alone.")
    return _buckets(accelerator, model, dtype, bucket_bytes)


def _buckets(
    accelerator: Any, model: nn.Module, dtype: torch.dtype | None, limit: int
) -> Iterator[dict[str, torch.Tensor]]:
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


def _refuse_meta(state: Mapping[str, Any]) -> None:
    if meta := [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise RuntimeError(
            f"{len(meta)} weights are on the meta device and have no values, {meta[0]!r} for one. Load them before saving."
        )
