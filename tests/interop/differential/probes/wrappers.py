"""What operations wrap: a model's forward, collectives, DeepSpeed's parameters."""

import warnings

import torch

from accelerate import Accelerator
from accelerate.utils import operations
from interop.differential.core import probe, short
from interop.differential.probes.nested import rising, some

OUTPUTS = {
    **{
        f"{dtype}": lambda dtype=dtype: rising(2, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    },
    **some("torch.float64, torch.int64, dtypes, nested, text, None, named tuple, user dict"),
}


class Model(torch.nn.Module):
    """A module whose forward returns what it is given."""

    def forward(self, value, times=1):
        """Return the argument."""
        return [value] * times if times > 1 else value


short(
    "converted_outputs", lambda wrapper, value,
    keywords: getattr(operations, wrapper)(Model().forward)(value, **keywords),
    "utils.operations:convert_outputs_to_fp32", "utils.operations:ConvertOutputsToFp32",
    wrapper=["convert_outputs_to_fp32", "ConvertOutputsToFp32"], value=OUTPUTS, keywords=[{}, {"times": 2}],
)  # fmt: skip


@probe("utils.operations:CannotPadNestedTensorWarning", dim=[0, 1])
def warned(dim):
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
    }, modifier_rank=[None, 0], enabled=[True, False], fwd_module={"None": lambda: None, "module": Model},
)  # fmt: skip
def gathered_parameters(params, modifier_rank, enabled, fwd_module):
    Accelerator(cpu=True)
    with operations.GatheredParameters(params, modifier_rank, fwd_module, enabled) as inside:
        yield "entered", inside
        if isinstance(params, torch.Tensor):
            params.data.add_(1)
    yield "left", params if isinstance(params, torch.Tensor) else "no tensor"
