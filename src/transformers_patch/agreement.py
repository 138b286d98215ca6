"""Checks that training arguments agree with a shared accelerator state that they are about to keep.

A preserved state is used without changes. If the arguments ask for something else, that must not pass silently. Differences
in numbers or hardware raise; settings that a live process group cannot change any more warn once. This file only needs
torch and accelerate's two state classes, so that it can be copied into another package.
"""

import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch

from accelerate.state import AcceleratorState, PartialState

_TRUE = {"1", "true", "yes", "on", "y", "t"}
_ACCELERATORS = ("cuda", "xpu", "mps", "npu", "mlu", "musa", "hpu")
_warned: set[str] = set()


def state_exists() -> bool:
    """Return whether this process has a shared accelerator state, made by an `Accelerator` or a `PartialState`."""
    return bool(PartialState._shared_state)


def check(arguments: Any) -> None:
    """Compare training arguments with the existing state; every rank must call it, and every rank raises the same error.

    Args:
        arguments: `TrainingArguments` whose `use_cpu`, `fp16`, `bf16`, `deepspeed`, `fsdp`, `torch_compile`,
            `parallelism_config`, `ddp_backend` and `ddp_timeout` (seconds) are set.

    Raises:
        RuntimeError: they carry a DeepSpeed configuration, or ask for FSDP, and the state was not made for it.
        ValueError: they ask for another device, mixed precision or device mesh than the state has.

    Example:
        >>> from types import SimpleNamespace
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> check(SimpleNamespace(use_cpu=True, fp16=False, bf16=False, ddp_timeout=1800))
    """
    state = PartialState()
    _check_engine(arguments, state)
    _check_device(arguments, state.device)
    full: dict[str, Any] = AcceleratorState._shared_state
    # A state of only the process has no precision and no plugins yet: the Trainer's own Accelerator will set them.
    if full:
        _check_precision(arguments, full.get("_mixed_precision", "no"))
        _check_layout(arguments, full.get("parallelism_config"))
        _compare_compilation(arguments, full.get("dynamo_plugin"), state)
    _compare_group(arguments, state)


def _refusal(kind: type[Exception], asked: str, kept: str, change_arguments: str, change_state: str) -> Exception:
    return kind(
        f"{asked}, but the accelerator state that is kept {kept}. Three ways out: (1) {change_arguments}; (2) {change_state} before "
        "the arguments; (3) pass preserve_accelerator_state=False, so that the arguments reset the state and build their own."
    )


def _check_engine(arguments: Any, state: Any) -> None:
    full: dict[str, Any] = AcceleratorState._shared_state
    kind = full.get("distributed_type", state.distributed_type)
    for argument, required_kind, label in (("deepspeed", "DEEPSPEED", "DeepSpeed"), ("fsdp", "FSDP", "FSDP")):
        argument_value = getattr(arguments, argument, None)
        # A process state that no Accelerator has used yet does not know of FSDP; the Trainer's Accelerator can still ask.
        undecided = required_kind == "FSDP" and not full
        if argument_value and kind != required_kind and not undecided:
            kept = f"has distributed_type {str(getattr(kind, 'value', kind))!r}"
            leave, build = (
                f"leave `{argument}` out of the training arguments",
                f"build the Accelerator with {label}'s plugin",
            )
            raise _refusal(RuntimeError, f"`{argument}={argument_value!r}` asks for {label}", kept, leave, build)


def _check_device(arguments: Any, device: torch.device) -> None:
    if device.type == "xla":  # an XLA device is a processor as well as a TPU; `use_cpu` does not choose between them
        return
    use_cpu = bool(getattr(arguments, "use_cpu", False))
    wants_cpu = use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in _TRUE
    asked, kept = f"use_cpu={use_cpu} asks for the device", f"is on '{device}'"
    if wants_cpu and device.type != "cpu":
        raise _refusal(ValueError, f"{asked} 'cpu'", kept, "pass use_cpu=False", "build `Accelerator(cpu=True)`")
    if not wants_cpu and device.type == "cpu" and (other := _accelerator_type()):
        build = "build `Accelerator()` without cpu=True"
        raise _refusal(ValueError, f"{asked} '{other}'", kept, "pass use_cpu=True", build)


def _accelerator_type() -> str | None:
    modules = ((name, getattr(torch, name, None)) for name in _ACCELERATORS)
    return next((name for name, module in modules if module is not None and module.is_available()), None)


def requested_precision(arguments: Any) -> str:
    """Return the mixed precision of training arguments: "fp16", "bf16", or the value that the launcher exported."""
    requested = (name for name in ("fp16", "bf16") if getattr(arguments, name, False))
    return next(requested, os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower())


def _check_precision(arguments: Any, kept: str) -> None:
    requested = requested_precision(arguments)
    if requested == kept:
        return
    change = f"launch with ACCELERATE_MIXED_PRECISION={kept}, and pass neither fp16 nor bf16"
    if kept in ("fp16", "bf16"):
        change = f"pass {kept}=True"
    elif kept == "no":
        change = "pass fp16=False, bf16=False and unset ACCELERATE_MIXED_PRECISION"
    asked, build = (
        f"the training arguments ask for mixed precision {requested!r}",
        f'build `Accelerator(mixed_precision="{requested}")`',
    )
    raise _refusal(ValueError, asked, f"has {kept!r}", change, build)


def _check_layout(arguments: Any, kept: Any) -> None:
    requested = getattr(arguments, "parallelism_config", None)
    if requested is not None and requested is not kept and requested != kept:
        asked = f"the training arguments ask for parallelism_config={requested!r}"
        leave = "omit parallelism_config of the training arguments"
        build = "build `Accelerator(parallelism_config=...)` with it"
        raise _refusal(ValueError, asked, f"has {kept!r}", leave, build)


def _compare_compilation(arguments: Any, plugin: Any, state: Any) -> None:
    kept = str(getattr(getattr(plugin, "backend", "NO"), "value", "NO")).upper()
    if getattr(arguments, "torch_compile", False) and kept == "NO":
        reason = "the accelerator state that is kept was built without a dynamo backend"
        change = 'Build `Accelerator(dynamo_backend="inductor")` before the arguments.'
        _warn_once(state, f"torch_compile=True is not applied: {reason}. {change}")


def _compare_group(arguments: Any, state: Any) -> None:
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return
    requested_backend, live = getattr(arguments, "ddp_backend", None), str(group.get_backend())
    reason = "is not applied: the live process group, which is kept,"
    if requested_backend is not None and requested_backend != live:
        change = "Choose the backend where the first state is built."
        _warn_once(state, f"ddp_backend={requested_backend!r} {reason} uses {live!r}. {change}")
    seconds, timeout = getattr(arguments, "ddp_timeout", None), _live_timeout(state.device)
    if seconds is not None and timeout is not None and timedelta(seconds=seconds) != timeout:
        live_text = f"has a timeout of {timeout.total_seconds():g} s"
        change = "Choose it with `InitProcessGroupKwargs(timeout=...)` where the first Accelerator is built."
        _warn_once(state, f"ddp_timeout={seconds} (seconds) {reason} {live_text}. {change}")


def _live_timeout(device: torch.device) -> timedelta | None:
    # torch has no public way to ask; where its private one is gone, nothing is compared.
    try:
        group = torch.distributed.distributed_c10d._get_default_group()
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError, ValueError):
        return None


def _warn_once(state: Any, message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        if state.is_local_main_process:
            warn_caller(message)


def warn_caller(message: str) -> None:
    """Issue a UserWarning that points at the line which built the training arguments."""
    inside = {"functools", "transformers", __name__.partition(".")[0]}  # newer releases use functools' cached_property
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        depth, frame = depth + 1, frame.f_back
    # The frame that was found is the caller's; counting began with the one that calls this function.
    warnings.warn(message, UserWarning, stacklevel=depth)
