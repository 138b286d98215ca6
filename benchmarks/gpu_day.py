"""What one day on a GPU has to tell, in order of worth: tests, conformance on NCCL, precisions, and the benchmarks against 1.15.0.

Usage: python benchmarks/gpu_day.py [PART ...] [--minutes 40] [--logs FOLDER]

It needs one GPU, uses all that are there, and continues where a part fails or takes too long. It writes `docs/gpu.md` and
`benchmarks/results/gpu.json`, with the versions. `GPU_DAY_DEVICE=cpu` rehearses it without one, and leaves the page alone. Upstream's
wheel is what `make` unpacks to `.cache/peer/1.15.0`; both run in the environment of this interpreter.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE, RESULTS = ROOT / "docs" / "gpu.md", HERE / "results" / "gpu.json"
PATHS = {"ours": ROOT / "src", "1.15.0": ROOT / ".cache" / "peer" / "1.15.0"}
DEVICE = os.environ.get("GPU_DAY_DEVICE", "cuda")
REHEARSED = DEVICE == "cpu"
LIBRARIES = ("torch", "transformers", "torchao", "deepspeed", "bitsandbytes", "safetensors", "numpy")
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
Figures = dict[str, dict[str, float | str]]  # by what is measured, then by package


class Day:
    """Runs programs until the time is up, and keeps what they printed."""

    def __init__(self, minutes: float, logs: Path) -> None:
        self.ends, self.logs = time.monotonic() + 60 * minutes, logs
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: list[str], limit_s: float, package: str = "ours") -> str:
        """Run one program with all that it started, and return what it printed; a failure is a `RuntimeError`."""
        limit_s = min(limit_s, self.ends - time.monotonic())
        if limit_s < 5:
            raise RuntimeError("no time was left")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(PATHS[package]), str(ROOT / "tests"), os.environ.get("PYTHONPATH")])
            ),
            "BENCHMARK_DEVICE": DEVICE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        }
        log = self.logs / f"{name.replace(' ', '_')}.log"
        begun = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            started = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )
            try:
                code = started.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
                code = f"none within {limit_s:.0f} s"
        text = log.read_bytes()[begun:].decode(errors="replace")
        if code:
            errors = re.findall(r"^(?:\[rank\d+\]: )?(\w*(?:Error|Exception|Interrupt)\b.*)$", text, re.M)
            raise RuntimeError(f"exit status {code}: {' '.join((errors or [text])[-1].split())[-250:]}", text)
        return text

    def case(
        self, name: str, *arguments: str, package: str = "ours", processes: int = 1, limit_s: float = 120
    ) -> dict:
        """Run one of `cases/`, and return its figures."""
        program = [str(HERE / "cases" / f"{name}.py"), *arguments]
        if processes > 1:
            program = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *program]
        text = self.run(f"{name} {package}", [sys.executable, *program], limit_s, package)
        return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])

    def compared(self, name: str, *arguments: str, rounds: int = 3, **how: int) -> Figures:
        """Run a case under both packages in turns, and return medians; one that fails says so, and is omitted from then on."""
        series: dict[str, dict[str, list[float]]] = {}
        failed: dict[str, str] = {}
        for number in range(rounds):
            for package in list(PATHS) if number % 2 == 0 else reversed(PATHS):
                if package in failed:
                    continue
                try:
                    found = self.case(name, *arguments, package=package, **how)
                except RuntimeError as error:
                    failed[package] = error.args[0]
                    continue
                for figure, value in found.items():
                    series.setdefault(figure, {}).setdefault(package, []).append(value)
        figures: Figures = {
            figure: {package: statistics.median(values) for package, values in row.items()}
            for figure, row in series.items()
        }
        return figures | ({"failed": dict(failed)} if failed else {})


def gpus() -> int:
    """Return how many devices there are; two stand in for them in a rehearsal."""
    import torch

    return 2 if REHEARSED else torch.cuda.device_count()


def tests(day: Day) -> Figures:
    """Run the tests that are marked `gpu`."""
    where = ["tests/distributed/test_gpu.py", "tests/unit/offload/test_gpu.py"]
    try:
        text = day.run("tests", [sys.executable, "-m", "pytest", "-m", "gpu", "--tb=short", *where], 400)
    except RuntimeError as error:
        text = error.args[-1]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", text)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    if not counts:
        raise RuntimeError(text[-400:])
    return {what: {"ours": count} for what, count in counts.items()} | {one: {"ours": "failed"} for one in failed}


def conformance(day: Day) -> Figures:
    """Run each strategy against one process: on one rank, and on as many as there are devices for."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
    from distributed.conformance.strategies import STRATEGIES

    figures: Figures = {}
    for count in (1, 2, 4):
        chosen = [
            one.name
            for one in STRATEGIES.values()
            if count in one.processes and count <= gpus() and not one.needs and not one.environment
        ]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [*LAUNCH, *["--cpu"] * REHEARSED, "--num_processes", str(count)]
            command += [str(ROOT / "tests/distributed/conformance/run.py"), folder, *chosen, "--pairs"]
            try:
                text = day.run(f"conformance {count}", command, 300)
            except RuntimeError as error:
                text = error.args[-1]
        held, failed = re.findall(r"^ok (\S+) ", text, re.M), re.findall(r"^FAILED (\S+ \S+)", text, re.M)
        for name in chosen:
            wrong = [what.split()[1] for what in failed if what.split()[0] == name]
            said = f"{held.count(name)} checks held" + (f", not {', '.join(wrong)}" if wrong else "")
            figures[f"{name}, {count} rank{'s' * (count > 1)}"] = {"ours": said}
    return figures


def precisions(day: Day) -> Figures:
    """Train a transformer of 300 million parameters in each precision."""
    figures: Figures = {}
    for precision in ("no", "bf16", "fp16", "fp8"):
        found = day.compared("precision", "--precision", precision, rounds=1)
        figures |= {f"{precision}: {figure}": row for figure, row in found.items()}
    return figures


def checkpoints(day: Day) -> Figures:
    """Save and load a run whose state is on the device, and save it in the background."""
    megabytes, figures = "200" if REHEARSED else "1500", {}
    with tempfile.TemporaryDirectory(dir=ROOT, suffix=".tmp") as scratch:
        for package in PATHS:
            told = ("--megabytes", megabytes, "--folder", f"{scratch}/{package}", "--repeats", "3")
            for phase in ("save", "load"):
                for figure, value in day.case("checkpoint", phase, *told, package=package).items():
                    figures.setdefault(figure, {})[package] = value
        told = ("--megabytes", megabytes, "--folder", f"{scratch}/background")
        alone = day.case("checkpoint", "background", *told)
    return figures | {f"in the background: {figure}": {"ours": value} for figure, value in alone.items()}


def trainer(day: Day) -> Figures:
    """Let a Trainer save: as it is on upstream's wheel, and patched, at once and in the background."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory(dir=ROOT, suffix=".tmp") as scratch:
        for way, package in (("stock", "1.15.0"), ("ours", "ours"), ("async", "ours")):
            told = ("--way", way, "--megabytes", "60" if REHEARSED else "1500", "--folder", f"{scratch}/{way}")
            for figure, value in day.case("trainer_checkpoint", *told, package=package).items():
                name = f"async: {figure}" if way == "async" else figure
                figures.setdefault(name, {})[package] = value
    return figures


def offload(day: Day) -> Figures:
    """Compute with blocks that wait in host memory, next to the copy of their bytes."""
    with tempfile.TemporaryDirectory(dir=ROOT, suffix=".tmp") as scratch:
        told = ("--folder", scratch, "--megabytes", "240" if REHEARSED else "3072")
        day.case("big_model", "make", *told)
        return day.compared("big_model", "accelerator", *told, rounds=2)


def sharded(day: Day) -> Figures:
    """Train the transformer of `precisions` under FSDP2, with what is requested next to a step in turn. Ours alone."""
    sys.path.append(str(HERE / "cases"))
    from sharded import KINDS

    figures: Figures = {}
    for kind in KINDS:
        try:
            found = day.case("sharded", kind)
        except RuntimeError as error:
            found = {"failed": error.args[0]}
        figures |= {f"{kind}: {figure}": {"ours": value} for figure, value in found.items()}
    return figures


def estimates(day: Day) -> Figures:
    """Compare the memory that `accelerate plan` says with what the allocator counts."""
    models = ["--models", "llama", *["gpt2", "bert"] * (not REHEARSED)]
    layouts = ["--layouts", "one", *["fsdp2", "tp"] * (not REHEARSED)]
    text = day.run("estimates", [sys.executable, str(HERE / "estimates.py"), *models, *layouts, "--json"], 240)
    return said_and_measured(json.loads(text[text.index("[\n") :]))


def said_and_measured(rows: list[dict]) -> Figures:
    """Return the errors of rows of `estimates.py`."""
    figures, sizes = {}, []
    for row in rows:
        error = 100 * (row["predicted"] / row["measured"] - 1)
        sizes.append(abs(error))
        name = f"{row['model']}, {row['layout']}, {row['precision']}{', checkpointing' * row['checkpointing']}"
        figures[name] = {"ours": f"{row['measured'] / 2**20:,.0f}, {error:+.1f} %"}
    return {"median error (%)": {"ours": statistics.median(sizes)}, "worst error (%)": {"ours": max(sizes)}, **figures}


def device(day: Day) -> Figures:
    """Measure what the table of devices says: matrix products and memory."""
    return {figure: {"ours": value} for figure, value in day.case("ceilings").items()}


def several(day: Day) -> Figures:
    """Collectives, dispatched batches and double preparation, where there are two devices."""
    if gpus() < 2:
        raise RuntimeError("needs two devices")
    figures = {**day.compared("collectives", processes=2), **day.compared("dispatcher", processes=2)}
    with tempfile.TemporaryDirectory(dir=ROOT, suffix=".tmp") as scratch:
        told = ("--megabytes", "100" if REHEARSED else "1000", "--folder", f"{scratch}/state", "--twice")
        twice = day.compared("double_prepare", *told, rounds=1, processes=2)
    return figures | {f"4 prepare calls: {figure}": row for figure, row in twice.items()}


PARTS: dict[str, tuple[str, Callable[[Day], Figures]]] = {
    "tests": ("Tests marked `gpu`", tests),
    "conformance": ("Conformance: every strategy against one process", conformance),
    "precisions": ("Precisions", precisions),
    "sharded": ("What features cost: FSDP2 in bfloat16, one rank", sharded),
    "checkpoints": ("Checkpoints of a state on the device", checkpoints),
    "trainer": ("Checkpoints of transformers' Trainer", trainer),
    "step": ("A training step", lambda day: day.compared("step", rounds=1)),
    "loader": ("Prepared loaders", lambda day: day.compared("loader", rounds=1)),
    "offload": ("Blocks in host memory", offload),
    "estimates": ("Memory: predicted and measured", estimates),
    "device": ("The device itself", device),
    "several": ("Two processes", several),
}


def versions() -> dict[str, str]:
    """Return the versions of what was used."""
    import torch

    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    if not REHEARSED:
        found |= {
            "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
            "cuda": str(torch.version.cuda),
        }
    return found


def went_wrong(part: dict) -> bool:
    """Return whether a part did not run, a test or a check of it failed, or one of the packages."""
    rows = part.get("figures", {})
    said = [str(row.get("ours", "")) for row in rows.values()]
    return (
        "error" in part or not {"failed", "error", "errors"}.isdisjoint(rows) or any(", not " in one for one in said)
    )


def number(value: float | str) -> str:
    """Return a figure as a cell of a table."""
    return value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def grid(rows: dict[str, dict], separator: str, corner: str) -> str:
    """Return a table of figures whose names are a line and a column, with a separator between them."""
    cells: dict[str, dict[str, str]] = {}
    for name, row in rows.items():
        line, column = name.split(separator, 1)
        cells.setdefault(line, {})[column] = " / ".join(number(value) for value in row.values())
    columns = list(next(iter(cells.values())))
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {line} | {' | '.join(row.get(column, '') for column in columns)} |" for line, row in cells.items()]
    return "\n".join(lines)


def page(results: dict) -> Iterator[str]:
    """Yield the parts of the page."""
    yield "# Measured on GPUs"
    yield results.get("note", "")
    yield (
        "Written by `make gpu-day`: " + ", ".join(f"{name} {said}" for name, said in results["versions"].items()) + "."
    )
    for name, part in results["parts"].items():
        yield f"## {PARTS[name][0]}"
        if "error" in part:
            yield f"Not run: {part['error']}"
            continue
        rows = part["figures"]
        if name == "precisions":
            yield "Ours / upstream 1.15.0."
            yield grid(rows, ": ", "precision")
            continue
        if name == "sharded":
            yield grid(rows, ": ", "feature")
            continue
        if name == "estimates":
            errors = [number(rows[f"{which} error (%)"]["ours"]) for which in ("median", "worst")]
            yield f"Measured MiB, and the error of the prediction: {errors[0]} % in the median, {errors[1]} % at most."
            layouts = {figure.replace(", ", " ", 1): row for figure, row in rows.items() if ", " in figure}
            yield grid(layouts, ", ", "model and layout")
            continue
        if any("1.15.0" in row for row in rows.values()):
            lines = ["| figure | ours | 1.15.0 | ours / 1.15.0 |", "|---|---:|---:|---:|"]
            for figure, row in rows.items():
                mine, theirs = row.get("ours", ""), row.get("1.15.0", "")
                numbers = isinstance(mine, float | int) and isinstance(theirs, float | int) and theirs > 0
                ratio = f"{mine / theirs:.2f}" if numbers else ""
                lines.append(f"| {figure} | {number(mine)} | {number(theirs)} | {ratio} |")
        else:
            lines = [
                "| figure | |",
                "|---|---:|",
                *(f"| {figure} | {number(row['ours'])} |" for figure, row in rows.items()),
            ]
        yield "\n".join(lines)


def main() -> int:
    """Run the parts, and write after each what is known so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--minutes", type=float, default=40, help="for everything")
    parser.add_argument("--logs", type=Path, default=ROOT / ".cache" / "gpu-day")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    day = Day(arguments.minutes, arguments.logs)
    results: dict = {"versions": versions(), "parts": {}}
    for name in arguments.parts or PARTS:
        begun = time.monotonic()
        try:
            part = {"figures": PARTS[name][1](day)}
        except Exception as error:  # the next part may do better
            part = {"error": " ".join(str(error.args[0] if error.args else error).split())[-300:]}
        part["seconds"] = round(time.monotonic() - begun, 1)
        results["parts"][name] = part
        print(f"{name}: {part.get('error', 'done')} ({part['seconds']} s)", flush=True)
        if not REHEARSED:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            PAGE.write_text("\n\n".join(filter(None, page(results))) + "\n")
    text = "\n\n".join(filter(None, page(results)))
    print(text, flush=True)
    (arguments.logs / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(any(went_wrong(part) for name, part in results["parts"].items() if name != "several" or gpus() > 1))


if __name__ == "__main__":
    sys.exit(main())
