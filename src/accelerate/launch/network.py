"""Which address and interface of this machine reach another one, and whether that one answers."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from accelerate.launch.errors import RunError

# Addresses that are set aside for documentation (RFC 5737, RFC 3849): nobody has them, so the way to them is the way out.
_OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_CONNECT_S = 5.0
_PAUSE_S = 0.25
# A machine that is merely a moment later than this one is not worth a line.
_FIRST_TELL_S = 2.0
_TELL_S = 10.0


class NoAnswerError(RunError, TimeoutError):
    """Nobody has listened at an address in time."""


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
    found, last = [], None
    for family, target in targets:
        try:
            found.append(_source(family, target))
        except OSError as error:
            last = error
    if not found:
        raise RunError(
            f"There is no way from this machine to {towards!r}: {_reason(last)}. Check the address (--main_process_ip) and the "
            "network."
        )
    best = next((address for address in found if not _is_loopback(address)), None)
    if best is None and not (_is_loopback(towards) or towards.lower().rstrip(".").endswith("localhost")):
        best = _outward_address()
    return best or found[0]


def _addresses(host: str, port: int) -> list[tuple[int, tuple]]:
    """Look a name up; each address once."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # a label of more than 63 characters
        raise OSError(str(error)) from None
    return list(dict.fromkeys((family, target) for family, _, _, _, target in found))


def _source(family: int, target: tuple) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address, *rest = probe.getsockname()
    if family == socket.AF_INET6 and rest[-1] and "%" not in address:
        address = f"{address}%{socket.if_indextoname(rest[-1])}"
    return address


def _outward_address() -> str | None:
    for family, outside in _OUTSIDE:
        with contextlib.suppress(OSError):
            return _source(family, (outside, 9))
    return None


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0].strip("[]"))
    except ValueError:
        return None


def _is_loopback(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is not None and parsed.is_loopback


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if none of this machine has it.

    Args:
        address: an IPv4 or IPv6 address.
    """
    wanted = _parsed(address)
    if wanted is None:
        return None
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(_parsed(entry.address) == wanted for entry in entries):
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
    return {} if name is None else {_INTERFACES[0]: name, _INTERFACES[1]: name, _INTERFACES[2]: f"={name}"}


def wait_for(host: str, port: int, seconds: float, tell: Callable[[str], None]) -> None:
    """Wait until somebody listens at an address. Names are looked up anew each time, as theirs may come late too.

    Args:
        host: name or address.
        port: the port.
        seconds: how long to wait at most; a connection is tried at least once. Looking up a name may take longer than that where the
            system's resolver does.
        tell: is called with a line for the user soon, and every ten seconds.

    Raises:
        NoAnswerError: nobody listened in time.
    """
    started, told = time.monotonic(), None
    where = f"{host}, port {port}"
    while True:
        try:
            _connect(host, port, min(_CONNECT_S, max(seconds - (time.monotonic() - started), _PAUSE_S)))
            return
        except OSError as error:
            last = error
        waited = time.monotonic() - started
        if waited >= seconds:
            raise NoAnswerError(
                f"Nobody has answered at {where}, within {seconds:g} s: {_reason(last)}. Check that machine 0 has been started and is "
                "still running, that --main_process_ip and --main_process_port are the same on all machines, and that no firewall is "
                "between them."
            )
        if waited >= (_FIRST_TELL_S if told is None else told + _TELL_S):
            tell(f"waiting for machine 0 at {where}: {_reason(last)} ({waited:.0f} of {seconds:g} s)")
            told = waited
        time.sleep(min(_PAUSE_S, seconds - waited))


def _connect(host: str, port: int, seconds: float) -> None:
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except (
        UnicodeError,
        OverflowError,
    ) as error:  # no name, no port: time does not help, but the message says what it is
        raise OSError(str(error)) from None


def _reason(error: OSError | None) -> str:
    """Return an error of the system without its number."""
    if isinstance(error, TimeoutError) and not error.strerror:
        return "no reply"
    return (error.strerror if error is not None and error.strerror else str(error)).rstrip(".")


def is_this_machine(host: str) -> bool:
    """Say whether a name or address is one of this machine.

    Args:
        host: name or address.
    """
    return any(_is_own(family, target) for family, target in _lookup(host))


def _lookup(host: str) -> Iterator[tuple[int, tuple]]:
    try:
        yield from _addresses(host, 0)
    except OSError:
        return


def _is_own(family: int, target: tuple) -> bool:
    # A socket can be bound to addresses of this machine only.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True
