"""Clipping of gradients on any device meshes, with the norm that one process would compute.

A sharded gradient (a DTensor) has a part of its elements on each rank. Each rank first sums the p-th powers of its local
elements. Then one number per process group is exchanged, for any number of gradients, meshes and placements.

Let A, B, ... be the groups (one per mesh dimension that shards something). Each rank adds up the power sums of its
gradients, each divided by the sizes of the groups that hold copies of it, and all-reduces the result over A, then over B,
and so on. Summing copies that were divided by their count gives one copy. Every rank receives the same sums, so all end
with the same bits and scale by the same factor, and replicated parameters stay equal.
"""

import math
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Summed and compared in double precision where the device and its collectives have it.
_DOUBLE = ("cpu", "cuda")


class _Gradients:
    """Gradients sorted by how they are cut, and the process groups that exchange sums of them.

    Attributes:
        layouts: local gradients with elements by device and dtype, for each set of groups that hold parts.
        groups: name of each group that shards a parameter or gradient -> the group and its mesh, in parameter order.
        device: where the parameters' gradients are; None without any.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.layouts: dict[tuple[str, ...], dict[Any, list[torch.Tensor]]] = {(): {}}
        self.groups: dict[str, tuple[ProcessGroup, DeviceMesh]] = {}
        self.device: torch.device | None = None
        self.double = False
        self._cuts: dict[Any, tuple[str, ...]] = {}
        # While the module is not imported no tensor can be a DTensor, and importing it is slow.
        module = sys.modules.get("torch.distributed.tensor")
        kind = module.DTensor if module is not None else ()
        for parameter in parameters:
            gradient, cut = parameter.grad, ()
            if gradient is None:
                # Another rank may have a gradient for it, and then the group exchanges: so this one has to take part.
                if parameter.requires_grad and isinstance(parameter, kind):
                    self._cut(parameter)
                continue
            if isinstance(gradient, kind):
                if any(placement.is_partial() for placement in gradient.placements):
                    gradient = parameter.grad = _sum_partials(
                        gradient, parameter if isinstance(parameter, kind) else None
                    )
                cut, gradient = self._cut(gradient), _local(gradient)
            self.device = self.device or gradient.device
            self.double = self.double or gradient.dtype == torch.float64
            if gradient.numel():  # a short dimension leaves ranks without elements, and an empty tensor has no norm
                self.layouts[cut].setdefault((gradient.device, gradient.dtype), []).append(gradient)

    def _cut(self, tensor: Any) -> tuple[str, ...]:
        """Return the names of the groups that hold parts of a tensor, and note them."""
        mesh, placements = tensor.device_mesh, tensor.placements
        key = id(mesh), placements
        if key not in self._cuts:
            names = []
            for dimension, placement in enumerate(placements):
                # Strided shards, which FSDP2 over tensor parallelism makes, do not answer to `is_shard`.
                if placement.is_replicate() or placement.is_partial() or mesh.size(dimension) == 1:
                    continue
                group = mesh.get_group(dimension)
                names.append(group.group_name)
                self.groups.setdefault(group.group_name, (group, mesh))
            self._cuts[key] = tuple(names)
            self.layouts.setdefault(tuple(names), {})
        return self._cuts[key]

    def reduction_device(self) -> torch.device:
        """Return where the sums are combined: where the first group exchanges them, else where the gradients are."""
        meshes = [mesh for _, mesh in self.groups.values()]
        return _device_of(meshes[0]) if meshes else self.device or torch.device("cpu")

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Iterate over the lists of local gradients of one device and dtype."""
        for parts in self.layouts.values():
            yield from parts.values()


def _device_of(mesh: "DeviceMesh") -> torch.device:
    """Return this rank's device of a mesh, which offloaded gradients are not on, but its collectives are."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _sum_partials(gradient: Any, parameter: Any | None) -> Any:
    """Return a gradient whose ranks hold summands (Partial) with the sum carried out, laid out as its parameter is."""
    from torch.distributed.tensor import Replicate, Shard

    target = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    if parameter is not None and parameter.device_mesh == gradient.device_mesh:
        plain = all(isinstance(item, (Shard, Replicate)) for item in (*parameter.placements, *target))
        target = list(parameter.placements) if plain else target
    return gradient.redistribute(placements=target)


def _local(gradient: Any) -> torch.Tensor:
    local = gradient.to_local()
    return local.wait() if hasattr(local, "wait") else local  # a collective may still be under way


def _power_sum(parts: Iterable[list[torch.Tensor]], norm_type: float, like: torch.Tensor) -> torch.Tensor:
    """Return the sum of |x|^p (the maximum of |x| for infinity) of local elements, as one element like another."""
    sums = [like.new_zeros(())]
    for tensors in parts:
        wide = tensors[0].dtype if tensors[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(tensors, norm_type, dtype=wide)).to(like)
        sums.append(norms.max() if norm_type == math.inf else norms.pow(norm_type).sum())
    stacked = torch.stack(sums)
    return stacked.max() if norm_type == math.inf else stacked.sum()


def _total_norm(gradients: _Gradients, norm_type: float, stages: "ProcessGroup | None" = None) -> torch.Tensor:
    """Return the norm over all ranks, copies counted once; nan if an element is nan anywhere."""
    import torch.distributed as dist

    device = gradients.reduction_device()
    double = device.type in _DOUBLE
    like = torch.zeros((), device=device, dtype=torch.float64 if double else torch.float32)
    largest = norm_type == math.inf
    if largest:
        total = _power_sum(gradients, norm_type, like)
        # The maximum of collectives may drop a nan, so a separate mark is sent for it.
        total = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), total.isnan().to(total.dtype)])
    else:
        total = like
        for names, parts in gradients.layouts.items():
            copies = math.prod(group.size() for name, (group, _) in gradients.groups.items() if name not in names)
            total = total + _power_sum(parts.values(), norm_type, like) / copies
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for group, mesh in gradients.groups.values():
        total = total.to(_device_of(mesh))
        dist.all_reduce(total, op=operation, group=group)
    if stages is not None:
        dist.all_reduce(total, op=operation, group=stages)
    total = torch.where(total[1] > 0, math.nan, total[0]) if largest else total.pow(1.0 / norm_type)
    return total.to(device=gradients.device, dtype=torch.float64 if gradients.double and double else torch.float32)


@torch.no_grad()
def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    stages: "ProcessGroup | None" = None,
    repeated: Collection[int] = (),
) -> torch.Tensor:
    """Scale gradients in place to a total norm of at most `max_norm`; return the full model's norm before.

    Plain tensors and DTensors on any meshes may be mixed; replicated tensors count once. A `Partial` gradient is summed first
    and replaced by the sum. Every rank passes the same parameters in the same order; each sharding group all-reduces one or
    two numbers. An infinite `max_norm` only measures.

    The ranks of a group `stages` have different parameters of one model, and the norm is that of all. If several of these
    ranks have a parameter, all but one of them list its id in `repeated`.

    ValueError: a bound is negative or nan, or `norm_type` is not above 0. RuntimeError on all ranks, with nothing scaled:
    `error_if_nonfinite` is set and the norm is not finite.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; it must be 0 or more (infinity measures without clipping).")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be above 0, such as 1, 2 or infinity.")
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = _Gradients(parameters)
    counted = _Gradients([p for p in parameters if id(p) not in repeated]) if repeated else gradients
    total = _total_norm(counted, norm_type, stages)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. Skip this "
            "step, or set error_if_nonfinite=False to scale by it all the same."
        )
    if max_norm < math.inf:
        # The coefficient stays on the device: asking whether it is below one would wait for it.
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for tensors in gradients:
            torch._foreach_mul_(tensors, factor.to(tensors[0].device))
    return total


@torch.no_grad()
def clip_grad_value(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp gradients in place to +-`clip_value`; `Partial` ones are summed over their ranks first."""
    clip_value = float(clip_value)
    if not clip_value >= 0:
        raise ValueError(f"clip_value is {clip_value}; it must be 0 or more.")
    for tensors in _Gradients([parameters] if isinstance(parameters, torch.Tensor) else parameters):
        torch._foreach_clamp_min_(tensors, -clip_value)
        torch._foreach_clamp_max_(tensors, clip_value)
