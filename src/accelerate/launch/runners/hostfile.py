"""Files that list the machines of a run, as mpirun and DeepSpeed read them."""

import os
import pathlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from accelerate.launch.errors import LaunchError

# A name or an address. One that begins with a hyphen would be an option of ssh.
_NAME = re.compile(
    r"(?:[\w.-]+@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)"
)
_COLON = re.compile(r"((?:[\w.-]+@)?[A-Za-z0-9_][\w.-]*):([^:]*)")


@dataclass(frozen=True)
class Host:
    """A line of a host file.

    Attributes:
        name: the machine, with the user to log in as if one is named.
        slots: how many processes it takes; None where the file does not say.
    """

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """The machine without a user."""
        return self.name.rpartition("@")[2].strip("[]")


@dataclass(frozen=True)
class Hostfile:
    """The machines of a run.

    Attributes:
        path: the file.
        hosts: its machines, in its order, each once.
        style: how it is written: "slots" (`name slots=2`: Open MPI, DeepSpeed), "colon" (`name:2`: MPICH, Intel MPI,
            MVAPICH), "plain" (`name`: all of them), or "mixed", which no program reads.
    """

    path: str
    hosts: tuple[Host, ...]
    style: str


def read(path: str, option: str, repeats: bool = True) -> Hostfile:
    """Read a host file of any of the styles.

    Args:
        path: the file.
        option: the option that named it, for the errors.
        repeats: a machine may be listed again, which adds a slot; otherwise that is an error.

    Raises:
        LaunchError: there is no such file, it names no machine, or a line is malformed. The message names the line.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        ...     print("node1 slots=4", "node2 slots=4  # the new one", sep="\\n", file=file, flush=True)
        ...     [host.slots for host in read(file.name, "--mpirun_hostfile").hosts]
        [4, 4]
    """
    slots: dict[str, int | None] = {}
    styles = set()
    for number, line in enumerate(_lines(path, option), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, count, style = _parse(words, f"line {number} of {path} ({option})")
        if name in slots:
            if not repeats:
                raise LaunchError(f"{name} stands twice in {path} ({option}). Give each machine one line.")
            style, count = "mixed", (slots[name] or 1) + (count or 1)
        slots[name] = count
        styles.add(style)
    if not slots:
        raise LaunchError(f"{path} ({option}) names no machine. Write one on each line, such as `node1 slots=4`.")
    hosts = tuple(Host(name, count) for name, count in slots.items())
    return Hostfile(path, hosts, styles.pop() if len(styles) == 1 else "mixed")


def layout(hosts: Sequence[Host], count: int, machines: int | None, option: str) -> tuple[tuple[Host, int], ...]:
    """Decide how many processes each machine gets: the same number everywhere if the slots allow it.

    Args:
        hosts: the machines that there are.
        count: the processes of all machines together.
        machines: how many machines take part; None fills the slots in the order of the hosts, or takes all hosts where
            the file tells no slots.
        option: the option that named the file, for the errors.

    Returns:
        The machines that take part, in order, each with its number of processes.

    Raises:
        LaunchError: there are too few machines or too few slots.

    Example:
        >>> [(host.name, n) for host, n in layout([Host("a", 4), Host("b", 2)], 6, None, "--mpirun_hostfile")]
        [('a', 4), ('b', 2)]
    """
    if machines is not None and machines > len(hosts):
        raise LaunchError(
            f"--num_machines is {machines}, and {option} names {len(hosts)}. Add the others, or ask for fewer."
        )
    if all(host.slots is not None for host in hosts):
        used = _first(hosts, count) if machines is None else machines
        chosen, room = hosts[:used], sum(host.slots or 0 for host in hosts[:used])
        if room < count:
            raise LaunchError(
                f"--num_processes is {count}, and {option} has {room} slots on {len(chosen)} machines. Ask for fewer processes, "
                "or add slots."
            )
        if count % len(chosen) == 0 and all((host.slots or 0) >= count // len(chosen) for host in chosen):
            return tuple((host, count // len(chosen)) for host in chosen)
        return _fill(chosen, count)
    chosen = hosts[: min(len(hosts), count) if machines is None else machines]
    if count % len(chosen):
        raise LaunchError(
            f"--num_processes is {count}, which does not divide evenly over the {len(chosen)} machines of {option}. Change it, or "
            "write slots=N behind each machine."
        )
    return tuple((host, count // len(chosen)) for host in chosen)


def is_here(address: str) -> bool:
    """Tell whether a machine is this one.

    Args:
        address: its name or address.
    """
    if address in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)  # the system refuses the addresses of others
                return True
        except OSError:
            continue
    return False


def _lines(path: str, option: str) -> list[str]:
    if os.path.isdir(path):
        raise LaunchError(f"{option} is {path!r}: that is a folder; name the host file in it.")
    if not os.path.isfile(path):
        raise LaunchError(f"{option} is {path!r}: there is no such file (looked in {os.getcwd()}).")
    try:
        return pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{option} is {path!r}, and it cannot be read: {error}") from None


def _parse(words: list[str], where: str) -> tuple[str, int | None, str]:
    name, count, style = words[0], None, "plain"
    if colon := _COLON.fullmatch(name):
        name, count, style = colon[1], _number(colon[2], where), "colon"
    if not _NAME.fullmatch(name):
        raise LaunchError(f"{where} begins with {name[:100]!r}, which is no name or address of a machine.")
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise LaunchError(f"{where} holds {word[:100]!r}; behind the machine write slots=N or nothing.")
        if key == "slots":
            if style == "colon":
                raise LaunchError(f"{where} tells the slots twice. Write {name} slots={value[:20]}.")
            count, style = _number(value, where), "slots"
    return name, count, style


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text[:9]) < 1 or len(text) > 6:
        raise LaunchError(f"{where} tells {text[:50]!r} slots; that must be a number from 1.")
    return int(text)


def _first(hosts: Sequence[Host], count: int) -> int:
    room = 0
    for number, host in enumerate(hosts, start=1):
        room += host.slots or 0
        if room >= count:
            return number
    return len(hosts)


def _fill(hosts: Sequence[Host], count: int) -> tuple[tuple[Host, int], ...]:
    filled = []
    for host in hosts:
        taken = min(host.slots or 0, count)
        count -= taken
        filled.append((host, taken))
    return tuple((host, taken) for host, taken in filled if taken)
