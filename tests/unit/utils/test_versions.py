"""Comparing versions."""

import importlib.metadata

import pytest
from packaging.version import Version, parse

from accelerate.utils import versions


@pytest.fixture
def torch_is(monkeypatch):
    """Let metadata report another torch."""

    def pretend(text):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: text)
        versions.installed_version.cache_clear()

    yield pretend
    versions.installed_version.cache_clear()


@pytest.mark.parametrize(
    ("operation", "expected"), [("<", True), ("<=", True), ("==", False), ("!=", True), (">=", False), (">", False)]
)
def test_operations(operation, expected):
    assert versions.compare_versions(parse("1.9"), operation, "1.10") is expected
    with pytest.raises(ValueError, match="operation is '~='.*>=, =="):
        versions.compare_versions("packaging", "~=", "1.0")


def test_installed_libraries():
    assert versions.compare_versions("packaging", ">=", "1.0")
    assert versions.compare_versions("packaging", ">=", Version("1.0"))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        versions.compare_versions("surely-not-installed", ">=", "1.0")


@pytest.mark.parametrize(
    ("installed", "at_least", "equal"),
    [
        *[("2.6.0", True, True), ("2.6.0+cu126", True, False)],
        ("2.6.0.dev20250101", False, False),
        ("2.10.1", True, False),
    ],
)
def test_torch(torch_is, monkeypatch, installed, at_least, equal):
    torch_is(installed)
    assert versions.is_torch_version(">=", "2.6.0") is at_least
    monkeypatch.setattr(importlib.metadata, "version", None)  # the metadata is read once
    assert versions.is_torch_version("==", "2.6.0") is equal
    assert versions.torch_version == Version(installed)
