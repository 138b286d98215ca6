"""DeepSpeed: an engine that owns the model, its gradients, and the optimizer's step.

`engine` has the strategy and turns the plugin's configuration into the one that the engine gets, `checkpoint` lets it write into and read from checkpoints.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""
