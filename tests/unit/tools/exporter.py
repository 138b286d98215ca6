"""The exporter of pull requests as the tests run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
AUTHOR, DATE = "Zo\u00eb Lovelace <zoe@example.org>", "2026-01-31T12:00:00+00:00"
HEADINGS = ("Problem", "Evidence", "Semantics", "Alternatives considered", "Compatibility")


def export(tree: Path, out: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/upstream_patches"), "--source", str(tree), "--out", str(out)]
    return subprocess.run([*command, *words], env={**os.environ, **variables}, capture_output=True, text=True)


def check_description(out: Path) -> None:
    """Require all parts of the text of a pull request."""
    body = (out / "PULL_REQUEST.md").read_text("utf-8")
    assert "9.9" in body and "{version}" not in body
    assert [heading for heading in HEADINGS if f"## {heading}" not in body] == []


def write_tree(folder: Path, package: str, files: dict[str, str], *replacements: tuple[str, str]) -> Path:
    """Write modules of a package in which texts are replaced, and return the root of the tree."""
    root = folder / "tree"
    assert all(any(old in text for text in files.values()) for old, _ in replacements), replacements
    for module, text in {"__init__": '__version__ = "9.9"\n', **files}.items():
        for old, new in replacements if module in files else ():
            text = text.replace(old, new)
        path = root / f"src/{package}/{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


def refused(done: subprocess.CompletedProcess[str], out: Path, said: str) -> None:
    assert done.returncode == 2 and re.search(said, done.stderr), done.stderr
    assert not out.exists()
