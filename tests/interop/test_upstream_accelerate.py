"""The pull request for accelerate, proved on upstream's own sources, on one and two processes.

Needed: the unpacked sources in `.cache/upstream` (`make test-upstream` fetches them; another folder: `UPSTREAM_SOURCES_DIR=DIR`).
What is not there is skipped. The sources stand before this package on PYTHONPATH, and every program says what it ran.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.interop]

ROOT = Path(__file__).parents[2]
SOURCES = Path(os.environ.get("UPSTREAM_SOURCES_DIR", ROOT / ".cache" / "upstream"))
VERSIONS = ["1.12.0", "1.15.0"]
TEST = "tests/test_double_prepare.py"
CHANGED = {
    "src/accelerate/accelerator.py": "M",
    "src/accelerate/utils/prepared.py": "A",
    TEST: "A",
}
IDENTITY = ["-c", "user.name=Applier", "-c", "user.email=applier@example.org", "-c", "commit.gpgsign=false"]
LIMIT_S = 400
# Threads of the gloo backend abort a process that is being torn down now and then, with plain torch as well.
ABORTED = "terminate called without an active exception"

# A model that is evaluated first and trained then; shown in docs/upstream/double-prepare.md, with what it printed.
EVALUATED_FIRST = """\
import json, os
import accelerate, torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
network = torch.nn.Linear(3, 1)
accelerator.prepare_model(network, evaluation_mode=True)
model = accelerator.prepare(network)
inputs = torch.full((2, 3), 1.0 + accelerator.process_index)
accelerator.backward(model(inputs).sum())
gradients = accelerator.gather(network.weight.grad[:, :1]).flatten().tolist()
if accelerator.is_main_process:
    seen = {"version": accelerate.__version__, "file": accelerate.__file__, "model": type(model).__name__}
    print(json.dumps({**seen, "listed": len(accelerator._models), "gradients": gradients}), flush=True)
accelerator.wait_for_everyone()
os._exit(0)
"""
# Ordinary programs: nothing is prepared twice in them, so nothing may change.
ORDINARY = """\
import json, os, sys, warnings
import accelerate, torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import set_seed

def train(accelerator, figures):
    set_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            figures.append(accelerator.gather(loss.detach()[None]).tolist())
    figures.append([len(loader), scheduler.get_last_lr()[0], type(model).__name__])

def compete(accelerator, figures):
    set_seed(2)
    maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
    steps = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (maker, judge)]
    maker, judge, *steps = accelerator.prepare(maker, judge, *steps)
    for _ in range(4):
        fake = maker(torch.randn(5, 2))
        for step, sign, made in ((steps[1], -1, fake.detach()), (steps[0], 1, fake)):
            loss = sign * judge(made).mean()
            step.zero_grad()
            accelerator.backward(loss)
            step.step()
        figures.append(accelerator.gather(loss.detach()[None]).tolist())

def one_by_one(accelerator, figures):
    set_seed(3)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model), accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    folder = os.path.join(sys.argv[1], "state")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    figures.append([value.tolist() for value in accelerator.get_state_dict(model).values()])

figures = []
warnings.filterwarnings("error", message=".*prepared.*")
accelerator = Accelerator(cpu=True, mixed_precision=sys.argv[2], gradient_accumulation_steps=2)
for program in (train, compete, one_by_one):
    program(accelerator, figures)
    accelerator.free_memory()
if accelerator.is_main_process:
    print(json.dumps({"file": accelerate.__file__, "figures": figures}), flush=True)
accelerator.wait_for_everyone()
os._exit(0)
"""
PICKLED = """\
import json, pickle
import accelerate, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = torch.nn.Linear(2, 2), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accelerator.prepare(model, optimizer)
again, copied = pickle.loads(pickle.dumps((accelerator, model)))
assert again.prepare(copied) is copied and len(again._models) == 1 and again._models[0] is copied
print(json.dumps({"file": accelerate.__file__, "optimizers": len(again._optimizers)}))
"""


@dataclass(frozen=True)
class Release:
    """One release of accelerate: its unpacked source, the same with the patch applied, and the exported folder."""

    version: str
    source: Path
    patched: Path
    exported: Path


def python(tree: Path, *program: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a program on a tree of accelerate, on one process or under torch's launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    variables = {
        **kept,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *program]
    for _ in range(3):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
        if ABORTED not in done.stderr:
            break
    return done


def figures(tree: Path, program: Path, *options: str, processes: int) -> dict[str, Any]:
    """Return what a program prints on a tree, after a check that it ran on this tree."""
    done = python(tree, str(program), *options, processes=processes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert Path(found.pop("file")).is_relative_to(tree)
    return found


def git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", *IDENTITY, *command], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def export(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "tools/upstream_patches"),
        "--package",
        "accelerate",
        "--source",
        str(source),
    ]
    words = ["--out", str(out), "--author", "Ada Author <ada@example.org>", "--date", "2026-01-31T12:00:00+00:00"]
    return subprocess.run([*command, *words], capture_output=True, text=True)


@pytest.fixture(scope="module", params=VERSIONS)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Export the pull request for one release, and apply it in a repository of its own with `git am`."""
    source = SOURCES / f"accelerate-{request.param}"
    if not (source / "src").is_dir():
        pytest.skip(f"{source} is not there; `make test-upstream` fetches it")
    folder = tmp_path_factory.mktemp(f"accelerate-{request.param}")
    patched, out = folder / "patched", folder / "out"
    done = export(source, out)
    assert done.returncode == 0, done.stderr
    shutil.copytree(source, patched)
    git(patched, "init", "--quiet")
    git(patched, "add", "--all", "--force")
    git(patched, "commit", "--quiet", "-m", "as it was released")
    git(patched, "apply", "--check", "--whitespace=error", str(out / "0001-double-prepare.patch"))
    git(patched, "am", "--quiet", str(out / "0001-double-prepare.patch"))
    return Release(request.param, source, patched, out)


@pytest.fixture
def script(tmp_path: Path):
    """Write a program to a file."""

    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(text, "utf-8")
        return path

    return write


def test_the_commit(release):
    assert "Ada Author <ada@example.org>" in git(release.patched, "log", "-1", "--format=%an <%ae>")
    assert "Detect objects that are prepared twice" in git(release.patched, "log", "-1", "--format=%s")
    lines = git(release.patched, "diff", "--name-status", "HEAD~1").splitlines()
    assert {path: status for status, path in map(str.split, lines)} == CHANGED
    # The change to the existing file consists of a few new lines.
    changed = git(release.patched, "diff", "--numstat", "HEAD~1", "--", "src/accelerate/accelerator.py").split()
    assert int(changed[0]) < 20 and int(changed[1]) == 0
    for path in ("src/accelerate/utils/prepared.py", TEST):
        assert (release.patched / path).read_text("utf-8").startswith("# Licensed under the Apache License")


def test_what_lies_in_the_folder(release):
    files = {path.relative_to(release.exported).as_posix() for path in release.exported.rglob("*") if path.is_file()}
    assert files == {"0001-double-prepare.patch", "PULL_REQUEST.md", TEST}
    assert (release.exported / TEST).read_text("utf-8") == (release.patched / TEST).read_text("utf-8")
    assert release.version in (release.exported / "PULL_REQUEST.md").read_text("utf-8")


def test_a_second_export_is_refused(release, tmp_path):
    done = export(release.patched, tmp_path / "out")
    assert done.returncode == 2 and "already" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_reproduction(release, processes):
    def numbers(tree):
        program = str(ROOT / "examples" / "prepare_twice.py")
        done = python(tree, program, "--double-prepare", processes=processes)
        # Rank 0 has printed everything before a process is torn down.
        assert done.returncode == 0 or ABORTED in done.stderr, done.stderr
        found = {key.strip(): value for key, value in re.findall(r"^([^:\n]+): (.*)$", done.stdout, re.M)}
        return {**found, "all": done.stdout}

    before, after = numbers(release.source), numbers(release.patched)
    calls = {f"state_dict calls, {what}_state": f"{[1] * processes} (one number a rank)" for what in ("save", "load")}
    wanted = {"warnings": "3", "models in the registry": "1", "distinct wrappers": "1", **calls}
    assert {key: after[key] for key in wanted} == wanted
    assert after["wrappers around the module"] == str(processes - 1)
    assert re.search(r"^the warning, at prepare_twice\.py:\d+: This model .* already prepared", after["all"], re.M)
    assert before["warnings"] == "0"
    if processes > 1 or release.version == "1.12.0":
        assert before["models in the registry"] == "4"
        assert before["state_dict calls, save_state"].startswith(str([4] * processes))
    if processes > 1:
        assert int(before["distinct wrappers"]) > 1


def test_evaluated_first_then_trained(release, script):
    program = script(EVALUATED_FIRST)
    before = figures(release.source, program, processes=2)
    after = figures(release.patched, program, processes=2)
    assert after == {
        "version": release.version,
        "model": "DistributedDataParallel",
        "listed": 1,
        "gradients": [3.0, 3.0],
    }
    # 1.12.0 lists the model twice; 1.15.0 leaves it without a wrapper, and each process keeps its own gradients.
    assert (before["model"], before["listed"], before["gradients"]) == {
        "1.12.0": ("DistributedDataParallel", 2, [3.0, 3.0]),
        "1.15.0": ("Linear", 1, [2.0, 4.0]),
    }[release.version]


def test_the_exported_test(release):
    options = ["-q", "-p", "no:cacheprovider", "--tb=short"]
    after = python(release.patched, "-m", "pytest", *options, str(release.patched / TEST))
    assert after.returncode == 0, after.stdout[-8000:] + after.stderr[-2000:]
    assert re.search(r"\b\d+ passed", after.stdout) and "skipped" not in after.stdout, after.stdout
    before = python(release.source, "-m", "pytest", *options, str(release.exported / TEST))
    failed = set(re.findall(r"^FAILED .*::(\w+)", before.stdout, re.M))
    assert before.returncode == 1 and {"test_inner_module", "test_on_two_processes"} <= failed, before.stdout[-4000:]


@pytest.mark.parametrize("processes, precision", [(1, "no"), (1, "bf16"), (2, "no"), (2, "bf16")])
def test_ordinary_programs_are_the_same(release, script, tmp_path, processes, precision):
    program = script(ORDINARY)
    seen = [
        figures(tree, program, str(tmp_path / tree.name), precision, processes=processes)
        for tree in (release.source, release.patched)
    ]
    assert seen[0] == seen[1] and len(seen[0]["figures"]) > 10


def test_the_accelerator_still_pickles(release, script):
    assert figures(release.patched, script(PICKLED), processes=1) == {"optimizers": 1}
