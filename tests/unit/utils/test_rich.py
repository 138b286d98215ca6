"""Readable tracebacks, where they are wanted."""

import importlib
import inspect
import sys
import types

import pytest

import accelerate.utils
from accelerate.base import imports


def test_with_rich_tracebacks_are_installed(monkeypatch):
    installed = []
    traceback = types.ModuleType("rich.traceback")
    traceback.install = lambda **kwargs: installed.append(kwargs)
    monkeypatch.setitem(sys.modules, "rich", types.ModuleType("rich"))
    monkeypatch.setitem(sys.modules, "rich.traceback", traceback)
    monkeypatch.setattr(imports, "is_rich_available", lambda: True)
    monkeypatch.delitem(sys.modules, "accelerate.utils.rich", raising=False)
    importlib.import_module("accelerate.utils.rich")
    assert installed == [{"show_locals": False}]
    sys.modules.pop("accelerate.utils.rich")


def test_without_rich_the_error_says_what_to_do_and_the_package_can_be_inspected(monkeypatch):
    monkeypatch.setattr(imports, "is_rich_available", lambda: False)
    monkeypatch.delitem(sys.modules, "accelerate.utils.rich", raising=False)
    monkeypatch.delattr(accelerate.utils, "rich", raising=False)
    with pytest.raises(ModuleNotFoundError, match="ACCELERATE_ENABLE_RICH=1"):
        importlib.import_module("accelerate.utils.rich")
    assert not hasattr(accelerate.utils, "rich")
    assert "rich" not in dict(inspect.getmembers(accelerate.utils))
