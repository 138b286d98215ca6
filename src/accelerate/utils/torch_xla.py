"""Help with installing torch_xla. The public path of `accelerate.extensions.xla.install`."""

from accelerate.base._lazy import front

__getattr__, __dir__, __all__ = front(__name__, {"accelerate.extensions.xla.install": "install_xla"}, [])
