"""Reading checkpoints into models that are spread over devices: files are opened and checked, then weights are placed."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from accelerate.base.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate.checkpoint.state import run_on_all_ranks
from accelerate.devices.table import detect
from accelerate.extensions.big_models.device_map import check_devices, disjoint_map
from accelerate.extensions.big_models.placement import (
    FOUR_BIT,
    INT8,
    as_device,
    default_device,
    scales_name,
    set_module_tensor_to_device,
)
from accelerate.extensions.big_models.store import (
    OffloadedWeightsLoader,
    OffloadWriter,
    PathLike,
    WeightFile,
    WeightSource,
    check_format,
)
from accelerate.extensions.big_models.tensors import (
    _get_proper_dtype,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    device_of,
    entry_of,
    find_tied_parameters,
    listed,
    retie_parameters,
    tensor_at,
)
from accelerate.extensions.big_models.weights import check_data
from accelerate.modules.unwrap import model_has_dtensor
from accelerate.runtime import storage
from accelerate.runtime.durable import is_inside

logger = logging.getLogger("accelerate.utils.modeling")

# A load that takes longer than this many seconds shows a progress bar, on terminals.
PROGRESS_AFTER = 2.0

# Ends of names of bitsandbytes that travel with an 8-bit weight.
_BELONG_TO_WEIGHTS = ("SCB", "weight_format")


def load_state_dict(checkpoint_file: PathLike, device_map: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state dict in one file.

    Args:
        checkpoint_file: A ``.safetensors`` file, or one that ``torch.save`` wrote; of the latter only tensors and plain
            containers are accepted (``weights_only``), so that no code in it runs.
        device_map: Where each tensor of a safetensors file is read to, by module name; ``"disk"`` and names that are
            not in the map are read to the CPU. Files of ``torch.save`` are read to the CPU in full.

    Raises:
        OSError: The safetensors file does not say PyTorch-like metadata.
        ValueError: The safetensors file was written for another framework.
    """
    path = os.fspath(checkpoint_file)
    if not path.endswith(".safetensors"):
        return torch.load(path, map_location="cpu", weights_only=True)
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise SafetensorError(
            f"{path} is truncated or no safetensors file: {error}. Copy or download it again."
        ) from error
    check_format(path, file.metadata())
    tensors, places = {}, device_map or {}
    for name in file.keys():  # noqa: SIM118 - no mapping
        entry = entry_of(name, places)
        device = "cpu" if entry is None or places[entry] == "disk" else places[entry]
        tensors[name] = file.get_tensor(name).to(as_device(device))
    return tensors


def load_offloaded_weights(model: nn.Module, index: Mapping[str, dict] | None, offload_folder: PathLike) -> None:
    """Read offloaded weights into a model, on the CPU.

    Args:
        model: The model whose tensors are filled.
        index: Tensor names to their entries, as `offload_weight` or `load_checkpoint_in_model` made them. None or empty:
            nothing happens.
        offload_folder: The folder with the files; it may be deleted afterwards.
    """
    index = index or {}
    weights = WeightSource(OffloadedWeightsLoader(save_folder=offload_folder, index=index))
    for name in index:
        if not name.endswith("SCB"):  # which goes along with its weight
            # Copies, because the files may be temporary, so that nothing may stay mapped to them.
            value = weights.get(name)
            value, scales = (None if one is None else one.clone() for one in (value, weights.scales(name, value)))
            set_module_tensor_to_device(model, name, "cpu", value=value, dtype=value.dtype, fp16_statistics=scales)


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype | None,
    offload_folder: str | os.PathLike,
    offload_index: dict[str, dict],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Write a tensor to a folder and leave it on the meta device; the weight of an 8-bit layer is quantised before.

    Args:
        model: The model that the tensor belongs to.
        param: Its value: floating-point numbers, or with ``fp16_statistics`` an 8-bit weight that is quantised already.
        param_name: Full name of the tensor.
        new_dtype: Dtype that floating-point numbers are cast to, before they are quantised where they are. None: that of the
            tensor in the model.
        offload_folder: Where the files go: one for the tensor, and one for the scales of an 8-bit weight.
        offload_index: Receives their entries.
        fp16_statistics: The scales of a weight that is quantised already.

    Raises:
        ValueError: The model has no such tensor, or an 8-bit weight comes without its scales.

    Source: LLM.int8() (arXiv 2208.07339)
    """
    with OffloadWriter(offload_folder, indexed=False) as writer:
        _put_quantized(model, param, param_name, new_dtype, fp16_statistics, writer)
    offload_index.update(writer.index)
    if detect().type != "cpu":
        detect().empty_cache()


def _put_quantized(
    model: nn.Module,
    value: torch.Tensor,
    full_name: str,
    dtype: torch.dtype | None,
    scales: torch.Tensor | None,
    writer: OffloadWriter | None,
) -> None:
    """Put a tensor on the CPU or, with a writer, into a file; the weight of an 8-bit layer is quantised before."""
    owner, name = tensor_at(model, full_name)
    old = getattr(owner, name, None)
    if not isinstance(old, torch.Tensor):
        raise ValueError(f"{type(owner).__name__} has no parameter or buffer named {full_name!r}.")
    if scales is None and type(old).__name__ == INT8:
        # On the device that computes, so that the weight is what it would be without offloading.
        set_module_tensor_to_device(owner, name, default_device(), value=value, dtype=dtype, clear_cache=False)
        placed = getattr(owner, name)
        value, scales = placed.data, placed.SCB
    elif scales is None and value.is_floating_point():
        value = value.to(old.dtype if dtype is None else dtype)
    scales = None if scales is None else scales.to("cpu")
    if writer is not None:
        if scales is not None:
            # Small, and wanted in the state dict, so they stay in memory too.
            writer.add(scales_name(full_name), scales)
        writer.add(full_name, value)
    value = value.to("cpu" if writer is None else "meta")
    set_module_tensor_to_device(
        owner, name, value.device, value=value, dtype=value.dtype, fp16_statistics=scales, clear_cache=False
    )


@dataclass(frozen=True)
class Entry:
    """A weight in a file: its name there, and the weight on the CPU as a view of the file."""

    file: WeightFile
    key: str
    value: torch.Tensor

    def reference(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return an entry for an offload index that reads the weight in place and casts it to a dtype."""
        return {
            "safetensors_file": self.file.path,
            "weight_name": self.key,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(self.value.shape),
        }


def checkpoint_files(checkpoint: PathLike) -> dict[str, list[str]]:
    """Return the files with the weights of a checkpoint, each with the names that an index says are in it.

    A checkpoint is a state dict, an index (any ``*.json``), or a folder with either. FileNotFoundError: files of the
    index are missing. ValueError: it is none of these, or a folder with several indices.
    """
    path = Path(checkpoint)
    if path.is_dir():
        for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
            if (path / name).is_file():
                return {str(path / name): []}
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
    return _indexed(path) if path.suffix == ".json" else {str(path): []}


def _indexed(path: Path) -> dict[str, list[str]]:
    try:
        content = json.loads(path.read_text("utf-8"))
        weight_map = content.get("weight_map", content)
        files: dict[str, list[str]] = {name: [] for name in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            files[file].append(name)
        if outside := [file for file in files if not is_inside(file)]:
            raise ValueError(f"it names {outside[0]!r:.80}, which leads out of {path.parent}")
        missing = [file for file in files if not (path.parent / file).is_file()]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of a sharded checkpoint: {error}.") from error
    if missing:
        raise FileNotFoundError(
            f"{path} names {len(files)} files, of which {len(missing)} are not in {path.parent}: {listed(missing)}. Copy or "
            "download them again."
        )
    return {str(path.parent / file): names for file, names in files.items()}


def open_checkpoint(checkpoint: PathLike) -> dict[str, Entry]:
    """Open every file of a checkpoint and return its weights by name, unread; raises as `WeightFile` does."""
    entries: dict[str, Entry] = {}
    for path, expected in checkpoint_files(checkpoint).items():
        file = WeightFile(path)
        for key in file.keys:
            tensor = file.tensor(key)
            # Modules may keep extra state in other forms, which only their own `load_state_dict` understands.
            if isinstance(tensor, torch.Tensor):
                entries[key] = Entry(file, key, tensor)
        absent = [name for name in expected if name not in entries]
        if absent:
            raise ValueError(
                f"{path} lacks weights that the checkpoint's index says are in it: {listed(absent)}. The files and the index "
                "belong to different checkpoints; copy or download them again."
            )
    return entries


def check_fit(tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Entry], where: str) -> None:
    """Raise a ValueError where weights have another shape than their tensors, or integers for floating point."""
    problems = []
    for name, tensor in tensors.items():
        if name not in entries or type(tensor).__name__ in FOUR_BIT:
            continue
        value = entries[name].value
        if value.shape != tensor.shape:
            problems.append(f"{name} has shape {tuple(value.shape)}, the model {tuple(tensor.shape)}")
        elif isinstance(tensor, nn.Parameter) and not (value.dtype is torch.int8 and scales_name(name) in entries):
            # A cast would change what the numbers mean: of quantised weights without their scales, for example.
            real = value.is_floating_point() or value.is_complex()
            if real != (tensor.is_floating_point() or tensor.is_complex()):
                problems.append(f"{name} is {value.dtype}, the model's parameter {tensor.dtype}")
    if problems:
        raise ValueError(
            f"{where} does not belong to this model, which is left as it was: {listed(problems)}. Check the model's "
            "configuration; quantised weights need the quantised model."
        )


@dataclass
class _Step:
    """One weight of a checkpoint and where it goes; a dtype of None leaves that to the tensor that it fills."""

    name: str
    entry: Entry
    device: Any
    dtype: torch.dtype | None
    scales: torch.Tensor | None

    def on_disk_as(self, old: torch.Tensor) -> torch.dtype:
        """The dtype of the weight when it comes from the disk, which must be that of what is in memory."""
        stored = self.entry.value.dtype
        return (self.dtype or old.dtype) if stored.is_floating_point or stored.is_complex else stored


@dataclass
class CheckpointLoad:
    """A checkpoint on its way into a model: every weight is planned, the plan is checked, and then carried out.

    Until the plan is checked nothing is changed; if carrying it out fails, the offload folder is as it was. Unlike
    with `load_checkpoint_in_model`, whose arguments these are, weights that can be read in place need no
    ``offload_folder``. `whole` makes it an error, before anything is changed, if a tensor of a model with a
    ``device_map`` would be without data.
    """

    model: nn.Module
    checkpoint: PathLike
    device_map: Mapping[str, Any] | None
    offload_folder: PathLike | None = None
    dtype: str | torch.dtype | None = None
    offload_buffers: bool = False
    keep_in_fp32_modules: Sequence[str] | None = None
    offload_8bit_bnb: bool = False
    strict: bool = False
    full_state_dict: bool = True
    broadcast_from_rank0: bool = False
    whole: bool = False

    def run(self) -> dict[str, dict[str, Any]]:
        """Load it, and return the index of the weights that stay on disk."""
        self.tied = find_tied_parameters(self.model)
        if not self.tied and check_tied_parameters_in_config(self.model):
            logger.warning(
                "The model weights are not tied, although its configuration says that they should be. Call "
                "`model.tie_weights()` before loading a checkpoint."
            )
        self.target = _get_proper_dtype(self.dtype)
        self.source = f"The checkpoint {os.fspath(self.checkpoint)}"
        index: dict[str, dict[str, Any]] = {}
        if self.device_map is not None:
            index = self._carry_out(self._plan())
        elif model_has_dtensor(self.model):
            self._fill_shards()
        else:
            self._fill()
        retie_parameters(self.model, self.tied)
        return index

    # -- with a device map ----------------------------------------------------------------------------------------------

    def _plan(self) -> list[_Step]:
        """Return what is to be done, file by file, once all of it is known to be possible."""
        self.device_map = disjoint_map(self.model, self.device_map)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        self.extra: dict[str, nn.Module] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name in module._non_persistent_buffers_set:
                buffers.pop(prefix + name, None)  # belong to no checkpoint, even if an old one has them
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                self.extra[f"{prefix}_extra_state"] = module
        self.buffers = set(buffers)
        self.tensors = {**dict(self.model.named_parameters(remove_duplicate=False)), **buffers}
        check_devices(self.device_map)
        entries = open_checkpoint(self.checkpoint)
        check_fit(self.tensors, entries, self.source)
        self.files: list[WeightFile] = list(dict.fromkeys(entry.file for entry in entries.values()))
        read = entries.keys() & self.tensors.keys()
        read |= self.extra.keys() & {name for file in self.files for name in file.keys}
        named = (*entries.items(), *self._aliases(entries))
        steps = [self._step(name, entry, entries) for name, entry in named if name in self.tensors]
        self._compare(read, {name for name in entries.keys() - read if not name.endswith(_BELONG_TO_WEIGHTS)})
        if self.whole:
            arrives = {name for group in self.tied if not read.isdisjoint(group) for name in group} | read
            places = set(self.device_map.values()) - {"meta"}
            check_data(self.model, self.device_map, places, arrives, self.tied, offload_buffers=True)
        return steps

    def _step(self, name: str, entry: Entry, entries: Mapping[str, Entry]) -> _Step:
        device = device_of(name, self.device_map)
        if device == "disk" and name in self.buffers and not self.offload_buffers:
            device = "cpu"
        scales = entries.get(scales_name(name)) if entry.value.dtype == torch.int8 else None
        return _Step(name, entry, device, self._dtype_of(name), None if scales is None else scales.value)

    def _dtype_of(self, name: str) -> torch.dtype | None:
        """What a floating-point weight is cast to; those named, or in modules whose names end so, stay in float32."""
        kept = any(name == part or f"{part}." in name for part in self.keep_in_fp32_modules or ())
        return torch.float32 if kept and self.target is not None else self.target

    def _aliases(self, entries: Mapping[str, Entry]) -> Iterator[tuple[str, Entry]]:
        """Names of tied weights that the checkpoint has under another name only, and on another device."""
        for group in self.tied:
            known = [name for name in group if name in entries]
            places = {device_of(name, self.device_map) for name in known} - {"disk"}
            for name in group if known else ():
                if name not in entries and device_of(name, self.device_map) not in places:
                    yield name, entries[known[0]]

    def _carry_out(self, steps: Sequence[_Step]) -> dict[str, dict[str, Any]]:
        """Write what goes to disk, place the rest, and return the index of what is on disk."""
        on_disk = [step for step in steps if step.device == "disk"]
        needs_folder = [step.name for step in on_disk if self.offload_8bit_bnb or not step.entry.file.in_place]
        if needs_folder and self.offload_folder is None:
            raise ValueError(
                f"The device_map sends {listed(needs_folder, 3)} to the disk, and the checkpoint "
                f"{os.fspath(self.checkpoint)} cannot be read in place, because it is not in safetensors: give an "
                "`offload_folder` to put them in."
            )
        with OffloadWriter(self.offload_folder) as writer:
            with _progress(steps) as bar:
                for step in steps:
                    if self.offload_8bit_bnb and step.device in ("cpu", "disk"):
                        self._quantize(step, writer)
                    elif step.device == "disk":
                        self._leave_on_disk(step, writer)
                    else:
                        self._place(step)
                    bar.update(step.entry.value.nbytes)
            # What modules keep next to tensors is in a form that only they understand.
            for file in self.files:
                for name in self.extra.keys() & file.keys.keys():
                    self.extra[name].set_extra_state(file.tensor(name))
        return writer.index

    def _leave_on_disk(self, step: _Step, writer: OffloadWriter) -> None:
        dtype = step.on_disk_as(self.tensors[step.name])
        if step.entry.file.in_place:
            writer.index[step.name] = step.entry.reference(dtype)
        else:
            writer.add(step.name, step.entry.value.to(dtype))
        set_module_tensor_to_device(self.model, step.name, "meta", dtype=dtype)

    def _quantize(self, step: _Step, writer: OffloadWriter) -> None:
        value = step.entry.value
        if value.is_floating_point():
            value = value.to(step.on_disk_as(self.tensors[step.name]))
        to_disk = writer if step.device == "disk" else None
        _put_quantized(self.model, value, step.name, step.dtype, step.scales, to_disk)

    def _place(self, step: _Step) -> None:
        value = step.entry.value
        if step.dtype is not None and value.is_floating_point():
            value = value.to(step.dtype)
        if not step.entry.file.in_place and step.device == "cpu" and value.dtype is step.entry.value.dtype:
            # Files of torch.save are overwritten in place when they are saved again, so nothing stays mapped to them.
            value = value.clone()
        options = {"fp16_statistics": step.scales, "clear_cache": False}
        set_module_tensor_to_device(self.model, step.name, step.device, value, step.dtype, **options)

    # -- without --------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Copy the weights into the tensors that the model has."""
        entries = open_checkpoint(self.checkpoint)
        state = self.model.state_dict(keep_vars=True)
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        check_fit(tensors, entries, self.source)
        files = dict.fromkeys(entry.file for entry in entries.values())
        names = {name for file in files for name in file.keys}
        self._compare(names & state.keys(), names - state.keys())
        # Tensors on the meta device get the dtype of the file, and the others do then, too: layers that compute together share one.
        partly_empty = any(place.is_meta for place in tensors.values())
        for path in checkpoint_files(self.checkpoint):
            file = WeightFile(path)  # mapped, so that host memory need not hold all of it next to the model
            values = {name: file.tensor(name) for name in file.keys}
            for name in tensors.keys() & values.keys():
                place, value = tensors[name], values[name]
                if place.is_meta:  # has no memory to copy into
                    value = value if file.in_place else value.clone()
                    set_module_tensor_to_device(self.model, name, "cpu", value=value, dtype=value.dtype)
                elif partly_empty and place.is_floating_point():
                    place.data = place.data.to(value.dtype)  # stays the parameter that an optimizer may already hold
            self.model.load_state_dict(values, strict=False)
        for name, tensor in self.model.state_dict(keep_vars=True).items() if self.target is not None else ():
            if name in names and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.data = tensor.data.to(self._dtype_of(name))

    def _fill_shards(self) -> None:
        """Give each rank its part of the weights of a model of DTensors."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        if self.target is not None and any(parameter.dtype != self.target for parameter in self.model.parameters()):
            raise ValueError(
                f"dtype={self.dtype!r} differs from that of a sharded model's parameters, which cannot change any more. Cast "
                "the model before it is sharded, or leave `dtype` out."
            )
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise ValueError(
                "broadcast_from_rank0=True needs full_state_dict=True: what rank 0 sends are full tensors, of which each rank "
                "keeps its part."
            )

        def whole() -> dict[str, torch.Tensor]:
            read: dict[str, torch.Tensor] = {}
            if not self.broadcast_from_rank0 or torch.distributed.get_rank() == 0:
                for file in checkpoint_files(self.checkpoint):
                    read.update(load_state_dict(file))
            return read

        tensors = run_on_all_ranks(whole)
        names = set(tensors)
        options = StateDictOptions(
            full_state_dict=self.full_state_dict, broadcast_from_rank0=self.broadcast_from_rank0, strict=False
        )
        unexpected = set(set_model_state_dict(self.model, tensors, options=options).unexpected_keys) & names
        # Ranks that read no file cannot name what was in it; rank 0 speaks for them.
        self._compare(names - unexpected if names else set(self.model.state_dict()), unexpected)

    def _compare(self, read: set[str], unexpected: set[str]) -> None:
        """Warn of, or with ``strict`` raise for, what the checkpoint and the model do not have in common."""
        kind = type(self.model).__name__
        if unexpected and not self.strict:
            logger.warning(
                "%s has weights that %s has no place for, which were not used: %s",
                self.source,
                kind,
                listed(sorted(unexpected)),
            )
        if not self.strict:
            return
        tensors = self.model.state_dict(keep_vars=True)
        # Tied weights and shared modules have several names, of which a checkpoint may hold one alone.
        found = {id(tensor) for name, tensor in tensors.items() if name in read}
        missing = [name for name, tensor in tensors.items() if name not in read and id(tensor) not in found]
        if unexpected or missing:
            raise RuntimeError(
                f"{self.source} and {kind} differ, and strict=True. Unexpected key(s) in state_dict: {sorted(unexpected)}. "
                f"Missing key(s) in state_dict: {missing}."
            )


def _progress(steps: Sequence[_Step]) -> Any:
    """One bar for all files, in bytes, which only a long load on a terminal shows."""
    from tqdm.auto import tqdm  # slow to import, and not needed by who only dispatches

    others = storage.process.current.get("local_process_index", 0) != 0
    return tqdm(
        total=sum(step.entry.value.nbytes for step in steps),
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        delay=PROGRESS_AFTER,
        leave=False,
        disable=others or None,  # None: where there is no terminal
    )


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: Mapping[str, Any] | None = None,
    offload_folder: PathLike | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Read a checkpoint into a model in place.

    Files are mapped into memory: weights in safetensors that belong on the CPU stay mapped and are copied nowhere, and
    those that belong on the disk are read where they are. Everything is checked before the model is changed.

    Not a collective, unless `broadcast_from_rank0` is set.

    Args:
        model: The model; its tensors may be on the meta device.
        checkpoint: A file with a state dict, the index of a sharded checkpoint, or a folder with either.
        device_map: Where each module's tensors go. None: into the tensors that the model has.
        offload_folder: Where the index goes of weights whose device is ``"disk"``, and the weights too that are not in safetensors.
        dtype: Dtype that floating-point weights are cast to; models of DTensors have to have it already.
        offload_state_dict: Whether host memory must not hold weights twice while files are read. It never does, so that either
            value does the same.
        offload_buffers: Write buffers of modules on disk to the disk too; else they stay on the CPU.
        keep_in_fp32_modules: Names of modules or tensors that are float32 whatever ``dtype`` says.
        offload_8bit_bnb: Quantise offloaded weights to 8 bit with bitsandbytes first.
        strict: Raise when names in the checkpoint and in the model differ, instead of warning.
        full_state_dict: For models of DTensors: the checkpoint holds full tensors, not this rank's shards.
        broadcast_from_rank0: For models of DTensors: rank 0 reads the files and sends the others their part; all ranks
            call.

    Raises:
        FileNotFoundError: A file of the checkpoint is missing.
        OSError: The disk is full; then the offload folder is as it was.
        RuntimeError: ``strict``, and names differ.
        ValueError: No such checkpoint; a file is truncated or does not fit the model; weights go to disk without
            ``offload_folder``; the map does not cover a tensor, or names a device that is not there.
    """
    if device_map is not None and "disk" in device_map.values() and offload_folder is None:
        raise ValueError("The device_map sends modules to the disk: give an `offload_folder` to put them in.")
    if device_map is not None:
        check_tied_parameters_on_same_device(find_tied_parameters(model), device_map)
    sharded = {"full_state_dict": full_state_dict, "broadcast_from_rank0": broadcast_from_rank0}
    options = {"keep_in_fp32_modules": keep_in_fp32_modules, "offload_8bit_bnb": offload_8bit_bnb, "strict": strict}
    load = CheckpointLoad(model, checkpoint, device_map, offload_folder, dtype, offload_buffers, **options, **sharded)
    load.run()
