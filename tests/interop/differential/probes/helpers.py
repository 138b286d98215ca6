"""Helpers of utils.other: names, ports, saving."""

import os
import pathlib
from collections import OrderedDict

import torch
from torch import nn

from accelerate import PartialState
from accelerate.utils import other
from interop.differential.core import attempt, probe

OBJECTS = {
    "dict": lambda: {"a": torch.ones(2), "b": torch.zeros(1, dtype=torch.int64)}, "empty": dict,
    "tensor": lambda: torch.ones(2), "list": lambda: [torch.ones(2)], "number": lambda: 3,
    "nested": lambda: {"a": {"b": torch.ones(1)}}, "None": lambda: None,
    "not contiguous": lambda: {"a": torch.ones(2, 3).T},
    "ordered": lambda: OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
    "bfloat16": lambda: {"a": torch.ones(2, dtype=torch.bfloat16)},
    "meta": lambda: {"a": torch.ones(2, device="meta")}, "numbers inside": lambda: {"a": 1, "b": torch.ones(1)},
    "text": lambda: "text", "parameter": lambda: {"a": nn.Parameter(torch.ones(2))},
    "number keys": lambda: {1: torch.ones(1)},
    "slices": lambda: dict(zip("ab", torch.arange(4.0).split(2), strict=True)),
    "tied": lambda: dict.fromkeys("ba", torch.arange(2.0)),
}  # fmt: skip
PLACES = {
    "text": lambda: "file.bin", "path": lambda: pathlib.Path("file.bin"), "new folder": lambda: "no/file.bin",
    "folder": lambda: ".",
}  # fmt: skip


@probe("utils.other:save", "utils.other:load", obj=OBJECTS, safe_serialization=[False, True], place=PLACES)
def save(obj, safe_serialization, place):
    from safetensors.torch import load_file

    PartialState(cpu=True)
    yield "returned", attempt(lambda: other.save(obj, place, safe_serialization=safe_serialization))
    yield "files", sorted(os.listdir("."))
    if os.path.isfile(place):
        read = load_file if safe_serialization else other.load
        yield "content", read(place)
        if safe_serialization:
            from safetensors import safe_open

            with safe_open(place, "pt") as file:
                yield "metadata", file.metadata().get("format")


@probe("utils.other:save", processes=2, save_on_each_node=[False, True], safe_serialization=[False, True])
def save_on(save_on_each_node, safe_serialization):
    PartialState(cpu=True)
    other.save({"a": torch.ones(1)}, "file.bin", save_on_each_node, safe_serialization)
    return os.listdir(".")


STATE_DICTS = {
    "plain": lambda: {"a": torch.ones(2), "b": torch.zeros(2)}, "tied": lambda: dict.fromkeys("ba", torch.ones(2)),
    "tied thrice": lambda: dict.fromkeys("cab", torch.ones(2)), "transposed": lambda: {"a": torch.ones(2, 3).T},
    "slices": lambda: dict(zip("ab", torch.arange(4.0).split(2), strict=True)), "empty": dict,
    "empty tensors": lambda: {"a": torch.ones(0), "b": torch.ones(0)},
    "meta": lambda: {"a": torch.ones(2, device="meta"), "b": torch.ones(2, device="meta")},
    "ordered": lambda: OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
    "of a model": lambda: nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).state_dict(),
    "parameter": lambda: {"a": nn.Parameter(torch.ones(2))},
    "two ties": lambda: {**dict.fromkeys("ab", torch.ones(1)), **dict.fromkeys("cd", torch.zeros(1))},
}  # fmt: skip


@probe("utils.other:clean_state_dict_for_safetensors", state_dict=STATE_DICTS)
def clean_state_dict_for_safetensors(state_dict):
    PartialState(cpu=True)
    before = list(state_dict)
    cleaned = other.clean_state_dict_for_safetensors(state_dict)
    yield "value", dict(cleaned)
    yield "contiguous", all(v.is_contiguous() for v in cleaned.values())
    yield "argument", (before, list(state_dict))
