"""torch's private names that this extension uses, of collectives and frames; see `accelerate.runtime.torch_private`."""

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


def flight_recorders() -> list[Callable[[bool, bool], str]]:
    """Return this torch's functions that write a recorder of collectives as JSON."""
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = (getattr(module, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    return [dump for dump in dumps if dump]


def workers_awaited(frame: FrameType) -> list[Any]:
    """Return the worker processes whose next batch the function of a frame waits for."""
    waits = frame.f_code.co_name == "_try_get_data"
    return getattr(frame.f_locals.get("self"), "_workers", []) if waits else []


def module_called(frame: FrameType) -> Any:
    """Return the module whose call the function of a frame is, or the name of the one whose weights FSDP2 gathers there, or None."""
    place = frame.f_globals.get("__name__", "")
    if place == "torch.nn.modules.module" and frame.f_code.co_name == "_call_impl":
        return frame.f_locals.get("self")
    return getattr(frame.f_locals.get("self"), "_module_fqn", None) if place.endswith("_fsdp_param_group") else None
