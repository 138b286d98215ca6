"""A strategy of another package: replicas whose gradients are averaged after the backward pass, by its own all-reduce.

The suite installs it as a distribution with an entry point. Its record gives the launcher a switch, `--use_averaging`.
"""

import contextlib

import torch.distributed as dist

from accelerate.config.env import value_of
from accelerate.config.options.schema import ON, Option
from accelerate.config.strategies import StrategySpec
from accelerate.strategies.base import Strategy


class Averaging(Strategy):
    """Averages what gradients are there at the end of a window."""

    synchronises = True

    def check(self, accelerator, objects):
        if not dist.is_initialized():
            raise ValueError(
                "--use_averaging needs several processes. Start them with accelerate launch --num_processes 2."
            )

    def wrap_model(self, accelerator, model):
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return model

    @contextlib.contextmanager
    def no_sync(self, accelerator, model):
        # A strategy has no state; the Accelerator does.
        accelerator._averaging_held = True
        try:
            yield
        finally:
            accelerator._averaging_held = False

    def backward(self, accelerator, loss, **options):
        super().backward(accelerator, loss, **options)
        if getattr(accelerator, "_averaging_held", False):
            return
        for model in accelerator._models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= accelerator.num_processes


SPEC = StrategySpec(
    "averaging",
    f"{__name__}:{Averaging.__name__}",
    matches=lambda state: value_of("use_averaging"),
    title="Averaging",
    switch="use_averaging",
    feature="averaging",
    options=(Option("use_averaging", "Averaging", "Average gradients.", switch=True, env="USE_AVERAGING", style=ON),),
)
