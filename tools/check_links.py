"""Return which relative links in the project's Markdown files lead nowhere. Exit status 1 when there is one.

    python tools/check_links.py

Checks files and headings; links to the web are left alone, because a test must not depend on another server.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.S | re.M)
CODE = re.compile(r"`[^`\n]*`")
SKIPPED = re.compile(r"\.git|\.cache|\.venv.*|site|build|dist|\.demo|.*\.egg-info")


def documents() -> list[pathlib.Path]:
    """Return every Markdown file that belongs to the project."""
    found = sorted(ROOT.rglob("*.md"))
    return [path for path in found if not any(SKIPPED.fullmatch(part) for part in path.relative_to(ROOT).parts)]


def anchors(text: str) -> set[str]:
    """Return the fragment names of the headings in `text`, spelled as renderers spell them."""
    names = set()
    for heading in re.findall(r"^#+\s+(.+?)\s*$", FENCE.sub("", text), re.M):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower())
        names.add(re.sub(r"\s", "-", words.strip()))
    return names


def broken(document: pathlib.Path) -> list[str]:
    """Return one line for each relative link in `document` that leads nowhere."""
    found = []
    text = CODE.sub("", FENCE.sub("", document.read_text("utf-8")))
    for target in LINK.findall(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, fragment = target.partition("#")
        goal = (document.parent / path).resolve() if path else document
        where = document.relative_to(ROOT)
        if not goal.exists():
            found.append(f"{where}: {target}: there is no such file")
        elif fragment and goal.suffix == ".md" and fragment.lower() not in anchors(goal.read_text("utf-8")):
            found.append(f"{where}: {target}: there is no such heading")
    return found


def main() -> int:
    problems = [line for document in documents() for line in broken(document)]
    print("\n".join(problems) or f"links: {len(documents())} documents, all relative links lead somewhere")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
