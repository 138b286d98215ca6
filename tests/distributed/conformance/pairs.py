"""Checkpoints across strategies: saved under one, loaded under another, and one more step of both."""

import os

from distributed.conformance import model as zoo
from distributed.conformance.checks import turned_on
from distributed.conformance.strategies import STRATEGIES
from distributed.conformance.training import Run, tensors_apart

SAVED_AFTER = 2


def save(name: str, folder: str) -> dict:
    """Train under a strategy, save, and return the weights one step later."""
    strategy = STRATEGIES[name]
    with turned_on(strategy):
        run = Run(strategy, SAVED_AFTER + 1, groups=False)
        whole = list(zoo.windows(SAVED_AFTER + 1))
        for parts in whole[:-1]:
            run.step_on(parts)
        run.accelerator.save_state(os.path.join(folder, name))
        run.step_on(whole[-1])
        return run.weights()


def load(name: str, source: str, folder: str, expected: dict) -> list[str]:
    """Load what another strategy saved into a model with other weights, do one step, and compare."""
    strategy = STRATEGIES[name]
    with turned_on(strategy):
        run = Run(strategy, SAVED_AFTER + 1, seed=99, groups=False)
        run.accelerator.load_state(os.path.join(folder, source))
        run.step_on(list(zoo.windows(SAVED_AFTER + 1))[-1])
        weights = run.weights()
        return tensors_apart(weights, expected, strategy.tolerance) if run.accelerator.is_main_process else []
