"""Libraries and devices that programs ask for and this package does not."""

import importlib
import re
import sys
import types
from unittest.mock import Mock

import pytest
import torch

from accelerate.extensions.compat import imports

# Package, distribution (if it is called otherwise), and a version that will do, of `is_<name>_available`; the name is that of the
# package if there is none.
_ROWS = """
amdsmi|boto3|datasets|import_timer|lomo_optim lomo-optim 1.0 lomo|matplotlib|pandas|peft|pynvml nvidia-ml-py|sagemaker|schedulefree
timm|torchdata torchdata 0.7|torchvision|triton pytorch-triton 3.0|bitsandbytes bitsandbytes 0.1 bnb
"""
LIBRARIES = {}
for _row in re.split(r"[|\n]", _ROWS.strip()):
    _package, _distribution, _version, _name = (_row.split() + [None] * 3)[:4]
    LIBRARIES[f"is_{_name or _package}_available"] = (_package, _distribution or _package, _version or "1.0")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_found_when_its_distribution_is_installed(machine, name):
    check = getattr(imports, name)
    assert check() is False and check.__name__ == name and check.__doc__
    machine.packages.add(LIBRARIES[name][0])  # a folder of the same name
    assert check() is False
    machine.install(*LIBRARIES[name])
    assert check() is True


def test_minimum_versions(machine):
    machine.install("bitsandbytes", version="0.40")
    machine.install("numpy", version="2.0")
    assert imports.is_bnb_available(min_version="0.39") and not imports.is_bnb_available(min_version="0.41")
    assert imports.is_numpy_available() and not imports.is_numpy_available(min_version="2.1")


def test_bitsandbytes_beyond_cuda(machine, monkeypatch):
    assert imports.is_bitsandbytes_multi_backend_available() is False
    library = types.ModuleType("bitsandbytes")
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    machine.install("bitsandbytes")
    assert imports.is_bitsandbytes_multi_backend_available() is False
    library.features = {"multi_backend"}
    imports.is_bitsandbytes_multi_backend_available.cache_clear()
    assert imports.is_bitsandbytes_multi_backend_available() is True


def test_gaudi_of_the_first_generation_has_no_fp16(machine, monkeypatch):
    for name in ("habana_frameworks", "habana_frameworks.torch"):
        machine.install(name)
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    experimental = types.ModuleType("experimental")
    experimental.synDeviceType = types.SimpleNamespace(synDeviceGaudi="one")
    experimental._get_device_type = lambda: "one"
    monkeypatch.setattr(importlib, "import_module", lambda name: experimental)
    monkeypatch.setattr(torch, "hpu", Mock(is_available=lambda: True), raising=False)
    assert imports.is_habana_gaudi1() is True
    assert imports.is_fp16_available() is False
    experimental._get_device_type = lambda: "two"
    assert imports.is_fp16_available() is True


def test_a_tpu_has_bf16_unless_it_is_ignored(machine, monkeypatch):
    machine.install("torch_xla")
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(device_type=lambda: "TPU"))
    assert imports.is_bf16_available() is True
    assert imports.is_bf16_available(ignore_tpu=True) is False


def test_rocm_is_a_build_of_torch_with_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version, rocm in ((None, False), ("6.2", True)):
        monkeypatch.setattr(torch.version, "hip", version)
        assert imports.is_rocm_available() is rocm


def test_bf16_asks_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    for cuda in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)  # noqa: B023
        assert imports.is_bf16_available() is not cuda
