"""Fronts that import a name from its home when it is first used (PEP 562)."""

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any


def _imported(module: str) -> ModuleType:
    """Import a home without the garbage collector, which would go over all of torch's objects and find nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()


def _read_name(module: str, home: str, name: str) -> Any:
    """Return a name of a home; AttributeError if it is of an extension that is not installed."""
    try:
        return getattr(_imported(home), name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("accelerate.extensions."):
            raise
        extension = error.name.split(".")[2]
        raise AttributeError(
            f"module {module!r} cannot give {name!r}: the extension {extension!r} is not installed"
        ) from error


def require_torch(oldest: tuple[int, int]) -> None:
    """Raise ImportError if the installed torch is older, as its own file says: importing it would take seconds."""
    torch = sys.modules.get("torch") or importlib.util.find_spec("torch")
    for folder in getattr(torch, "submodule_search_locations", None) or getattr(torch, "__path__", ()):
        with contextlib.suppress(OSError), open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            match = re.search(r"__version__ = ['\"]((\d+)\.(\d+)[^'\"]*)", file.read())
            if match and (int(match[2]), int(match[3])) < oldest:
                needed = "torch>={}.{}".format(*oldest)
                raise ImportError(
                    f"accelerate needs {needed}, and torch {match[1]} is installed: pip install '{needed}'"
                )


def aliases(module: str, computed: Mapping[str, Callable[[], Any]] | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that also gives the names of other homes, in the table that `extensions.NAMES` names.

    `computed` has functions whose values are computed at each look-up. The module stores nothing, so it returns a name that
    was replaced in its home as replaced.
    """

    def get(name: str) -> Any:
        if computed and name in computed:
            return computed[name]()
        home = None
        with contextlib.suppress(ModuleNotFoundError):  # the folder may have been deleted
            tables = importlib.import_module(
                importlib.import_module("accelerate.extensions").NAMES
            )  # once a name is missing
            home = tables.HOME_OF[name] if name in tables.NAMES.get(module, "").split() else None
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _read_name(module, home, name)

    return get


def front(
    package: str, homes: Mapping[str, str], submodules: Iterable[str], eager: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package that re-exports names, and has its `aliases`.

    `homes` has for each module the names that it gives, separated by spaces; `submodules` are attributes without an import;
    `eager` are names that the package defines itself.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    modules = frozenset(submodules)
    exported = [*home_of, *eager]
    alias = aliases(package)

    def get(name: str) -> Any:
        if name in home_of:
            value = _read_name(package, home_of[name], name)
            setattr(sys.modules[package], name, value)  # the next look-up is an ordinary attribute access
            return value
        if name in modules:
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:  # of an optional library; `hasattr` and `inspect` ask for every name
                raise AttributeError(f"module {package!r} cannot give {name!r}: {error}") from error
        return alias(name)

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exported, *modules})

    return get, listed, exported


def stand_for(module: str, home: str) -> None:
    """Let a public path be the module at another address, so that a name that is replaced in one is replaced in both."""
    sys.modules[module] = _imported(home)
