"""What is installed: found by name and metadata, without importing it; what was found is remembered."""

import importlib
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import types
from unittest.mock import Mock

import pytest
import torch

from accelerate.base import imports

# Package, distribution (if it is called otherwise), and a version that will do, of `is_<name>_available`; the name is that of the
# package if there is none.
_ROWS = """
aim aim 3.9.9|clearml|comet_ml comet-ml|dvclive|mlflow mlflow-skinny|swanlab|tensorboardX tensorboardX 1.0 tensorboard|trackio|wandb
deepspeed|msamp ms-amp|torchao torchao 0.6.1|torchdata torchdata 0.8.0 torchdata_stateful_dataloader
transformer_engine transformer-engine|transformers transformers 5.0|bitsandbytes bitsandbytes 0.37.2 8bit_bnb
bitsandbytes bitsandbytes 0.39.0 4bit_bnb
"""
LIBRARIES = {}
for _row in re.split(r"[|\n]", _ROWS.strip()):
    _package, _distribution, _version, _name = (_row.split() + [None] * 3)[:4]
    LIBRARIES[f"is_{_name or _package}_available"] = (_package, _distribution or _package, _version or "1.0")
TOO_OLD_OR_NEW = {
    "is_aim_available": "4.0.0",
    "is_torchao_available": "0.6.0",
    "is_torchdata_stateful_dataloader_available": "0.7.1",
    "is_8bit_bnb_available": "0.37.1",
    "is_4bit_bnb_available": "0.38",
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_found_when_its_distribution_is_installed(machine, name):
    check = getattr(imports, name)
    assert check() is False and check.__name__ == name and check.__doc__
    machine.packages.add(LIBRARIES[name][0])  # a folder of the same name
    assert check() is False
    if name in TOO_OLD_OR_NEW:
        machine.install(*LIBRARIES[name][:2], TOO_OLD_OR_NEW[name])
        assert check() is False
    machine.install(*LIBRARIES[name])
    assert check() is True


def test_rich_must_also_be_wanted_and_fp8_needs_one_of_three(machine, monkeypatch):
    machine.install("rich")
    for value, wanted in ((None, False), ("1", True)):
        monkeypatch.setenv("ACCELERATE_ENABLE_RICH", value or "")
        assert imports.is_rich_available() is wanted
    assert not imports.is_fp8_available()
    machine.install("torchao", version="0.7")
    assert imports.is_fp8_available()


def test_mxfp8_asks_transformer_engine(machine, monkeypatch):
    assert imports.is_transformer_engine_mxfp8_available() is False
    machine.install("transformer_engine", "transformer-engine")
    module = types.ModuleType("transformer_engine.pytorch.fp8")
    module.check_mxfp8_support = lambda: (True, "")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert imports.is_transformer_engine_mxfp8_available() is True


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
    check = getattr(imports, f"is_{name}_available")
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
    assert imports.is_hpu_available() is True
    assert imported == ["habana_frameworks.torch"]
    assert imports.is_hpu_available(init_hccl=True) is True
    assert imported[-1] == "habana_frameworks.torch.distributed.hccl"


def test_xla(machine, monkeypatch):
    assert imports.is_torch_xla_available() is False
    with pytest.raises(ValueError, match="cannot both be true"):
        imports.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)
    machine.install("torch_xla")
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(device_type=lambda: "TPU"))
    assert imports.is_torch_xla_available() is True
    assert imports.is_torch_xla_available(check_is_tpu=True) is True
    assert imports.is_torch_xla_available(check_is_gpu=True) is False
    monkeypatch.setattr(imports, "USE_TORCH_XLA", False)
    imports.is_torch_xla_available.cache_clear()
    assert imports.is_torch_xla_available() is False


def test_cuda_is_asked_through_nvml_each_time(monkeypatch):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    seen = []

    def is_available():
        seen.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return len(seen) > 1

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert [imports.is_cuda_available(), imports.is_cuda_available()] == [False, True]
    assert seen == ["1", "1"] and "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def test_mps_asks_build_device_and_version(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    for available in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available)  # noqa: B023
        assert imports.is_mps_available() is available
        assert imports.is_mps_available(min_version="99.0") is False
