"""What the package costs with many ranks: `python tests/scale/run.py` measures, compares with the bars, and writes docs/scale.md.

Each part is a separate program next to this file and prints a line of JSON at its end. With names of parts, only those run, and
nothing is written.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "scale.md"
PLOT = PAGE.parent / "img" / "scale.png"
BEGIN, END = "<!-- figures: make test-scale -->", "<!-- end of figures -->"
FLEETS = {"ddp": (8, 32, 96), "fsdp2": (8, 32)}
# So large that a piece of a file counts little.
_ARGUMENTS = {"object_store": (48,)}
PARTS = ("fleet", "one_rank", "sampling", "manifest", "object_store", "dispatch")
_MIB = 1 << 20
# Before a hang report one question is asked, or two, as it happens; each answer has a stack.
_ANSWERS_KIB = 3.5

Figures = dict[str, Any]
# What is measured, its value, and the most that it may be.
Bar = tuple[str, float, float]


def measured(program: str, *arguments: Any) -> Figures:
    """Run a program and return the JSON at its end."""
    command = [sys.executable, str(HERE / f"{program}.py"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    _, marked, text = done.stdout.rpartition("RESULT ")
    lines = [text] if marked else [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    rows = [json.loads(line) for line in lines]
    return rows[0] if len(rows) == 1 else {f"{row['ranks']} ranks, {name}": row[name] for row in rows for name in row}


def collect(parts: tuple[str, ...]) -> Figures:
    """Return the figures of parts by name."""
    found: Figures = {}
    for part in parts:
        if part == "fleet":
            found[part] = {f"{mode} {ranks}": measured(part, ranks, mode) for mode in FLEETS for ranks in FLEETS[mode]}
        elif part == "one_rank":
            found[part] = {str(ranks): measured(part, ranks) for ranks in (8, 1024, 16384)}
        else:
            found[part] = measured(part, *_ARGUMENTS.get(part, ()))
        print(part, json.dumps(found[part]), flush=True)
    return found


# -- bars and tables ---------------------------------------------------------------------------------------------------


def bars(found: Figures) -> Iterator[Bar]:
    """Yield what must hold."""
    for mode, sizes in FLEETS.items() if "fleet" in found else ():
        few, many = (found["fleet"][f"{mode} {ranks}"] for ranks in (sizes[0], sizes[-1]))
        for phase in few:
            for unit in ("KiB", "requests") if phase not in ("ranks", "idle") else ():
                # What the steady rate of the hang watchers hides is small; a value below these is no growth.
                floor = {"KiB": _ANSWERS_KIB if phase == "hang report" else 2.0, "requests": 8.0}[unit]
                yield (
                    f"{phase}, {mode}: {unit} a rank, {sizes[-1]} ranks next to {sizes[0]}",
                    max(many[phase][unit], floor) / max(few[phase][unit], floor),
                    1.3,
                )
    if "sampling" in found:
        yield from _bars_of_sampling(found["sampling"])
    if "object_store" in found:
        # Files are downloaded in full: next to those of its two ranks a node reads that of rank 0, with what all ranks read.
        for phase, most in (("save", 1.05), ("load", 1.05 * 3 / 2)):
            row = found["object_store"][phase]
            moved = row["written" if phase == "save" else "read"]
            pairs = zip(moved, row["needed"], strict=True)
            yield f"object store, {phase}: bytes of a node next to what it needs", max(a / b for a, b in pairs), most


def _bars_of_sampling(row: Figures) -> Iterator[Bar]:
    for kind in ("in order", "shuffled"):
        yield f"sampling, {kind}: a batch with 16,384 ranks next to 8", row[kind]["16384"] / row[kind]["8"], 1.3
    large = row["large"]
    # The order is drawn with torch's draws, so that it is the order of a plain loop.
    draws = large["all_draws_s"] / large["torch_randperm_s"]
    yield "sampling: all draws of 50 million samples next to torch.randperm", draws, 1.5
    yield "sampling: a first batch of 50 million samples (s)", large["first_batch_s"], 0.6
    yield "sampling: a first batch of 50 million samples (MiB)", large["first_batch_MiB"], 450


def tables(found: Figures) -> str:
    """Return the figures as Markdown."""
    return "\n\n".join([*_fleet_tables(found["fleet"]), _one_rank_table(found["one_rank"]), *_others(found)])


def _table(headings: list[str], rows: list[list[Any]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _fleet_tables(fleet: Figures) -> Iterator[str]:
    for mode, sizes in FLEETS.items():
        columns = [fleet[f"{mode} {ranks}"] for ranks in sizes]
        phases = [phase for phase in columns[0] if phase not in ("ranks", "idle")]
        cells = [[f"{c[p]['KiB']:g} / {c[p]['requests']:g}" for c in columns] for p in phases]
        rows = [[phase, *row] for phase, row in zip(phases, cells, strict=True)]
        yield f"Store traffic of a rank, {mode}: KiB / requests.\n\n" + _table(
            ["phase", *[f"{r} ranks" for r in sizes]], rows
        )


def _one_rank_table(rows: Figures) -> str:
    names = list(next(iter(rows.values())))
    body = [[name, *(f"{row[name]:g}" for row in rows.values())] for name in names if name != "ranks"]
    return "One rank of many, the others made up (fake process group).\n\n" + _table(
        ["", *[f"{int(ranks):,} ranks" for ranks in rows]], body
    )


def _others(found: Figures) -> Iterator[str]:
    sampling = found["sampling"]
    kinds = ("in order", "shuffled", "with replacement", "custom")
    ranks = sampling["shuffled"]
    yield "A rank finds the samples of its next batch: microseconds, by number of ranks.\n\n" + _table(
        ["sampler", *ranks], [[kind, *(sampling[kind].get(size, "-") for size in ranks)] for kind in kinds]
    )
    flat = {f"50 million samples: {name}": value for name, value in sampling["large"].items()}
    flat |= {f"manifest: {name}": value for name, value in found["manifest"].items()}
    flat |= {f"dispatch, {name}": v for name, v in found["dispatch"].items() if not name.endswith(", ranks")}
    for phase, row in found["object_store"].items():
        unit = "written" if phase == "save" else "read"
        flat[f"object store, {phase}: MiB {unit} by node / needed"] = " / ".join(
            ", ".join(f"{value / _MIB:.1f}" for value in row[key]) for key in (unit, "needed")
        )
    yield _table(
        ["measured", "value"], [[name, f"{v:.5g}" if isinstance(v, (int, float)) else v] for name, v in flat.items()]
    )


def plot(found: Figures) -> None:
    """Draw how traffic and sampling grow with the ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for mode, sizes in FLEETS.items():
        for phase in ("second save", "load"):
            values = [found["fleet"][f"{mode} {ranks}"][phase]["KiB"] for ranks in sizes]
            left.plot(sizes, values, "-o", label=f"{phase}, {mode}")
    left.set(xscale="log", xlabel="ranks", ylabel="KiB a rank at the store", ylim=(0, None))
    us = {int(ranks): value for ranks, value in found["sampling"]["shuffled"].items()}
    right.plot(list(us), list(us.values()), "-o", label="a batch's samples")
    right.set(xscale="log", xlabel="ranks", ylabel="microseconds", ylim=(0, None))
    for axes in (left, right):
        axes.legend(fontsize=8)
    drawing.tight_layout()
    drawing.savefig(PLOT, dpi=120)


def main(parts: tuple[str, ...]) -> int:
    """Measure, print what does not hold, and return how much that is."""
    found = collect(parts or PARTS)
    compared = list(bars(found))
    for name, value, most in compared:
        print(f"{'ok    ' if value <= most else 'MISSED'} {value:8.2f} <= {most:<6g} {name}")
    if not parts:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{rest.partition(END)[2]}", "utf-8")
        plot(found)
    return sum(value > most for _, value, most in compared)


if __name__ == "__main__":
    sys.exit(bool(main(tuple(sys.argv[1:]))))
