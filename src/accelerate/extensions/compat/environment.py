"""Environment variables and this machine, as programs ask for them by `accelerate.utils.environment` and `accelerate.utils.imports`."""

import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate.base.environment import get_int_from_env, restore

logger = logging.getLogger("accelerate.utils.environment")  # the public path

T = TypeVar("T", bound=Callable[..., Any])


@contextmanager
def _accelerate_variables_kept() -> Iterator[None]:
    def current() -> dict[str, str | None]:
        return {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}

    previous = current()
    try:
        yield
    finally:
        restore(dict.fromkeys(current()) | previous)


def _keeping_variables(function: T) -> T:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _accelerate_variables_kept():
                return await function(*args, **kwargs)

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _accelerate_variables_kept():
                return (yield from function(*args, **kwargs))

    else:
        wrapper = _accelerate_variables_kept()(function)
    return wrapper


def _keep_variables_in_tests(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, (staticmethod, classmethod)):
            setattr(cls, name, type(member)(_keeping_variables(member.__func__)))
        elif inspect.isfunction(member):
            setattr(cls, name, _keeping_variables(member))


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function, or the test methods of a class and its subclasses, to restore `ACCELERATE_*` variables afterwards.

    Variables that the body adds are removed. Variables that it changes or removes get their former values, also after an
    exception. Coroutine functions and generators are covered for as long as they run.

    Args:
        func_or_cls: a function, or a class; of a class, the methods whose name starts with "test".

    Returns:
        The wrapped function, or the same class.

    Example:
        >>> @purge_accelerate_environment
        ... def configure():
        ...     os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        >>> configure(); "ACCELERATE_MIXED_PRECISION" in os.environ
        False
    """
    if not isinstance(func_or_cls, type):
        return _keeping_variables(func_or_cls)

    cls = func_or_cls
    own_hook = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: type, **kwargs: Any) -> None:
        if own_hook is not None:
            own_hook.__get__(None, subclass)(**kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        _keep_variables_in_tests(subclass)

    cls.__init_subclass__ = classmethod(init_subclass)
    _keep_variables_in_tests(cls)
    return cls


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    """Turn variables into the lines (NAME=value) of an environment file, such as DeepSpeed's `.deepspeed_env`.

    A warning lists skipped entries: a name that is no plain identifier, an empty value, or a value that could end the line or
    start another command.

    Example:
        >>> from accelerate.utils import convert_dict_to_env_variables
        >>> convert_dict_to_env_variables({"NCCL_DEBUG": "INFO"})
        ['NCCL_DEBUG=INFO\\n']
    """
    lines = []
    for key, value in current_env.items():
        text = "" if value is None else str(value)
        # A space would split the entry, a line break or NUL would end it, `;<>` mean something to the remote shell.
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(key)) and text and not re.search(r"[\s;<>\0]", text):
            lines.append(f"{key}={text}\n")
        else:
            # The value stays out of the log: it may be a secret.
            logger.warning(
                "The environment variable %r is not passed on: its name or value is empty or has forbidden characters.",
                key,
            )
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the given modules that have been imported already.

    Example:
        >>> from accelerate.utils import are_libraries_initialized
        >>> are_libraries_initialized("torch", "a_library_that_is_not_there")
        ['torch']
    """
    return [name for name in library_names if name in sys.modules]


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """Tell whether the current CUDA device computes in 8-bit floating point: compute capability 8.9 and later."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def get_current_device_type() -> tuple[str, str]:
    """Return this machine's accelerator as torch's device type and our distributed type: `("xpu", "MULTI_XPU")`, say.

    It is `("cuda", "MULTI_GPU")` also where there is no accelerator at all.
    """
    import torch

    for kind in ("cuda", "mlu", "sdaa", "musa", "npu", "xpu", "hpu", "neuron"):
        module = getattr(torch, kind, None)  # a vendor's plugin adds its module to torch
        if module is not None and module.is_available():
            return kind, "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"
    return "cuda", "MULTI_GPU"


@dataclass
class CPUInformation:
    """The position of a process among the processes of a run on CPUs, and among those of its machine."""

    __module__ = "accelerate.utils.environment"  # the path in pickles

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Read ranks and sizes from the variables of torchrun, Intel MPI, Open MPI or MVAPICH, in this order."""
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1),
        local_rank=get_int_from_env(
            ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"], 0
        ),
        local_world_size=get_int_from_env(
            [
                *("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
                "PALS_LOCAL_SIZE",
            ],
            1,
        ),
    )


def deepspeed_required(func: T) -> T:
    """Decorate a function that makes sense only when the Accelerator runs DeepSpeed.

    Before any Accelerator exists the function is allowed to run.

    Raises:
        ValueError: (when called) an Accelerator exists and runs something else.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Looked up, not imported: the shared state is built on top of this module.
        storage = sys.modules.get("accelerate.runtime.storage")
        state = storage.accelerator.current if storage is not None else {}
        if state and state.get("distributed_type") != "DEEPSPEED":
            raise ValueError(
                f"{func.__name__} needs DeepSpeed, but this Accelerator was configured for "
                f"{state.get('distributed_type')}. Pass deepspeed_plugin=DeepSpeedPlugin(...) to Accelerator, or start "
                "with `accelerate launch --use_deepspeed`."
            )
        return func(*args, **kwargs)

    return wrapper
