"""Tracking with Aim."""

import os
from typing import Any

from accelerate.trackers.base import LibraryTracker, plain


class AimTracker(LibraryTracker):
    """Logs numbers and Aim's own objects to an Aim repository; ``log`` passes its ``kwargs`` to the run's ``track``.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of the repository.
        **kwargs: Passed to ``aim.Run``.

    Source:
        https://aimstack.readthedocs.io/en/latest/refs/sdk.html
    """

    name = library = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def start(self) -> None:
        """Start the run."""
        self.writer = self._library().Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration with the run; what Aim cannot store is stored as text."""
        self.writer["hparams"] = plain(values)

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        try:
            self.writer.track(value, name=name, step=step, **kwargs)
        except (TypeError, ValueError):
            return False
        return True

    def log_images(self, values: dict, step: int | None = None, kwargs: dict[str, dict] | None = None) -> None:
        """Log images: arrays, PIL images, or pairs of an image and its caption.

        ``kwargs`` has under ``"aim_image"`` what is passed to ``aim.Image``, and under ``"track"`` what is passed to ``track``.
        """
        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = self._library().Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(picture, name=name, step=step, **options.get("track", {}))
