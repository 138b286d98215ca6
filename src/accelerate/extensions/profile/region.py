"""A region that is profiled."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from accelerate.base.constants import PROFILE_PATTERN_NAME
from accelerate.checkpoint.state import run_on_all_ranks
from accelerate.extensions.profile.settings import ProfileKwargs


def profile(
    accelerator: Any, profile_handler: ProfileKwargs | None = None
) -> contextlib.AbstractContextManager[torch.profiler.profile]:
    """Return a context that profiles its region, and writes a trace per rank where a folder is set.

    Collective: call on every rank.

    Args:
        profile_handler: Settings for this region, instead of the Accelerator's.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> with accelerator.profile() as profiler:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> any("mm" in row.key for row in profiler.key_averages())
        True

    Source:
        https://docs.pytorch.org/docs/stable/profiler.html
    """
    return _profiled(accelerator, profile_handler or accelerator.profile_handler or ProfileKwargs())


@contextlib.contextmanager
def _profiled(accelerator: Any, handler: ProfileKwargs) -> Iterator[torch.profiler.profile]:
    with (
        _memory_snapshot(handler.snapshot_folder, accelerator.device, accelerator.process_index),
        handler.build() as profiler,
    ):
        yield profiler
    if handler.output_trace_dir is not None:
        name = PROFILE_PATTERN_NAME.format(suffix=accelerator.process_index)
        path = os.path.join(handler.output_trace_dir, name)

        def write() -> None:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            profiler.export_chrome_trace(path)

        run_on_all_ranks(write)
        accelerator.wait_for_everyone()


@contextlib.contextmanager
def _memory_snapshot(folder: str | None, device: torch.device, rank: int) -> Iterator[None]:
    """Record the allocations on a device inside, and write them to a file in a folder, after an error too; None does nothing."""
    if folder is None:
        yield
        return
    memory = getattr(getattr(torch, device.type, None), "memory", None)
    if not hasattr(memory, "_record_memory_history"):
        raise ValueError(
            f"memory_snapshot={folder!r}: torch records no allocations on {device.type!r}. Set profile_memory=True instead, "
            "which puts them into the trace."
        )
    os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as last:
        last.callback(memory._record_memory_history, enabled=None)
        memory._record_memory_history()
        last.callback(memory._dump_snapshot, os.path.join(folder, f"memory_{rank}.pickle"))
        yield
