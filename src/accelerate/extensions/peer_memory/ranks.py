"""The machines of a run, and small agreements of their ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelerate import comm


class MachineRanks:
    """The ranks of a run by machine, as one of them sees them. The first rank of a machine leads it.

    Collective: call on every rank.

    Attributes:
        machines: The ranks of each machine.
        machine: The number of this rank's machine.
        leads: Whether this rank leads its machine.
        everyone: The gloo group of all ranks, for the training thread.
        neighbours: That of the ranks of this machine, for the thread that writes copies: two threads never share a group.
        leaders: That of the leaders, for the same thread; None for other ranks, and on one machine.
    """

    def __init__(self, rank: int, local_rank: int, world_size: int) -> None:
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size
        self.everyone = comm.side_group()
        leader_of = self.gather(rank - local_rank)
        self._leader_ranks: list[int] = sorted(set(leader_of))
        self.machines = [
            [rank for rank in range(world_size) if leader_of[rank] == leader] for leader in self._leader_ranks
        ]
        self.machine, self.leads = self._leader_ranks.index(rank - local_rank), local_rank == 0
        separate: dict[str, Any] = {"backend": "gloo", "use_local_synchronization": True}
        self.neighbours = dist.new_group(self.machines[self.machine], **separate)
        several = self.leads and len(self.machines) > 1
        self.leaders = dist.new_group(self._leader_ranks, **separate) if several else None

    def leader(self, machine: int) -> int:
        """Return the rank that leads a machine; numbers wrap around."""
        return self._leader_ranks[machine % len(self._leader_ranks)]

    def gather(self, value: Any) -> list[Any]:
        """Return a small value of each rank.

        Collective: call on every rank.
        """
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.everyone)
        return values

    def largest(self, *numbers: float) -> list[float]:
        """Return the largest of each number among all ranks.

        Collective: call on every rank.
        """
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.everyone)
        values: list[float] = tensor.tolist()
        return values

    def of_machines(self, number: int) -> list[int]:
        """Return the sum of a number over the ranks of each machine.

        Collective: call on every rank.
        """
        sums = torch.zeros(len(self.machines), dtype=torch.int64)
        sums[self.machine] = number
        dist.all_reduce(sums, group=self.everyone)
        values: list[int] = sums.tolist()
        return values

    def together(self, work: Callable[[], Any], group: Any = None) -> None:
        """Do something on all ranks of a group, by default of the run, and raise an error of any on all of them.

        Collective: call on every rank of the group.
        """
        problem: BaseException | None = None
        try:
            work()
        except BaseException as error:  # the others would wait
            problem = error
        failed = torch.tensor([problem is not None], dtype=torch.float64)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group or self.everyone)
        raise_any(problem, float(failed))


def raise_any(problem: BaseException | None, failed: float) -> None:
    """Raise the problem of this rank, else a RuntimeError if another rank has failed. Not a collective."""
    if problem is not None:
        raise problem
    if failed:
        raise RuntimeError(
            "Another rank failed at copying its state into memory or at reading a copy. Its message names the reason."
        )
