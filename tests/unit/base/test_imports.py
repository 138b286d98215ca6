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

from accelerate.base import imports, versions

# Package, distribution (if it is called otherwise), and a version that will do, of `is_<name>_available`; the name is that of the
# package if there is none.
_ROWS = """
aim aim 3.9.9|amdsmi|boto3|clearml|comet_ml comet-ml|datasets|deepspeed|dvclive|import_timer|lomo_optim lomo-optim 1.0 lomo|matplotlib
mlflow mlflow-skinny|msamp ms-amp|pandas|peft|pynvml nvidia-ml-py|sagemaker|schedulefree|swanlab|tensorboardX tensorboardX 1.0 tensorboard
timm|torchao torchao 0.6.1|torchdata torchdata 0.7|torchdata torchdata 0.8.0 torchdata_stateful_dataloader|torchvision|trackio
transformer_engine transformer-engine|transformers transformers 5.0|triton pytorch-triton 3.0|wandb|bitsandbytes bitsandbytes 0.1 bnb
bitsandbytes bitsandbytes 0.37.2 8bit_bnb|bitsandbytes bitsandbytes 0.39.0 4bit_bnb
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


def forget():
    for function in vars(imports).values():
        if hasattr(function, "cache_clear") and function.__module__ == imports.__name__:
            function.cache_clear()
    imports._found.clear()
    versions.installed_version.cache_clear()


class Machine:
    """A machine on which only what the test installs is there; counts the look-ups."""

    def __init__(self):
        self.packages, self.distributions, self.looked_up = set(), {}, []

    def install(self, package, distribution=None, version="1.0"):
        self.packages.add(package)
        self.distributions[(distribution or package).replace("_", "-")] = version
        forget()

    def find_spec(self, name):
        self.looked_up.append(name)
        return importlib.machinery.ModuleSpec(name, None) if name in self.packages else None

    def version(self, name):
        name = name.replace("_", "-")  # metadata does not tell them apart either
        if name not in self.distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.distributions[name]


@pytest.fixture
def machine(monkeypatch):
    fake = Machine()
    monkeypatch.setattr(importlib.util, "find_spec", fake.find_spec)
    monkeypatch.setattr(importlib.metadata, "distribution", fake.version)
    monkeypatch.setattr(importlib.metadata, "version", fake.version)
    forget()
    yield fake
    forget()


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


def test_minimum_versions(machine):
    machine.install("bitsandbytes", version="0.40")
    machine.install("numpy", version="2.0")
    assert imports.is_bnb_available(min_version="0.39") and not imports.is_bnb_available(min_version="0.41")
    assert imports.is_numpy_available() and not imports.is_numpy_available(min_version="2.1")


def test_rich_must_also_be_wanted_and_fp8_needs_one_of_three(machine, monkeypatch):
    convert = imports.torchao_required(lambda model: model)
    with pytest.raises(ImportError, match="needs torchao.*pip install torchao"):
        convert(3)
    machine.install("rich")
    for value, wanted in ((None, False), ("1", True)):
        monkeypatch.setenv("ACCELERATE_ENABLE_RICH", value or "")
        assert imports.is_rich_available() is wanted
    assert not imports.is_fp8_available()
    machine.install("torchao", version="0.7")
    assert imports.is_fp8_available() and convert(3) == 3


def test_megatron_must_be_wanted_whole_and_recent(machine, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    machine.install("megatron", "megatron-core", "0.8.0")
    assert imports.is_megatron_lm_available() is False
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert imports.is_megatron_lm_available() is True
    machine.install("megatron", "megatron-core", "0.7.0")
    assert imports.is_megatron_lm_available() is False
    del machine.distributions["megatron-core"]
    forget()
    with pytest.warns(UserWarning, match="ACCELERATE_USE_MEGATRON_LM is set"):
        assert imports.is_megatron_lm_available() is False


def test_bitsandbytes_beyond_cuda(machine, monkeypatch):
    assert imports.is_bitsandbytes_multi_backend_available() is False
    library = types.ModuleType("bitsandbytes")
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    machine.install("bitsandbytes")
    assert imports.is_bitsandbytes_multi_backend_available() is False
    library.features = {"multi_backend"}
    imports.is_bitsandbytes_multi_backend_available.cache_clear()
    assert imports.is_bitsandbytes_multi_backend_available() is True


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
    experimental = types.ModuleType("experimental")
    experimental.synDeviceType = types.SimpleNamespace(synDeviceGaudi="one")
    experimental._get_device_type = lambda: "one"

    def import_module(name):
        imported.append(name)
        return experimental

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(torch, "hpu", vendor(), raising=False)
    assert imports.is_hpu_available() is True
    assert imported == ["habana_frameworks.torch"]
    assert imports.is_hpu_available(init_hccl=True) is True
    assert imported[-1] == "habana_frameworks.torch.distributed.hccl"
    assert imports.is_habana_gaudi1() is True
    assert imports.is_fp16_available() is False
    experimental._get_device_type = lambda: "two"
    assert imports.is_fp16_available() is True


def test_xla(machine, monkeypatch):
    assert imports.is_torch_xla_available() is False
    with pytest.raises(ValueError, match="cannot both be true"):
        imports.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)
    machine.install("torch_xla")
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(device_type=lambda: "TPU"))
    assert imports.is_torch_xla_available() is True
    assert imports.is_torch_xla_available(check_is_tpu=True) is True
    assert imports.is_torch_xla_available(check_is_gpu=True) is False
    assert imports.is_bf16_available() is True
    assert imports.is_bf16_available(ignore_tpu=True) is False
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
    for version, rocm in ((None, False), ("6.2", True)):
        monkeypatch.setattr(torch.version, "hip", version)
        assert imports.is_rocm_available() is rocm


def test_bf16_asks_the_device_and_mps_build_device_and_version(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    for available in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available)  # noqa: B023
        assert imports.is_mps_available() is available
        assert imports.is_mps_available(min_version="99.0") is False
    for cuda in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)  # noqa: B023
        assert imports.is_bf16_available() is not cuda
