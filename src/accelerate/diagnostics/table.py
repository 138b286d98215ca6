"""Reports in plain text: the one printer of tables, the one type of reports, and sizes and times."""

import datetime
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


def size_text(size: int) -> str:
    """Return a size in the largest unit that fits.

    Args:
        size: bytes.

    Example:
        >>> size_text(1_500_000), size_text(12)
        ('1.5 MB', '12 B')
    """
    amount = float(size)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{size} B" if unit == "B" else f"{amount:.3g} {unit}"


def age_text(seconds: float | None) -> str:
    """Return a length of time, as days and hours, minutes and seconds.

    Args:
        seconds: None if it is not known.

    Example:
        >>> age_text(150), age_text(90_000), age_text(None)
        ('0:02:30', '1 day, 1:00:00', '-')
    """
    return "-" if seconds is None else str(datetime.timedelta(seconds=int(seconds)))
