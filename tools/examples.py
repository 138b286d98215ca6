#!/usr/bin/env python3
"""Write what each program teaches into the tables of examples/README.md: the title of its docstring.

python tools/examples.py           writes the tables
python tools/examples.py --check   writes nothing; status 1 if a row is not up to date
"""

import ast
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples"
PAGE = FOLDER / "README.md"
ROW = re.compile(r"^\| \[[^\]]+\]\((?P<path>[\w/]+\.py)\) \| .* \|$", re.MULTILINE)


def row(match: re.Match[str]) -> str:
    """Return the row of a program."""
    path = FOLDER / match["path"]
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return f"| [{path.name}]({match['path']}) | {' '.join(docstring.partition(chr(10) * 2)[0].split())} |"


def main() -> int:
    """Write or check the page."""
    before = PAGE.read_text("utf-8")
    after = ROW.sub(row, before)
    if "--check" not in sys.argv:
        PAGE.write_text(after, "utf-8")
    elif before != after:
        print("examples/README.md is not up to date: run python tools/examples.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
