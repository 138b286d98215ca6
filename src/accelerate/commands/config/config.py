"""`accelerate config` without its subcommands: the public path of `accelerate.extensions.configure.config`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.configure.config": "config_command config_command_parser description get_user_input main"
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])

if __name__ == "__main__":
    __getattr__("main")()
