"""Devices that programs ask for: found by a plug-in's name, then by torch."""

import importlib
import os
import sys
import types
from unittest.mock import Mock

import pytest
import torch

from accelerate.extensions.vendor_devices import available


def vendor(available=True, fault=None):
    return Mock(is_available=lambda: available, device_count=Mock(side_effect=fault, return_value=1))


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        *[("npu", "torch_npu"), ("mlu", "torch_mlu"), ("neuron", "torch_neuronx"), ("xpu", None)],
        *[("musa", "torch_musa"), ("sdaa", "torch_sdaa")],
    ],
)
def test_a_vendor_with_its_plugin(machine, monkeypatch, name, plugin):
    check = getattr(available, f"is_{name}_available")
    assert check() is False and check.__name__ == f"is_{name}_available"
    if plugin is not None:
        machine.install(plugin)
        monkeypatch.setitem(sys.modules, plugin, types.ModuleType(plugin))
    for module, plain, thorough in [
        (vendor(), True, True),
        (vendor(fault=RuntimeError("no driver")), True, False),
        (vendor(available=False), False, False),
    ]:
        monkeypatch.setattr(torch, name, module, raising=False)
        check.cache_clear()
        assert (check(), check(check_device=True)) == (plain, thorough)


def test_gaudi(machine, monkeypatch):
    imported = []
    for name in ("habana_frameworks", "habana_frameworks.torch"):
        machine.install(name)
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(importlib, "import_module", imported.append)
    monkeypatch.setattr(torch, "hpu", vendor(), raising=False)
    assert available.is_hpu_available() is True
    assert imported == ["habana_frameworks.torch"]
    assert available.is_hpu_available(init_hccl=True) is True
    assert imported[-1] == "habana_frameworks.torch.distributed.hccl"


def test_xla(machine, monkeypatch):
    assert available.is_torch_xla_available() is False
    with pytest.raises(ValueError, match="cannot both be true"):
        available.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)
    machine.install("torch_xla")
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(device_type=lambda: "TPU"))
    assert available.is_torch_xla_available() is True
    assert available.is_torch_xla_available(check_is_tpu=True) is True
    assert available.is_torch_xla_available(check_is_gpu=True) is False
    monkeypatch.setattr(available, "USE_TORCH_XLA", False)
    available.is_torch_xla_available.cache_clear()
    assert available.is_torch_xla_available() is False


def test_cuda_is_asked_through_nvml_each_time(monkeypatch):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    seen = []

    def is_available():
        seen.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return len(seen) > 1

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert [available.is_cuda_available(), available.is_cuda_available()] == [False, True]
    assert seen == ["1", "1"] and "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def test_mps_asks_build_device_and_version(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    for found in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: found)  # noqa: B023
        assert available.is_mps_available() is found
        assert available.is_mps_available(min_version="99.0") is False


def test_gaudi_of_the_first_generation_has_no_fp16(machine, monkeypatch):
    for name in ("habana_frameworks", "habana_frameworks.torch"):
        machine.install(name)
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    experimental = types.ModuleType("experimental")
    experimental.synDeviceType = types.SimpleNamespace(synDeviceGaudi="one")
    experimental._get_device_type = lambda: "one"
    monkeypatch.setattr(importlib, "import_module", lambda name: experimental)
    monkeypatch.setattr(torch, "hpu", Mock(is_available=lambda: True), raising=False)
    assert available.is_habana_gaudi1() is True
    assert available.is_fp16_available() is False
    experimental._get_device_type = lambda: "two"
    assert available.is_fp16_available() is True


def test_a_tpu_has_bf16_unless_it_is_ignored(machine, monkeypatch):
    machine.install("torch_xla")
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(device_type=lambda: "TPU"))
    assert available.is_bf16_available() is True
    assert available.is_bf16_available(ignore_tpu=True) is False


def test_rocm_is_a_build_of_torch_with_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version, rocm in ((None, False), ("6.2", True)):
        monkeypatch.setattr(torch.version, "hip", version)
        assert available.is_rocm_available() is rocm


def test_bf16_asks_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    for cuda in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)  # noqa: B023
        assert available.is_bf16_available() is not cuda
