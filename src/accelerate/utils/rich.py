"""Readable tracebacks through the optional library rich, where it is installed and switched on."""

from accelerate.base.imports import is_rich_available

if not is_rich_available():
    raise ModuleNotFoundError(
        "accelerate.utils.rich needs the library rich. Install it with `pip install rich` and set ACCELERATE_ENABLE_RICH=1."
    )

from rich.traceback import install

install(show_locals=False)
