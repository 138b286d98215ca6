"""Moving batches to the device, at no cost when they are there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate.utils.operations import send_to_device

CPU = torch.device("cpu")


def placer(device: torch.device | str | int | None, non_blocking: bool = False) -> Callable[[Any], Any] | None:
    """Choose, once per epoch, the function that brings a batch to `device`.

    Args:
        device: where batches belong; None leaves them where they are.
        non_blocking: let copies from pinned memory overlap with computation.

    Returns:
        A function from batch to placed batch, or None if there is nothing to do.
    """
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cpu":
        return keep_on_cpu
    return lambda batch: send_to_device(batch, device, non_blocking=non_blocking)


def keep_on_cpu(batch: Any) -> Any:
    """Return the batch itself if it is a tensor, or a flat dict, list or tuple of tensors, on the CPU; else move it."""
    kind = type(batch)
    if kind is torch.Tensor:
        return batch if batch.is_cpu else batch.to(CPU)
    if kind is dict:
        tensors = batch.values()
    elif kind is list or kind is tuple:
        tensors = batch
    else:
        return send_to_device(batch, CPU)
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or not tensor.is_cpu:
            return send_to_device(batch, CPU)
    return batch
