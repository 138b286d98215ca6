"""All strategies of a number of processes in one launch: each check on all ranks, and a line about each on rank 0.

Arguments: a folder for checkpoints, names of strategies (and of checks, for some alone), `--pairs`, and names of strategies whose
checkpoints are exchanged. The exit status is 1 if anything is wrong.
"""

import gc
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
from distributed.scripts.harness import ASKED, CPU, everywhere, say


def findings(what: str, work: Callable[[], list[str]]) -> list[str]:
    """Do a check on all ranks, print a line about it, and return what they found."""
    started = time.perf_counter()
    try:
        mine = work()
    except Exception as error:  # printed below, and the next check continues
        mine = [f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"]
    found = [f"{what}: rank {rank}: {text}" for rank, texts in enumerate(everywhere(mine)) for text in texts]
    say("\n".join([f"{'FAILED' if found else 'ok'} {what} ({time.perf_counter() - started:.2f} s)", *found]))
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
            found += findings(f"{goal} loads {source}", partial(pairs.load, goal, source, folder, expected[source]))
    return found


def main(folder: str, *words: str) -> bool:
    gc.freeze()  # collections are many, and pass over what imports have left
    PartialState(cpu=CPU, timeout=PATIENCE, **ASKED)
    chosen, exchanged = (words[: words.index("--pairs")], words[words.index("--pairs") + 1 :])
    found = []
    for strategy in (STRATEGIES[word] for word in chosen if word not in CHECKS):
        wanted = [check for check in chosen if check in CHECKS] or CHECKS
        for check in (check for check in wanted if check not in strategy.without):
            with turned_on(strategy):
                found += findings(f"{strategy.name} {check}", partial(CHECKS[check], strategy))
    found += check_pairs(exchanged, folder)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
