"""The states in a copy: replicas as in any checkpoint, and of FSDP2 a file for each rank with its shards.

A checkpoint of shards on the disk is for any number of ranks, and its ranks read each other's files. A copy in memory is for the same ranks
in the same layout, so a rank reads only its own file, and the folder of a machine has all that its ranks read.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import layouts, optimizers, plain_data
from accelerate.checkpoint.apply import Change, kept_tensors, optimizer_change
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.model_io import io_of
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Kind, is_dtensor, local_tensor
from accelerate.checkpoint.stored import FullFiles, FullTensor
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.runtime.run import Run
from accelerate.strategies.sharded_io import FSDP2IO, model_of

# What a file has in the place of a sharded tensor.
_SHAPE, _LOCAL = "accelerate.shape", "accelerate.local"


def shards_file(kind: Kind, index: int, rank: int) -> str:
    """Return the name of a rank's file, one by which `checkpoint.verify` knows that only this rank reads it."""
    return f"{layouts.usual_names(kind, index)[0]}_rank{rank}.bin"


class LocalShardsIO(FSDP2IO):
    """The states of FSDP2, of which each rank writes and reads its shards."""

    def save_model(self, accelerator: Run, state: dict[str, Any], plan: SavePlan, index: int, **options: Any) -> None:
        """Add a file with this rank's shards of a model.

        Collective: call on every rank.
        """
        model = accelerator._models[index]
        self._add(plan, "model", index, io_of(model).model_state(model).values)

    def save_optimizer(self, accelerator: Run, optimizer: Any, plan: SavePlan, index: int, **options: Any) -> None:
        """Add a file with this rank's shards of an optimizer's state.

        Collective: call on every rank.
        """
        model, _ = model_of(optimizer, accelerator._models)
        self._add(plan, "optimizer", index, io_of(model).optimizer_state(optimizer, model))

    def _add(self, plan: SavePlan, kind: Kind, index: int, state: dict[str, Any]) -> None:
        plain_data.refuse_unreadable({f"{kind} {index}": state}, ignores_tensors=True)
        plan.add_object(shards_file(kind, index, plan.rank), {kind: plain_data.rebuilt(state, _packed)})

    def load_model(
        self, accelerator: Run, model: nn.Module, folder: CheckpointFolder, index: int, **options: Any
    ) -> Change:
        """Read this rank's shards of a model.

        Collective: call on every rank.
        """
        model_io, stored = io_of(model), LocalShards(folder, "model", index, accelerator.process_index)
        own = model_io.model_state(model)
        state = layouts.read_model(own, stored, partial(model_io.tied_names, model))
        return Change(partial(model_io.apply_model, model, state, own), partial(kept_tensors, model))

    def load_optimizer(
        self, accelerator: Run, optimizer: Any, folder: CheckpointFolder, index: int, **options: Any
    ) -> Change:
        """Read this rank's shards of an optimizer's state.

        Collective: call on every rank.
        """
        stored = LocalShards(folder, "optimizer", index, accelerator.process_index)
        model, groups = model_of(optimizer, accelerator._models)
        goal = optimizers.target(optimizer, model, groups)
        place = layouts.Found(folder, stored.file, "full", index, "optimizer")
        state = optimizers.read_optimizer(goal, stored, place)
        return optimizer_change(optimizer, io_of(model).optimizer_to_load(optimizer, model, state), stored.file)


def _packed(value: Any) -> Any:
    return {_SHAPE: list(value.shape), _LOCAL: local_tensor(value).detach()} if is_dtensor(value) else value


class LocalShards(FullFiles):
    """A rank's file of shards, which have the shapes of the full tensors for those who read them."""

    def __init__(self, folder: CheckpointFolder, kind: Kind, index: int, rank: int) -> None:
        self.file = shards_file(kind, index, rank)
        folder.check([self.file])
        super().__init__(os.path.join(folder, self.file))
        self.state = self._unpacked(self.open(self.origin))

    def _unpacked(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.keys() == {_SHAPE, _LOCAL}:
                return _Shard(value[_LOCAL], value[_SHAPE])
            return {key: self._unpacked(inner) for key, inner in value.items()}
        return [self._unpacked(inner) for inner in value] if isinstance(value, list) else value


class _Shard(FullTensor):
    """The shard of one rank, which only a target with the same part of the tensor takes."""

    def __init__(self, local: FullTensor, shape: Sequence[int]) -> None:
        super().__init__(torch.Size(shape), local.dtype)
        self._local = local

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Raise DamagedCheckpoint: the other elements are in the files of other ranks."""
        raise DamagedCheckpoint(f"the copy has only a part of shape {tuple(self._local.shape)} of a tensor")

    def read_into(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Read the shard into a target of its shape."""
        if target.shape != self._local.shape:
            shapes = f"{tuple(self._local.shape)} in the copy and {tuple(target.shape)} in the model"
            raise DamagedCheckpoint(f"a tensor of shape {tuple(self.shape)} has a shard of shape {shapes}")
        self._local.read_into(target, [0] * target.dim())
