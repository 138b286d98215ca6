"""Releases and shapes: what is patched, and what is refused."""

import dataclasses
import pathlib
import re
import types

import pytest
from packaging.specifiers import SpecifierSet

from transformers_patch import UnsupportedVersion
from transformers_patch.registry import ENTRIES, Entry, Finding

ENTRY = ENTRIES[0]
KNOWN = Finding((), needed=True)


def entry(monkeypatch, version="5.0.0", finding=KNOWN, **changes):
    """An entry for a package that is not there, with what is needed of it put in place."""
    target = types.ModuleType("borrowed")
    target.__version__ = version
    patch = types.ModuleType("borrowed_patch")
    patch.examine = lambda module: finding
    monkeypatch.setitem(__import__("sys").modules, "borrowed", target)
    monkeypatch.setitem(__import__("sys").modules, "borrowed_patch", patch)
    values = {"name": "x", "target": "borrowed:A.b", "package": "borrowed", "versions": ">=4,<6", "tested": ("5.0.0",)}
    return Entry(**{**values, "reason": "because", "module": "borrowed_patch", **changes})


def test_a_release_outside_the_range_is_refused_and_one_inside_judged_by_its_shape(monkeypatch):
    for version in ("3.9", "6.0.0", "6.0.0.dev0"):
        refusal = rf"borrowed {re.escape(version)} is installed.*>=4,<6.*Nothing was changed"
        with pytest.raises(UnsupportedVersion, match=refusal):
            entry(monkeypatch, version).check()
    for version in ("4.0", "5.24.0.dev0", "5.99"):
        assert entry(monkeypatch, version).check().needed
    with pytest.raises(UnsupportedVersion, match=r"a is gone; b is new.*Nothing was changed.*5\.0\.0"):
        entry(monkeypatch, "5.99", Finding(("a is gone", "b is new"), True)).check()


def test_a_missing_package_is_named():
    missing = dataclasses.replace(ENTRY, target="no_such_package_here.x:A", package="no_such_package_here")
    with pytest.raises(ImportError, match="no_such_package_here is not installed.*pip install"):
        missing.check()


def test_an_import_error_inside_the_package_is_not_hidden(monkeypatch, tmp_path):
    (tmp_path / "half_there.py").write_text("import a_dependency_that_is_missing\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_missing"):
        dataclasses.replace(ENTRY, target="half_there:A", package="half_there").check()


def test_the_installed_release_is_supported_and_needs_the_patch():
    assert ENTRY.check() == Finding((), needed=True)


def test_the_tested_releases_lie_in_the_range_and_are_those_of_the_makefile():
    versions = SpecifierSet(ENTRY.versions)
    assert all(versions.contains(version) for version in ENTRY.tested)
    makefile = pathlib.Path(__file__).parents[3].joinpath("Makefile").read_text("utf-8")
    listed = re.search(r"^TRANSFORMERS_VERSIONS := (.+)$", makefile, re.M)[1].split()
    assert tuple(listed) == ENTRY.tested
