"""The checkpoint benchmark: what is run, and how it is reported. Used by run.py."""

import shutil
import statistics
import tempfile
from pathlib import Path

SIZES_MB = (10, 100, 1000, 4000)
# Two processes have the state twice, and a model in buckets.
MOST_FOR_TWO_MB = 2000
MEMORY_MB = 3072
BACKGROUND_MB = 600
SAVES = ("save_state without fsync (s)", "save_state (s)", "save_state, and on the disk (s)")
LOADS = ("load_state, new run (s)", "load_state, over a state (s)")


def run(interpreters, rounds, sizes, measure, ours):
    """Return medians by what was done, figure and package."""
    results = {}
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent.parent, suffix=".tmp") as scratch:
        for megabytes in sizes:
            for processes in (1, 2) if megabytes <= MOST_FOR_TWO_MB else (1,):
                key = f"{megabytes} MB, {processes} process{'es' * (processes > 1)}"
                results[key] = _times(interpreters, rounds, measure, scratch, megabytes, processes)
        one = {"megabytes": MEMORY_MB, "folder": f"{scratch}/memory"}
        results[f"{MEMORY_MB} MB, 1 process"] = _medians(
            [{name: _phase(measure, python, "memory", **one) for name, python in interpreters.items()}]
        )
        for threads in (1, 2):
            told = {"megabytes": BACKGROUND_MB, "folder": f"{scratch}/background", "repeats": 5, "threads": threads}
            key = f"{BACKGROUND_MB} MB, 1 process, {threads} thread{'s' * (threads > 1)}, in the background"
            results[key] = _medians(
                [{ours: _phase(measure, interpreters[ours], "background", **told)} for _ in range(rounds)]
            )
        told = {"megabytes": BACKGROUND_MB, "folder": f"{scratch}/shards", "repeats": 5, "processes": 2}
        results[f"{BACKGROUND_MB} MB, 2 processes, shards"] = _medians(
            [{ours: _phase(measure, interpreters[ours], "shards", **told)} for _ in range(rounds)]
        )
    return results


def _times(interpreters, rounds, measure, scratch, megabytes, processes):
    seen = []
    for number in range(rounds):
        order = list(interpreters.items())
        figures = {}
        for name, python in order if number % 2 == 0 else reversed(order):
            told = {"megabytes": megabytes, "folder": f"{scratch}/{name}", "processes": processes}
            figures[name] = _phase(measure, python, "save", **told, keep=True)
            figures[name] |= _phase(measure, python, "load", **told)
        seen.append(figures)
    return _medians(seen)


def _phase(measure, python, phase, megabytes, folder, processes=1, repeats=3, threads=1, keep=False):
    arguments = ("--megabytes", str(megabytes), "--folder", folder, "--repeats", str(repeats))
    try:
        return measure(python, "checkpoint", phase, *arguments, processes=processes, threads=threads)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _medians(seen):
    figures = {}
    for round_ in seen:
        for name, row in round_.items():
            for figure, value in row.items():
                figures.setdefault(figure, {}).setdefault(name, []).append(value)
    return {
        figure: {name: statistics.median(values) for name, values in columns.items()}
        for figure, columns in figures.items()
    }


def table(results, packages, ours, number):
    """Return Markdown tables: times and memory against the first peer, and what saving in the background costs."""
    peer = next(name for name in packages if name != ours)
    lines = [
        f"| state | figure | {' | '.join(packages)} | ours / {peer} |",
        "|---|---|" + "---:|" * (len(packages) + 1),
    ]
    for done, figures in results.items():
        label = done
        for figure, row in figures.items():
            if peer in row:
                ratio = f"{row[ours] / row[peer]:.2f}" if row[peer] > 0 else ""
                cells = " | ".join(number(row[name]) for name in packages)
                lines.append(f"| {label} | {figure} | {cells} | {ratio} |")
                label = ""
        if (
            "save_state, and on the disk (s)" in figures
        ):  # each with what is asked of it: ours is on the disk, upstream's is not
            durable = figures["save_state, and on the disk (s)"]
            lines.append(
                f"| | on the disk / upstream's, not on the disk | | | {durable[ours] / figures['save_state (s)'][peer]:.2f} |"
            )
    lines += [
        "",
        "| state | copy (s) | stopped (s) | stopped / copy | step (ms) | step meanwhile (ms) | meanwhile / alone |",
    ]
    lines.append("|---|" + "---:|" * 6)
    for done, figures in results.items():
        if "a step (s)" in figures:
            row = {figure: columns[ours] for figure, columns in figures.items()}
            copy, stopped = row["one copy of the state (s)"], row["save_state(blocking=False) (s)"]
            step, meanwhile = row["a step (s)"], row["a step while a save is written (s)"]
            lines.append(
                f"| {done} | {copy:.3f} | {stopped:.3f} | {stopped / copy:.2f} | {step * 1e3:.1f} | {meanwhile * 1e3:.1f} "
                f"| {meanwhile / step:.2f} |"
            )
    for done, figures in results.items():
        if done.endswith("shards"):
            lines += ["", f"| {done} | seconds |", "|---|---:|"]
            lines += [f"| {figure.removesuffix(' (s)')} | {row[ours]:.3f} |" for figure, row in figures.items()]
    return "\n".join(lines)


def plot(results, packages, path):
    """Draw times by size of the state, with one process, into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, figures, title in zip(panels, (SAVES, LOADS), ("save_state", "load_state"), strict=True):
        for name, colour in zip(packages, ("tab:blue", "tab:orange", "tab:green"), strict=False):
            for figure, style in zip(figures, ("-o", "--s", ":^"), strict=False):
                points = [
                    (int(done.split(" ")[0]), row[figure][name])
                    for done, row in results.items()
                    if done.endswith("1 process") and figure in row
                ]
                label = f"{name}, {figure.removesuffix(' (s)')}"
                axes.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel="state (MB)", ylabel="seconds", title=title)
        axes.legend(fontsize=7)
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
