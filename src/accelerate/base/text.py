"""Names and sizes as text."""

import re
from collections.abc import Sequence
from typing import Any

LISTED = 16  # ranks that a message lists

_UNITS = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}


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


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size written with a unit as a number of bytes.

    Args:
        size: A number of bytes, or text such as ``"5GB"``, ``"500 MiB"``. ``KiB``, ``MiB``, ``GiB`` count in powers of
            1024; ``KB``, ``MB``, ``GB`` in powers of 1000. Case does not matter, except for a final lower-case ``b``
            after an upper-case or lower-case prefix, which means bits.

    Raises:
        ValueError: The size is negative or not written like that.

    Example:
        >>> from accelerate.utils import convert_file_size_to_int
        >>> convert_file_size_to_int("1MiB")
        1048576
    """
    if isinstance(size, int) and size >= 0:
        return size
    written = r"\s*(\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([KMG]i?b)\s*"
    parts = re.fullmatch(written, size, re.IGNORECASE) if isinstance(size, str) else None
    if parts is None:
        raise ValueError(
            f"size={size!r} is not a size. Give a number of bytes (an int of at least 0) or text with a unit, "
            "such as '5GB' or '512MiB'; the units are GiB, MiB, KiB, GB, MB, KB."
        )
    number, unit = parts.groups()
    in_bits = unit.endswith("b") and "i" not in unit.lower()
    return int(float(number) * _UNITS[unit.upper()] // (8 if in_bits else 1))


def listed(ranks: Sequence[int]) -> str:
    """Return the first ranks, and how many more there are."""
    more = len(ranks) - LISTED
    return ", ".join(map(str, ranks[:LISTED])) + (f" and {more} more" if more > 0 else "")
