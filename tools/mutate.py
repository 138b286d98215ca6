"""Mutation sample: how many random faults in the source the unit tests notice.

    python tools/mutate.py --count 200 --seed 1 "data/*.py=tests/unit/data" "training/gradients.py=tests/unit/training"

Each mutant is one changed operator, constant or condition in a copy of `src/`, tried with the tests given behind the pattern.
"""

import argparse
import ast
import copy
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMPARED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
COMPARED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
CALCULATED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}


def mutations(tree: ast.Module) -> Iterator[Callable[[], None]]:
    """Yield functions that each put one fault into a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield lambda node=node: node.ops.__setitem__(0, COMPARED[type(node.ops[0])]())
        elif isinstance(node, ast.BinOp) and type(node.op) in CALCULATED:
            yield lambda node=node: setattr(node, "op", CALCULATED[type(node.op)]())
        elif isinstance(node, ast.BoolOp):
            yield lambda node=node: setattr(node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield lambda node=node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            changed = not node.value if isinstance(node.value, bool) else node.value + 1
            yield lambda node=node, changed=changed: setattr(node, "value", changed)


def killed(path: pathlib.Path, tests: list[str], generator: random.Random, limit: float) -> bool | None:
    """Put a random fault into a copy of one file, and return whether the tests fail; None where the file has no place for one."""
    tree = ast.parse(path.read_text("utf-8"))
    places = len(list(mutations(tree)))
    if not places:
        return None
    chosen = generator.randrange(places)
    mutant = copy.deepcopy(tree)
    list(mutations(mutant))[chosen]()
    # What is named after the file fails first, and ends the run.
    own = [f"{folder}/test_{path.stem}.py" for folder in tests]
    tests = [*(name for name in own if (ROOT / name).exists()), *tests]
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(ROOT / "src", name, dirs_exist_ok=True)
        (pathlib.Path(name) / path.relative_to(ROOT / "src")).write_text(ast.unparse(mutant), "utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not gpu",
            *tests,
        ]
        try:
            settings = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"}
            noticed = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            print(f"ran too long: {path.relative_to(ROOT)}", flush=True)
            return True
    if not noticed.returncode:
        before, after = ast.unparse(tree).splitlines(), ast.unparse(mutant).splitlines()
        line = next(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
        print(f"survived: {path.relative_to(ROOT)}: {line[0].strip()}  ->  {line[1].strip()}", flush=True)
    return noticed.returncode != 0


def main() -> None:
    """Print the mutants that survive, and the share that is killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "rooms", nargs="+", metavar="PATTERN=TESTS", help="files below src/accelerate, and their tests"
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a run counts as killed")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    rooms = [room.split("=") for room in options.rooms]
    files = [
        (path, tests.split(",")) for glob, tests in rooms for path in sorted((ROOT / "src/accelerate").glob(glob))
    ]
    weights = [path.stat().st_size for path, _ in files]
    results = [
        killed(*generator.choices(files, weights)[0], generator=generator, limit=options.limit)
        for _ in range(options.count)
    ]
    tried = [result for result in results if result is not None]
    print(f"{sum(tried)} of {len(tried)} killed ({sum(tried) / max(len(tried), 1):.0%})")


if __name__ == "__main__":
    main()
