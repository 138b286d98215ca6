"""All strategies of a number of processes in one launch: each check on all ranks, and a line about each on rank 0.

Arguments: a folder for checkpoints, `--checks` with names of strategies (and of checks, for some alone), `--pairs` with names of
strategies whose checkpoints are exchanged. The exit status is 1 if anything is wrong.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
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


def findings(what: str, work: Callable[[], list[str]]) -> list[str]:
    """Do a check on all ranks, print a line about it, and return what they found."""
    started = time.perf_counter()
    try:
        mine = work()
    except Exception as error:  # printed below, and the next check goes on
        mine = [f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"]
    found = [f"{what}: rank {rank}: {text}" for rank, texts in enumerate(everywhere(mine)) for text in texts]
    if PartialState().is_main_process:
        print(f"{'FAILED' if found else 'ok'} {what} ({time.perf_counter() - started:.2f} s)", flush=True)
    return found


def check_strategies(names: list[str], wanted: list[str]) -> list[str]:
    found = []
    for strategy in map(STRATEGIES.get, names):
        for check, work in CHECKS.items():
            if check not in strategy.without and (not wanted or check in wanted):
                with turned_on(strategy):
                    found += findings(f"{strategy.name} {check}", partial(work, strategy))
    return found


def check_pairs(names: list[str], folder: str) -> list[str]:
    expected: dict[str, dict] = {}

    def save(source: str) -> list[str]:
        expected[source] = pairs.save(source, folder)
        return []

    found = []
    for source in names:
        found += findings(f"{source} saves", partial(save, source))
    for source in names:
        for goal in names:
            found += findings(f"{goal} loads {source}", lambda s=source, g=goal: pairs.load(g, s, folder, expected[s]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--checks", nargs="*", default=[], choices=[*STRATEGIES, *CHECKS])
    parser.add_argument("--pairs", nargs="*", default=[], choices=STRATEGIES)
    words = parser.parse_args()
    PartialState(cpu=CPU, timeout=PATIENCE)
    names = [word for word in words.checks if word in STRATEGIES]
    found = check_strategies(names, [word for word in words.checks if word in CHECKS])
    found += check_pairs(words.pairs, words.folder)
    if PartialState().is_main_process:
        print("\n".join(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
