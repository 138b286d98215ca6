"""The benchmark of big models: what is run, and how it is reported. Used by run.py."""

import statistics
import tempfile
from pathlib import Path

MEGABYTES = 3072
MODULES = (2500, 5000, 10000)
NOTE = (
    "{megabytes} MB in float32 in 24 safetensors files, a block in each. *20 of 24 blocks on disk*: the other four "
    "on the CPU. *Warm*: the files are in the page cache. *Cold*: they were dropped from it. Forwards have one row, "
    "or 32. *Reading the bytes once*: the 20 files with `readinto`. Memory is the growth of the process; "
    "*anonymous* excludes pages of files. *Hook*: the extra time of a hooked module's call."
)
# Title of the rows, phase of the case, arguments for ours, and whether upstream takes part.
PHASES = (
    ("to the CPU, warm", "cpu", (), True),
    ("to the CPU, cold", "cpu-cold", (), True),
    ("20 of 24 blocks on disk, warm", "disk", (), True),
    ("20 of 24 blocks on disk, cold", "disk-cold", (), True),
    ("20 of 24 blocks on disk, warm, prefetch off", "disk", ("--prefetch", "0"), False),
    ("20 of 24 blocks on disk, cold, prefetch off", "disk-cold", ("--prefetch", "0"), False),
    ("bfloat16 files, computed in float32, warm", "cast", (), True),
    ("bfloat16 files, computed in float32, warm, prefetch off", "cast", ("--prefetch", "0"), False),
    ("calls", "hooks", (), True),
    ("many modules", "growth", (), True),
)
LIMITS, ACCELERATOR = "limits", "on the accelerator"
GOALS = {
    ("to the CPU, warm", "load (s)"): 0.7,
    ("to the CPU, warm", "peak memory beyond the model (MB)"): 205,
    ("20 of 24 blocks on disk, warm", "load (s)"): 1,
    ("20 of 24 blocks on disk, warm", "lines on stderr"): 1,
    ("calls", "hook, one device (us a call)"): 5,
    ("calls", "hook, a device for each block (us a call)"): 5,
    **{
        ("many modules", f"{name}, 10000 modules (s)"): 0.5
        for name in ("compute_module_sizes", "infer_auto_device_map", "dispatch_model")
    },
    (ACCELERATOR, "forward / copy"): 1.1,
}
FORWARDS = ("first forward (s)", "second forward (s)")
FORWARD_GOAL = 1.2


def run(interpreters, rounds, megabytes, measure, ours):
    """Return medians by what was done, figure and package."""
    seen = {}
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent.parent, suffix=".tmp") as scratch:
        told = ("--folder", scratch, "--megabytes", str(megabytes))

        def note(title, name, phase, *extra):
            for figure, value in measure(interpreters[name], "big_model", phase, *told, *extra).items():
                seen.setdefault(title, {}).setdefault(figure, {}).setdefault(name, []).append(value)

        measure(interpreters[ours], "big_model", "make", *told)
        for number in range(rounds):
            order = list(interpreters) if number % 2 == 0 else list(reversed(interpreters))
            note(LIMITS, ours, "limits")
            for title, phase, extra, both in PHASES:
                for name in order:
                    if name == ours:
                        note(title, name, phase, *extra)
                    elif both:
                        note(title, name, phase)
            note(ACCELERATOR, ours, "accelerator")
            if ACCELERATOR in seen:  # else there is none
                for name in order:
                    if name != ours:
                        note(ACCELERATOR, name, "accelerator")
    return {
        title: {
            figure: {name: statistics.median(values) for name, values in columns.items()}
            for figure, columns in figures.items()
        }
        for title, figures in seen.items()
    }


def table(results, packages, ours, number):
    """Return the Markdown tables: all figures against upstream, and forwards against reading the bytes."""
    peer = next(name for name in packages if name != ours)
    lines = [f"| what | figure | {ours} | {peer} | {ours} / {peer} | goal |", "|---|---|---:|---:|---:|---:|"]
    for title, _, _, _ in (*PHASES, (ACCELERATOR, "", (), True)):
        label = title
        for figure, row in results.get(title, {}).items():
            mine, theirs = row[ours], row.get(peer)
            ratio = f"{mine / theirs:.2f}" if theirs and theirs > 0 else ""
            goal = f"at most {GOALS[title, figure]}" if (title, figure) in GOALS else ""
            cells = (number(mine), "" if theirs is None else number(theirs), ratio, goal)
            lines.append(f"| {label} | {figure} | {' | '.join(cells)} |")
            label = ""
    limits = {figure: row[ours] for figure, row in results[LIMITS].items()}
    lines += [
        "",
        f"| forward, 20 of 24 blocks on disk | reading the bytes once (s) | {ours} (s) | {ours} / reading | {peer} (s) | {peer} / reading | goal |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for state in ("warm", "cold"):
        reading = limits[f"reading the bytes once, {state} (s)"]
        for figure in FORWARDS:
            row = results[f"20 of 24 blocks on disk, {state}"][figure]
            cells = [number(reading)]
            for name in (ours, peer):
                cells += [number(row[name]), f"{row[name] / reading:.2f}"]
            lines.append(f"| {figure.removesuffix(' (s)')}, {state} | {' | '.join(cells)} | at most {FORWARD_GOAL} |")
    plain = {figure: number(value) for figure, value in limits.items() if "not offloaded" in figure}
    ends = " ".join(f"The {figure.removesuffix(' (s)')}: {value} s." for figure, value in plain.items())
    return "\n".join([*lines, "", ends])


def plot(results, packages, ours, path):
    """Draw loads, forwards next to the reading of their bytes, and the growth with the number of modules."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peer = next(name for name in packages if name != ours)
    drawing, (loads, forwards, growth) = pyplot.subplots(1, 3, figsize=(14, 4))
    titles = [title for title, _, _, both in PHASES if both and "load (s)" in results[title]]
    columns = [[results[title]["load (s)"][name] for title in titles] for name in (ours, peer)]
    _bars(loads, [_short(title) for title in titles], columns, (ours, peer))
    loads.set(title="load", ylabel="seconds", yscale="log")
    kinds = [(state, figure) for state in ("warm", "cold") for figure in FORWARDS]
    values = [
        [results[f"20 of 24 blocks on disk, {state}"][figure][name] for state, figure in kinds]
        for name in (ours, peer)
    ]
    limits = [results[LIMITS][f"reading the bytes once, {state} (s)"][ours] for state, _ in kinds]
    labels = [f"{figure.removesuffix(' forward (s)')}, {state}" for state, figure in kinds]
    _bars(forwards, labels, [*values, limits], (ours, peer, "reading the bytes once"))
    forwards.set(title="forward, 20 of 24 blocks on disk", ylabel="seconds")
    for name, style in ((ours, "-o"), (peer, "--s")):
        for task in ("infer_auto_device_map", "dispatch_model"):
            spent = [results["many modules"][f"{task}, {modules} modules (s)"][name] for modules in MODULES]
            growth.plot(MODULES, spent, style, label=f"{task}, {name}", markersize=4)
    growth.set_xticks(MODULES, [f"{modules:,}" for modules in MODULES])
    growth.minorticks_off()
    growth.set(title="modules", xlabel="modules", ylabel="seconds")
    growth.legend(fontsize=7)
    drawing.tight_layout()
    path.parent.mkdir(exist_ok=True)
    drawing.savefig(path, dpi=120)
    return path


def _short(title):
    for words, fewer in (
        ("20 of 24 blocks on disk", "disk"),
        ("bfloat16 files, computed in float32", "disk, bfloat16"),
    ):
        title = title.replace(words, fewer)
    return title.removeprefix("to the ")


def _bars(axes, labels, columns, names):
    width = 0.8 / len(columns)
    for position, (name, column) in enumerate(zip(names, columns, strict=True)):
        axes.bar([place + position * width for place in range(len(labels))], column, width, label=name)
    places = [place + 0.4 - width / 2 for place in range(len(labels))]
    axes.set_xticks(places, [label.replace(", ", ",\n") for label in labels], fontsize=7)
    axes.legend(fontsize=7)
