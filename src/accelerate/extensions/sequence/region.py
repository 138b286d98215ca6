"""The region in which ranks share a sequence: tensors are sharded on entry, attention is exact inside, and tensors are restored.

A region belongs to one Accelerator and is entered once for every batch.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from accelerate.comm.torch_dist import same_on_all
from accelerate.extensions.sequence.documents import Documents
from accelerate.extensions.sequence.torch_private import skip_when_compiling
from accelerate.runtime import torch_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ATTENTION = torch_private.scaled_dot_product_attention
WHAT = {"cp": "context parallelism", "sp": "sequence parallelism"}
NO_MASK = (
    "attn_mask was given to scaled_dot_product_attention under {what}, where each rank has a part of the rows and columns. A mask "
    "of that part does not describe the full one. Pass attn_mask=None; padding at the right needs no mask if is_causal=True."
)


@dataclass
class Active:
    """The state between entry and exit: tokens of the full sequence, and this rank's positions in it; None without buffers.

    Attributes:
        buffers: the sharded tensors.
        documents: the documents of attention in the models called so far; None if rows are unpacked, `...` before a call.
    """

    length: int | None
    positions: Tensor | None
    buffers: Sequence[Tensor] = ()
    documents: Any = ...

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a buffer, or a view of an unsharded one."""
        return any(tensor.data_ptr() == buffer.data_ptr() for buffer in self.buffers)

    def separate(self, documents: Documents | None, name: str) -> None:
        """Set the documents; ValueError if they differ from those of an earlier call, which backward repeats."""
        before = getattr(self.documents, "bounds", None)
        if self.documents is not ... and getattr(documents, "bounds", None) != before:
            raise ValueError(
                f"{name} was called with other documents (by position_ids) than the model before it in the same maybe_context_parallel. "
                "Pass all of them the same position_ids, or enter the context once for each."
            )
        self.documents = documents


class Attention(TorchFunctionMode):
    """Sends each `scaled_dot_product_attention` of this thread through `attend`, whatever name it is called by.

    The name in `torch.nn.functional` is also replaced. A replaced name misses earlier imports and compiled graphs. A mode is
    off while it handles a function, such as `backward`, in which checkpointed activations are recomputed.
    """

    def __init__(self, attend: Callable[..., Tensor], what: str) -> None:
        super().__init__()
        self.attend = attend
        self.what = what

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Replace attention, and let everything else through."""
        if func is ATTENTION:
            return self.attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise ValueError(
                f"torch.nn.MultiheadAttention was called under {self.what}, and may attend within its shard. Write the attention "
                "with torch.nn.functional.scaled_dot_product_attention."
            )
        return func(*args, **(kwargs or {}))


class Region:
    """A factory of contexts, called for each batch with the tensors to shard.

    A subclass computes exact attention over the full sequence, of which each rank gets `cuts` equal parts.

    Collective: enter on every rank of the group.
    """

    def __init__(self, axis: str, mesh: "DeviceMesh", cuts: int = 1) -> None:
        self.axis = axis
        self.what = WHAT[axis]
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.cuts = cuts
        self.active: Active | None = None
        self._compared = False
        self._mode = Attention(self._attention, self.what)

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be pickled or copied, and no copy is inside the region.
        dropped = {"mesh": None, "group": None, "active": None, "_mode": None, "_compared": False}
        return {**self.__dict__, **dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._mode = Attention(self._attention, self.what)

    def __deepcopy__(self, memo: dict) -> "Region":
        return self  # a copied model shares its sequences with the same ranks

    @contextmanager
    def __call__(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
    ) -> Iterator[None]:
        """Return the context for one batch; `no_restore_buffers` stay sharded, which frees the full ones at once."""
        buffers, dims, lasting = list(buffers or ()), list(buffer_seq_dims or ()), list(no_restore_buffers or ())
        if self.group is None:
            raise RuntimeError(f"This {self.what} came from a pickle, without its group. Call `prepare` again.")
        if self.active is not None:
            raise RuntimeError("maybe_context_parallel was entered inside itself. Name all tensors at the outer one.")
        self._check(buffers, dims, lasting)
        if not buffers:
            with self._attending(Active(None, None)):
                yield
            return
        length = buffers[0].shape[dims[0]]
        # Cut like the rest, the places tell every model where its tokens are, however they are dealt out.
        places = torch.arange(length, device=buffers[0].device).unsqueeze(0)
        restored = [buffer for buffer in buffers if not _among(buffer, lasting)]
        with (
            _put_back(restored),
            self._cut([*buffers, places], [*dims, 1], length),
            self._attending(Active(length, places, buffers)),
        ):
            yield

    @contextmanager
    def _attending(self, active: Active) -> Iterator[None]:
        # torch.compile must not compile the handler of operations that run between two graphs.
        skip_when_compiling(Attention.__torch_function__.__code__)
        self.active = active
        try:
            with self._mode, self._renamed():
                yield
        finally:
            self.active = None

    @contextmanager
    def _renamed(self) -> Iterator[None]:
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._attention
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before

    @contextmanager
    def _cut(self, buffers: list[Tensor], dims: list[int], length: int) -> Iterator[None]:
        share = length // self.size
        for buffer, dim in zip(buffers, dims, strict=True):
            part = buffer.data.narrow(dim, self.rank * share, share)
            replace(buffer, part.clone(memory_format=torch.contiguous_format))
        yield

    @torch.compiler.disable  # a compiled graph is cut here: these messages are not to be traced
    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Replace `scaled_dot_product_attention`, with its arguments."""
        if attn_mask is not None:
            raise ValueError(NO_MASK.format(what=self.what))
        # Called by its name, the mode is still on, and would catch the plain attention within.
        with torch_private.DisableTorchFunction():
            return self._attend(query, key, value, dropout_p, is_causal, scale, enable_gqa)

    @property
    def _documents(self) -> Documents | None:
        """The documents of attention, if rows are packed."""
        documents = None if self.active is None else self.active.documents
        return None if documents is ... else documents

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None, gqa: bool
    ) -> Tensor:
        """Attend over the full sequence. Tensors are [batch, heads, length / size, width], of equal shapes on all ranks."""
        raise NotImplementedError

    # -- checks, before anything is changed ----------------------------------------------------------------------

    def _check(self, buffers: list[Any], dims: list[Any], lasting: list[Any]) -> None:
        """Refuse tensors on all ranks if one cannot shard them, or if they differ; off the CPU only at the first entry."""
        problem = self._problem(buffers, dims, lasting)
        on_cpu = all(not isinstance(buffer, Tensor) or buffer.device.type == "cpu" for buffer in buffers)
        seen: list[Any] = [(problem, None)]
        if on_cpu or not self._compared:
            local_content = (problem, None if problem else [_content(buffer) for buffer in buffers])
            if not same_on_all(local_content, self.mesh.device_type, self.group):
                seen = [None] * self.size
                distributed.all_gather_object(seen, local_content, group=self.group)
            self._compared = True
        if first_problem := next((other for other, _ in seen if other), None):
            raise ValueError(first_problem)
        for rank, (_, content) in enumerate(seen):
            if content != seen[0][1]:
                raise ValueError(
                    f"The buffers of rank {rank} of {self.axis} are not those of rank 0, but ranks that share a sequence must "
                    f"have the same batch (shape, type, checksum of integers: {content} and {seen[0][1]}). Let the Accelerator "
                    "prepare the loader, or give these ranks the same data and random numbers."
                )

    def _problem(self, buffers: list[Any], dims: list[Any], lasting: list[Any]) -> str | None:
        if len(buffers) != len(dims):
            return f"There are {len(buffers)} buffers and {len(dims)} buffer_seq_dims; each needs one dimension."
        lengths = []
        for place, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
            if not isinstance(buffer, Tensor):
                return f"buffers[{place}] is a {type(buffer).__name__}; it must be a tensor."
            shape = tuple(buffer.shape)
            if isinstance(buffer, torch.nn.Parameter) or buffer.requires_grad:
                return (
                    f"buffers[{place}] of shape {shape} requires a gradient, and cannot be cut in place. Give the inputs of the "
                    "model; tensors computed from them inside the context are sharded already."
                )
            if any(buffer is other for other in buffers[:place]):
                return f"buffers[{place}] of shape {shape} is in the list twice, and would be cut twice."
            if not isinstance(dim, int) or not -buffer.dim() <= dim < buffer.dim():
                return f"buffer_seq_dims[{place}] is {dim!r}, but buffers[{place}] has the shape {shape}."
            lengths.append(shape[dim])
        if len(set(lengths)) > 1:
            return f"The buffers have lengths {lengths} along buffer_seq_dims {dims}; all must be the sequence's."
        if any(not _among(buffer, buffers) for buffer in lasting):
            return "no_restore_buffers has a tensor that is not in buffers; it must be one of them, the same object."
        return self._odd_length(lengths[0]) if lengths else self._no_buffers()

    def _odd_length(self, length: int) -> str | None:
        whole = self.cuts * self.size
        if length % whole == 0 and length > 0:
            return None
        more = -length % whole or whole
        return (
            f"The sequence has {length} tokens, which is not divisible by {whole}, {self.cuts} x {self.axis}_size={self.size}"
            f"{' (causal attention is balanced by two parts for each rank)' if self.cuts > 1 else ''}: {length} = "
            f"{length // whole} x {whole} + {length % whole}. Pad it by {more} to {length + more}, or cut it to "
            f"{length // whole * whole}."
        )

    def _no_buffers(self) -> str | None:
        return None


def _among(buffer: Any, others: list[Any]) -> bool:
    return any(buffer is other for other in others)  # `in` would compare tensors by value


def _content(buffer: Tensor) -> tuple[tuple[int, ...], str, int | None]:
    """Return what must be the same on all ranks: shape, type, and for integers a checksum."""
    if buffer.is_floating_point() or buffer.is_complex():
        return tuple(buffer.shape), str(buffer.dtype), None
    return tuple(buffer.shape), str(buffer.dtype), zlib.crc32(buffer.detach().cpu().contiguous().numpy())


def replace(buffer: Tensor, content: Tensor) -> None:
    """Give a tensor other content and shape, so that a backward that still needs the old content fails."""
    buffer.data = content
    if not buffer.is_inference():
        torch.autograd.graph.increment_version(buffer)


@contextmanager
def _put_back(buffers: list[Tensor]) -> Iterator[None]:
    """Give tensors the memory that they had on entry, whatever happens; views and expanded tensors included."""
    originals = [buffer.data for buffer in buffers]
    try:
        yield
    finally:
        for buffer, original in zip(buffers, originals, strict=True):
            replace(buffer, original)
