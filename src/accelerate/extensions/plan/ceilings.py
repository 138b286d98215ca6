"""The measured peak rates of a device: products of large matrices, and copies within its memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from accelerate.devices import row
from accelerate.extensions.reports.device_specs import DeviceSpec

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Side of the matrices, and bytes of the copy: large enough to hide the start of a kernel.
SIDE, COPIED = 8192, 2 << 30
_TIMES = 10


def measured(spec: DeviceSpec, device: torch.device, side: int = SIDE, copied: int = COPIED) -> DeviceSpec:
    """Return a row of the table with rates that a device of this machine reaches, in a second or two.

    Not a collective.

    Args:
        spec: of a device of its kind; precisions that it lacks are not measured.
        device: where.
        side: of the square matrices.
        copied: bytes of the tensor that is copied.

    Returns:
        The row with ``flops`` a second and ``bandwidth`` in bytes a second, read and written.

    Example:
        >>> from accelerate.extensions.reports.device_specs import device_spec
        >>> found = measured(device_spec("h100-80gb"), torch.device("cpu"), side=64, copied=1 << 16)
        >>> found.flops["bf16"] > 0 and found.bandwidth > 0
        True
    """
    flops = {}
    for name in spec.flops:
        left_matrix, other = (torch.randn(side, side, device=device).to(_DTYPES[name]) for _ in range(2))
        flops[name] = 2 * side**3 / _seconds(partial(torch.matmul, left_matrix, other), device)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * copied / _seconds(partial(target.copy_, source), device)
    return replace(spec, flops=flops, bandwidth=bandwidth, source="measured on this machine")


def _seconds(task: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a task that has run twice before."""
    synchronize, times = row(device.type).synchronize, []
    for _ in range(_TIMES + 2):
        synchronize()
        start = time.perf_counter()
        task()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
