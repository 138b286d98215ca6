"""Environment variables and this machine. The public path of `accelerate.base.environment` and `accelerate.extensions.affinity.binding`."""

from accelerate.base._lazy import front
from accelerate.base.environment import *  # noqa: F403

_HOMES = {
    "accelerate.base.environment": "_nvidia_smi",
    "accelerate.extensions.affinity.binding": "override_numa_affinity set_numa_affinity",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])
