"""All strategies of a number of processes in one launch: each check on all ranks, and a line of JSON about each on rank 0.

Arguments: the file to write, `--checks` with names of strategies (and of checks, for some alone), `--pairs` with names of strategies
whose checkpoints are exchanged. The exit status is 1 if anything is wrong.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

# In the place of this folder, from which the third party's module must not come: it is installed elsewhere.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate.state import PartialState
from distributed.conformance import pairs
from distributed.conformance.checks import CHECKS, turned_on
from distributed.conformance.strategies import STRATEGIES
from distributed.conformance.training import PATIENCE
from distributed.scripts.harness import CPU, everywhere


class Report:
    """What was found, written line by line, so that a launch that ends early has told what it knew."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.wrong = 0

    def check(self, strategy: str, check: str, work: Callable[[], list[str]]) -> None:
        """Do a check on all ranks, and write what they found."""
        started = time.perf_counter()
        try:
            mine = work()
        except Exception as error:  # told below, and the next check goes on
            mine = [f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"]
        told = everywhere(mine)
        found = [f"rank {rank}: {text}" for rank, texts in enumerate(told) for text in texts]
        self.wrong += bool(found)
        if PartialState().is_main_process:
            seconds = round(time.perf_counter() - started, 2)
            line = {"strategy": strategy, "check": check, "wrong": found, "seconds": seconds}
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{'FAILED' if found else 'ok'} {strategy} {check} ({seconds} s)", flush=True)
            for text in found:
                print(f"  {text}", flush=True)


def check_strategies(report: Report, names: list[str], wanted: list[str]) -> None:
    for name in names:
        strategy = STRATEGIES[name]
        for check, work in CHECKS.items():
            if check not in strategy.without and (not wanted or check in wanted):
                with turned_on(strategy):
                    report.check(name, check, lambda work=work, strategy=strategy: work(strategy))


def check_pairs(report: Report, names: list[str]) -> None:
    folder = os.path.join(os.path.dirname(report.path), "checkpoints")
    expected: dict[str, dict] = {}
    for source in names:
        report.check(
            source, "saves", lambda source=source: expected.update({source: pairs.save(source, folder)}) or []
        )
    for source in names:
        for goal in names:
            report.check(
                goal,
                f"loads {source}",
                lambda source=source, goal=goal: pairs.load(goal, source, folder, expected[source]),
            )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--checks", nargs="*", default=[], choices=[*STRATEGIES, *CHECKS])
    parser.add_argument("--pairs", nargs="*", default=[], choices=STRATEGIES)
    words = parser.parse_args()
    PartialState(cpu=CPU, timeout=PATIENCE)
    report = Report(words.path)
    names = [word for word in words.checks if word in STRATEGIES]
    check_strategies(report, names, [word for word in words.checks if word in CHECKS])
    check_pairs(report, words.pairs)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
