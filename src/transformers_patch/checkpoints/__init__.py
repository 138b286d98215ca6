"""Atomic checkpoints of transformers' Trainer: complete or absent.

Use one of: `transformers_patch.apply(checkpoints=True)`, `python -m transformers_patch run --checkpoints train.py`, or
`class MyTrainer(CheckpointMixin, Trainer)`, which patches nothing. They need this fork's accelerate; with upstream's they
warn, and change nothing.
"""

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

from transformers_patch.symbols import shadowed

__all__ = ["CheckpointMixin", "available", "get_last_checkpoint"]


def available() -> bool:
    """Return whether the installed accelerate can stage and publish checkpoints.

    Not a collective.
    """
    # Upstream's has no such folder.
    return bool(importlib.util.find_spec("accelerate") and importlib.util.find_spec("accelerate.checkpoint"))


def usable(depth: int = 3) -> bool:
    """Return what `available` does, and warn where that is not so: the caller's caller, or who is further up.

    Not a collective.
    """
    if available():
        return True
    warnings.warn(
        "The checkpoints of transformers_patch need this fork's accelerate; the one that is installed has no "
        "accelerate.checkpoint. The Trainer's checkpoints stay as they are.",
        UserWarning,
        stacklevel=depth,
    )
    return False


def build(run: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> None:
    """Let a Trainer be built by `run`, with a model that arrives sharded too: it refuses to save the optimizer, which is done here."""
    values = [*args, *options.values()]
    arguments = next((value for value in values if hasattr(value, "save_only_model")), None)
    arrives = any(getattr(value, "is_distributed_loading_by_transformers", False) for value in values)
    changes = arguments is not None and arrives and available()
    with shadowed(arguments, save_only_model=True) if changes else contextlib.nullcontext():
        run(*args, **options)


def train(
    run: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any
) -> Any:
    """Let a Trainer train by `run`, from a complete checkpoint, and publish the ones that it saves.

    Collective: call on every rank.
    """
    if not usable(depth=4):
        return run(resume_from_checkpoint, *args, **options)
    from transformers_patch import engine
    from transformers_patch.checkpoints import save

    mixed = isinstance(trainer, CheckpointMixin)
    beside = trainer.checkpoints == "async" if mixed else engine.saves_in_background()
    return save.train(trainer, resume_from_checkpoint, lambda folder: run(folder, *args, **options), beside)


def save_checkpoint(run: Callable[..., Any], trainer: Any, model: Any, trial: Any, *args: Any, **options: Any) -> Any:
    """Let a Trainer save by `run` into a staged folder, which is published. Collective: call on every rank."""
    if not available():  # `train` has said so
        return run(model, trial, *args, **options)
    from transformers_patch.checkpoints import save

    return save.save_checkpoint(trainer, trial, lambda: run(model, trial, *args, **options))


@contextlib.contextmanager
def _stages(trainer: Any) -> Iterator[None]:
    """Let transformers' own `_save_checkpoint` stage, for one Trainer; overriding methods before and after find the final folder."""
    from transformers import Trainer

    stock = Trainer._save_checkpoint

    def stage(self: Any, *args: Any, **options: Any) -> Any:
        run = functools.partial(stock, self)
        return save_checkpoint(run, self, *args, **options) if self is trainer else run(*args, **options)

    Trainer._save_checkpoint = stage
    try:
        yield
    finally:
        Trainer._save_checkpoint = stock


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a run, as transformers' function of that name does for any folder.

    Unfinished and damaged ones are skipped, and a warning names each with its fault. Names and sizes of files are compared
    here; their bytes when `train` resumes.

    Not a collective.

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


class CheckpointMixin:
    """The first base of a Trainer class, which makes its checkpoints atomic.

    `train` takes the newest complete checkpoint for ``resume_from_checkpoint=True``, and refuses a damaged one. The files that
    the Trainer's own `_save_checkpoint` writes are staged and published in one step. `on_save` and the rest of an overriding
    `_save_checkpoint` follow, and find the final folder.

    Collective: call on every rank.

    Attributes:
        checkpoints: "async" saves in the background, unless other code may read or change the files; True waits for the disk.

    Raises:
        CollectiveMisuse: Not all ranks save or train.
        RuntimeError: A rank could not write; raised on all of them, and nothing has changed.

    Example:
        >>> from transformers import Trainer
        >>> from transformers_patch.checkpoints import CheckpointMixin
        >>> class MyTrainer(CheckpointMixin, Trainer):
        ...     pass
        >>> MyTrainer.mro()[1].__name__
        'CheckpointMixin'
    """

    checkpoints: bool | Literal["async"] = True

    def __init__(self, *args: Any, **options: Any) -> None:
        build(super().__init__, self, *args, **options)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train, like the Trainer.

        Collective: call on every rank.

        Args:
            resume_from_checkpoint: True for the newest complete checkpoint in `output_dir`, or the path of one.
            *args: As for the Trainer.
            **options: As for the Trainer.

        Returns:
            The Trainer's result.

        Raises:
            DamagedCheckpoint: The named checkpoint is not complete.
            ValueError: There is none; or a rank does not see it.
        """
        return train(super().train, self, resume_from_checkpoint, *args, **options)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **options: Any) -> Any:
        with _stages(self):
            return super()._save_checkpoint(*args, **options)  # type: ignore[misc]
