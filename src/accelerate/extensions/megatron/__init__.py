"""Megatron core: models of transformers, cut over ranks and trained by its schedules and optimizers.

`models` turns a model of transformers into core's and back, `engine` trains, `backend` is the strategy.

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/
"""
