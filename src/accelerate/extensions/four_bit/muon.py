"""Muon on shards: each matrix is gathered on one rank, its owner, which orthogonalises matrices of one shape together.

Torch's own step gathers every matrix on every rank. Here a rank sends and receives its parts of the matrices in bfloat16,
the type in which torch computes, once each way, and the ranks share the products.

Source:
    https://kellerjordan.github.io/posts/muon/, https://arxiv.org/abs/2502.16982, section 2.3
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from accelerate.extensions.four_bit.torch_private import hook_steps, muon_rate
from accelerate.runtime.torch_private import box, local_part

_AVERAGE = "momentum_buffer"  # torch's key of it


class ShardedMuon(torch.optim.Muon):
    """Torch's Muon, whose step shares the work among the ranks that have shards of the matrices."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return what the closure returns. Collective: call on every rank."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            lr, momentum, updates = float(group["lr"]), group["momentum"], []
            for parameter in parameters:
                gradient, state = parameter.grad, self.state[parameter]
                if _AVERAGE not in state:
                    state[_AVERAGE] = torch.zeros_like(gradient)
                average = state[_AVERAGE].lerp_(gradient, 1 - momentum)
                updates.append(gradient.lerp(average, momentum) if group["nesterov"] else average)
            for parameter, update in zip(parameters, orthogonalised(updates, group), strict=True):
                parameter.mul_(1 - lr * group["weight_decay"])
                rate = muon_rate(lr, group["adjust_lr_fn"], parameter.shape)
                local_part(parameter).add_(update, alpha=-rate)
        return loss


def share(optimizer: torch.optim.Muon) -> None:
    """Let torch's Muon share its work from now on. Not a collective."""
    optimizer.__class__ = ShardedMuon
    hook_steps(optimizer)


def orthogonalised(matrices: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return this rank's parts of matrices after Newton-Schulz iterations.

    Matrices whose rows FSDP has sharded have an owner each; for any other layout every rank computes the full matrix.

    Collective: call on every rank that shares one of the matrices.
    """
    results: dict[int, torch.Tensor] = {}
    by_group: dict[Any, list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        if (group := _rows_divided(matrix)) is not None:
            by_group[group].append(number)
        else:
            whole = matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
            results[number] = _newton_schulz(whole.bfloat16()[None], settings)[0][box(matrix)]
    for group, numbers in by_group.items():
        results |= zip(numbers, _by_owners([matrices[number] for number in numbers], group, settings), strict=True)
    return [results[number] for number in range(len(matrices))]


def _rows_divided(matrix: torch.Tensor) -> Any | None:
    """Return the process group over which the rows of a matrix are divided, if they are, and nothing else is."""
    if not isinstance(matrix, DTensor):
        return None
    divided = [dim for dim, placement in enumerate(matrix.placements) if not placement.is_replicate()]
    if len(divided) != 1 or type(matrix.placements[divided[0]]) is not Shard or matrix.placements[divided[0]].dim:
        return None
    return matrix.device_mesh.get_group(divided[0])


def _by_owners(matrices: Sequence[DTensor], group: Any, settings: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Exchange parts so that each matrix is complete on its owner, orthogonalise there, and yield this rank's parts.

    Collective: call on every rank of the group.
    """
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    owned, rows, to_owners, from_ranks = _plan(tuple(matrix.shape for matrix in matrices), ranks, me)
    local_parts = [local_part(matrix).bfloat16().flatten() for matrix in matrices]
    order = [number for of in owned for number in of]
    sent = torch.cat([local_parts[number] for number in order])
    sizes = [sum(counts) for counts in from_ranks]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, to_owners, group=group)
    parts = [chunk.split(counts) for chunk, counts in zip(received.split(sizes), from_ranks, strict=True) if counts]
    whole = {
        number: torch.cat(pieces).view(matrices[number].shape)
        for number, pieces in zip(owned[me], zip(*parts, strict=True), strict=True)
    }
    for shape in dict.fromkeys(matrix.shape for matrix in whole.values()):
        numbers = [number for number, matrix in whole.items() if matrix.shape == shape]
        whole.update(zip(numbers, _newton_schulz(torch.stack([whole[n] for n in numbers]), settings), strict=True))
    parts_of = [whole[number].split(rows[number]) for number in owned[me]]
    back = [parts[rank].flatten() for rank in range(ranks) for parts in parts_of if rank < len(parts)]
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, torch.cat([received[:0], *back]), to_owners, sizes, group=group)
    result_of = dict(zip(order, returned.split([local_parts[number].numel() for number in order]), strict=True))
    for number, matrix in enumerate(matrices):
        yield result_of[number].view(-1, matrix.shape[1])


@functools.cache
def _plan(
    shapes: tuple[torch.Size, ...], ranks: int, me: int
) -> tuple[list[list[int]], list[int], list[int], list[list[int]]]:
    """Return the matrices of each owner, the rows of a part, and how many numbers each owner gets and each rank sends, by matrix."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    costs = [0] * ranks
    for number in sorted(range(len(shapes)), key=lambda number: (-shapes[number].numel(), number)):
        owner = costs.index(min(costs))
        owned[owner].append(number)
        costs[owner] += shapes[number].numel() * min(shapes[number])
    rows = [-(-shape[0] // ranks) for shape in shapes]  # torch's division

    def counts(rank: int, of: Sequence[int]) -> list[int]:
        return [max(0, min(rows[n], shapes[n][0] - rank * rows[n])) * shapes[n][1] for n in of]

    return owned, rows, [sum(counts(me, of)) for of in owned], [counts(rank, owned[me]) for rank in range(ranks)]


def _newton_schulz(matrices: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Return matrices [count, rows, columns] with all singular values near 1, as torch's Muon computes each."""
    first, second, third = settings["ns_coefficients"]
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    value = matrices.mT if is_tall else matrices
    value = value / value.norm(dim=(-2, -1), keepdim=True).clamp(min=settings["eps"])
    for _ in range(settings["ns_steps"]):
        gram = value @ value.mT
        value = torch.baddbmm(value, torch.baddbmm(gram, gram, gram, beta=second, alpha=third), value, beta=first)
    return value.mT if is_tall else value
