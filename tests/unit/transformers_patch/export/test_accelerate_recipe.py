"""The pull request for accelerate, on a small Accelerator of the same shape that was written for these tests."""

import ast
import datetime
import difflib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from transformers_patch.__main__ import main
from transformers_patch.export import mail
from transformers_patch.export.sources import SourceTree, UnrecognisedSource

pytest.importorskip("libcst", reason='the export needs libcst: pip install "accelerate[export]"')

from transformers_patch.export import accelerate_recipe as recipe

ACCELERATOR = '''\
"""An accelerator that works, as far as it goes."""

from types import SimpleNamespace

import torch

from .utils.other import (
    nothing,  # a remark that stays
)


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


class WrappedOptimizer(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


class WrappedScheduler:
    def __init__(self, scheduler):
        self.scheduler = scheduler


class Helper:
    def prepare_model(self, model): return model

    def _prepare_one(self):
        return None


class Accelerator:
    def __init__(self, precision="no"):
        """Has a docstring."""
        self.ddp_handler, self.native_amp, self.use_distributed = None, False, False
        self.distributed_type, self.mixed_precision, self.device = "NO", precision, "cpu"
        self.state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend="NO"))
        self._models = []
        self._optimizers = []  # a remark
        self._dataloaders = []
        self._schedulers = []
        # What follows the lists
        self.step = 0

    def _prepare_one(self, obj, first_pass=False, device_placement=None):
        # Whichever it is
        late = torch.optim.lr_scheduler.LRScheduler
        makers = {
            late: lambda: self.prepare_scheduler(obj),
            torch.nn.Module: lambda: self.prepare_model(obj, device_placement),
            torch.optim.Optimizer: lambda: self.prepare_optimizer(obj),
            torch.utils.data.DataLoader: lambda: self.prepare_data_loader(obj),
        }
        fitting = [kind for kind in makers if isinstance(obj, kind) and first_pass != (kind is late)]
        return makers[fitting[0]]() if fitting else obj

    def prepare(self, *args):
        """Prepare it all."""
        first = [self._prepare_one(obj, first_pass=True) for obj in args]
        return [self._prepare_one(obj) for obj in first]

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        self._models.append(model)
        return model if evaluation_mode else Wrapper(model)

    @staticmethod
    def unrelated():
        def prepare_model(model):
            return model

    def prepare_optimizer(self, optimizer):
        self._optimizers.append(WrappedOptimizer(optimizer))
        return self._optimizers[-1]

    def prepare_data_loader(self, data_loader):
        self._dataloaders.append(torch.utils.data.DataLoader(data_loader.dataset))
        return self._dataloaders[-1]

    def prepare_scheduler(self, scheduler):
        self._schedulers.append(WrappedScheduler(scheduler))
        return self._schedulers[-1]

    def free_memory(self):
        self._models = []
        self._optimizers = []
        self._dataloaders = []
        self._schedulers = []
        return []
'''
INSERTED = """\
from .utils.prepared import PreparedObjects, find_prepared, remember
        self._prepared_objects = PreparedObjects()
        # What is prepared already must not be wrapped again
        prepared = find_prepared(self, obj, first_pass, device_placement)
        if prepared is not None:
            return prepared

        self._prepared_objects.begin_call()
    @remember
    @remember
    @remember
    @remember
        self._prepared_objects.clear()
"""
PROGRAM = """\
import pickle, warnings
import torch
from accelerate import Accelerator

def quiet(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **options)

def warned(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args)
    assert [(w.category, w.filename) for w in caught] == [(UserWarning, __file__)], caught
    return result

accelerator = Accelerator()
model, loader = torch.nn.Linear(2, 2), torch.utils.data.DataLoader([1, 2])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
given = (model, loader, optimizer, scheduler)
prepared = quiet(accelerator.prepare, *given)
for bare, wrapper in zip(given, prepared):
    assert wrapper is not bare
    assert warned(accelerator.prepare, bare)[0] is warned(accelerator.prepare, wrapper)[0] is wrapper
lists = (accelerator._models, accelerator._optimizers, accelerator._dataloaders, accelerator._schedulers)
assert [len(known) for known in lists] == [1, 1, 1, 1] and accelerator._models[0] is model

warned(accelerator.prepare, torch.nn.Sequential(model))      # contains a prepared model
other = Accelerator()
assert quiet(other.prepare, model)[0] is prepared[0]         # adopted
assert warned(Accelerator("bf16").prepare, model)[0] is prepared[0]

judged = torch.nn.Linear(2, 2)
assert quiet(accelerator.prepare_model, model=judged, evaluation_mode=True) is judged
before = len(accelerator._models)
trained = quiet(accelerator.prepare, judged)[0]
assert trained._orig_mod is judged and len(accelerator._models) == before

accelerator.free_memory(), other.free_memory()
fresh = quiet(accelerator.prepare, model)[0]
assert fresh is not prepared[0]

again, fresh_again = pickle.loads(pickle.dumps((accelerator, fresh)))
assert again._prepared_objects.find(fresh_again).kind == "model" and warned(again.prepare, fresh_again)[0] is fresh_again
print("ok")
"""


@pytest.fixture
def make_accelerate(tmp_path: Path) -> Callable[..., Path]:
    """Write a tree whose `accelerator.py` differs by replacements, and return its root."""

    def write(*replacements: tuple[str, str]) -> Path:
        text = ACCELERATOR
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new)
        root = tmp_path / "tree"
        files = {
            "__init__.py": '__version__ = "9.9"\nfrom .accelerator import Accelerator\n',
            "accelerator.py": text,
            "utils/__init__.py": "",
            "utils/other.py": "nothing = None\n",
        }
        for name, content in files.items():
            target = root / "src" / "accelerate" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, "utf-8")
        return root

    return write


def apply(root: Path) -> dict[str, str]:
    files = recipe.edit(SourceTree(root))
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return files


def test_one_file_changes_and_two_are_new(make_accelerate):
    tree = SourceTree(make_accelerate())
    files = recipe.edit(tree)
    assert [path for path in files if tree.exists(path)] == [recipe.ACCELERATOR]
    assert set(files) == {recipe.ACCELERATOR, recipe.REGISTRY, recipe.TEST}
    for text in files.values():
        ast.parse(text)


@pytest.mark.parametrize(
    "replacements",
    [
        (),
        # The order and the neighbours do not matter, nor what is inherited or annotated.
        (("class Accelerator:", "class Accelerator(object):"), ("def prepare(self, *args)", "def prepare(self, *args: int)")),
        (("        self._models = []\n        self._optimizers = []  # a remark\n", "        self._optimizers = []\n        self.x = 1\n        self._models = []\n"),),
    ],
)  # fmt: skip
def test_only_our_lines_are_inserted(make_accelerate, replacements):
    tree = SourceTree(make_accelerate(*replacements))
    new = recipe.edit(tree)[recipe.ACCELERATOR]
    lines = list(difflib.ndiff(tree.read(recipe.ACCELERATOR).splitlines(), new.splitlines()))
    assert not [line for line in lines if line.startswith("-")]
    assert "\n".join(line[2:] for line in lines if line.startswith("+")) + "\n" == INSERTED


def test_where_the_lines_stand(make_accelerate):
    text = recipe.edit(SourceTree(make_accelerate()))[recipe.ACCELERATOR]
    (classes,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == "Accelerator"]
    methods = {node.name: node for node in classes.body}
    for name in recipe.METHODS:
        assert [ast.unparse(decorator) for decorator in methods[name].decorator_list] == ["remember"]
    assert "find_prepared" in ast.unparse(methods["_prepare_one"].body[0])
    assert ast.unparse(methods["prepare"].body[1]) == "self._prepared_objects.begin_call()"
    for name, following in (("__init__", "self.step = 0"), ("free_memory", "return []")):
        lines = [ast.unparse(line) for line in methods[name].body]
        position = next(i for i, line in enumerate(lines) if "_prepared_objects" in line)
        assert lines[position - 1] == "self._schedulers = []" and lines[position + 1] == following


def test_a_docstring_stays_first(make_accelerate):
    root = make_accelerate(("        # Whichever it is\n", '        """Prepare one."""\n        # Whichever it is\n'))
    text = recipe.edit(SourceTree(root))[recipe.ACCELERATOR]
    assert '"""Prepare one."""\n        # What is prepared already' in text
    assert "return prepared\n\n        # Whichever it is\n" in text


def test_the_patched_accelerator_detects(make_accelerate, tmp_path):
    root = make_accelerate()
    apply(root)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, "utf-8")
    variables = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


def test_the_new_module_stands_alone():
    imported = set()
    for node in ast.walk(ast.parse(recipe.payload("accelerate", "prepared.py"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch"}


def test_the_words_of_the_pull_request(make_accelerate):
    tree = SourceTree(make_accelerate())
    assert recipe.RECIPE.subject.isascii() and len(recipe.RECIPE.subject) < 72
    assert all(len(line) <= 72 for line in recipe.RECIPE.message.splitlines())
    body = recipe.body(tree)
    assert "9.9" in body and "{version}" not in body
    for heading in ("Problem", "Evidence", "Semantics", "Alternatives considered", "Compatibility"):
        assert f"## {heading}" in body


@pytest.mark.parametrize(
    "replacements, looked_for, found",
    [
        ([("from .utils.other import", "from .utils.others import")], "`.utils.other`", "found none"),
        ([("class Accelerator:", "class Accelerators:")], "an import|`Accelerator.__init__`", "found none"),
        ([("def prepare_scheduler", "def schedule")], "`Accelerator.prepare_scheduler`", "found none"),
        ([("def unrelated()", "def prepare_model()")], "`prepare_model\\(self, object, ...\\)`", "fewer parameters"),
        ([("def prepare_data_loader", "def prepare_model")], "`Accelerator.prepare_model`", "2 of them"),
        ([("obj, first_pass=False", "obj, first=False")], "first_pass", r"_prepare_one\(self, obj, first, device"),
        ([("self.prepare_model(obj, device_placement)", "obj")], "a call of `self.prepare_model`", "prepare_optimizer"),
        ([("self._models = []", "self._models = list()")], r"`self._models = \[\]` in `Accelerator.__init__`", "_sched"),
        ([("        self._schedulers = []\n        return", "        return")], "in `Accelerator.free_memory`", "_models"),
        ([("def free_memory(self):\n        self._models = []\n        self._optimizers = []\n        self._dataloaders"
           " = []\n        self._schedulers = []\n        return []", "def free_memory(self): return []")],
         "a block of statements in `Accelerator.free_memory`", "a body on one line"),
        ([("class Helper:", "class Helper(:")], "accelerator.py", "not Python that can be read"),
    ],
)  # fmt: skip
def test_an_unknown_shape_is_refused(make_accelerate, replacements, looked_for, found):
    tree = SourceTree(make_accelerate(*replacements))
    with pytest.raises(UnrecognisedSource, match=looked_for) as refusal:
        recipe.edit(tree)
    assert refusal.match(found) and refusal.match("src/accelerate/accelerator.py")


def test_what_is_there_already_is_refused(make_accelerate):
    root = make_accelerate()
    apply(root)
    with pytest.raises(UnrecognisedSource, match="already in .*utils/prepared.py.*test_double_prepare.py.*the name"):
        recipe.edit(SourceTree(root))
    (root / recipe.ACCELERATOR).write_text(ACCELERATOR, "utf-8")
    (root / recipe.TEST).unlink()
    with pytest.raises(UnrecognisedSource, match="already in .*utils/prepared.py"):
        recipe.edit(SourceTree(root))


def test_another_tree_is_refused(make_accelerate, tmp_path):
    root = make_accelerate()
    (root / "src" / "accelerate").rename(root / "src" / "quicken")
    with pytest.raises(UnrecognisedSource, match="looked for the package 'accelerate' .* found 'quicken' 9.9"):
        recipe.edit(SourceTree(root))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnrecognisedSource, match="found none"):
        recipe.edit(SourceTree(tmp_path / "empty"))


def test_the_command_refuses_and_writes_nothing(make_accelerate, tmp_path, capsys):
    root, out = make_accelerate(("def prepare_scheduler", "def schedule")), tmp_path / "out"
    command = ["export", "--package", "accelerate", "--source", str(root), "--out", str(out)]
    assert main([*command, "--author", "A <a@example.org>"]) == 2
    assert "`Accelerator.prepare_scheduler`" in capsys.readouterr().err and not out.exists()


def test_the_patch_has_three_files(make_accelerate):
    tree = SourceTree(make_accelerate())
    date = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    options = {"subject": recipe.RECIPE.subject, "message": recipe.RECIPE.message, "author": "A <a@example.org>"}
    text = mail.patch(tree, recipe.edit(tree), date=date, **options)
    assert text.count("\ndiff --git ") == 3 and text.count("\nnew file mode 100644\n") == 2
    assert text == mail.patch(tree, recipe.edit(tree), date=date, **options)
