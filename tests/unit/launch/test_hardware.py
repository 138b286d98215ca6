"""What the machine offers, without torch."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from accelerate.launch import hardware

DETECT = hardware.detect  # before the fixture of this folder replaces it
USABLE_CORES = hardware.usable_cores
NONE = hardware.Hardware("cpu", 0)
BY_TORCH = hardware.Hardware("npu", 3, "ASCEND_RT_VISIBLE_DEVICES", True)


class Driver:
    """Answers like NVIDIA's management library."""

    def __init__(self, count, split=False, works=True):
        self.count, self.split, self.works = count, split, works

    def nvmlInit_v2(self):
        return 0 if self.works else 9

    def nvmlShutdown(self):
        return 0

    def nvmlDeviceGetCount_v2(self, pointer):
        pointer._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, pointer):
        return 0

    def nvmlDeviceGetMigMode(self, handle, now, pending):
        now._obj.value = int(self.split)
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a torch that was built for something, and NVIDIA's driver or none."""
    device = SimpleNamespace(type="npu", count=lambda: 3, visible_env=BY_TORCH.visible_env, shareable=True)
    monkeypatch.setattr("accelerate.devices.probe.detect", lambda: device)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")

    def have(driver, **build):
        lines = [f"{kind}: str | None = {build.get(kind)!r}" for kind in ("cuda", "hip", "xpu")]
        (tmp_path / "torch" / "version.py").write_text("\n".join(["__version__ = '2.9'", *lines]))

        def load(name):
            if driver is None:
                raise OSError(name)
            return driver

        monkeypatch.setattr(ctypes, "CDLL", load)
        return tmp_path

    return have


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("1, 0", 2),
        ("1,0,9,2", 2),
        ("-1", 0),
        ("0,0", 0),
        ("GPU-1,GPU-2", 2),
        ("MIG-1", 1),
    ],
)
def test_selected_gpus(machine, selection, left):
    machine(Driver(4), cuda="12.8")
    found = DETECT({} if selection is None else {"CUDA_VISIBLE_DEVICES": selection})
    assert found == (hardware.Hardware("cuda", left, "CUDA_VISIBLE_DEVICES") if left else NONE)


@pytest.mark.parametrize(
    ("driver", "build", "found"),
    [
        (None, {"cuda": "12.8"}, NONE),
        (Driver(4, works=False), {"cuda": "12.8"}, NONE),
        (Driver(0), {"cuda": "12.8"}, NONE),
        (Driver(4), {}, NONE),
        (Driver(1, split=True), {"cuda": "12.8"}, BY_TORCH),
        (Driver(4), {"hip": "6"}, BY_TORCH),
        (Driver(4), {"xpu": "1"}, BY_TORCH),
    ],
)
def test_who_counts_the_devices(machine, driver, build, found):
    machine(driver, **build)
    assert DETECT({}) == found


def test_a_vendor_plugin_and_a_build_that_says_nothing_are_for_torch(machine):
    folder = machine(None)
    (folder / "torch" / "version.py").unlink()
    assert DETECT({}) == BY_TORCH
    machine(None)
    assert DETECT({}) == NONE
    (folder / "torch_musa.py").touch()
    assert DETECT({}) == BY_TORCH


def test_the_real_torch_agrees():
    import torch

    program = (
        "import sys; from accelerate.launch.hardware import detect; print(detect({}).count, 'torch' in sys.modules)"
    )
    count, imported = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).split()
    assert int(count) == torch.cuda.device_count()
    assert imported == "False" or torch.version.cuda is None or int(count)


def test_usable_cores():
    assert USABLE_CORES() >= 1
