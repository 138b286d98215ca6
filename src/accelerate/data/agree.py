"""Processes whose data may end at different steps agree in every step on whether all of them have a batch.

Without that a process that has run out of batches leaves the loop, and the others wait for it in the next collective for
ever. The agreement about a batch travels while the batch before it is computed, so it is seldom waited for. It uses a
process group of its own: it neither delays the exchanges of the training nor mixes with them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.comm.base import Communicator

if TYPE_CHECKING:
    from accelerate.data.loader import PreparedLoader

logger = logging.getLogger(__name__)

_READY, _ENDED, _FAILED = range(3)
_FIELDS = 3

_groups: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()
_paused = 0
_loops = 0


@contextmanager
def paused() -> Iterator[None]:
    """Let loops that begin inside a `with` block end where their own data ends. All ranks.

    For code that handles uneven inputs by other means, like `torch.distributed.algorithms.Join`.
    """
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


def is_paused() -> bool:
    """Whether ranks may be at different steps now, inside `paused`."""
    return _paused > 0


def together(batches: Iterator[Any], loader: PreparedLoader) -> Iterator[Any]:
    """`in_step` for the batches that a prepared loader reads, if its shards may end at different steps. All ranks."""
    plan = vars(loader).get("plan")
    if plan is None or not plan.uneven:
        return batches
    progress = loader._progress
    return in_step(batches, ((progress, "before_read"), (progress, "dataset_state"), (loader, "_yielded_state")))


def in_step(batches: Iterator[Any], belonging: tuple[tuple[Any, str], ...] = ()) -> Iterator[Any]:
    """Yield batches as long as every process has one; then all stop together, at the shortest. All ranks.

    It reads one batch ahead of what it yields.

    Args:
        batches: reads this process's batches.
        belonging: pairs of an object and the name of an attribute that each read changes. A batch is yielded with the
            values that its own read left behind, as if nothing had been read ahead.

    Raises:
        RuntimeError: another process failed to read its batch (the message names it), or left the loop at another step.
            The process that failed raises its own error.

    Example:
        >>> list(in_step(iter([1, 2])))  # alone there is nobody to agree with
        [1, 2]
    """
    global _loops
    communicator = comm.current()
    if communicator.world_size == 1 or _paused:
        yield from batches
        return
    _loops += 1
    reads, loop, step = _reads(batches), _loops, 0
    start = _voting(communicator)

    def read() -> tuple[int, Any, list[Any], Callable[[], list[tuple[int, ...]]]]:
        status, item = next(reads)
        return status, item, [getattr(*part) for part in belonging], start((loop, step, status))

    _, item, values, outcome = read()
    while True:
        votes = outcome()
        _check_step(votes, loop, step, communicator.rank)
        statuses = [status for _, _, status in votes]
        if _FAILED in statuses:
            _raise(communicator, item, statuses, step)
        if _ENDED in statuses:
            _restore(belonging, values)
            _tell(communicator, statuses, step)
            return
        current, current_values = item, values
        step += 1
        _, item, values, outcome = read()
        _restore(belonging, current_values)
        yield current


def _reads(batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    """Turn what can happen in reading into values: a batch, the end, an error."""
    while True:
        try:
            item = next(batches)
        except StopIteration:
            break
        except Exception as error:
            yield _FAILED, error
            return
        yield _READY, item
    yield _ENDED, None


def _restore(belonging: tuple[tuple[Any, str], ...], values: list[Any]) -> None:
    for (owner, name), value in zip(belonging, values, strict=True):
        setattr(owner, name, value)


def _voting(communicator: Communicator) -> Callable[[tuple[int, ...]], Callable[[], list[tuple[int, ...]]]]:
    """A function that sends a vote, and returns one that waits for those of all processes."""
    world, group = communicator.world_size, _group(communicator)

    def start(vote: tuple[int, ...]) -> Callable[[], list[tuple[int, ...]]]:
        # A sum in which everybody fills its own place: cheaper to start than a gathering, and the same for all backends.
        board = torch.zeros(world, _FIELDS, dtype=torch.int64)
        board[communicator.rank] = torch.tensor(vote)
        if group is None:
            board = communicator.all_reduce(board)
            return lambda: _rows(board)
        work = dist.all_reduce(board, group=group, async_op=True)

        def wait() -> list[tuple[int, ...]]:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    "A process was lost while all agreed on whether they have another batch. The output of the process "
                    "that ended first tells the cause."
                ) from error
            return _rows(board)

        return wait

    return start


def _group(communicator: Communicator) -> Any | None:
    """The group in which votes travel, over host memory; None where processes do not talk through torch.distributed."""
    if communicator.group is None or not dist.is_gloo_available():
        return None
    if communicator not in _groups:
        _groups[communicator] = dist.new_group(backend="gloo")
    return _groups[communicator]


def _rows(board: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in board.tolist()]


def _check_step(votes: list[tuple[int, ...]], loop: int, step: int, rank: int) -> None:
    other = next((number for number, vote in enumerate(votes) if vote[:2] != (loop, step)), None)
    if other is not None:
        raise RuntimeError(
            f"Processes are at different places: rank {rank} reads batch {step} of its loop number {loop}, rank {other} "
            f"batch {votes[other][1]} of its loop number {votes[other][0]}. All ranks have to leave a loop at the same "
            "batch; decide that from values that are equal everywhere."
        )


def _raise(communicator: Communicator, item: Any, statuses: list[int], step: int) -> None:
    """Raise on all processes: the error itself where it happened, its text elsewhere."""
    failed = statuses[communicator.rank] == _FAILED
    told = communicator.gather_object(f"{type(item).__name__}: {item}" if failed else None)
    if failed:
        raise item
    reports = [f"rank {rank} failed ({text})" for rank, text in enumerate(told) if text is not None]
    raise RuntimeError(f"Reading batch {step} of a loader: {'; '.join(reports)}. All processes stop there.")


def _tell(communicator: Communicator, statuses: list[int], step: int) -> None:
    """One line on the main process about what was not used, if anything."""
    left = [rank for rank, status in enumerate(statuses) if status == _READY]
    if left and communicator.rank == 0:
        ended = [rank for rank, status in enumerate(statuses) if status == _ENDED]
        logger.warning(
            "The data of rank %s ended after %d batches, and all processes stop there: rank %s had at least one batch "
            "more each, which this epoch leaves out.",
            ", ".join(map(str, ended)),
            step,
            ", ".join(map(str, left)),
        )
