"""DeepSpeed's checkpoints, read without DeepSpeed and without running code of a file: what all ranks wrote, by names of parameters.

A stage below 3 has the weights in ``mp_rank_00_model_states.pt``; stage 3 has such a file for each rank, with shapes instead. From stage 1
on each rank has a part of the float32 weights and of the optimizer's states in ``*zero_pp_rank_N_mp_rank_00_optim_states.pt``: flat
tensors, in which stages 1 and 2 say where a parameter lies, and stage 3 gives each rank an even part of every parameter.

Source: https://github.com/deepspeedai/DeepSpeed (utils/zero_to_fp32.py, checkpoint/ds_to_universal.py)
"""

import copy
import functools
import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accelerate.checkpoint import load
from accelerate.modules.unwrap import canonical_name

if TYPE_CHECKING:
    from accelerate.checkpoint.layouts import Kind
    from accelerate.checkpoint.shards import Stored

# What DeepSpeed writes beside the folders of its engines.
BESIDE = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
# The classes of DeepSpeed of which its files have objects: records of numbers.
CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_SHARD = r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"

Groups = list[Mapping[str, torch.Size]]


class _Record:
    """Takes the place of DeepSpeed's class: it has its attributes and none of its code."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def read_file(path: str, weights_only: bool = True) -> dict[str, Any]:
    """Read a file of DeepSpeed's, whose tensors' memory is the file's. UnpicklingError for objects of other classes."""
    if not weights_only:
        return torch.load(path, "cpu", weights_only=False, mmap=True)
    with torch.serialization.safe_globals([(_Record, name) for name in CLASSES]):
        return load.mapped_file(path)


def model_files(folder: str) -> list[str]:
    """Return the files with the model's states: of stage 3 one for each rank, in their order.

    Raises:
        ValueError: layers are split over ranks, or experts have files of their own.
    """
    paths = glob.glob(os.path.join(glob.escape(folder), "*_model_states.pt"))
    names = {os.path.basename(path): path for path in paths}
    pattern = r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt"
    if strange := sorted(name for name in names if not re.fullmatch(pattern, name)):
        raise ValueError(
            f"{folder!r} has {strange[0]}: its layers or experts are split over ranks, which only DeepSpeed puts together. Load it on as many "
            "ranks, at the same stage."
        )
    return [names[name] for name in sorted(names, key=lambda name: int(re.fullmatch(pattern, name)[1] or 0))]


def shard_files(folder: str) -> list[str]:
    """Return the files with the optimizer's shards in the order of their ranks; none for stage 0."""
    found = {name: re.fullmatch(_SHARD, name) for name in os.listdir(folder)}
    ranks = {int(match[2]): name for name, match in found.items() if match}
    return [os.path.join(folder, ranks[rank]) for rank in sorted(ranks)]


def stored(folder: str, kind: "Kind") -> "Stored":
    """Return the model or the optimizer in an engine's folder. Any rank, alone."""
    engine = Folder(folder)
    return engine.model() if kind == "model" else engine.optimizer()


class Folder:
    """An engine's folder, opened. Any rank, alone.

    Attributes:
        head: what the first rank wrote of the model: counts of steps and, below stage 3, weights.
        shards: what each rank wrote of the optimizer; none at stage 0.
        groups: names and shapes of the parameters in each flat tensor.
        splits_weights: stage 3 wrote it.
    """

    def __init__(self, folder: str, weights_only: bool = True) -> None:
        from accelerate.checkpoint.shards import WholeTensors

        self._folder, self._reader = folder, WholeTensors()
        self._models = [read_file(path, weights_only) for path in model_files(folder)]
        self.head = self._models[0]
        self.shards = [read_file(path, weights_only)["optimizer_state_dict"] for path in shard_files(folder)]
        self.groups: Groups = self.head["param_shapes"] or []
        self.splits_weights = bool(self.shards) and "fp32_flat_groups" in self.shards[0]
        self._aliases: dict[str, str] = dict(self.head["shared_params"] or {})

    def _stored(self, state: Any, aliases: Mapping[str, str]) -> "Stored":
        from accelerate.checkpoint.shards import Metadata, Stored

        return Stored(self._folder, state, self._reader, Metadata(self._reader.specs), aliases)

    def model(self) -> "Stored":
        """Return weights and buffers: float32 weights, where the ranks have such; a placeholder for each that they share."""
        head, values = self.head, dict(self.head["module"])
        if self.splits_weights:
            values = {name: values[name] for name in head["buffer_names"]}
            for name, shape in (head["frozen_param_shapes"] or {}).items():
                pieces = [model["frozen_param_fragments"][name].flatten() for model in self._models]
                values[name] = self._reader.join([torch.cat(pieces)[: shape.numel()]], shape)
        for number, group in enumerate(self.groups):
            key = "fp32_flat_groups" if self.splits_weights else "single_partition_of_fp32_groups"
            flats = [shard[key][number] for shard in self.shards]
            for name, shape in group.items():
                values[name] = self._joined(flats, number, name, shape)
        aliases = {
            canonical_name(alias): canonical_name(name) for alias, name in self._aliases.items() if name in values
        }
        values = {canonical_name(name): value for name, value in values.items()}
        return self._stored(values | {alias: values[name] for alias, name in aliases.items()}, aliases)

    def optimizer(self) -> "Stored":
        """Return the optimizer's state: by names, and of stage 0 by the numbers that torch gives the parameters."""
        if not self.shards:
            raw = self.head["optimizer"]
            if raw is not None and "fp32_groups_flat" in raw:
                raise ValueError(
                    f"{self._folder!r} was saved at stage 0 with 16-bit weights, and has one flat tensor for all parameters without their "
                    "names. Load it at stage 0 with the same precision."
                )
            return self._stored({"state": {}, "param_groups": []} if raw is None else raw, {})
        bases = [
            shard["optimizer_state_dict" if self.splits_weights else "base_optimizer_state"] for shard in self.shards
        ]
        if isinstance(bases[0], list):
            raise ValueError(f"{self._folder!r} was saved with elastic_checkpoint, which has no groups of parameters.")
        states: dict[str, Any] = {}
        for number, group in enumerate(self.groups):
            held = [base["state"].get(number, {}) for base in bases]
            for key, first in held[0].items():
                flat = isinstance(first, torch.Tensor) and first.dim() == 1
                flats = [values[key] for values in held] if flat else []
                for name, shape in group.items():
                    # A count of steps that parameters share would be counted up once for each of them.
                    value = self._joined(flats, number, name, shape) if flat else copy.deepcopy(first)
                    states.setdefault(canonical_name(name), {})[key] = value
        groups = [{**group, "params": self._names(group["params"])} for group in bases[0]["param_groups"]]
        return self._stored({"state": states, "param_groups": groups}, {})

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [canonical_name(name) for number in numbers for name in self.groups[number]]

    def _joined(self, flats: Sequence[torch.Tensor], number: int, name: str, shape: torch.Size) -> torch.Tensor:
        """Return a placeholder for a parameter, or one of its states, of which each rank has a part in a flat tensor."""
        places = self._places[number][name]
        return self._reader.join(
            [flats[rank].detach().narrow(0, start, count) for rank, start, count in places], shape
        )

    @functools.cached_property
    def _places(self) -> list[dict[str, list[tuple[int, int, int]]]]:
        """Return for each group, by name, the ranks that have a part of a parameter: where it begins there, and its length."""
        found: list[dict[str, list[tuple[int, int, int]]]] = []
        for number, group in enumerate(self.groups):
            places: dict[str, list[tuple[int, int, int]]] = {name: [] for name in group}
            for rank, shard in enumerate(self.shards):
                if self.splits_weights:
                    offset = 0
                    for name, shape in group.items():
                        start, count, length = part_of(shape.numel(), rank, len(self.shards))
                        places[name].append((rank, offset, count))
                        offset += length
                else:
                    for name, address in shard["param_slice_mappings"][number].items():
                        places[name].append((rank, address.start, address.numel))
            found.append(places)
        return found


def part_of(size: int, rank: int, ranks: int) -> tuple[int, int, int]:
    """Return which part of a flat parameter a rank has at stage 3: its start, its length, and that with the padding."""
    length = -(-size // ranks)
    start = min(size, rank * length)
    return start, min(length, size - start), length
