"""The checkpoints for those who patch nothing."""

from typing import Any, Literal

from transformers_patch import checkpoints


class CheckpointMixin:
    """Stands before a Trainer among the bases of a class, and makes its checkpoints whole or not there.

    `train` takes the newest whole checkpoint for ``resume_from_checkpoint=True``, and refuses a damaged one. What the Trainer
    and its subclasses write at a save, and what callbacks write in `on_save`, is staged and takes its place in one step. All ranks.

    Attributes:
        checkpoints: "async" lets the training go on once the files of a checkpoint are written; True waits for the disk.

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
        with checkpoints.resumable([*args, *options.values()]):
            super().__init__(*args, **options)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train, as the Trainer does; all ranks call it.

        Args:
            resume_from_checkpoint: True for the newest whole checkpoint in `output_dir`, or the path of one.
            *args: As for the Trainer.
            **options: As for the Trainer.

        Returns:
            What the Trainer returns.

        Raises:
            DamagedCheckpoint: The checkpoint that was named is not whole.
            ValueError: There is none; or a rank does not see it.
        """
        run = super().train  # type: ignore[misc]
        if not checkpoints.usable():
            return run(resume_from_checkpoint, *args, **options)
        from transformers_patch.checkpoints import save

        beside = self.checkpoints == "async"
        return save.train(self, resume_from_checkpoint, lambda folder: run(folder, *args, **options), beside)

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **options: Any) -> Any:
        write = super()._save_checkpoint  # type: ignore[misc]
        if not checkpoints.available():  # `train` has said so
            return write(model, trial, *args, **options)
        from transformers_patch.checkpoints import save

        return save.save_checkpoint(self, trial, lambda: write(model, trial, *args, **options))
