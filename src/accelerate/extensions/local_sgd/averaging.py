"""Local SGD: ranks train on their own for some steps and then average their weights."""

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate import comm
from accelerate.comm.in_step import ends_are_uneven
from accelerate.runtime import torch_private
from accelerate.strategies.registry import resolve

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


# Weights are averaged in pieces of about this many bytes: few collectives, little extra memory.
_PIECE = 64 * 2**20


class LocalSGD:
    """A context in which gradients stay on their rank, and weights are averaged every few steps.

    It saves communication where the network is slow. With one process it does nothing. All ranks use it.

    Args:
        accelerator: The Accelerator.
        model: The prepared model.
        local_sgd_steps: The weights are averaged at every call of ``step`` that is a multiple of it, and at the end. Where
            ``enabled`` is False it may be None.
        enabled: False makes all of it do nothing, so that the same loop trains with and without.

    Raises:
        NotImplementedError: The strategy is not data parallelism with a replica on each rank.
        ValueError: ``local_sgd_steps`` is not positive.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     # forward, backward and optimizer.step(), and then:
        ...     local_sgd.step()

    Source:
        Stich, Local SGD Converges Fast and Communicates Little, https://arxiv.org/abs/1805.09767
    """

    __module__ = "accelerate.local_sgd"  # the path in pickles

    def __init__(
        self, accelerator: "Accelerator", model: nn.Module, local_sgd_steps: int | None, enabled: bool = True
    ) -> None:
        strategy = resolve(accelerator.state)
        if enabled and strategy.name not in ("single", "ddp"):
            raise NotImplementedError(
                f"LocalSGD averages replicas, and with the strategy {strategy.name!r} a rank does not hold a full replica. "
                "Use plain data parallelism, or enabled=False."
            )
        if enabled and (local_sgd_steps is None or local_sgd_steps < 1):
            raise ValueError(f"local_sgd_steps={local_sgd_steps!r} is not a positive number of steps.")
        self.enabled = enabled and accelerator.num_processes > 1
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._held: Any = None

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            if ends_are_uneven():
                raise ValueError(
                    "LocalSGD inside join_uneven_inputs: ranks that have ended cannot take part in its averages. Give all ranks equally "
                    "many batches, with even_batches=True."
                )
            self._held = contextlib.ExitStack()
            self._held.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            self._held.close()
            if kind is None:  # after an error the other ranks may never come to average
                self._average()
                if scaler := getattr(self.accelerator, "scaler", None):  # each rank has skipped other steps
                    communicator = comm.for_type(self.accelerator.distributed_type)
                    scaler.load_state_dict(communicator.broadcast_object_list([scaler.state_dict()])[0])

    def step(self) -> None:
        """Count a step, and average the weights when it is time.

        Collective: call on every rank, after ``optimizer.step()``.
        """
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        communicator = comm.for_type(self.accelerator.distributed_type)
        trained = [weight for weight in self.model.parameters() if weight.is_floating_point() or weight.is_complex()]
        for piece in torch_private.take_tensors(trained, _PIECE):  # of one dtype and kind of device each
            flat = communicator.all_reduce(torch_private.flatten_dense_tensors(piece), op="mean")
            for parameter, mean in zip(piece, torch_private.unflatten_dense_tensors(flat, piece), strict=True):
                parameter.copy_(mean)
