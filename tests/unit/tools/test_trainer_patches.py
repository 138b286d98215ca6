"""The pull requests for the Trainer, on small sources in the shape that the exporter looks for.

What they add is tested by the tests that they bring; `tests/interop/test_upstream.py` runs those.
"""

import ast
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from unit.tools.exporter import AUTHOR, ROOT, check_description, export, refused, write_tree

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@dataclass
class Patch:
    """A patch of the exporter."""

    files: dict[str, str]  # below src/transformers
    inserted: str
    around: tuple[str, ...]  # parts of the patch that show where lines are inserted
    tests: str  # the file of tests that it adds
    helpers: str | None  # the module that it adds


LOSS = '''\
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
LOSS_INSERTED = """\
from .trainer_auxiliary_loss import average_auxiliary_loss
        loss = average_auxiliary_loss(self, model, outputs, loss, num_items_in_batch)
"""
COUNT = '''\
"""Trains."""


class Trainer:
    def _get_num_items_in_batch(self, batch_samples, device):
        num_items_in_batch = sum(batch_samples)
        if self.args.average_tokens_across_devices:
            if self.args.world_size > 1:
                num_items_in_batch = self.accelerator.gather(num_items_in_batch).sum()
        if device:
            num_items_in_batch = num_items_in_batch.to(device)
            # a remark that stays
            num_items_in_batch = num_items_in_batch / (self.get_tp_size() * self.get_cp_size())
        return num_items_in_batch
'''
LAYERS = '''\
"""Replicates."""


class ReplicatedWithGradAllReduce:
    def install_forward(self, module, mesh):
        forward = module.forward

        def add_up(param):
            dist.all_reduce(param.grad, group=mesh.get_group())

        def watched(*args):
            for param in module.parameters():
                param.register_post_accumulate_grad_hook(add_up)
            return forward(*args)

        module.forward = watched
        return module
'''
LAYERS_INSERTED = """\
        def _share_accumulated_grad(param):
            # Called before a gradient is added to those of earlier micro-batches, which are sums over the mesh already. They are
            # summed with it once more: a share of each rank adds up to what they were.
            def share(grad):
                if param.grad is not None:
                    param.grad.div_(mesh.size())

            return share

                param.register_hook(_share_accumulated_grad(param))
            # Only a sum over ranks has the tokens of those that share a batch by tensor parallelism several times
            if not self.args.average_tokens_across_devices:
                num_items_in_batch = num_items_in_batch * self.get_tp_size()
"""
SAVES = '''\
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
SAVES_INSERTED = """\
from .trainer_staging import publish_checkpoint, stage_checkpoint
        # Everything is written under another name, which the folder loses when it is complete
        wait = smp.barrier if is_sagemaker_mp_enabled() else self.accelerator.wait_for_everyone
        checkpoint_dir, output_dir = output_dir, stage_checkpoint(output_dir, self.args, wait)
            elif best_checkpoint_dir == checkpoint_dir:
                self.state.best_model_checkpoint = checkpoint_dir
        publish_checkpoint(output_dir, checkpoint_dir, self.args, wait)
        output_dir = checkpoint_dir

from .trainer_staging import pass_over_unfinished
    checkpoints = pass_over_unfinished(folder, checkpoints)
"""
PATCHES = {
    "auxiliary-loss": Patch(
        {"trainer": LOSS},
        LOSS_INSERTED,
        # In front of the remark on the end, of this method and no other one.
        ("num_items_in_batch)\n         # a remark on the end\n",),
        "test_trainer_auxiliary_loss.py",
        "trainer_auxiliary_loss.py",
    ),
    "tensor-parallel-losses": Patch(
        {"trainer": COUNT, "distributed/tensor_parallel": LAYERS},
        LAYERS_INSERTED,
        # In front of the division and its remark, and of the hook that is there.
        (
            "self.get_tp_size()\n             # a remark that stays\n",
            "(param))\n                 param.register_post_accumulate_grad_hook(add_up)\n",
        ),
        "test_tensor_parallel_losses.py",
        None,
    ),
    "trainer-checkpoints": Patch(
        {"trainer": SAVES, "trainer_utils": UTILS},
        SAVES_INSERTED,
        # The remark stays with what it is about, and the rotation is behind the publishing.
        ("+        output_dir = checkpoint_dir\n+\n         # a remark on the push\n",),
        "test_trainer_staging.py",
        "trainer_staging.py",
    ),
}
REFUSED = {
    "auxiliary-loss": [
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
    ],
    "tensor-parallel-losses": [
        (("class Trainer:", "class Trained:"), "the class `Trainer` in .*found none"),
        (("class Replicated", "class Reduced"), "the class `ReplicatedWithGradAllReduce` in .*found none"),
        (("def _get_num_items", "def _count_items"), "`Trainer._get_num_items_in_batch` in .*found none"),
        (("num_items_in_batch / (", "num_items_in_batch // ("), "num_items_in_batch / .*found none"),
        (("sum(batch_samples)", "sum(batch_samples) * self.get_tp_size()"), "found 2: the change, or another one"),
        (("if self.args.average_tokens_across_devices:", "if True:"), "`if self.args.average_tokens_.*found none"),
        (("sum(batch_samples)", "self.accelerator.gather(batch_samples)"), "the sum over ranks inside.*another order"),
        (("        if device:", "            device = None\n        elif device:"), "the division behind.*another order"),
        (("self, module, mesh", "self, module, group"), r"`install_forward\(self, module, mesh\)`"),
        (("all_reduce(", "reduce("), "one function in `install_forward` that calls `all_reduce` .*found none"),
        (("accumulate_grad_hook(add_up)", "accumulate_grad_hook(print)"), r"grad_hook\(add_up\)` in .*found none"),
        (("forward = module.forward", "module.register_hook(print)"), "no `register_hook` .*the change, or another one"),
    ],
    "trainer-checkpoints": [
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
    ],
}  # fmt: skip


def run(folder: Path, name: str, *replacements: tuple[str, str], package: str = "transformers"):
    tree = write_tree(folder, "transformers", PATCHES[name].files, *replacements)
    return export(tree, folder / "out", "--package", package, "--patch", name, "--author", AUTHOR)


@pytest.mark.parametrize("name", PATCHES)
def test_only_our_lines_are_inserted(tmp_path, name):
    patch, out = PATCHES[name], tmp_path / "out"
    done = run(tmp_path, name)
    assert done.returncode == 0, done.stderr
    written = sorted(str(path.relative_to(out)) for path in out.rglob("*.*"))
    assert written == [f"0001-{name}.patch", "PULL_REQUEST.md", f"tests/trainer/{patch.tests}"]
    files = re.split(r"^diff --git ", (out / written[0]).read_text("utf-8"), flags=re.M)[1:]
    changed = "".join(file for file in files if "new file mode" not in file)
    lines = [line for line in changed.splitlines() if not line.startswith(("+++", "---"))]
    assert not [line for line in lines if line.startswith("-")]
    assert "\n".join(line[1:] for line in lines if line.startswith("+")) + "\n" == patch.inserted
    assert all(text in changed for text in patch.around)
    check_description(out)


@pytest.mark.parametrize("name, replacement, said", [(name, *row) for name in REFUSED for row in REFUSED[name]])
def test_another_shape_is_refused_and_nothing_written(tmp_path, name, replacement, said):
    refused(run(tmp_path, name, replacement), tmp_path / "out", said)


@pytest.mark.parametrize("name", PATCHES)
def test_a_tree_that_has_a_new_file_is_refused(tmp_path, name):
    patch = PATCHES[name]
    new = (
        tmp_path / "tree" / (f"src/transformers/{patch.helpers}" if patch.helpers else f"tests/trainer/{patch.tests}")
    )
    new.parent.mkdir(parents=True, exist_ok=True)
    new.touch()
    refused(run(tmp_path, name), tmp_path / "out", "the change is already in")


def test_a_patch_of_another_package_is_refused(tmp_path):
    done = run(tmp_path, "trainer-checkpoints", package="accelerate")
    refused(done, tmp_path / "out", "--patch trainer-checkpoints is not for accelerate")


@pytest.mark.parametrize(
    "name, version", [("auxiliary-loss", 10), ("tensor-parallel-losses", 10), ("trainer-checkpoints", 9)]
)
def test_what_is_added_runs_on_the_oldest_python(name, version):
    for path in (ROOT / "tools/upstream_patches/payload" / name).glob("*.py"):
        ast.parse(path.read_text("utf-8"), feature_version=(3, version))
