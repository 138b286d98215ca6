"""Environment variables and this machine. The public path of `accelerate.base.environment` and `accelerate.extensions.affinity.binding`."""

from accelerate.base._lazy import front
from accelerate.base.environment import *  # noqa: F403

_HOMES = {
    "accelerate.extensions.compat.environment": (
        "CPUInformation are_libraries_initialized check_cuda_fp8_capability convert_dict_to_env_variables "
        "get_cpu_distributed_information get_current_device_type purge_accelerate_environment"
    ),
    "accelerate.base.environment": "_nvidia_smi",
    "accelerate.extensions.peer_to_peer.gpus": "check_cuda_p2p_ib_support get_driver_version get_gpu_info",
    "accelerate.extensions.affinity.binding": "override_numa_affinity set_numa_affinity",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])
