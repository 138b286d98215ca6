"""The benchmark of the strategies: what is run, and how it is reported. Used by run.py."""

import shutil
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path

# Which strategies on how many ranks; replicas of shards need four, and six heads are cut in two, not in four or one.
RANKS = {
    1: ("ddp", "fsdp1", "fsdp2"),
    2: ("ddp", "fsdp1", "fsdp2", "tp", "arrived-fsdp2", "arrived-tp", "ep", "zero2", "zero3"),
    4: ("ddp", "fsdp1", "fsdp2", "hsdp", "arrived-fsdp2-tp", "arrived-hsdp", "ep"),
}
# DeepSpeed has a separate environment, which `make test-deepspeed` makes.
DEEPSPEED = Path(__file__).parents[1] / ".venv-deepspeed/bin/python"
NAMES = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "hsdp": "HSDP (2 x 2)",
    "tp": "tensor parallelism",
    "arrived-fsdp2": "FSDP2, pre-sharded",
    "arrived-tp": "tensor parallelism, pre-sharded",
    "arrived-fsdp2-tp": "FSDP2 x tensor parallelism (2 x 2), pre-sharded",
    "arrived-hsdp": "HSDP (2 x 2), pre-sharded",
    "ep": "experts (2) x FSDP2",
    "zero2": "ZeRO 2",
    "zero3": "ZeRO 3",
}
NOTE = (
    "A small Llama in float32 (20 million parameters) and AdamW, through the Accelerator and with plain torch (for "
    "ZeRO: DeepSpeed's engine). *Pre-sharded*: sharded before `prepare`. *Experts*: a Qwen3-MoE of 30 million, "
    "compared with `from_pretrained(distributed_config=...)`. Steps alternate in one process; the ratio is the "
    "median of neighbouring ratios. Memory is the largest growth of a rank from before `prepare`. One thread per "
    "process. Ours writes checksums, syncs to the disk, and verifies."
)


def run(python, rounds, measure):
    """Return medians by strategy and ranks, figure and who."""
    results = {}
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent.parent, suffix=".tmp") as scratch:
        folder = Path(scratch, "state")
        for ranks, strategies in RANKS.items():
            for strategy in strategies:
                interpreter = str(DEEPSPEED) if strategy.startswith("zero") else python
                if not Path(interpreter).exists() or (strategy == "ep" and not find_spec("transformers")):
                    missing = "transformers in this environment" if strategy == "ep" else DEEPSPEED
                    print(f"{NAMES[strategy]} is omitted: there is no {missing}", flush=True)
                    continue
                series = {}
                for number in range(rounds):
                    # Few steps in each of many processes: where memory comes to lie differs from process to process.
                    told = ("--strategy", strategy, "--count", "10")
                    _note(series, "both", measure(interpreter, "strategies", "steps", *told, processes=ranks))
                    for who in ("ours", "plain") if number % 2 == 0 else ("plain", "ours"):
                        told = ("--strategy", strategy, "--count", "3", "--folder", str(folder))
                        _note(series, who, measure(interpreter, "strategies", who, *told, processes=ranks))
                        shutil.rmtree(folder, ignore_errors=True)
                key = f"{NAMES[strategy]}, {ranks} rank{'s' * (ranks > 1)}"
                results[key] = {
                    who: {name: statistics.median(values) for name, values in figures.items()}
                    for who, figures in series.items()
                }
                print(key, results[key], flush=True)
    return results


def _note(series, who, figures):
    for name, value in figures.items():
        series.setdefault(who, {}).setdefault(name, []).append(value)


def table(results, number):
    """Return the Markdown tables: steps, and the rest with ours first."""
    lines = ["| strategy | step, ours (ms) | step, plain torch (ms) | ratio |", "|---|---:|---:|---:|"]
    for key, row in results.items():
        both = row["both"]
        lines.append(
            f"| {key} | {number(both['step, ours (ms)'])} | {number(both['step, plain torch (ms)'])} | {both['step, ratio']:.3f} |"
        )
    if any("tokens per second, ours" in row["both"] for row in results.values()):
        lines += ["", "| strategy | tokens per second, ours | plain torch |", "|---|---:|---:|"]
        for key, row in results.items():
            ours, plain = (row["both"][f"tokens per second, {who}"] for who in ("ours", "plain torch"))
            lines.append(f"| {key} | {number(ours)} | {number(plain)} |")
    figures = list(next(iter(results.values()))["ours"])
    lines += ["", f"| strategy | {' | '.join(figures)} |", "|---|" + "---:|" * len(figures)]
    for key, row in results.items():
        cells = [f"{number(row['ours'][name])} / {number(row['plain'][name])}" for name in figures]
        lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "The second table: ours / plain torch."])


def plot(results, path):
    """Draw the time of a step and the memory of a rank, ours next to plain torch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    memory = next(name for name in next(iter(results.values()))["ours"] if name.startswith("peak memory"))
    drawing, sides = pyplot.subplots(1, 2, figsize=(11, 0.42 * len(results) + 1.4), sharey=True)
    places = range(len(results))
    columns = (
        (
            "ms a step",
            [[row["both"][f"step, {who} (ms)"] for row in results.values()] for who in ("ours", "plain torch")],
        ),
        (memory, [[row[who][memory] for row in results.values()] for who in ("ours", "plain")]),
    )
    for axes, (label, values) in zip(sides, columns, strict=True):
        for shift, name, side in zip((-0.2, 0.2), ("ours", "plain torch"), values, strict=True):
            axes.barh([place + shift for place in places], side, 0.4, label=name)
        axes.set(xlabel=label)
    sides[0].set_yticks(list(places), list(results), fontsize=8)
    sides[0].invert_yaxis()
    sides[0].legend(fontsize=8)
    drawing.tight_layout()
    path.parent.mkdir(exist_ok=True)
    drawing.savefig(path, dpi=120)
    return path
