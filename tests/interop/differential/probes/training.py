"""The prepared optimizer."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, move_to_device
from interop.differential.core import probe


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
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5), "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1), "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1), "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p), "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1), "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "modal": lambda p: Modal(p, lr=0.5), "plain": lambda p: Plain(p, lr=0.5),
}  # fmt: skip
OPTIMIZER_AXIS = {k: (lambda v=v: v) for k, v in OPTIMIZERS.items()}


def parameter(value: float = 1.0) -> nn.Parameter:
    """Return a parameter with a gradient."""
    made = nn.Parameter(torch.full((2,), value))
    made.grad = torch.tensor([0.5, -0.25])
    return made


@probe("optimizer:AcceleratedOptimizer", given=[None, "text", 1])
def optimizer_of(given: Any) -> Any:
    Accelerator(cpu=True)
    return AcceleratedOptimizer(given).optimizer


@probe(
    "optimizer:move_to_device",
    state=[
        *(
            torch.ones(2), [torch.ones(1)], (torch.ones(1), 2), {"a": torch.ones(1), "b": "x"},
            {"a": {"b": [torch.ones(1)]}}, None, 1, "x",
        ),
        *(
            [], (), {}, OrderedDict(a=torch.ones(1)), {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}},
            [[torch.ones(1), (torch.ones(1),)]],
        ),
    ],
    device=["cpu", "meta", torch.device("meta")],
)  # fmt: skip
def moved(state: Any, device: Any) -> Iterator[tuple[str, Any]]:
    result = move_to_device(state, device)
    yield "value", result
    yield "argument", state
