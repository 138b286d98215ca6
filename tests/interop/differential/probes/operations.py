"""Operations on nested structures that no other process takes part in."""

import collections
import copy
from collections.abc import Iterator
from typing import Any

import torch

from accelerate.utils import TensorInformation, operations
from interop.differential.core import probe
from interop.differential.probes.nested import HOLLOW, OTHERS, TENSORS, VALUES, Fixed, Lookalike, Pair, Rows, rising

PLAIN = {k: v for k, v in VALUES.items() if k not in ("generator", "torch.nested", "sparse", "object", "namespace")}
FEW = {
    k: VALUES[k]
    for k in ("scalar", "vector", "matrix", "no rows", "torch.int64", "nested", "named tuple", "text", "None")
}
SHAPES = {"shape": (2, 3), "list": [2, 3], "size": torch.Size([2, 3]), "scalar": (), "none": (0,)}


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


@probe("utils.operations:is_torch_xpu_tensor", value={k: VALUES[k] for k in ("vector", "dict", "text")})
def is_torch_xpu_tensor(value: Any) -> bool:
    return operations.is_torch_xpu_tensor(value)


@probe(
    "utils.operations:find_device",
    "utils.operations:find_batch_size",
    "utils.operations:ignorant_find_batch_size",
    "utils.operations:get_shape",
    "utils.operations:get_data_structure",
    "utils.operations:listify",
    "utils.operations:convert_to_fp32",
    function=[
        "find_device",
        "find_batch_size",
        "ignorant_find_batch_size",
        "get_shape",
        "get_data_structure",
        "listify",
        "convert_to_fp32",
    ],
    value=PLAIN,
)
def mapped(function: str, value: Any) -> Any:
    return getattr(operations, function)(value)


@probe("utils.operations:convert_to_fp32", value=TENSORS)
def converted(value: Any) -> Iterator[tuple[str, Any]]:
    yield from seen(operations.convert_to_fp32(value), value)


@probe(
    "utils.operations:find_batch_size",
    "utils.operations:ignorant_find_batch_size",
    "utils.operations:find_device",
    function=["find_batch_size", "ignorant_find_batch_size", "find_device"],
    value=[
        [[], torch.ones(3)],
        [None, torch.ones(3)],
        ["a", torch.ones(3)],
        {"a": None, "b": torch.ones(3)},
        {"a": [], "b": torch.ones(3)},
        (torch.tensor(1.0), torch.ones(3)),
        [[[]]],
        [torch.ones(0, 3), torch.ones(3)],
        {"a": {"b": {"c": torch.ones(4, 2)}}},
        collections.UserDict(a=torch.ones(3)),
        Pair(None, torch.ones(2)),
    ],
)
def first_leaf(function: str, value: Any) -> Any:
    return getattr(operations, function)(value)


@probe(
    "utils.operations:send_to_device",
    slow=True,
    value=VALUES,
    device=["meta", torch.device("cpu")],
    non_blocking=[False, True],
)
def send_to_device(value: Any, device: Any, non_blocking: bool) -> Any:
    return operations.send_to_device(value, device, non_blocking=non_blocking)


@probe("utils.operations:send_to_device", value=VALUES)
def sent_to_its_device(value: Any) -> Iterator[tuple[str, Any]]:
    yield from seen(operations.send_to_device(value, "cpu"), value)


@probe(
    "utils.operations:send_to_device",
    device=[
        None,
        "",
        "nowhere",
        "CPU",
        "cpu:0",
        "cpu:7",
        99,
        -1,
        1.5,
        torch.float64,
        "cuda",
        "cuda:0",
        "xpu",
        "npu",
        "mps",
        "hpu",
    ],
    value={k: VALUES[k] for k in ("vector", "dict", "text", "movable", "mixed dict", "empty list")},
)
def sent_anywhere(device: Any, value: Any) -> Any:
    return operations.send_to_device(value, device)


@probe(
    "utils.operations:send_to_device",
    skip_keys=[None, "a", ["a"], ("a", "b"), [], "", "A", "ab", ["nothing"], {"a"}, [1], 1],
    value={
        "dict": lambda: {"a": rising(2), "b": rising(2)},
        "below": lambda: {"x": {"a": rising(2), "b": [rising(1)]}},
        "list": lambda: [{"a": rising(2)}, rising(2)],
        "tuple": lambda: Pair({"a": rising(2)}, ({"b": rising(1), "a": 1},)),
        "a list under the key": lambda: {"a": [rising(2), {"b": rising(1)}]},
        "tensor": lambda: rising(2),
        "user dict": lambda: collections.UserDict(a=rising(2), b=rising(2)),
        "numbers": lambda: {1: rising(1), "1": rising(1)},
    },
)
def skipped(skip_keys: Any, value: Any) -> Any:
    return operations.send_to_device(value, "meta", skip_keys=skip_keys)


@probe("utils.operations:initialize_tensors", "utils.operations:get_data_structure", value=TENSORS | HOLLOW)
def initialized(value: Any) -> Any:
    made = operations.initialize_tensors(operations.get_data_structure(value))
    return operations.recursively_apply(lambda t: (list(t.shape), t.dtype, t.device.type, t.requires_grad), made)


@probe(
    "utils.operations:initialize_tensors",
    shape=list(SHAPES.values()),
    dtype=[torch.float32, torch.int64, torch.bool, torch.bfloat16, None, "float32"],
)
def initialized_from(shape: Any, dtype: Any) -> Any:
    made = operations.initialize_tensors({"a": [TensorInformation(shape, dtype), "text"], "b": None})
    return {"shape": list(made["a"][0].shape), "dtype": made["a"][0].dtype, "rest": (made["a"][1], made["b"])}


@probe("utils.operations:initialize_tensors", value=OTHERS | {"tensor": lambda: rising(2)})
def initialized_others(value: Any) -> Any:
    return operations.initialize_tensors(value)


@probe(
    "utils.operations:slice_tensors",
    value=FEW | {k: VALUES[k] for k in ("dict", "empty list", "mixed dict", "meta", "user dict")},
    part=[slice(0, 1), slice(1, None), slice(-1, None), slice(5, 9), slice(0, 2, 2), 0, None, [0], (0,), "x"],
)
def slice_tensors(value: Any, part: Any) -> Any:
    return operations.slice_tensors(value, part)


@probe(
    "utils.operations:slice_tensors",
    process_index=[None, 0, 1, 5],
    num_processes=[None, 1, 2, 0],
    value={k: VALUES[k] for k in ("matrix", "nested", "scalar")},
)
def slice_tensors_of(process_index: Any, num_processes: Any, value: Any) -> Any:
    return operations.slice_tensors(value, slice(0, 1), process_index, num_processes)


@probe("utils.operations:concatenate", value=PLAIN, count=[1, 3], dim=[0, 1])
def concatenate(value: Any, count: int, dim: int) -> Any:
    return operations.concatenate([copy.deepcopy(value) for _ in range(count)], dim=dim)


@probe(
    "utils.operations:concatenate",
    data=[
        [],
        (),
        None,
        [torch.ones(1), torch.ones(1, 2)],
        [torch.ones(1, 2), torch.ones(1, 3)],
        [torch.ones(1), torch.ones(1, dtype=torch.int64)],
        [torch.ones(1), torch.ones(1, dtype=torch.float64)],
        [torch.ones(1), None],
        [None, torch.ones(1)],
        [{"a": torch.ones(1)}, {"b": torch.ones(1)}],
        [{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}],
        [{"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}],
        [[torch.ones(1)], [torch.ones(1), torch.zeros(1)]],
        [[torch.ones(1), torch.zeros(1)], [torch.ones(1)]],
        [[torch.ones(1)], (torch.ones(1),)],
        [[], []],
        [{}, {}],
        (torch.ones(1), torch.zeros(2)),
        {0: torch.ones(1), 1: torch.ones(2)},
        [torch.tensor(1.0), torch.tensor(2.0)],
        [torch.ones(0), torch.ones(1)],
        ["a", "b"],
        [1, 2],
    ],
    dim=[0, 1, 5],
)
def concatenate_uneven(data: Any, dim: int) -> Any:
    return operations.concatenate(data, dim)


@probe(
    "utils.operations:pad_input_tensors",
    rows=[1, 2, 3, 4, 5, 7, 8],
    num_processes=[1, 2, 3, 4, 8],
    form={
        "rows": lambda: lambda n: rising(n, 2),
        "columns": lambda: lambda n: rising(2, n),
        "vector": lambda: rising,
        "nested": lambda: lambda n: {"a": [rising(n)], "b": rising(n, 1)},
    },
)
def pad_input_tensors(rows: int, num_processes: int, form: Any) -> Any:
    value = form(rows)
    return operations.pad_input_tensors(
        value, rows, num_processes, dim=int(value.shape[0] != rows) if isinstance(value, torch.Tensor) else 0
    )


@probe(
    "utils.operations:pad_input_tensors",
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
def pad_input_tensors_otherwise(value: Any, batch_size: Any, num_processes: Any) -> Any:
    return operations.pad_input_tensors(value, batch_size, num_processes)


def double(item: Any, *args: Any, **kwargs: Any) -> Any:
    """Return twice the item, with what was passed beside it."""
    return (item * 2, args, kwargs) if args or kwargs else item * 2


TESTS: dict[str, Any] = {
    "default": lambda: operations.is_torch_tensor,
    "all": lambda: lambda item: True,
    "lists too": lambda: lambda item: isinstance(item, (list, torch.Tensor)),
}


@probe(
    "utils.operations:recursively_apply",
    slow=True,
    value={k: v for k, v in PLAIN.items() if k not in ("huge", "lookalike", "torch.float8_e4m3fn", "torch.uint16")},
    test_type=TESTS,
    error_on_other_type=[False, True],
)
def recursively_apply(value: Any, test_type: Any, error_on_other_type: bool) -> Any:
    return operations.recursively_apply(double, value, test_type=test_type, error_on_other_type=error_on_other_type)


@probe(
    "utils.operations:recursively_apply",
    value={k: VALUES[k] for k in ("vector", "nested", "text", "empty list")},
    args=[(), (1,), (1, "a")],
    kwargs=[{}, {"x": 1}, {"func2": 1, "data2": 2}],
)
def recursively_apply_with(value: Any, args: Any, kwargs: Any) -> Any:
    return operations.recursively_apply(double, value, *args, **kwargs)


class Odd(dict):
    """A mapping that can be made from keyword arguments alone."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)


@probe(
    "utils.operations:honor_type",
    "utils.operations:recursively_apply",
    obj={
        "list": list,
        "tuple": tuple,
        "pair": lambda: Pair(1, 2),
        "rows": Rows,
        "fixed": Fixed,
        "lookalike": Lookalike,
        "size": lambda: torch.Size([1]),
        "set": set,
        "dict": dict,
        "deque": collections.deque,
        "text": str,
        "number": lambda: 1,
        "None": lambda: None,
        "range": lambda: range(2),
        "odd": Odd,
    },
    elements=[[1, 2], (), [1], "ab", [("a", 1), ("b", 2)], [3, 4, 5], None, 5],
)
def honor_type(obj: Any, elements: Any) -> Any:
    return operations.honor_type(obj, elements if elements is None or isinstance(elements, int) else iter(elements))


@probe(
    "utils.operations:recursively_apply",
    "utils.operations:send_to_device",
    keys=[{"a": 1}, {}, {"größe": torch.ones(1)}],
)
def odd_mappings(keys: Any) -> Iterator[tuple[str, Any]]:
    for name, make in {
        "odd": lambda: Odd(**keys),
        "counter": lambda: collections.Counter(keys) if keys == {"a": 1} else collections.Counter(),
        "chain": lambda: collections.ChainMap(dict(keys)),
        "default": lambda: collections.defaultdict(int, keys),
    }.items():
        for function in (lambda v: operations.send_to_device(v, "cpu"), operations.convert_to_fp32):
            try:
                result = function(make())
            except Exception as error:  # what is raised is the result
                result = error
            yield f"{name} {'send' if function is not operations.convert_to_fp32 else 'convert'}", result
