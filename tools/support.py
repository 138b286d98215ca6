"""Write the tables and notes of docs/support.md from docs/support.yaml.

python tools/support.py            writes the page; what follows "## Versions" is written by people and stays
python tools/support.py --check    exits with 1 if the page is out of date
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1] / "docs"
SYMBOLS = {"ci": "●", "demand": "◐", "untested": "○", "unsupported": "✕", "none": "-"}
HEAD = """\
# What is tested

<!-- Written by `python tools/support.py` from docs/support.yaml, up to "Versions". -->

**CPU processes:** all strategies, with the exceptions below. **One NVIDIA GPU:** single process, DDP, FSDP1, FSDP2.
**Several GPUs, other accelerators, macOS, Windows:** untested.

| symbol | meaning |
|:-:|---|
| ● | tested on every change |
| ◐ | tested on demand: slow tests, or the make target |
| ○ | untested |
| ✕ | unsupported: raises an error |
| - | does not apply |

A test of a strategy compares 5 steps with one process: losses, gradient norms and weights agree within 1e-5 in float32, with accumulation,
clipping and a schedule. In bf16, losses agree within 0.05 over 2 steps. *Several CPU processes* are processes of one machine, over gloo.
"""


def page(support: dict[str, Any]) -> str:
    """Return the generated part of the page."""
    numbers: dict[str, int] = {}
    lines = [HEAD]
    for table in support["tables"]:
        columns = table["columns"]
        lines += [f"## {table['title']}", "", f"| {' | '.join([table['name'], *columns, 'notes', 'proof'])} |"]
        lines.append("|---|" + ":-:|" * len(columns) + "---|---|")
        for entry in table["rows"]:
            row = entry["row"] if isinstance(entry, dict) else entry
            proof = entry["proof"] if isinstance(entry, dict) else table["proof"]
            name, *cells = row
            notes = cells.pop() if isinstance(cells[-1], list) else []
            if len(cells) != len(columns):
                raise ValueError(
                    f"{name!r} has {len(cells)} cells, but {table['title']!r} has {len(columns)} columns."
                )
            marks = ", ".join(str(numbers.setdefault(note, len(numbers) + 1)) for note in notes)
            symbols = " | ".join(SYMBOLS[cell] for cell in cells)
            lines.append(f"| {name} | {symbols} | {marks} | `{proof}` |")
        lines.append("")
    if unused := set(support["notes"]) - set(numbers):
        raise ValueError(f"No row has the notes {sorted(unused)}.")
    lines += ["## Notes", ""]
    lines += [f"{number}. {support['notes'][note]}" for note, number in numbers.items()]
    lines += [
        "",
        "## Last runs",
        "",
        "| target | date | versions | passed | skipped | failed |",
        "|---|---|---|--:|--:|--:|",
    ]
    for run in support["runs"]:
        counts = " | ".join(str(run[count]) for count in ("passed", "skipped", "failed"))
        lines.append(f"| `make {run['target']}` | {run['date']} | {run['versions']} | {counts} |")
    return "\n".join(lines) + "\n\n"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date")
    check = parser.parse_args().check
    target = DOCS / "support.md"
    former = target.read_text("utf-8")
    text = page(yaml.safe_load((DOCS / "support.yaml").read_text("utf-8"))) + former[former.index("## Versions\n") :]
    if check:
        return int(text != former)
    target.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
