"""Run the benchmarks: our package and upstream's wheels, interleaved, medians and ratios, a table and plots.

Usage: python benchmarks/run.py [CASE ...] [--rounds N] [--sizes MB ...] [--large]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import big_models
import checkpoints
import strategies
import trainer_checkpoint
from busy import cores_of_others

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PEERS = {"1.15.0": ROOT / ".venv-peer-1.15.0", "1.12.0": ROOT / ".venv-peer-1.12.0"}
OURS = "ours"
SIZES_MB = (10, 100, 500, 2000)
TITLES = {
    "step": "A training step",
    "loader": "Prepared loaders",
    "skip": "Skipping the beginning of an epoch",
    "dispatcher": "Dispatched batches, two processes",
    "collectives": "Collectives, two processes",
    "startup": "Import, help and launch",
}
SIZED = ("checkpoint", "double_prepare", "big_models")
# Next to plain torch, what the same step costs without it, or upstream's wheel without its environment.
ALONE = ("strategies", "watching", "additions", "megatron_core", "accumulation", "trainer_checkpoint")
# Cases that run in a separate environment, which a make target sets up.
ENVIRONMENTS = {"megatron_core": (ROOT / ".venv-megatron/bin/python", "make test-megatron")}
TORCHRUN = ("collectives", "dispatcher", "watching")
RUNS_ONE_PROCESS = "Upstream's `launch --cpu --num_processes 2` starts one process, so its figure is not comparable."
CHECKPOINTS = (
    "A float32 model and AdamW's two moments; medians of three saves per round. *Without fsync*: nothing waits for "
    "the disk. *And on the disk*: the benchmark syncs upstream's page cache. *New run*: into fresh objects. *Over a "
    "state*: the optimizer has stepped. Only ours writes and verifies checksums."
)
WATCHING = (
    "A step of four layers of 512 and AdamW under DDP, with and without `accelerator.throughput` or "
    "`ACCELERATE_CHECK_EVERY`; ratios of medians. Hang diagnosis runs in all."
)
ACCUMULATION = (
    "An accumulation step of 8 micro-batches, 4 layers of 1,024 (16 MiB of float32 parameters), SGD. *In the last*: "
    "`accumulate`. *sync_each_batch*: `GradientAccumulationPlugin(sync_each_batch=True)`."
)
ADDITIONS = (
    "A step of three layers of 512 and AdamW with each feature, compared with plain torch; ratios of medians. "
    "Packed rows: a Llama of width 256, documents of 12 to 740 tokens in rows of 1,024 on two ranks, compared with "
    "padding. Full weights: 64 MiB. Adapters: 16 of rank 16, compared with PEFT's `save_pretrained`, which does not "
    "sync to the disk."
)
MEGATRON = (
    "A Llama of 4 layers of 256 in float32 on 2 ranks (`tp_degree=2`), two micro-batches of 2 x 128 tokens, AdamW "
    "and clipping: through the Accelerator, and by Megatron core's classes."
)
BESIDE = {
    "watching": ("What monitoring costs, two processes", WATCHING),
    "additions": ("What features cost, two processes", ADDITIONS),
    "megatron_core": ("A step of Megatron core, two processes", MEGATRON),
}
NOTES = {"startup": RUNS_ONE_PROCESS}
# What stands first on the page, better and worse: what is said, the case, and where the figure is in its results.
SUMMARY = [
    ("a training step, beyond plain torch (us)", "step", ["step overhead (us)"]),
    ("an accumulation step of 4, beyond plain torch (us)", "step", ["accumulate overhead (us)"]),
    ("skipping 1,000,000 batches, in order (ms)", "skip", ["skip 1,000,000 batches, in order (ms)"]),
    ("a dispatched batch of 4 tensors, 2 processes (us)", "dispatcher", ["dispatched, dict of 4 (us)"]),
    ("gathering 2 tensors, 2 processes (us)", "collectives", ["gather of a dict of two (us)"]),
    ("`accelerate launch --help` (s)", "startup", ["accelerate launch --help (s)"]),
    ("import of the Accelerator, beyond torch (s)", "startup", ["import beyond torch (s)"]),
    ("`save_state` of 10 MB (s)", "checkpoint", ["10 MB, 1 process", "save_state (s)"]),
    (
        "`save_state` of 1,000 MB, on the disk (s)",
        "checkpoint",
        ["1000 MB, 1 process", "save_state, and on the disk (s)"],
    ),
    (
        "`load_state` of 1,000 MB, over a state (s)",
        "checkpoint",
        ["1000 MB, 1 process", "load_state, over a state (s)"],
    ),
    ("`load_state` of 1,000 MB, new run (s)", "checkpoint", ["1000 MB, 1 process", "load_state, new run (s)"]),
    (
        "`save_state` of 1,000 MB after four `prepare` calls, written (MB)",
        "double_prepare",
        ["1000 MB, prepared twice", "written (MB)"],
    ),
    ("load of 3 GB, 20 of 24 blocks on disk (s)", "big_models", ["20 of 24 blocks on disk, warm", "load (s)"]),
]
SUMMARY_NOTE = (
    "Ours compared with upstream 1.15.0. Ours hashes saved files and verifies loaded ones. Strategies cost as much "
    "as plain torch: [the table](#strategies-compared-with-plain-torch)."
)


def pythons(versions):
    """Return the interpreter of each package, its environment made if it is not there."""
    found = {OURS: sys.executable}
    for version in versions:
        folder = PEERS[version]
        python = folder / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            constraints = str(ROOT / "constraints.txt")
            pip = [str(python), "-m", "pip", "install", "--quiet", "-c", constraints]
            subprocess.run([*pip, "torch", "numpy"], check=True)
            subprocess.run([*pip, f"accelerate=={version}"], check=True)
        found[version] = str(python)
    return found


def measure(python, case, *arguments, processes=1, threads=1, path=""):
    """Run a case once, with folders that come first on its path, and return its figures."""
    command = [python]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(HERE / "cases" / f"{case}.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    # Wheels come with compiled modules; an editable install must be allowed to keep its own.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{' '.join(command)} printed no figures:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def interleaved(interpreters, rounds, case, *arguments, processes=1):
    """Run a case in every interpreter, round by round, and return medians by figure and package."""
    series = {}
    for number in range(rounds):
        order = list(interpreters.items())
        for name, python in order if number % 2 == 0 else reversed(order):
            for figure, value in measure(python, case, *arguments, processes=processes).items():
                series.setdefault(figure, {}).setdefault(name, []).append(value)
    return {
        figure: {name: statistics.median(values) for name, values in columns.items()}
        for figure, columns in series.items()
    }


def number(value):
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(figures, packages):
    """Return a Markdown table of medians, with the ratio of ours to the first peer."""
    if list(packages) == [OURS]:
        return "\n".join(
            ["| figure | |", "|---|---:|", *(f"| {name} | {row[OURS]:.3f} |" for name, row in figures.items())]
        )
    peer = next(name for name in packages if name != OURS)
    lines = [f"| figure | {' | '.join(packages)} | ours / {peer} |", "|---|" + "---:|" * (len(packages) + 1)]
    for figure, row in figures.items():
        ratio = f"{row[OURS] / row[peer]:.2f}" if row[peer] > 0 else ""
        lines.append(f"| {figure} | {' | '.join(number(row[name]) for name in packages)} | {ratio} |")
    return "\n".join(lines)


def feature_table(figures):
    """Return the Markdown table of the case `additions`: a line for each time and its ratio, then the other figures."""
    lines, rates = ["| feature | ms | ratio | compared with |", "|---|---:|---:|---|"], []
    for name, row in figures.items():
        if name.startswith("the same / "):
            baseline = name.removeprefix("the same / ").rpartition(" (")[0]
            lines[-1] += f" {row[OURS]:.3f} | {baseline} |"
        elif name.endswith("(ms)"):
            lines.append(f"| {name.removeprefix('step with ').removesuffix(' (ms)')} | {row[OURS]:.1f} |")
        else:
            rates.append(f"{name}: {row[OURS]:,.0f}")
    return "\n".join([*lines, "", "; ".join(rates).capitalize() + "."])


def double_prepare(interpreters, rounds, sizes):
    """Measure checkpoints of a model after one `prepare` call and after four, for each size."""
    results = {}
    with tempfile.TemporaryDirectory(dir=ROOT, suffix=".tmp") as scratch:
        for megabytes in sizes:
            for label, extra in (("once", ()), ("twice", ("--twice",))):
                repeats = rounds if megabytes <= 500 else 1
                results[f"{megabytes} MB, prepared {label}"] = interleaved(
                    interpreters,
                    repeats,
                    "double_prepare",
                    *("--megabytes", str(megabytes), "--folder", str(Path(scratch, "checkpoint")), *extra),
                    processes=2,
                )
    return results


def double_prepare_table(results, packages):
    """Return the Markdown table of the double-prepare case."""
    lines = [
        "| model | package | save (s) | save, on the disk (s) | load (s) | written (MB) "
        "| `state_dict` calls per rank, save / load | registered |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for model, figures in results.items():
        label = model.replace("prepared once", "1 `prepare` call").replace("prepared twice", "4 `prepare` calls")
        for name in packages:
            row = {figure: columns[name] for figure, columns in figures.items()}
            calls = f"{row['state_dict calls, save']:.0f} / {row['state_dict calls, load']:.0f}"
            lines.append(
                f"| {label} | {name} | {row['save (s)']:.2f} | {row['on the disk (s)']:.2f} | {row['load (s)']:.2f} "
                f"| {row['written (MB)']:.0f} "
                f"| {calls} | {row['models registered']:.0f} |"
            )
            label = ""
    return "\n".join(lines)


def plot(results, packages):
    """Draw save times by model size, prepared once and twice, and return the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in packages:
        for label, style in (("once", "-o"), ("twice", "--s")):
            points = [
                (int(model.split(" ")[0]), figures["save (s)"][name])
                for model, figures in results.items()
                if model.endswith(label)
            ]
            axes.plot(*zip(*points, strict=True), style, label=f"{name}, prepared {label}")
    axes.set(xscale="log", yscale="log", xlabel="model (MB)", ylabel="save_state (s)", title="Two processes, CPU")
    axes.legend(fontsize=8)
    figure.tight_layout()
    path = PAGE.parent / "img" / "double_prepare.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def bars(case, figures, packages):
    """Draw one case's figures as grouped bars relative to the first peer, and return the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peer = next(name for name in packages if name != OURS)
    rows = {figure: row for figure, row in figures.items() if row[peer] > 0}
    height = 0.8 / len(packages)
    drawing, axes = pyplot.subplots(figsize=(8, 0.55 * len(rows) + 1.2))
    for position, name in enumerate(packages):
        places = [index + position * height for index in range(len(rows))]
        axes.barh(places, [row[name] / row[peer] for row in rows.values()], height, label=name)
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(rows))], list(rows), fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set(xlabel=f"relative to {peer} (less is better)", title=TITLES[case])
    axes.legend(fontsize=8)
    drawing.tight_layout()
    path = PAGE.parent / "img" / f"{case}.png"
    path.parent.mkdir(exist_ok=True)
    drawing.savefig(path, dpi=120)
    return path


def summary():
    """Return the table that stands first on the page, from the results that are there."""
    rows = ["| figure | ours | upstream 1.15.0 | ours / upstream |", "|---|---:|---:|---:|"]
    for said, case, keys in SUMMARY:
        file = RESULTS / f"{case}.json"
        figure = json.loads(file.read_text())["figures"] if file.exists() else {}
        for key in keys:
            figure = figure.get(key, {})
        if {OURS, "1.15.0"} <= set(figure):
            ours, theirs = figure[OURS], figure["1.15.0"]
            rows.append(f"| {said} | {number(ours)} | {number(theirs)} | {ours / theirs:.2f} |")
    return "\n".join(rows)


def write_page():
    """Write the documentation page from the results that are there."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    parts = [
        "# Benchmarks",
        "Written by `make bench` (see `benchmarks/README.md`): medians over interleaved rounds, on CPU. Machine: "
        f"{machine}. Times vary between machines: compare within a table.",
        "## In short",
        SUMMARY_NOTE,
        summary(),
    ]
    for case, title in TITLES.items():
        file = RESULTS / f"{case}.json"
        if file.exists():
            data = json.loads(file.read_text())
            parts += [f"## {title}", data["table"], NOTES.get(case, ""), f"![{title}](img/{case}.png)"]
    file = RESULTS / "strategies.json"
    if file.exists():
        parts += [
            "## Strategies, compared with plain torch",
            strategies.NOTE,
            json.loads(file.read_text())["table"],
            "![time of a step and memory of a rank](img/strategies.png)",
        ]
    for case, (title, note) in BESIDE.items():
        file = RESULTS / f"{case}.json"
        if file.exists():
            data = json.loads(file.read_text())
            parts += [f"## {title}", note, data["table"]]
    file = RESULTS / "accumulation.json"
    if file.exists():
        data = json.loads(file.read_text())
        others = data["cores_of_others"]
        busy = (
            f"**Provisional.** Other programs used {others:.1f} cores before the first run: compare ratios, not times."
        )
        parts += [
            "## What accumulation saves, two processes",
            ACCUMULATION,
            busy if others else "",
            data["table"],
        ]
    file = RESULTS / "checkpoint.json"
    if file.exists():
        parts += [
            "## Saving and loading a run",
            CHECKPOINTS,
            json.loads(file.read_text())["table"],
            "![times of save_state and load_state](img/checkpoint.png)",
        ]
    file = RESULTS / "trainer_checkpoint.json"
    if file.exists():
        data = json.loads(file.read_text())
        parts += [
            "## Checkpoints of transformers' Trainer",
            trainer_checkpoint.NOTE,
            trainer_checkpoint.busy(data["cores_of_others"]),
            data["table"],
            "![stalls and wall times of a Trainer's saves](img/trainer_checkpoint.png)",
        ]
    file = RESULTS / "big_models.json"
    if file.exists():
        data = json.loads(file.read_text())
        parts += [
            "## Big models",
            big_models.NOTE.format(megabytes=f"{data['megabytes']:,}"),
            data["table"],
            "![loads, forwards and the growth with modules](img/big_models.png)",
        ]
    file = RESULTS / "double_prepare.json"
    if file.exists():
        parts += [
            "## Repeated `prepare` calls, and what a checkpoint costs then",
            "*4 calls*: the program passes the model to `prepare`, then its wrapper, its inner module and the result of "
            "`unwrap_model`. *On the disk*: the benchmark syncs upstream's page cache. The load follows the save: upstream's reads from the page cache, ours from the disk.",
            json.loads(file.read_text())["table"],
            "![save times](img/double_prepare.png)",
        ]
    PAGE.write_text("\n\n".join(part for part in parts if part) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {[*TITLES, *SIZED, *ALONE]}; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="MB", help="of double_prepare, checkpoint and big_models"
    )
    parser.add_argument("--large", action="store_true", help="trainer_checkpoint with 1.5 GB, too")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    arguments = parser.parse_args()
    cases = arguments.cases or [*TITLES, *SIZED, *ALONE]
    interpreters = pythons(arguments.peers if set(cases) - set(ALONE) else [])
    packages = list(interpreters)
    RESULTS.mkdir(exist_ok=True)
    for case in cases:
        extra = {}
        if case in (*BESIDE, "accumulation"):
            extra = {"cores_of_others": cores_of_others()} if case == "accumulation" else {}
            python, made_by = ENVIRONMENTS.get(case, (sys.executable, ""))
            if not Path(python).exists():
                print(f"{case} is omitted: {made_by} makes its environment", flush=True)
                continue
            figures = interleaved({OURS: str(python)}, arguments.rounds, case, processes=2)
            text = feature_table(figures) if case == "additions" else table(figures, [OURS])
        elif case == "strategies":
            figures = strategies.run(sys.executable, arguments.rounds, measure)
            text = strategies.table(figures, number)
            strategies.plot(figures, PAGE.parent / "img" / "strategies.png")
        elif case == "checkpoint":
            figures = checkpoints.run(
                interpreters, arguments.rounds, arguments.sizes or checkpoints.SIZES_MB, measure, OURS
            )
            text = checkpoints.table(figures, packages, OURS, number)
            checkpoints.plot(figures, packages, PAGE.parent / "img" / "checkpoint.png")
        elif case == "trainer_checkpoint":
            extra = {"cores_of_others": cores_of_others()}
            figures = trainer_checkpoint.run(arguments.rounds, measure, sys.executable, arguments.large)
            text = trainer_checkpoint.table(figures, number)
            trainer_checkpoint.plot(figures, PAGE.parent / "img" / "trainer_checkpoint.png")
        elif case == "big_models":
            megabytes = max(arguments.sizes or [big_models.MEGABYTES])
            two = {name: interpreters[name] for name in packages[:2]}  # the newest peer
            figures = big_models.run(two, arguments.rounds, megabytes, measure, OURS)
            text = big_models.table(figures, list(two), OURS, number)
            extra = {"megabytes": megabytes}
            big_models.plot(figures, list(two), OURS, PAGE.parent / "img" / "big_models.png")
        elif case == "double_prepare":
            figures = double_prepare(interpreters, arguments.rounds, arguments.sizes or SIZES_MB)
            text = double_prepare_table(figures, packages)
            plot(figures, packages)
        else:
            figures = interleaved(interpreters, arguments.rounds, case, processes=2 if case in TORCHRUN else 1)
            text = table(figures, packages)
            bars(case, figures, packages)
        print(f"\n{case}\n{text}", flush=True)
        (RESULTS / f"{case}.json").write_text(
            json.dumps({**extra, "figures": figures, "table": text}, indent=1) + "\n"
        )
    write_page()


if __name__ == "__main__":
    main()
