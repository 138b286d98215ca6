"""Which libraries and devices are available. The public path of `accelerate.base.imports`."""

from functools import partial

from accelerate.base import _lazy, imports
from accelerate.base.imports import *  # noqa: F403
from accelerate.base.imports import _is_package_available as _is_package_available

# Values that programs import in the place of a function.
__getattr__ = _lazy.aliases(
    __name__,
    {
        "_torch_distributed_available": imports.is_torch_distributed_available,
        "_torch_xla_available": imports.is_torch_xla_available,
        "_tpu_available": partial(imports.is_torch_xla_available, check_is_tpu=True),
    },
)
