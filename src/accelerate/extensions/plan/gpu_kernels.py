"""Memory of a GPU's kernels where it differs from the CPU's: attention, dropout, and operators that autocast runs in float32.

A profile is measured on fake tensors of the CPU, because torch without GPUs cannot make others. Inside `as_on_gpus` the few
functions whose memory differs are replaced by ones that allocate like a GPU; values do not matter.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelerate.extensions.plan.torch_private import fused_attention
from accelerate.extensions.reports.torch_private import replaced
from accelerate.runtime.torch_private import pytree

# Operators that autocast runs in float32 on GPUs and in half precision on CPUs, as far as models use them in their layers:
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
_IN_FLOAT32 = (
    *(
        (functional, name)
        for name in ("layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "mse_loss")
    ),
    (torch, "pow"),
    (torch.Tensor, "pow"),
    (torch.Tensor, "__pow__"),
)


@contextlib.contextmanager
def as_on_gpus(*attention: tuple[Any, str]) -> Iterator[None]:
    """Let fake tensors of the CPU take the memory of a GPU's for a block, also where attention has other names, such as these.

    Not a collective.
    """
    fused = _attention(functional.scaled_dot_product_attention)
    names = [(functional, "scaled_dot_product_attention"), *attention]
    wider = [(place, name, _in_float32(getattr(place, name))) for place, name in _IN_FLOAT32]
    changed = [(place, name, fused) for place, name in names]
    with replaced(*changed, (functional, "dropout", _dropout), *wider):
        yield


def _attention(real: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(half), key.to(half), value.to(half)
        # Fused kernels keep a number for each row, whatever mask and dropout there are. In float32 none takes fewer heads of keys.
        if query.dtype != torch.float32 or not enable_gqa:
            return fused_attention(query, key, value, is_causal=is_causal, scale=scale)
        with sdpa_kernel(SDPBackend.MATH):
            return real(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)

    return scaled_dot_product_attention


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> torch.Tensor:
    """Keep a mask of a byte for each number; the CPU's keeps one of the numbers' dtype."""
    return torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 else input


def _in_float32(real: Callable[..., Any]) -> Callable[..., Any]:
    def wider(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = pytree.tree_map(wider, (args, kwargs))
        return real(*args, **kwargs)

    return function
