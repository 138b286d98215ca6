"""Lists the work that another release of upstream brings: the facts of its wheel that the followed release does not have.

    python tools/follow_upstream.py 1.16.0                 compare this version with the followed one
    python tools/follow_upstream.py some.whl               a wheel, or a folder that one was unpacked or installed into
    python tools/follow_upstream.py 1.15.0 --since 1.14.0  compare two other releases
    python tools/follow_upstream.py --behaviour 1.16.0     also call both packages with the probes of tests/interop/differential
    python tools/follow_upstream.py --json 1.16.0          print JSON

Versions are fetched once, into .cache/peer. Each wheel is imported and run in a separate process (`upstream_survey.py`); its text
is neither read nor printed. The exit status is 0 if there is no work, and 1 if there is.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
SURVEY = ROOT / "tools/upstream_survey.py"
KINDS = ("added", "removed", "changed")
# The release that this package follows: `PEER` in the Makefile.
FOLLOWED = re.search(r"^PEER .*/(\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.M)[1]  # type: ignore[index]
# Settings of the caller that change what a package does.
SETTINGS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
LIMIT_S = 3000


def unpacked(given: str, scratch: pathlib.Path) -> pathlib.Path:
    """Return a folder to put first on the path.

    Args:
        given: a folder, a wheel, or a version.
        scratch: where a wheel is unpacked; it must outlive the use of the folder.

    Raises:
        ValueError: when it is none of the three, or holds no package `accelerate`.
    """
    folder = pathlib.Path(given)
    if folder.is_file() and folder.suffix == ".whl":
        zipfile.ZipFile(folder).extractall(scratch)
        folder = scratch
    elif not folder.is_dir():
        if not re.fullmatch(r"\d+(\.\d+)+\w*", given):
            raise ValueError(f"{given!r} is no folder, no wheel and no version; give one, for instance 1.16.0.")
        folder = ROOT / ".cache/peer" / given
        if not (folder / "accelerate").is_dir():
            wanted = ["--no-deps", "--target", str(folder), f"accelerate=={given}"]
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    if not (folder / "accelerate").is_dir():
        raise ValueError(f"{given!r} holds no package `accelerate`; give the folder that a wheel was unpacked into.")
    return folder.resolve()


def run(folder: pathlib.Path, *program: str) -> str:
    """Run a Python program that imports the package of a folder, and return what it prints.

    Raises:
        RuntimeError: with the end of its messages, when it failed.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    with tempfile.TemporaryDirectory() as home:
        settings = {
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "ACCELERATE_USE_CPU": "true",
            "HF_HOME": home,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, *program]
        done = subprocess.run(command, env=kept | settings, cwd=home, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"The package in {folder} could not be inspected:\n{done.stderr[-2000:]}")
    return done.stdout


def survey(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """Return the facts of the package in a folder: subjects, and their parts."""
    return json.loads(run(folder, str(SURVEY)).splitlines()[-1])


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Return the sorted lines of work in the three kinds."""
    changed = []
    for subject in before.keys() & after.keys():
        was, now = before[subject], after[subject]
        for part in sorted(was.keys() | now.keys()):
            if was.get(part) != now.get(part):
                changed.append(f"{subject}: {part} is {now.get(part, 'absent')}, was {was.get(part, 'absent')}")
    added, removed = after.keys() - before.keys(), before.keys() - after.keys()
    return {"added": sorted(added), "removed": sorted(removed), "changed": sorted(changed)}


def probe_results(folder: pathlib.Path, scratch: pathlib.Path) -> dict[str, Any]:
    """Return the result of each case of the probes, on one process."""
    out = scratch / "probes.json"
    run(folder, "-m", "interop.differential.core", "--out", str(out))
    return json.loads(out.with_suffix(".0.json").read_text("utf-8"))


def differ(before: Any, after: Any) -> bool:
    """Return whether two results differ, except in entries that only one of them has: the survey lists those."""
    if isinstance(before, dict) and isinstance(after, dict):
        shared = before.keys() & after.keys()
        return not shared or any(differ(before[key], after[key]) for key in shared)
    return before != after


def behaviours(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return one line per probe that has cases with another result, with one of these cases."""
    cases: dict[str, list[str]] = {}
    for case in sorted(before.keys() | after.keys()):
        if case not in before or case not in after or differ(before[case], after[case]):
            cases.setdefault(case.partition("(")[0], []).append(case)
    return [
        f"behaviour {probe}: {len(found)} case{'s' * (len(found) > 1)}, such as {found[0]}"
        for probe, found in cases.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="a version, a wheel, or a folder that a wheel was unpacked into")
    parser.add_argument("--since", default=FOLLOWED, help="the release to compare with; default: %(default)s")
    parser.add_argument("--behaviour", action="store_true", help="also run the probes on both; takes minutes")
    parser.add_argument("--json", action="store_true", help="print the three lists as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        try:
            folders = [
                unpacked(release, scratch / side) for side, release in (("old", given.since), ("new", given.release))
            ]
        except ValueError as error:
            parser.error(str(error))
        work = differences(*map(survey, folders))
        if given.behaviour:
            work["changed"] += behaviours(*(probe_results(folder, scratch) for folder in folders))
    if given.json:
        print(json.dumps(work))
    else:
        for kind in KINDS:
            print("\n".join([f"{kind}: {len(work[kind])}", *(f"  {line}" for line in work[kind])]))
    return any(work.values())


if __name__ == "__main__":
    sys.exit(main())
