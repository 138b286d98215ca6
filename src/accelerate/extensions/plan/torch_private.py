"""torch's private names that this extension uses, of fake tensors and kernels; see `accelerate.runtime.torch_private`."""

import contextlib
import importlib
from typing import Any

import torch

from accelerate.extensions.reports.torch_private import replaced


def shapes_of_wholes_unseen() -> contextlib.AbstractContextManager[None]:
    """Hide from modes the operators on full shapes with which DTensor learns the result of an operator on local parts."""
    from torch.utils._python_dispatch import _disable_current_modes

    home = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    learn = getattr(home, name := "_propagate_tensor_meta_non_cached", None)

    def unseen(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return learn(self, schema)

    return replaced((home, name, unseen)) if learn is not None else contextlib.nullcontext()


def looks_at_values() -> tuple[type[Exception], ...]:
    """Return the errors of an operation that needs values, which fake tensors have none of."""
    module = torch._subclasses.fake_tensor
    return module.DataDependentOutputException, module.DynamicOutputShapeException


def fused_attention(*tensors: torch.Tensor, is_causal: bool, scale: float | None) -> torch.Tensor:
    """Return what attention by a fused kernel returns, which keeps a number for each row of scores."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(*tensors, 0.0, is_causal, attn_mask=None, scale=scale)[0]


def convolution_scratch(operator: Any, args: Any, result: Any) -> int:
    """Return the scratch bytes of a convolution on the CPU in `shapes_only`; 0 for any other operator."""
    aten = torch.ops.aten
    if operator not in (aten.convolution.default, aten.convolution_backward.default):
        return 0
    backward = operator is aten.convolution_backward.default
    (gradient, *tensors), rest = (args[:3], args[4:10]) if backward else ((result, *args[:2]), args[3:9])
    if str(torch._C._select_conv_backend(*tensors, None, *rest, None)).endswith("Mkldnn"):
        # In its own memory layout it has a copy of the input, and then one of the output.
        sizes = gradient.nbytes, sum(tensor.nbytes for tensor in tensors)
        return sum(sizes) if backward else max(sizes)
    samples, columns = tensors[0].shape[0], tensors[1][0].numel() * rest[-1]  # each output's inputs are adjacent
    return samples * columns * gradient[0, 0].numel() * gradient.element_size()
