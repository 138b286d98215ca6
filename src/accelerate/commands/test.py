"""`accelerate test`: the public path of `accelerate.extensions.testing.command`."""

from accelerate.base._lazy import front

_HOMES = {"accelerate.extensions.testing.command": "main test_command test_command_parser"}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])

if __name__ == "__main__":
    __getattr__("main")()
