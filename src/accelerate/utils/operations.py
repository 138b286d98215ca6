"""Operations on nested structures of tensors. The public path of `accelerate.base.nested` and `accelerate.comm.operations`."""

from accelerate.base._lazy import front
from accelerate.base.nested import *  # noqa: F403
from accelerate.comm.operations import *  # noqa: F403

_HOMES = {
    "accelerate.base.constants": "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "accelerate.comm.operations": (
        "_gpu_gather _gpu_gather_object _neuron_broadcast_object_list _neuron_gather_object _tpu_gather"
    ),
    "accelerate.extensions.compat.operations": (
        "_gpu_broadcast _tpu_broadcast chained_operation copy_tensor_to_devices gather_tensor_shape is_torch_xpu_tensor "
        "verify_operation"
    ),
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])
