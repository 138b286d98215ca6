"""How processes exchange tensors and objects: one `Communicator` per way of cooperating."""

import importlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from accelerate.comm import base
from accelerate.config.enums import DistributedType
from accelerate.config.strategies import record_of
from accelerate.extension import all_specs, imported
from accelerate.runtime import storage

_SINGLE = base.Communicator()
_live: dict[str, base.Communicator] = {}
_side_groups: weakref.WeakKeyDictionary[base.Communicator, dict[Any, Any]] = weakref.WeakKeyDictionary()


def for_type(distributed_type: DistributedType | str) -> base.Communicator:
    """Return the communicator of a distributed type. It depends on the type only, so that it outlives a reset state."""
    record = record_of(distributed_type)
    if not record.traits.distributed:
        return _SINGLE
    return _of_library(record.communicator) if record.communicator else _torch()


def current() -> base.Communicator:
    """Return the communicator of this process's state, which is built with the defaults if there is none."""
    return for_type(storage.process.filled()["distributed_type"])


def operation_checks() -> Any:
    """Return the module of an extension that compares the ranks' calls, or None. See `Spec.operation_checks`."""
    names = (spec.operation_checks for spec in all_specs() if spec.operation_checks)
    return next(map(importlib.import_module, names), None)


def forget() -> None:
    """Drop communicators, and with them the last references to a process group that is about to be destroyed."""
    for communicator in _live.values():
        communicator.group = None  # a caller may still hold the communicator, but the group must go now
    _live.clear()
    _side_groups.clear()


def side_group(beside: bool = False) -> Any | None:
    """Return the gloo group for small messages, separate from the training's group; None without a process group or gloo.

    The group is created once. The default group is used if it has gloo for the CPU, since each group opens a connection between
    any two ranks. `beside` is for a second thread: groups match collectives by their order, so two threads never share one.

    Collective: call on every rank, in one order.
    """
    communicator = current()
    if communicator.group is None or not dist.is_gloo_available():
        return None
    if not beside and "cpu:gloo" in str(dist.get_backend_config()).split(","):
        return communicator.group
    groups = _side_groups.setdefault(communicator, {})
    if beside not in groups:
        groups[beside] = dist.new_group(backend="gloo")
    return groups[beside]


def group_of(ranks: Sequence[int]) -> Any:
    """Return the process group of some ranks. It is created once: torch would find the addresses of a former one.

    Collective: call on each of these ranks.
    """
    groups = _side_groups.setdefault(current(), {})
    if (key := tuple(ranks)) not in groups:
        groups[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[key]


def _of_library(address: str) -> base.Communicator:
    return _live.get(address) or _live.setdefault(address, imported(address)())


def _torch() -> base.Communicator:
    if not (dist.is_available() and dist.is_initialized()):
        # An engine may be in force in a lone process; several processes without a group are an error at use.
        if storage.process.current.get("num_processes", 1) == 1:
            return _SINGLE
        raise RuntimeError("The process group was destroyed: nothing can be sent. Build a new `Accelerator()` first.")
    group = dist.group.WORLD
    live = _live.get("torch")
    if live is None or live.group is not group:  # also forgets calls of a group that was destroyed
        from accelerate.comm.torch_dist import TorchCommunicator

        checks = operation_checks()
        live = _live["torch"] = (TorchCommunicator if checks is None else checks.CheckedCommunicator)(group)
    return live
