"""PartialState, AcceleratorState, GradientState and their shared dictionaries."""

import threading

import torch

from accelerate.state import AcceleratorState, GradientState, PartialState, ThreadLocalSharedDict
from interop.differential.core import BOTH, attempt, describe, probe

STEPS = [
    "sync_gradients", "num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch", "initialized",
    "end_of_dataloader", "remainder",
]  # fmt: skip
STEPS += ["dataloader_references", "active_dataloader", "in_dataloader", "plugin_kwargs", "is_xla_gradients_synced"]


def each(item, names):
    for name in names:
        yield name, attempt(getattr, item, name)


@probe("state:PartialState", text=["repr", "str"], which=["PartialState", "AcceleratorState"], processes=BOTH)
def spelled(text, which):
    state = PartialState(cpu=True) if which == "PartialState" else AcceleratorState(cpu=True)
    return {"repr": repr, "str": str}[text](state)


@probe("state:GradientState", processes=BOTH)
def gradient():
    yield from each(GradientState(), STEPS)
    yield "repr", repr(GradientState())


@probe("state:ThreadLocalSharedDict", thread_local=[True, False, None])
def thread_local(thread_local):
    class Holder:
        shared = ThreadLocalSharedDict(thread_local=thread_local)

    yield "start", Holder().shared
    Holder().shared["a"] = 1
    yield "set", Holder().shared
    item = Holder()
    item.shared = {"b": 2}
    yield "assigned", (Holder().shared, item.shared)
    found = []
    worker = threading.Thread(target=lambda: (found.append(dict(Holder().shared)), Holder().shared.update(c=3)))
    worker.start()
    worker.join()
    yield "thread", found
    yield "after", Holder().shared
    yield "on the class", describe(type(Holder.__dict__["shared"]).__name__)


@probe("state:PartialState", processes=BOTH)
def destroy():
    """Leaving a separate group, not the world's."""
    state = PartialState(cpu=True)
    group = torch.distributed.new_group([0, 1]) if state.num_processes > 1 else None
    if group is not None:
        torch.distributed.barrier(group)  # all have joined it
        yield "own", state.destroy_process_group(group)
    else:
        yield "none", attempt(state.destroy_process_group)
    yield "still", state.initialized
