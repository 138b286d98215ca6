"""Where the processes of a run meet: a key-value store of this process. Importing this module imports torch."""

import os
import socket
import sys
from typing import Any

from torch.distributed import DistNetworkError, TCPStore

LOOPBACK = "127.0.0.1"


def uses_libuv() -> bool:
    """Return whether libuv serves a store, as USE_LIBUV says; torch for Windows has none."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"


def serve(host: str, port: int, timeout: Any, **settings: Any) -> TCPStore:
    """Return a new store that listens at all addresses of this machine; `host` is the one by which others know it."""
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, use_libuv=uses_libuv(), **settings)


def serve_this_machine(port: int, timeout: Any, **settings: Any) -> TCPStore:
    """Return a new store that no other machine reaches; port 0 takes a free one."""
    if os.name != "posix":
        return serve(LOOPBACK, port, timeout, **settings)
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=2048)
    except OSError as error:
        raise DistNetworkError(f"{LOOPBACK}, port {port}: {error}") from None
    settings |= {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}  # the store closes it
    return serve(LOOPBACK, timeout=timeout, **settings)
