"""Operations on nested structures that all processes take part in, on one process and on two."""

import os

import torch

from accelerate import PartialState
from accelerate.utils import operations
from interop.differential.core import BOTH, RANK, attempt, probe
from interop.differential.probes.nested import HOLLOW, OTHERS, Pair, seen, some

REFUSED = {
    k: v for k, v in (OTHERS | HOLLOW).items() if k not in ("movable batch", "generator", "module", "tensor first")
}
FEW = some("scalar, vector, matrix, no rows, torch.int64, torch.bfloat16, nested, named tuple")


@probe("utils.operations:gather_object", processes=BOTH, value=REFUSED | FEW)
def gather_object(value):
    PartialState(cpu=True)
    return operations.gather_object(value)


@probe(
    "utils.operations:broadcast_object_list", processes=BOTH,
    value={
        "rank": lambda: [RANK], "pair": lambda: [RANK, "x"], "nothing": lambda: [None], "dict": lambda: [{"a": RANK}],
        "nested": lambda: [[RANK]], "tensor": lambda: [torch.ones(RANK + 1)], "text": lambda: ["ü" * RANK],
    }, from_process=[0, 1],
)  # fmt: skip
def broadcast_object_list(value, from_process):
    PartialState(cpu=True)
    if from_process and PartialState().num_processes == 1:
        from_process = 0
    yield from seen(operations.broadcast_object_list(value, from_process=from_process), value)


# With gloo, 1.15.0 gives uninitialised memory behind the shape, and waits for ever where one rank of several has the tensor.
@probe(
    "utils.operations:gather_tensor_shape",
    "utils.operations:copy_tensor_to_devices",
    value=some("scalar, vector, matrix, cube, torch.int64, torch.bool, torch.bfloat16, no rows"),
)
def owned(value):
    PartialState(cpu=True)
    shape = operations.gather_tensor_shape(value)[0]
    yield "shape", (shape.dtype, shape.flatten()[: value.ndim])
    yield "copy", operations.copy_tensor_to_devices(value)


@probe(
    "utils.operations:verify_operation", "utils.operations:chained_operation", "utils.operations:gather",
    "utils.operations:pad_across_processes", processes=2, quick=9,
    operation=["gather", "reduce", "broadcast", "verify_operation", "chained_operation"],
)  # fmt: skip
def debugged(operation):
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    PartialState(cpu=True)

    def inner(tensor):
        return operations.gather(tensor)

    function = getattr(operations, operation)
    run = function(inner) if operation.endswith("_operation") else function
    for label, value in {
        "shapes": torch.ones(RANK + 1),
        "nested shapes": {"a": torch.ones(1), "b": [torch.ones(RANK + 1)]},
        "equal": Pair(torch.ones(2), torch.ones(1)),
        "dimensions": torch.ones(2) if RANK else torch.ones(2, 1),
    }.items():
        result = attempt(run, value)
        yield label, (result, getattr(result, "__cause__", None))
    yield "padded", operations.gather(operations.pad_across_processes(torch.ones(RANK + 1)))
