import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch

from accelerate.devices import DEVICES, row
from accelerate.extensions.vendor_devices import available, devices


def test_every_row_says_where_its_names_are_published():
    assert [row.type for row in devices.ROWS] == [kind for kind in DEVICES if kind in devices.SOURCES]
    assert len(devices.ROWS) == len(devices.SOURCES)


def test_an_xpu_is_used_if_it_is_wanted_and_there_is_no_cuda_device(monkeypatch):
    monkeypatch.setattr(available, "is_xpu_available", lambda check_device: check_device)
    for cuda, wanted, usable in ((False, "", True), (False, "false", False), (True, "true", False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)  # noqa: B023
        monkeypatch.setenv("ACCELERATE_USE_XPU", wanted)
        assert row("xpu").available() is usable


def test_a_tpu_is_the_one_that_its_backend_gave_the_process(monkeypatch):
    """torch_tpu is not there, so torch's module of it is a stand-in; it has one chip a process, under the index 0."""
    assert not row("tpu").available()
    monkeypatch.setitem(sys.modules, "torch_tpu", ModuleType("torch_tpu"))
    sys.modules["torch_tpu"].__spec__ = ModuleSpec("torch_tpu", None)
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0)
    monkeypatch.setattr(torch, "tpu", module, raising=False)
    assert row("tpu").available()
    monkeypatch.setattr(torch, "device", lambda *words: words)
    assert row("tpu").torch_device(3) == ("tpu", 0)
    row("tpu").set(3)
