"""Quantising models with bitsandbytes. The public path of `accelerate.extensions.quantize.quantize`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.big_models.loading": "quantize_and_offload_8bit",
    "accelerate.extensions.quantize.quantize": (
        "get_keys_to_not_convert get_parameter_device get_quantized_model_device_map has_4bit_bnb_layers "
        "load_and_quantize_model replace_with_bnb_layers"
    ),
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
