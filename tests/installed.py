"""A machine on which only the libraries that a test installs are there."""

import importlib
import importlib.machinery
import importlib.metadata
import sys

from accelerate.base import imports, versions

_EXTENSIONS = "compat.imports", "vendor_devices.available", "fp8.transformer_engine"
_CHECKS = "accelerate.base.imports", *(f"accelerate.extensions.{name}" for name in _EXTENSIONS)


def forget():
    for name in _CHECKS:
        for function in vars(sys.modules.get(name, imports)).values():
            if hasattr(function, "cache_clear") and function.__module__ == name:
                function.cache_clear()
    imports._found.clear()
    versions.installed_version.cache_clear()


class Machine:
    """A machine on which only what the test installs is there; counts the look-ups."""

    def __init__(self):
        self.packages, self.distributions, self.looked_up = set(), {}, []

    def install(self, package, distribution=None, version="1.0"):
        self.packages.add(package)
        self.distributions[(distribution or package).replace("_", "-")] = version
        forget()

    def find_spec(self, name):
        self.looked_up.append(name)
        return importlib.machinery.ModuleSpec(name, None) if name in self.packages else None

    def version(self, name):
        name = name.replace("_", "-")  # metadata does not tell them apart either
        if name not in self.distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.distributions[name]


def machine(monkeypatch):
    """Let nothing be installed until the caller is done; yield the machine."""
    fake = Machine()
    monkeypatch.setattr(importlib.util, "find_spec", fake.find_spec)
    monkeypatch.setattr(importlib.metadata, "distribution", fake.version)
    monkeypatch.setattr(importlib.metadata, "version", fake.version)
    forget()
    yield fake
    forget()
