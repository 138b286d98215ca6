"""The public path of placement and loading, and the two helpers that live there."""

import pytest
import torch

import accelerate.utils.modeling as modeling
from accelerate.config.handlers import AutocastKwargs


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_autocast_follows_the_state(precision, monkeypatch):
    class State:
        mixed_precision = precision
        device = torch.device("cpu")

    monkeypatch.setattr(modeling, "AcceleratorState", State)
    context = modeling.get_mixed_precision_context_manager(True)
    assert context.device == "cpu" and context._enabled
    off = modeling.get_mixed_precision_context_manager(True, AutocastKwargs(enabled=False, cache_enabled=False))
    assert not off._enabled and not off._cache_enabled
