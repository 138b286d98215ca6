"""ACCELERATE_DOWNCAST_BF16 reaches torch_xla on a TPU, and is said to have no effect elsewhere."""

import os

import pytest

from accelerate.precision.base import apply_downcast


def test_torch_xla_is_told(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DOWNCAST_BF16", "true")
    monkeypatch.setenv("XLA_USE_BF16", "1")
    apply_downcast("xla", "bf16")
    assert os.environ["XLA_DOWNCAST_BF16"] == "1" and "XLA_USE_BF16" not in os.environ


@pytest.mark.parametrize(("device", "precision"), [("cpu", "bf16"), ("xla", "no")])
def test_elsewhere_it_has_no_effect_and_says_so(monkeypatch, device, precision):
    monkeypatch.setenv("ACCELERATE_DOWNCAST_BF16", "1")
    with pytest.warns(UserWarning, match=f"no effect.*{precision!r} on {device!r}"):
        apply_downcast(device, precision)
    assert "XLA_DOWNCAST_BF16" not in os.environ


@pytest.mark.parametrize("value", ["false", None])
def test_not_asked_for(monkeypatch, value, recwarn):
    if value is not None:
        monkeypatch.setenv("ACCELERATE_DOWNCAST_BF16", value)
    apply_downcast("xla", "bf16")
    assert "XLA_DOWNCAST_BF16" not in os.environ and not recwarn.list
