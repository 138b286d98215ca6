"""A file of upstream's tree: its syntax tree, which says where lines go, and its text with these lines inserted."""

import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path


class UnknownSource(ValueError):
    """The tree has not the shape that the change was written for, or has the change already; nothing is written."""


class SourceFile:
    """Reads one file and collects the lines that a patch adds to it; no line is removed.

    Args:
        root: The root of the source tree.
        path: The file, relative to it.
    """

    def __init__(self, root: Path, path: str) -> None:
        self._where = f"{path} of {root}"
        if not (root / path).is_file():
            raise UnknownSource(
                f"looked for the file {path} in {root}; it is not there. Is this the root of the tree?"
            )
        self.text = (root / path).read_text("utf-8")
        self._lines = self.text.splitlines(keepends=True)
        try:
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            raise UnknownSource(f"{self._where} is not Python that can be read: {error}") from None
        self._added: list[tuple[int, str]] = []

    def refuse(self, what: str, found: object) -> UnknownSource:
        """Return the error that says what was looked for in this file, and what was found."""
        return UnknownSource(f"looked for {what} in {self._where} and found {found}.")

    def only(self, found: Sequence, what: str) -> ast.AST:
        """Return the one place that was found; none or several are refused."""
        if len(found) != 1:
            raise self.refuse(what, len(found) or "none")
        return found[0]

    def import_from(self, module: str) -> ast.ImportFrom:
        """Return the one import at the top of the file from a module of the same package."""
        found = [node for node in self.tree.body if isinstance(node, ast.ImportFrom) and node.level == 1]
        return self.only([node for node in found if node.module == module], f"an import from `.{module}`")

    def cls(self, name: str) -> ast.ClassDef:
        """Return the one class of the file with this name."""
        classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        return self.only(classes, f"the class `{name}`")

    def method(self, cls: ast.ClassDef, name: str) -> ast.FunctionDef:
        """Return the one method of a class with this name."""
        methods = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name]
        return self.only(methods, f"`{cls.name}.{name}`")

    def add(self, line: int, text: str, indent: int) -> None:
        """Insert a text in front of a line, counted from 1."""
        self._added.append((line, textwrap.indent(text, " " * indent)))

    def add_above(self, statement: ast.stmt, text: str) -> None:
        """Insert a text in front of a statement and of the comments that lead to it."""
        line = statement.lineno
        while self._lines[line - 2].lstrip().startswith("#"):
            line -= 1
        self.add(line, text, statement.col_offset)

    def add_below(self, statement: ast.stmt, text: str) -> None:
        """Insert a text behind a statement."""
        self.add(statement.end_lineno + 1, text, statement.col_offset)

    def changed(self) -> str:
        """Return the text with everything that was inserted."""
        lines = list(self._lines)
        for line, text in sorted(self._added, reverse=True):
            lines.insert(line - 1, text)
        return "".join(lines)
