"""The work that another release of upstream brings is listed, in each kind of fact."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import zipfile

import pytest

from architecture import check_api

ROOT = pathlib.Path(__file__).parents[3]
TOOL = ROOT / "tools/follow_upstream.py"
PEER = ROOT / ".cache/peer/1.15.0"
spec = importlib.util.spec_from_file_location("follow_upstream", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

PACKAGE = {
    "__init__.py": """
import json, pathlib, torch
print("modules may print")
from accelerate.core import Runner, run

class Accelerator:
    def __init__(self, cpu=False, dataloader_config=None): self.step = 0
    def prepare(self, *objects): return objects
    def register_for_checkpointing(self, *objects): ...
    def backward(self, loss): loss.backward()
    def save_model(self, model, folder): ...
    def save_state(self, folder, safe_serialization):
        pathlib.Path(folder).mkdir(parents=True)
        torch.save({"steps": {"done": 1}}, folder + "/state.pt")
        pathlib.Path(folder, "info.json").write_text(json.dumps({"version": 1}))
""",
    "core.py": """
import enum, os

LIMIT = 1

class Mode(enum.Enum):
    FAST = "quick"

class Runner:
    def __init__(self, steps=1):
        self.quick = os.environ.get("RUNNER_QUICK")
    def go(self, dry=False): ...
    def rest(self): ...

def check(): ...
def run(steps, quiet=False, check=check): ...
def stop(now, later): ...
def _private(): ...
""",
    "gone.py": "",
    "state.py": """
class PartialState:
    _shared_state = {}
    def __init__(self): self.rank = 0

class AcceleratorState(PartialState): ...
class GradientState(PartialState): ...
""",
    "utils/__init__.py": """
import pathlib
from accelerate.core import Mode
class DataLoaderConfiguration:
    def __init__(self, use_seedable_sampler=True): ...
def write_basic_config(mixed_precision="no", save_location=None):
    pathlib.Path(save_location).write_text("precision: no\\nuse_cpu: false\\n")
""",
    "utils/launch.py": """
def prepare_simple_launcher_cmd_env(args): return ["python"], {"ONE": str(args.steps)}
def prepare_multi_gpu_env(args): return {"STEPS": "1"}
""",
    "commands/__init__.py": "",
    "commands/launch.py": """
import argparse
class Parser(argparse.ArgumentParser):
    def parse_args(self, words): return argparse.Namespace(steps=2)
def launch_command_parser(): return Parser()
""",
    "commands/accelerate_cli.py": """
import argparse
def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    run = commands.add_parser("run")
    run.add_argument("--steps", default=1, type=int, help="how many")
    run.add_argument("--loud", action="store_true")
    args = parser.parse_args()
    raise SystemExit("the program ran")
""",
}
# Each text of the old release, and the text of the new one.
CHANGES = {
    "__init__.py": [('"done": 1', '"done": 1, "left": 2'), ("self.step = 0", "self.step = 0; self.flag = None")],
    "core.py": [
        ("LIMIT = 1", "LIMIT = 2"),
        ('FAST = "quick"', 'FAST = "fast"\n    SLOW = "slow"'),
        ("steps=1)", "steps=1, seed=None)"),
        ("def rest(self)", "def stop(self)"),
        ("RUNNER_QUICK", "RUNNER_SLOW"),
        ("check=check)", "check=None)"),
        ("stop(now, later)", "stop(now, soon, later)"),
    ],
    "utils/__init__.py": [("use_cpu: false", "use_cpu: true\\nseed: 1")],
    "utils/launch.py": [('"STEPS": "1"', '"COUNT": "1"')],
    "commands/accelerate_cli.py": [
        ("default=1", "default=2"),
        ("how many", "the number"),
        ('"--loud"', '"--quiet"'),
        ("    args =", '    commands.add_parser("fly")\n    args ='),
    ],
}
ADDED = {"fresh.py": "import warnings; warnings.warn('old', DeprecationWarning)", "table.json": "{}"}
MODES = ("plain", "compile", "fp8", "FSDP", "Megatron-LM", "parallelism")
METADATA = "Metadata-Version: 2.1\nName: accelerate\nVersion: {}\nRequires-Dist: {}\n"


def write(folder, files, version, requirement):
    """Write a package, and what a wheel says of itself."""
    for name, text in files.items():
        path = folder / "accelerate" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    information = folder / f"accelerate-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(METADATA.format(version, requirement), "utf-8")
    return folder


@pytest.fixture
def releases(tmp_path):
    """Return the folder of a small package, and a wheel of its next release."""
    files = dict(PACKAGE)
    old = write(tmp_path / "old", files, "9.9.8", "torch>=2")
    del files["gone.py"]
    for name, replacements in CHANGES.items():
        for before, after in replacements:
            files[name] = files[name].replace(before, after)
    new = write(tmp_path / "new", files | ADDED, "9.9.9", "torch>=3")
    wheel = tmp_path / "accelerate-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in filter(pathlib.Path.is_file, new.rglob("*")):
            archive.write(path, path.relative_to(new))
    return old, wheel


def test_work_is_listed_in_three_kinds(releases):
    old, wheel = releases
    command = [sys.executable, str(TOOL), "--json", "--since", str(old), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and not done.stderr, done.stderr
    work = json.loads(done.stdout)
    digests = [line for line in work["changed"] if ": help is " in line]
    assert len(digests) == 1 and digests[0].startswith("accelerate run --steps: help is ")
    assert "the number" not in done.stdout and "how many" not in done.stdout
    work["changed"].remove(digests[0])
    assert work == {
        "added": [
            "accelerate run --quiet",
            "accelerate.Accelerator().flag",
            "accelerate.core.Mode.SLOW",
            "accelerate.core.Runner(seed=)",
            "accelerate.core.Runner.stop",
            "accelerate.core.Runner.stop(self=)",
            "accelerate.core.stop(soon=)",
            "command accelerate fly",
            "configuration file: seed",
            "file of the package accelerate/table.json",
            "file pickled/state.pt: ['steps']['left']",
            "file state/state.pt: ['steps']['left']",
            *(f"launch sets COUNT ({mode})" for mode in sorted(MODES)),
            "module accelerate.fresh",
            "reads the variable RUNNER_SLOW",
            "requires torch>=3",
            "warning at import: DeprecationWarning from fresh.py",
        ],
        "removed": [
            "accelerate run --loud",
            "accelerate.core.Runner.rest",
            "accelerate.core.Runner.rest(self=)",
            *(f"launch sets STEPS ({mode})" for mode in sorted(MODES)),
            "module accelerate.gone",
            "reads the variable RUNNER_QUICK",
            "requires torch>=2",
        ],
        "changed": [
            "accelerate run --steps: default is 2, was 1",
            "accelerate.core.LIMIT: value is 2, was 1",
            "accelerate.core.Mode.FAST: value is 'fast', was 'quick'",
            "accelerate.core.run(check=): default is None, was accelerate.core.check",
            "accelerate.core.stop(later=): follows is soon, was now",
            "configuration file: use_cpu: value is True, was False",
        ],
    }


def test_behaviours_are_counted_by_probe():
    before = {"a.f(x=1)": 1, "a.f(x=2)": 2, "a.g(x=1)": {"old": 1}, "b.h(x=1)": {"raises": ["KeyError"]}}
    after = {"a.f(x=1)": 2, "a.f(x=2)": 3, "a.g(x=1)": {"old": 1, "new": 2}, "b.h(x=1)": 4}
    assert tool.behaviours(before, after) == [
        "behaviour a.f: 2 cases, such as a.f(x=1)",
        "behaviour b.h: 1 case, such as b.h(x=1)",
    ]


def test_other_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no folder, no wheel and no version"):
        tool.unpacked("latest", tmp_path)
    with pytest.raises(ValueError, match="holds no package"):
        tool.unpacked(str(tmp_path), tmp_path)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/__init__.py").write_text("raise OSError('broken wheel')", "utf-8")
    with pytest.raises(RuntimeError, match="broken wheel"):
        tool.survey(tool.unpacked(str(tmp_path), tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not PEER.is_dir(), reason="upstream's wheel is not unpacked: make test-interop does it")
def test_the_survey_repeats_and_has_every_recorded_name():
    facts = tool.survey(PEER)
    assert tool.differences(facts, tool.survey(PEER)) == {"added": [], "removed": [], "changed": []}
    assert [subject for subject in facts if subject.startswith("survey of")] == []
    recorded = {
        f"{path}.{name}"
        for path, names in check_api.load("accelerate-1.15.0.json")["modules"].items()
        for name in names
    }
    names = {subject.removeprefix("import ") for subject in facts}
    assert recorded - names == set()
