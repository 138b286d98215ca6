"""The last hooks of a program's end. They run after the program's own, because this module is imported with the package."""

import atexit
from collections.abc import Callable

_hooks: list[Callable[[], None]] = []


def run_last(hook: Callable[[], None]) -> None:
    """Call a function when the program ends, after what the program itself has registered with `atexit`. Not a collective."""
    _hooks.append(hook)


@atexit.register
def _run() -> None:
    for hook in _hooks:
        hook()
