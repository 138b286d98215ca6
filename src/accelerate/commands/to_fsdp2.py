"""`accelerate to-fsdp2`: the public path of `accelerate.extensions.to_fsdp2.command`, which looks `load_config` up here."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.to_fsdp2.command": (
        "ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING ConversionStatus _validate_to_fsdp2_args convert_config_to_fsdp2 "
        "load_config to_fsdp2_command to_fsdp2_command_parser"
    )
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
