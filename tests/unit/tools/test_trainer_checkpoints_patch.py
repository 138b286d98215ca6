"""The pull request for the Trainer's checkpoints, on a small source in the shape that the exporter looks for, and its helpers alone."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

ROOT = Path(__file__).parents[3]
TRAINER = '''\
"""Trains."""

import os

from .callback import Callback
from .trainer_utils import (
    get_last_checkpoint,  # a remark that stays
)


class Trainer:
    def _save_checkpoint(self, model):
        folder = f"checkpoint-{self.step}"
        output_dir = os.path.join(self.run_dir, folder)
        self.save_model(output_dir)
        if self.best:
            best_checkpoint_dir = os.path.join(self.run_dir, self.best)
            if os.path.exists(best_checkpoint_dir):
                self.remember(best_checkpoint_dir)
        self.state.save_to_json(os.path.join(output_dir, "trainer_state.json"))

        # a remark on the push
        if self.args.push_to_hub:
            self.push(output_dir)
        self._rotate_checkpoints(self.run_dir)
'''
UTILS = '''\
"""Helps."""

import os

from .utils import logging


def get_last_checkpoint(folder):
    everything = sorted(os.listdir(folder))
    checkpoints = [name for name in everything if name.startswith("checkpoint-")]
    return checkpoints and checkpoints[-1]
'''
INSERTED = """\
from .trainer_staging import publish_checkpoint, stage_checkpoint
        # Everything is written under another name, which the folder loses when it is whole
        wait = smp.barrier if is_sagemaker_mp_enabled() else self.accelerator.wait_for_everyone
        checkpoint_dir, output_dir = output_dir, stage_checkpoint(output_dir, self.args, wait)
            elif best_checkpoint_dir == checkpoint_dir:
                self.state.best_model_checkpoint = checkpoint_dir
        publish_checkpoint(output_dir, checkpoint_dir, self.args, wait)
        output_dir = checkpoint_dir

from .trainer_staging import pass_over_unfinished
    checkpoints = pass_over_unfinished(folder, checkpoints)
"""


def export(tree: Path, out: Path, patch: str = "trainer-checkpoints", package: str = "transformers"):
    """Run the exporter."""
    command = [sys.executable, str(ROOT / "tools/upstream_patches"), "--package", package, "--patch", patch]
    words = ["--source", str(tree), "--out", str(out), "--author", "Ada Lovelace <ada@example.org>"]
    return subprocess.run([*command, *words], capture_output=True, text=True)


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Write a tree whose files differ by replacements, and return its root."""

    def write(*replacements: tuple[str, str]) -> Path:
        root = tmp_path / "tree"
        texts = {"__init__": '__version__ = "9.9"\n', "trainer": TRAINER, "trainer_utils": UTILS}
        for old, new in replacements:
            assert any(old in text for text in texts.values()), old
            texts = {name: text.replace(old, new) for name, text in texts.items()}
        for name, text in texts.items():
            path = root / f"src/transformers/{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        return root

    return write


def test_only_our_lines_are_inserted(make_tree, tmp_path):
    done = export(make_tree(), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    written = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    assert written == ["0001-trainer-checkpoints.patch", "PULL_REQUEST.md", "tests/trainer/test_trainer_staging.py"]
    mail = (tmp_path / "out/0001-trainer-checkpoints.patch").read_text("utf-8")
    parts = re.split(r"^diff --git ", mail, flags=re.M)[1:]
    changed = "".join(part for part in parts if "new file mode" not in part)
    lines = [line for line in changed.splitlines() if not line.startswith(("+++", "---"))]
    assert not [line for line in lines if line.startswith("-")]
    assert "\n".join(line[1:] for line in lines if line.startswith("+")) + "\n" == INSERTED
    # The remark stays with what it is about, and the rotation is behind the publishing.
    assert "+        output_dir = checkpoint_dir\n+\n         # a remark on the push\n" in changed
    body = (tmp_path / "out/PULL_REQUEST.md").read_text("utf-8")
    assert "9.9" in body and "{version}" not in body
    for heading in ("Problem", "Evidence", "Semantics", "Alternatives considered", "Compatibility"):
        assert f"## {heading}" in body


def test_what_is_added_runs_on_python_3_9(make_tree, tmp_path):
    for path in (ROOT / "tools/upstream_patches/payload/trainer-checkpoints").glob("*.py"):
        ast.parse(path.read_text("utf-8"), feature_version=(3, 9))


REFUSED = [
    (("class Trainer:", "class Trained:"), "the class `Trainer` in .*found none"),
    (("output_dir = os.path.join(self.run_dir, folder)", "place = os.path.join(self.run_dir, folder)"),
     "`output_dir = ...` in `_save_checkpoint` in .*found none"),
    (("if os.path.exists(best_checkpoint_dir):", "if best_checkpoint_dir:"), "best_checkpoint_dir.*found none"),
    (("if self.args.push_to_hub:", "if self.push_to_hub:"), "push_to_hub.*found none"),
    (("self._rotate_checkpoints(self.run_dir)", "pass"), "found another order"),
    (("self.push(output_dir)", "self.push()"), "`output_dir` in the push"),
    (("from .trainer_utils import", "from .helpers import"), "an import from `.trainer_utils` in .*found none"),
    (("from .utils import", "from .util import"), "an import from `.utils` in .*found none"),
    (("def get_last_checkpoint(folder)", "def get_last_checkpoint(folder, strict)"), "found folder, strict"),
    (("def get_last_checkpoint(", "def last_checkpoint("), "the function `get_last_checkpoint` in .*found none"),
    (("checkpoints = [", "found = ["), "checkpoints = .*found none"),
    (('"""Helps."""', '"""Helps."""\nimport trainer_staging'), "already in .*found `trainer_staging`"),
]  # fmt: skip


@pytest.mark.parametrize("replacement, said", REFUSED, ids=[said for _, said in REFUSED])
def test_another_shape_is_refused_and_nothing_written(make_tree, tmp_path, replacement, said):
    done = export(make_tree(replacement), tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert re.search(said, done.stderr), done.stderr


def test_a_tree_that_has_the_new_file_and_a_patch_of_another_package_are_refused(make_tree, tmp_path):
    root = make_tree()
    done = export(root, tmp_path / "out", package="accelerate")
    assert done.returncode == 2 and "--patch trainer-checkpoints is not for accelerate" in done.stderr
    (root / "src/transformers/trainer_staging.py").touch()
    done = export(root, tmp_path / "out")
    assert done.returncode == 2 and "the change is already in" in done.stderr and not (tmp_path / "out").exists()


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the helpers that the patch adds, with warnings in a list."""
    path = ROOT / "tools/upstream_patches/payload/trainer-checkpoints/trainer_staging.py"
    module = ModuleType("trainer_staging")
    warned: list[str] = []
    logging = SimpleNamespace(get_logger=lambda name: SimpleNamespace(warning=warned.append))
    monkeypatch.setitem(sys.modules, "transformers.utils", SimpleNamespace(logging=logging))
    exec(compile(path.read_text("utf-8"), str(path), "exec"), module.__dict__)
    module.warned = warned
    return module


def fill(folder: Path, *names: str) -> None:
    """Write small files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}", "utf-8")


def ranks(order: list[str], saves: bool = True, first: bool = True) -> tuple[SimpleNamespace, Callable[[], None]]:
    """Return the arguments of a rank and a barrier that notes that it was passed."""
    return SimpleNamespace(should_save=saves, local_process_index=int(not first)), lambda: order.append("wait")


def test_all_wait_before_the_rename_and_after_it(staging, tmp_path, monkeypatch):
    order: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: (order.append("rename"), rename(*paths)))
    args, wait = ranks(order)
    fill(tmp_path / "_saving-checkpoint-1-claimed", "left")
    fill(tmp_path / "_saving-other", "kept")
    staged = Path(staging.stage_checkpoint(str(tmp_path / "checkpoint-2"), args, wait))
    assert order == ["wait"] and sorted(path.name for path in tmp_path.iterdir()) == ["_saving-other"]
    fill(staged, "a", "trainer_state.json")
    staging.publish_checkpoint(str(staged), str(tmp_path / "checkpoint-2"), args, wait)
    assert order == ["wait", "wait", "rename", "rename", "wait"]
    assert sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir()) == ["a", "trainer_state.json"]


def test_other_ranks_of_a_node_rename_nothing(staging, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda *paths: pytest.fail("it renames"))
    order: list[str] = []
    args, wait = ranks(order, saves=False, first=False)
    fill(tmp_path / "_saving-checkpoint-2", "of the others")
    staged = staging.stage_checkpoint(str(tmp_path / "checkpoint-2"), args, wait)
    staging.publish_checkpoint(staged, str(tmp_path / "checkpoint-2"), args, wait)
    assert order == ["wait"] * 3 and [path.name for path in tmp_path.iterdir()] == ["_saving-checkpoint-2"]


def test_who_comes_second_leaves_what_is_published(staging, tmp_path):
    args, wait = ranks([])
    fill(tmp_path / "checkpoint-2", "trainer_state.json")
    staging.publish_checkpoint(str(tmp_path / "_saving-checkpoint-2"), str(tmp_path / "checkpoint-2"), args, wait)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint-2", "trainer_state.json"]


def test_without_renames_one_rank_copies(staging, tmp_path, monkeypatch):
    def refuse(*paths: str) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "rename", refuse)
    fill(tmp_path / "checkpoint-2", "older", "trainer_state.json")
    fill(tmp_path / "_saving-checkpoint-2", "new", "trainer_state.json")
    for saves in (False, True):
        args, wait = ranks([], saves=saves)
        staging.publish_checkpoint(str(tmp_path / "_saving-checkpoint-2"), str(tmp_path / "checkpoint-2"), args, wait)
        found = sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir())
        assert found == (["new", "trainer_state.json"] if saves else ["older", "trainer_state.json"])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"] and len(staging.warned) == 1


@pytest.mark.parametrize("asked", ["resume", "save"])
def test_what_was_killed_between_two_renames_gets_its_name_back(staging, tmp_path, asked):
    args, wait = ranks([])
    fill(tmp_path / "_saving-checkpoint-4-claimed", "new", "trainer_state.json")
    fill(tmp_path / "_saving-checkpoint-4-replaced", "older", "trainer_state.json")
    # Of these the second rename has been made, or the first one has not.
    fill(tmp_path / "_saving-checkpoint-6-replaced", "older", "trainer_state.json")
    fill(tmp_path / "_saving-checkpoint-8-claimed", "new", "trainer_state.json")
    fill(tmp_path / "checkpoint-2", "trainer_state.json")
    for _ in range(2):  # two ranks
        if asked == "resume":
            found = staging.pass_over_unfinished(str(tmp_path), ["checkpoint-2"])
            assert found == ["checkpoint-2", "checkpoint-4"]
        else:
            staging.stage_checkpoint(str(tmp_path / "checkpoint-10"), args, wait)
    assert sorted(path.name for path in (tmp_path / "checkpoint-4").iterdir()) == ["new", "trainer_state.json"]
    assert not (tmp_path / "checkpoint-6").exists() and not (tmp_path / "checkpoint-8").exists()
    assert any(tmp_path.glob("_saving-*")) == (asked == "resume") and not staging.warned


@pytest.mark.parametrize("text", [None, "", '{"a": ', "[]", "\ud800"])
def test_what_is_not_whole_is_passed_over(staging, tmp_path, text):
    names = [f"checkpoint-{step}" for step in (10, 9, 2)]
    for name in names[1:]:
        fill(tmp_path / name, "trainer_state.json")
    (tmp_path / "checkpoint-10").mkdir()
    if text is not None:
        (tmp_path / "checkpoint-10/trainer_state.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert staging.pass_over_unfinished(str(tmp_path), names) == ["checkpoint-2", "checkpoint-9"]
    (said,) = staging.warned
    assert "checkpoint-10: it has no trainer_state.json that can be read" in said
