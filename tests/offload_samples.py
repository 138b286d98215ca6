"""What tests of offloading share: checkpoints in each form, device maps cut at random, and the ways to offload a model."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import attach_align_device_hook_on_blocks, remove_hook_from_submodules
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
from accelerate.utils.modeling import get_state_dict_offloaded_model

VARIABLE = "ACCELERATE_OFFLOAD_PREFETCH"
# As that variable says them: what is set without it, off, on, and a budget below the smallest matrix.
PREFETCHES = (None, "0", "1", "100")
FORMS = ("file", "shards", "bin")
# From memory with a device map; the same from checkpoints, in the model's dtype and in a wider one; read in first and
# dispatched then; hooks on blocks, some of which stay in memory and some on disk.
MAPPED = ("memory", *FORMS, "cast", "steps", "blocks")
# Ways whose model had no weights of its own, to which it could go back when its hooks are taken off.
EMPTY = (*FORMS, "cast", "steps")
WHOLE = ("cpu_offload", "disk_offload")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return every tensor of a nested output."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in tensors_in(item))
    elif isinstance(value, (tuple, list)):
        yield from (tensor for item in value for tensor in tensors_in(item))


def same(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit that counts."""
    return mine.dtype == other.dtype and mine.shape == other.shape and torch.equal(mine, other)


def without_repeats(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict in which tied tensors have their first name only, as safetensors demands."""
    kept: dict[Any, str] = {}
    for name, tensor in state.items():
        kept.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else name, name)
    return {name: state[name].contiguous() for name in kept.values()}


def write_checkpoint(state: Mapping[str, torch.Tensor], folder: Path, form: str) -> Path:
    """Write a state dict as one safetensors file, as three with an index, or as a file of torch.save; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "bin":
        torch.save(dict(state), folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    unique = without_repeats(state)
    if form == "file":
        save_file(unique, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, weight_map = list(unique), {}
    for number in range(3):
        file, part = f"model-{number + 1:05}-of-00003.safetensors", names[number::3]
        if part:
            save_file({name: unique[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in unique.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def own_tensors(module: nn.Module) -> list[str]:
    """Return the names of the tensors that a module holds itself and that a checkpoint has."""
    buffers = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
    return [name for name in (*module._parameters, *buffers) if getattr(module, name) is not None]


def cut(
    choose: Callable[[Sequence[str]], str], model: nn.Module, places: Sequence[str] = ("cpu", "disk")
) -> dict[str, str]:
    """Return a device map: each module goes to one place in full, or its parts and tensors go to several.

    Args:
        choose: Picks one of several words, at random.
        model: The model.
        places: The devices to choose from.
    """
    placed: dict[str, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        prefix = f"{name}." if name else ""
        # Children by every name: a module used twice must have a place under both.
        children = {prefix + child: part for child, part in module._modules.items() if part is not None}
        tensors = [prefix + tensor for tensor in own_tensors(module)]
        divisible = len(children) + len(tensors) > 1
        choice = "split" if not name else choose([*places, "split"] if divisible else places)
        if choice != "split":
            placed[name] = choice
            return
        placed.update({tensor: choose(places) for tensor in tensors})
        for child, part in children.items():
            if next(iter(part.state_dict()), None) is not None:
                visit(part, child)

    visit(model, "")
    return placed


def nested_cut(choose: Callable[[Sequence[str]], str], model: nn.Module) -> dict[str, str]:
    """Return a device map in which entries have others above them, up to the root's, which stands for the rest."""
    placed = cut(choose, model)
    above = {".".join(name.split(".")[:depth]) for name in placed for depth in range(name.count(".") + 1)}
    chosen = {name: choose(["cpu", "disk"]) for name in sorted(above) if not name or choose(["in", "out"]) == "in"}
    return {**chosen, **{name: place for name, place in placed.items() if choose(["in", "out"]) == "in"}}


@contextmanager
def prefetching(value: str | None) -> Iterator[None]:
    """Set the variable that says how much is read ahead (None: it is not set), and have small weights read ahead too."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {} if value is None else {VARIABLE: value}))
        if value is None:
            os.environ.pop(VARIABLE, None)
        # The peer has no extensions, and an installation may be without this one.
        if all(map(importlib.util.find_spec, ("accelerate.extensions", "accelerate.extensions.big_models"))):
            reader = importlib.import_module("accelerate.extensions.big_models.prefetch")
            stack.enter_context(mock.patch.object(reader, "SMALLEST_ON_CPU", 0))
        yield


@contextmanager
def arrivals() -> Iterator[list[bool]]:
    """Note of each module that brings weights in whether they were read ahead."""
    reader = importlib.import_module("accelerate.extensions.big_models.prefetch").Prefetcher
    enter, noted = reader.enter, []

    def noting(self: Any, hook: Any) -> dict[str, torch.Tensor]:
        found = enter(self, hook)
        noted.append(bool(found))
        return found

    with mock.patch.object(reader, "enter", noting):
        yield noted


@dataclass(frozen=True)
class Sample:
    """A model to offload.

    Attributes:
        make: Returns the model with the same weights each time, in evaluation mode.
        batches: Dtype of the model -> keyword arguments of several forwards, of different lengths.
        generate: Keyword arguments of `generate`; None: the model has no such method.
    """

    make: Callable[[], nn.Module]
    batches: Callable[[torch.dtype], list[dict[str, Any]]]
    generate: dict[str, Any] | None = None


class Reference:
    """What a model gives when nothing is offloaded, and its checkpoints.

    Args:
        sample: The model.
        dtype: What its weights, buffers and inputs are cast to.
        folder: Where its checkpoints go.
    """

    def __init__(self, sample: Sample, dtype: torch.dtype, folder: Path) -> None:
        self.sample, self.dtype = sample, dtype
        self.batches = sample.batches(dtype)
        model = self.make()
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.results = self.run(model)
        self.checkpoints = {form: write_checkpoint(model.state_dict(), folder / form, form) for form in FORMS}
        self.checkpoints["cast"] = write_checkpoint(self._wider(), folder / "cast", "shards")
        self.number, self.folder = 0, folder

    def make(self, empty: bool = False) -> nn.Module:
        """Return the model again; ``empty``: with its parameters on the meta device, tied again."""
        with init_empty_weights() if empty else nullcontext():
            model = self.sample.make().to(self.dtype)
        if empty and hasattr(model, "tie_weights"):
            model.tie_weights()
        return model

    def _wider(self) -> dict[str, torch.Tensor]:
        """The weights before they were cast to the model's dtype."""
        wider = torch.float32 if self.dtype.itemsize < 4 else torch.float64
        return self.sample.make().to(wider).state_dict()

    def run(self, model: nn.Module) -> list[torch.Tensor]:
        """Run every forward and `generate`; return all tensors that come out."""
        with torch.no_grad():
            results = [tensor for batch in self.batches for tensor in tensors_in(model(**batch))]
            if self.sample.generate is not None:
                results.append(model.generate(**self.sample.generate))
        return results

    def new_folder(self) -> Path:
        """Return a folder that nothing has used."""
        self.number += 1
        return self.folder / f"offload{self.number}"

    def offloaded(self, way: str, device_map: dict[str, Any], **options: Any) -> nn.Module:
        """Return the model, offloaded in one of the ways `MAPPED` and `WHOLE`; the latter use no device map."""
        folder = self.new_folder()
        if way in (*FORMS, "cast"):
            options = {**options, "dtype": self.dtype} if way == "cast" else options
            model, checkpoint = self.make(empty=True), self.checkpoints[way]
            return load_checkpoint_and_dispatch(
                model, checkpoint, device_map=device_map, offload_folder=folder, **options
            )
        if way == "steps":
            model = self.make(empty=True)
            load_checkpoint_in_model(model, self.checkpoints["shards"], device_map, offload_folder=folder)
            return dispatch_model(model, device_map, offload_dir=folder, **options)
        model = self.make()
        if way == "memory":
            return dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, **options)
        if way == "cpu_offload":
            return cpu_offload(model, execution_device="cpu", **options)
        if way == "disk_offload":
            return disk_offload(model, folder, execution_device="cpu", **options)
        return self._on_blocks(model, device_map, folder, **options)

    def _on_blocks(self, model: nn.Module, device_map: dict[str, Any], folder: Path, **options: Any) -> nn.Module:
        """Hook the blocks manually, as dispatch does where there is an accelerator: "memory" stays, "cpu" and "disk" do not."""

        def kept(place: str) -> dict[str, torch.Tensor]:
            blocks = [name for name, where in device_map.items() if where == place]
            below = tuple(f"{block}." if block else "" for block in blocks)
            return {name: tensor for name, tensor in model.state_dict().items() if f"{name}.".startswith(below)}

        offload_state_dict(folder, kept("disk"))
        index = None if (folder / "index.json").is_file() else {}
        weights = OffloadedWeightsLoader(state_dict=kept("cpu"), save_folder=folder, index=index)
        devices = {"": "cpu", **dict.fromkeys(device_map, "cpu")}
        offload = {name: place != "memory" for name, place in device_map.items()}
        attach_align_device_hook_on_blocks(
            model, execution_device=devices, offload=offload, weights_map=weights, **options
        )
        return model

    def check(self, model: nn.Module, what: object = "") -> None:
        """Require an offloaded model to give the same tensors, and to have the same state dict."""
        self.compare(self.run(model), what)
        state = get_state_dict_offloaded_model(model)
        assert state.keys() == self.state.keys(), (what, sorted(state.keys() ^ self.state.keys()))
        different = [name for name, tensor in state.items() if not same(tensor, self.state[name])]
        assert not different, (what, "state dict", different)

    def check_removal(self, model: nn.Module, what: object = "") -> None:
        """Take the hooks off a model that had its weights in memory; require it to be as it was."""
        remove_hook_from_submodules(model)
        hooked = [
            name for name, module in model.named_modules() if {"_hf_hook", "_old_forward"} & module.__dict__.keys()
        ]
        assert not hooked, (what, "hooks are left", hooked)
        empty = [name for name, tensor in model.state_dict().items() if tensor.device.type == "meta"]
        assert not empty, (what, "without data", empty)
        self.compare(self.run(model), what)
        different = [name for name, tensor in model.state_dict().items() if not same(tensor, self.state[name])]
        assert not different, (what, "state dict", different)

    def compare(self, results: list[torch.Tensor], what: object) -> None:
        """Require the tensors of another `run` to be those of the whole model."""
        assert len(results) == len(self.results), (what, len(results), len(self.results))
        different = [i for i, (m, o) in enumerate(zip(results, self.results, strict=True)) if not same(m, o)]
        assert not different, (what, "outputs", different, "of", len(results))
