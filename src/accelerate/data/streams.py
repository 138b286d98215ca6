"""Reading on from where an interrupted run stood, and noting what such a run would need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader

from accelerate.data import lengths, randomness
from accelerate.data.state import Progress
from accelerate.process import PartialState


def restores(loader: DataLoader) -> bool:
    """Whether a loader reads a stream, in this process, that can save and restore its position by itself."""
    dataset = loader.dataset
    own = callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))
    return own and lengths.is_stream(loader) and not (loader.num_workers or has_buffer(dataset))


def has_buffer(dataset: Any) -> bool:
    """Whether a stream of the library `datasets` shuffles in a buffer, which its state leaves out: samples would be lost."""
    parts = [getattr(dataset, "_ex_iterable", None)]
    for part in parts:
        if "BufferShuffled" in type(part).__name__:
            return True
        parts += [inner for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())) if inner]
    return False


def noting(
    batches: Iterator[Any],
    progress: Progress,
    loader: DataLoader,
    reads: int,
    start: int,
    known: Sequence[dict[str, Any]],
) -> Iterator[Any]:
    """Note the random states, and the stream's own state, from before the reads of each step.

    The step yielded last is one or two behind the step read last. A checkpoint belongs to the former, so it needs what
    the reads that went ahead have used up.

    Args:
        batches: reads the wrapped loader in this process.
        progress: gets the states.
        loader: the wrapped loader.
        reads: batches that make one step.
        start: number of steps before the first.
        known: states for the first steps, when they were noted before an interruption.
    """
    state_of = loader.dataset.state_dict if restores(loader) else None
    progress.before_read = noted = {}
    for step in count(start + 1):
        ahead = step - start - 1
        noted[step] = known[ahead] if ahead < len(known) else randomness.states()
        noted.pop(step - _AHEAD, None)
        if state_of is not None:
            progress.dataset_state = state_of()
        taken = 0
        for batch in islice(batches, reads):
            taken += 1
            yield batch
        if taken < reads:
            return


def dropped(batches: Iterator[Any], number: int, reads: int = 1) -> Iterator[Any]:
    """Leave out the first batches, by reading and dropping them."""
    _drop(batches, number, reads)
    yield from batches


def replayed(
    loader: DataLoader,
    progress: Progress,
    drop: int,
    before_read: list[dict[str, Any]] | None,
    reads: int,
    order: Any,
) -> Iterator[Any]:
    """Iterate over the rest of an interrupted epoch, with random numbers as if it had not been interrupted.

    What opening the loader, drawing the order and reading the dropped batches draw has been drawn before the
    interruption. It is drawn again from the states at the start of the epoch, and the present states stay as they are.

    Args:
        loader: the wrapped loader.
        progress: has the states at the start of the epoch.
        drop: number of batches to read and drop.
        before_read: states for each step that the interrupted run had read ahead; None if it read nothing ahead.
        reads: batches that make one step.
        order: an `EndAhead` that draws the order, or None if the loader does that when it is opened.
    """
    with randomness.kept():
        if progress.at_start is not None:
            randomness.set_states(progress.at_start)
        batches = iter(loader)
        if order is not None:
            order.draw()
        opened = randomness.states()
    return _continued(batches, opened, drop, before_read or [], reads) if drop or before_read else batches


def first_step(loader: DataLoader, at_start: dict[str, Any] | None, reads: int) -> list[Any]:
    """Read the batches of the first step of an epoch, and give the random generators their states back.

    Args:
        loader: a loader that leaves nothing out.
        at_start: states at the start of the epoch.
        reads: batches that make one step.
    """
    with randomness.kept():
        if at_start is not None:
            randomness.set_states(at_start)
        return list(islice(iter(loader), reads))


def _continued(
    batches: Iterator[Any],
    opened: dict[str, Any],
    drop: int,
    before_read: list[dict[str, Any]],
    reads: int,
) -> Iterator[Any]:
    with randomness.kept():
        randomness.set_states(opened)
        _drop(batches, drop, reads)
        first = []
        for states in before_read:
            randomness.set_states(states)
            first += islice(batches, reads)
    yield from first
    yield from batches


def _drop(batches: Iterator[Any], number: int, reads: int) -> None:
    if not number:
        return
    from accelerate.utils.tqdm import tqdm

    hidden = not PartialState().is_local_main_process
    # Shown when it takes long: a stream that cannot be restored has to be read again from its beginning.
    bar = tqdm(range(number), desc="reading up to where the run stood", unit=" batches", delay=2.0, disable=hidden)
    for done in bar:
        if next(batches, _NOTHING) is _NOTHING:
            if number - done < reads:
                return  # the last step of the epoch had fewer
            raise ValueError(
                f"{number} batches were to be left out, but the data ended after {done} of them. Skip fewer batches, or read the "
                "data that the checkpoint was saved with."
            )


# A loader and the agreement of the ranks may each be one step ahead, and the step after those is being read.
_AHEAD = 4
_NOTHING = object()
