"""Optimizers with a `fused_backward`: which ones a run has, and their backward pass."""

from typing import Any

import torch

from accelerate.extension import Extension
from accelerate.training.run import TrainingRun


class Lomo(Extension):
    """Notes that a run has such optimizers, whose gradients are gone after the backward pass."""

    order = 0  # before extensions that change or refuse optimizers

    def convert_optimizer(self, optimizer: Any) -> None:
        """Refuse several processes. Not a collective."""
        if hasattr(optimizer, "fused_backward") and self.run.num_processes > 1:
            raise NotImplementedError(
                f"{type(optimizer).__name__} updates weights before gradients are averaged: {self.run.num_processes} processes would train different models. "
                "Train on one, or take another optimizer."
            )

    def registered(self, kind: str, prepared: Any, evaluation: bool) -> None:
        """Let `backward` call `lomo_backward`, and the optimizer's `step` do nothing. Not a collective."""
        if kind == "optimizer" and hasattr(getattr(prepared, "optimizer", None), "fused_backward"):
            prepared._steps_in_backward = self.run.has_lomo_optimizer = True


def lomo_backward(accelerator: TrainingRun, loss: torch.Tensor, learning_rate: float) -> None:
    """Run the backward pass of LOMO optimizers, which update the weights in it.

    Collective: call on every rank.

    Args:
        loss: The loss, already scaled.
        learning_rate: The learning rate of this step.

    Raises:
        ValueError: No LOMO optimizer was prepared, or there is no learning rate.
    """
    if learning_rate is None:
        raise ValueError("A LOMO optimizer updates in its backward pass: pass `learning_rate=` to `backward`.")
    inner = [item.optimizer for item in accelerator._optimizers]
    optimizers = [item for item in inner if hasattr(item, "fused_backward")]
    if not optimizers:
        raise ValueError("lomo_backward() found no LOMO optimizer. Pass one to `accelerator.prepare` first.")
    for optimizer in optimizers:
        optimizer.fused_backward(loss, learning_rate)
