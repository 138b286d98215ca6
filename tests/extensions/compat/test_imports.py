"""Libraries and devices that programs ask for and this package does not."""

import re
import sys
import types

import pytest

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
