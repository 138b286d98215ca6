"""Ports of this machine."""

import socket

from accelerate.runtime.ranks import DEFAULT_PORT


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a program on this machine listens on a port, by default 29500, where processes meet.

    Example:
        >>> from accelerate.utils import is_port_in_use
        >>> is_port_in_use(1)
        False
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("localhost", DEFAULT_PORT if port is None else int(port))) == 0


def get_free_port() -> int:
    """Return a port that no program listens on now. Another program may take it before you do.

    Example:
        >>> from accelerate.utils.other import get_free_port
        >>> 0 < get_free_port() < 65536
        True
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
