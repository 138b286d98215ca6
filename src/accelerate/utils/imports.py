"""Which libraries and devices are available. The public path of `accelerate.base.imports` and of what extensions look up."""

from typing import Any

from accelerate import utils
from accelerate.base import _lazy
from accelerate.base.imports import *  # noqa: F403

_DEVICES = "accelerate.extensions.vendor_devices.available"
_TRACKERS = "accelerate.extensions.trackers.available"
_OTHERS = "accelerate.extensions.compat.imports"
_HOMES = {
    _DEVICES: f"{utils._HOMES[_DEVICES]} USE_TORCH_XLA",
    _TRACKERS: utils._HOMES[_TRACKERS],
    _OTHERS: f"{utils._HOMES[_OTHERS]} _is_package_available is_numpy_available is_torch_distributed_available is_tqdm_available",
    "accelerate.extensions.fp8.ao": "torchao_required",
    "accelerate.extensions.fp8.transformer_engine": "is_transformer_engine_mxfp8_available",
    "accelerate.extensions.quantize.config": "is_4bit_bnb_available is_8bit_bnb_available",
    "accelerate.extensions.megatron.plugin": "is_megatron_lm_available",
}
_get, __dir__, _ = _lazy.front(__name__, _HOMES, [])
# Values that programs import in the place of a function.
_VALUES = {
    "_torch_distributed_available": lambda: _get("is_torch_distributed_available")(),
    "_torch_xla_available": lambda: _get("is_torch_xla_available")(),
    "_tpu_available": lambda: _get("is_torch_xla_available")(check_is_tpu=True),
}


def __getattr__(name: str) -> Any:
    return _VALUES[name]() if name in _VALUES else _get(name)
