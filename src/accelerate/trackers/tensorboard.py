"""Tracking with TensorBoard."""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from accelerate.trackers.base import LibraryTracker, numbers_of, plain

_HPARAM_TYPES = (int, float, str, bool, torch.Tensor)


class TensorBoardTracker(LibraryTracker):
    """Logs to TensorBoard's event files: numbers as scalars, text as text, and dicts of numbers as scalars in one chart.

    ``log`` passes its ``kwargs`` to ``add_scalar``, ``add_text`` or ``add_scalars``.

    Args:
        run_name: Name of the run, and of its folder.
        logging_dir: The folder that holds the runs.
        **kwargs: Passed to ``torch.utils.tensorboard.SummaryWriter``.

    Example:
        >>> import tempfile
        >>> tracker = TensorBoardTracker("first", tempfile.mkdtemp())
        >>> tracker.start()
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> tracker.finish()

    Source:
        https://docs.pytorch.org/docs/stable/tensorboard.html
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = os.path.join(logging_dir, run_name)

    def start(self) -> None:
        """Open the event file."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict) -> None:
        """Write the configuration as hyperparameters, and as ``hparams.yml`` in a folder named after the time.

        Values that TensorBoard's table cannot show are shown as text.
        """
        shown = {name: value if isinstance(value, _HPARAM_TYPES) else str(value) for name, value in values.items()}
        self.writer.add_hparams(shown, metric_dict={})
        self.writer.flush()
        import yaml  # a third of what importing the package would cost otherwise

        folder = os.path.join(self.logging_dir, str(time.time()))
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "hparams.yml"), "w", encoding="utf-8") as file:
            yaml.safe_dump(plain(values), file)

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log what TensorBoard takes, and write it out."""
        super().log(values, step=step, **kwargs)
        self.writer.flush()

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        if isinstance(value, str):
            self.writer.add_text(name, value, global_step=step, **kwargs)
        elif isinstance(value, Mapping):
            self.writer.add_scalars(name, numbers_of(value, f"TensorBoard ({name})"), global_step=step, **kwargs)
        elif isinstance(value, (int, float)):
            self.writer.add_scalar(name, value, global_step=step, **kwargs)
        return isinstance(value, (int, float, str, Mapping))

    def log_images(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log tensors or arrays of shape (N, C, H, W), or as ``dataformats`` says; ``kwargs`` go to ``add_images``."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)
