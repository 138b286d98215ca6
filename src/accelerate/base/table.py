"""Reports in plain text: the one printer of tables, the one type of reports, and sizes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.base._warn import printable


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = (), rule: bool = False
) -> str:
    """Return columns of text, with two spaces between, those named in `right` set to the right."""
    # A cell may be the name of a file or a tensor, and is one line.
    headings, *rows = ([printable(cell).replace("\n", "\\n") for cell in row] for row in (headings, *rows))
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    if rule:
        rows = [["-" * width for width in widths], *rows]
    lines = []
    for row in (headings, *rows):
        cells = [
            cell.rjust(width) if heading in right else cell.ljust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """A table under a title; ``str()`` prints it. The first `texts` columns are text, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Any, ...]
    notes: tuple[str, ...] = ()
    texts: int = 0

    def __str__(self) -> str:
        body = [row.cells() for row in self.rows]
        return "\n".join([self.title, table(self.columns, body, self.columns[self.texts :], rule=True), *self.notes])


def size_text(size: int) -> str:
    """Return a size in bytes in the largest unit that fits, as in "1.5 MB"."""
    amount = float(size)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{size} B" if unit == "B" else f"{amount:.3g} {unit}"
