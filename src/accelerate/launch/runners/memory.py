"""Whether the kernel has killed a process because memory ran out, as far as it says so without a privilege."""

import pathlib
import re

_ROOT = pathlib.Path("/")
_UNIT = 1 << 30


def kills(root: pathlib.Path = _ROOT) -> dict[str, int]:
    """Return how many processes were killed because memory ran out, so far, by where the memory ran out.

    Args:
        root: where the system's files are.
    """
    found = {}
    for folder in _groups(root):
        for name in ("memory.events", "memory.oom_control"):  # version 2 and 1 of control groups
            if (count := _number(folder / name, "oom_kill")) is not None:
                found[str(folder)] = count
    if (count := _number(root / "proc/vmstat", "oom_kill")) is not None:
        found[""] = count
    return found


def reason(before: dict[str, int], root: pathlib.Path = _ROOT) -> str:
    """Say why the kernel may have sent SIGKILL.

    Args:
        before: what `kills` returned when the run started.
        root: where the system's files are.
    """
    now = kills(root)
    more = [place for place, count in now.items() if count > before.get(place, count)]
    for place in filter(None, more):
        limit = _limit(pathlib.Path(place))
        return f"the memory of its control group ran out{limit}, and the kernel killed it"
    if more:
        return "the memory of this machine ran out, and the kernel killed it or another process"
    return "the launcher did not do that: somebody else did, or the kernel because memory ran out"


def _groups(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of the control groups that this process is in; within a container only the root may show."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [base]
    folders = [base, base / "memory"]
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "/")
        if not controllers:
            folders.append(base / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            folders.append(base / "memory" / path.lstrip("/"))
    return list(dict.fromkeys(reversed(folders)))


def _number(path: pathlib.Path, key: str) -> int | None:
    try:
        found = re.search(rf"^{key} (\d+)$", path.read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None


def _limit(folder: pathlib.Path) -> str:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return f" (limit {int(text) / _UNIT:.1f} GiB)"
    return ""
