"""Checkpoints of transformers' Trainer that are whole or not there.

Three ways in: `transformers_patch.apply(checkpoints=True)`, `python -m transformers_patch run --checkpoints train.py`, and
`class MyTrainer(CheckpointMixin, Trainer)` for those who patch nothing. They need this fork's accelerate; beside upstream's
they warn, and change nothing.
"""

import contextlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers_patch.checkpoints.mixin import CheckpointMixin

__all__ = ["CheckpointMixin", "available", "get_last_checkpoint"]


def available() -> bool:
    """Return whether the installed accelerate has what the checkpoints are staged and published with. Any rank, alone."""
    try:
        return importlib.util.find_spec("accelerate.checkpoint.storage") is not None
    except ModuleNotFoundError:  # upstream's has no such folder, or there is none at all
        return False


def usable(depth: int = 3) -> bool:
    """Return what `available` does, and warn where that is not so: the caller's caller, or who is further up. Any rank, alone."""
    if available():
        return True
    warnings.warn(
        "The checkpoints of transformers_patch need this fork's accelerate; the one that is installed has no "
        "accelerate.checkpoint. The Trainer's checkpoints stay as they are.",
        UserWarning,
        stacklevel=depth,
    )
    return False


@contextlib.contextmanager
def resumable(given: Sequence[Any]) -> Iterator[None]:
    """Let a Trainer be built with a model that arrives sharded: it refuses to save the optimizer, which is done here. Any rank, alone.

    `given` are the values that it is built with.
    """
    args = next((value for value in given if hasattr(value, "save_only_model")), None)
    arrives = any(getattr(value, "is_distributed_loading_by_transformers", False) for value in given)
    if args is None or not arrives or not available():
        yield
        return
    former, args.save_only_model = args.save_only_model, True
    try:
        yield
    finally:
        args.save_only_model = former


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest whole checkpoint of a run, as transformers' function of that name does for any folder.

    Those that are unfinished or damaged are passed over, and a warning names each with what is wrong. Names and sizes of files
    are compared here; their bytes when `train` is told to resume. Any rank, alone.

    Args:
        folder: The `output_dir` of the run.

    Returns:
        Its path, or None without any.

    Raises:
        FileNotFoundError: There is no such folder.

    Example:
        >>> import tempfile
        >>> from transformers_patch.checkpoints import get_last_checkpoint
        >>> get_last_checkpoint(tempfile.mkdtemp()) is None
        True
    """
    folder = os.fspath(folder)
    if not usable():
        from transformers.trainer_utils import get_last_checkpoint as stock

        return stock(folder)
    from transformers_patch.checkpoints import choose

    number, _ = choose.newest(folder)
    return None if number is None else choose.place_of(folder, number)


def __getattr__(name: str) -> Any:
    if name != "CheckpointMixin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.mixin").CheckpointMixin
