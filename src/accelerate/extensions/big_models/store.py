"""Offloaded weights by name, wherever they are kept: in memory, in a folder that has a file of raw bytes for each
next to an ``index.json``, or in existing safetensors files. Folders are filled all at once or not at all.

A weight is a view of its file, and costs no extra memory. The kernel reads a page when it is first used, keeps it
while there is room, and drops it when there is none, because the file still has it. Nothing has to be copied to be
offloaded.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from accelerate.extensions.big_models.placement import scales_name
from accelerate.extensions.big_models.tensors import entry_of, listed
from accelerate.runtime.durable import STAGING_PREFIX

INDEX_NAME = "index.json"
PathLike = str | os.PathLike

_FOREIGN_FORMATS = ("tf", "flax", "np", "mlx")


class WeightFile:
    """A file of weights, opened once: safetensors, or of `torch.save` with tensors in plain containers alone.

    What is read stays valid while the file is replaced, but not when it is rewritten. ``in_place``: weights can be
    read from it whenever they are needed. FileNotFoundError, OSError (unknown format) or ValueError (truncated, or not
    what its name says).
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.path.abspath(path)  # wherever the process goes later
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"The file of weights {self.path} does not exist.")
        self.in_place = self.path.endswith(".safetensors")
        try:
            content = safe_open(self.path, framework="pt") if self.in_place else _load_torch(self.path)
        except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
            kind = "safetensors file" if self.in_place else "state dict of torch.save"
            raise ValueError(
                f"{self.path} ({os.path.getsize(self.path):,} bytes) is truncated or no {kind}: "
                f"{str(error).partition(chr(10))[0]}. Copy or download it again."
            ) from error
        if self.in_place:
            check_format(self.path, content.metadata())
        self._read = content.get_tensor if self.in_place else content.__getitem__
        self.keys = dict.fromkeys(content.keys())  # in order, and looked up quickly

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor, a view of the file where that can be mapped, never writing to it; KeyError names it."""
        if key not in self.keys:
            raise KeyError(f"{self.path} has no tensor {key!r}; it has {listed(map(repr, self.keys), 5)}.")
        return self._read(key)


def check_format(path: str, metadata: Mapping[str, str] | None) -> None:
    """Refuse a safetensors file by its metadata: ValueError for another framework's, OSError for an unknown format."""
    written_for = (metadata or {}).get("format", "pt")
    if written_for in _FOREIGN_FORMATS:
        raise ValueError(f"{path} was written for {written_for!r}; a model of PyTorch needs a file of format 'pt'.")
    if written_for != "pt":
        raise OSError(
            f"The metadata of {path} names the format {written_for!r}, which is unknown. Save it with "
            "save_file(..., metadata={'format': 'pt'})."
        )


def _load_torch(path: str) -> dict[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        if "mmap can only be used" not in str(error):
            raise
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds a {type(loaded).__name__}")
    return dict(loaded)


def tensor_bytes(weight: torch.Tensor) -> memoryview:
    """Return the elements of a tensor with data as bytes, row-major, in the machine's byte order."""
    # reshape before view: a scalar has no last dimension to reinterpret.
    return memoryview(weight.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())


def read_index(folder: PathLike) -> dict[str, dict[str, Any]]:
    """Return the index of an offload folder, empty where there is none; ValueError: the file is no index."""
    path = Path(folder) / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text("utf-8"))
        if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
            raise ValueError("it does not map names to entries")
    except ValueError as error:
        raise ValueError(
            f"{path} is no index of offloaded weights ({error}). Delete the folder and offload again."
        ) from error
    return index


def weight_path(folder: PathLike, name: str) -> str:
    """Return a weight's file in an offload folder, never outside of it; ValueError: no file can have the name."""
    file = f"{name}.dat"
    if os.path.basename(file) != file or "\0" in file:
        raise ValueError(
            f"The weight {name!r} cannot be a file in {os.fspath(folder)}, because of a character in its name. Rename the module, "
            "or leave it on the CPU; checkpoints in safetensors are read in place, whatever their names are."
        )
    return os.path.join(folder, file)


class _Publications:
    """Counts what this process has published, so that a loader that has files mapped knows when they may have been replaced."""

    count = 0


class OffloadWriter(contextlib.AbstractContextManager):
    """Writes weights aside in a folder; leaving the ``with`` block publishes them, and with `indexed` their index.

    If the block raises, or a disk is full, what was written is removed and the files that were there stay. Where a file
    cannot take its name, which needs no room on the disk, the former index stays. A process that has mapped a file that is
    replaced continues reading the former one. Callers may add entries of weights in separate files to ``index``.
    """

    def __init__(self, folder: PathLike | None, indexed: bool = True) -> None:
        self.folder = Path(folder or "")
        self.index: dict[str, dict[str, Any]] = {}
        self._indexed = indexed and folder is not None
        self._aside: Path | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None and self.index and self._indexed:
                entries = {**read_index(self.folder), **self.index}
                self._write(INDEX_NAME, json.dumps(entries, indent=2).encode("utf-8"))
            if kind is None and self._aside is not None:
                self._publish(self._aside)
        finally:
            if self._aside is not None:
                shutil.rmtree(self._aside, ignore_errors=True)

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Write a weight aside for ``<name>.dat``; OSError: a full disk; ValueError: no data, or no file's name."""
        if weight.device.type == "meta":
            raise ValueError(f"The weight {name!r} is on the meta device and has no data to offload.")
        path = weight_path(self.folder, name)
        self._write(os.path.basename(path), tensor_bytes(weight))
        self.index[name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}

    def _publish(self, aside: Path) -> None:
        """Give every file its name, the index last, so that it names nothing that is not there."""
        _Publications.count += 1
        for file in sorted(aside.iterdir(), key=lambda path: path.name == INDEX_NAME):
            os.replace(file, self.folder / file.name)

    def _write(self, file: str, data: memoryview | bytes) -> None:
        try:
            if self._aside is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                # Several processes may write to one folder.
                self._aside = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.folder))
            (self._aside / file).write_bytes(data)
        except OSError as error:
            raise type(error)(
                error.errno or errno.EIO,
                f"Offloading {file} ({len(data):,} bytes) to {self.folder} failed: {error.strerror or error}. Nothing of it "
                "was kept; use a folder that can be written, on a larger disk",
            ) from error


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: PathLike, index: dict[str, dict] | None = None
) -> dict[str, dict] | None:
    """Write a tensor to ``<offload_folder>/<weight_name>.dat`` as raw bytes, row-major, in the machine's byte order.

    Args:
        weight: The tensor; any dtype that torch has.
        weight_name: Name of the tensor, used as file name.
        offload_folder: Where the file goes; made if it does not exist.
        index: Receives the entry ``{"dtype", "shape"}``, which `load_offloaded_weight` needs.

    Returns:
        The index that was given.

    Raises:
        OSError: The disk is full; nothing is left behind.
        ValueError: The tensor is on the meta device, so that there is nothing to write.

    Example:
        >>> import tempfile
        >>> from accelerate.utils import load_offloaded_weight, offload_weight
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     index = offload_weight(torch.ones(2), "weight", folder, index={})
        ...     load_offloaded_weight(f"{folder}/weight.dat", index["weight"])
        tensor([1., 1.])
    """
    with OffloadWriter(offload_folder, indexed=False) as writer:
        writer.add(weight_name, weight)
    if index is not None:
        index.update(writer.index)
    return index


def load_offloaded_weight(weight_file: PathLike, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor that `offload_weight` wrote, mapped into memory: bytes are read when they are used.

    Args:
        weight_file: The ``.dat`` file.
        weight_info: Its index entry, with ``dtype`` (a name) and ``shape``.

    Returns:
        A tensor on the CPU. Writing to it does not change the file.

    Raises:
        FileNotFoundError: The file is not there.
        ValueError: The file has another size than the entry says.
    """
    dtype, shape = getattr(torch, weight_info["dtype"]), tuple(weight_info["shape"])
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    path = os.fspath(weight_file)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"The offloaded weight {path} is gone; was its folder temporary?")
    expected, found = count * dtype.itemsize, os.path.getsize(path)
    if expected != found:
        raise ValueError(
            f"The offloaded weight {path} has {found:,} bytes, but {weight_info['dtype']} of shape {weight_info['shape']} takes "
            f"{expected:,}. Offload the model again."
        )
    return torch.from_file(path, shared=False, size=count, dtype=dtype).reshape(shape)


def save_offload_index(index: Mapping[str, dict] | None, offload_folder: PathLike) -> None:
    """Merge entries into ``<offload_folder>/index.json``; new ones replace old ones of the same name.

    Args:
        index: Tensor name to entry. None or empty: nothing is written.
        offload_folder: The folder.
    """
    with OffloadWriter(offload_folder) as writer:
        writer.index.update(index or {})


def offload_state_dict(save_dir: PathLike, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of a state dict into a folder, for `OffloadedWeightsLoader`.

    Args:
        save_dir: The folder; made if it does not exist.
        state_dict: Names and tensors.

    Raises:
        OSError: The disk is full; then nothing is left behind.
        ValueError: A tensor is on the meta device.

    Example:
        >>> import tempfile
        >>> from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     offload_state_dict(folder, {"weight": torch.ones(2)})
        ...     OffloadedWeightsLoader(save_folder=folder)["weight"]
        tensor([1., 1.])
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

    def full_name(self, key: str) -> str:
        """Return the name that a key has in the dataset, whether it is what follows the prefix or the whole name."""
        full = self.prefix + key
        return key if key.startswith(self.prefix) and full not in self.dataset else full

    def __getitem__(self, key: str) -> Any:
        return self.dataset[self.full_name(key)]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.full_name(key) in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping):
    """Weights by name, from memory where they are there, else mapped in place from offload or safetensors files.

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
        save_folder: PathLike | None = None,
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
        # What is open, by path, and what was mapped, by name: the entry that said where, the count of publications then, the view.
        self._files: dict[str, WeightFile] = {}
        self._views: dict[str, tuple[Mapping[str, Any], int, torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}, "_views": {}}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        tensor, entry = self.stored(key), self.index[key]
        if self.device is not None and entry.get("safetensors_file") is not None:
            tensor = tensor.to(self.device)
        dtype = entry.get("dtype")
        return tensor if dtype is None or tensor.dtype is getattr(torch, dtype) else tensor.to(getattr(torch, dtype))

    def stored(self, key: str) -> torch.Tensor:
        """Return a weight as it is kept, the same tensor until this process writes files or the entry is replaced."""
        if key in self.state_dict:
            return self.state_dict[key]
        info, count = self.index[key], _Publications.count
        known = self._views.get(key)
        if known is None or known[0] is not info or known[1] != count:
            # What is mapped in inference mode could not be used outside of it.
            with torch.inference_mode(False):
                known = self._views[key] = (info, count, self._map(key, info))
        return known[2]

    def _map(self, key: str, info: Mapping[str, Any]) -> torch.Tensor:
        path = info.get("safetensors_file")
        if path is not None:
            if path not in self._files:
                self._files[path] = WeightFile(path)
            return self._files[path].tensor(info.get("weight_name", key))
        if self.save_folder is None:
            raise ValueError(
                f"The index says that {key!r} is in a .dat file, but there is no `save_folder` to find it in."
            )
        # A tied weight has the file of the name that was written.
        return load_offloaded_weight(weight_path(self.save_folder, info.get("dat_name", key)), info)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class WeightSource:
    """Weights by their names below a module, from whatever mapping a hook has as ``weights_map``; of none it has none."""

    def __init__(self, weights_map: Mapping | None) -> None:
        self.weights_map = weights_map
        self._weights: Mapping = {} if weights_map is None else weights_map
        self._prefix = ""
        while isinstance(self._weights, PrefixedDataset):
            self._prefix, self._weights = self._weights.prefix + self._prefix, self._weights.dataset

    def get(self, name: str) -> torch.Tensor | None:
        """Return a weight with the dtype that it has in the model, or None."""
        key = self._prefix + name
        try:  # hooks ask for each weight at each forward
            return self._weights[key]
        except KeyError:
            if key in self._weights:
                raise  # its file lacks it
            return None

    def raw(self, name: str) -> torch.Tensor:
        """Return a weight as it is kept, not cast to another dtype: what is in memory, or a view of its file."""
        key = self._prefix + name
        return self._weights.stored(key) if isinstance(self._weights, OffloadedWeightsLoader) else self._weights[key]

    def scales(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        """Return the scales next to a value of a weight, which it has as an 8-bit weight of bitsandbytes."""
        return self.get(scales_name(name)) if value is not None and value.dtype is torch.int8 else None

    def in_file(self, name: str) -> bool:
        """Return whether a weight is read from a file."""
        return (
            isinstance(self._weights, OffloadedWeightsLoader) and self._prefix + name not in self._weights.state_dict
        )


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a state dict that belong to some submodules, with their full names.

    Args:
        state_dict: Names and tensors of a whole model.
        submodule_names: Names of modules or tensors; ``""`` is everything.

    Example:
        >>> extract_submodules_state_dict({"a.w": 1, "ab.w": 2}, ["a"])
        {'a.w': 1}
    """
    wanted = set(submodule_names)
    return {name: state_dict[name] for name in state_dict if entry_of(name, wanted) is not None}
