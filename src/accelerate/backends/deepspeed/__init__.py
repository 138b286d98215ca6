"""DeepSpeed: an engine that owns the model, its gradients, and the optimizer's step.

`settings` turns the plugin's configuration into the one that the engine gets, `checkpoints` lets it write into and read from checkpoints.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from accelerate.backends.deepspeed.engine import DeepSpeed

__all__ = ["DeepSpeed"]
