"""A source tree in the shape that the exporter looks for in transformers. Written for these tests; it imports nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

ARGUMENTS = '''\
"""Arguments."""

from dataclasses import dataclass, field
from typing import Optional, Union

if is_torch_available():
    import torch

if is_accelerate_available():
    from accelerate.state import AcceleratorState, PartialState

    from .somewhere import AcceleratorConfig

if is_accelerate_available("9.9"):
    from accelerate.state import Later


@dataclass
class TrainingArguments:
    """
    What to train with.

    Parameters:
        first (`str`):
            The first.
        accelerator_config (`str`, *optional*):
            About this one.

            - more

        last (`int`):
            The last.
    """

    names = ["accelerator_config"]

    first: str = field(default="a")
    accelerator_config: ANNOTATION = field(
        default=None,
        metadata={"help": "about this one"},
    )
    last: int = field(default=1)

    def __post_init__(self):
        self.device = self._setup_devices

    @cached_property
    def _setup_devices(self):
        # how it begins
        table = {"enabled": True, "use_configured_state": False}
        if isinstance(self.accelerator_config, AcceleratorConfig):
            table["use_configured_state"] = self.accelerator_config.pop("use_configured_state", False)
        # a remark on the test
        if table["use_configured_state"]:
            self.state = PartialState()
        else:
            AcceleratorState._reset_state(reset_partial_state=True)
        if not table.pop("use_configured_state", False):
            self.state = PartialState(**table)
        return self.state.device
'''


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Write a tree whose `training_args.py` differs by replacements, and return its root."""

    def write(*replacements: tuple[str, str], annotation: str = "dict | None", package: str = "transformers") -> Path:
        text = ARGUMENTS.replace("ANNOTATION", annotation)
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new)
        folder = tmp_path / "tree"
        (folder / "src" / package).mkdir(parents=True)
        (folder / "src" / package / "__init__.py").write_text('__version__ = "7.0"\n', "utf-8")
        (folder / "src" / package / "training_args.py").write_text(text, "utf-8")
        return folder

    return write
