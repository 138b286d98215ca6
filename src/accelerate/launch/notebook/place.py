"""Where a notebook runs: hosted notebooks have habits of their own."""

import importlib.util
import os
import sys


def is_colab() -> bool:
    """Tell whether this is a notebook of Google Colab."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "google.colab" in type(shell).__module__ or "COLAB_RELEASE_TAG" in os.environ


def is_kaggle() -> bool:
    """Tell whether this is a notebook of Kaggle."""
    return any(name.startswith("KAGGLE") for name in os.environ)


def lacks_torch_xla() -> bool:
    """Tell whether a hosted notebook has a TPU that torch cannot use."""
    return "TPU_NAME" in os.environ and (is_colab() or is_kaggle()) and importlib.util.find_spec("torch_xla") is None
