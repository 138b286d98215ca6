"""Numbers that torch_xla stores in fewer bits, when the environment asks for it."""

import os
from types import SimpleNamespace

from accelerate.config.enums import DistributedType
from accelerate.extensions.xla import SPEC
from accelerate.extensions.xla.strategy import ReduceBeforeStep
from cases import cases


class Run(SimpleNamespace):
    """An Accelerator, as far as the extension looks at it."""


@cases(
    "flag, device, name, works",
    ("true", "xla", "bf16", True),
    ("1", "cpu", "bf16", False),
    ("1", "xla", "no", False),
    (None, "xla", "bf16", None),
)
def test_downcast_reaches_torch_xla_or_is_said_to_have_no_effect(monkeypatch, recwarn, flag, device, name, works):
    monkeypatch.setenv("XLA_USE_BF16", "1")
    monkeypatch.delenv("XLA_DOWNCAST_BF16", raising=False)
    monkeypatch.setenv("ACCELERATE_DOWNCAST_BF16", flag or "false")
    kind = DistributedType.XLA if device == "xla" else DistributedType.NO
    run = Run(device=SimpleNamespace(type=device), mixed_precision=name, distributed_type=kind)
    assert SPEC.attaches(run) is bool(device == "xla" or flag)
    if SPEC.attaches(run):
        assert (ReduceBeforeStep.attach(run) is None) is (device == "cpu")
    assert (os.environ.get("XLA_DOWNCAST_BF16") == "1") is bool(works) is ("XLA_USE_BF16" not in os.environ)
    said = [str(warning.message) for warning in recwarn.list]
    assert [f"{name!r} on {device!r}" in text for text in said] == ([True] if works is False else [])
