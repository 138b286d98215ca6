"""Local SGD. The public path of `accelerate.extensions.local_sgd.averaging`."""

from accelerate.base._lazy import front

__getattr__, __dir__, __all__ = front(__name__, {"accelerate.extensions.local_sgd.averaging": "LocalSGD"}, [])
