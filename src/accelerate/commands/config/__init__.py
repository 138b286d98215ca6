"""`accelerate config`: the public path of `accelerate.extensions.configure`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.configure.command": (
        "config_command_parser default_command_parser default_config_file get_config_parser load_config_from_file main "
        "update_command_parser"
    )
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, ["config", "config_args", "default", "update"])
