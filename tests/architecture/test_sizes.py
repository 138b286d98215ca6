"""A file is read in one sitting, and a function fits on a screen or two."""

import ast
import io
import pathlib
import tokenize

import pytest

from architecture import source

FILE_LIMIT = 600
FUNCTION_LIMIT = 80
# The facade carries the documentation of about a hundred public methods.
LONG_FILES = {"accelerate/accelerator.py"}
ALL_FILES = [*source.files("accelerate"), *source.files("transformers_patch")]
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: pathlib.Path) -> set[int]:
    """Return the numbers of the lines that hold code: no blank lines, no comments, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(
            node, clean=False
        ):
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda p: str(p.relative_to(source.SRC)))
def test_sizes(path):
    relative = path.relative_to(source.SRC).as_posix()
    length = len(path.read_text("utf-8").splitlines())
    assert relative in LONG_FILES or length <= FILE_LIMIT, f"{relative} has {length} lines; at most {FILE_LIMIT}"
    lines = code_lines(path)
    for node in ast.walk(source.tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # From the first statement on: a parameter a line is documentation, not length.
            size = len(lines.intersection(range(node.body[0].lineno, node.end_lineno + 1)))
            assert size <= FUNCTION_LIMIT, f"{relative}:{node.lineno} {node.name} has {size} lines of code"
