"""torch's private names that this extension uses, of fake tensors and the fake process group; see `accelerate.runtime.torch_private`."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from accelerate.extensions.reports.torch_private import replaced
from accelerate.runtime.torch_private import is_shape


def completed(tensors: Any) -> Any:
    """Return the result of an operation of `torch.ops.c10d` without its tensors, as a finished one with a future of these."""
    from torch._C._distributed_c10d import _create_work_from_future

    future: torch.futures.Future = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


def join_alone(rank: int, world_size: int, store: Any) -> None:
    """Start torch's fake process group, as one of ranks without the others."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  it registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)


def shapes_only() -> Any:
    """Return torch's mode in which tensors have a shape and no memory; real tensors may be arguments."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools import fake_collectives  # noqa: F401  it lets collectives work on such tensors

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def sharding_for_one() -> Iterator[None]:
    """Let torch shard for one rank of a fake group: `fully_shard` makes a tensor for each rank, to take one of them, and FSDP1 gathers on a GPU."""
    try:
        home = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        tensors = importlib.import_module("torch.distributed._shard.sharded_tensor").ShardedTensor
    except (ImportError, AttributeError):  # slower with thousands of ranks, and FSDP1 saves no checkpoint
        yield
        return

    def parts_of(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
        length = tensor.shape[dim]
        size = max(1, -(-length // count))
        full, rest = divmod(length, size)
        if is_shape(tensor):  # all the same
            parts = [tensor.narrow(dim, 0, size)] * full
        else:
            parts = [tensor.narrow(dim, start, size) for start in range(0, full * size, size)]
        parts += [tensor.narrow(dim, length - rest, rest)] * (rest > 0)
        return parts + [tensor.narrow(dim, 0, 0)] * (count - len(parts))

    on_cpu = (tensors, "_get_preferred_device", lambda tensor: torch.device("cpu"))
    with replaced((home, "_chunk_with_empty", parts_of), on_cpu):
        yield


def reads_value(operator: Any) -> bool:
    """Return whether an operator of torch reads the one value of a tensor, as `item` does."""
    return operator is torch.ops.aten._local_scalar_dense.default


_FACTORIES = "empty empty_strided empty_permuted zeros ones full rand randn new_empty new_empty_strided new_zeros new_ones new_full"


def run_on_shapes(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator. Grouped matrix products have shapes only for bfloat16, and also run for other types (seen on 2.13)."""
    if getattr(operator, "__name__", "") != "_grouped_mm.default" or args[0].dtype == torch.bfloat16:
        return operator(*args, **kwargs)
    narrow = [
        leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf for leaf in args
    ]
    return operator(*narrow, **kwargs).to(args[0].dtype)


def made_as_shape(mode: Any, operator: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor that an operator makes from sizes in `shapes_only`; None for any other operator."""
    if getattr(operator, "namespace", "") != "aten" or operator.__name__.partition(".")[0] not in _FACTORIES.split():
        return None
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as active_modes

    if any(
        type(other) is type(mode) for other in active_modes()
    ):  # DTensor runs the operator in a mode of the same type to learn its result
        return None
    with mode:
        tensor = operator(*args, **kwargs)
    return None if tensor.is_meta else tensor
