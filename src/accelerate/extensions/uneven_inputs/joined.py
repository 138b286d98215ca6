"""Several models in one `join_uneven_inputs`, which may share a loss.

torch's Join answers for one model after the other, with a forward and a backward pass each. A rank that has ended cannot know in which order
the passes of the other ranks exchange the gradients of several models. So gradients are exchanged here, after each backward pass.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

# Gradients are exchanged in pieces of about so many elements.
_PIECE = 1 << 23


class JoinedModels(Joinable):
    """Data-parallel models as one joinable: each backward pass averages the gradients that it adds on any rank.

    Ranks that have ended add zeros. The averages are over all ranks, as those of torch's Join.
    """

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        super().__init__()
        self.models = models
        parameters = {p: None for model in models for p in model.module.parameters() if p.requires_grad}
        self.parameters: list[nn.Parameter] = list(parameters)
        # By the index of a parameter: its new gradient, or None where that is all of `grad`.
        self.reached: dict[int, torch.Tensor | None] = {}

    @property
    def join_device(self) -> torch.device:
        """The device of the exchanges."""
        device: torch.device = self.models[0].join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """The ranks that join."""
        return self.models[0].join_process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the actions of a rank that has ended."""
        return _EndedRank(self, [model.join_hook(**kwargs) for model in self.models])

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Exchange gradients after each backward pass, in the place of the models' wrappers.

        Collective: call on every rank.
        """
        hooks = [p.register_hook(functools.partial(self._note, index)) for index, p in enumerate(self.parameters)]
        try:
            with contextlib.ExitStack() as contexts:
                for model in self.models:
                    model.reducer._rebuild_buckets()  # otherwise the next forward would, with an exchange
                    contexts.enter_context(model.no_sync())
                    model.require_forward_param_sync = False
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for model in self.models:
                model.require_forward_param_sync = True

    def _note(self, index: int, gradient: torch.Tensor) -> None:
        if not self.reached:
            Variable._execution_engine.queue_callback(self._after_backward)
        if index not in self.reached:
            self.reached[index] = None if self.parameters[index].grad is None else gradient
        elif (before := self.reached[index]) is not None:
            self.reached[index] = before + gradient

    def _after_backward(self) -> None:
        if (work := Join.notify_join_context(self)) is not None:
            work.wait()
        try:
            self.exchange()
        finally:
            self.reached.clear()

    @torch.no_grad()
    def exchange(self) -> None:
        """Average the new gradients of the parameters that a backward pass has reached on any rank.

        Collective: call on every rank.
        """
        flags = torch.zeros(len(self.parameters), dtype=torch.uint8, device=self.join_device)
        flags[list(self.reached)] = 1
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.join_process_group)
        pieces: dict[torch.dtype, list[int]] = {}
        for index in flags.nonzero().flatten().tolist():
            dtype = self.parameters[index].dtype
            piece = pieces.setdefault(dtype, [])
            piece.append(index)
            if sum(self.parameters[member].numel() for member in piece) >= _PIECE:
                self._average(pieces.pop(dtype))
        for piece in pieces.values():
            self._average(piece)

    def _average(self, piece: Sequence[int]) -> None:
        parameters = [self.parameters[index] for index in piece]
        new = [self._new(index) for index in piece]
        flat = torch.cat([gradient.flatten() for gradient in new])
        dist.all_reduce(flat, group=self.join_process_group)
        flat /= dist.get_world_size(self.join_process_group)
        if not self.reached:  # this rank has ended
            return
        averages = flat.split([p.numel() for p in parameters])
        for parameter, gradient, average in zip(parameters, new, averages, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            if gradient is parameter.grad:
                parameter.grad.copy_(average.view_as(parameter))
            else:
                parameter.grad += average.view_as(parameter) - gradient

    def _new(self, index: int) -> torch.Tensor:
        """Return the gradient that the backward pass has added to a parameter on this rank."""
        parameter = self.parameters[index]
        if index not in self.reached:
            return torch.zeros_like(parameter)
        gradient = self.reached[index]
        return parameter.grad if gradient is None else gradient  # type: ignore[return-value]  # see `reached`


class _EndedRank(JoinHook):
    """The actions of a rank without batches, while others train."""

    def __init__(self, joined: JoinedModels, hooks: Sequence[JoinHook]) -> None:
        self.joined, self.hooks = joined, hooks

    def main_hook(self) -> None:
        """Add zeros to the gradients of a backward pass of the others."""
        self.joined.exchange()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the weights and buffers of a rank that ended last."""
        for hook in self.hooks:
            hook.post_hook(is_last_joiner)


@contextlib.contextmanager
def join(joinables: Sequence[Any]) -> Iterator[None]:
    """Return a context in which ranks may run out of batches at different steps, with any number of models.

    Collective: call on every rank.
    """
    bare = [getattr(item, "_orig_mod", item) for item in joinables]
    models = [item for item in bare if isinstance(item, DistributedDataParallel)]
    if len(models) < 2:
        with Join(list(joinables), enable=True, throw_on_early_termination=False):
            yield
        return
    if any(model.static_graph for model in models):
        raise ValueError(
            "join_uneven_inputs got several models with static_graph=True, whose gradients DDP must exchange itself. "
            "Pass DistributedDataParallelKwargs(static_graph=False)."
        )
    joined = JoinedModels(models)
    others = [item for item in bare if not isinstance(item, DistributedDataParallel)]
    with Join([joined, *others], enable=True, throw_on_early_termination=False), joined.exchanging():
        yield
