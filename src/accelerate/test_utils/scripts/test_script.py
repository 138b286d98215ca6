"""The self check that `accelerate test` launches: the public path of `accelerate.extensions.testing.self_check`."""

from accelerate.base._lazy import front

_HOMES = {"accelerate.extensions.testing.self_check": "main"}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])

if __name__ == "__main__":
    __getattr__("main")()
