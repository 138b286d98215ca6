"""Weights that are quantised to 8 bits with bitsandbytes on their way to an offload folder."""

import os

import torch
from torch import nn

from accelerate.devices.probe import detect
from accelerate.offload.bnb_parameters import INT8, scales_name
from accelerate.offload.disk import offload_weight
from accelerate.offload.placement import default_device, set_module_tensor_to_device
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
    """Write a tensor to a folder and leave it on the meta device; the weight of an 8-bit layer is quantised before.

    Args:
        model: The model that the tensor belongs to.
        param: Its value: floating-point numbers, or with ``fp16_statistics`` an 8-bit weight that is quantised already.
        param_name: Full name of the tensor.
        new_dtype: Dtype that floating-point numbers are cast to, before they are quantised where they are. None: that of the
            tensor in the model.
        offload_folder: Where the files go: one for the tensor, and one for the scales of an 8-bit weight.
        offload_index: Receives their entries.
        fp16_statistics: The scales of a weight that is quantised already.

    Raises:
        ValueError: The model has no such tensor, or an 8-bit weight comes without its scales.

    Source: LLM.int8() (arXiv 2208.07339)
    """
    owner, name = tensor_at(model, param_name)
    if not isinstance(getattr(owner, name, None), torch.Tensor):
        raise ValueError(f"{type(owner).__name__} has no parameter or buffer named {param_name!r}.")
    scales = fp16_statistics
    if scales is None and type(getattr(owner, name)).__name__ == INT8:
        # On the device that computes, so that the weight is what it would be without offloading.
        set_module_tensor_to_device(owner, name, default_device(), value=param, dtype=new_dtype, clear_cache=False)
        placed = getattr(owner, name)
        param, scales = placed.data, placed.SCB
    elif scales is None and param.is_floating_point():
        param = param.to(getattr(owner, name).dtype if new_dtype is None else new_dtype)
    if scales is not None:
        # Small, and wanted in the state dict, so they stay in memory too.
        scales = scales.to("cpu")
        offload_weight(scales, scales_name(param_name), offload_folder, index=offload_index)
    offload_weight(param, param_name, offload_folder, index=offload_index)
    set_module_tensor_to_device(
        owner, name, "meta", value=param.to("meta"), dtype=param.dtype, fp16_statistics=scales, clear_cache=False
    )
    if detect().type != "cpu":
        detect().empty_cache()
