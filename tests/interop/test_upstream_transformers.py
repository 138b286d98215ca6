"""The pull request for transformers, proved on upstream's own sources with upstream's accelerate 1.15.0, two processes.

Needed: the unpacked sources (`make test-upstream`; another folder: `UPSTREAM_SOURCES_DIR=DIR`), and for each release an
environment with its dependencies: `.venv-transformers-4.57.6` and `.venv`, or another one named by
`TRANSFORMERS_ENVIRONMENTS=4.57.6=DIR,5.23.0=DIR`. What is not there is skipped. Which transformers and accelerate the
environment holds does not matter: the unpacked ones stand before them on PYTHONPATH, and every program says what it ran.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.interop]

ROOT = Path(__file__).parents[2]
SOURCES = Path(os.environ.get("UPSTREAM_SOURCES_DIR", ROOT / ".cache" / "upstream"))
ENVIRONMENTS = {
    "4.57.6": ROOT / ".venv-transformers-4.57.6",
    "5.23.0": ROOT / ".venv",
    **{
        version: Path(folder)
        for version, _, folder in (
            item.partition("=") for item in os.environ.get("TRANSFORMERS_ENVIRONMENTS", "").split(",") if item
        )
    },
}
ACCELERATE = "accelerate-1.15.0"
TEST = "tests/trainer/test_accelerator_state.py"
IDENTITY = ["-c", "user.name=Applier", "-c", "user.email=applier@example.org", "-c", "commit.gpgsign=false"]
LIMIT_S = 400

# Shown in docs/upstream/state-reset.md, with what it printed.
REPRODUCTION = """\
import json, sys
import torch
import accelerate, transformers
from accelerate import Accelerator
from transformers import TrainingArguments

accelerator = Accelerator(cpu=True)
if accelerator.is_main_process:
    print(json.dumps({"accelerate": accelerate.__version__, "transformers": transformers.__version__}), flush=True)
before = accelerator.state.distributed_type
arguments = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to=[])
assert accelerator.state.distributed_type == before
rank = torch.tensor([accelerator.process_index])
assert accelerator.gather(rank).tolist() == list(range(accelerator.num_processes))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print(json.dumps({"processes": accelerator.num_processes, "arguments": arguments.world_size}), flush=True)
torch.distributed.destroy_process_group()
"""


@dataclass(frozen=True)
class Release:
    """One release of transformers: its unpacked source, the same with the patch applied, and the exported folder."""

    version: str
    python: Path
    source: Path
    patched: Path
    exported: Path

    def run(self, tree: Path, *program: str) -> subprocess.CompletedProcess[str]:
        """Run Python on a tree of transformers and on upstream's accelerate."""
        paths = [str(tree / "src"), str(SOURCES / ACCELERATE / "src")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
        variables = {
            **kept,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(self.python), *program]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S)


def need(folder: Path, target: str) -> None:
    if not folder.exists():
        pytest.skip(f"{folder} is not there; `make {target}` makes it")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"git {' '.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module", params=["4.57.6", "5.23.0"])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """A release whose exported patch was checked and applied in a repository made of its source."""
    version = request.param
    source = SOURCES / f"transformers-{version}"
    for folder in (source, SOURCES / ACCELERATE):
        need(folder, "test-upstream")
    need(ENVIRONMENTS[version], "test-upstream")
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    base = tmp_path_factory.mktemp(f"transformers-{version}")
    exported, patched = base / "out", base / "repository"
    done = export(source, exported)
    assert done.returncode == 0, done.stderr
    shutil.copytree(source, patched)
    git(patched, "init", "--quiet")
    git(patched, "add", "--all", "--force")
    git(patched, "commit", "--quiet", "--message", "As released")
    patch = str(next(exported.glob("0001-*.patch")))
    git(patched, "apply", "--check", patch)
    git(patched, "am", "--quiet", patch)
    return Release(version, ENVIRONMENTS[version] / "bin" / "python", source, patched, exported)


def export(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "tools/upstream_patches"),
        "--package",
        "transformers",
        "--source",
        str(source),
    ]
    words = ["--out", str(out), "--author", "Ada Lovelace <ada@example.org>", "--date", "2026-01-31T12:00:00+00:00"]
    return subprocess.run([*command, *words], capture_output=True, text=True)


@pytest.fixture
def reproduce(release: Release, tmp_path: Path) -> Callable[[Path, int], subprocess.CompletedProcess[str]]:
    """Run the reproduction on a tree, with so many processes."""
    program = tmp_path / "reproduce.py"
    program.write_text(REPRODUCTION, "utf-8")

    def run(tree: Path, processes: int) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return release.run(tree, *launcher, str(program), str(tmp_path / "arguments"))

    return run


def figures(text: str) -> dict[str, object]:
    return {
        name: value for line in text.splitlines() if line.startswith('{"') for name, value in json.loads(line).items()
    }


def test_the_patch_is_one_commit(release):
    shown = git(release.patched, "log", "--format=%an|%ae|%aI|%s", "HEAD~1..HEAD").strip()
    title = "Keep an existing accelerator state in TrainingArguments"
    assert shown == f"Ada Lovelace|ada@example.org|2026-01-31T12:00:00+00:00|{title}"
    changed = git(release.patched, "show", "--format=", "--name-status", "HEAD").split()
    assert changed[::2] == ["M", "A", "A"] and changed[5] == TEST
    assert git(release.patched, "show", "--format=", "--numstat", "HEAD").split()[1::3] == ["0", "0", "0"]
    assert git(release.patched, "status", "--porcelain") == ""
    assert (release.exported / TEST).read_bytes() == (release.patched / TEST).read_bytes()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_patched_package_keeps_the_state(release, reproduce, processes):
    done = reproduce(release.patched, processes)
    assert done.returncode == 0, done.stderr[-4000:]
    assert figures(done.stdout) == {
        "accelerate": "1.15.0",
        "transformers": release.version,
        "processes": processes,
        "arguments": processes,
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_the_package_as_released_loses_it(release, reproduce, processes):
    done = reproduce(release.source, processes)
    assert done.returncode != 0
    assert "AttributeError" in done.stderr and "distributed_type" in done.stderr, done.stderr[-4000:]
    assert figures(done.stdout) == {"accelerate": "1.15.0", "transformers": release.version}


def test_the_exported_tests_pass_on_the_patched_package_alone(release):
    folder = str((release.exported / TEST).parent)
    program = ["-m", "unittest", "discover", "-s", folder, "-p", Path(TEST).name]
    done = release.run(release.patched, *program)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Ran 12 tests" in done.stderr and "skipped" not in done.stderr
    assert release.run(release.source, *program).returncode != 0


def test_positional_arguments_stay_where_they_are(release):
    program = (
        "import inspect, json; from transformers import TrainingArguments as T\n"
        "kinds = inspect.signature(T).parameters.values()\n"
        "print(json.dumps({'names': [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]}))"
    )
    before, after = (release.run(tree, "-c", program) for tree in (release.source, release.patched))
    assert before.returncode == 0 and after.returncode == 0, before.stderr[-2000:] + after.stderr[-2000:]
    old, new = (figures(done.stdout)["names"] for done in (before, after))
    assert len(old) > 50 and new[: len(old)] == old


def test_a_patched_source_is_refused(release, tmp_path):
    done = export(release.patched, tmp_path / "again")
    assert done.returncode == 2 and "already" in done.stderr
    assert not (tmp_path / "again").exists()


def test_the_source_of_another_package_is_refused(tmp_path):
    need(SOURCES / ACCELERATE, "test-upstream")
    done = export(SOURCES / ACCELERATE, tmp_path / "out")
    assert done.returncode == 2 and "`__version__` of transformers" in done.stderr
