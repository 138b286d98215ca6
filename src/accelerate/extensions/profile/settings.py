"""The settings of a profile."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.config.enums import at_public_path
from accelerate.config.handlers import KwargsHandler

_OF_PROFILER = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@at_public_path
@dataclass
class ProfileKwargs(KwargsHandler):
    """The arguments of `torch.profiler.profile` in `Accelerator.profile`.

    Args:
        activities: the recorded activities: "cpu", "cuda", "xpu", "mtia", "hpu"; None takes all that torch supports here.
        schedule_option: keyword arguments of `torch.profiler.schedule` (wait, warmup, active, repeat, skip_first), in
            steps; None records all the time.
        on_trace_ready: called with the profiler whenever a trace is complete.
        record_shapes: record the shapes of operator inputs.
        profile_memory: record allocations.
        with_stack: record source lines.
        with_flops: estimate floating point operations.
        with_modules: record the module hierarchy.
        output_trace_dir: the folder for one Chrome trace per process; None writes none.
        memory_snapshot: record every allocation on the device with its stack, and write ``memory_<rank>.pickle`` for
            https://pytorch.org/memory_viz, also after an error. A path is the folder; True uses `output_trace_dir`. Only CUDA
            and XPU support it; elsewhere `profile_memory` puts allocations into the trace.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], record_shapes=True)])

    Source: https://pytorch.org/docs/stable/profiler.html
    """

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    memory_snapshot: bool | str | os.PathLike = False

    @property
    def snapshot_folder(self) -> str | None:
        """Return the folder of memory snapshots, if any; a ValueError if there is no folder."""
        if self.memory_snapshot is True and self.output_trace_dir is None:
            raise ValueError("memory_snapshot=True needs output_trace_dir, where it goes; or set it to a folder.")
        return self.output_trace_dir if self.memory_snapshot is True else os.fspath(self.memory_snapshot or "") or None

    def build(self) -> Any:
        """Return a `torch.profiler.profile`, not yet started; a ValueError names an activity that is unknown here.

        Not a collective.
        """
        from torch import profiler

        options = {name: value for name, value in vars(self).items() if name in _OF_PROFILER}
        if self.schedule_option is not None:
            options["schedule"] = profiler.schedule(**self.schedule_option)
        # "cuda" is always accepted: without CUDA torch warns and continues.
        members = {profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA, *profiler.supported_activities()}
        available = {member.name.lower(): member for member in sorted(members, key=lambda member: member.name)}
        for name in self.activities or ():
            if name not in available:
                raise ValueError(f"Invalid profiler activity: {name!r}. Here it must be one of {list(available)}.")
        chosen = None if self.activities is None else [available[name] for name in self.activities]
        return profiler.profile(activities=chosen, **options)
