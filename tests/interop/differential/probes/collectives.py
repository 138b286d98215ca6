"""Operations on nested structures that all processes take part in, on one process and on two."""

import os
from collections.abc import Iterator
from typing import Any

import torch

from accelerate import Accelerator, PartialState
from accelerate.utils import operations
from interop.differential.core import Words, probe
from interop.differential.probes.nested import HOLLOW, OTHERS, RANK, TENSORS, VALUES, Pair, rising

BOTH = (1, 2)
# Dtypes that gloo lacks raise there, sometimes within the next barrier.
LACKING = ("torch.int16", "torch.float8_e4m3fn", "torch.uint16")
CARRIED = {k: v for k, v in TENSORS.items() if k not in LACKING or int(os.environ.get("WORLD_SIZE", 1)) == 1}
REFUSED = {
    k: v for k, v in (OTHERS | HOLLOW).items() if k not in ("movable batch", "generator", "module", "tensor first")
}
FEW = {
    k: VALUES[k]
    for k in ("scalar", "vector", "matrix", "no rows", "torch.int64", "torch.bfloat16", "nested", "named tuple")
}


def seen(result: Any, given: Any) -> Iterator[tuple[str, Any]]:
    """Return the result, whether it is the argument itself, and the argument as it is afterwards."""
    yield "value", result
    yield "is the argument", result is given
    yield "argument", given


def started() -> None:
    """Build the state on CPUs."""
    PartialState(cpu=True)


@probe("utils.operations:gather", processes=BOTH, value=CARRIED)
def gather(value: Any) -> Iterator[tuple[str, Any]]:
    started()
    yield from seen(operations.gather(value), value)


@probe("utils.operations:gather", processes=BOTH, value=REFUSED)
def gather_others(value: Any) -> Any:
    started()
    return operations.gather(value)


@probe("utils.operations:gather_object", processes=BOTH, value=REFUSED | FEW)
def gather_object(value: Any) -> Any:
    started()
    return operations.gather_object(value)


@probe(
    "utils.operations:gather_object",
    processes=BOTH,
    value={
        "rank": lambda: [RANK],
        "as many": lambda: [RANK] * RANK,
        "text": lambda: ["ü" * (RANK + 1)],
        "dict": lambda: [{"rank": RANK}],
        "tuple": lambda: (RANK, "x"),
        "nothing": lambda: [None],
        "nested": lambda: [[RANK]],
        "bare dict": lambda: {"a": RANK},
        "tensor": lambda: [torch.ones(RANK + 1)],
    },
)
def gather_object_of_each(value: Any) -> Any:
    started()
    return operations.gather_object(value)


@probe("utils.operations:broadcast", processes=BOTH, value=CARRIED, from_process=[0])
def broadcast(value: Any, from_process: int) -> Iterator[tuple[str, Any]]:
    started()
    yield from seen(operations.broadcast(value, from_process=from_process), value)


@probe("utils.operations:broadcast", processes=2, value=FEW, from_process=[1])
def broadcast_of_last(value: Any, from_process: int) -> Iterator[tuple[str, Any]]:
    started()
    yield from seen(operations.broadcast(value, from_process=from_process), value)


@probe("utils.operations:broadcast", processes=BOTH, value=REFUSED)
def broadcast_others(value: Any) -> Any:
    started()
    return operations.broadcast(value)


@probe(
    "utils.operations:broadcast_object_list",
    processes=BOTH,
    value={
        "rank": lambda: [RANK],
        "pair": lambda: [RANK, "x"],
        "nothing": lambda: [None],
        "dict": lambda: [{"a": RANK}],
        "nested": lambda: [[RANK]],
        "tensor": lambda: [torch.ones(RANK + 1)],
        "text": lambda: ["ü" * RANK],
    },
    from_process=[0, 1],
)
def broadcast_object_list(value: Any, from_process: int) -> Iterator[tuple[str, Any]]:
    started()
    if from_process and PartialState().num_processes == 1:
        from_process = 0
    yield from seen(operations.broadcast_object_list(value, from_process=from_process), value)


@probe("utils.operations:reduce", processes=BOTH, value=CARRIED, reduction=["mean", "sum"])
def reduce(value: Any, reduction: str) -> Iterator[tuple[str, Any]]:
    started()
    yield from seen(operations.reduce(value, reduction=reduction), value)


@probe(
    "utils.operations:reduce",
    processes=BOTH,
    value=FEW,
    reduction=Words(["none", "max", "min", "MEAN", "Sum", "avg", "", "product", None]),
)
def reduction_words(value: Any, reduction: Any) -> Any:
    started()
    return operations.reduce(value, reduction=reduction)


@probe("utils.operations:reduce", processes=BOTH, value=FEW, reduction=["mean", "sum"], scale=[1.0, 0.5, 0, -1, 2])
def reduce_scaled(value: Any, reduction: str, scale: float) -> Any:
    started()
    return operations.reduce(value, reduction, scale)


@probe("utils.operations:reduce", processes=BOTH, value=REFUSED)
def reduce_others(value: Any) -> Any:
    started()
    return operations.reduce(value)


@probe("utils.operations:reduce", processes=BOTH, reduction=["mean", "sum"])
def reduce_backward(reduction: str) -> Any:
    started()
    weight = torch.nn.Parameter(torch.ones(2) * (RANK + 1))
    loss = operations.reduce((weight * rising(2)).sum(), reduction=reduction)
    loss.backward()
    return weight.grad


@probe(
    "utils.operations:pad_across_processes",
    processes=BOTH,
    value={
        **{
            k: v
            for k, v in TENSORS.items()
            if k in ("scalar", "vector", "matrix", "cube", "nested", "dtypes", "user dict", "no rows")
        },
        "rows of the rank": lambda: torch.full((RANK + 1, 2), 1.0 + RANK),
        "columns of the rank": lambda: torch.full((2, RANK + 1), 1.0 + RANK),
        "integers of the rank": lambda: torch.full((RANK + 1,), 7),
        "none on one rank": lambda: torch.ones(RANK, 2),
        "bools of the rank": lambda: torch.ones(RANK + 1, dtype=torch.bool),
        "halves of the rank": lambda: torch.ones(2 - RANK, dtype=torch.bfloat16),
        "nested of the rank": lambda: {"a": [torch.ones(RANK + 1)], "b": (torch.ones(1, 2 - RANK),)},
        "cube of the rank": lambda: torch.ones(RANK + 1, 2, RANK + 2),
    },
    dim=[0, 1, -1, 5],
    pad=[(0, False), (9, True)],
)
def pad_across_processes(value: Any, dim: int, pad: tuple[int, bool]) -> Any:
    started()
    return operations.pad_across_processes(value, dim=dim, pad_index=pad[0], pad_first=pad[1])


@probe(
    "utils.operations:pad_across_processes",
    processes=BOTH,
    dtype=[torch.float32, torch.int64, torch.bool, torch.uint8, torch.float16],
    pad_index=[0, -100, 2.5, 255, True],
    pad_first=[False, True],
)
def pad_index(dtype: torch.dtype, pad_index: Any, pad_first: bool) -> Any:
    started()
    return operations.pad_across_processes(torch.ones(RANK + 1, dtype=dtype), 0, pad_index, pad_first)


@probe("utils.operations:pad_across_processes", processes=BOTH, value=REFUSED, dim=[0, 1])
def pad_others(value: Any, dim: int) -> Any:
    started()
    return operations.pad_across_processes(value, dim=dim)


# With gloo, 1.15.0 gives memory that nobody wrote behind the shape, and waits for ever where one rank of several has the tensor.
@probe(
    "utils.operations:gather_tensor_shape",
    "utils.operations:copy_tensor_to_devices",
    value={
        k: VALUES[k]
        for k in ("scalar", "vector", "matrix", "cube", "torch.int64", "torch.bool", "torch.bfloat16", "no rows")
    },
)
def owned(value: Any) -> Iterator[tuple[str, Any]]:
    started()
    shape = operations.gather_tensor_shape(value)[0]
    yield "shape", (shape.dtype, shape.flatten()[: value.ndim])
    yield "copy", operations.copy_tensor_to_devices(value)


@probe(
    "utils.operations:verify_operation",
    "utils.operations:gather",
    processes=2,
    operation=["gather", "reduce", "broadcast"],
)
def debugged(operation: str) -> Iterator[tuple[str, Any]]:
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    started()
    for label, value in {
        "shapes": torch.ones(RANK + 1),
        "nested shapes": {"a": torch.ones(1), "b": [torch.ones(RANK + 1)]},
        "equal": torch.ones(2),
        "dimensions": torch.ones(2) if RANK else torch.ones(2, 1),
    }.items():
        try:
            result: Any = getattr(operations, operation)(value)
        except Exception as error:  # what is raised is the result
            result = error
        yield label, result


@probe(
    "utils.operations:verify_operation",
    "utils.operations:chained_operation",
    "utils.operations:pad_across_processes",
    processes=2,
)
def debugged_chain() -> Iterator[tuple[str, Any]]:
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    started()
    calls = {
        "verified": (operations.verify_operation, operations.gather),
        "chained": (operations.chained_operation, operations.gather),
    }
    for label, (decorate, inner) in calls.items():

        def function(tensor: Any, inner: Any = inner) -> Any:
            return inner(tensor)

        for kind, value in {
            "equal": torch.ones(2),
            "uneven": torch.ones(RANK + 1),
            "pair": Pair(torch.ones(1), torch.ones(1)),
        }.items():
            try:
                result: Any = decorate(function)(value)
            except Exception as error:  # what is raised is the result
                result = (error, error.__cause__)
            yield f"{label} {kind}", result
    yield "padded", operations.gather(operations.pad_across_processes(torch.ones(RANK + 1)))


@probe("utils.operations:gather", "utils.operations:reduce", processes=BOTH, value=FEW)
def of_accelerator(value: Any) -> Iterator[tuple[str, Any]]:
    """The methods, which are the functions."""
    accelerator = Accelerator(cpu=True)
    yield "gather", accelerator.gather(value)
    yield "reduce", accelerator.reduce(value, reduction="sum")
    yield "pad", accelerator.pad_across_processes(value)
