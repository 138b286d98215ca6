"""Values for the probes of nested structures: label -> factory. A rank's number is in the values where there are several."""

import collections
import dataclasses
import types
from typing import Any

import numpy as np
import torch

from interop.differential.core import RANK

Pair = collections.namedtuple("Pair", "first second")
Empty = collections.namedtuple("Empty", "")


class Rows(list):
    pass


class Fixed(tuple):
    pass


class Table(dict):
    pass


class Movable:
    """An object that knows how to move, and notes how."""

    def __init__(self, takes_non_blocking=True):
        self.takes_non_blocking = takes_non_blocking
        self.calls = []

    def to(self, device, **kwargs):
        if kwargs and not self.takes_non_blocking:
            raise TypeError("unexpected keyword argument")
        self.calls.append((str(device), kwargs))
        return (type(self).__name__, self.calls)


class MovableBatch(collections.UserDict):
    def to(self, device):
        return MovableBatch({"moved": str(device), **self.data})


@dataclasses.dataclass
class Record:
    x: Any = None


def seen(result, given):
    """Return the result, whether it is the argument itself, and the argument as it is afterwards."""
    yield "value", result
    yield "is the argument", result is given
    yield "argument", given


def rising(*shape, dtype=torch.float32):
    """Return 1, 2, 3, ... in a shape, and ten times the rank more."""
    count = int(np.prod(shape)) if shape else 1
    return (torch.arange(count, dtype=torch.float32) + 1 + 10 * RANK).reshape(shape).to(dtype)


def with_history():
    return torch.nn.Parameter(rising(2)) * 2


DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16),
]
# Tensors of every sort, which collectives and local functions take.
TENSORS = {
    "scalar": lambda: rising(), "vector": lambda: rising(3), "matrix": lambda: rising(2, 3),
    "cube": lambda: rising(2, 1, 3), "one element": lambda: rising(1), "no rows": lambda: rising(0),
    "no columns": lambda: rising(2, 0), "transposed": lambda: rising(2, 3).T, "strided": lambda: rising(6)[::2],
    "expanded": lambda: rising(1).expand(3), "parameter": lambda: torch.nn.Parameter(rising(2)),
    "history": with_history, "large": lambda: rising(40, 5),
    **{f"{dtype}": lambda dtype=dtype: rising(2, dtype=dtype) for dtype in DTYPES},
    "list": lambda: [rising(2), rising(1, 2)], "list of one": lambda: [rising(2)],
    "tuple": lambda: (rising(2), rising(2)), "named tuple": lambda: Pair(rising(2), rising(3)),
    "dict": lambda: {"a": rising(2), "b": rising(2, 2)}, "number keys": lambda: {1: rising(2), None: rising(1)},
    "unicode keys": lambda: {"größe": rising(2), "": rising(1)},
    "ordered dict": lambda: collections.OrderedDict(b=rising(2), a=rising(1)),
    "default dict": lambda: collections.defaultdict(list, {"a": rising(2)}),
    "user dict": lambda: collections.UserDict(a=rising(2)), "dict subclass": lambda: Table(a=rising(2)),
    "list subclass": lambda: Rows([rising(2)]), "tuple subclass": lambda: Fixed([rising(2), rising(1)]),
    "nested": lambda: {"x": [rising(2), (rising(1), {"y": rising(2, 2)})], "z": Pair(rising(2), [rising(1)])},
    "deep": lambda: [[[[[rising(1)]]]]], "same twice": lambda: [shared := rising(2), shared],
    "dtypes": lambda: {"a": rising(2), "b": rising(2, dtype=torch.int64), "c": rising(2, dtype=torch.bfloat16)},
    "list with history": lambda: [with_history(), rising(2)],
}  # fmt: skip
# Structures without a leaf.
HOLLOW = {
    "empty list": list, "empty tuple": tuple, "empty dict": dict, "empty named tuple": Empty,
    "empty inside": lambda: {"a": [], "b": ()}, "empty ordered dict": collections.OrderedDict,
}  # fmt: skip
# What is no tensor, alone and next to tensors.
OTHERS = {
    "None": lambda: None, "True": lambda: True, "zero": lambda: 0, "huge": lambda: 10**30, "float": lambda: 1.5,
    "nan": lambda: float("nan"), "complex": lambda: 1j, "text": lambda: "text", "empty text": lambda: "",
    "bytes": lambda: b"ab", "array": lambda: np.arange(3), "matrix of numpy": lambda: np.ones((2, 2)),
    "numpy number": lambda: np.float32(2), "set": lambda: {1, 2}, "frozen set": lambda: frozenset(("a",)),
    "deque": lambda: collections.deque([1, 2]), "range": lambda: range(3), "slice": lambda: slice(1, 2),
    "size": lambda: torch.Size([2, 3]), "device": lambda: torch.device("cpu"), "dtype": lambda: torch.float32,
    "class": lambda: int, "function": lambda: len, "object": object, "namespace": types.SimpleNamespace,
    "record": lambda: Record(1), "record of a tensor": lambda: Record(rising(2)), "movable": Movable,
    "movable without the option": lambda: Movable(False), "movable batch": lambda: MovableBatch(a=1),
    "numbers": lambda: [1, 2.5, 3], "texts": lambda: ["a", "b"], "pair of numbers": lambda: Pair(1, 2),
    "dict of texts": lambda: {"a": "x", "b": None}, "number first": lambda: [1, rising(2)],
    "tensor first": lambda: [rising(2), "text"],
    "mixed dict": lambda: {"n": 1, "x": rising(2), "t": "text", "none": None, "m": Movable()},
    "module": lambda: torch.nn.Linear(1, 1, bias=False, dtype=torch.float64).requires_grad_(False).weight.data * 0,
    "generator": lambda: (i for i in range(2)), "exception": lambda: ValueError("no"),
}  # fmt: skip
# Tensors that most functions cannot use.
STRANGE = {
    "meta": lambda: torch.empty(2, 3, device="meta"), "meta inside": lambda: {"a": torch.empty(2, device="meta")},
    "sparse": lambda: torch.eye(2).to_sparse(),
    "torch.nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}  # fmt: skip
VALUES = {**TENSORS, **HOLLOW, **OTHERS, **STRANGE}


def some(names):
    """Return the values that a text names."""
    return {name: VALUES[name] for name in names.split(", ")}
