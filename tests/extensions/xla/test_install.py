import importlib.metadata
import sys

import pytest

from accelerate.extensions.xla import install


@pytest.fixture
def ran(monkeypatch):
    commands = []
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    monkeypatch.setattr(install.subprocess, "run", lambda command, check: commands.append((command, check)))
    return commands


@pytest.mark.parametrize("upgrade", [False, True])
def test_pip_installs_the_matching_release(monkeypatch, ran, upgrade):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.6.0+cpu")
    install.install_xla(upgrade=upgrade)
    expected = [sys.executable, "-m", "pip", "install", "torch_xla[tpu]==2.6.0"]
    assert ran == [(expected + ["--upgrade"] * upgrade, True)]


def test_other_places_and_development_builds_are_left_alone(monkeypatch, ran):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.7.0.dev20250101")
    with pytest.raises(RuntimeError, match="development build"):
        install.install_xla()
    monkeypatch.delenv("COLAB_RELEASE_TAG")
    with pytest.raises(RuntimeError, match=r"Colab.*pip install"):
        install.install_xla()
    assert ran == []
