"""What another release of upstream adds, removes and changes is listed; the recorded release brings no work."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[3]
TOOL = ROOT / "tools/follow_upstream.py"
PEER = ROOT / ".cache/peer/1.15.0"
spec = importlib.util.spec_from_file_location("follow_upstream", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

FRONT = """
print("modules may print")
from accelerate.core import Mode, Runner, run
"""
CORE = """
import enum, os.path

class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"

class Runner:
    def __init__(self, steps=1, seed=None): ...
    def go(self, dry=False): ...
    def stop(self): ...

def run(steps, quiet=True): ...
def _private(): ...
"""
PROGRAM = """
import argparse

def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    run = commands.add_parser("run")
    run.add_argument("--steps", default=2, type=int)
    run.add_argument("--quiet", action="store_true")
    commands.add_parser("fly")
    args = parser.parse_args()
    raise SystemExit("the program ran")
"""


def parameter(name, **default):
    return {"name": name, "kind": "POSITIONAL_OR_KEYWORD", **default}


def option(name, default, action="StoreAction", nargs=None):
    fixed = {"required": False, "type": None, "choices": None}
    return {"options": [f"--{name}"], "dest": name, "action": action, "nargs": nargs, "default": default, **fixed}


RUNNER = {
    "kind": "class",
    "init": [parameter("steps", default="1")],
    "members": {
        "go": {"kind": "method", "signature": [parameter("self")]},
        "rest": {"kind": "method", "signature": [parameter("self")]},
    },
}
RECORD = {
    "not_importable_here": {},
    "modules": {
        "accelerate": {"Runner": "accelerate.core:Runner", "run": "accelerate.core:run"},
        "accelerate.commands": {},
        "accelerate.commands.accelerate_cli": {"main": "accelerate.commands.accelerate_cli:main"},
        "accelerate.core": {name: f"accelerate.core:{name}" for name in ("Mode", "Runner", "run")},
        "accelerate.gone": {"old": "accelerate.gone:old"},
    },
    "definitions": {
        "accelerate.core:Mode": {"kind": "enum", "members": {"FAST": "'quick'"}},
        "accelerate.core:Runner": RUNNER,
        "accelerate.core:run": {
            "kind": "function",
            "signature": [parameter("steps"), parameter("quiet", default="False")],
        },
    },
}
CLI = {"commands": {"run": {"arguments": [option("steps", "1"), option("loud", "False", "StoreTrueAction", 0)]}}}


@pytest.fixture
def release(tmp_path):
    """Write a small package and the record of the release before it, and return both folders."""
    package, record = tmp_path / "wheel/accelerate", tmp_path / "record"
    (package / "commands").mkdir(parents=True)
    record.mkdir()
    for name, text in {
        "__init__.py": FRONT,
        "core.py": CORE,
        "fresh.py": "",
        "commands/__init__.py": "",
        "commands/accelerate_cli.py": PROGRAM,
    }.items():
        (package / name).write_text(text, "utf-8")
    for name, content in {"accelerate": RECORD, "values": {}, "cli": CLI}.items():
        (record / f"{name}-1.15.0.json").write_text(json.dumps(content), "utf-8")
    return package.parent, record


def test_work_is_listed_in_three_kinds(release, tmp_path):
    folder, record = release
    wheel = tmp_path / "accelerate-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder))
    command = [sys.executable, str(TOOL), "--json", "--record", str(record), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert json.loads(done.stdout) == {
        "added": [
            "accelerate run --quiet",
            "accelerate.Mode",
            "accelerate.core.Mode.SLOW",
            "accelerate.core.Runner(seed=)",
            "accelerate.core.Runner.go(dry=)",
            "accelerate.core.Runner.stop",
            "command accelerate fly",
            "module accelerate.fresh",
        ],
        "removed": [
            "accelerate run --loud",
            "accelerate.core.Runner.rest: method is missing",
            "accelerate.gone.old: its module does not import",
            "accelerate.gone: ModuleNotFoundError: No module named 'accelerate.gone'",
        ],
        "changed": [
            "accelerate run --steps: default is 2, recorded 1",
            "accelerate.core.Mode.FAST: is 'fast', recorded 'quick'",
            "accelerate.core.run(): parameter quiet defaults to True, recorded False",
        ],
    }


def test_what_is_no_release_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no folder, no wheel and no version"):
        tool.unpacked("latest", tmp_path)
    with pytest.raises(ValueError, match="holds no package"):
        tool.unpacked(str(tmp_path), tmp_path)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/__init__.py").write_text("raise OSError('broken wheel')", "utf-8")
    with pytest.raises(RuntimeError, match="broken wheel"):
        tool.inspect_wheel(tool.unpacked(str(tmp_path), tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not PEER.is_dir(), reason="upstream's wheel is not unpacked: make test-interop does it")
def test_the_recorded_release_brings_no_work():
    assert tool.inspect_wheel(PEER) == {"added": [], "removed": [], "changed": []}
