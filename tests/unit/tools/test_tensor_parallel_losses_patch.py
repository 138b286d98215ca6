"""The pull request for losses under tensor parallelism, on small sources in the shape that the exporter looks for, and what it inserts alone."""

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
TRAINER = '''\
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
FILES = {"__init__": '__version__ = "9.9"\n', "trainer": TRAINER, "distributed/tensor_parallel": LAYERS}
INSERTED = """\
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


def export(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run the exporter."""
    command = [sys.executable, str(ROOT / "tools/upstream_patches"), "--package", "transformers"]
    words = ["--patch", "tensor-parallel-losses", "--source", str(tree), "--out", str(out)]
    author = ["--author", "Ada Lovelace <ada@example.org>"]
    return subprocess.run([*command, *words, *author], capture_output=True, text=True)


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Write a tree whose files differ by a replacement, and return its root."""

    def write(old: str = "", new: str = "") -> Path:
        assert any(old in text for text in FILES.values()), old
        for name, text in FILES.items():
            path = tmp_path / f"tree/src/transformers/{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new) if old else text, "utf-8")
        return tmp_path / "tree"

    return write


def test_only_our_lines_are_inserted(make_tree, tmp_path):
    done = export(make_tree(), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    written = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    test = "tests/trainer/test_tensor_parallel_losses.py"
    assert written == ["0001-tensor-parallel-losses.patch", "PULL_REQUEST.md", test]
    mail = (tmp_path / "out/0001-tensor-parallel-losses.patch").read_text("utf-8")
    parts = re.split(r"^diff --git ", mail, flags=re.M)[1:]
    changed = "".join(part for part in parts if "new file mode" not in part)
    lines = [line for line in changed.splitlines() if not line.startswith(("+++", "---"))]
    assert not [line for line in lines if line.startswith("-")]
    assert "\n".join(line[1:] for line in lines if line.startswith("+")) + "\n" == INSERTED
    # In front of the division and its remark, and of the hook that is there.
    assert "self.get_tp_size()\n             # a remark that stays\n" in changed
    assert "(param))\n                 param.register_post_accumulate_grad_hook(add_up)\n" in changed
    body = (tmp_path / "out/PULL_REQUEST.md").read_text("utf-8")
    assert "9.9" in body and "{version}" not in body
    for heading in ("Problem", "Evidence", "Semantics", "Alternatives considered", "Compatibility"):
        assert f"## {heading}" in body
    ast.parse((tmp_path / "out" / test).read_text("utf-8"), feature_version=(3, 10))


REFUSED = [
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
]  # fmt: skip


@pytest.mark.parametrize("replacement, said", REFUSED, ids=[said for _, said in REFUSED])
def test_another_shape_is_refused_and_nothing_written(make_tree, tmp_path, replacement, said):
    done = export(make_tree(*replacement), tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert re.search(said, done.stderr), done.stderr


def test_a_tree_that_has_the_new_file_is_refused(make_tree, tmp_path):
    root = make_tree()
    (root / "tests/trainer").mkdir(parents=True)
    (root / "tests/trainer/test_tensor_parallel_losses.py").touch()
    done = export(root, tmp_path / "out")
    assert done.returncode == 2 and "the change is already in" in done.stderr and not (tmp_path / "out").exists()


@pytest.fixture
def patched(make_tree, tmp_path) -> SimpleNamespace:
    """Return the two classes as the patch leaves them, on a mesh of two ranks with equal gradients."""
    root = make_tree()
    export(root, tmp_path / "out")
    patch = str(tmp_path / "out/0001-tensor-parallel-losses.patch")
    subprocess.run(["git", "apply", patch], cwd=root, check=True, env={"GIT_DIR": str(tmp_path / "none")})
    names = {"dist": SimpleNamespace(all_reduce=lambda grad, group: grad.mul_(2))}
    for name in ("trainer", "distributed/tensor_parallel"):
        exec(compile((root / f"src/transformers/{name}.py").read_text("utf-8"), name, "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("averages, items", [(True, 4 * 6 / (2 * 3)), (False, 6 / 3)])
def test_only_a_sum_over_ranks_is_divided(patched, averages, items):
    trainer = SimpleNamespace(get_tp_size=lambda: 2, get_cp_size=lambda: 3)
    trainer.args = SimpleNamespace(average_tokens_across_devices=averages, world_size=4)
    trainer.accelerator = SimpleNamespace(gather=lambda value: value.repeat(4))
    found = patched.Trainer._get_num_items_in_batch(trainer, [torch.tensor(6)], "cpu")
    assert found.item() == items


def test_what_was_summed_is_shared_before_it_is_summed_again(patched):
    module = torch.nn.Linear(3, 1, bias=False)
    mesh = SimpleNamespace(size=lambda: 2, get_group=lambda: None)
    module = patched.ReplicatedWithGradAllReduce().install_forward(module, mesh)
    module(torch.ones(1, 3))  # its hooks are there now, and the next forward must not add others
    for count in (1, 2, 3):
        module.weight.sum().backward()
        assert module.weight.grad.tolist() == [[2.0 * count] * 3]
    module.weight.grad = None
    module.weight.sum().backward()
    assert module.weight.grad.tolist() == [[2.0] * 3]
