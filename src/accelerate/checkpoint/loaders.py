"""Where the data loaders of a run stand.

A prepared loader's position (epoch, batches behind it, what draws the order) differs between ranks, so each rank keeps
its own beside its random states. A stateful loader (torchdata) also has a file, whose format is torchdata's.
"""

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.checkpoint import names
from accelerate.checkpoint.files import put_own, read_torch, writes
from accelerate.data import lengths, resume, xla
from accelerate.data.adapter import is_stateful
from accelerate.data.loader import PreparedLoader

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]

# What decides the order in which a sampler draws, and is changed by a load.
_DECIDING = ("initial_seed", "epoch", "seed", "replay", "generator")


def _inner(loader: Any) -> Any:
    return xla.unwrapped(loader) if xla.is_wrapped(loader) else loader


def _is_stateful(loader: Any) -> bool:
    return is_stateful(loader.base_dataloader) if isinstance(loader, PreparedLoader) else is_stateful(loader)


def positions(loaders: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Return where each loader stands on this rank; None for one that was not prepared. Any rank, alone.

    Args:
        loaders: The loaders of the run.
    """
    inner = [_inner(loader) for loader in loaders]
    return [resume.capture(loader) if isinstance(loader, PreparedLoader) else None for loader in inner]


def write(loader: Any, folder: Path, index: int, process_index: int, save_on_each_node: bool = False) -> None:
    """Write the state of a stateful loader; of another one nothing. Every rank calls it and writes its own file.

    Args:
        loader: A loader.
        folder: The checkpoint's folder.
        index: Which of the loaders it is, from 0.
        process_index: This rank.
        save_on_each_node: Each node has a folder of its own.
    """
    loader = _inner(loader)
    if not _is_stateful(loader):
        return
    state = {name: value for name, value in loader.state_dict().items() if name != resume.KEY}
    # The writer of shared files leaves its state under the plain name, which is the only one that others read.
    rank = None if writes(save_on_each_node) else process_index
    put_own(state, folder, names.dataloader_file(index, rank))


def read(loader: Any, folder: Path, index: int, process_index: int, load_kwargs: Mapping[str, Any] | None) -> Any:
    """Read the state of a stateful loader: this rank's, else the shared one, else None. Any rank, alone.

    Args:
        loader: A loader.
        folder: The checkpoint's folder.
        index: Which of the loaders it is, from 0.
        process_index: This rank.
        load_kwargs: Passed to ``torch.load``.
    """
    if not _is_stateful(_inner(loader)):
        return None
    for rank in (process_index, None):
        path = os.path.join(folder, names.dataloader_file(index, rank))
        if os.path.exists(path):
            return read_torch(path, load_kwargs=load_kwargs)
    return None


def restore(loader: Any, state: Any | None, position: Mapping[str, Any] | None) -> None:
    """Put a loader into the epoch it was in, with the same order of samples. Any rank, alone.

    A loader that was being iterated continues after the batches behind it, unless ``continue_after_load`` is off. A loop
    that was left early, as evaluation loops are, begins anew; ``skip_first_batches`` may leave out what was consumed.

    Args:
        loader: A loader.
        state: What ``read`` returned.
        position: This loader's entry of ``positions``.
    """
    loader = _inner(loader)
    if not isinstance(loader, PreparedLoader):
        if state is not None:
            loader.load_state_dict(state)
        return
    if position is None:
        logger.info(
            "The checkpoint does not tell the epoch of a data loader%s: another library, or an older version, has saved it. "
            "Call set_epoch on the loader%s.",
            ", only where it stood in it" if state is not None else ", nor where it stood in it",
            "" if state is not None else ", and leave the batches behind out with skip_first_batches",
        )
    if state is not None and (position is None or loader.continue_after_load):
        loader.load_state_dict(state if position is None else {**state, resume.KEY: dict(position)})
    elif position is not None:
        resume.restore(loader, dict(position), continuing=loader.continue_after_load)


def check(loader: Any, position: Mapping[str, Any] | None, index: int) -> None:
    """Refuse the position of another dataset or sampler, before anything is changed. Any rank, alone.

    Args:
        loader: A loader.
        position: Its entry of ``positions``.
        index: Which of the loaders it is, from 0.

    Raises:
        ValueError: The interrupted epoch cannot go on with this loader.
    """
    loader = _inner(loader)
    if isinstance(loader, PreparedLoader) and position is not None and loader.continue_after_load:
        resume.check(loader, dict(position), f"Data loader {index} (in the order of prepare)")


def undoing(loader: Any) -> Callable[[], None]:
    """Return a function that puts a loader back where it stands now. Any rank, alone.

    Args:
        loader: A loader.
    """
    loader = _inner(loader)
    former = copy.deepcopy(loader.state_dict()) if _is_stateful(loader) else None
    if not isinstance(loader, PreparedLoader):
        return (lambda: loader.load_state_dict(former)) if former is not None else (lambda: None)
    progress, iteration = copy.copy(vars(loader._progress)), loader.iteration
    generator = resume.shuffling_generator(loader)
    drawn = None if generator is None else generator.get_state()
    sampler = lengths.get_sampler(loader)
    ordered = {name: getattr(sampler, name) for name in _DECIDING if hasattr(sampler, name)}

    def undo() -> None:
        if former is not None:
            loader.load_state_dict(former)
        vars(loader._progress).update(progress)
        loader.iteration = iteration
        for name, value in ordered.items():
            setattr(sampler, name, value)
        if generator is not None:
            generator.set_state(drawn)

    return undo
