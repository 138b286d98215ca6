"""What is installed: found by name and metadata, without importing it; what was found is remembered."""

import re

import pytest

from accelerate.base import imports

# Package, distribution (if it is called otherwise), and a version that will do, of `is_<name>_available`; the name is that of the
# package if there is none.
_ROWS = """
deepspeed|msamp ms-amp|torchao torchao 0.6.1|torchdata torchdata 0.8.0 torchdata_stateful_dataloader
transformer_engine transformer-engine|transformers transformers 5.0
"""
LIBRARIES = {}
for _row in re.split(r"[|\n]", _ROWS.strip()):
    _package, _distribution, _version, _name = (_row.split() + [None] * 3)[:4]
    LIBRARIES[f"is_{_name or _package}_available"] = (_package, _distribution or _package, _version or "1.0")
TOO_OLD_OR_NEW = {
    "is_torchao_available": "0.6.0",
    "is_torchdata_stateful_dataloader_available": "0.7.1",
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
