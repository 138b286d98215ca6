"""Pipelined inference: the stages of a traced model, one for each process, and the schedule that sends batches of any size through them."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from accelerate import comm
from accelerate.extensions.pipeline import stages
from accelerate.process import PartialState

_REFUSED = -1


class PipelineSchedule(ScheduleGPipe):
    """This process's stage of a pipeline, and the order in which micro-batches pass it.

    Args:
        traced: The model in one mode. Its stages compute in the autocast that is in force now.
        num_chunks: Most micro-batches of a run.
    """

    def __init__(self, traced: stages.Traced, num_chunks: int) -> None:
        state = PartialState()
        self._inputs, self._outputs = traced.inputs, traced.outputs
        self._device, self._rank, self._ranks = state.device, state.process_index, state.num_processes
        kind = self._device.type
        context = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        stage = stages.build(traced.chains, self._rank, context).to(self._device)
        arguments, returned = stage.taken[stage.training], stage.returned[stage.training]
        self._own = PipelineStage(stage, self._rank, self._ranks, self._device, arguments, returned)
        super().__init__(self._own, num_chunks)
        self.num_chunks = num_chunks
        # By number of micro-batches: a batch may fill fewer than a full run has.
        self._steps = {num_chunks: super().step}
        self._samples = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of any number of samples; the last rank gets the output, others None.

        The first rank's arguments count; ValueError on all ranks if they differ from the example in more than samples.

        Collective: call on every rank.
        """
        tensors, rows, pieces = self._admitted(args, kwargs), self._inputs.rows, []
        with torch.no_grad():
            for start in range(0, self._samples, rows * self.num_chunks):
                count = min(math.ceil((self._samples - start) / rows), self.num_chunks)
                pieces.append(self._run(self._inputs.cut(tensors, start, count, self._device), count))
        return self._outputs.joined(pieces, self._samples) if self._own.is_last else None

    def _run(self, micro_batches: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
        if count not in self._steps:
            self._steps[count] = ScheduleGPipe(self._own, count).step
        output = self._steps[count](*micro_batches)
        return (output,) if isinstance(output, torch.Tensor) else output

    def _admitted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
        """Return the first rank's tensors, there; let all ranks know how many samples come, or that its arguments are wrong."""
        communicator = comm.current()
        error, rows, tensors = None, 0, []
        if self._rank == 0:
            try:
                rows, tensors = self._inputs.match(args, kwargs)
            except (TypeError, ValueError) as caught:
                error, rows = caught, _REFUSED
        self._samples = int(communicator.broadcast(torch.tensor([rows], device=self._device), 0).item())
        if self._samples == _REFUSED:
            text = communicator.broadcast_object_list([str(error)], 0)[0]
            raise error or ValueError(f"The first process was called with other arguments than its example: {text}")
        return tensors

    def to_all(self, output: Any) -> Any:
        """Return the last rank's `step` result on every rank. Collective: call on every rank."""
        tensors = self._outputs.tensors(output, self._samples, self._device)
        return self._outputs.built(comm.current().broadcast(tensors, self._ranks - 1))
