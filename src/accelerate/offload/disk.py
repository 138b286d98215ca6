"""Weights kept in files: one file of raw bytes per tensor beside an ``index.json``, or an existing safetensors file."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

INDEX_NAME = "index.json"
Folder = str | os.PathLike


def _write_bytes(path: Path, write: Any) -> None:
    """Replace a file in one step: a model that has the old one mapped into memory must not see it change."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Folder, index: dict[str, dict] | None = None
) -> dict[str, dict] | None:
    """Write a tensor to ``<offload_folder>/<weight_name>.dat`` as raw bytes, row-major, in the machine's byte order.

    Args:
        weight: The tensor; any dtype that torch has.
        weight_name: Name of the tensor, used as file name.
        offload_folder: Where the file goes; made if it does not exist.
        index: Receives the entry ``{"dtype", "shape"}`` that `load_offloaded_weight` needs.

    Returns:
        The index that was given.

    Raises:
        ValueError: The tensor is on the meta device, so that there is nothing to write.
    """
    if weight.device.type == "meta":
        raise ValueError(f"The weight {weight_name!r} is on the meta device and has no data to offload.")
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    # reshape before view: a scalar has no last dimension to reinterpret.
    raw = weight.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    _write_bytes(folder / f"{weight_name}.dat", raw.tofile)
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor that `offload_weight` wrote, mapped into memory: bytes are read when they are used.

    Args:
        weight_file: The ``.dat`` file.
        weight_info: Its index entry, with ``dtype`` (a name) and ``shape``.

    Returns:
        A tensor on the CPU. Writing to it does not change the file.

    Raises:
        FileNotFoundError: The file is not there.
    """
    dtype = getattr(torch, weight_info["dtype"])
    shape = tuple(weight_info["shape"])
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if not os.path.isfile(weight_file):
        raise FileNotFoundError(f"The offloaded weight {os.fspath(weight_file)} is gone; was its folder temporary?")
    return torch.from_file(os.fspath(weight_file), shared=False, size=count, dtype=dtype).reshape(shape)


def save_offload_index(index: Mapping[str, dict] | None, offload_folder: Folder) -> None:
    """Merge entries into ``<offload_folder>/index.json``; new ones replace old ones of the same name.

    Args:
        index: Tensor name to entry. None or empty: nothing is written.
        offload_folder: The folder, which exists.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    text = json.dumps({**known, **index}, indent=2)
    _write_bytes(path, lambda file: file.write(text.encode("utf-8")))


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of a state dict into a folder, for `OffloadedWeightsLoader`.

    Args:
        save_dir: The folder; made if it does not exist.
        state_dict: Names and tensors.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, dict] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index=index)
    save_offload_index(index, save_dir)


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

    def _full(self, key: str) -> str:
        full = f"{self.prefix}{key}"
        return key if full not in self.dataset and key.startswith(self.prefix) else full

    def __getitem__(self, key: str) -> Any:
        return self.dataset[self._full(key)]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._full(key) in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping):
    """Weights by name, from memory where they are there, else from offload or safetensors files.

    Args:
        state_dict: Weights in memory; they win over files.
        save_folder: A folder that `offload_state_dict` filled; its ``index.json`` is read if no index is given.
        index: Name to ``{"dtype", "shape"}`` (a ``.dat`` file in ``save_folder``) or to ``{"safetensors_file",
            "weight_name", "dtype"}``, of which the last two may be missing.
        device: Where weights of safetensors files are read to. None: the CPU.

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
            path = Path(save_folder) / INDEX_NAME
            if not path.is_file():
                raise FileNotFoundError(
                    f"save_folder={os.fspath(save_folder)!r} holds no {INDEX_NAME} of offloaded weights."
                )
            index = json.loads(path.read_text("utf-8"))
        self.index = {} if index is None else dict(index)
        self.save_folder = save_folder
        self.all_keys = [*self.state_dict, *(key for key in self.index if key not in self.state_dict)]
        self.device = device

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if info.get("safetensors_file") is not None:
            device = "cpu" if self.device is None else self.device
            device = str(device) if isinstance(device, torch.device) else device
            with safe_open(info["safetensors_file"], framework="pt", device=device) as file:
                tensor = file.get_tensor(info.get("weight_name", key))
            return tensor.to(getattr(torch, info["dtype"])) if "dtype" in info else tensor
        if self.save_folder is None:
            raise ValueError(
                f"The index says that {key!r} is in a .dat file, but there is no `save_folder` to find it in."
            )
        return load_offloaded_weight(Path(self.save_folder) / f"{key}.dat", info)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a state dict that belong to some submodules, with their full names.

    Args:
        state_dict: Names and tensors of a whole model.
        submodule_names: Names of modules or tensors; ``""`` is everything.

    Example:
        >>> extract_submodules_state_dict({"a.w": 1, "ab.w": 2}, ["a"])
        {'a.w': 1}
    """
    if "" in submodule_names:
        return dict(state_dict)
    return {
        key: value
        for name in submodule_names
        for key, value in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }
