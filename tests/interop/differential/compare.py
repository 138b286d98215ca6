"""What two runs of the probes have in common, and which differences are meant.

python -m interop.differential.compare [--only REGEX] [--whole]     run both packages and list what differs
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interop.differential.meant import MEANT, Meant

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
PEER = ROOT / ".cache" / "peer" / "1.15.0"
LIMIT_S = 3000


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One comparison: `meant` is the entry that explains a difference."""

    case: str
    ours: Any
    peers: Any
    equal: bool
    meant: Meant | None = None

    def __str__(self) -> str:
        return f"{self.case}\n    here  {json.dumps(self.ours)[:400]}\n    there {json.dumps(self.peers)[:400]}"


def raised(result: Any) -> list[str]:
    """Return the names of an exception's classes, its own first; nothing for a value."""
    return (result.get("raises") or result.get("exception") or []) if isinstance(result, dict) else []


def same(ours: Any, peers: Any) -> bool:
    """Return whether a caller sees the same: equal values, or an exception that the same `except` clause catches."""
    if raised(ours) and raised(peers):
        return raised(peers)[0] in raised(ours)
    if isinstance(ours, dict) and isinstance(peers, dict):
        return ours.keys() == peers.keys() and all(same(ours[key], peers[key]) for key in ours)
    if isinstance(ours, list) and isinstance(peers, list):
        return len(ours) == len(peers) and all(map(same, ours, peers))
    return type(ours) is type(peers) and ours == peers


def kind(result: Any) -> str:
    """Return the exception's name, or an empty string for a value."""
    return next(iter(raised(result)), "")


def explanation(case: str, ours: Any, peers: Any) -> Meant | None:
    """Return the first meant difference that a case falls under."""
    return next((meant for meant in MEANT if meant.explains(case, kind(ours), kind(peers))), None)


def verdicts(ours: dict[str, Any], peers: dict[str, Any]) -> Iterator[Verdict]:
    """Compare two runs case by case; a case that one of them lacks is a difference."""
    missing = {"raises": ["<no such case>"]}
    for case in {**ours, **peers}:
        here, there = ours.get(case, missing), peers.get(case, missing)
        equal = same(here, there)
        yield Verdict(case, here, there, equal, None if equal else explanation(case, here, there))


def run(folder: Path, peer: bool, processes: int, whole: bool, only: str = "") -> subprocess.Popen[str]:
    """Start the probes on one of the packages."""
    paths = [str(TESTS), str(PEER if peer else ROOT / "src")]
    settings = {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
    }
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    )
    arguments = ["--out", str(folder / ("peer.json" if peer else "ours.json")), "--only", only, *(["--whole"] * whole)]
    command = [sys.executable, *launcher, "-m", "interop.differential.core", *arguments]
    return subprocess.Popen(
        command, env={**environment, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@functools.cache
def compared(processes: int, whole: bool, only: str = "") -> list[Verdict]:
    """Run the probes on both packages at a time and compare every rank's results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = [run(folder, peer, processes, whole, only) for peer in (False, True)]
        for process in running:
            output, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"{process.args}\n{output[-6000:]}"
        found = []
        for rank in range(processes):
            ours, peers = (json.loads((folder / f"{who}.{rank}.json").read_text("utf-8")) for who in ("ours", "peer"))
            found += [
                dataclasses.replace(v, case=f"{v.case} [rank {rank} of {processes}]") for v in verdicts(ours, peers)
            ]
        return found


def main() -> int:
    """Run both and print what differs without being meant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for names of probes")
    parser.add_argument("--whole", action="store_true", help="run every case, also of the slow probes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--meant", action="store_true", help="list the meant ones as well")
    options = parser.parse_args()
    found = [v for size in options.processes for v in compared(size, options.whole, options.only)]
    differing = [v for v in found if not v.equal]
    print("\n".join(str(v) for v in differing if options.meant or not v.meant))
    unmeant = sum(not v.meant for v in differing)
    print(
        f"{len(found) - len(differing)} of {len(found)} equal, {len(differing) - unmeant} meant, {unmeant} not meant"
    )
    return bool(unmeant)


if __name__ == "__main__":
    sys.exit(main())
