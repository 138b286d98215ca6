"""The examples in the docstrings do what they show."""

import doctest
import importlib
import os
import pathlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

import accelerate

PROMPT = ">>> "
# Programs to be started, not modules to be imported.
PROGRAMS = re.compile(r".*\.test_utils\.scripts(\..*)?|.*\.__main__")
# A class may say that it belongs to the module it is imported from; doctest looks for its examples there.
CLAIMED_HOME = re.compile(r'^ +__module__ = "([\w.]+)"$', re.M)


def homes() -> set[str]:
    """Return the modules that may have examples, judged by their text: importing all of them has side effects."""
    found = set()
    for info in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        # `walk_packages` names a file finder for every module of ours, and imports packages only.
        if PROGRAMS.fullmatch(info.name):
            continue
        spec = info.module_finder.find_spec(info.name)
        text = pathlib.Path(spec.origin).read_text("utf-8")
        if PROMPT in text:
            found |= {info.name, *CLAIMED_HOME.findall(text)}
    return found


def modules_with_examples() -> Iterator[ModuleType]:
    """Load the modules that have examples, apart from those that need a package that is not installed."""
    for name in sorted(homes()):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "accelerate":
                raise
            continue
        if any(test.examples for test in doctest.DocTestFinder().find(module)):
            yield module


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Somewhere to write files, without settings or a configuration file of this machine, and without its GPUs."""
    for name in list(os.environ):
        if name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("module", modules_with_examples(), ids=lambda module: module.__name__)
def test_examples_show_what_happens(module, place, capsys):
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    if failed:
        pytest.fail(capsys.readouterr().out, pytrace=False)
