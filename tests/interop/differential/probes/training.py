"""The prepared optimizer."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, move_to_device, patch_optimizer_step
from accelerate.state import GradientState
from interop.differential.core import probe
from interop.differential.probes.nested import outcome


class Modal(torch.optim.SGD):
    """An optimizer with modes, as schedule-free ones have."""

    mode = "none"

    def train(self) -> None:
        """Note the mode."""
        self.mode = "train"

    def eval(self) -> None:
        """Note the mode."""
        self.mode = "eval"


class Plain(torch.optim.SGD):
    """An optimizer whose `zero_grad` takes nothing."""

    def zero_grad(self) -> None:  # type: ignore[override]
        """Zero the gradients."""
        super().zero_grad(set_to_none=False)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "modal": lambda p: Modal(p, lr=0.5),
    "plain": lambda p: Plain(p, lr=0.5),
}
OPTIMIZER_AXIS = {k: (lambda v=v: v) for k, v in OPTIMIZERS.items()}
FEW = {k: OPTIMIZER_AXIS[k] for k in ("SGD", "momentum", "Adam", "modal", "plain")}


def parameter(value: float = 1.0) -> nn.Parameter:
    """Return a parameter with a gradient."""
    made = nn.Parameter(torch.full((2,), value))
    made.grad = torch.tensor([0.5, -0.25])
    return made


def scaler(kind: str) -> Any:
    """Return a gradient scaler that works on the CPU, or None."""
    return {
        "none": lambda: None,
        "scaler": lambda: torch.amp.GradScaler("cpu", init_scale=4.0),
        "off": lambda: torch.amp.GradScaler("cpu", enabled=False),
    }[kind]()


@probe(
    "optimizer:AcceleratedOptimizer",
    make=OPTIMIZER_AXIS,
    device_placement=[True, False],
    scaling=["none", "scaler", "off"],
    synchronised=[True, False],
)
def optimizer(make: Any, device_placement: bool, scaling: str, synchronised: bool) -> Iterator[tuple[str, Any]]:
    Accelerator(cpu=True)
    weight = parameter()
    inner = make([weight])
    wrapped = AcceleratedOptimizer(inner, device_placement=device_placement, scaler=scaler(scaling))
    GradientState()._set_sync_gradients(synchronised)
    yield (
        "attributes",
        (
            wrapped.optimizer is inner,
            type(wrapped.scaler).__name__,
            wrapped.device_placement,
            wrapped.step_was_skipped,
        ),
    )
    if wrapped.scaler is not None:
        (wrapped.scaler.scale((weight * 2).sum())).backward()
    yield "step", outcome(lambda: wrapped.step())
    yield "weight", weight
    yield "state", wrapped.state_dict()
    yield "groups", [{k: v for k, v in g.items() if k != "params"} for g in wrapped.param_groups]
    yield (
        "shared",
        (wrapped.state is inner.state, wrapped.param_groups is inner.param_groups, wrapped.defaults is inner.defaults),
    )
    for argument in ("left out", None, True, False):
        weight.grad = torch.ones(2)
        yield (
            f"zero {argument}",
            outcome(lambda a=argument: wrapped.zero_grad() if a == "left out" else wrapped.zero_grad(set_to_none=a)),
        )
        yield f"gradient {argument}", weight.grad
    yield "skipped", wrapped.step_was_skipped


@probe("optimizer:AcceleratedOptimizer", make=FEW, scaling=["none", "scaler"])
def optimizer_methods(make: Any, scaling: str) -> Iterator[tuple[str, Any]]:
    Accelerator(cpu=True)
    wrapped = AcceleratedOptimizer(make([parameter()]), scaler=scaler(scaling))
    yield "is one", isinstance(wrapped, torch.optim.Optimizer)
    yield "train", (outcome(wrapped.train), getattr(wrapped.optimizer, "mode", "<absent>"))
    yield "eval", (outcome(wrapped.eval), getattr(wrapped.optimizer, "mode", "<absent>"))
    yield (
        "add",
        (
            outcome(lambda: wrapped.add_param_group({"params": [parameter()], "lr": 9.0})),
            [g["lr"] for g in wrapped.param_groups],
        ),
    )
    saved = copy.deepcopy(wrapped.state_dict())
    wrapped.param_groups[0]["lr"] = 7.0
    yield "load", (outcome(lambda: wrapped.load_state_dict(saved)), [g["lr"] for g in wrapped.param_groups])
    yield "load nothing", outcome(lambda: wrapped.load_state_dict({}))
    wrapped.defaults = {"lr": 3.0}
    yield "defaults", (wrapped.defaults, wrapped.optimizer.defaults)
    wrapped.state = {}
    yield "state", (wrapped.state, wrapped.optimizer.state)
    wrapped.param_groups = [{"params": [parameter()], "lr": 2.0}]
    yield "groups", (len(wrapped.optimizer.param_groups), wrapped.optimizer.param_groups[0]["lr"])
    yield "unknown", outcome(lambda: wrapped.no_such_thing)
    yield "skipped is set", outcome(lambda: setattr(wrapped, "step_was_skipped", True))


@probe(
    "optimizer:AcceleratedOptimizer",
    make=FEW,
    scaling=["none", "scaler"],
    action=[pickle.dumps, copy.copy, copy.deepcopy],
)
def optimizer_copied(make: Any, scaling: str, action: Any) -> Iterator[tuple[str, Any]]:
    Accelerator(cpu=True)
    weight = parameter()
    wrapped = AcceleratedOptimizer(make([weight]), scaler=scaler(scaling))
    wrapped.step() if scaling == "none" else None
    made = action(wrapped)
    twin = pickle.loads(made) if isinstance(made, bytes) else made
    yield "kind", (type(twin).__name__, type(twin.optimizer).__name__, type(twin.scaler).__name__)
    yield "state", twin.state_dict()
    yield (
        "shares",
        (twin.optimizer is wrapped.optimizer, twin.param_groups[0]["params"][0] is weight, twin.step_was_skipped),
    )
    twin.param_groups[0]["params"][0].grad = torch.ones(2)
    if scaling == "none":
        yield "steps", (outcome(twin.step), twin.param_groups[0]["params"][0])


@probe(
    "optimizer:AcceleratedOptimizer",
    make={k: OPTIMIZER_AXIS[k] for k in ("SGD", "Adam")},
    gradients=[(1.0,), (float("inf"),), (1.0, float("inf"), 1.0), (float("nan"), 1.0)],
    closure=[False, True],
)
def overflow(make: Any, gradients: tuple[float, ...], closure: bool) -> Iterator[tuple[str, Any]]:
    Accelerator(cpu=True)
    weight = parameter()
    wrapped = AcceleratedOptimizer(
        make([weight]), scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    )
    for number, value in enumerate(gradients):
        weight.grad = None
        wrapped.scaler.scale((weight * value).sum()).backward()
        yield f"step {number}", outcome(lambda: wrapped.step(lambda: torch.tensor(1.0)) if closure else wrapped.step())
        yield f"after {number}", (wrapped.step_was_skipped, wrapped.scaler.get_scale(), weight)


@probe(
    "optimizer:AcceleratedOptimizer",
    make={k: OPTIMIZER_AXIS[k] for k in ("SGD", "Adam", "modal")},
    closure=["none", "loss", "no callable"],
)
def closures(make: Any, closure: str) -> Iterator[tuple[str, Any]]:
    Accelerator(cpu=True)
    weight = parameter()
    wrapped = AcceleratedOptimizer(make([weight]))
    yield (
        "step",
        outcome(lambda: wrapped.step({"none": None, "loss": lambda: torch.tensor(2.0), "no callable": 3}[closure])),
    )
    yield "weight", weight


@probe("optimizer:AcceleratedOptimizer", given=[None, "text", 1])
def optimizer_of(given: Any) -> Any:
    Accelerator(cpu=True)
    return AcceleratedOptimizer(given).optimizer


@probe("optimizer:AcceleratedOptimizer")
def swapped_scaler() -> Iterator[tuple[str, Any]]:
    """A scaler that is assigned later, with the attributes that libraries make themselves."""
    Accelerator(cpu=True)
    weight = parameter()
    wrapped = AcceleratedOptimizer(
        torch.optim.SGD([weight], lr=0.5), scaler=torch.amp.GradScaler("cpu", init_scale=2.0)
    )
    yield (
        "attributes",
        [
            hasattr(wrapped, n)
            for n in (
                "_accelerate_step_called",
                "_optimizer_original_step_method",
                "_optimizer_patched_step_method",
                "_is_overflow",
            )
        ],
    )
    wrapped.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    wrapped._accelerate_step_called = False
    wrapped._optimizer_original_step_method = wrapped.optimizer.step
    wrapped._optimizer_patched_step_method = patch_optimizer_step(wrapped, wrapped.optimizer.step)
    for value in (1.0, float("inf")):
        weight.grad = None
        wrapped.scaler.scale((weight * value).sum()).backward()
        wrapped.step()
        yield f"after {value}", (weight, wrapped.step_was_skipped, wrapped.scaler.get_scale())


@probe("optimizer:patch_optimizer_step", arguments=[(), (None,), (lambda: 3,)])
def patched_step(arguments: Any) -> Iterator[tuple[str, Any]]:
    class Owner:
        _accelerate_step_called = False

    owner, calls = Owner(), []
    method = patch_optimizer_step(owner, lambda *args, **kwargs: calls.append((len(args), kwargs)) or "result")
    yield "before", owner._accelerate_step_called
    yield "result", method(*arguments)
    yield "after", (owner._accelerate_step_called, calls)


@probe(
    "optimizer:move_to_device",
    state=[
        *(
            torch.ones(2),
            [torch.ones(1)],
            (torch.ones(1), 2),
            {"a": torch.ones(1), "b": "x"},
            {"a": {"b": [torch.ones(1)]}},
            None,
            1,
            "x",
        ),
        *(
            [],
            (),
            {},
            OrderedDict(a=torch.ones(1)),
            {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}},
            [[torch.ones(1), (torch.ones(1),)]],
        ),
    ],
    device=["cpu", "meta", torch.device("meta")],
)
def moved(state: Any, device: Any) -> Iterator[tuple[str, Any]]:
    result = move_to_device(state, device)
    yield "value", result
    yield "argument", state
