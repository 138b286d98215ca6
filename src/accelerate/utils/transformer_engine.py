"""Layers of Transformer Engine. The public path of `accelerate.extensions.fp8.transformer_engine`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.base.imports": "is_transformer_engine_available",
    "accelerate.extensions.vendor_devices.available": "is_hpu_available",
    "accelerate.extensions.fp8.transformer_engine": (
        "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers "
        "is_transformer_engine_mxfp8_available layer_types runs_in_fp8"
    ),
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
