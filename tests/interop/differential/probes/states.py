"""PartialState, AcceleratorState, GradientState and their shared dictionaries."""

import threading
from collections.abc import Iterator
from typing import Any

import torch

from accelerate import state as states
from accelerate.state import AcceleratorState, GradientState, PartialState, ThreadLocalSharedDict
from accelerate.utils import TorchDynamoPlugin
from interop.differential.core import attempt, describe, probe

BOTH = (1, 2)
READ = [
    "backend", "debug", "default_device", "device", "distributed_type", "fork_launched", "initialized",
    "is_last_process", "is_local_main_process", "is_main_process", "local_process_index", "num_processes",
    "process_index", "use_distributed",
]  # fmt: skip
MORE = [
    "mixed_precision", "is_fsdp2", "deepspeed_plugin", "deepspeed_plugins", "dynamo_plugin", "use_ipex",
    "torch_tp_plugin", "_mixed_precision",
]  # fmt: skip
STEPS = [
    "sync_gradients", "num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch", "initialized",
    "end_of_dataloader", "remainder",
]  # fmt: skip
STEPS += ["dataloader_references", "active_dataloader", "in_dataloader", "plugin_kwargs", "is_xla_gradients_synced"]


def accelerated(**given: Any) -> AcceleratorState:
    """Build the state as an Accelerator does."""
    return AcceleratorState(**{"cpu": True, "dynamo_plugin": TorchDynamoPlugin(), "_from_accelerator": True, **given})


def read(item: Any, names: Any) -> dict[str, Any]:
    return {name: attempt(getattr, item, name) for name in names}


def each(item: Any, names: Any) -> Iterator[tuple[str, Any]]:
    for name in names:
        yield name, attempt(getattr, item, name)


@probe("state:PartialState", text=["repr", "str"], which=["PartialState", "AcceleratorState"], processes=BOTH)
def spelled(text: str, which: str) -> Any:
    state = PartialState(cpu=True) if which == "PartialState" else AcceleratorState(cpu=True)
    return {"repr": repr, "str": str}[text](state)


@probe("state:AcceleratorState", "state:PartialState", partial=[True, False], again=[None, "bf16"], processes=BOTH)
def reset_state(partial: bool, again: Any) -> Iterator[tuple[str, Any]]:
    accelerated(mixed_precision="fp16")
    AcceleratorState._reset_state(partial)
    yield "initialised", states.is_initialized()
    yield "partial", PartialState._shared_state != {}
    yield "accelerator", AcceleratorState._shared_state != {}
    built = accelerated(mixed_precision=again)
    yield from each(built, READ + MORE)


@probe("state:GradientState", processes=BOTH)
def gradient() -> Iterator[tuple[str, Any]]:
    yield from each(GradientState(), STEPS)
    yield "repr", repr(GradientState())


@probe("state:ThreadLocalSharedDict", thread_local=[True, False, None])
def thread_local(thread_local: Any) -> Iterator[tuple[str, Any]]:
    class Holder:
        shared = ThreadLocalSharedDict(thread_local=thread_local)

    yield "start", Holder().shared
    Holder().shared["a"] = 1
    yield "set", Holder().shared
    item = Holder()
    item.shared = {"b": 2}
    yield "assigned", (Holder().shared, item.shared)
    found: list[Any] = []
    worker = threading.Thread(target=lambda: (found.append(dict(Holder().shared)), Holder().shared.update(c=3)))
    worker.start()
    worker.join()
    yield "thread", found
    yield "after", Holder().shared
    yield "on the class", describe(type(Holder.__dict__["shared"]).__name__)


@probe("state:do_nothing", args=[(), (1,), (None, "x")], kwargs=[{}, {"a": 1}])
def do_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return states.do_nothing(*args, **kwargs)


@probe("state:is_initialized", build=["none", "partial", "accelerator", "gradient"])
def is_initialized(build: str) -> Iterator[tuple[str, Any]]:
    made = {"partial": PartialState, "accelerator": accelerated, "gradient": GradientState}
    made.get(build, lambda: None)()
    yield "whole", states.is_initialized()
    yield "partial", PartialState._shared_state != {}


@probe("state:PartialState", processes=BOTH)
def destroy() -> Iterator[tuple[str, Any]]:
    """Leaving a group of its own, not the world's."""
    state = PartialState(cpu=True)
    group = torch.distributed.new_group([0, 1]) if state.num_processes > 1 else None
    if group is not None:
        torch.distributed.barrier(group)  # all have joined it
        yield "own", state.destroy_process_group(group)
    else:
        yield "none", attempt(state.destroy_process_group)
    yield "still", state.initialized


@probe("state:GradientState", value=[None, 0, -1, 7, True, False, "", "word", 1.5, [], {"a": 1}])
def gradient_sync(value: Any) -> Iterator[tuple[str, Any]]:
    state = GradientState()
    yield "set", attempt(state._set_sync_gradients, value)
    yield from each(GradientState(), STEPS)
