"""What the machine offers, without torch."""

import ctypes
import sys

import pytest

from accelerate.launch import hardware

DETECT = hardware.detect  # before the fixture of this folder replaces it
USABLE_CORES = hardware.usable_cores


@pytest.mark.parametrize(
    ("selection", "count", "left"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("0", 4, 1),
        ("1, 0", 4, 2),
        ("1,0,9,2", 4, 2),
        ("-1", 4, 0),
        ("0,0", 4, 0),
        ("GPU-1,GPU-2", 4, 2),
        ("MIG-1", 4, 1),
    ],
)
def test_visible(selection, count, left):
    assert hardware.visible(selection, count) == left


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
def machine(monkeypatch):
    def have(driver, **build):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.setattr(hardware, "_PLUGINS", ())
        monkeypatch.setattr(hardware, "_torch_build", lambda: build)
        monkeypatch.setattr(hardware, "_ask_torch", lambda: "torch")
        monkeypatch.setattr(sys, "platform", "linux")

        def load(name):
            if driver is None:
                raise OSError(name)
            return driver

        monkeypatch.setattr(ctypes, "CDLL", load)

    return have


def test_cuda(machine):
    machine(Driver(4), cuda="12.8")
    assert DETECT({}) == hardware.Hardware("cuda", 4, "CUDA_VISIBLE_DEVICES")
    assert DETECT({"CUDA_VISIBLE_DEVICES": "1"}).count == 1
    assert DETECT({"CUDA_VISIBLE_DEVICES": ""}) == hardware.Hardware("cpu", 0)


@pytest.mark.parametrize("driver", [None, Driver(4, works=False), Driver(0)])
def test_cuda_build_without_gpu(machine, driver):
    machine(driver, cuda="12.8")
    assert DETECT({}) == hardware.Hardware("cpu", 0)


def test_split_gpu_is_for_torch_to_count(machine):
    machine(Driver(1, split=True), cuda="12.8")
    assert DETECT({}) == "torch"


@pytest.mark.parametrize("build", [{"hip": "6"}, {"xpu": "1"}])
def test_other_builds_are_for_torch(machine, build):
    machine(Driver(4), **build)
    assert DETECT({}) == "torch"


def test_cpu_build(machine):
    machine(Driver(4))
    assert DETECT({}) == hardware.Hardware("cpu", 0)


def test_a_vendor_plugin_is_for_torch(machine, monkeypatch):
    machine(None)
    monkeypatch.setattr(hardware, "_PLUGINS", ("json",))
    assert DETECT({}) == "torch"


def test_build_is_read_from_the_version_file():
    import torch

    build = hardware._torch_build()
    assert build.get("cuda") == torch.version.cuda
    assert build.get("hip") == torch.version.hip


def test_usable_cores():
    assert USABLE_CORES() >= 1
