"""Contexts of an Accelerator: autocast, profiling, and functions that run on some ranks alone."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from accelerate.config.handlers import AutocastKwargs, ProfileKwargs
from accelerate.precision import amp
from accelerate.precision.base import precision
from accelerate.utils.constants import PROFILE_PATTERN_NAME

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


def autocast(accelerator: "Accelerator", handler: AutocastKwargs | None) -> contextlib.AbstractContextManager:
    """Return the autocast context of the precision in force."""
    handler = accelerator.autocast_handler if handler is None else handler
    return amp.autocast_context(accelerator.device.type, precision(accelerator.mixed_precision), handler)


@contextlib.contextmanager
def profile(accelerator: "Accelerator", handler: ProfileKwargs | None) -> Iterator[torch.profiler.profile]:
    """Profile a region, and write one chrome trace per rank where a folder is configured."""
    handler = handler or accelerator.profile_handler or ProfileKwargs()
    with handler.build() as profiler:
        yield profiler
    if handler.output_trace_dir is None:
        return
    os.makedirs(handler.output_trace_dir, exist_ok=True)
    name = PROFILE_PATTERN_NAME.format(suffix=accelerator.process_index)
    profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, name))
    accelerator.wait_for_everyone()


def release(accelerator: "Accelerator", objects: tuple[Any, ...]) -> list[Any]:
    """Let go of everything prepared, so that the next ``prepare`` is a first one, and of the objects given."""
    from accelerate.backends.registry import resolve
    from accelerate.utils.memory import release_memory

    resolve(accelerator.state).release(accelerator)
    for known in (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders):
        known.clear()
    accelerator._registry.clear()
    accelerator._window.__init__()
    accelerator.step = 0
    accelerator.gradient_state._set_sync_gradients(True)  # the window that was open, if any, is gone
    accelerator.has_lomo_optimizer = False
    return release_memory(*objects)
