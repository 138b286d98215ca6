"""Loops that all processes leave at the same step, whatever each of them has to iterate over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.comm.base import Communicator

logger = logging.getLogger(__name__)

# Without that a process that has run out of batches leaves the loop, and the others wait for it in the next collective for
# ever. The vote on a batch travels through host memory while the batch before it is computed, so no rank waits for it as a rule.

_READY, _ENDED, _FAILED = range(3)

_uneven = 0
_loops = 0


@contextmanager
def uneven_ends() -> Iterator[None]:
    """Let loops that begin inside the block end where their own data ends, as under torch's `Join`. Collective: call on every rank."""
    global _uneven
    _uneven += 1
    try:
        yield
    finally:
        _uneven -= 1


def ends_are_uneven() -> bool:
    """Whether ranks may be at different steps now, inside `uneven_ends`."""
    return _uneven > 0


def in_step(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, one read ahead, as long as every process has one, then stop on all of them. All ranks.

    Raises RuntimeError if another process failed to read its batch, or left the loop at another step; the process that
    failed raises its own error.
    """
    global _loops
    communicator = comm.current()
    if communicator.world_size == 1 or _uneven:
        yield from batches
        return
    _loops += 1
    reads, loop = _reads(batches), _loops

    def read(step: int) -> tuple[int, Any, Callable[[], bool]]:
        status, item = next(reads)
        # The lowest of a number and of its opposite are of one rank only where all ranks have the same.
        return status, item, _have_all(communicator, [loop, -loop, step, -step, -status])

    status, item, all_are_ready = read(0)
    for step in count():
        if not all_are_ready():
            _stop(communicator, loop, step, status, item)
            return
        current = item
        status, item, all_are_ready = read(step + 1)
        yield current


def _reads(batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    """Turn what can happen in reading into values: a batch, the end, an error."""
    try:
        for item in batches:
            yield _READY, item
    except Exception as error:
        yield _FAILED, error
        return
    yield _ENDED, None


def _have_all(communicator: Communicator, vote: list[int]) -> Callable[[], bool]:
    """Send a vote; return a function that waits for those of all processes, and says whether all are ready at this place."""
    wanted, lowest, group = [*vote[:-1], _READY], torch.tensor(vote), comm.side_group()
    if group is None:
        return lambda: communicator.all_reduce(lowest, "min").tolist() == wanted
    work = dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group, async_op=True)

    def wait() -> bool:
        work.wait()
        return lowest.tolist() == wanted

    return wait


def _stop(communicator: Communicator, loop: int, step: int, status: int, item: Any) -> None:
    """Learn from all ranks why they stop here: raise if one failed or is elsewhere, or tell on the main process what is left over."""
    error = f"{type(item).__name__}: {item}" if status == _FAILED else ""
    ranks: dict[int, list[str]] = {_FAILED: [], _ENDED: [], _READY: []}
    answers = communicator.gather_object((loop, step, status, error))
    for rank, (other_loop, other_step, other, text) in enumerate(answers):
        if (other_loop, other_step) != (loop, step):
            raise RuntimeError(
                f"Processes are at different places: rank {communicator.rank} reads batch {step} of its loop number {loop}, rank "
                f"{rank} batch {other_step} of its loop number {other_loop}. All ranks have to leave a loop at the same batch."
            )
        ranks[other].append(f"rank {rank} failed ({text})" if other == _FAILED else str(rank))
    if status == _FAILED:
        raise item
    if ranks[_FAILED]:
        raise RuntimeError(f"Reading batch {step} of a loader: {'; '.join(ranks[_FAILED])}. All processes stop there.")
    if ranks[_READY] and communicator.rank == 0:
        logger.warning(
            f"The data of rank {', '.join(ranks[_ENDED])} ended after {step} batches, and all processes stop there: rank "
            f"{', '.join(ranks[_READY])} had at least one batch more each, which this epoch omits."
        )
