"""8-bit layers of torchao. The public path of `accelerate.extensions.fp8.ao`."""

from accelerate.base._lazy import front

_HOMES = {
    "typing": "TYPE_CHECKING",
    "accelerate.extensions.fp8.ao": (
        "convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers find_first_last_linear_layers has_ao_layers torchao_required"
    ),
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
