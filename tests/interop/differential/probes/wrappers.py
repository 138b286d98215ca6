"""What operations wrap: a model's forward, collectives, DeepSpeed's parameters."""

import copy
import inspect
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accelerate import Accelerator, PartialState
from accelerate.utils import operations
from interop.differential.core import probe
from interop.differential.probes.nested import VALUES, rising


def double(item: Any) -> Any:
    """Return twice the item."""
    return item * 2


OUTPUTS: dict[str, Callable[[], Any]] = {
    **{
        f"{dtype}": lambda dtype=dtype: rising(2, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    },
    **{
        k: VALUES[k]
        for k in ("torch.float64", "torch.int64", "dtypes", "nested", "text", "None", "named tuple", "user dict")
    },
}


class Model(torch.nn.Module):
    """A module whose forward returns what it is given."""

    def forward(self, value: Any, times: int = 1) -> Any:
        """Return the argument."""
        return [value] * times if times > 1 else value


@probe(
    "utils.operations:convert_outputs_to_fp32", "utils.operations:ConvertOutputsToFp32",
    wrapper=["convert_outputs_to_fp32", "ConvertOutputsToFp32"], value=OUTPUTS, keywords=[{}, {"times": 2}],
)  # fmt: skip
def converted_outputs(wrapper: str, value: Any, keywords: dict[str, Any]) -> Any:
    return getattr(operations, wrapper)(Model().forward)(value, **keywords)


@probe(
    "utils.operations:convert_outputs_to_fp32", "utils.operations:ConvertOutputsToFp32",
    wrapper=["convert_outputs_to_fp32", "ConvertOutputsToFp32"],
    given={
        "method": lambda: Model().forward, "function": lambda: double, "lambda": lambda: lambda x: x,
        "class": lambda: int,
    },
)  # fmt: skip
def converter(wrapper: str, given: Any) -> Iterator[tuple[str, Any]]:
    made = getattr(operations, wrapper)(given)
    yield "kind", type(made).__name__
    yield "name", made.__name__ if inspect.ismethod(given) else "-"
    yield "signature", str(inspect.signature(made)) if given is not int else "-"
    yield "wrapped", type(made.__wrapped__).__name__
    yield "wrapped twice", getattr(getattr(made.__wrapped__, "__wrapped__", None), "__name__", "<absent>")
    yield "original", inspect.unwrap(made) == given
    yield "callable", callable(made)
    for action in (pickle.dumps, copy.copy, copy.deepcopy):
        try:
            result = type(action(made)).__name__
        except Exception as error:  # what is raised is the result
            result = error
        yield action.__name__, result


@probe("utils.operations:CannotPadNestedTensorWarning", "utils.operations:DistributedOperationException")
def kinds() -> Iterator[tuple[str, Any]]:
    for kind in (operations.CannotPadNestedTensorWarning, operations.DistributedOperationException):
        yield kind.__name__, [base.__name__ for base in kind.__mro__]
        yield f"{kind.__name__} made", (str(kind("text")), repr(kind("text")), kind("a", 1).args, kind().args)
        yield f"{kind.__name__} pickled", repr(pickle.loads(pickle.dumps(kind("text"))))


@probe("utils.operations:CannotPadNestedTensorWarning", dim=[0, 1])
def warned(dim: int) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = operations.pad_across_processes(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), dim=dim)
    return [w.category for w in caught if "Nested" in w.category.__name__], result.is_nested


@probe(
    "utils.operations:GatheredParameters",
    params={
        "parameter": lambda: torch.nn.Parameter(torch.ones(2)), "list": lambda: [torch.nn.Parameter(torch.ones(2))],
        "empty": list, "generator": lambda: Model().parameters(), "None": lambda: None,
        "tensor": lambda: torch.ones(2),
    },
    modifier_rank=[None, 0], enabled=[True, False], fwd_module={"None": lambda: None, "module": Model},
)  # fmt: skip
def gathered_parameters(params: Any, modifier_rank: Any, enabled: bool, fwd_module: Any) -> Iterator[tuple[str, Any]]:
    Accelerator(cpu=True)
    with operations.GatheredParameters(params, modifier_rank, fwd_module, enabled) as inside:
        yield "entered", inside
        if isinstance(params, torch.Tensor):
            params.data.add_(1)
    yield "left", params if isinstance(params, torch.Tensor) else "no tensor"


@probe(
    "utils.operations:verify_operation", "utils.operations:chained_operation",
    decorator=["verify_operation", "chained_operation"], debug=["0", "1"],
    raises=[None, ValueError, "DistributedOperationException"],
)  # fmt: skip
def decorated(decorator: str, debug: str, raises: Any) -> Iterator[tuple[str, Any]]:
    os.environ["ACCELERATE_DEBUG_MODE"] = debug
    PartialState(cpu=True)

    def function(tensor: Any, factor: int = 2) -> Any:
        """Multiply."""
        if raises is not None:
            raise (getattr(operations, raises) if isinstance(raises, str) else raises)("no")
        return tensor * factor

    made = getattr(operations, decorator)(function)
    yield "name", (made.__name__, made.__doc__, made.__wrapped__ is function, str(inspect.signature(made)))
    for label, call in {
        "positional": lambda: made(rising(2)),
        "keyword": lambda: made(tensor=rising(2), factor=3),
        "text": lambda: made("ab"),
        "nested": lambda: made([rising(2)]),
        "nothing": lambda: made(),
    }.items():
        try:
            result: Any = call()
        except Exception as error:  # what is raised is the result
            result = (error, error.__cause__)
        yield label, result
