"""Addresses of this machine that other machines reach. Nothing here imports torch."""

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping

from accelerate.launch.errors import RunError

# Addresses that are set aside for documentation (RFC 5737, RFC 3849): no machine has them, so the way to them is the way out.
_OUTSIDE = ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9)))


def local_address(towards: str, port: int) -> str:
    """Return the address of this machine that another one (`towards`) sees when they talk; nothing is sent.

    Where `towards` is a name of this machine for which the system has a loopback address, as Debian does, it is one
    that other machines may use as well. A RunError says that there is no such name, or no way there.
    """
    try:
        found = _sources(_addresses(towards, port))
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"The address {towards!r} cannot be looked up: {reason}. Check --main_process_ip.") from None
    if not found:
        raise RunError(f"There is no way from this machine to {towards!r} (--main_process_ip). Check the network.")
    outward = [address for address in found if not _is_loopback(address)]
    if not outward and not _is_loopback(towards) and not towards.lower().rstrip(".").endswith("localhost"):
        outward = _sources(_OUTSIDE)
    return [*outward, *found][0]


def gloo_variables(address: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variable that makes gloo talk through the interface of a local address.

    Left alone, gloo listens at the address of the machine's own name, which Debian writes down as 127.0.1.1. NCCL is left alone:
    a variable would override what an administrator has written into nccl.conf. Returns nothing where the user has set the
    variable, for a loopback address, and where no interface has the address.
    """
    environ = os.environ if environ is None else environ
    if environ.get("GLOO_SOCKET_IFNAME") or _is_loopback(address):
        return {}
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if address in [entry.address for entry in entries]:
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def is_this_machine(host: str) -> bool:
    """Return whether a name or address is one of this machine."""
    with contextlib.suppress(OSError):
        for family, target in _addresses(host, 0):
            # A socket can be bound to addresses of this machine only.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(target)
                return True
    return False


def _addresses(host: str, port: int) -> list[tuple[int, tuple]]:
    return [(family, target) for family, *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)]


def _sources(targets: Iterable[tuple[int, tuple]]) -> list[str]:
    """Return the own addresses from which the targets are reached."""
    found = []
    for family, target in targets:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            found.append(probe.getsockname()[0])
    return found


def _is_loopback(address: str) -> bool:
    return address == "::1" or re.fullmatch(r"127(\.\d+){3}", address) is not None
