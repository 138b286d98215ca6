"""How large the package is, and how far one walks through it.

    python tools/size.py            files, lines and lines of code of each folder, how they hang together, then the walks
    python tools/size.py --table    without the walks

A closure is what importing one module loads. Imports in functions and for annotations are not in it; two folders import each other
if any import does.

A walk is what one rank of two runs of `src/accelerate` for one operation, seen with `sys.setprofile`: calls, functions, files.
Each walk but the launcher's is taken the second time the operation runs, so that imports and caches do not count.
"""

import argparse
import collections
import contextlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from architecture import source  # noqa: E402

PACKAGE = source.SRC / "accelerate"
STRATEGIES: dict[str, list[str]] = {"DDP": [], "FSDP2": ["--use_fsdp", "--fsdp_version", "2"]}


class Walk:
    """Counts the calls of functions of the package, in this thread, between `start` and `stop`."""

    def __init__(self) -> None:
        self.calls: collections.Counter[Any] = collections.Counter()

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        # What runs when a module or a class is made is no call.
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and is_function and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.calls[frame.f_code] += 1

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def figures(self) -> list[int]:
        """Return calls, functions and files."""
        return [sum(self.calls.values()), len(self.calls), len({code.co_filename for code in self.calls})]


def taken(action: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Run something, and return its result and its walk."""
    walk = Walk()
    with walk.taken():
        result = action()
    return result, walk.figures()


def walks() -> dict[str, list[int]]:
    """Return the walks of a training under the strategy that this process was started with. Collective: call on every rank."""
    import torch

    from accelerate import Accelerator

    def built() -> tuple[Any, ...]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        return model, torch.optim.AdamW(model.parameters())

    def training(accelerator: Accelerator) -> tuple[Any, ...]:
        model, optimizer = built()
        loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=2)
        _, figures["prepare, a model alone"] = taken(lambda: accelerator.prepare(model))
        accelerator.free_memory()
        model, optimizer = built()
        (model, optimizer, loader), figures["prepare"] = taken(lambda: accelerator.prepare(model, optimizer, loader))
        return model, optimizer, loader

    figures: dict[str, list[int]] = {}
    accelerator = Accelerator(cpu=True)
    training(accelerator)
    accelerator.free_memory()
    model, optimizer, loader = training(accelerator)
    for _ in range(2):
        batches = iter(loader)
        batch, figures["first batch"] = taken(lambda batches=batches: next(batches))
        batch, figures["later batch"] = taken(lambda batches=batches: next(batches))
        loss = model(batch).square().mean()
        _, figures["backward"] = taken(lambda loss=loss: accelerator.backward(loss))
        _, figures["step"] = taken(optimizer.step)
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as name:
        folder = [name]
        torch.distributed.broadcast_object_list(folder)
        for number in range(2):
            place = f"{folder[0]}/{number}"
            _, figures["save_state"] = taken(lambda place=place: accelerator.save_state(place))
            _, figures["load_state"] = taken(lambda place=place: accelerator.load_state(place))
        accelerator.wait_for_everyone()
    return figures if accelerator.is_main_process else {}


def launching() -> list[int]:
    """Return the walk of a launcher that starts two processes."""
    from accelerate.commands import accelerate_cli

    with tempfile.TemporaryDirectory() as name:
        script = pathlib.Path(name) / "empty.py"
        script.write_text("", "utf-8")
        sys.argv = ["accelerate", "launch", "--cpu", "--num_processes", "2", str(script)]
        return taken(accelerate_cli.main)[1]


def started(*command: str) -> Any:
    """Run this file again in a separate process, and return what it prints last."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=settings, capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    if done.returncode or not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(lines[-1])


def table(rows: list[tuple[Any, ...]]) -> str:
    """Lay rows out in columns, the first one to the left."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        f"{row[0]!s:<{widths[0]}}" + "".join(f"  {cell!s:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def sizes(package: pathlib.Path) -> list[tuple[Any, ...]]:
    """Return a row a folder: files, lines, lines of code; the largest first."""
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in source.files(package.name):
        inside = path.relative_to(package).parts
        for key in ("all", inside[0] if len(inside) > 1 else "(top)"):
            text = path.read_text("utf-8")
            rows[key].update(files=1, lines=text.count("\n"), code=len(source.code_lines(path)))
    ordered = sorted(rows.items(), key=lambda item: -item[1]["code"])
    return [
        (package.name, "files", "lines", "code"),
        *((key, row["files"], row["lines"], row["code"]) for key, row in ordered),
    ]


def closure(module: str) -> set[str]:
    """Return the modules of the package that importing one loads, itself included."""
    waiting, loaded = [module], set()
    while waiting:
        name = waiting.pop()
        if name not in loaded:
            loaded.add(name)
            waiting += [found.target for found in source.imports(name) if not found.lazy]
    return loaded


def folder_of(module: str) -> str | None:
    """Return the folder of a module, None at the top of the package."""
    parts = module.split(".")
    is_folder = len(parts) > 1 and source.modules()[".".join(parts[:2])].name == "__init__.py"
    return parts[1] if is_folder else None


def mutual_folders() -> list[str]:
    """Return the pairs of folders that import each other."""
    pairs = {
        (folder_of(found.source), folder_of(found.target))
        for name in source.modules()
        for found in source.imports(name)
    }
    both = {pair for pair in pairs if None not in pair and pair[0] < pair[1] and pair[::-1] in pairs}
    return sorted("/".join(pair) for pair in both)


def structure() -> list[tuple[Any, ...]]:
    """Return a row a closure: how many files and lines of code importing a module loads."""
    rows: list[tuple[Any, ...]] = [("importing loads", "files", "code")]
    for name in ("strategies.ddp", "optimizer", "training.prepare", "accelerator"):
        loaded = closure(f"accelerate.{name}")
        rows.append((name, len(loaded), sum(len(source.code_lines(source.modules()[one])) for one in loaded)))
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="without the walks")
    parser.add_argument("--take", choices=["launch", "training"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        found = launching() if options.take == "launch" else walks()
        print(json.dumps(found) if found else "", flush=True)
        return
    for package in ("accelerate", "transformers_patch"):
        print(table(sizes(source.SRC / package)), end="\n\n")
    print(table(structure()))
    print(f"folders that import each other: {', '.join(mutual_folders())}", end="\n\n")
    if options.table:
        return
    rows: list[tuple[Any, ...]] = [("walk of one rank of two", "calls", "functions", "files")]
    rows.append(("launch of two processes", *started(__file__, "--take", "launch")))
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"]
    for strategy, flags in STRATEGIES.items():
        for walk, figures in started(*launch, *flags, __file__, "--take", "training").items():
            rows.append((f"{walk}, {strategy}", *figures))
    print(table(rows))


if __name__ == "__main__":
    main()
