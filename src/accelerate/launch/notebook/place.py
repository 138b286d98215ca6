"""Where a notebook runs: hosted notebooks have habits of their own."""

import importlib.util
import os

from accelerate.utils.environment import is_colab


def is_kaggle() -> bool:
    """Tell whether this is a notebook of Kaggle."""
    return any(name.startswith("KAGGLE") for name in os.environ)


def lacks_torch_xla() -> bool:
    """Tell whether a hosted notebook has a TPU that torch cannot use."""
    return "TPU_NAME" in os.environ and (is_colab() or is_kaggle()) and importlib.util.find_spec("torch_xla") is None
