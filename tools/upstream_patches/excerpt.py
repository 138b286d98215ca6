"""Show on a page the lines that a patch adds to existing files: `python tools/upstream_patches/excerpt.py PATCH PAGE`.

The page has one block ```` ```diff ````, which is replaced. Lines of the source are not shown.
"""

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"(?<=^```diff\n).*?(?=^```$)", re.M | re.S)


def excerpt(mail: str) -> str:
    """Return the added lines of each existing file, under its name and their number; the parts of a file are separated by `@@`."""
    shown = []
    for part in re.split(r"^diff --git ", mail, flags=re.M)[1:]:
        if re.search(r"^new file mode", part, re.M):
            continue
        path = re.search(r"^\+\+\+ b/(.+)$", part, re.M)[1]  # type: ignore[index]
        body = re.split(r"^@@.*\n", part, flags=re.M)[1:]
        parts = [[line for line in re.findall(r"^\+.*$", hunk, re.M) if line.strip("+ ")] for hunk in body]
        count = sum(len(re.findall(r"^\+", hunk, re.M)) for hunk in body)
        shown.append("\n".join([f"# {path}: {count} lines", "\n@@\n".join(map("\n".join, parts))]))
    return "\n".join(shown) + "\n"


if __name__ == "__main__":
    patch, page = map(Path, sys.argv[1:])
    page.write_text(BLOCK.sub(lambda _: excerpt(patch.read_text("utf-8")), page.read_text("utf-8")), "utf-8")
