"""Reading our own source: which files there are, what they import, and where their functions are."""

import ast
import dataclasses
import functools
import io
import pathlib
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclasses.dataclass(frozen=True)
class Import:
    """One import of one of our modules by another; `lazy` when it sits in a function, or for annotations alone."""

    source: str
    target: str
    line: int
    lazy: bool


@functools.cache
def files(package: str = "accelerate") -> tuple[pathlib.Path, ...]:
    """Return the Python files of one of our packages."""
    return tuple(sorted((SRC / package).rglob("*.py")))


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"), str(path))


def code_lines(path: pathlib.Path) -> set[int]:
    """Return the numbers of the lines that hold code: no blank lines, no comments, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree(path)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False):
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def module_name(path: pathlib.Path) -> str:
    """Return the dotted name of a file under src."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Return every module of the package with its file."""
    return {module_name(path): path for path in files()}


def _walk(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, lazy
        else:
            late = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            late = late or (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"))
            yield from _walk(child, lazy or late)


@functools.cache
def imports(name: str) -> list[Import]:
    """Return what a module of ours imports from the package, a submodule named in `from` counted as itself."""
    known, found = modules(), []
    for node, lazy in _walk(tree(known[name]), lazy=False):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                is_package = known[name].name == "__init__.py"
                anchor = parts[: len(parts) - node.level + is_package]
                base = ".".join([*anchor, *([base] if base else [])])
            # `from package import submodule` loads the submodule; any other name loads the package's own file.
            targets = [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
        found += [Import(name, t, node.lineno, lazy) for t in dict.fromkeys(targets) if t in known and t != name]
    return found
