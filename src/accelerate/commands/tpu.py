"""`accelerate tpu-config`. The public path of `accelerate.extensions.tpu.command`."""

from accelerate.base._lazy import front

_HOMES = {"accelerate.extensions.tpu.command": "_description console main tpu_command_launcher tpu_command_parser"}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])

if __name__ == "__main__":
    __getattr__("main")()
