"""Sizes, device maps, placement and loading of models. The public path of the files in `accelerate.extensions.big_models`."""

import logging

from accelerate.base._lazy import front

# Names of other modules that this module also gives.
_HOMES = {
    "accelerate.extensions.compat.other": "get_grad_scaler get_mixed_precision_context_manager",
    "accelerate.base.text": "convert_file_size_to_int",
    "accelerate.modules.offloaded": "has_offloaded_params",
    "accelerate.modules.unwrap": "id_tensor_storage is_peft_model",
    "accelerate.extensions.big_models.device_map": (
        "check_device_map clean_device_map fallback_allocate get_balanced_memory get_max_memory infer_auto_device_map"
    ),
    "accelerate.extensions.big_models.loading": "load_checkpoint_in_model load_offloaded_weights load_state_dict",
    "accelerate.extensions.big_models.placement": (
        "align_module_device check_device_same set_module_tensor_to_device"
    ),
    "accelerate.extensions.big_models.tensors": (
        "_get_proper_dtype calculate_maximum_sizes check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device compute_module_sizes compute_module_total_buffer_size "
        "dtype_byte_size find_tied_parameters get_max_layer_size get_module_leaves "
        "get_module_size_with_ties get_non_persistent_buffers named_module_tensors retie_parameters"
    ),
    "accelerate.extensions.big_models.weights": "get_state_dict_from_offload get_state_dict_offloaded_model",
    "accelerate.base.constants": "SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])

# The files in accelerate.extensions.big_models log under this name, because other libraries put filters on it.
logger = logging.getLogger(__name__)
