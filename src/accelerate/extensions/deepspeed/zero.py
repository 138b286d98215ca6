"""DeepSpeed's checkpoints, read without DeepSpeed and without running code of a file: the data of all ranks by parameter names.

A stage below 3 has the weights in ``mp_rank_00_model_states.pt``; stage 3 has such a file for each rank, with shapes
instead. From stage 1 on each rank has a part of the float32 weights and of the optimizer's states in
``*zero_pp_rank_N_mp_rank_00_optim_states.pt``, as flat tensors. Stages 1 and 2 list the position of each parameter; stage 3
gives each rank an even part of every parameter.

Source: https://github.com/deepspeedai/DeepSpeed (utils/zero_to_fp32.py, checkpoint/ds_to_universal.py)
"""

import copy
import functools
import glob
import itertools
import os
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from accelerate.base.constants import MODEL_NAME
from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.state import Kind
from accelerate.checkpoint.stored import FullFiles, FullTensor, Reader, StoredTensor
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.modules.unwrap import canonical_name

# Files that DeepSpeed writes next to the folders of its engines.
BESIDE = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
# Classes of DeepSpeed whose objects its files contain: records of numbers.
CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
# In folders of `save_state`, and of transformers' Trainer, which has one engine.
_ENGINE_FILE = re.compile(rf"({MODEL_NAME}(?:_{manifest.NUMBER})?)/.*_model_states\.pt")
_TRAINERS_ENGINE_FILE = re.compile(r"(global_step[0-9]+)/.*_model_states\.pt")
_SHARD = r"(bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt"

Groups = list[Mapping[str, torch.Size]]
# A rank that has a part of a parameter, where that begins in the rank's flat tensor and in the parameter, and its length.
Part = tuple[int, int, int, int]


class _Record:
    """Takes the place of DeepSpeed's class: it has its attributes and none of its code."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def engine_folder(index: int) -> str:
    """Return the name of the folder of engine number `index`: ``pytorch_model``, ``pytorch_model_1``, ..."""
    return os.path.splitext(manifest.model_file(index, safe_serialization=False))[0]


def model_files(folder: str) -> list[str]:
    """Return the files with the model's states; stage 3 has one for each rank, in their order.

    Raises:
        ValueError: layers are split over ranks, or experts have separate files.
    """
    paths = glob.glob(os.path.join(glob.escape(folder), "*_model_states.pt"))
    pattern = r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_00_model_states\.pt"
    match_of = {path: re.fullmatch(pattern, os.path.basename(path)) for path in paths}
    if strange := sorted(os.path.basename(path) for path, match in match_of.items() if match is None):
        raise ValueError(
            f"{folder!r} has {strange[0]}: its layers or experts are split over ranks, which only DeepSpeed puts together. Load it on as many "
            "ranks, at the same stage."
        )
    ranks = [(int(match[1] or 0), path) for path, match in match_of.items() if match]
    return [path for _, path in sorted(ranks)]


def shard_files(folder: str) -> list[str]:
    """Return the files with the optimizer's shards in the order of their ranks; none for stage 0."""
    match_of = {name: re.fullmatch(_SHARD, name) for name in os.listdir(folder)}
    ranks = {int(match[2]): name for name, match in match_of.items() if match}
    return [os.path.join(folder, ranks[rank]) for rank in sorted(ranks)]


class ZeroLayout:
    """The layout: the folder of an engine is ``pytorch_model``, ``pytorch_model_1`` and so on; the Trainer's is ``global_stepN``."""

    name, companions = "zero", BESIDE

    def listed(self, folder: str | os.PathLike[str]) -> list[str]:
        """Return files of the layout in a checkpoint, at least one for each engine. Not a collective."""
        starts = (MODEL_NAME, "global_step")
        return [file for start in starts for file in glob.glob(f"{start}*/*_model_states.pt", root_dir=folder)]

    def folder(self, files: Collection[str], kind: Kind, index: int) -> str | None:
        """Return the folder of the engine of a model or optimizer; models that have no engine do not count among the optimizers."""
        engine_folders = {match[1] for match in map(_ENGINE_FILE.fullmatch, files) if match}
        if index == 0 and (trainers := {match[1] for match in map(_TRAINERS_ENGINE_FILE.fullmatch, files) if match}):
            return max(trainers, key=lambda name: (len(name), name))
        if kind == "model":
            return name if (name := engine_folder(index)) in engine_folders else None
        return dict(enumerate(sorted(engine_folders, key=lambda name: (len(name), name)))).get(index)

    def open(self, path: str, kind: Kind, checkpoint: CheckpointFolder | None = None) -> Reader:
        """Return the model or the optimizer in an engine's folder, which is in that of a checkpoint. Not a collective."""
        engine = Folder(path, checkpoint=checkpoint)
        return engine.model() if kind == "model" else engine.optimizer()


class _JoinedTensor(FullTensor):
    """A tensor whose elements a function returns, from the parts that ranks wrote."""

    def __init__(self, elements: Callable[[int, int], torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(torch.Size(shape), dtype)
        self._elements = elements

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Return what the function returns; DamagedCheckpoint if it opens a file that cannot be read."""
        try:
            return self._elements(start, stop)
        except pickle.UnpicklingError as error:  # of a file that is opened now
            raise DamagedCheckpoint(str(error)) from error


class _Files(Sequence[dict[str, Any]]):
    """The contents of files. Each file is opened on first use, once."""

    def __init__(self, paths: Sequence[str], read: Callable[[str], dict[str, Any]]) -> None:
        self.paths, self._read = paths, functools.cache(read)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rank: int) -> dict[str, Any]:  # type: ignore[override]
        return self._read(self.paths[rank])


class Folder:
    """An engine's folder, of which each rank opens only the files that it needs.

    Not a collective.

    Attributes:
        head: the first rank's record of the model: counts of steps and, below stage 3, weights.
        shards: each rank's record of the optimizer; none at stage 0.
        groups: names and shapes of the parameters in each flat tensor.
        splits_weights: the files are of stage 3.
    """

    def __init__(self, folder: str, weights_only: bool = True, checkpoint: CheckpointFolder | None = None) -> None:
        def opened(path: str) -> Any:
            if checkpoint is not None:
                checkpoint.check([f"{os.path.basename(folder)}/{os.path.basename(path)}"])
            if not weights_only:
                return self._files.open(path, {"weights_only": False})
            return self._files.open(path, {"classes": dict.fromkeys(CLASSES, _Record)})

        self._folder, self._files = folder, FullFiles(folder)
        self._models = _Files(model_files(folder), opened)
        self.head = self._models[0]
        self.shards = _Files(shard_files(folder), lambda path: opened(path)["optimizer_state_dict"])
        self.groups: Groups = self.head["param_shapes"] or []
        self.splits_weights = bool(self.shards) and "fp32_flat_groups" in self.shards[0]
        self._aliases: dict[str, str] = dict(self.head["shared_params"] or {})

    def open_own(self, rank: int) -> None:
        """Open, and so compare with their checksums, the files which the engine of a rank itself reads."""
        self._models[rank if self.splits_weights else 0]
        if self.shards:
            elastic = isinstance(self._base(0), list)  # its engines read those of all ranks
            for number in range(len(self.shards)) if elastic else [rank]:
                self.shards[number]

    def _stored(self, state: Any, aliases: Mapping[str, str]) -> Reader:
        reader = copy.copy(self._files)
        reader.state, reader.aliases = state, aliases
        return reader

    def model(self) -> Reader:
        """Return weights and buffers: float32 weights, where the ranks have such; a placeholder for each that they share."""
        head, values = self.head, dict(self.head["module"])
        if self.splits_weights:
            values = {name: values[name] for name in head["buffer_names"]}
            for name, shape in (head["frozen_param_shapes"] or {}).items():
                values[name] = self._frozen(name, shape)
        key = "fp32_flat_groups" if self.splits_weights else "single_partition_of_fp32_groups"
        for number, group in enumerate(self.groups):
            flat = functools.partial(lambda number, rank: self.shards[rank][key][number], number)
            values |= {name: self._joined(flat, number, name) for name in group}
        aliases = {
            canonical_name(alias): canonical_name(name) for alias, name in self._aliases.items() if name in values
        }
        values = {canonical_name(name): value for name, value in values.items()}
        return self._stored(values | {alias: values[name] for alias, name in aliases.items()}, aliases)

    def optimizer(self) -> Reader:
        """Return the optimizer's state: by names, and of stage 0 by the numbers that torch gives the parameters."""
        if not self.shards:
            raw = self.head["optimizer"]
            if raw is not None and "fp32_groups_flat" in raw:
                raise ValueError(
                    f"{self._folder!r} was saved at stage 0 with 16-bit weights, and has one flat tensor for all parameters without their "
                    "names. Load it at stage 0 with the same precision."
                )
            return self._stored({"state": {}, "param_groups": []} if raw is None else raw, {})
        base = self._base(0)
        if isinstance(base, list):
            raise ValueError(f"{self._folder!r} was saved with elastic_checkpoint, which has no groups of parameters.")
        states: dict[str, Any] = {}
        for number, group in enumerate(self.groups):
            for key, first in base["state"].get(number, {}).items():
                is_flat = isinstance(first, StoredTensor) and len(first.shape) == 1
                flat = functools.partial(lambda number, key, rank: self._base(rank)["state"][number][key], number, key)
                for name in group:
                    # A count of steps that parameters share would be counted up once for each of them.
                    value = self._joined(flat, number, name) if is_flat else copy.deepcopy(first)
                    states.setdefault(canonical_name(name), {})[key] = value
        groups = [{**group, "params": self._names(group["params"])} for group in base["param_groups"]]
        return self._stored({"state": states, "param_groups": groups}, {})

    def _base(self, rank: int) -> Any:
        return self.shards[rank]["optimizer_state_dict" if self.splits_weights else "base_optimizer_state"]

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [canonical_name(name) for number in numbers for name in self.groups[number]]

    def _frozen(self, name: str, shape: torch.Size) -> StoredTensor:
        """Return a parameter that does not train, of which each rank has an even part."""

        def part(rank: int) -> StoredTensor:
            fragment: StoredTensor = self._models[rank]["frozen_param_fragments"][name]
            return fragment

        size, ranks = shape.numel(), len(self._models)
        parts = [(rank, 0, *part_of(size, rank, ranks)[:2]) for rank in range(ranks)]
        return self._join(lambda start, stop: self._cut(part, parts, start, stop), shape, part(0).dtype)

    def _joined(self, flat: Callable[[int], StoredTensor], number: int, name: str) -> StoredTensor:
        """Return a parameter, or one of its states, of which each rank has a part in a flat tensor."""

        def read(start: int, stop: int) -> torch.Tensor:
            return self._cut(flat, self._parts(number, name, start, stop), start, stop)

        return self._join(read, self.groups[number][name], flat(0).dtype)

    def _join(
        self, elements: Callable[[int, int], torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> StoredTensor:
        return _JoinedTensor(elements, shape, dtype)

    def _cut(self, flat: Callable[[int], StoredTensor], parts: Sequence[Part], start: int, stop: int) -> torch.Tensor:
        """Return the elements from `start` to `stop` out of the parts that ranks have in flat tensors."""
        pieces = []
        for rank, offset, begin, count in parts:
            first, last = max(start, begin), min(stop, begin + count)
            if first < last:
                pieces.append(self._files.elements(flat(rank), offset + first - begin, offset + last - begin))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0, dtype=flat(0).dtype)])

    def _parts(self, number: int, name: str, start: int, stop: int) -> list[Part]:
        """Return the parts of a parameter in flat tensors of ranks, at least those with elements from `start` to `stop`."""
        size, ranks = self.groups[number][name].numel(), range(len(self.shards))
        begin = self._begins[number][name]
        if self.splits_weights:
            return [(rank, begin, *part_of(size, rank, len(ranks))[:2]) for rank in ranks]
        # Usually the ranks have the parameters in order, each as much as the first one.
        length = self.shards[0]["single_partition_of_fp32_groups"][number].shape.numel()
        usual: list[Part] = []
        for rank in ranks[(begin + start) // max(length, 1) : -(-(begin + stop) // max(length, 1))]:
            first, last = max(begin, rank * length), min(begin + size, (rank + 1) * length)
            usual.append((rank, first - rank * length, first - begin, last - first))
        if all(self._address(number, name, rank) == (offset, count) for rank, offset, _, count in usual):
            return usual
        parts: list[Part] = []
        for rank in ranks:
            if (address := self._address(number, name, rank)) is not None:
                parts.append((rank, address[0], sum(part[3] for part in parts), address[1]))
        return parts

    def _address(self, number: int, name: str, rank: int) -> tuple[int, int] | None:
        """Return where a part of a parameter begins in the flat tensor of a rank below stage 3, and its length."""
        address = self.shards[rank]["param_slice_mappings"][number].get(name)
        return None if address is None else (address.start, address.numel)

    @functools.cached_property
    def _begins(self) -> list[dict[str, int]]:
        """For each group, by name, the number of elements before a parameter: at stage 3 in the flat tensor of each rank."""
        begins: list[dict[str, int]] = []
        for group in self.groups:
            sizes = [shape.numel() for shape in group.values()]
            if self.splits_weights:
                sizes = [part_of(size, 0, len(self.shards))[2] for size in sizes]
            begins.append(dict(zip(group, itertools.accumulate(sizes, initial=0), strict=False)))
        return begins


def part_of(size: int, rank: int, ranks: int) -> tuple[int, int, int]:
    """Return which part of a flat parameter a rank has at stage 3: its start, its length, and that with the padding."""
    length = -(-size // ranks)
    start = min(size, rank * length)
    return start, min(length, size - start), length
