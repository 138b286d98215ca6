"""Torch's private names that this extension alone uses; see `runtime.torch_private`."""

from typing import Any

import torch


def is_lost_by_fork(namespace: Any) -> bool:
    """Say in a forked process whether it cannot use the device of `torch.cuda` or the like, as its parent has started the driver."""
    return bool(getattr(namespace, "_is_in_bad_fork", bool)())


def end_with_the_parent(number: int) -> None:
    """Ask the system to send this process a signal when its parent ends, where torch offers that."""
    getattr(torch.multiprocessing, "_prctl_pr_set_pdeathsig", lambda number: None)(number)


def let_finished_functions_end(agent: Any) -> None:
    """Let a process end when its function returns; torch keeps it until all functions have returned."""
    agent._pcontext._worker_finished_event.set()


def has_returned(agent: Any, local: int) -> bool:
    """Return whether the function of a process has returned."""
    return local in agent._pcontext._return_values or not agent._pcontext._ret_vals[local].empty()
