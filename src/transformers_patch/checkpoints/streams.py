"""A run over a stream resumes in the pass that it was in.

The Trainer does not know a stream's length, counts the full run as one epoch, and skips one batch per step: after the first
pass there are not so many. This module counts passes, and skips only the batches of the last one. They are read again, so
that the order continues as without the interruption, a shuffle buffer included.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from accelerate.data import adapter
from accelerate.data.build import skip_first_batches

logger = logging.getLogger(__name__)

STREAM = "_stream_of_checkpoints"


class Passes:
    """The loader of a stream, which counts passes and batches. It begins with pass `number`, after `batches`.

    `restore` lets the run continue where nothing of that pass is left: releases before 5 give the generators back with its first batch.
    """

    def __init__(self, loader: Any, number: int | None, batches: int, restore: Callable[[], Any]) -> None:
        self._loader, self._known, self._restore = loader, number is not None, restore
        self._first = self.number = number or 0
        self.batches, self._skip = batches, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copies ask, before there is a loader
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be the one of this number after the first of this run."""
        self.number = self._first + epoch

    def _skipping_parts(self, number: int) -> "Passes":  # by which `skip_first_batches` asks
        self._skip = self.batches if self._known else number
        return self

    def __iter__(self) -> Iterator[Any]:
        left_out, self._skip = self._skip, 0
        loader, self.batches = skip_first_batches(self._loader, left_out), left_out
        loader.set_epoch(self.number)
        for batch in loader:
            self.batches += 1
            yield batch
        if left_out and self.batches == left_out:
            self._restore()


def loader_of(trainer: Any, folder: Any, begun: Any, together: Callable[[Any], int]) -> Callable[[], Any]:
    """Return the factory of the Trainer's loader, so that a stream resumes at the position of the checkpoint in `folder`.

    `begun` is a pass and its samples, if they are known. `together` returns the number of samples that the ranks have at a
    time, once the Trainer has chosen its batch size.

    Collective: call on every rank.
    """
    make, (number, samples) = trainer.get_train_dataloader, begun or (None, 0)
    if samples and trainer.args.ignore_data_skip and trainer.args.process_index == 0:
        logger.warning(
            "ignore_data_skip: %d samples of the stream's pass %d, counted from 0, come again.", samples, number
        )

    def get_train_dataloader() -> Any:
        loader = make()
        stream = isinstance(loader, DataLoader) and hasattr(loader, "set_epoch") and adapter.is_stream(loader)
        # One with a length has epochs, as every other loader.
        if stream and adapter.known_length(len, loader) is None:
            loader = vars(trainer)[STREAM] = Passes(loader, number, samples // together(trainer), restore)
        return loader

    def restore() -> None:
        trainer._load_rng_state(folder)
        handler, stops = trainer.callback_handler, trainer.control.should_training_stop

        def on_epoch_end(args: Any, state: Any, control: Any) -> Any:
            del handler.on_epoch_end  # it is only for this epoch
            control.should_training_stop = stops  # release 4.46 has set it, as no step was taken
            return handler.on_epoch_end(args, state, control)

        handler.on_epoch_end = on_epoch_end

    return get_train_dataloader
