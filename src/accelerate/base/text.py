"""Names and sizes as text."""

from typing import Any


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function, or of an object's class.

    Example:
        >>> import torch
        >>> from accelerate.utils import get_pretty_name
        >>> get_pretty_name(torch.nn.Linear)
        'Linear'
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return getattr(named, "__qualname__", None) or named.__name__


def convert_bytes(size: int | float) -> str:
    """Return a size in bytes as text in the largest unit that fits, up to petabytes: 1536 is "1.5 KB".

    Example:
        >>> from accelerate.utils import convert_bytes
        >>> convert_bytes(3 * 1024**3)
        '3.0 GB'
    """
    units = ("bytes", "KB", "MB", "GB", "TB", "PB")
    step = 0
    while size >= 1024 and step < len(units) - 1:
        size /= 1024
        step += 1
    return f"{round(size, 2)} {units[step]}"
