"""Environment variables and this machine. The public path of `accelerate.base.environment` and `accelerate.devices.affinity`."""

from accelerate.base._lazy import front
from accelerate.base.environment import *  # noqa: F403

_HOMES = {
    "accelerate.base.environment": "_nvidia_smi",
    "accelerate.devices.affinity": "override_numa_affinity set_numa_affinity",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])
