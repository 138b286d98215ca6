"""`accelerate env`: the public path of `accelerate.extensions.env.command`."""

from accelerate.base._lazy import front

_HOMES = {"accelerate.extensions.env.command": "env_command env_command_parser main version"}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])

if __name__ == "__main__":
    __getattr__("main")()
