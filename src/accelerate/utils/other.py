"""Helpers around training: the public path of functions in several rooms, and the home of small ones."""

import functools
import logging
import platform
import re
from typing import Any

from accelerate.base._lazy import front
from accelerate.base.text import convert_bytes as convert_bytes
from accelerate.base.text import get_pretty_name as get_pretty_name
from accelerate.checkpoint.torch_files import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from accelerate.checkpoint.torch_files import load as load
from accelerate.checkpoint.torch_files import load_each as load_each
from accelerate.checkpoint.torch_files import save as save
from accelerate.process import PartialState
from accelerate.runtime.ports import get_free_port as get_free_port
from accelerate.runtime.ports import is_port_in_use as is_port_in_use

# Names of other modules that this module also gives.
_HOMES = {
    "accelerate.modules.unwrap": (
        "clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed compile_regions_fsdp2 extract_model_from_parallel "
        "get_model_tp_size get_module_children_bottom_up has_compiled_regions has_repeated_blocks is_compiled_module "
        "is_repeated_blocks model_has_dtensor"
    ),
    "accelerate.base.constants": "FSDP_PYTORCH_VERSION",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])

logger = logging.getLogger(__name__)


def wait_for_everyone() -> None:
    """Wait until every rank has reached this call.

    Collective: call on every rank.

    Example:
        >>> from accelerate.utils import wait_for_everyone
        >>> wait_for_everyone()  # returns when all ranks have called it
    """
    PartialState().wait_for_everyone()


def merge_dicts(source: dict, destination: dict) -> dict:
    """Merge a nested dict into another one, in place, and return that one; the source's values win.

    Example:
        >>> from accelerate.utils import merge_dicts
        >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}})
        {'a': {'y': 2, 'x': 1}}
    """
    for key, value in source.items():
        if isinstance(value, dict):
            below = destination.get(key)
            destination[key] = merge_dicts(value, below if isinstance(below, dict) else {})
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its dotted name, such as ``"encoder.0.weight"``; a missing part is an AttributeError.

    Example:
        >>> import torch
        >>> from accelerate.utils import recursive_getattr
        >>> recursive_getattr(torch.nn.Linear(1, 1), "weight.shape")
        torch.Size([1, 1])
    """
    return functools.reduce(getattr, attr.split("."), obj)


def check_os_kernel() -> None:
    """Warn when the Linux kernel is older than 5.5, on which runs with several processes are known to hang."""
    number = re.match(r"(\d+)\.(\d+)", platform.release())
    if platform.system() == "Linux" and number and tuple(map(int, number.groups())) < (5, 5):
        logger.warning(
            "The Linux kernel %s is older than 5.5; on such kernels processes can hang. Use a newer kernel if they do.",
            platform.release(),
        )
