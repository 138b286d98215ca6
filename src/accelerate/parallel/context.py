"""Context parallelism: each rank holds a part of every sequence, and attention sees the whole of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerate.parallel import attention, mesh, models
from accelerate.parallel.loss import aggregate_loss, shift_labels
from accelerate.parallel.region import ATTENTION, NO_MASK, Region, replace

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

__all__ = ["TorchRegion", "aggregate_loss", "prepare", "shift_labels"]

_EXPERIMENTAL = "torch.distributed.tensor.experimental"
# Where torch has kept the choice of the rotation: 2.7 to 2.13 have the first, the second is what it leads to since 2.9.
_ROTATION_HOMES = (f"{_EXPERIMENTAL}._attention", f"{_EXPERIMENTAL}._context_parallel._attention")


def prepare(accelerator: "Accelerator", objects: Sequence[Any]) -> tuple[Any, ...]:
    """Get models and the Accelerator ready for sequences that are cut. All ranks call it, from `Accelerator.prepare`.

    Models of transformers get hooks that act inside the context alone: they refuse what would be wrong on a part of a sequence,
    supply positions, and leave masks out. `accelerator.maybe_context_parallel` works from here on.

    Args:
        accelerator: its device mesh is built, and has a dimension "cp".
        objects: what `prepare` was given.

    Returns:
        The same objects.

    Raises:
        ValueError: a model whose attention cannot be exact on parts, such as attn_implementation="eager".
        ImportError: this torch has no context parallelism for the device.

    Source: https://pytorch.org/tutorials/prototype/context_parallel.html
    """
    found = [item for item in objects if isinstance(item, nn.Module)]
    for model in found:
        models.check(model, "cp")
    if not isinstance(accelerator._cp_context, Region):
        accelerator._cp_context = _region(accelerator)
    for model in found:
        models.attach(model, accelerator._cp_context)
    return tuple(objects)


def _region(accelerator: "Accelerator") -> Region:
    part = mesh.submesh(accelerator.torch_device_mesh, "cp")
    if part is None:
        raise ValueError(
            f"cp_size={accelerator.parallelism_config.cp_size}, but the device mesh has no dimension 'cp'. Set cp_size above 1."
        )
    strategy = accelerator.parallelism_config.cp_handler.cp_comm_strategy
    if accelerator.device.type != "cpu":
        return TorchRegion(part, strategy)
    # torch deals out two parts to each rank; a length that would fail on an accelerator shall fail on a laptop, too.
    how = attention.by_ring if strategy == "alltoall" else attention.by_gathering
    return Region("cp", part, partial(_attend, how), cuts=2)


def _attend(
    how: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    region: Region,
) -> Tensor:
    attention.check(query, key, value, dropout, gqa)
    return how(query, key, value, causal, scale, region)


class TorchRegion(Region):
    """Context parallelism by torch itself, for accelerators: it deals the sequence out, and its kernels do the attention.

    Args:
        part: the mesh dimension.
        strategy: how keys and values travel, "allgather" or "alltoall".
    """

    def __init__(self, part: Any, strategy: str) -> None:
        super().__init__("cp", part, cuts=2)
        self.strategy = strategy
        self._context, self._set_rotation = _torch_parts()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_context": None, "_set_rotation": None}

    @contextmanager
    def _cut(self, buffers: list[Tensor], dims: list[int], length: int) -> Iterator[None]:
        # torch resizes the memory itself, also that of a larger tensor which a buffer is a view of: give it copies. Putting
        # back is our caller's work, so torch need not keep copies of its own.
        for buffer in buffers:
            replace(buffer, buffer.data.clone(memory_format=torch.contiguous_format))
        self._set_rotation(self.strategy)  # one setting for the process, and other Accelerators may want another
        # torch counts dimensions from the front.
        front = [dim % buffer.dim() for dim, buffer in zip(dims, buffers, strict=True)]
        with self._context(self.mesh, buffers=buffers, buffer_seq_dims=front, no_restore_buffers=set(buffers)):
            yield

    def _renamed(self) -> AbstractContextManager[None]:
        return nullcontext()  # torch has replaced the name itself

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("attn_mask", args[3] if len(args) > 3 else None) is not None:
            raise ValueError(NO_MASK.format(what=self.what))
        query = args[0] if args else kwargs["query"]
        if type(query) is Tensor:
            # Called by a name that was imported before torch replaced it: what is under the name now cuts the tensors up.
            return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
        return ATTENTION(*args, **kwargs)

    def _no_buffers(self) -> str | None:
        return "maybe_context_parallel got no buffers; torch's context parallelism needs at least the input that it shall cut."


def _torch_parts() -> tuple[Callable, Callable]:
    """Return torch's context manager and the setter of its rotation, wherever this version keeps them."""
    context = getattr(import_module(_EXPERIMENTAL), "context_parallel", None)
    for home in _ROTATION_HOMES:
        try:
            setter = getattr(import_module(home), "set_rotate_method", None)
        except ImportError:
            continue
        if context is not None and setter is not None:
            return context, setter
    raise ImportError(
        f"torch {torch.__version__} has no {_EXPERIMENTAL}.context_parallel with set_rotate_method. Install torch 2.7 to 2.13, or "
        "set cp_size=1."
    )
