"""Weights kept in files: one file of raw bytes per tensor beside an ``index.json``, or an existing safetensors file."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from accelerate.offload.mapped import SafetensorsFile
from accelerate.offload.writer import (
    INDEX_NAME,
    Folder,
    OffloadWriter,
    checksum,
    publications,
    read_index,
    tensor_bytes,
    weight_path,
    write_index,
)


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Folder, index: dict[str, dict] | None = None
) -> dict[str, dict] | None:
    """Write a tensor to ``<offload_folder>/<weight_name>.dat`` as raw bytes, row-major, in the machine's byte order.

    Args:
        weight: The tensor; any dtype that torch has.
        weight_name: Name of the tensor, used as file name.
        offload_folder: Where the file goes; made if it does not exist.
        index: Receives the entry ``{"dtype", "shape", "xxh3"}``; `load_offloaded_weight` needs the first two, and verifies the
            third.

    Returns:
        The index that was given.

    Raises:
        OSError: The disk is full; nothing is left behind.
        ValueError: The tensor is on the meta device, so that there is nothing to write.
    """
    writer = OffloadWriter(offload_folder)
    with writer.without_index():
        writer.add(weight_name, weight)
    if index is not None:
        index.update(writer.index)
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor that `offload_weight` wrote, mapped into memory: bytes are read when they are used.

    Args:
        weight_file: The ``.dat`` file.
        weight_info: Its index entry, with ``dtype`` (a name) and ``shape``; with ``xxh3`` the bytes are read and verified.

    Returns:
        A tensor on the CPU. Writing to it does not change the file.

    Raises:
        FileNotFoundError: The file is not there.
        ValueError: The file has another size or another checksum than the entry says.
    """
    dtype, shape = getattr(torch, weight_info["dtype"]), tuple(weight_info["shape"])
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    check_size(weight_file, weight_info)
    path = os.fspath(weight_file)
    tensor = torch.from_file(path, shared=False, size=count, dtype=dtype).reshape(shape)
    if "xxh3" in weight_info and checksum(tensor_bytes(tensor)) != weight_info["xxh3"]:
        raise ValueError(f"The offloaded weight {path} is damaged: its checksum differs. Offload the model again.")
    return tensor


def check_size(weight_file: Folder, weight_info: Mapping[str, Any]) -> None:
    """Check that a ``.dat`` file is there and as long as its index entry says.

    Args:
        weight_file: The file.
        weight_info: Its entry.

    Raises:
        FileNotFoundError: It is not there.
        ValueError: It has another size.
    """
    path = os.fspath(weight_file)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"The offloaded weight {path} is gone; was its folder temporary?")
    expected = torch.Size(weight_info["shape"]).numel() * getattr(torch, weight_info["dtype"]).itemsize
    found = os.path.getsize(path)
    if expected != found:
        raise ValueError(
            f"The offloaded weight {path} has {found:,} bytes, but {weight_info['dtype']} of shape {weight_info['shape']} takes "
            f"{expected:,}. Offload the model again."
        )


def save_offload_index(index: Mapping[str, dict] | None, offload_folder: Folder) -> None:
    """Merge entries into ``<offload_folder>/index.json``; new ones replace old ones of the same name.

    Args:
        index: Tensor name to entry. None or empty: nothing is written.
        offload_folder: The folder.
    """
    if index:
        write_index(index, offload_folder)


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of a state dict into a folder, for `OffloadedWeightsLoader`.

    Args:
        save_dir: The folder; made if it does not exist.
        state_dict: Names and tensors.

    Raises:
        OSError: The disk is full; then nothing is left behind.
        ValueError: A tensor is on the meta device.
    """
    with OffloadWriter(save_dir) as writer:
        for name, tensor in state_dict.items():
            writer.add(name, tensor)


class PrefixedDataset(Mapping):
    """The part of a mapping below a prefix, read by what follows the prefix. Nothing is copied.

    Iteration gives the full names, which can be looked up too.

    Args:
        dataset: The mapping to read.
        prefix: What all keys of the part begin with, such as ``"layers.0."``.

    Example:
        >>> PrefixedDataset({"a.weight": 1, "b.weight": 2}, "b.")["weight"]
        2
    """

    __module__ = "accelerate.utils.offload"  # the path in pickles

    def __init__(self, dataset: Mapping, prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        try:
            return self.dataset[self.prefix + key]
        except KeyError:
            if not key.startswith(self.prefix):
                raise
            return self.dataset[key]

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        return self.prefix + key in self.dataset or (key.startswith(self.prefix) and key in self.dataset)

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


# Attributes of a loader that copies and pickles leave out.
_OF_THIS_RUN = ("_files", "_views", "_stamps", "_looked")


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class OffloadedWeightsLoader(Mapping):
    """Weights by name, from memory where they are there, else from offload or safetensors files, which are mapped in place.

    Args:
        state_dict: Weights in memory; they win over files.
        save_folder: A folder that `offload_state_dict` filled; its ``index.json`` is read if no index is given.
        index: Name to ``{"dtype", "shape"}`` (a ``.dat`` file in ``save_folder``) or to ``{"safetensors_file",
            "weight_name", "dtype"}``, of which the last two may be missing. A dtype that differs from the file's is cast to
            at each look-up.
        device: Where weights of safetensors files are read to. None: the CPU, as views of the file.

    Raises:
        ValueError: None of the first three is given.
    """

    __module__ = "accelerate.utils.offload"  # the path in pickles

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, dict] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("Give a `state_dict`, a `save_folder` or an `index` to load offloaded weights from.")
        self.state_dict = {} if state_dict is None else state_dict
        if index is None and save_folder is not None:
            if not (Path(save_folder) / INDEX_NAME).is_file():
                raise FileNotFoundError(
                    f"save_folder={os.fspath(save_folder)!r} holds no {INDEX_NAME} of offloaded weights."
                )
            index = read_index(save_folder)
        self.index = {} if index is None else dict(index)
        self.save_folder = save_folder
        self.all_keys = [*self.state_dict, *(key for key in self.index if key not in self.state_dict)]
        self.device = device
        self._open()

    def _open(self) -> None:
        # What is open and what was mapped, by path and by name. An entry that somebody replaces is mapped anew.
        self._files: dict[str, SafetensorsFile] = {}
        self._views: dict[str, tuple[Mapping[str, Any], torch.Tensor, SafetensorsFile | None]] = {}
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._looked = publications.count
        # Where a relative folder lies, wherever the process goes later.
        self._base = "" if self.save_folder is None or os.path.isabs(self.save_folder) else os.getcwd()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_RUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if self.device is not None and info.get("safetensors_file") is not None:
            return self._on_device(key, info)
        tensor = self._view(key, info)
        dtype = info.get("dtype")
        wanted = tensor.dtype if dtype is None else getattr(torch, dtype)
        return tensor if tensor.dtype is wanted else tensor.to(wanted)

    def _view(self, key: str, info: Mapping[str, Any]) -> torch.Tensor:
        known = self._views.get(key)
        if known is not None and known[0] is info:
            if self._looked == publications.count:
                if known[2] is not None:
                    known[2].check()
                return known[1]
            self._look_for_replaced()
            return self._view(key, self.index[key])
        # What is mapped in inference mode could not be used outside of it.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            file, tensor = self._map(key, info)
        self._views[key] = (info, tensor, file)
        return tensor

    def _map(self, key: str, info: Mapping[str, Any]) -> tuple[SafetensorsFile | None, torch.Tensor]:
        path = info.get("safetensors_file")
        if path is not None:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = SafetensorsFile(path)
            file.check()
            return file, file.tensor(info.get("weight_name", key))
        path = self._dat_file(key, info)
        tensor = load_offloaded_weight(path, info)
        self._stamps[key] = _stamp(path)
        return None, tensor

    def _look_for_replaced(self) -> None:
        """Let go of weights whose ``.dat`` file somebody in this process has written anew."""
        now = publications.count
        # A thread that reads ahead may be at it too, and add to what is known.
        known = list(self._stamps.items())
        replaced = [key for key, seen in known if seen != _stamp(self._dat_file(key, self.index[key]))]
        entries = read_index(os.path.join(self._base, self.save_folder)) if replaced else {}
        for key in replaced:
            self._stamps.pop(key, None)
            self._views.pop(key, None)
            name = self.index[key].get("dat_name", key)
            if name in entries:
                own = {"dat_name": name} if name != key else {}
                self.index[key] = {**own, **entries[name]}
        self._looked = now

    def _dat_file(self, key: str, info: Mapping[str, Any]) -> str:
        if self.save_folder is None:
            raise ValueError(
                f"The index says that {key!r} is in a .dat file, but there is no `save_folder` to find it in."
            )
        # A tied weight has the file of the name that was written.
        return weight_path(os.path.join(self._base, self.save_folder), info.get("dat_name", key))

    def stored_shape(self, key: str) -> Sequence[int]:
        """Return the shape of a weight in a file, once the file is known to have it. The weight is not read.

        Args:
            key: Its name.

        Raises:
            FileNotFoundError: The file is not there.
            KeyError: The file does not have it.
            ValueError: The file is truncated, or there is no folder to find it in.
        """
        info = self.index[key]
        if info.get("safetensors_file") is not None:
            return self._view(key, info).shape
        check_size(self._dat_file(key, info), info)
        return info["shape"]

    def _on_device(self, key: str, info: Mapping[str, Any]) -> torch.Tensor:
        device = str(self.device) if isinstance(self.device, torch.device) else self.device
        with safe_open(info["safetensors_file"], framework="pt", device=device) as file:
            tensor = file.get_tensor(info.get("weight_name", key))
        return tensor.to(getattr(torch, info["dtype"])) if "dtype" in info else tensor

    def stored_at(self, key: str) -> "Stored":
        """Say how a weight is kept.

        Args:
            key: Its name.

        Raises:
            KeyError: It is not there.
        """
        if key in self.state_dict:
            tensor = self.state_dict[key]
            return Stored(lambda: tensor, tensor.dtype, None, in_file=False)
        info = self.index[key]
        cast = getattr(torch, info["dtype"]) if "dtype" in info else None
        # A .dat file is not opened for this: its checksum would be verified, which reads all of it.
        dtype = self._view(key, info).dtype if info.get("safetensors_file") is not None else cast
        return Stored(lambda: self._view(key, info), dtype, cast, in_file=True)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


@dataclass(frozen=True)
class Stored:
    """How an offloaded weight is kept.

    Attributes:
        tensor: Returns it, as it is kept, on the CPU.
        dtype: The dtype in which it is kept.
        cast: The dtype that its index says it is cast to; None where it says nothing.
        in_file: Whether it is in a file.
    """

    tensor: Callable[[], torch.Tensor]
    dtype: torch.dtype
    cast: torch.dtype | None
    in_file: bool


def stored_at(weights: Mapping, name: str) -> Stored:
    """Say how a weight of a hook's ``weights_map`` is kept.

    Args:
        weights: The mapping: a plain one, an `OffloadedWeightsLoader`, or a `PrefixedDataset` of either.
        name: The weight's name in it.

    Raises:
        KeyError: It is not there.
    """
    while isinstance(weights, PrefixedDataset):
        full = weights.prefix + name
        name = full if full in weights.dataset or not name.startswith(weights.prefix) else name
        weights = weights.dataset
    if isinstance(weights, OffloadedWeightsLoader):
        return weights.stored_at(name)
    tensor = weights[name]
    return Stored(lambda: tensor, tensor.dtype, None, in_file=False)


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a state dict that belong to some submodules, with their full names.

    Args:
        state_dict: Names and tensors of a whole model.
        submodule_names: Names of modules or tensors; ``""`` is everything.

    Example:
        >>> extract_submodules_state_dict({"a.w": 1, "ab.w": 2}, ["a"])
        {'a.w': 1}
    """
    wanted: dict[str, list[str]] = {name: [] for name in submodule_names}
    if "" in wanted:
        return dict(state_dict)
    for key in state_dict:
        part = key
        while part:
            if part in wanted:
                wanted[part].append(key)
            part = part.rpartition(".")[0]
    return {key: state_dict[key] for keys in wanted.values() for key in keys}
