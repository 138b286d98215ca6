"""Comparing versions."""

import importlib.metadata

import pytest
from packaging.version import Version

from accelerate.base import versions


@pytest.fixture
def torch_is(monkeypatch):
    def pretend(text):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: text)
        versions.installed_version.cache_clear()

    yield pretend
    versions.installed_version.cache_clear()


@pytest.mark.parametrize(
    ("installed", "at_least", "equal"),
    [
        *[("2.6.0", True, True), ("2.6.0+cu126", True, False), ("2.10.1", True, False)],
        ("2.6.0.dev20250101", False, False),
    ],
)
def test_torch(torch_is, monkeypatch, installed, at_least, equal):
    torch_is(installed)
    assert versions.is_torch_version(">=", "2.6.0") is at_least
    monkeypatch.setattr(importlib.metadata, "version", None)  # the metadata is read once
    assert versions.is_torch_version("==", "2.6.0") is equal
    assert versions.torch_version == Version(installed)
