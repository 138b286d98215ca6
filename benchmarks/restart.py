"""Measure starts and restarts of a run of two processes, and write the table of the guide.

    python benchmarks/restart.py [--rounds N]

A *way* (`WAYS`) is a row: how the ranks are started, and what they read after a failure. Each round runs every way, in turn, so that a
slow minute of the machine hits all of them. The launcher runs this file again as the training program.
"""

import time

BEGAN = time.time()

import argparse  # noqa: E402 - the imports are a part of what is measured
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/guides/resilience.md", ROOT / "benchmarks/results/restart.json"
BEGIN, END = "<!-- written by benchmarks/restart.py -->", "<!-- end of it -->"
EVENTS = "RESTART_EVENTS"  # names the file into which ranks write when something happens
READS = "RESTART_READS"  # what a restarted rank reads: "disk", "memory" or nothing
# 50 million weights. A checkpoint on the disk after step SAVED, copies in memory every COPIED steps, a failure after step FAILS.
WIDTH, LAYERS, SAVED, COPIED, FAILS = 1000, 50, 10, 2, 19
PHASES = ("exit and new processes", "imports and set-up", "load", "steps again", "the next step")


@dataclass(frozen=True)
class Way:
    """How the ranks of a row are started.

    Attributes:
        options: Options of the launcher.
        variables: Variables of the ranks, by which `train` may choose what it reads after a failure.
    """

    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


WAYS = {"cold": Way(), "warm": Way(("--warm_start",))}
# Rows of the picture: a longer training, which reads its state after the failure.
CONTINUED = {
    "cold, from disk": Way((), ((READS, "disk"),)),
    "warm, from disk": Way(("--warm_start",), ((READS, "disk"),)),
    "warm, from memory": Way(("--warm_start",), ((READS, "memory"),)),
}


def train_on(reads: str) -> None:
    """Train until one step after that of the failure; in the first attempt, rank 1 fails."""
    import torch

    from accelerate import Accelerator
    from accelerate.extensions.peer_memory.options import PeerMemoryKwargs

    write_event("begin", BEGAN)
    handlers = [PeerMemoryKwargs(every=COPIED)] if reads == "memory" else []
    folder = Path(os.environ[EVENTS]).parent
    accelerator = Accelerator(project_dir=folder, kwargs_handlers=handlers)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    loader = torch.utils.data.DataLoader(torch.randn(1000, WIDTH), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    write_event("ready")
    step = 0
    if reads == "memory":
        resumed = accelerator.resume_from_memory()
        step = 0 if resumed is None else resumed.steps
    elif accelerator.load_state(folder / "checkpoint", missing_ok=True) is not None:
        step = SAVED
    write_event("loaded")
    is_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    for batch in loader:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        write_event(f"step{step}")
        if reads == "disk" and step == SAVED:
            accelerator.save_state(folder / "checkpoint")
        if step == FAILS and not is_restarted:
            for extension in accelerator.extensions.attached:
                getattr(extension, "wait", lambda: None)()  # for the copy in flight
            accelerator.wait_for_everyone()
            if accelerator.process_index == 1:
                write_event("exit")
                os._exit(1)
        if step > FAILS:
            break
    accelerator.wait_for_everyone()


def phases_of(way: Way) -> dict[str, float]:
    """Launch once; return the seconds from the failure to the first step after that of the failure, by phase."""
    lines = launch(way, 1)[1]

    def last(name: str) -> float:
        return max(float(at) for event, attempt, at in lines if (event, attempt) == (name, "1"))

    exited = next(float(at) for event, _, at in lines if event == "exit")
    ends = [last("begin"), last("ready"), last("loaded"), last(f"step{FAILS}"), last(f"step{FAILS + 1}")]
    return {phase: end - begin for phase, begin, end in zip(PHASES, [exited, *ends], ends, strict=False)}


def train() -> None:
    """Train one step in each attempt, and let rank 1 fail in the first attempt of a run that may restart."""
    import torch

    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(4, 8)).pow(2).mean())
    optimizer.step()
    write_event("step")
    accelerator.wait_for_everyone()
    may_restart = os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
    if may_restart and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and accelerator.process_index == 1:
        write_event("exit")
        os._exit(1)
    accelerator.wait_for_everyone()


def write_event(name: str, at: float | None = None) -> None:
    """Append what happens in this attempt, and when."""
    with open(os.environ[EVENTS], "a") as file:
        file.write(f"{name} {os.environ['TORCHELASTIC_RESTART_COUNT']} {at or time.time()}\n")


def launch(way: Way, restarts: int) -> tuple[float, list[list[str]]]:
    """Launch once; return the seconds of CPU of all processes, and the events: name, attempt, time."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder, "events")
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            "launch",
            "--cpu",
            "--num_processes",
            "2",
        ]
        command += ["--max_restarts", str(restarts), *way.options, __file__]
        variables = {**os.environ, **dict(way.variables), "OMP_NUM_THREADS": "1", EVENTS: str(events)}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        before = _cpu()
        subprocess.run(command, env=variables, check=True, capture_output=True)
        return _cpu() - before, [line.split() for line in events.read_text().splitlines()]


def measure(way: Way, restarts: int) -> dict[str, float]:
    """Launch once; return seconds of CPU of all processes, until the end, and of the clock, until the first step and after a failure."""
    began = time.time()
    cpu, lines = launch(way, restarts)
    figures = {"cpu": cpu}
    steps = {
        attempt: max(float(at) for name, of, at in lines if (name, of) == ("step", attempt)) for _, attempt, _ in lines
    }
    figures["first step"] = steps["0"] - began
    if restarts:
        figures["exit to step"] = steps["1"] - next(float(at) for name, _, at in lines if name == "exit")
    return figures


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by way and figure."""
    series: dict[str, dict[str, list[float]]] = {name: {} for name in WAYS}
    for number in range(rounds):
        for name in WAYS if number % 2 == 0 else reversed(WAYS):
            plain, restarted = measure(WAYS[name], 0), measure(WAYS[name], 1)
            seconds = {
                "start, CPU": plain["cpu"],
                "start to first step": plain["first step"],
                "restart, CPU": restarted["cpu"] - plain["cpu"],
                "exit to next step": restarted["exit to step"],
            }
            for figure, value in seconds.items():
                series[name].setdefault(figure, []).append(value)
            print(number, name, {figure: round(value, 2) for figure, value in seconds.items()}, flush=True)
    return series


def run_continued(rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each phase, by row of the picture."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CONTINUED}
    for number in range(rounds):
        for name in CONTINUED if number % 2 == 0 else reversed(CONTINUED):
            measured[name].append(phases_of(CONTINUED[name]))
            print(number, name, {phase: round(value, 2) for phase, value in measured[name][-1].items()}, flush=True)
    return {name: {p: statistics.median(row[p] for row in rows) for p in PHASES} for name, rows in measured.items()}


def table(medians: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table, a way a row."""
    figures = list(next(iter(medians.values())))
    lines = [f"| ranks | {' | '.join(f'{figure} (s)' for figure in figures)} |", "|---|" + "---:|" * len(figures)]
    lines += [
        f"| {name} | {' | '.join(f'{row[figure]:.2f}' for figure in figures)} |" for name, row in medians.items()
    ]
    return "\n".join(lines)


def write_page(medians: dict[str, dict[str, float]], rounds: int, others: float) -> None:
    """Write the table into the guide."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    busy = f", of which other programs used {others:.1f} before: compare CPU seconds" if others else ""
    note = f"Medians of {rounds} launches of a script with one step, two processes on {os.cpu_count()} cores{busy}."
    PAGE.write_text(f"{before}{BEGIN}\n{table(medians)}\n\n{note}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Measure, and write the results and the table."""
    if EVENTS in os.environ:
        reads = os.environ.get(READS)
        train_on(reads) if reads else train()
        return
    from busy import cores_of_others

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds, others = parser.parse_args().rounds, cores_of_others()
    series = run(rounds)
    medians = {
        name: {figure: statistics.median(values) for figure, values in row.items()} for name, row in series.items()
    }
    continued = run_continued(rounds)
    rows = [{"label": name, "phases": phases} for name, phases in continued.items()]
    results = {"medians": medians, "rounds": series, "cores_of_others": others, "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(medians))
    write_page(medians, rounds, others)


if __name__ == "__main__":
    main()
