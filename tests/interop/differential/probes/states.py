"""PartialState, AcceleratorState, GradientState and their shared dictionaries."""

import copy
import os
import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from accelerate import state as states
from accelerate.state import AcceleratorState, GradientState, PartialState, ThreadLocalSharedDict
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, TorchDynamoPlugin
from interop.differential.core import Words, describe, probe

BOTH = (1, 2)
READ = [
    "backend",
    "debug",
    "default_device",
    "device",
    "distributed_type",
    "fork_launched",
    "initialized",
    "is_last_process",
    "is_local_main_process",
    "is_main_process",
    "local_process_index",
    "num_processes",
    "process_index",
    "use_distributed",
]
MORE = [
    "mixed_precision",
    "is_fsdp2",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "dynamo_plugin",
    "use_ipex",
    "torch_tp_plugin",
    "_mixed_precision",
]
STEPS = [
    "sync_gradients",
    "num_steps",
    "adjust_scheduler",
    "sync_with_dataloader",
    "sync_each_batch",
    "initialized",
    "end_of_dataloader",
    "remainder",
]
STEPS += ["dataloader_references", "active_dataloader", "in_dataloader", "plugin_kwargs", "is_xla_gradients_synced"]
CLASSES = {"Partial": lambda: PartialState, "Accelerator": lambda: AcceleratorState, "Gradient": lambda: GradientState}
VALUES = [None, 0, -1, 7, True, False, "", "word", 1.5, [], {"a": 1}]


def accelerated(**given: Any) -> AcceleratorState:
    """Build the state as an Accelerator does."""
    return AcceleratorState(**{"cpu": True, "dynamo_plugin": TorchDynamoPlugin(), "_from_accelerator": True, **given})


def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the value, or the first name of the exception's classes that is of Python's own."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def read(item: Any, names: Any) -> dict[str, Any]:
    return {name: attempt(getattr, item, name) for name in names}


def each(item: Any, names: Any) -> Iterator[tuple[str, Any]]:
    for name in names:
        yield name, attempt(getattr, item, name)


@probe(
    "state:PartialState",
    processes=BOTH,
    cpu=[True, False, None, 1, "yes"],
    debug=[None, "1", "0", "true", "TRUE", "no", "maybe"],
)
def partial(cpu: Any, debug: str | None) -> Iterator[tuple[str, Any]]:
    if debug is not None:
        os.environ["ACCELERATE_DEBUG_MODE"] = debug
    yield from each(PartialState(cpu=cpu), READ)


@probe(
    "state:PartialState",
    processes=BOTH,
    given=[
        {},
        {"backend": "gloo"},
        {"_use_sagemaker_dp": True},
        {"_use_sagemaker_dp": False},
        {"backend": None},
        {"nonsense": 1},
    ],
)
def partial_given(given: dict[str, Any]) -> dict[str, Any]:
    return read(PartialState(cpu=True, **given), READ)


@probe("state:PartialState", text=["repr", "str"], which=["PartialState", "AcceleratorState"], processes=BOTH)
def spelled(text: str, which: str) -> Any:
    state = PartialState(cpu=True) if which == "PartialState" else AcceleratorState(cpu=True)
    return {"repr": repr, "str": str}[text](state)


@probe("state:PartialState", "state:AcceleratorState", "state:GradientState", which=CLASSES, processes=BOTH)
def shared(which: type) -> Iterator[tuple[str, Any]]:
    """The class's dictionary before, during and after."""
    yield "before", dict(which._shared_state)
    yield "initialised before", states.is_initialized()
    first, second = which(), which()
    yield "initialised", states.is_initialized()
    yield "keys", sorted(k for k in first.__dict__ if not k.startswith("_"))
    yield "class keys", sorted(k for k in which._shared_state if not k.startswith("_"))
    first.whatever = 5
    yield "shared", attempt(getattr, second, "whatever")
    yield "shared with the next", attempt(getattr, which(), "whatever")
    yield "in the class", which._shared_state.get("whatever")
    yield "equal", (first == second, first is second, first.__dict__ == second.__dict__)
    yield "deep copy shares", attempt(lambda: copy.deepcopy(first).whatever)
    which._reset_state()
    yield "reset", states.is_initialized()
    yield "empty", sorted(which._shared_state)
    yield "afterwards", attempt(lambda: getattr(which(), "whatever", "<absent>"))


@probe(
    "state:PartialState",
    "state:AcceleratorState",
    "state:GradientState",
    which=CLASSES,
    name=["whatever", *sorted({*READ, *STEPS})],
    processes=BOTH,
)
def assigned(which: type, name: str) -> Iterator[tuple[str, Any]]:
    """Attributes that a caller assigns to a state."""
    state = which()
    yield "assign", attempt(setattr, state, name, 3)
    yield "read", attempt(getattr, state, name)
    yield "another", attempt(getattr, which(), name)
    yield "delete", attempt(delattr, state, name)


@probe(
    "state:PartialState",
    "state:AcceleratorState",
    which=["Partial", "Accelerator"],
    name=["distributed_type", "num_processes", "device"],
)
def through_the_class(which: str, name: str) -> Iterator[tuple[str, Any]]:
    """The class's dictionary changed under a live state."""
    kind = CLASSES[which]()
    state = kind()
    kind._shared_state[name] = "changed"
    yield "read", attempt(getattr, state, name)
    yield "another", attempt(getattr, kind(), name)


@probe(
    "state:PartialState",
    "state:AcceleratorState",
    "state:GradientState",
    which=CLASSES,
    way=["pickle", "copy", "deepcopy"],
    processes=BOTH,
)
def copied(which: type, way: str) -> Iterator[tuple[str, Any]]:
    state = which()
    ways = {"pickle": lambda s: pickle.loads(pickle.dumps(s)), "copy": copy.copy, "deepcopy": copy.deepcopy}
    other = ways[way](state)
    yield "class", type(other).__name__
    yield (
        "same",
        {k: v for k, v in state.__dict__.items() if not k.startswith("_")}
        == {k: v for k, v in other.__dict__.items() if not k.startswith("_")},
    )
    yield from each(other, STEPS if which is GradientState else READ)


@probe(
    "state:PartialState",
    "state:AcceleratorState",
    "state:GradientState",
    which=CLASSES,
    name=["x", "device", "num_steps"],
)
def missing(which: type, name: str) -> Iterator[tuple[str, Any]]:
    """Reading what is not there, with and without initialisation."""
    yield "class", hasattr(which, name)
    yield "built", attempt(lambda: hasattr(which(), name))
    bare = which.__new__(which)
    yield "bare", attempt(getattr, bare, name)


@probe("state:AcceleratorState", name=READ + MORE)
def uninitialised(name: str) -> Any:
    """A state that was never built by an Accelerator."""
    return attempt(lambda: getattr(AcceleratorState(), name))


@probe(
    "state:AcceleratorState",
    processes=BOTH,
    precision=Words([None, "no", "bf16", "fp16", "fp8", "NO", "BF16", "Fp16", "", "half", "float32", 16, True]),
    environment=[None, "bf16", "fp16", "NO"],
    cpu=[True, False],
)
def accelerator_state(precision: Any, environment: str | None, cpu: bool) -> dict[str, Any]:
    if environment is not None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = environment
    return read(accelerated(mixed_precision=precision, cpu=cpu), READ + MORE)


@probe(
    "state:AcceleratorState",
    first=[None, "no", "bf16", "fp16"],
    second=[None, "no", "bf16", "fp16", "x"],
    processes=BOTH,
)
def built_again(first: Any, second: Any) -> Iterator[tuple[str, Any]]:
    accelerated(mixed_precision=first)
    again = attempt(AcceleratorState, mixed_precision=second, _from_accelerator=True)
    yield "second", again if isinstance(again, Exception) else again.mixed_precision
    yield "first", AcceleratorState().mixed_precision


@probe("state:AcceleratorState", "state:PartialState", partial=[True, False], again=[None, "bf16"], processes=BOTH)
def reset_state(partial: bool, again: Any) -> Iterator[tuple[str, Any]]:
    accelerated(mixed_precision="fp16")
    AcceleratorState._reset_state(partial)
    yield "initialised", states.is_initialized()
    yield "partial", PartialState._shared_state != {}
    yield "accelerator", AcceleratorState._shared_state != {}
    built = accelerated(mixed_precision=again)
    yield from each(built, READ + MORE)


@probe(
    "state:AcceleratorState",
    given={
        "dynamo": lambda: {"dynamo_plugin": TorchDynamoPlugin()},
        "dynamo inductor": lambda: {"dynamo_plugin": TorchDynamoPlugin(backend="inductor")},
        "unknown": lambda: {"nonsense": 3},
        "debug": lambda: {"debug": True},
        "fsdp none": lambda: {"fsdp_plugin": None},
        "nothing": dict,
    },
)
def accelerator_given(given: dict[str, Any]) -> dict[str, Any]:
    return read(accelerated(**given), READ + MORE)


@probe(
    "state:AcceleratorState", name=[None, "", "zero2", 3], method=["get_deepspeed_plugin", "select_deepspeed_plugin"]
)
def deepspeed(name: Any, method: str) -> Any:
    return getattr(accelerated(), method)(name)


@probe("state:PartialState", "state:AcceleratorState", which=["Partial", "Accelerator"], processes=BOTH)
def together(which: str) -> Iterator[tuple[str, Any]]:
    """Methods that communicate, and those that one rank runs."""
    state = PartialState(cpu=True) if which == "Partial" else accelerated()
    yield "wait", state.wait_for_everyone()
    for name in ("main_process_first", "local_main_process_first"):
        with getattr(state, name)() as given:
            yield name, given
    yield "print", state.print("a", "b", sep="-")
    yield "print nothing", state.print()


def twice(x: Any = 2, *, y: Any = 1) -> Any:
    """The documented function."""
    return (x, y)


@probe(
    "state:PartialState",
    processes=BOTH,
    method=["on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"],
    index=["<none>", None, 0, 1, 5, -1],
    use=["call", "call with", "late", "name", "none"],
)
def on_process(method: str, index: Any, use: str) -> Any:
    """Decorators that run a function on one process."""
    state = PartialState(cpu=True)
    words = {"on_process": "process_index", "on_local_process": "local_process_index"}
    given = {words[method]: index} if method in words and index != "<none>" else {}
    if index != "<none>" and not given:
        return "not taken"
    if use == "late":
        return getattr(state, method)(**given)(twice)()
    if use == "none":
        made = getattr(state, method)(None, **given)
        return attempt(lambda: made(twice)(4)) if callable(made) else made
    made = getattr(state, method)(twice, **given)
    return {"call": lambda: made(), "call with": lambda: made(4, y=5), "name": lambda: made.__name__}[use]()


SPLIT = {
    "none": lambda: None,
    "text": lambda: "abcde",
    "number": lambda: 5,
    "list 0": list,
    "list 1": lambda: [1],
    "list 2": lambda: [1, 2],
    "list 3": lambda: ["a", "ü", None],
    "list 5": lambda: list(range(5)),
    "list 7": lambda: list(range(7)),
    "tuple 3": lambda: (1, 2, 3),
    "nested": lambda: [[1, 2], [3, 4], [5, 6]],
    "dict": lambda: {"a": [1, 2, 3], "b": ["x", "y", "z"]},
    "dict of tensors": lambda: {"a": torch.arange(3), "b": torch.arange(6).reshape(3, 2)},
    "dict uneven": lambda: {"a": [1, 2, 3], "b": [1]},
    "dict nested": lambda: {"a": {"b": [1, 2, 3]}},
    "dict empty": dict,
    "dict of empty": lambda: {"a": []},
    "tensor 0": lambda: torch.zeros(0),
    "tensor 1": lambda: torch.arange(1),
    "tensor 3": lambda: torch.arange(3),
    "tensor 4x2": lambda: torch.arange(8).reshape(4, 2),
    "tensor 5 half": lambda: torch.arange(5, dtype=torch.float16),
    "tensor 0d": lambda: torch.tensor(3),
    "array 3": lambda: np.arange(3),
    "set": lambda: {1, 2, 3},
    "range": lambda: range(5),
    "generator": lambda: (i for i in range(3)),
}


@probe(
    "state:PartialState",
    "state:AcceleratorState",
    processes=BOTH,
    inputs=SPLIT,
    padding=[False, True, None],
    which=["Partial", "Accelerator"],
)
def split(inputs: Any, padding: Any, which: str) -> Any:
    state = PartialState(cpu=True) if which == "Partial" else accelerated()
    with state.split_between_processes(inputs, apply_padding=padding) as part:
        return part


@probe("state:PartialState", inputs=SPLIT, padding=[False, True], size=[2, 3, 4, 8], rank=[0, 1, 2, 7])
def split_as(inputs: Any, padding: bool, size: int, rank: int) -> Any:
    """Splitting with a number of processes that was set on the state; nothing is exchanged."""
    state = PartialState(cpu=True)
    state.num_processes, state.process_index = size, rank
    if rank >= size or padding and isinstance(inputs, (torch.Tensor, dict)):
        return "not compared"
    with state.split_between_processes(inputs, apply_padding=padding) as part:
        return part


@probe("state:GradientState", processes=BOTH)
def gradient() -> Iterator[tuple[str, Any]]:
    yield from each(GradientState(), STEPS)
    yield "repr", repr(GradientState())


@probe(
    "state:GradientState",
    steps=[None, 1, 2, 100, 0, -1, 2.0, "3"],
    adjust=[True, False],
    with_dataloader=[True, False],
    each_batch=[True, False],
)
def gradient_plugin(steps: Any, adjust: bool, with_dataloader: bool, each_batch: bool) -> Any:
    plugin = GradientAccumulationPlugin(
        num_steps=steps, adjust_scheduler=adjust, sync_with_dataloader=with_dataloader, sync_each_batch=each_batch
    )
    return read(GradientState(plugin), STEPS), read(GradientState(GradientAccumulationPlugin(num_steps=9)), STEPS)


@probe("state:GradientState", value=VALUES)
def gradient_sync(value: Any) -> Iterator[tuple[str, Any]]:
    state = GradientState()
    yield "set", attempt(state._set_sync_gradients, value)
    yield from each(GradientState(), STEPS)


@probe(
    "state:GradientState",
    value=VALUES,
    name=["sync_gradients", "is_xla_gradients_synced", "dataloader_references", "plugin_kwargs"],
)
def gradient_assigned(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    state = GradientState()
    yield "set", attempt(setattr, state, name, value)
    yield "read", attempt(getattr, GradientState(), name)


@probe("state:GradientState", remainder=[-1, 0, 3], end=[True, False], batch=[None, 4], depth=[1, 2])
def gradient_loader(remainder: int, end: bool, batch: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Loaders that register with the state by themselves."""
    state = GradientState()
    loaders = [
        SimpleNamespace(remainder=remainder, end_of_dataloader=end, total_batch_size=batch, iteration=0)
        for _ in range(depth)
    ]
    for loader in loaders:
        yield "add", attempt(state._add_dataloader, loader)
        yield (
            "in",
            attempt(
                lambda: (
                    state.in_dataloader,
                    state.end_of_dataloader,
                    state.remainder,
                    len(state.dataloader_references),
                )
            ),
        )
        yield "active", state.active_dataloader is loader
        break
    for loader in loaders[1:]:
        state._add_dataloader(loader)
        yield "inner", (state.active_dataloader is loader, len(state.dataloader_references))
    for number, loader in enumerate(reversed(loaders)):
        state._remove_dataloader(loader)
        yield (
            f"left {number}",
            (state.in_dataloader, state.active_dataloader is loaders[0], len(state.dataloader_references)),
        )


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


@probe("state:PartialState", value=["cpu", "cpu:0", "CPU", "meta", "", "nonsense", None], processes=1)
def torch_device(value: Any) -> Iterator[tuple[str, Any]]:
    if value is not None:
        os.environ["ACCELERATE_TORCH_DEVICE"] = value
    state = attempt(PartialState)
    yield "device", state if isinstance(state, Exception) else state.device


@probe("state:PartialState", processes=1)
def set_device() -> Any:
    state = PartialState(cpu=True)
    state.device = None
    state.set_device()
    return state.device


@probe("state:AcceleratorState", name=["fsdp", "fsdp2"], cpu=[True, False])
def fsdp_plugins(name: str, cpu: bool) -> Any:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2 if name == "fsdp2" else 1)
    return read(accelerated(fsdp_plugin=plugin, cpu=cpu), READ + MORE)
