"""Small functions, for other programs."""

import pytest
import torch

from accelerate.config.handlers import AutocastKwargs
from accelerate.extensions.compat import other
from accelerate.utils import modeling


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_autocast_follows_the_state(precision, monkeypatch):
    class State:
        mixed_precision = precision
        device = torch.device("cpu")

    monkeypatch.setattr(other, "AcceleratorState", State)
    context = modeling.get_mixed_precision_context_manager(True)
    assert context.device == "cpu" and context._enabled
    off = modeling.get_mixed_precision_context_manager(True, AutocastKwargs(enabled=False, cache_enabled=False))
    assert not off._enabled and not off._cache_enabled


@pytest.mark.parametrize(
    ("release", "warns"), [("4.15.0-20", True), ("5.4.9", True), ("5.5.0", False), ("6.8", False)]
)
def test_old_kernels_are_warned_about(monkeypatch, caplog, release, warns):
    monkeypatch.setattr(other.platform, "system", lambda: "Linux")
    monkeypatch.setattr(other.platform, "release", lambda: release)
    other.check_os_kernel()
    assert (release in caplog.text) is warns
