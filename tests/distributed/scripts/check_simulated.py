"""Trains under strategies of the conformance suite, and prints what the last rank did under each: started for real, and simulated.

Arguments: names of strategies.
"""

import json
import sys
from dataclasses import astuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate.extensions.reports.collectives import CollectiveRecorder
from accelerate.state import PartialState
from distributed.conformance.checks import turned_on
from distributed.conformance.model import Trace
from distributed.conformance.strategies import STRATEGIES, Strategy
from distributed.conformance.training import PATIENCE, Run
from distributed.scripts.harness import CPU

STEPS = 2


def done(strategy: Strategy) -> dict[str, object]:
    """Train for an epoch; return the collectives of each step, what the rank has of the parameters, and what it reads."""
    calls: list[object] = []
    with turned_on(strategy), CollectiveRecorder() as recorder:
        run = Run(strategy, STEPS)
        recorder.name(run.accelerator.torch_device_mesh)
        recorder.take()
        for _ in run.steps_of(Trace([], [], [], {})):
            calls.append([list(astuple(call)) for call in recorder.take()])
    plan = run.accelerator.data_plan(run.loader)
    shapes = [list(getattr(each, "_local_tensor", each).shape) for each in run.model.parameters()]
    return {"calls": calls, "shapes": shapes, "batches": plan.own.batches, "read": plan.own.samples}


def main(*names: str) -> None:
    state = PartialState(cpu=CPU, timeout=PATIENCE)
    for name in names:
        found = done(STRATEGIES[name])
        if state.process_index == state.num_processes - 1:
            print("FOUND", name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
