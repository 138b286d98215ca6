"""Which address and interface of this machine reach another one, and whether that one answers."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from accelerate.launch.errors import RunError

# Addresses that are set aside for documentation (RFC 5737, RFC 3849): no machine has them, so the way to them is the way out.
_OUTSIDE = ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9)))
_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_CONNECT_S = 5.0
_PAUSE_S = 0.25
# A machine that is merely a moment later than this one is not worth a line.
_FIRST_LINE_S = 2.0
_NEXT_LINE_S = 10.0


class NoAnswerError(RunError, TimeoutError):
    """Nothing has listened at an address in time."""


def local_address(towards: str, port: int) -> str:
    """Return the address of this machine that another one sees when this one talks to it. Nothing is sent.

    Args:
        towards: name or address of the other one, or of this one.
        port: a port of it.

    Returns:
        An address that other machines may use as well, where `towards` is a name of this machine that the system takes for a
        loopback address, as Debian does.

    Raises:
        RunError: there is no such name, or no way there.

    Example:
        >>> local_address("127.0.0.1", 29500)
        '127.0.0.1'
    """
    try:
        targets = _addresses(towards, port)
    except OSError as error:
        raise RunError(
            f"The address {towards!r} cannot be looked up on this machine: {_reason(error)}. Check the name (--main_process_ip)."
        ) from None
    found, reason = _sources(targets)
    if not found:
        raise RunError(
            f"There is no way from this machine to {towards!r}: {reason}. Check the address (--main_process_ip) and the network."
        )
    wanted_inside = _is_loopback(towards) or towards.lower().rstrip(".").endswith("localhost")
    outward = [address for address in found if not _is_loopback(address)]
    if not outward and not wanted_inside:
        outward, _ = _sources(_OUTSIDE)
    return [*outward, *found][0]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if none of this machine has it.

    Args:
        address: an IPv4 or IPv6 address.
    """
    import psutil

    wanted = _parsed(address)
    for name, entries in psutil.net_if_addrs().items():
        if wanted is not None and wanted in [_parsed(entry.address) for entry in entries]:
            return name
    return None


def gloo_variables(address: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that make gloo, tensorpipe and NCCL talk through the interface of an address.

    Left alone, gloo and tensorpipe listen at whatever address the machine's own name stands for, which Debian and others write
    down as 127.0.1.1: no other machine reaches that. NCCL takes the first interface that is up, which may be one of a container
    engine.

    Args:
        address: the address that the other machines reach this one by, as `local_address` returns it.
        environ: the variables; None takes those of this process.

    Returns:
        Nothing where one of the variables is set, since its user knows better; nor for a loopback address, since all processes are
        on this machine then; nor where no interface has the address.
    """
    environ = os.environ if environ is None else environ
    if any(environ.get(name) for name in _INTERFACES) or _is_loopback(address):
        return {}
    name = interface_of(address)
    # NCCL takes a name for a prefix, unless it begins with an equals sign.
    return {} if name is None else dict(zip(_INTERFACES, (name, name, f"={name}"), strict=True))


def wait_for(host: str, port: int, seconds: float, tell: Callable[[str], None]) -> None:
    """Wait until a program listens at an address. Names are looked up anew each time, as theirs may come late too.

    Args:
        host: name or address.
        port: the port.
        seconds: how long to wait at most; a connection is tried at least once. Looking up a name may take longer than that where the
            system's resolver does.
        tell: is called with a line for the user soon, and every ten seconds.

    Raises:
        NoAnswerError: nothing listened in time.
    """
    started, next_line, where = time.monotonic(), _FIRST_LINE_S, f"{host}, port {port}"
    while True:
        left = seconds - (time.monotonic() - started)
        try:
            socket.create_connection((host, port), timeout=min(_CONNECT_S, max(left, _PAUSE_S))).close()
            return
        except (OSError, UnicodeError, OverflowError) as error:  # the last two: no name, no port
            reason = _reason(error)
        waited = time.monotonic() - started
        if waited >= seconds:
            raise NoAnswerError(
                f"Nothing has answered at {where}, within {seconds:g} s: {reason}. Check that machine 0 has been started and is "
                "still running, that --main_process_ip and --main_process_port are the same on all machines, and that no firewall is "
                "between them."
            )
        if waited >= next_line:
            tell(f"waiting for machine 0 at {where}: {reason} ({waited:.0f} of {seconds:g} s)")
            next_line = waited + _NEXT_LINE_S
        time.sleep(min(_PAUSE_S, seconds - waited))


def is_this_machine(host: str) -> bool:
    """Say whether a name or address is one of this machine.

    Args:
        host: name or address.
    """
    with contextlib.suppress(OSError):
        for family, target in _addresses(host, 0):
            # A socket can be bound to addresses of this machine only.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(target)
                return True
    return False


def _addresses(host: str, port: int) -> list[tuple[int, tuple]]:
    """Look a name up; each address once."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # a label of more than 63 characters
        raise OSError(str(error)) from None
    return list(dict.fromkeys((family, target) for family, _, _, _, target in found))


def _sources(targets: Iterable[tuple[int, tuple]]) -> tuple[list[str], str]:
    """Return the own address from which each target is reached, and why the last of the others is not."""
    found, reason = [], ""
    for family, target in targets:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                address, *rest = probe.getsockname()
        except OSError as error:
            reason = _reason(error)
            continue
        if family == socket.AF_INET6 and rest[-1] and "%" not in address:
            address = f"{address}%{socket.if_indextoname(rest[-1])}"
        found.append(address)
    return found, reason


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0].strip("[]"))
    except ValueError:
        return None


def _is_loopback(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is not None and parsed.is_loopback


def _reason(error: Exception) -> str:
    """Return an error of the system without its number."""
    words = getattr(error, "strerror", None)
    if isinstance(error, TimeoutError) and not words:
        return "no reply"
    return (words or str(error)).rstrip(".")
