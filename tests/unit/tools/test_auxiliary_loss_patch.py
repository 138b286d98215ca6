"""The pull request for the Trainer's auxiliary loss, on a small source in the shape that the exporter looks for, and its function alone."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

ROOT = Path(__file__).parents[3]
PAYLOAD = ROOT / "tools/upstream_patches/payload/auxiliary-loss"
TRAINER = '''\
"""Trains."""

from .trainer_callback import (
    Callback,  # a remark that stays
)


class Trainer:
    def training_step(self, model, inputs, items=None):
        loss = self.compute_loss(model, inputs, num_items_in_batch=items)
        if not self.loss_is_scaled_for_ga:
            loss = loss / self.current_gradient_accumulation_steps
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.short:
            return 0
        outputs = model(**inputs)
        loss = outputs["loss"]
        if self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs:
            scale = self.accelerator.num_processes // self.get_tp_size()
            loss *= scale if self.args.n_gpu <= 1 else self.args.n_gpu

        # a remark on the end
        return (loss, outputs) if return_outputs else loss

    def other(self):
        return (loss, outputs) if return_outputs else loss
'''
INSERTED = """\
from .trainer_auxiliary_loss import average_auxiliary_loss
        loss = average_auxiliary_loss(self, model, outputs, loss, num_items_in_batch)
"""


def export(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run the exporter."""
    command = [sys.executable, str(ROOT / "tools/upstream_patches"), "--package", "transformers"]
    words = ["--patch", "auxiliary-loss", "--source", str(tree), "--out", str(out)]
    author = ["--author", "Ada Lovelace <ada@example.org>"]
    return subprocess.run([*command, *words, *author], capture_output=True, text=True)


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Write a tree whose Trainer differs by a replacement, and return its root."""

    def write(old: str = "", new: str = "") -> Path:
        assert old in TRAINER, old
        folder = tmp_path / "tree/src/transformers"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text('__version__ = "9.9"\n', "utf-8")
        (folder / "trainer.py").write_text(TRAINER.replace(old, new) if old else TRAINER, "utf-8")
        return tmp_path / "tree"

    return write


def test_only_our_lines_are_inserted(make_tree, tmp_path):
    done = export(make_tree(), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    written = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    assert written == ["0001-auxiliary-loss.patch", "PULL_REQUEST.md", "tests/trainer/test_trainer_auxiliary_loss.py"]
    mail = (tmp_path / "out/0001-auxiliary-loss.patch").read_text("utf-8")
    parts = re.split(r"^diff --git ", mail, flags=re.M)[1:]
    (changed,) = [part for part in parts if "new file mode" not in part]
    lines = [line for line in changed.splitlines() if not line.startswith(("+++", "---"))]
    assert not [line for line in lines if line.startswith("-")]
    assert "\n".join(line[1:] for line in lines if line.startswith("+")) + "\n" == INSERTED
    # In front of the remark on the end, of this method and no other one.
    assert "num_items_in_batch)\n         # a remark on the end\n" in changed
    body = (tmp_path / "out/PULL_REQUEST.md").read_text("utf-8")
    assert "9.9" in body and "{version}" not in body
    for heading in ("Problem", "Evidence", "Semantics", "Alternatives considered", "Compatibility"):
        assert f"## {heading}" in body


REFUSED = [
    (("class Trainer:", "class Trained:"), "the class `Trainer` in .*found none"),
    (("from .trainer_callback", "from .callback"), "an import from `.trainer_callback` in .*found none"),
    (("def compute_loss(", "def loss("), "`Trainer.compute_loss` in .*found none"),
    (("def training_step(", "def step("), "`Trainer.training_step` in .*found none"),
    (("return_outputs=False, num", "num"), r"found `compute_loss\(self, model, inputs, num_items_in_batch\)`"),
    (("if return_outputs else loss\n\n    def", "if outputs else loss\n\n    def"), "at the end of `compute_loss`"),
    (("self.args.n_gpu <= 1 else self.args.n_gpu", "self.single else 1"), "looked for n_gpu in front of what"),
    (("\n        # a remark", "        loss += 0\n        # a remark"), "average_tokens_across_devices, .*, n_gpu in f"),
    (("if not self.loss_is_scaled_for_ga:", "if True:"), "looked for loss_is_scaled_for_ga in `training_step`"),
    (('outputs["loss"]', 'outputs["aux_loss"]'), "or another one of it, is already in"),
]  # fmt: skip


@pytest.mark.parametrize("replacement, said", REFUSED, ids=[said for _, said in REFUSED])
def test_another_shape_is_refused_and_nothing_written(make_tree, tmp_path, replacement, said):
    done = export(make_tree(*replacement), tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert re.search(said, done.stderr), done.stderr


def test_a_tree_that_has_the_new_file_is_refused(make_tree, tmp_path):
    root = make_tree()
    (root / "src/transformers/trainer_auxiliary_loss.py").touch()
    done = export(root, tmp_path / "out")
    assert done.returncode == 2 and "the change is already in" in done.stderr and not (tmp_path / "out").exists()


@pytest.fixture
def average() -> Callable[..., torch.Tensor]:
    """Return the function that the patch adds."""
    names: dict = {}
    exec(compile((PAYLOAD / "trainer_auxiliary_loss.py").read_text("utf-8"), "payload", "exec"), names)
    return names["average_auxiliary_loss"]


def trainer(ranks: int = 4, shared: int = 2, average: bool = True, cards: int = 1, **changes) -> SimpleNamespace:
    """Return what the function reads of a Trainer: two replicas of two ranks, and five micro-batches."""
    model = SimpleNamespace(router_aux_loss_coef=0.5)
    known = {"label_smoother": None, "compute_loss_func": None, "model_accepts_loss_kwargs": True, "model": model}
    known |= {"current_gradient_accumulation_steps": 5, "loss_is_scaled_for_ga": None}
    known |= {"args": SimpleNamespace(average_tokens_across_devices=average, n_gpu=cards)}
    known |= {"accelerator": SimpleNamespace(num_processes=ranks), "get_tp_size": lambda: shared}
    return SimpleNamespace(**{**known, **changes})


@pytest.mark.parametrize(
    "made, training, times",
    [
        ({}, True, 2 - 1 / 5),
        ({}, False, 2 - 1),
        ({"average": False}, True, 1 - 1 / 5),
        ({"ranks": 1, "shared": 1, "cards": 3}, True, 3 - 1 / 5),  # one process that splits its batches
        ({"loss_is_scaled_for_ga": False}, True, 2 - 1),
        ({"model": SimpleNamespace(config=SimpleNamespace(aux_loss_coef=0.5))}, False, 2 - 1),
    ],
)
def test_what_is_too_much_goes(average, made, training, times):
    outputs, model = {"aux_loss": torch.tensor(2.0)}, torch.nn.Identity().train(training)
    loss = average(trainer(**made), model, outputs, torch.tensor(9.0), 7)
    assert loss.item() == pytest.approx(9.0 - 0.5 * 2.0 * times)


@pytest.mark.parametrize(
    "changes, outputs, items",
    [
        ({}, {"loss": torch.tensor(9.0)}, 7),
        ({}, (torch.tensor(9.0),), 7),
        ({}, {"aux_loss": torch.tensor(2.0)}, None),  # the Trainer divides all of such a loss itself
        ({"model_accepts_loss_kwargs": False}, {"aux_loss": torch.tensor(2.0)}, 7),
        ({"label_smoother": len}, {"aux_loss": torch.tensor(2.0)}, 7),  # the loss is not the model's
        ({"compute_loss_func": len}, {"aux_loss": torch.tensor(2.0)}, 7),
        ({"model": torch.nn.Identity()}, {"aux_loss": torch.tensor(2.0)}, 7),
    ],
)
def test_other_losses_are_the_same_tensor(average, changes, outputs, items):
    loss = torch.tensor(9.0)
    assert average(trainer(**changes), torch.nn.Identity(), outputs, loss, items) is loss


def test_what_is_added_runs_on_python_3_10():
    for path in PAYLOAD.glob("*.py"):
        ast.parse(path.read_text("utf-8"), feature_version=(3, 10))
