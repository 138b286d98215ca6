"""The pull requests for upstream, on small sources in the shape that the exporter looks for, written for these tests."""

import ast
import difflib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unit.tools.exporter import AUTHOR, DATE, ROOT, check_description, export, refused, write_tree

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

SIGNED = ("--author", AUTHOR, "--date", DATE)
FILES = {"accelerate": "src/accelerate/accelerator.py", "transformers": "src/transformers/training_args.py"}
ADDED = {
    "accelerate": ["src/accelerate/utils/prepared.py", "tests/test_double_prepare.py"],
    "transformers": ["src/transformers/utils/accelerator_state.py", "tests/trainer/test_accelerator_state.py"],
}

ARGUMENTS = '''\
"""Arguments."""

from dataclasses import dataclass, field
from typing import Optional, Union

if is_torch_available():
    import torch

if is_accelerate_available():
    from accelerate.state import AcceleratorState, PartialState

    from .somewhere import AcceleratorConfig

if is_accelerate_available("9.9"):
    from accelerate.state import Later


@dataclass
class TrainingArguments:
    """
    What to train with.

    Parameters:
        first (`str`):
            The first.
        accelerator_config (`str`, *optional*):
            About this one.

            - more

        last (`int`):
            The last.
    """

    names = ["accelerator_config"]

    first: str = field(default="a")
    accelerator_config: dict | None = field(
        default=None,
        metadata={"help": "about this one"},
    )
    last: int = field(default=1)

    def __post_init__(self):
        self.device = self._setup_devices

    @cached_property
    def _setup_devices(self):
        # how it begins
        table = {"enabled": True, "use_configured_state": False}
        if isinstance(self.accelerator_config, AcceleratorConfig):
            table["use_configured_state"] = self.accelerator_config.pop("use_configured_state", False)
        # a remark on the test
        if table["use_configured_state"]:
            self.state = PartialState()
        else:
            AcceleratorState._reset_state(reset_partial_state=True)
        if not table.pop("use_configured_state", False):
            self.state = PartialState(**table)
        return self.state.device
'''
ACCELERATOR = '''\
"""An accelerator of the shape that is looked for."""

import torch

from .utils.other import (
    nothing,  # a remark that stays
)


class Helper:
    def prepare_model(self, model): return model

    def _prepare_one(self):
        return None


class Accelerator:
    def __init__(self, precision="no"):
        """Has a docstring."""
        self._models = []
        self._optimizers = []  # a remark
        self._dataloaders = []
        self._schedulers = []
        # What follows the lists
        self.step = 0

    def _prepare_one(self, obj, first_pass=False, device_placement=None):
        # Whichever it is
        return self.prepare_model(obj, device_placement)

    def prepare(self, *args):
        """Prepare it all."""
        return [self._prepare_one(obj) for obj in args]

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        return model

    @staticmethod
    def unrelated():
        def prepare_model(model):
            return model

    def prepare_optimizer(self, optimizer):
        return optimizer

    def prepare_data_loader(self, data_loader):
        return data_loader

    def prepare_scheduler(self, scheduler):
        return scheduler

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


def make_tree(folder: Path, package: str, *replacements: tuple[str, str]) -> Path:
    source = {"accelerate": ACCELERATOR, "transformers": ARGUMENTS}[package]
    files = {Path(FILES[package]).stem: source, "utils/__init__": "", "utils/other": "nothing = None\n"}
    return write_tree(folder, package, files, *replacements)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def patched(tmp_path: Path) -> Callable[..., tuple[Path, list[str], str]]:
    """Export against a tree and apply the patch; return the tree, the lines that were inserted, and the changed file."""

    def apply(package: str, *replacements: tuple[str, str]) -> tuple[Path, list[str], str]:
        root, out = make_tree(tmp_path, package, *replacements), tmp_path / "out"
        before = (root / FILES[package]).read_text("utf-8")
        done = export(root, out, "--package", package, *SIGNED)
        assert done.returncode == 0, done.stderr
        git(root, "init", "--quiet")
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "--message", "base")
        git(root, "am", "--quiet", *map(str, out.glob("*.patch")))
        after = (root / FILES[package]).read_text("utf-8")
        lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
        assert not [line for line in lines if line.startswith("-")]
        return root, [line[2:] for line in lines if line.startswith("+")], after

    return apply


def methods(text: str, name: str) -> dict[str, ast.FunctionDef]:
    (cls,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == name]
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("package", FILES)
def test_the_pull_request(patched, tmp_path, package):
    root, _, _ = patched(package)
    shown = git(root, "log", "-1", "--format=%an <%ae>|%aI").strip()
    assert shown == f"{AUTHOR}|{DATE}"
    changed = git(root, "show", "--format=", "--name-status", "HEAD").split()
    assert changed == ["M", FILES[package], *(word for path in ADDED[package] for word in ("A", path))]
    assert git(root, "status", "--porcelain", "--untracked-files=no") == ""
    test = ADDED[package][1]
    assert (tmp_path / "out" / test).read_text("utf-8") == (root / test).read_text("utf-8")
    for path in ADDED[package]:
        text = (root / path).read_text("utf-8")
        ast.parse(text)
        assert text.startswith("# Licensed under the Apache License, Version 2.0") and "Copyright" not in text
    check_description(tmp_path / "out")
    # The change is there now, and a part of it counts, too.
    for path in ("", FILES[package]):
        if path:
            git(root, "checkout", "--quiet", "HEAD~1", "--", path)
        refused(export(root, tmp_path / "again", "--package", package, *SIGNED), tmp_path / "again", "already")


@pytest.mark.parametrize(("package", "page"), [("accelerate", "double-prepare"), ("transformers", "state-reset")])
def test_the_page_shows_the_inserted_lines(patched, package, page):
    _, inserted, _ = patched(package)
    block = (ROOT / f"docs/upstream/{page}.md").read_text("utf-8").partition("```diff\n")[2].partition("```")[0]
    shown = [line[1:].strip() for line in block.splitlines() if line.startswith("+")]
    named = [line.replace('table["use', 'accelerator_state_kwargs["use').strip() for line in inserted]
    assert sorted(shown) == sorted(filter(None, named))


# The order and the neighbours do not matter, nor what is inherited or annotated.
OTHER_ORDER = [
    ("class Accelerator:", "class Accelerator(object):"),
    ("def prepare(self, *args)", "def prepare(self, *args: int)"),
    (
        "        self._models = []\n        self._optimizers = []  # a remark\n",
        "        self._optimizers = []\n        self.x = 1\n        self._models = []\n",
    ),
]


@pytest.mark.parametrize("replacements", [(), OTHER_ORDER], ids=["as it is", "other order"])
def test_accelerate_only_our_lines_are_inserted(patched, replacements):
    _, lines, text = patched("accelerate", *replacements)
    assert "\n".join(lines) + "\n" == INSERTED
    found = methods(text, "Accelerator")
    for name in ("prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader"):
        assert [ast.unparse(decorator) for decorator in found[name].decorator_list] == ["remember"]
    assert "find_prepared" in ast.unparse(found["_prepare_one"].body[0])
    assert "return prepared\n\n        # Whichever it is\n" in text
    assert ast.unparse(found["prepare"].body[1]) == "self._prepared_objects.begin_call()"
    for name, following in (("__init__", "self.step = 0"), ("free_memory", "return []")):
        body = [ast.unparse(line) for line in found[name].body]
        position = next(i for i, line in enumerate(body) if "_prepared_objects" in line)
        assert body[position - 1] == "self._schedulers = []" and body[position + 1] == following


@pytest.mark.parametrize("package, path", [(name, paths[0]) for name, paths in ADDED.items()])
def test_the_new_module_stands_alone(patched, package, path):
    text = (patched(package)[0] / path).read_text("utf-8")
    nodes = list(ast.walk(ast.parse(text, feature_version=(3, 9))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {"." * node.level + node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    allowed = {"accelerate": {"torch"}, "transformers": {"torch", "accelerate"}}
    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) == allowed[package]
    assert "transformers_patch" not in text


def test_transformers_what_is_inserted_and_where(patched):
    root, _, text = patched("transformers")
    shipped = ast.parse((root / ADDED["transformers"][0]).read_text("utf-8"))
    own = ast.parse((ROOT / "src/transformers_patch/agreement.py").read_text("utf-8"))
    assert [ast.dump(node) for node in shipped.body[2:]] == [ast.dump(node) for node in own.body[1:]]
    kept, test = methods(text, "TrainingArguments")["_setup_devices"].body[2:4]
    assert ast.unparse(kept.test) == "self.preserve_accelerator_state and accelerator_state.state_exists()"
    checks = ["accelerator_state.check(self)", "table['use_configured_state'] = True"]
    assert [ast.unparse(line) for line in kept.body] == checks
    assert ast.unparse(test.test) == "table['use_configured_state']" and test.orelse
    # The remark stays with the statement that it is about.
    lines = [line.strip() for line in text.splitlines()]
    assert lines[lines.index("# a remark on the test") + 1].startswith('if table["use_configured_state"]')
    guard = next(n for n in ast.parse(text).body if ast.unparse(n).startswith("if is_accelerate_available():"))
    assert ast.unparse(guard.body[-1]) == "from .utils import accelerator_state"
    # The field comes last, so that no positional argument moves; its description stands before its neighbour's.
    (cls,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    assert [node.target.id for node in fields][-2:] == ["last", "preserve_accelerator_state"]
    options = {keyword.arg: keyword.value for keyword in fields[-1].value.keywords}
    assert options["default"].value is True and "Whether to keep" in ast.unparse(options["metadata"])
    lines = ast.get_docstring(cls).splitlines()
    start = lines.index("    preserve_accelerator_state (`bool`, *optional*, defaults to `True`):")
    assert lines[start - 1] == "        The first." and lines[start + 4].startswith("    accelerator_config (`str`")


REFUSED = [
    ("accelerate", ("from .utils.other import", "from .utils.others import"), "`.utils.other` in .*found none"),
    ("accelerate", ("def prepare_data_loader", "def prepare_model"), "`Accelerator.prepare_model` in .*found 2"),
    ("accelerate", ("obj, first_pass=False", "obj, first=False"), r"found `_prepare_one\(self, obj, first, device"),
    ("accelerate", ("self._models = []", "self._models = list()"), r"`self._models = \[\]` in `Accelerator.__init__`"),
    ("accelerate", ("class Helper:", "class Helper(:"), "accelerator.py of .* is not Python that can be read"),
    ("transformers", ("field(", "fields("), "fields of the dataclass .*found none"),
    ("transformers", ("accelerator_config (`str`", "its configuration (`str`"), "the section .*docstring.*found none"),
    ("transformers", ("if is_accelerate_available():", "if True:"), "is_accelerate_available.*found none"),
    ("transformers", ('if table["use_configured_state"]:', "if use_configured_state:"), "whose `else` .*found none"),
    ("transformers", ("        return self.state", '        if table["use_configured_state"]:\n            pass\n'
     "        else:\n            AcceleratorState._reset_state()\n        return self.state"), "whose `else` .*found 2"),
]  # fmt: skip


@pytest.mark.parametrize("package, replacement, said", REFUSED, ids=[said for _, _, said in REFUSED])
def test_another_shape_is_refused_and_nothing_written(tmp_path, package, replacement, said):
    done = export(make_tree(tmp_path, package, replacement), tmp_path / "out", "--package", package)
    refused(done, tmp_path / "out", said)


def test_another_tree_is_refused(tmp_path):
    root = make_tree(tmp_path, "accelerate")
    for folder in (root, tmp_path / "nowhere"):
        done = export(folder, tmp_path / "out", "--package", "transformers")
        assert done.returncode == 2 and "`__version__` of transformers" in done.stderr
    (root / FILES["accelerate"]).unlink()
    done = export(root, tmp_path / "out", "--package", "accelerate")
    assert done.returncode == 2 and "looked for the file src/accelerate/accelerator.py" in done.stderr


def test_the_author_is_the_user_of_git(tmp_path):
    root, package = make_tree(tmp_path, "transformers"), ("--package", "transformers")
    person = {"GIT_AUTHOR_NAME": "Grace Hopper", "GIT_AUTHOR_EMAIL": "grace@example.org"}
    assert export(root, tmp_path / "out", *package, "--date", DATE, **person).returncode == 0
    (path,) = (tmp_path / "out").glob("*.patch")
    assert "From: Grace Hopper <grace@example.org>\n" in path.read_text("utf-8")
    for words, said in ((("--author", "who"), "author"), (("--date", "xyz"), "date")):
        done = export(root, tmp_path / "none", *package, *words, **person)
        assert done.returncode == 2 and said in done.stderr and not (tmp_path / "none").exists()
