"""Code that nothing uses, found by vulture: `python tools/dead_code.py` names it and fails.

Tests do not count as users: what only a test calls is dead. These do: the package itself, the examples and tools, the recorded
interface of upstream and of downstream libraries (tests/architecture/record), and what a page of docs/ names. `CALLED` has the rest.
"""

import pathlib
import re
import sys

import vulture

ROOT = pathlib.Path(__file__).resolve().parents[1]
USERS = ["src", "examples", "tools", "benchmarks"]
# Names that others call, and who does.
CALLED: dict[str, str] = {
    "_missing_": "enum",
    "__dir__": "dir()",
}


def identifiers(text: str) -> set[str]:
    """Return every word of a text that could be a name."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def main() -> int:
    """Print what is unused, a line each, and return how many there are."""
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tests" / "architecture" / "record").glob("*.json")]
    used = set(CALLED).union(*(identifiers(path.read_text("utf-8")) for path in documents))
    found = vulture.Vulture()
    found.scavenge([ROOT / folder for folder in USERS])
    lines = [
        f"{pathlib.Path(item.filename).relative_to(ROOT)}:{item.first_lineno}: unused {item.typ} {item.name}"
        for item in found.get_unused_code(min_confidence=60)
        if item.name not in used and str(item.filename).startswith(str(ROOT / "src"))
    ]
    print(*lines, sep="\n")
    return len(lines)


if __name__ == "__main__":
    sys.exit(bool(main()))
