"""Hosted notebooks."""

import os
import sys
import types

import pytest

from accelerate.launch.notebook import place


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("KAGGLE", "COLAB", "TPU")):
            monkeypatch.delenv(name)


def test_nowhere():
    assert not place.is_colab() and not place.is_kaggle() and not place.lacks_torch_xla()


def test_colab_by_its_shell(monkeypatch):
    shell = type("Shell", (), {"__module__": "google.colab._shell"})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert place.is_colab()


def test_by_variables(monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    assert place.is_colab() and not place.is_kaggle()
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert place.is_kaggle()


def test_a_tpu_without_torch_xla(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    assert not place.lacks_torch_xla()
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    monkeypatch.setattr(place.importlib.util, "find_spec", lambda name: None)
    assert place.lacks_torch_xla()
