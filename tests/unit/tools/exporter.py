"""The exporter of pull requests as the tests run it."""

import os
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
