"""Sequences shared by ranks: context parallelism exchanges keys and values; Ulysses exchanges heads for tokens.

In both, each rank holds a part of every sequence, and attention sees the full sequence. Labels are shifted before a
sequence is sharded, and losses are weighted by tokens afterwards.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from accelerate.base._warn import warn_user
from accelerate.extensions.sequence import models
from accelerate.extensions.sequence.region import ATTENTION, NO_MASK, Region, replace
from accelerate.runtime import torch_private
from accelerate.strategies import mesh

if TYPE_CHECKING:
    from accelerate.extensions.sequence.config import DeepSpeedSequenceParallelConfig

logger = logging.getLogger(__name__)

_HEADS, _LENGTH = 1, 2  # dimensions of query, key and value


def prepare(accelerator: Any, axis: str, objects: Sequence[Any]) -> tuple[Any, ...]:
    """Prepare models and the Accelerator for sequences sharded over the mesh's `axis`, "cp" or "sp".

    ValueError: a model cannot be exact on parts, its heads cannot be divided, or a setting is only for DeepSpeed.
    ImportError: this torch has no context parallelism for the device.

    Collective: call on every rank.

    Source: https://pytorch.org/tutorials/prototype/context_parallel.html, DeepSpeed Ulysses (arXiv 2309.14509)
    """
    layout = accelerator.parallelism_config
    new_models = [item for item in objects if isinstance(item, nn.Module)]
    for model in new_models:
        models.check(model, axis)
        if axis == "sp":
            for inner in models.outermost(model):
                _check_config(inner, layout.sp_size)
    if not isinstance(accelerator._cp_context, Region):
        part = mesh.submesh(accelerator.torch_device_mesh, axis)
        if part is None:
            raise ValueError(f"The device mesh has no dimension {axis!r}. Set {axis}_size above 1.")
        if axis == "sp":
            accelerator._cp_context = SequenceRegion(part, _fixed_length(layout.sp_handler))
        elif accelerator.device.type == "cpu":
            if layout.cp_handler.cp_comm_strategy != "allgather":
                logger.warning("On CPU context parallelism gathers keys and values: cp_comm_strategy has no effect.")
            # torch gives two parts to each rank; a length that fails on an accelerator must also fail on a CPU.
            accelerator._cp_context = GatheringRegion("cp", part, cuts=2)
        else:
            accelerator._cp_context = TorchRegion(part, layout.cp_handler.cp_comm_strategy)
    for model in new_models:
        models.attach(model, accelerator._cp_context)
    return tuple(objects)


def _prepare_cp(accelerator: Any, *args: Any) -> tuple[Any, ...]:
    """Let the attention of the models among the objects work on parts of sequences.

    Collective: call on every rank.
    """
    return prepare(accelerator, "cp", args)


# -- context parallelism ---------------------------------------------------------------------------------------------


class GatheringRegion(Region):
    """Context parallelism that gathers the keys and values of all ranks: for CPUs, where it is the reference, and for packed rows."""

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None, gqa: bool
    ) -> Tensor:
        if dropout > 0:
            raise ValueError(
                f"dropout_p={dropout} in scaled_dot_product_attention: context parallelism on CPU, or of packed documents, would draw "
                "other numbers than over a full sequence. Set the attention dropout of the model to 0 (`attention_dropout`, "
                "`attn_pdrop` or `attention_probs_dropout_prob` of a transformers config)."
            )
        together = torch.cat((key, value), dim=-1)
        copies = together.expand(self.size, *together.shape)
        together = torch.cat(_all_to_all(copies, self.group).unbind(0), dim=-2)
        key, value = together.split((key.shape[-1], value.shape[-1]), dim=-1)
        if self._documents is not None:
            return self._documents.attend(query, key, value, causal, scale=scale, enable_gqa=gqa)
        mask = None
        if causal:
            places = torch.arange(query.shape[-2], device=query.device) + self.rank * query.shape[-2]
            mask = places[:, None] >= torch.arange(key.shape[-2], device=query.device)
        return ATTENTION(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)


class TorchRegion(GatheringRegion):
    """Context parallelism by torch itself, for accelerators: it deals the sequence out and does the attention, but for packed rows."""

    def __init__(self, part: Any, strategy: str) -> None:
        super().__init__("cp", part, cuts=2)
        self.strategy = strategy
        self._context, self._set_rotation, self._options = _torch_parts()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_context": None, "_set_rotation": None, "_options": None}

    @contextmanager
    def _cut(self, buffers: list[Tensor], dims: list[int], length: int) -> Iterator[None]:
        # torch resizes the memory itself, also that of a larger tensor which a buffer is a view of: give it copies. Our caller
        # restores the buffers, so torch need not keep copies.
        for buffer in buffers:
            replace(buffer, buffer.data.clone(memory_format=torch.contiguous_format))
        # One setting per process, and other Accelerators may need another. Balanced parts are only for causal attention.
        self._set_rotation(self.strategy)
        self._options.enable_load_balance = self.cuts > 1
        # torch counts dimensions from the front.
        front = [dim % buffer.dim() for dim, buffer in zip(dims, buffers, strict=True)]
        with self._context(self.mesh, buffers=buffers, buffer_seq_dims=front, no_restore_buffers=set(buffers)):
            yield

    def _renamed(self) -> AbstractContextManager[None]:
        return nullcontext()  # torch has replaced the name itself

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("attn_mask", args[3] if len(args) > 3 else None) is not None:
            raise ValueError(NO_MASK.format(what=self.what))
        if self.cuts > 1 and not kwargs.get("is_causal", args[5] if len(args) > 5 else False):
            raise ValueError(
                f"scaled_dot_product_attention was called with is_causal=False under {self.what}, whose sequences are dealt out for causal "
                "attention. Set `is_causal = False` on the module that calls it, before `prepare`, and they are cut one after the other."
            )
        query = args[0] if args else kwargs["query"]
        if self._documents is not None:
            return self._of_documents(query, args, kwargs)
        if type(query) is Tensor:
            # The caller imported the name before torch replaced it: the name now refers to the function that shards the tensors.
            return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
        return ATTENTION(*args, **kwargs)

    def _of_documents(self, query: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Attend within documents on this rank's tensors; a call by name would get torch's DTensors of them."""

        def local(value: Any) -> Any:
            return value.to_local() if hasattr(value, "to_local") else value

        out = super()._attention(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
        if not hasattr(query, "to_local"):
            return out
        return type(query).from_local(out, query.device_mesh, query.placements, run_check=False)

    def _no_buffers(self) -> str | None:
        return "maybe_context_parallel got no buffers; torch's context parallelism needs at least the input to shard."


def _torch_parts() -> tuple[Callable, Callable, Any]:
    """Return torch's context manager, the setter of its rotation, and its options, which have no setter."""
    from torch.distributed.tensor.experimental import context_parallel

    return context_parallel, torch_private.set_rotate_method, torch_private.cp_options


def _all_to_all(parts: Tensor, group: Any) -> Tensor:
    """Give rank i of a group the i-th of the parts, and return the parts of all ranks for this one, differentiably."""
    return torch_private.all_to_all_single_autograd(parts.contiguous(), None, None, group)


# -- sequence parallelism -------------------------------------------------------------------------------------------


def check_heads(heads: int, key_heads: int, size: int, of: str = "attention") -> None:
    """Refuse (ValueError) heads that cannot be dealt out to `size` ranks; of few key heads, some are copied."""
    divisors = [ranks for ranks in range(1, heads + 1) if heads % ranks == 0]
    fitting = [ranks for ranks in divisors if key_heads % ranks == 0 or ranks % key_heads == 0]
    if size not in fitting:
        raise ValueError(
            f"sp_size={size}: {of} has {heads} heads and {key_heads} heads of keys and values, which cannot be dealt out evenly. "
            f"Set sp_size to one of {fitting}, or use context parallelism (cp_size), which cuts no heads."
        )


def _check_config(model: nn.Module, size: int) -> None:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    heads = getattr(config, "num_attention_heads", None)
    if heads is not None:
        check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, size, type(model).__name__)


def _fixed_length(handler: "DeepSpeedSequenceParallelConfig | None") -> int | None:
    """Return the length that every sequence must have; refuse, or warn of, settings that have no use here."""
    if handler is None:
        return None
    if handler.sp_attn_implementation not in (None, "sdpa"):
        raise ValueError(
            f"sp_handler.sp_attn_implementation is {handler.sp_attn_implementation!r}, but sp_backend='torch' works through "
            "scaled_dot_product_attention only. Set it to 'sdpa' or remove it, or use sp_backend='deepspeed'."
        )
    if handler.sp_seq_length is not None and handler.sp_seq_length_is_variable:
        warn_user(
            f"sp_handler.sp_seq_length={handler.sp_seq_length} has no effect with sp_backend='torch' while "
            "sp_seq_length_is_variable is True. Set that to False to have the length checked."
        )
    return None if handler.sp_seq_length_is_variable else handler.sp_seq_length


class SequenceRegion(Region):
    """Attention in which each rank has the full sequence (`length` tokens, if set) for some of the heads."""

    def __init__(self, part: Any, length: int | None = None) -> None:
        super().__init__("sp", part)
        self.length = length

    def _odd_length(self, length: int) -> str | None:
        if self.length is not None and length != self.length:
            return (
                f"The sequence has {length} tokens, but sp_handler says sp_seq_length={self.length}. Pad or cut it, or set "
                "sp_seq_length_is_variable=True."
            )
        return super()._odd_length(length)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None, gqa: bool
    ) -> Tensor:
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            raise ValueError(
                "Sequence parallelism needs query, key and value of [batch, heads, length, width], but they are "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
            )
        heads, key_heads = query.shape[_HEADS], key.shape[_HEADS]
        check_heads(heads, key_heads, self.size)
        if key_heads % self.size:
            # Fewer key heads than ranks: those whose queries share one get a copy each. The gradients of copies add up.
            key, value = (tensor.repeat_interleave(self.size // key_heads, dim=_HEADS) for tensor in (key, value))
        query, key, value = (self._exchange(tensor, _HEADS, _LENGTH) for tensor in (query, key, value))
        if self._documents is not None:
            out = self._documents.attend(query, key, value, causal, dropout_p=dropout, scale=scale, enable_gqa=gqa)
        else:
            out = ATTENTION(query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=gqa)
        return self._exchange(out, _LENGTH, _HEADS)

    def _exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        """Shard the dimension `split`, which is complete here, and gather the dimension `join`, which is sharded."""
        parts = torch.stack(tensor.chunk(self.size, dim=split))
        return torch.cat(_all_to_all(parts, self.group).unbind(0), dim=join)


# -- labels and losses -----------------------------------------------------------------------------------------------


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Move every label to the position whose output predicts it. Call it before a sequence is sharded.

    A causal language model predicts token i + 1 at position i. Shifted inside a shard, the last position of every shard would
    lose its label, which is the first token of the next shard.

    Args:
        labels: [..., length], integers, of the full sequence.
        ignore_index: the label of the last position, which predicts nothing.

    Returns:
        A new tensor of the same shape; pass it to a transformers model as `shift_labels=`.

    Raises:
        ValueError: `labels` has no dimension.

    Example:
        >>> shift_labels(torch.tensor([[5, 6, 7, 8]]))
        tensor([[   6,    7,    8, -100]])
    """
    if labels.dim() == 0:
        raise ValueError("labels is a scalar; it must be [..., length], such as [batch, length].")
    shifted = torch.full_like(labels, ignore_index, memory_format=torch.contiguous_format)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def aggregate_loss(loss: Tensor, num_tokens: Tensor | int, group: Any = None) -> Tensor:
    """Turn the mean over this rank's tokens into the mean over the tokens of all ranks, differentiably.

    If shards hold different numbers of counted tokens (padding, masked prompts), the plain mean over ranks weighs a token of a
    short shard more. The result is the mean over all tokens on every rank. Its gradient is for strategies that *average*
    gradients over ranks, such as DDP and FSDP. It is this rank's share times the number of ranks of the group, so that the
    average is the gradient of the full mean. Do not use it if gradients are summed.

    Collective: call on every rank of the group.

    Args:
        loss: scalar, the mean over this rank's tokens; its value without tokens (nan) does not matter.
        num_tokens: the number of these tokens, an integer or a tensor of one, on any device.
        group: process group, or mesh of one dimension, over which the mean is taken; None means all processes. With the
            sequence's own group, `accelerator.torch_device_mesh["cp"]`, every batch counts the same, as under DDP.

    Returns:
        Scalar of the type of `loss`, equal on all ranks of the group.

    Raises:
        ValueError: `loss` is not a scalar.

    Example:
        >>> with_one_process = aggregate_loss(torch.tensor(2.5), num_tokens=8)
        >>> with_one_process.item()
        2.5

        Under context parallelism, with `shifted = shift_labels(labels)` among the buffers::

            mean = F.cross_entropy(model(ids).flatten(0, 1), shifted.flatten())
            loss = aggregate_loss(mean, (shifted != -100).sum(), group=accelerator.torch_device_mesh["cp"])
    """
    if loss.numel() != 1:
        raise ValueError(f"loss has the shape {tuple(loss.shape)}; it must be a scalar, the mean over own tokens.")
    group = group.get_group() if hasattr(group, "get_group") else group
    size = distributed.get_world_size(group) if distributed.is_initialized() else 1
    # float32 counts exactly up to 16 million tokens only; MPS has nothing wider.
    precise = torch.float32 if loss.device.type == "mps" else torch.float64
    tokens = torch.as_tensor(num_tokens, device=loss.device).to(precise)
    loss = torch.where(tokens.reshape(loss.shape) > 0, loss, torch.zeros_like(loss))
    sums = torch.stack((loss.detach().to(precise).reshape(()) * tokens.reshape(()), tokens.reshape(())))
    if size > 1:
        distributed.all_reduce(sums, group=group)
    share = loss * (tokens.reshape(loss.shape) * size / sums[1]).to(loss.dtype)
    return share + ((sums[0] / sums[1]).to(loss.dtype) - share).detach()
