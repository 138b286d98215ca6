"""Which libraries and devices are available. The public path of `accelerate.base.imports` and `accelerate.extensions.compat.imports`."""

from functools import partial
from typing import Any

from accelerate import utils
from accelerate.base import _lazy, imports
from accelerate.base.imports import *  # noqa: F403

_OTHERS = "accelerate.extensions.compat.imports"
_HOMES = {
    _OTHERS: f"{utils._HOMES[_OTHERS]} _is_package_available is_numpy_available is_tqdm_available",
    "accelerate.extensions.fp8.ao": "torchao_required",
    "accelerate.extensions.megatron.plugin": "is_megatron_lm_available",
}
# Values that programs import in the place of a function.
_VALUES = {
    "_torch_distributed_available": imports.is_torch_distributed_available,
    "_torch_xla_available": imports.is_torch_xla_available,
    "_tpu_available": partial(imports.is_torch_xla_available, check_is_tpu=True),
}
_get, __dir__, _ = _lazy.front(__name__, _HOMES, [])


def __getattr__(name: str) -> Any:
    return _VALUES[name]() if name in _VALUES else _get(name)
