"""Run a program as one rank of a large run whose other ranks are made up, and report what that rank does.

    python -m accelerate.extensions.simulate [-m] script [arguments ...]

`accelerate launch --simulate` starts it with the variables of the rank. The process group is torch's fake one: a collective copies what
this rank gives, as if all ranks gave the same, and a key-value store answers for the others. All the rest is the program itself,
with the package as it is.
"""

import contextlib
import copy
import functools
import inspect
import json
import logging
import os
import runpy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from accelerate.accelerator import Accelerator
from accelerate.base._warn import printable
from accelerate.comm.torch_dist import TorchCommunicator
from accelerate.config import env
from accelerate.extension import imported
from accelerate.extensions.reports import out_of_memory
from accelerate.extensions.reports.allocations import EXCHANGED, AllocationTracker, label
from accelerate.extensions.reports.collectives import CollectiveRecorder
from accelerate.extensions.reports.throughput import flops_of
from accelerate.extensions.reports.torch_private import replaced
from accelerate.extensions.simulate import checkpoints, simulated, torch_private
from accelerate.extensions.simulate.report import Facts, text_of
from accelerate.runtime import ranks
from accelerate.runtime.torch_private import is_shape
from accelerate.strategies.mesh import ranks_of_experts
from accelerate.training import restoring, saving

_COPIES = "Other ranks are simulated: they send copies of this rank's data, so losses and weights mean nothing."
# Numbers of floating point in so many are weights, gradients or activations, and need no values; what steers a program has fewer.
_LARGE = 256
_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_FAKE_ITEM = "Large tensors have no values: loss.item() and similar reads return NaN, or 0 for an integer."


class StepsDone(SystemExit):
    """Ends the program after as many optimizer steps as were requested, or where no more of it is needed."""


class SimulatedRank(CollectiveRecorder):
    """One rank's operators: its collectives, for which it invents the others' parts, and its memory."""

    def __init__(self, run: simulated.SimulatedRun, steps: int | None, shapes_only: bool, device: str | None) -> None:
        super().__init__()
        self.run, self.steps, self.shapes_only = run, steps, shapes_only
        self._flops: Counter[str] = Counter()  # of a step, by precision
        self._shapes = torch_private.shapes_only() if shapes_only else None
        self.memory, self.facts = AllocationTracker(), Facts(run, shapes_only, device)
        self._boundary: int | None = None
        self._routed = 0

    def seen(self, func: Any, args: Any, result: Any) -> Any:
        """Follow the memory of operators' results, and count their FLOPs."""
        self.memory.see(result)
        if count := flops_of(func, args, {}, result):
            self._flops[_PRECISIONS.get(args[0].dtype, "no")] += count
        return result

    def exchanged(self, func: Any, args: Any, result: Any) -> Any:
        """Follow the memory that travels, and give the operation an end with a value, which the fake group's has not."""
        self.memory.see((args, result), EXCHANGED)
        if func.namespace == "c10d" and isinstance(result, tuple):
            return (*result[:-1], torch_private.completed(result[0]))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._shapes is not None and not types:
            tensor = torch_private.made_as_shape(self._shapes, func, args, kwargs or {})
            # Results of routed experts have no values either: they would be zeros.
            if tensor is not None and (self._routed or tensor.is_floating_point() and tensor.numel() >= _LARGE):
                self.memory.see(tensor)
                return tensor
        elif self._shapes is not None and torch_private.reads_value(func) and is_shape(args[0]):
            if self._routed and not args[0].is_floating_point():
                return self._routed
            self.run.notes[_FAKE_ITEM] = None
            return float("nan") if args[0].is_floating_point() else 0
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, on shapes too."""
        return torch_private.run_on_shapes(func, args, kwargs) if self.shapes_only else func(*args, **kwargs)

    def entered(self, module: nn.Module, inputs: Any) -> None:
        """Note how many tokens ranks send each other if they spread evenly over experts, which are called with the choice for each token."""
        if count := ranks_of_experts(module):
            self._routed = inputs[1].numel() // count

    def leave_experts(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forget it where the experts end."""
        if ranks_of_experts(module):
            self._routed = 0

    def stepped(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        """Close a step: the optimizer that is the first to step ends each."""
        self._boundary = self._boundary or id(optimizer)
        if id(optimizer) != self._boundary:
            return
        self.facts.steps += 1
        self.note(self.facts.steps)
        if self.facts.steps == self.steps:
            raise StepsDone(0)

    def note(self, step: int) -> None:
        """Add the observations to the facts, as a step of this number, or as a run without steps."""
        if (accelerator := out_of_memory.newest()) is not None:
            self.name(accelerator.torch_device_mesh)
            label(self.memory, accelerator._models, accelerator._optimizers)
            self.facts.look(
                accelerator, max((self.memory.forwards[id(model)] for model in accelerator._models), default=0)
            )
        self.facts.step(step, self.take(), *self.memory.peak(self.facts.names.get))
        self.facts.estimate(self._flops, self.extents())
        self._flops.clear()


@contextlib.contextmanager
def _played(rank: SimulatedRank) -> Iterator[None]:
    """Put the rank around a program."""
    with contextlib.ExitStack() as last:
        last.callback(register_optimizer_step_post_hook(rank.stepped).remove)
        _answer_for_others(last)
        _keep_warnings(last, rank.run.warnings)
        if rank.shapes_only:
            _move_shapes(last)
            last.callback(nn.modules.module.register_module_forward_pre_hook(rank.entered).remove)
            last.callback(nn.modules.module.register_module_forward_hook(rank.leave_experts).remove)
        last.enter_context(torch_private.sharding_for_one())
        last.enter_context(rank.memory.watching())
        last.enter_context(rank)
        yield


def _answer_for_others(last: contextlib.ExitStack) -> None:
    """Replace, for a time, what needs other processes even where the group is a fake one: functions of torch, and checkpoints."""
    new_group, init, objects = dist.new_group, dist.init_process_group, dist.broadcast_object_list

    def broadcast_object_list(
        object_list: list[Any], src: int | None = None, group: Any = None, **options: Any
    ) -> None:
        options.pop("group_src", None)
        objects(object_list, dist.get_rank(), group, **options)  # this rank's object replaces the source's

    @functools.wraps(init)  # whose arguments are looked at
    def init_process_group(*args: Any, **options: Any) -> None:
        if not dist.is_initialized():
            init(*args, **options)

    broadcast = TorchCommunicator.broadcast
    places = [
        (dist, "new_group", lambda *args, **options: new_group(*args, **{**options, "backend": "fake"})),
        (dist, "init_process_group", init_process_group),
        (dist, "broadcast_object_list", broadcast_object_list),
        (TorchCommunicator, "broadcast", lambda self, tensors, src=0: broadcast(self, tensors, self.rank)),
        (saving, "Save", checkpoints.MeasuredSave),
        (restoring, "_load", checkpoints.read),
    ]
    with contextlib.suppress(ModuleNotFoundError):  # without that folder, each rank reads its part
        places.append((imported("accelerate.extensions.dispatch.scatter:Scatter"), "receive", _refuse_to_receive))
    last.enter_context(replaced(*places))


def _refuse_to_receive(scatter: Any) -> NoReturn:
    raise ValueError(
        f"Rank {dist.get_rank()} is simulated, and would be sent its batches by rank 0, which is made up. "
        "Simulate the rank that reads (--simulate_rank 0), or set dispatch_batches=False."
    )


def _keep_warnings(last: contextlib.ExitStack, kept: dict[str, None]) -> None:
    """Collect the texts of warnings for a time: Python's, and those that this package logs."""
    show, logger, handler = warnings.showwarning, logging.getLogger("accelerate"), logging.Handler(logging.WARNING)

    def keep(message: Warning | str, *rest: Any, **options: Any) -> None:
        kept[str(message)] = None
        show(message, *rest, **options)

    handler.emit = lambda record: kept.setdefault(record.getMessage())  # type: ignore[method-assign]
    last.enter_context(replaced((warnings, "showwarning", keep)))
    last.callback(logger.removeHandler, handler)
    logger.addHandler(handler)


def _move_shapes(last: contextlib.ExitStack) -> None:
    """Let modules move and cast parameters without values, for a time: torch swaps them, which fails where anybody refers to them."""
    apply = nn.Module._apply

    def move(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(change)
        parameters = list(module.parameters(recurse=False))
        if not any(map(is_shape, parameters)):
            return apply(module, change, recurse=False)
        with torch.no_grad():
            for tensor in [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None)]:
                if (changed := change(tensor)) is not tensor:
                    tensor.data = changed
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = change(buffer)
        return module

    last.enter_context(replaced((nn.Module, "_apply", move)))


def _run_program(words: list[str]) -> None:
    """Run a script, or with `-m` a module, as Python itself would."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def main(words: list[str] | None = None) -> None:
    """Run a program as the rank that the environment names, and print the report at its end, however it ends.

    Args:
        words: the script and its arguments; by default those of this process.

    Raises:
        ValueError: the environment names no rank.
    """
    words = sys.argv[1:] if words is None else words
    rank_layout = ranks.resolve()
    if rank_layout is None or not words:
        raise ValueError(
            "Start it as `accelerate launch --simulate MACHINESxPROCESSES script.py`, which names the rank."
        )
    run = simulated.start(rank_layout)
    run.notes[_COPIES] = None
    rank = SimulatedRank(
        run,
        env.value_of("simulate_steps"),
        bool(env.value_of("simulate_shapes_only")),
        env.value_of("simulate_device"),
    )
    try:
        with _played(rank):
            try:
                _run_program(words)
            finally:
                if not rank.facts.steps:
                    rank.note(0)
    except StepsDone:
        rank.facts.ended = f"ended after {rank.steps} optimizer steps, as --simulate_steps says"
    except SystemExit as error:
        rank.facts.ended = f"the program ended with status {error.code}"
        raise
    except BaseException as error:
        rank.facts.ended = f"the program failed: {type(error).__name__}: {error}"
        raise
    finally:
        _publish(rank.facts)


@dataclass(frozen=True)
class FirstCall:
    """How a program calls a model for the first time.

    Attributes:
        model: as it was given to `prepare`, on torch's meta device.
        arguments: of its forward, by name; large tensors have no values.
        optimizers: all that were prepared by then, as they were given.
        accumulation: the Accelerator's `gradient_accumulation_steps`.
    """

    model: nn.Module
    arguments: dict[str, Any]
    optimizers: tuple[torch.optim.Optimizer, ...]
    accumulation: int


def first_call(words: list[str], rank_layout: ranks.Ranks) -> FirstCall:
    """Run a program as a simulated rank on shapes only, until it calls a prepared model. The process must have no group.

    Args:
        words: the script and its arguments.
        rank_layout: the rank, which the environment also names.

    Raises:
        ValueError: the program fails before, prepares no model, or calls none that it has prepared.
    """
    prepare, optimizers, calls = Accelerator.prepare, [], []
    models: dict[nn.Module, nn.Module] = {}

    def noted(accelerator: Accelerator, *objects: Any, **options: Any) -> Any:
        optimizers.extend(obj for obj in objects if isinstance(obj, torch.optim.Optimizer))
        for model in objects:
            if isinstance(model, nn.Module) and model not in models:
                tensors = (*model.parameters(), *model.buffers())
                empty = {
                    id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors
                }
                empty |= {id(p): nn.Parameter(empty[id(p)], p.requires_grad) for p in model.parameters()}
                models[model] = copy.deepcopy(model, empty)
                model.register_forward_pre_hook(noting(accelerator, models[model]), prepend=True, with_kwargs=True)
        return prepare(accelerator, *objects, **options)

    def noting(accelerator: Accelerator, model: nn.Module) -> Callable[..., None]:
        def call(_: nn.Module, args: Any, kwargs: Any) -> None:
            if simulated.current() is not run:  # of a copy, or later
                return
            names = inspect.signature(model.forward).parameters
            arguments = dict(zip(names, args, strict=False)) | kwargs
            calls.append(FirstCall(model, arguments, tuple(optimizers), accelerator.gradient_accumulation_steps))
            raise StepsDone(0)

        return call  # no partial function, which a copy of the module would copy with the Accelerator

    name, problem = " ".join(words), None
    run = simulated.start(rank_layout)
    own_path = (sys, "path", list(sys.path)), (sys, "argv", sys.argv)
    watching = replaced((Accelerator, "prepare", noted), *own_path)
    try:
        with watching, _played(SimulatedRank(run, None, True, None)):
            _run_program(words)
    except (Exception, SystemExit) as error:
        problem = error
    finally:
        simulated.end()
    if calls:
        return calls[0]
    if isinstance(problem, Exception):
        text = printable(repr(problem), 300)
        raise ValueError(f"{name!r} fails before it calls a model that it has prepared: {text}.") from problem
    what = "calls no model that it has prepared" if models else "prepares no model"
    raise ValueError(f"{name!r} {what}. It has to give accelerator.prepare() the model, and then to call it.")


def _publish(facts: Facts) -> None:
    report = facts.as_json()
    sys.stderr.flush()
    print(printable(text_of(report)), flush=True)
    if (file := env.value_of("simulate_report")) is not None:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(report, stream, indent=1)
