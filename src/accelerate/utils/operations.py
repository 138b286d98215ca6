"""Operations on nested structures of tensors. The public path of `accelerate.base.nested` and `accelerate.comm.operations`."""

from accelerate.base._lazy import front
from accelerate.base.nested import *  # noqa: F403
from accelerate.comm.operations import *  # noqa: F403

_HOMES = {
    "accelerate.base.constants": "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "accelerate.extensions.big_models.tensors": "find_device",
    "accelerate.extensions.compat.operations": (
        "ConvertOutputsToFp32 GatheredParameters TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT TensorInformation "
        "_gpu_broadcast _gpu_gather _gpu_gather_object "
        "_neuron_broadcast_object_list _neuron_gather_object _tpu_broadcast _tpu_gather chained_operation convert_outputs_to_fp32 "
        "copy_tensor_to_devices gather_tensor_shape get_data_structure get_shape initialize_tensors is_tensor_information "
        "is_torch_xpu_tensor listify pad_input_tensors slice_tensors verify_operation"
    ),
    "accelerate.extensions.inference.pippy": "ignorant_find_batch_size",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])
