"""Pipelined inference: the stages of a traced model, one for each process, and the schedule that sends batches of any size through them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from accelerate import comm
from accelerate.parallel import stages
from accelerate.parallel.batches import Inputs, Outputs
from accelerate.process import PartialState
from accelerate.runtime.torch_private import pytree

_REFUSED = -1


@dataclass
class Traced:
    """A model as stages, and what it is called with and returns."""

    chain: stages.Chain
    inputs: Inputs
    outputs: Outputs
    context: stages.Context


def trace(
    model: nn.Module, split_points: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], count: int
) -> Traced:
    """Divide a model into stages, which begin at `split_points`, and leave it as before. No communication.

    They compute in the autocast that is in force. Raises ValueError if the names do not cut the model into so many stages, or if it cannot
    be traced.
    """
    inputs = Inputs(model, args, kwargs)
    outputs = Outputs(inputs.rows)
    device = PartialState().device
    kind = device.type
    context = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    (chain,) = stages.trace(model, split_points, inputs, outputs.record, count, device, trains=False).values()
    return Traced(chain, inputs, outputs, context)


class PipelineSchedule(ScheduleGPipe):
    """This process's stage of a pipeline, and the order in which micro-batches pass it."""

    def __init__(self, traced: Traced, num_chunks: int) -> None:
        state = PartialState()
        self._traced = traced
        self._device, self._rank, self._ranks = state.device, state.process_index, state.num_processes
        stage = stages.build({False: traced.chain}, self._rank, traced.context).to(self._device)
        carried = traced.chain.carried
        given, returned = carried[self._rank : self._rank + 2]
        self._own = PipelineStage(stage, self._rank, self._ranks, self._device, input_args=given, output_args=returned)
        super().__init__(self._own, num_chunks)
        self.num_chunks = num_chunks
        # By micro-batches: a batch may fill fewer than a whole run has.
        self._steps = {num_chunks: super().step}
        self._samples = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of any number of samples; the last rank gets the output, others None. All ranks.

        The first rank's arguments count; ValueError on all ranks if they differ from the example in more than samples.
        """
        tensors = self._admitted(args, kwargs)
        inputs, pieces = self._traced.inputs, []
        with torch.no_grad():
            for start in range(0, self._samples, inputs.rows * self.num_chunks):
                count = min(math.ceil((self._samples - start) / inputs.rows), self.num_chunks)
                given = ()
                if self._rank == 0:
                    cut = inputs.cut(tensors, start, count)
                    given = tuple(cut[position].to(self._device) for position in self._traced.chain.used)
                pieces.append(self._run(given, count))
        return self._traced.outputs.joined(pieces, self._samples) if self._own.is_last else None

    def _run(self, given: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
        if count not in self._steps:
            self._steps[count] = ScheduleGPipe(self._own, count).step
        output = self._steps[count](*given)
        return (output,) if isinstance(output, torch.Tensor) else output

    def _admitted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
        """Let all ranks know how many samples come, or that the first one's arguments are wrong."""
        communicator = comm.current()
        error, rows, tensors = None, 0, []
        if self._rank == 0:
            try:
                rows, tensors = self._traced.inputs.match(args, kwargs)
            except (TypeError, ValueError) as caught:
                error, rows = caught, _REFUSED
        self._samples = int(communicator.broadcast(torch.tensor([rows], device=self._device), 0).item())
        if self._samples == _REFUSED:
            text = communicator.broadcast_object_list([str(error)], 0)[0]
            raise error or ValueError(f"The first process was called with other arguments than its example: {text}")
        return tensors

    def to_all(self, output: Any) -> Any:
        """Return on every rank what the last one's `step` returned. All ranks."""
        outputs, last = self._traced.outputs, self._ranks - 1
        if self._rank == last:
            leaves = pytree.tree_leaves(output)
            tensors = [value.contiguous() for value in leaves if isinstance(value, torch.Tensor)]
        else:
            shapes = outputs.shapes(self._samples)
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        return outputs.built(comm.current().broadcast(tensors, last))
