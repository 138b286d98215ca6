"""What can be said about a tensor without having it."""

from dataclasses import dataclass

import torch

from accelerate.config.enums import at_public_path


@at_public_path
@dataclass
class TensorInformation:
    """The shape and dtype of a tensor, which one process sends ahead so that others can make room for it.

    Args:
        shape: its size.
        dtype: its element type.
    """

    shape: torch.Size
    dtype: torch.dtype
