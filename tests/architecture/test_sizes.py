"""A file is read in one sitting, and a function fits on a screen or two."""

import ast
import pathlib

import pytest

from architecture import source

# All files are parsed once.
pytestmark = pytest.mark.xdist_group("syntax trees")

FILE_LIMIT = 600
FUNCTION_LIMIT = 80
# The facade carries the documentation of about a hundred public methods.
LONG_FILES = {"accelerate/accelerator.py"}
ALL_FILES = [*source.files("accelerate"), *source.files("transformers_patch")]


def relative(path: pathlib.Path) -> str:
    """Return a path as it is written in messages."""
    return path.relative_to(source.SRC).as_posix()


def test_files_are_short():
    lengths = {relative(path): len(path.read_text("utf-8").splitlines()) for path in ALL_FILES}
    long = {path: length for path, length in lengths.items() if length > FILE_LIMIT and path not in LONG_FILES}
    assert not long, f"at most {FILE_LIMIT} lines"


def test_functions_are_short():
    long = {}
    for path in ALL_FILES:
        for node in ast.walk(source.tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # From the first statement on: a parameter a line is documentation, not length.
                lines = range(node.body[0].lineno, node.end_lineno + 1)
                if len(lines) > FUNCTION_LIMIT:
                    size = len(source.code_lines(path).intersection(lines))
                    if size > FUNCTION_LIMIT:
                        long[f"{relative(path)}:{node.lineno} {node.name}"] = size
    assert not long, f"at most {FUNCTION_LIMIT} lines of code"
