"""Write docs/reference/differences.md from docs/differences.yaml.

python tools/differences.py            writes the page
python tools/differences.py --check    exits with 1 if the page is out of date
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """\
# All differences from upstream

<!-- Written by `python tools/differences.py` from docs/differences.yaml. -->

This page lists what behaves differently from accelerate 1.15.0, by subject. [Differences](../differences.md) explains the twenty that matter
most. An empty cell under *upstream* means that 1.15.0 lacks the feature, ignores the case, or accepts it without a message. A difference
that is not listed is a bug: please report it.

<input id="filter" type="search" placeholder="Filter the rows" aria-label="Filter the rows" style="width: 100%; padding: .4rem">
<script>
document.getElementById("filter").addEventListener("input", function (event) {
  var word = event.target.value.toLowerCase();
  document.querySelectorAll("article table tbody tr").forEach(function (row) {
    row.hidden = !row.textContent.toLowerCase().includes(word);
  });
});
</script>
"""


def page(subjects: list[dict[str, Any]]) -> str:
    """Return the page: one table with an anchor in each row for each subject."""
    lines = [HEAD]
    for subject in subjects:
        lines += [f"## {subject['title']}", "", "| id | here | upstream | reason |", "|---|---|---|---|"]
        for row in subject["rows"]:
            anchor = f'<a id="{row["id"]}"></a>{row["id"]}'
            lines.append(f"| {anchor} | {row['here']} | {row.get('upstream', '')} | {row['reason']} |")
        lines.append("")
    return "\n".join(lines).replace("](guides/", "](../guides/").replace("](support.md", "](../support.md")


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date")
    check = parser.parse_args().check
    target = DOCS / "reference/differences.md"
    text = page(yaml.safe_load((DOCS / "differences.yaml").read_text("utf-8"))["subjects"])
    if check:
        return int(not target.exists() or text != target.read_text("utf-8"))
    target.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
