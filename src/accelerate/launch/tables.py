"""Tables in plain text."""

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Return columns of text, two spaces apart.

    Args:
        headings: of the columns.
        rows: as long as `headings`.
        right: headings of the columns that end on the right, apart by spaces.
    """
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    aligned = [">" if heading in right.split() else "<" for heading in headings]
    lines = (
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True))
        for row in (headings, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
