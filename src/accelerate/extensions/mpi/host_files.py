"""Host files of mpirun and of DeepSpeed's launcher, which list the machines of a run."""

import ipaddress
import os
import pathlib
import re

from accelerate.launch.errors import LaunchError

# `name`, `name:2`, `name:2:adapter` or `name slots=2`, and further settings; an IPv6 address has its count behind brackets.
# A name that began with a hyphen would be an option of ssh.
_LINE = re.compile(
    r"""(?P<user> \w[\w.-]*@ )?
    (?: (?P<name> \w[\w.-]* ) (?: :(?P<count> [1-9]\d* ) (?: :[\w.-]+ )? )?
      | (?P<bare> [\da-fA-F:.]* :[\da-fA-F:.]* :[\da-fA-F:.]* (?: %[\w.-]+ )? )
      | \[ (?P<bracketed> [\da-fA-F:.]+ (?: %[\w.-]+ )? ) \] (?: :(?P<count6> [1-9]\d* ) )? )
    (?: \s+ slots \s*=\s* (?P<slots> [1-9]\d* ) | \s+ (?!slots\b) \w[\w-]* \s*=\s* \S+ )*""",
    re.VERBOSE,
)


def read_hosts(path: str, option: str, repeated: bool = True) -> dict[str, int | None]:
    """Read a host file: `name slots=2` (Open MPI, DeepSpeed), `name:2` (MPICH, Intel MPI, MVAPICH) or `name`.

    Returns the slots of each machine in the order of the file, None where it does not say. Lines of the same machine
    add up, a line without slots as one slot; unless `repeated`, they are refused. A LaunchError names the line and the
    option.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{option}: the host file cannot be read in {os.getcwd()}: {error}.") from None
    slots: dict[str, list[int | None]] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        host, count = _host_of(text)
        if host is None or (host in slots and not repeated):
            once = "" if repeated else " once"
            hint = f"write each machine{once}, with its slots, such as `node1 slots=4`"
            raise LaunchError(f"Line {number} of {path} ({option}) is {text[:100]!r}; {hint}.")
        slots.setdefault(host, []).append(count)
    if not slots:
        raise LaunchError(f"{path} ({option}) names no machine. Write one on each line, such as `node1 slots=4`.")
    if all(len(counts) == 1 for counts in slots.values()):
        return {host: count for host, (count,) in slots.items()}
    return {host: sum(count or 1 for count in counts) for host, counts in slots.items()}


def _host_of(text: str) -> tuple[str | None, int | None]:
    """Return the machine and the slots that a line of a host file names; no machine if it is malformed."""
    match = _LINE.fullmatch(text)
    if match is None:
        return None, None
    if address := match["bare"] or match["bracketed"]:
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return None, None
    count = match["count"] or match["count6"] or match["slots"]
    return (match["user"] or "") + (match["name"] or address), int(count) if count else None
