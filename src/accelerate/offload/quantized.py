"""8-bit weights of bitsandbytes that are offloaded."""

import os

import torch
from torch import nn

from accelerate.devices.probe import detect
from accelerate.offload.disk import offload_weight
from accelerate.offload.placement import set_module_tensor_to_device
from accelerate.offload.tensors import tensor_at


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype | None,
    offload_folder: str | os.PathLike,
    offload_index: dict[str, dict],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Quantise a weight on the accelerator, write it and its scales to a folder, and leave the weight on meta.

    Args:
        model: The model that the weight belongs to.
        param: The weight, or, with ``fp16_statistics``, an 8-bit weight that is quantised already.
        param_name: Full name of the weight.
        new_dtype: Dtype of the weight before it is quantised.
        offload_folder: Where the files go.
        offload_index: Receives their entries.
        fp16_statistics: The scales of a weight that is quantised already.

    Raises:
        ValueError: Nothing is quantised yet and this machine has no accelerator to do it on.
    """
    statistics = fp16_statistics
    if statistics is None:
        set_module_tensor_to_device(model, param_name, 0, value=param, dtype=new_dtype)
        owner, name = tensor_at(model, param_name)
        placed = getattr(owner, name)
        param, statistics = placed.data, getattr(placed, "SCB", None)
    offload_weight(param, param_name, offload_folder, index=offload_index)
    if statistics is not None:
        offload_weight(statistics, param_name.replace("weight", "SCB"), offload_folder, index=offload_index)
    set_module_tensor_to_device(model, param_name, "meta", dtype=new_dtype)
    if detect().type != "cpu":
        detect().empty_cache()
