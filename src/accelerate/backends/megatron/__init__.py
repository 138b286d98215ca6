"""Megatron core: models of transformers, cut over ranks and trained by its schedules and optimizers.

`models` turns a model of transformers into core's and back, `engine` has the backend, and what trains.

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/
"""

from accelerate.backends.megatron.engine import MegatronLM

__all__ = ["MegatronLM"]
