"""Sequence parallelism after Ulysses: each rank holds a part of every sequence, and inside attention a part of the heads."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from accelerate.parallel import mesh, models
from accelerate.parallel.exchange import exchange
from accelerate.parallel.loss import aggregate_loss, shift_labels
from accelerate.parallel.region import ATTENTION, Region

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator
    from accelerate.config.parallel import DeepSpeedSequenceParallelConfig

__all__ = ["SequenceRegion", "aggregate_loss", "check_heads", "prepare", "shift_labels", "ulysses"]

_HEADS, _LENGTH = 1, 2  # dimensions of query, key and value


def prepare(accelerator: "Accelerator", objects: Sequence[Any]) -> tuple[Any, ...]:
    """Get models and the Accelerator ready for sequences that are cut (`sp_backend="torch"`). All ranks call it.

    `accelerator.maybe_context_parallel` works from here on, as for context parallelism.

    Args:
        accelerator: its device mesh is built, and has a dimension "sp".
        objects: what `prepare` was given.

    Returns:
        The same objects.

    Raises:
        ValueError: heads that cannot be dealt out, an attention other than SDPA, or settings that only DeepSpeed has a use for.

    Source: DeepSpeed Ulysses (arXiv 2309.14509)
    """
    layout = accelerator.parallelism_config
    found = [item for item in objects if isinstance(item, nn.Module)]
    for model in found:
        models.check(model, "sp")
        for inner in models.outermost(model):
            _check_config(inner, layout.sp_size)
    if not isinstance(accelerator._cp_context, Region):
        part = mesh.submesh(accelerator.torch_device_mesh, "sp")
        if part is None:
            raise ValueError(
                f"sp_size={layout.sp_size}, but the device mesh has no dimension 'sp'. Set sp_size above 1."
            )
        accelerator._cp_context = SequenceRegion(part, _fixed_length(layout.sp_handler))
    for model in found:
        models.attach(model, accelerator._cp_context)
    return tuple(objects)


def check_heads(heads: int, key_heads: int, size: int, of: str = "attention") -> None:
    """Refuse heads that cannot be dealt out to the ranks.

    Args:
        heads: query heads.
        key_heads: heads of keys and values, fewer where queries share them.
        size: ranks that share a sequence.
        of: whose heads these are, for the message.

    Raises:
        ValueError: `heads` is not divisible by `size`, or neither of `key_heads` and `size` by the other.

    Example:
        >>> check_heads(32, 8, 4)
        >>> check_heads(32, 2, 4)  # each key head goes to two ranks
    """
    if heads % size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
        raise ValueError(
            f"sp_size={size}: {of} has {heads} heads, and {heads} = {heads // size} x {size} + {heads % size}, so they cannot be "
            f"dealt out evenly. Set sp_size to one of {fitting}, or use context parallelism (cp_size), which cuts no heads."
        )
    if key_heads % size and size % key_heads:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
        raise ValueError(
            f"sp_size={size}: {of} has {key_heads} key and value heads; they can be dealt out if {key_heads} is a multiple of "
            f"{size}, and repeated if {size} is a multiple of {key_heads}. Set sp_size to one of {fitting}, or use context "
            "parallelism (cp_size), which cuts no heads."
        )


def _check_config(model: nn.Module, size: int) -> None:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    heads = getattr(config, "num_attention_heads", None)
    if heads is not None:
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        check_heads(heads, key_heads, size, type(model).__name__)


def _fixed_length(handler: "DeepSpeedSequenceParallelConfig | None") -> int | None:
    """Return the length that every sequence must have, and say which settings have no use here."""
    if handler is None:
        return None
    if handler.sp_attn_implementation not in (None, "sdpa"):
        raise ValueError(
            f"sp_handler.sp_attn_implementation is {handler.sp_attn_implementation!r}, but sp_backend='torch' works through "
            "scaled_dot_product_attention alone. Set it to 'sdpa' or leave it out, or use sp_backend='deepspeed'."
        )
    if handler.sp_seq_length is not None and handler.sp_seq_length_is_variable:
        warnings.warn(
            f"sp_handler.sp_seq_length={handler.sp_seq_length} has no effect with sp_backend='torch' while "
            "sp_seq_length_is_variable is True. Set that to False to have the length checked.",
            stacklevel=2,
        )
    return None if handler.sp_seq_length_is_variable else handler.sp_seq_length


class SequenceRegion(Region):
    """Attention in which every rank has the whole sequence for some of the heads; on any device.

    Args:
        part: the mesh dimension.
        length: tokens that every sequence must have; None means any number.
    """

    def __init__(self, part: Any, length: int | None = None) -> None:
        super().__init__("sp", part, _attend)
        self.length = length

    def _odd_length(self, length: int) -> str | None:
        if self.length is not None and length != self.length:
            return (
                f"The sequence has {length} tokens, but sp_handler says sp_seq_length={self.length} for all. Pad or cut it, or set "
                "sp_seq_length_is_variable=True."
            )
        return super()._odd_length(length)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    region: Region,
) -> Tensor:
    return ulysses(
        query, key, value, dropout=dropout, causal=causal, scale=scale, gqa=gqa, group=region.group, size=region.size
    )


def ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any,
    size: int,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    gqa: bool = False,
) -> Tensor:
    """Attend over the whole sequence with a part of the heads, and hand the result back in parts of the sequence.

    All ranks of the group call it, with shards of the same shape. Dropout is drawn on each rank for its heads.

    Args:
        query: [batch, heads, length / size, width].
        key: [batch, key heads, length / size, width].
        value: [batch, key heads, length / size, value width].
        group: the ranks that share the sequence.
        size: how many they are.
        dropout: probability that a weight is zeroed.
        causal: whether a query sees only keys at its place and before.
        scale: factor of the scores; None means 1 / sqrt(width).
        gqa: whether several query heads share a key head.

    Returns:
        [batch, heads, length / size, value width].

    Raises:
        ValueError: tensors without heads, or heads that cannot be dealt out.
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            "Sequence parallelism needs query, key and value of [batch, heads, length, width], but they are "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
        )
    heads, key_heads = query.shape[_HEADS], key.shape[_HEADS]
    check_heads(heads, key_heads, size)
    if key_heads % size:
        # Fewer key heads than ranks: those whose queries share one get a copy each. The gradients of copies add up.
        key, value = (tensor.repeat_interleave(size // key_heads, dim=_HEADS) for tensor in (key, value))
    query, key, value = (exchange(tensor, _HEADS, _LENGTH, group, size) for tensor in (query, key, value))
    out = ATTENTION(query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=gqa)
    return exchange(out, _LENGTH, _HEADS, group, size)
