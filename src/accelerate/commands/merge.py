"""`accelerate merge-weights`: the public path of `accelerate.extensions.convert.merge`."""

from accelerate.base._lazy import front

_HOMES = {"accelerate.extensions.convert.merge": "description main merge_command merge_command_parser"}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])

if __name__ == "__main__":
    __getattr__("main")()
