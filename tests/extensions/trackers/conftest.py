"""Fakes of the trackers' libraries, which record what is called on them."""

import importlib.machinery
import sys
import types

import pytest

from recorder import Recorder


class Comparable(Recorder):
    """Is equal to its text."""

    def __eq__(self, other):
        return repr(self) == (other if isinstance(other, str) else repr(other))

    __hash__ = None


class Library:
    """A fake library: its recorder, and the calls since they were last taken."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._monkeypatch = monkeypatch

    def install(self, name, **attributes):
        module = types.ModuleType(name)
        recorder = Comparable(name, self.calls)
        module.__dict__.update(attributes)
        module.__getattr__ = lambda attribute: getattr(recorder, attribute)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        self._monkeypatch.setitem(sys.modules, name, module)
        return module

    def taken(self):
        calls = list(self.calls)
        self.calls.clear()
        return calls


@pytest.fixture
def library(monkeypatch):
    return Library(monkeypatch)


@pytest.fixture(autouse=True)
def forget_what_was_mentioned():
    from accelerate.extensions.trackers import library

    library._mentioned.clear()
