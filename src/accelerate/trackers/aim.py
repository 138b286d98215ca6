"""Tracking with Aim."""

import os
from typing import Any

from accelerate.trackers.base import LibraryTracker, built_in, mention


@built_in
class AimTracker(LibraryTracker):
    """Logs to an Aim repository.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of the repository.
        **kwargs: Passed to ``aim.Run``.

    Source:
        https://aimstack.readthedocs.io/en/latest/refs/sdk.html
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def start(self) -> None:
        """Start the run."""
        from aim import Run

        self.writer = Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration with the run."""
        self.writer["hparams"] = values

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log numbers or Aim's own objects; what Aim refuses is left out, and warned about once.

        ``kwargs`` go to the run's ``track``, such as ``context``.
        """
        for name, value in values.items():
            try:
                self.writer.track(value, name=name, step=step, **kwargs)
            except (TypeError, ValueError):
                mention("Aim", name, value)

    def log_images(self, values: dict, step: int | None = None, kwargs: dict[str, dict] | None = None) -> None:
        """Log images: arrays, PIL images, or pairs of an image and its caption.

        ``kwargs`` has under ``"aim_image"`` what is passed to ``aim.Image``, and under ``"track"`` what is passed to ``track``.
        """
        from aim import Image

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(picture, name=name, step=step, **options.get("track", {}))

    def finish(self) -> None:
        """End the run."""
        self.writer.close()
