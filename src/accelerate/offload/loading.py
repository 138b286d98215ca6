"""Reading checkpoints, file by file, into models that are spread over devices."""

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from accelerate.modules.tensors import model_has_dtensor
from accelerate.offload.disk import load_offloaded_weight, offload_weight, save_offload_index
from accelerate.offload.placement import as_device, set_module_tensor_to_device
from accelerate.offload.quantized import quantize_and_offload_8bit
from accelerate.offload.sizes import _get_proper_dtype
from accelerate.offload.tied import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    retie_parameters,
)
from accelerate.utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

logger = logging.getLogger("accelerate.utils.modeling")

Path_ = str | os.PathLike


def load_state_dict(checkpoint_file: Path_, device_map: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state dict in one file.

    Args:
        checkpoint_file: A ``.safetensors`` file, or one that ``torch.save`` wrote; of the latter only tensors and plain
            containers are accepted (``weights_only``), so that no code in it runs.
        device_map: Where each tensor of a safetensors file is read to, by module name; ``"disk"`` and names that are
            not in the map are read to the CPU. Files of ``torch.save`` are read to the CPU as a whole.

    Raises:
        OSError: The safetensors file does not say PyTorch-like metadata.
        ValueError: The safetensors file was written for another framework.
    """
    path = os.fspath(checkpoint_file)
    if not path.endswith(".safetensors"):
        return torch.load(path, map_location="cpu", weights_only=True)
    with safe_open(path, framework="pt") as file:
        _check_format(path, file.metadata())
        places = {name: _reading_device(name, device_map) for name in file.keys()}  # noqa: SIM118 - not a dict
    tensors: dict[str, Any] = {}
    for place in dict.fromkeys(places.values()):
        with safe_open(path, framework="pt", device="cpu" if place == "meta" else place) as file:
            for name in (name for name in places if places[name] == place):
                tensor = file.get_tensor(name)
                tensors[name] = tensor.to("meta") if place == "meta" else tensor
    return {name: tensors[name] for name in places}


def _check_format(path: str, metadata: Mapping[str, str] | None) -> None:
    written_for = (metadata or {}).get("format", "pt")
    if written_for in ("tf", "flax", "np", "mlx"):
        raise ValueError(f"{path} was written for {written_for!r}; a model of PyTorch needs a file of format 'pt'.")
    if written_for != "pt":
        raise OSError(
            f"The metadata of {path} names the format {written_for!r}, which is unknown. Save it with save_file(..., metadata={{'format': 'pt'}})."
        )


def _reading_device(name: str, device_map: Mapping[str, Any] | None) -> str:
    if device_map is None:
        return "cpu"
    try:
        device = device_of(name, device_map)
    except ValueError:
        return "cpu"
    return "cpu" if device == "disk" else str(as_device(device))


def checkpoint_files(checkpoint: Path_) -> list[str]:
    """Return the files that hold the weights of a checkpoint.

    Args:
        checkpoint: A file with a state dict, an index file (``*.index.json``), or a folder with one of: a
            `model.safetensors`, a `pytorch_model.bin`, an index file.

    Raises:
        ValueError: It is none of these, or a folder with several index files.
    """
    path = Path(checkpoint)
    if path.is_dir():
        for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
            if (path / name).is_file():
                return [str(path / name)]
        indices = sorted(path.glob("*.index.json"))
        if len(indices) != 1:
            found = "none" if not indices else ", ".join(index.name for index in indices)
            raise ValueError(
                f"The folder {path} is not a checkpoint: it must hold {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME} or exactly one "
                f"`.index.json` file (found: {found})."
            )
        path = indices[0]
    if not path.is_file():
        raise ValueError(
            f"checkpoint={os.fspath(checkpoint)!r} does not exist. Give a file with a state dict, the index of a sharded "
            "checkpoint, or a folder with either."
        )
    if not path.name.endswith(".index.json"):
        return [str(path)]
    content = json.loads(path.read_text("utf-8"))
    weight_map = content.get("weight_map", content)
    return [str(path.parent / name) for name in sorted(set(weight_map.values()))]


def load_offloaded_weights(model: nn.Module, index: Mapping[str, dict] | None, offload_folder: Path_) -> None:
    """Read weights that `offload_weight` wrote into a model, on the CPU.

    Args:
        model: The model whose tensors are filled.
        index: Tensor names to their entries, as `offload_weight` made them. None or empty: nothing happens.
        offload_folder: The folder with the files; it may be deleted afterwards.
    """

    def read(name: str) -> torch.Tensor:
        # The files may be temporary, so their content must not stay mapped.
        return load_offloaded_weight(Path(offload_folder) / f"{name}.dat", index[name]).clone()

    for name in index or {}:
        scales = name.replace("weight", "SCB")
        if name.endswith("SCB"):
            continue  # goes along with its weight
        value = read(name)
        statistics = read(scales) if value.dtype == torch.int8 and scales in index else None
        set_module_tensor_to_device(model, name, "cpu", value=value, dtype=value.dtype, fp16_statistics=statistics)


def _kept_in_fp32(name: str, kept: Iterable[str]) -> bool:
    """Whether a tensor is one of those named, or lies in a module that is, wherever in the model."""
    return any(name == part or f".{part}." in f".{name.rpartition('.')[0]}." for part in kept)


@dataclass
class _Reader:
    """Puts the tensors of checkpoint files where a device map says, one at a time."""

    model: nn.Module
    device_map: Mapping[str, Any]
    offload_folder: Path_ | None
    dtype: torch.dtype | None
    kept_in_fp32: Sequence[str]
    offload_buffers: bool
    offload_8bit: bool
    spill_folder: str | None
    on_disk: dict[str, dict] = field(default_factory=dict)
    spilled: dict[str, dict] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self.dtypes = {
            name: tensor.dtype
            for tensors in (self.model.named_parameters, self.model.named_buffers)
            for name, tensor in tensors(remove_duplicate=False)
        }

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Place all tensors of one file."""
        for name, value in tensors.items():
            if name in self.dtypes:
                self.read.add(name)
                self._place(name, value, tensors)
            elif not name.endswith("SCB"):  # the scales of an 8-bit weight travel with the weight
                self.unexpected.add(name)

    def _place(self, name: str, value: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        device = device_of(name, self.device_map)
        dtype = self.dtype
        if dtype is not None and _kept_in_fp32(name, self.kept_in_fp32):
            dtype = torch.float32
        statistics = tensors.get(name.replace("weight", "SCB")) if value.dtype == torch.int8 else None
        if dtype is not None or device == "disk":
            # What comes from disk later must have the dtype of what is in memory.
            value = value.to(dtype or self.dtypes[name]) if value.is_floating_point() else value
        if device == "disk" and name in self.buffers and not self.offload_buffers:
            device = "cpu"
        if device == "disk":
            if self.offload_8bit:
                quantize_and_offload_8bit(
                    self.model, value, name, dtype, self.offload_folder, self.on_disk, statistics
                )
            else:
                set_module_tensor_to_device(self.model, name, "meta", dtype=value.dtype)
                offload_weight(value, name, self.offload_folder, index=self.on_disk)
        elif device == "cpu" and self.offload_8bit:
            quantize_and_offload_8bit(self.model, value, name, dtype, self.spill_folder, self.spilled, statistics)
        elif device == "cpu" and self.spill_folder is not None:
            set_module_tensor_to_device(self.model, name, "meta", dtype=value.dtype)
            offload_weight(value, name, self.spill_folder, index=self.spilled)
        else:
            set_module_tensor_to_device(
                self.model, name, device, value=value, dtype=dtype, fp16_statistics=statistics, clear_cache=False
            )


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Path_,
    device_map: Mapping[str, Any] | None = None,
    offload_folder: Path_ | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Read a checkpoint into a model in place, holding one file at a time in memory.

    Args:
        model: The model; its tensors may be on the meta device.
        checkpoint: A file with a state dict, the index of a sharded checkpoint, or a folder with either.
        device_map: Where each module's tensors go. None: into the tensors that the model has.
        offload_folder: Where weights go whose device is ``"disk"``.
        dtype: Dtype that floating-point weights are cast to; models of DTensors have to have it already.
        offload_state_dict: Keep weights for the CPU in a temporary folder until all files are read, so that host memory
            never holds them twice.
        offload_buffers: Write buffers of modules on disk to the disk too; else they stay on the CPU.
        keep_in_fp32_modules: Names of modules or tensors that are float32 whatever ``dtype`` says.
        offload_8bit_bnb: Quantise offloaded weights to 8 bit with bitsandbytes first.
        strict: Raise when names in the checkpoint and in the model differ, instead of warning.
        full_state_dict: For models of DTensors: the checkpoint holds whole tensors, not this rank's shards.
        broadcast_from_rank0: For models of DTensors: rank 0 reads the files and sends the others their part; all ranks
            call.

    Raises:
        ValueError: No such checkpoint; weights go to disk without ``offload_folder``; the map does not cover a tensor.
        RuntimeError: ``strict``, and names differ.
    """
    tied = find_tied_parameters(model)
    if not tied and check_tied_parameters_in_config(model):
        logger.warning(
            "The model weights are not tied, although its configuration says that they should be. Call "
            "`model.tie_weights()` before loading a checkpoint."
        )
    if device_map is not None:
        check_tied_parameters_on_same_device(tied, device_map)
        if "disk" in device_map.values():
            if offload_folder is None:
                raise ValueError("The device_map sends modules to the disk: give an `offload_folder` to put them in.")
            Path(offload_folder).mkdir(parents=True, exist_ok=True)
    files = checkpoint_files(checkpoint)
    target = _get_proper_dtype(dtype)
    kept = list(keep_in_fp32_modules or ())
    if device_map is not None:
        read, unexpected = _load_by_map(
            model,
            files,
            device_map,
            offload_folder,
            target,
            kept,
            offload_state_dict,
            offload_buffers,
            offload_8bit_bnb,
        )
    elif model_has_dtensor(model):
        if target is not None and any(parameter.dtype != target for parameter in model.parameters()):
            raise ValueError(
                f"dtype={dtype!r} differs from that of a sharded model's parameters, which cannot change any more. Cast the "
                "model before it is sharded, or leave `dtype` out."
            )
        read, unexpected = _load_dtensors(model, files, full_state_dict, broadcast_from_rank0)
    else:
        read, unexpected = _load_plain(model, files)
        _cast_loaded(model, read, target, kept)
    retie_parameters(model, tied)
    _report(model, checkpoint, read, unexpected, tied, strict)


def _load_by_map(
    model: nn.Module,
    files: Sequence[str],
    device_map: Mapping[str, Any],
    offload_folder: Path_ | None,
    dtype: torch.dtype | None,
    kept: Sequence[str],
    spill: bool,
    offload_buffers: bool,
    offload_8bit: bool,
) -> tuple[set[str], set[str]]:
    uses_cpu = "cpu" in device_map.values()
    with tempfile.TemporaryDirectory() as folder:
        spill_folder = folder if uses_cpu and (spill or offload_8bit) else None
        reader = _Reader(model, device_map, offload_folder, dtype, kept, offload_buffers, offload_8bit, spill_folder)
        for file in files:
            reader.take(load_state_dict(file, device_map=device_map))
        if reader.on_disk:
            save_offload_index(reader.on_disk, offload_folder)
        load_offloaded_weights(model, reader.spilled, folder)
    return reader.read, reader.unexpected


def _load_plain(model: nn.Module, files: Sequence[str]) -> tuple[set[str], set[str]]:
    read: set[str] = set()
    unexpected: set[str] = set()
    for file in files:
        tensors = load_state_dict(file)
        places = dict(model.state_dict(keep_vars=True))
        for name, place in places.items():
            # A tensor on the meta device has no memory to copy into.
            if name in tensors and isinstance(place, torch.Tensor) and place.device.type == "meta":
                set_module_tensor_to_device(model, name, "cpu", value=tensors[name], dtype=tensors[name].dtype)
        unexpected.update(model.load_state_dict(tensors, strict=False).unexpected_keys)
        read.update(tensors)
    return read - unexpected, unexpected


def _load_dtensors(model: nn.Module, files: Sequence[str], full: bool, from_rank0: bool) -> tuple[set[str], set[str]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if from_rank0 and not full:
        raise ValueError(
            "broadcast_from_rank0=True needs full_state_dict=True: what rank 0 sends are whole tensors, of which each rank "
            "keeps its part."
        )
    tensors: dict[str, torch.Tensor] = {}
    if not from_rank0 or torch.distributed.get_rank() == 0:
        for file in files:
            tensors.update(load_state_dict(file))
    names = set(tensors)
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=from_rank0, strict=False)
    unexpected = set(set_model_state_dict(model, tensors, options=options).unexpected_keys) & names
    # Ranks that read no file cannot name what was in it; rank 0 speaks for them.
    return (names - unexpected if names else set(model.state_dict())), unexpected


def _cast_loaded(model: nn.Module, names: set[str], dtype: torch.dtype | None, kept: Sequence[str]) -> None:
    if dtype is None:
        return
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in names and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            # Assigning the data keeps the parameter that an optimizer may already hold.
            tensor.data = tensor.data.to(torch.float32 if _kept_in_fp32(name, kept) else dtype)


def _report(
    model: nn.Module,
    checkpoint: Path_,
    read: set[str],
    unexpected: set[str],
    tied: Sequence[Sequence[str]],
    strict: bool,
) -> None:
    """Say, or with ``strict`` raise, what the checkpoint and the model do not have in common."""
    if unexpected and not strict:
        logger.warning(
            "The checkpoint %s has weights that %s has no place for, which were not used: %s",
            os.fspath(checkpoint),
            type(model).__name__,
            sorted(unexpected),
        )
    if not strict:
        return
    through_ties = {name for group in tied if read.intersection(group) for name in group}
    missing = [name for name in model.state_dict() if name not in read | through_ties]
    if unexpected or missing:
        raise RuntimeError(
            f"strict=True, but the checkpoint {os.fspath(checkpoint)} and {type(model).__name__} differ. "
            f"Unexpected key(s) in state_dict: {sorted(unexpected)}. Missing key(s) in state_dict: {missing}."
        )
