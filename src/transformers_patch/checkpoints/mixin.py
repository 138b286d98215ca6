"""The checkpoints for those who patch nothing."""

from typing import Any

from transformers_patch import checkpoints


class CheckpointMixin:
    """Stands before a Trainer among the bases of a class, and makes its checkpoints whole or not there.

    `train` takes the newest whole checkpoint for ``resume_from_checkpoint=True``, and refuses a damaged one. What the Trainer
    and its subclasses write at a save, and what callbacks write in `on_save`, is staged and takes its place in one step. All ranks.

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
        if checkpoints.usable():
            from transformers_patch.checkpoints import choose

            resume_from_checkpoint = choose.resolved(self, resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **options)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **options: Any) -> None:
        write = super()._save_checkpoint  # type: ignore[misc]
        if not checkpoints.available():  # `train` has said so
            write(model, trial, *args, **options)
            return
        from transformers_patch.checkpoints import save

        save.save_checkpoint(self, trial, lambda: write(model, trial, *args, **options))
