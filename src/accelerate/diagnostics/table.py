"""Tables in plain text: the one printer of every report."""

from collections.abc import Collection, Sequence


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
