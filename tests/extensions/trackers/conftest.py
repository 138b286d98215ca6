"""Fakes of the trackers' libraries, which record what is called on them."""

import importlib.machinery
import sys
import types

import pytest


class Recorder:
    """Takes every attribute, call and assignment, and writes calls and assignments down in one list."""

    def __init__(self, name, calls):
        self.__dict__.update(_name=name, _calls=calls)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        child = self.__dict__[name] = Recorder(f"{self._name}.{name}", self._calls)
        return child

    def __setattr__(self, name, value):
        self._calls.append((f"{self._name}.{name} =", (value,), {}))
        self.__dict__[name] = value

    def __setitem__(self, key, value):
        self._calls.append((f"{self._name}[{key!r}] =", (value,), {}))

    def __call__(self, *args, **kwargs):
        self._calls.append((self._name, args, kwargs))
        return Recorder(f"{self._name}()", self._calls)

    def __repr__(self):
        return f"<{self._name}>"

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
        recorder = Recorder(name, self.calls)
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
