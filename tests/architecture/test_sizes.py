"""A file is read in one sitting, and a function fits on a screen or two."""

import ast

import pytest

from architecture import source

FILE_LIMIT = 600
FUNCTION_LIMIT = 80
# The facade carries the documentation of about a hundred public methods.
LONG_FILES = {"accelerate/accelerator.py"}
ALL_FILES = [*source.files("accelerate"), *source.files("transformers_patch")]


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda p: str(p.relative_to(source.SRC)))
def test_sizes(path):
    relative = path.relative_to(source.SRC).as_posix()
    length = len(path.read_text("utf-8").splitlines())
    assert relative in LONG_FILES or length <= FILE_LIMIT, f"{relative} has {length} lines; at most {FILE_LIMIT}"
    lines = source.code_lines(path)
    for node in ast.walk(source.tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # From the first statement on: a parameter a line is documentation, not length.
            size = len(lines.intersection(range(node.body[0].lineno, node.end_lineno + 1)))
            assert size <= FUNCTION_LIMIT, f"{relative}:{node.lineno} {node.name} has {size} lines of code"
