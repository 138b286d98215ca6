"""Agreement: do all ranks call the same operation, on values of the same structure, shapes and dtypes?

`comm.envelope` checks that in every exchange, for free. What lies here is the message, and the check of debug mode, which
covers every operation and compares the whole description.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate.comm.base import Communicator


class DistributedOperationException(Exception):
    """The ranks disagree about an operation: its kind, or the structure, shapes or dtypes of what it is given.

    All ranks raise it, so that the run ends at once instead of hanging.
    """


DistributedOperationException.__module__ = "accelerate.utils.operations"


def disagreement(operation: str, told: Sequence[str]) -> DistributedOperationException:
    """Return the error for ranks that disagree.

    Args:
        operation: what this rank called.
        told: what each rank passed, in words.
    """
    common = max(set(told), key=lambda text: (told.count(text), -told.index(text)))
    different = [str(rank) for rank, text in enumerate(told) if text != common]
    lines = "\n".join(f"  - Process {rank}: {text}" for rank, text in enumerate(told))
    return DistributedOperationException(
        f"The processes disagree about a distributed operation: process(es) {', '.join(different)} differ from the others. "
        "Every process must call it with values of the same structure, shapes and dtypes; "
        "`accelerator.pad_across_processes` makes shapes equal.\n\n"
        f"Operation: `{operation}`\nInput shapes:\n{lines}"
    )


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return dtype and shape in words.

    Example:
        >>> describe_tensor(torch.ones(2, 3))
        'float32[2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def describe(data: Any) -> str:
    """Return structure, shapes, dtypes and devices of nested tensors in words; other leaves by their type."""
    if isinstance(data, torch.Tensor):
        return f"{describe_tensor(data)} on {data.device.type}"
    if isinstance(data, dict) or hasattr(data, "items"):
        return "{" + ", ".join(f"{key!r}: {describe(value)}" for key, value in data.items()) + "}"
    if isinstance(data, (list, tuple)):
        inner = ", ".join(describe(value) for value in data)
        return f"[{inner}]" if isinstance(data, list) else f"({inner})"
    return type(data).__name__


def ignoring_sizes(data: Any) -> Any:
    """Return nested tensors as what padding must find equal: structure, number of dimensions and dtypes."""
    if isinstance(data, torch.Tensor):
        return data.ndim, str(data.dtype)
    if isinstance(data, dict) or hasattr(data, "items"):
        return {key: ignoring_sizes(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [ignoring_sizes(value) for value in data]
    return type(data).__name__


def verify(communicator: "Communicator", operation: str, data: Any, device: torch.device | None = None) -> None:
    """Compare what all ranks are about to pass to an operation. Every rank must call it; costs an exchange of objects.

    Args:
        communicator: who exchanges.
        operation: name of the operation, for the message.
        data: nested tensors.
        device: where tensors must be; None allows any.

    Raises:
        DistributedOperationException: the ranks disagree; raised on all of them.
    """
    pads = operation.rpartition(".")[2] == "pad_across_processes"
    key = repr(ignoring_sizes(data)) if pads else describe(data)
    stray = sorted(kinds - {device.type}) if device is not None and (kinds := _device_types(data)) else []
    told = communicator.gather_object((operation, key, describe(data), stray))
    strays = {rank: entry[3] for rank, entry in enumerate(told) if entry[3]}
    if strays:
        where = "; ".join(f"process {rank}: {', '.join(kinds)}" for rank, kinds in strays.items())
        raise DistributedOperationException(
            f"`{operation}` was given tensors that are not on the device type {device.type!r} of this run ({where}). Move "
            "them there first, with `tensor.to(accelerator.device)`."
        )
    if any(entry[:2] != told[0][:2] for entry in told):
        names = {entry[0] for entry in told}
        texts = [entry[2] if len(names) == 1 else f"`{entry[0]}` of {entry[2]}" for entry in told]
        raise disagreement(operation, texts)


def _device_types(data: Any) -> set[str]:
    if isinstance(data, torch.Tensor):
        return {data.device.type}
    if isinstance(data, dict) or hasattr(data, "items"):
        data = list(data.values())
    if isinstance(data, (list, tuple)):
        return set().union(*map(_device_types, data))
    return set()
