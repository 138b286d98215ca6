"""The examples in the docstrings do what they show."""

import doctest
import importlib
import pathlib
import pkgutil
import re
from types import ModuleType

import pytest

import accelerate
import transformers_patch

PROMPT = ">>> "
OURS = {"accelerate", "transformers_patch"}
# Programs to be started, not modules to be imported.
PROGRAMS = re.compile(r".*\.test_utils\.scripts(\..*)?|.*\.__main__")


def texts_with_examples() -> list[str]:
    """Return the modules whose text has examples. The others stay unloaded: to import some has side effects."""
    found = []
    packages = ((accelerate.__path__, "accelerate."), (transformers_patch.__path__, "transformers_patch."))
    for info in (info for where, prefix in packages for info in pkgutil.walk_packages(where, prefix)):
        spec = info.module_finder.find_spec(info.name)
        if not PROGRAMS.fullmatch(info.name) and PROMPT in pathlib.Path(spec.origin).read_text("utf-8"):
            found.append(info.name)
    return found


def modules_with_examples() -> list[ModuleType]:
    """Load the modules that have examples, apart from those that need a package that is not installed."""
    names = set()
    for name in texts_with_examples():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in OURS:
                raise
            continue
        # A class may name the module that it is imported from as its own; doctest finds its examples only there.
        homes = {value.__module__ for value in vars(module).values() if isinstance(value, type)}
        names |= {name, *(home for home in homes if home.partition(".")[0] in OURS)}
    modules = [importlib.import_module(name) for name in sorted(names)]
    return [module for module in modules if any(test.examples for test in doctest.DocTestFinder().find(module))]


@pytest.mark.parametrize("module", modules_with_examples(), ids=lambda module: module.__name__)
def test_examples_show_what_happens(module, place, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    if failed:
        pytest.fail(capsys.readouterr().out, pytrace=False)
