"""Run the examples on two CPU processes, with and without the mistake, and compare the results with the expected ones.

    make demo            (or: python examples/demo.py)

Exit status 0 when every line of the closing table is as expected.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
WORK = HERE.parent / ".demo"
ACCURACY = 0.97


@dataclasses.dataclass
class Check:
    """One line of the closing table."""

    what: str
    expected: str
    seen: str
    good: bool


def launcher() -> list[str]:
    """Return the command that starts `accelerate` of the interpreter this runs in."""
    script = shutil.which("accelerate", path=os.path.dirname(sys.executable))
    return [script] if script else [sys.executable, "-m", "accelerate.commands.accelerate_cli"]


def run(title: str, processes: int, script: str, *arguments: str) -> tuple[str, int]:
    """Run one example under `accelerate launch`, show its output, and return that output and the exit status."""
    shown = ["accelerate", "launch", "--cpu", "--num_processes", str(processes), f"examples/{script}", *arguments]
    print(f"\n== {title}\n$ {' '.join(shown)}", flush=True)
    command = [*launcher(), *shown[1:5], str(HERE / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=WORK,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            errors="replace",
        )
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, status = str(late), 124
    print(output.rstrip())
    print(f"-- exit status {status}, {time.perf_counter() - started:.1f} s", flush=True)
    return output, status


def value(output: str, name: str) -> str:
    """Return what the example printed after `name:`, or a dash."""
    found = re.search(rf"^{re.escape(name)}\s*: (.+?)(?: \(one number a rank\))?$", output, re.M)
    return found[1] if found else "-"


def training() -> list[Check]:
    """Train on the digits, once straight through, once with the mistake, once interrupted and resumed."""
    checks = []
    folder = WORK / "digits"
    asked = ("--require-accuracy", str(ACCURACY))
    for title, extra in (
        ("handwritten digits, two processes", ()),
        ("handwritten digits, prepared twice", ("--double-prepare",)),
        (
            "handwritten digits, bf16, accumulation 2",
            ("--mixed_precision", "bf16", "--gradient_accumulation_steps", "2"),
        ),
    ):
        output, status = run(title, 2, "digits.py", *asked, *extra)
        seen = value(output, "accuracy on held-out digits")
        good = status == 0 and value(output, "processes") == "2"
        checks.append(Check(f"{title}: accuracy", f"at least {ACCURACY}", f"{seen} (exit {status})", good))

    _, stopped = run(
        "handwritten digits, interrupted", 2, "digits.py", "--checkpoint_dir", str(folder), "--stop_after", "60"
    )
    output, status = run(
        "handwritten digits, resumed", 2, "digits.py", "--checkpoint_dir", str(folder), "--resume", *asked
    )
    seen = value(output, "accuracy on held-out digits")
    good = stopped == 0 and status == 0 and "resumed from" in output
    checks.append(
        Check("stopped after 60 updates, resumed: accuracy", f"at least {ACCURACY}", f"{seen} (exit {status})", good)
    )
    return checks


def double_prepare() -> list[Check]:
    """Prepare once and four times: the registry and the cost of a checkpoint must not differ."""
    checks = []
    for title, arguments, warnings in (
        ("prepared once", (), "0"),
        ("prepared four times", ("--double-prepare",), "3"),
    ):
        output, status = run(f"a model {title}", 2, "prepare_twice.py", *arguments)
        for name, expected in (
            ("models in the registry", "1"),
            ("distinct wrappers", "1"),
            ("key prefix", "module."),
            ("state_dict calls, save_state", "[1, 1]"),
            ("state_dict calls, load_state", "[1, 1]"),
            ("warnings", warnings),
        ):
            seen = value(output, name)
            checks.append(Check(f"{title}: {name}", expected, seen, status == 0 and seen == expected))
    return checks


def state_reset() -> list[Check]:
    """Create `TrainingArguments` next to a live accelerator, on one process and on two."""
    if importlib.util.find_spec("transformers") is None:
        print("\n== state reset: omitted, because transformers is not installed here: pip install transformers")
        return []
    checks = []
    for processes, kind in ((1, "NO"), (2, "MULTI_CPU")):
        output, status = run(f"TrainingArguments, {processes} process(es)", processes, "state_reset.py")
        line = f"True DistributedType.{kind}"
        # Workers write unbuffered, word by word, so the words of two processes may stand in each other's lines.
        seen = min(output.count(word) for word in line.split())
        ranks = value(output, f"gathered from {processes} process(es)")
        checks.append(
            Check(
                f"TrainingArguments, {processes} process(es): '{line}'",
                f"{2 * processes} times, gathers {list(range(processes))}",
                f"{seen} times, gathers {ranks}",
                status == 0 and seen == 2 * processes and ranks == str(list(range(processes))),
            )
        )
    return checks


def share_state() -> list[Check]:
    """Train with a Trainer next to an Accelerator, with transformers patched and as it is."""
    if importlib.util.find_spec("transformers") is None:
        return []
    checks = []
    name = "the Trainer shares the Accelerator's state"
    for title, arguments, expected in (("patched", (), "True"), ("as it is", ("--without-patch",), "False")):
        output, status = run(f"transformers {title}", 2, "share_state.py", *arguments)
        seen = value(output, name)
        good = status == 0 and seen == expected and value(output, "the same on all of them") == "True"
        checks.append(Check(f"transformers {title}: {name}", expected, f"{seen} (exit {status})", good))
    return checks


def killed_in_save() -> list[Check]:
    """Kill a Trainer in a save and start it again, with transformers as it is and patched."""
    if importlib.util.find_spec("transformers") is None:
        return []
    output, status = run("a Trainer killed in a save", 1, "trainer_killed.py")
    stock, patched = value(output, "transformers as it is"), value(output, "transformers patched")
    good = (
        status == 0
        and stock.startswith("does not continue")
        and patched.startswith("continues after step 2, the same losses")
    )
    return [
        Check(
            "a Trainer killed in a save, started again",
            "as it is: does not continue; patched: continues, the same losses",
            f"as it is: {stock}; patched: {patched}",
            good,
        )
    ]


def table(checks: list[Check]) -> str:
    """Lay the checks out in columns."""
    rows = [("what", "expected", "seen", "")] + [
        (c.what, c.expected, c.seen, "ok" if c.good else "DIFFERS") for c in checks
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * (sum(widths) + 6), *lines[1:]])


def main() -> int:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    checks = double_prepare() + state_reset() + share_state() + killed_in_save() + training()
    print(f"\n{table(checks)}\n")
    wrong = [c for c in checks if not c.good]
    print(f"{len(checks) - len(wrong)} of {len(checks)} as expected")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
