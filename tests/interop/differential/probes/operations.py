"""Operations on nested structures that no other process takes part in."""

import collections
import copy
from collections.abc import Iterator
from typing import Any

import torch

from accelerate.utils import TensorInformation, operations
from interop.differential.core import call, probe
from interop.differential.probes.nested import HOLLOW, TENSORS, VALUES, Fixed, Lookalike, Pair, Rows

PLAIN = {k: v for k, v in VALUES.items() if k not in ("generator", "torch.nested", "sparse", "object", "namespace")}
FEW = {
    k: VALUES[k]
    for k in ("scalar", "vector", "matrix", "no rows", "torch.int64", "nested", "named tuple", "text", "None")
}


def seen(result: Any, given: Any) -> Iterator[tuple[str, Any]]:
    """Return the result, whether it is the argument itself, and the argument as it is afterwards."""
    yield "value", result
    yield "is the argument", result is given
    yield "argument", given


@probe(
    *(f"utils.operations:{name}" for name in ("is_torch_tensor", "is_namedtuple", "is_tensor_information")),
    question=["is_torch_tensor", "is_namedtuple", "is_tensor_information"],
    value={
        **{k: v for k, v in VALUES.items() if not k.startswith("torch.")},
        "information": lambda: TensorInformation((1,), torch.float32),
        "named tuple's class": lambda: Pair,
        "tensor's class": lambda: torch.Tensor,
    },
)
def asked(question: str, value: Any) -> Any:
    return getattr(operations, question)(value)


call("utils.operations:is_torch_xpu_tensor", value={k: VALUES[k] for k in ("vector", "dict", "text")})


@probe(
    "utils.operations:find_device", "utils.operations:find_batch_size", "utils.operations:ignorant_find_batch_size",
    "utils.operations:get_shape", "utils.operations:get_data_structure", "utils.operations:listify",
    "utils.operations:convert_to_fp32",
    function=[
        "find_device", "find_batch_size", "ignorant_find_batch_size", "get_shape", "get_data_structure", "listify",
        "convert_to_fp32",
    ],
    value=PLAIN,
)  # fmt: skip
def mapped(function: str, value: Any) -> Any:
    return getattr(operations, function)(value)


@probe("utils.operations:send_to_device", value=VALUES)
def sent_to_its_device(value: Any) -> Iterator[tuple[str, Any]]:
    yield from seen(operations.send_to_device(value, "cpu"), value)


@probe("utils.operations:initialize_tensors", "utils.operations:get_data_structure", value=TENSORS | HOLLOW)
def initialized(value: Any) -> Any:
    made = operations.initialize_tensors(operations.get_data_structure(value))
    return operations.recursively_apply(lambda t: (list(t.shape), t.dtype, t.device.type, t.requires_grad), made)


call(
    "utils.operations:slice_tensors",
    value=FEW | {k: VALUES[k] for k in ("dict", "empty list", "mixed dict", "meta", "user dict")},
    part=[slice(0, 1), slice(1, None), slice(-1, None), slice(5, 9), slice(0, 2, 2), 0, None, [0], (0,), "x"],
)


@probe("utils.operations:concatenate", value=PLAIN, count=[1, 3], dim=[0, 1])
def concatenate(value: Any, count: int, dim: int) -> Any:
    return operations.concatenate([copy.deepcopy(value) for _ in range(count)], dim=dim)


call(
    "utils.operations:pad_input_tensors",
    "pad_input_tensors_otherwise",
    value={
        k: VALUES[k]
        for k in (
            "scalar",
            "no rows",
            "text",
            "None",
            "mixed dict",
            "empty list",
            "torch.bool",
            "torch.int64",
            "user dict",
        )
    },
    batch_size=[0, 2, 3],
    num_processes=[2, 3],
)


def double(item: Any, *args: Any, **kwargs: Any) -> Any:
    """Return twice the item, with what was passed beside it."""
    return (item * 2, args, kwargs) if args or kwargs else item * 2


TESTS: dict[str, Any] = {
    "default": lambda: operations.is_torch_tensor,
    "all": lambda: lambda item: True,
    "lists too": lambda: lambda item: isinstance(item, (list, torch.Tensor)),
}


@probe(
    "utils.operations:recursively_apply", slow=True,
    value={k: v for k, v in PLAIN.items() if k not in ("huge", "lookalike", "torch.float8_e4m3fn", "torch.uint16")},
    test_type=TESTS, error_on_other_type=[False, True],
)  # fmt: skip
def recursively_apply(value: Any, test_type: Any, error_on_other_type: bool) -> Any:
    return operations.recursively_apply(double, value, test_type=test_type, error_on_other_type=error_on_other_type)


class Odd(dict):
    """A mapping that can be made from keyword arguments alone."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)


@probe(
    "utils.operations:honor_type", "utils.operations:recursively_apply",
    obj={
        "list": list, "tuple": tuple, "pair": lambda: Pair(1, 2), "rows": Rows, "fixed": Fixed,
        "lookalike": Lookalike, "size": lambda: torch.Size([1]), "set": set, "dict": dict,
        "deque": collections.deque, "text": str, "number": lambda: 1, "None": lambda: None,
        "range": lambda: range(2), "odd": Odd,
    },
    elements=[[1, 2], (), [1], "ab", [("a", 1), ("b", 2)], [3, 4, 5], None, 5],
)  # fmt: skip
def honor_type(obj: Any, elements: Any) -> Any:
    return operations.honor_type(obj, elements if elements is None or isinstance(elements, int) else iter(elements))
