"""Tables in plain text: the one printer, and the one type, of reports."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = (), rule: bool = False
) -> str:
    """Return columns of text, two spaces apart.

    Args:
        headings: Of the columns.
        rows: As long as `headings`.
        right: Headings of the columns that are set to the right, as those of numbers.
        rule: Draw a line of hyphens below the headings.
    """
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
    """A table under a title; ``str()`` prints it.

    Attributes:
        title: The first line.
        columns: The headings; the last ones are of numbers.
        rows: The records, each with ``cells()``: its texts.
        notes: Lines below the table.
        texts: How many columns are text, which is set to the left.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Any, ...]
    notes: tuple[str, ...] = ()
    texts: int = 0

    def __str__(self) -> str:
        body = [row.cells() for row in self.rows]
        return "\n".join([self.title, table(self.columns, body, self.columns[self.texts :], rule=True), *self.notes])
