"""`transformers_patch` stands next to upstream's accelerate as well as next to ours, so it may know very little."""

import ast
import subprocess
import sys

import pytest

from architecture import source

PACKAGE = source.SRC / "transformers_patch"
FILES = source.files("transformers_patch")


def imported(path):
    """Return the dotted names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(source.tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# The only files that need this fork's accelerate: nothing imports them before `checkpoints.available` has said that it is there.
STAGES = (
    "preempt.py",
    *(f"checkpoints/{name}.py" for name in ("callbacks", "capture", "choose", "save", "sharded", "streams")),
)
OURS = (
    "accelerate.extensions.async_save",
    "accelerate.extensions.deepspeed",
    "accelerate.checkpoint",
    "accelerate.data",
    "accelerate.runtime",
    "accelerate.extensions.hang",
    "accelerate.extensions.preemption.watch",
    "accelerate.comm",
    "accelerate.utils",
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_of_accelerate_but_its_states(path):
    allowed = {"accelerate.state", "accelerate.state.AcceleratorState", "accelerate.state.PartialState"}
    found = {name for name in imported(path) if name.partition(".")[0] == "accelerate"}
    if path.relative_to(PACKAGE).as_posix() in STAGES:
        found = {name for name in found if not name.startswith(OURS)}
    assert found <= allowed


def test_what_needs_this_forks_accelerate_is_imported_late():
    code = """
import sys
sys.modules["accelerate.checkpoint"] = None  # as if it were not there
import transformers_patch.checkpoints.patches, transformers_patch.engine
print(transformers_patch.checkpoints.available())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_what_travels_stands_alone():
    known = imported(PACKAGE / "agreement.py")
    assert not {name for name in known if name.partition(".")[0] in ("transformers", "transformers_patch")}


@pytest.mark.cold
def test_importing_the_package_imports_neither_transformers_nor_torch():
    code = "import sys, transformers_patch; print([m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
