"""The benchmark of a Trainer's checkpoints: what is run, and how it is reported. Used by run.py."""

import shutil
import statistics
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Upstream's wheel, unpacked by `make`: the stock Trainer runs on it, with the libraries of this environment.
PEER = ROOT / ".cache" / "peer" / "1.15.0"
MEGABYTES, LARGE_MB = 300, 1500
WAYS = {"stock": "stock, accelerate 1.15.0", "ours": "ours", "async": "ours, async"}
STALL, DURABLE = "stall of the step after a save (s)", "the save is on the disk (s)"
NOTE = (
    "A Trainer saves each tenth step: a float32 model and AdamW; medians. *Stock*: unpatched transformers. *Ours*: "
    "`transformers_patch.apply(checkpoints=True)`; *async*: `checkpoints='async'`. The stall is the extra time of "
    "the step after a save. *Returns*: the Trainer's saving method. *On the disk*: the benchmark syncs stock's page "
    "cache; ours is complete when the folder has its name. *The program prepares first*: it passes the model to "
    "`prepare` before the Trainer does."
)


def busy(cores):
    """Return a warning for figures that were taken while other programs used this many cores."""
    if not cores:
        return ""
    return (
        f"**Provisional.** Other programs used {cores:.1f} cores before the first run, so the times of one row vary by "
        "more than the ways differ: a step alone, which is the same in all of them, shows how much."
    )


def run(rounds, measure, python, large=False):
    """Return medians by state, figure and way."""
    results = {}
    with tempfile.TemporaryDirectory(dir=ROOT, suffix=".tmp") as scratch:
        for megabytes in (MEGABYTES, LARGE_MB) if large else (MEGABYTES,):
            for processes in (1, 2):
                for prepared in ("once", "twice"):
                    key = f"{megabytes} MB, {processes} process{'es' * (processes > 1)}, prepared {prepared}"
                    extra = ["--twice"] if prepared == "twice" else []
                    series = {}
                    for number in range(rounds):
                        for way in list(WAYS) if number % 2 == 0 else reversed(WAYS):
                            told = [
                                "--way",
                                way,
                                "--megabytes",
                                str(megabytes),
                                "--folder",
                                f"{scratch}/{way}",
                                *extra,
                            ]
                            path = str(PEER) if way == "stock" else ""
                            found = measure(python, "trainer_checkpoint", *told, processes=processes, path=path)
                            shutil.rmtree(f"{scratch}/{way}", ignore_errors=True)
                            for figure, value in found.items():
                                series.setdefault(figure, {}).setdefault(way, []).append(value)
                    results[key] = {
                        figure: {way: statistics.median(values) for way, values in ways.items()}
                        for figure, ways in series.items()
                    }
                    print(key, results[key], flush=True)
    return results


def table(results, number):
    """Return a Markdown table: each figure by way, and ratios to the stock Trainer's."""
    lines = [
        f"| state | figure | {' | '.join(WAYS.values())} | ours / stock | async / stock |",
        "|---|---|" + "---:|" * 5,
    ]
    for state, figures in results.items():
        label = state.replace("prepared once", "the Trainer prepares").replace(
            "prepared twice", "the program prepares first"
        )
        for figure, row in figures.items():
            ratios = [f"{row[way] / row['stock']:.2f}" if row["stock"] > 0 else "" for way in ("ours", "async")]
            lines.append(
                f"| {label} | {figure} | {' | '.join(number(row[way]) for way in WAYS)} | {' | '.join(ratios)} |"
            )
            label = ""
    return "\n".join(lines)


def plot(results, path):
    """Draw stalls and saves of each state into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.8 / len(WAYS)
    drawing, panels = pyplot.subplots(1, 2, figsize=(11, 0.5 * len(results) + 1.5), sharey=True)
    for axes, figure in zip(panels, (STALL, DURABLE), strict=True):
        for position, (way, label) in enumerate(WAYS.items()):
            places = [index + position * height for index in range(len(results))]
            axes.barh(places, [figures[figure][way] for figures in results.values()], height, label=label)
        axes.set(xlabel="seconds", title=figure.removesuffix(" (s)"))
    panels[0].set_yticks([index + height for index in range(len(results))], list(results), fontsize=8)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=8)
    drawing.tight_layout()
    path.parent.mkdir(exist_ok=True)
    drawing.savefig(path, dpi=120)
