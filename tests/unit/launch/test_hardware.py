"""What the machine offers, without torch."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from accelerate.launch import hardware
from cases import cases

DETECT = hardware.detect  # before the fixture of this folder replaces it
NONE = hardware.Hardware("cpu", 0)
BY_TORCH = hardware.Hardware("npu", 3, "ASCEND_RT_VISIBLE_DEVICES", True)


def driver(count, status=0):
    """Return what answers like NVIDIA's management library."""

    def fill(pointer):
        pointer._obj.value = count
        return 0

    return SimpleNamespace(nvmlInit_v2=lambda: status, nvmlShutdown=lambda: 0, nvmlDeviceGetCount_v2=fill)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a torch that was built for something, and NVIDIA's driver or none."""
    device = SimpleNamespace(type="npu", count=lambda: 3, visible_env=BY_TORCH.visible_env, shareable=True)
    monkeypatch.setattr("accelerate.devices.table.detect", lambda: device)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")

    def have(library, drives_cuda=False, **build):
        lines = [f"{kind}: str | None = {build.get(kind)!r}" for kind in ("cuda", "hip", "xpu")]
        (tmp_path / "torch" / "version.py").write_text("\n".join(["__version__ = '2.9'", *lines]))

        def load(name):
            found = library if name.startswith("libnvidia-ml") else name.startswith("libcuda") and drives_cuda
            if not found:
                raise OSError(name)
            return found

        monkeypatch.setattr(ctypes, "CDLL", load)
        return tmp_path

    return have


ONE = hardware.Hardware("cuda", 1, "CUDA_VISIBLE_DEVICES")


@cases(
    "library, build, selection, found, drives_cuda",
    (driver(1), "cuda", None, ONE, False),
    (driver(4), "cuda", None, BY_TORCH, False),  # several processes need torch anyway
    (driver(1), "cuda", "", BY_TORCH, False),
    (driver(4), "cuda", "GPU-1,GPU-2", BY_TORCH, False),
    (None, "cuda", None, NONE, False),
    (driver(4, status=9), "cuda", None, NONE, True),  # no driver is loaded
    (driver(4, status=18), "cuda", None, BY_TORCH, True),
    (None, "cuda", None, BY_TORCH, True),  # a container without the utility capability, a Jetson board
    (None, "none", None, NONE, True),  # a torch without CUDA
    (driver(0), "cuda", None, NONE, False),
    (driver(4), "none", None, NONE, False),
    (driver(4), "hip", None, BY_TORCH, False),
    (None, "plug-in of a vendor", None, BY_TORCH, False),
)
def test_who_counts_the_devices(machine, library, build, selection, found, drives_cuda):
    folder = machine(library, drives_cuda, **{build: "6.0"})
    if build.startswith("plug-in"):
        (folder / "torch_musa.py").touch()
    assert DETECT({} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}) == found


@pytest.mark.cold
def test_the_real_torch_agrees():
    import torch

    program = "import os, sys; from accelerate.launch.hardware import detect\nassert not {'psutil', 'torch'} & set(sys.modules)\n"
    program += "print(detect(os.environ).count, 'torch' in sys.modules)"
    count, imported = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).split()
    assert int(count) == torch.cuda.device_count()
    assert imported == "False" or torch.version.cuda is None or int(count)
