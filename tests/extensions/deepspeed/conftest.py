"""No option of the launcher is set while a plugin is built, whatever started these tests."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from unit.launch.conftest import found_or_refused, no_devices, parse, plan
from unit.launch.runners.conftest import fake_package, written

__all__ = ["fake_package", "found_or_refused", "no_devices", "parse", "plan", "written"]


@pytest.fixture(autouse=True)
def no_variables(place):
    """Every test runs in an empty directory, without variables of a launch."""


@pytest.fixture
def fake_deepspeed(monkeypatch):
    """A module in DeepSpeed's place, which a state lets join the process group; the calls that it got."""
    joined, fake, builder = [], ModuleType("deepspeed"), lambda name: SimpleNamespace(NAME="shm")
    fake.accelerator = SimpleNamespace(get_accelerator=lambda: SimpleNamespace(create_op_builder=builder))
    fake.ops = SimpleNamespace(__compatible_ops__={"shm": True})
    fake.comm = SimpleNamespace(init_distributed=lambda **options: joined.append(options))
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    for name in ("LOCAL_RANK", "DS_ACCELERATOR", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    return joined
