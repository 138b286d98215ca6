"""Who used a device first in this process: a process that has done so cannot be forked any more."""

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

# Libraries that are known to use a GPU when they are imported, or soon afterwards.
SUSPECTS = (
    "apex bitsandbytes cudf cuml cupy deepspeed faiss flash_attn jax mamba_ssm numba.cuda onnxruntime pycuda tensorflow "
    "tensorrt torch_tensorrt transformer_engine triton unsloth vllm xformers"
)
_MENTIONS_DEVICE = re.compile(r"""\.(?:cuda|xpu)\(|["'](?:cuda|xpu|npu)[:"']|\bdevice_map\s*=|\.to\(\s*device""")
_LIMIT = 3

_stacks: dict[str, list[traceback.FrameSummary]] = {}
_watched: set[str] = set()


def watch(names: tuple[str, ...] = ("cuda", "xpu")) -> None:
    """Remember the stack of whoever makes torch use a device for the first time; later calls do nothing.

    Torch keeps a list of what to call then, so nothing of it is replaced, and until then nothing is called.

    Args:
        names: torch's modules for devices.
    """
    torch = sys.modules["torch"]
    for name in names:
        later = getattr(getattr(torch, name, None), "_lazy_call", None)
        if later is not None and name not in _watched and not _is_used(getattr(torch, name)):
            _watched.add(name)
            later(partial(_remember, name))


def _is_used(namespace: Any) -> bool:
    return bool(getattr(namespace, "is_initialized", lambda: False)())


def _remember(name: str) -> None:
    # Torch gives the device up if this raises.
    with contextlib.suppress(Exception):
        # The text of the lines is read when somebody asks.
        stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)[::-1]
        _stacks.setdefault(name, stack)


def is_used(device: Any) -> bool:
    """Tell whether this process uses a kind of device already.

    Args:
        device: a row of `accelerate.devices`.
    """
    return device.type != "cpu" and _is_used(device.namespace())


def survives_fork(device: Any) -> bool:
    """Tell whether a forked process could use a kind of device, by forking one that asks torch.

    Merely counting CUDA devices without NVML spoils it as well, and only a forked process sees that.

    Args:
        device: a row of `accelerate.devices`.
    """
    if device.type == "cpu" or not hasattr(os, "fork"):
        return True
    if is_used(device):
        return False
    spoiled = getattr(device.namespace(), "_is_in_bad_fork", None)
    if spoiled is None:
        return True
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads; this child only asks, and is gone.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(bool(spoiled()))
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def culprit(device_type: str) -> str:
    """Return sentences about who used a kind of device first: the recorded place, or what looks like it.

    Args:
        device_type: torch's name of the device.

    Returns:
        At least one sentence.
    """
    stack = _stacks.get(device_type)
    if stack:
        return _place(stack)
    found = [
        *_listed("Variables that lie on it: ", _variables(device_type)),
        *_listed("Cells that mention it: ", _cells()),
        *_listed(
            "Loaded libraries that may have done so: ", (name for name in SUSPECTS.split() if name in sys.modules)
        ),
    ]
    unseen = (
        "It happened before accelerate was imported, so the place is not known: import accelerate first to learn it."
    )
    return " ".join([unseen, *found])


def _place(stack: list[traceback.FrameSummary]) -> str:
    own = [frame for frame in stack if not _belongs_to(frame, "torch") and frame.filename != __file__]
    if not own:
        return "Torch itself did it."
    last = own[-1]
    sentence = f"It was first used by {_where(last)}."
    # The library's line alone does not tell which line of the user's made it run.
    users = [frame for frame in own if _is_users(frame)]
    if users and users[-1] is not last:
        sentence += f" That was called by {_where(users[-1])}."
    return sentence


def _where(frame: traceback.FrameSummary) -> str:
    code = f": {frame.line}" if frame.line else ""
    return f"{_readable(frame.filename)}, line {frame.lineno}, in {frame.name}{code}"


def _readable(filename: str) -> str:
    parts = filename.replace("\\", "/").split("/")
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    cell = _cell_of(filename)
    return f"cell In[{cell}]" if cell else filename


def _cell_of(filename: str) -> int | None:
    shell = _shell()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", None) or {}
    return numbers.get(filename)


def _belongs_to(frame: traceback.FrameSummary, package: str) -> bool:
    return f"/{package}/" in frame.filename.replace("\\", "/")


def _is_users(frame: traceback.FrameSummary) -> bool:
    path = frame.filename.replace("\\", "/")
    standard = os.path.dirname(os.__file__).replace("\\", "/")
    return (
        not path.startswith(("<frozen", standard)) and "/site-packages/" not in path and "/dist-packages/" not in path
    )


def _listed(title: str, names: Iterator[str]) -> list[str]:
    found = list(names)
    if not found:
        return []
    rest = f" and {len(found) - _LIMIT} more" if len(found) > _LIMIT else ""
    return [f"{title}{', '.join(found[:_LIMIT])}{rest}."]


def _variables(device_type: str) -> Iterator[str]:
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if not name.startswith("_") and _lies_on(value, device_type):
            yield name


def _lies_on(value: Any, device_type: str) -> bool:
    torch = sys.modules["torch"]
    try:
        if isinstance(value, torch.nn.Module):
            value = next(value.parameters(), None)
        return isinstance(value, torch.Tensor) and value.device.type == device_type
    except Exception:  # somebody's class, asked in the middle of an error
        return False


def _cells() -> Iterator[str]:
    cells = getattr(_shell(), "user_ns", {}).get("In") or []
    for number, text in enumerate(cells[:-1]):  # the last one is running
        if isinstance(text, str) and _MENTIONS_DEVICE.search(text):
            yield f"In[{number}]"


def _shell() -> Any:
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
