"""The contract of an fp8 engine: whether it can serve a device, what it does to models, and what forward runs in."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.config.enums import FP8BackendType

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

# Ada (8.9) and Hopper (9.0) are the first with 8-bit tensor cores: https://docs.nvidia.com/cuda/cuda-c-programming-guide
CAPABILITY = (8, 9)


class Engine:
    """A library that computes in 8 bits. Stateless: recipes live on the Accelerator, marks on the models.

    ``refusal`` is asked when the Accelerator is built; ``prepare`` is called once per ``Accelerator.prepare``, on every
    rank, before the backend wraps anything.
    """

    kind: ClassVar[FP8BackendType]
    title: ClassVar[str]
    # What to install, and the attribute of the Accelerator with the recipe.
    package: ClassVar[str]
    attribute: ClassVar[str]

    def available(self) -> bool:
        """Whether the library is installed."""
        raise NotImplementedError

    def recipe(self) -> Any:
        """Return the recipe that the environment asks for, where none was passed."""
        raise NotImplementedError

    def refusal(self, device: torch.device, recipe: Any | None) -> str | None:
        """Return why the library cannot compute in 8 bits on a device, or None when it can.

        Args:
            device: Where this rank computes.
            recipe: The recipe in force; None asks about the usual one.
        """
        if device.type == "cuda" and torch.version.hip is None:
            seen = torch.cuda.get_device_capability(device)
            if seen >= CAPABILITY:
                return None
            return (
                f"{self.title} needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or higher (NVIDIA Ada, Hopper "
                f"or later), and {torch.cuda.get_device_name(device)} has {seen[0]}.{seen[1]}"
            )
        return None if device.type == "cuda" else f"{self.title} does not compute in 8 bits on {device.type!r}"

    def converted(self, model: nn.Module) -> int:
        """Return how many layers of a model the library computes."""
        raise NotImplementedError

    def convert(self, model: nn.Module, recipe: Any, **options: Any) -> None:
        """Replace the layers of a model that the library computes, in place."""

    def forward_context(self, recipe: Any, training: bool = True) -> contextlib.AbstractContextManager:
        """Return the context in which a converted model's forward runs in 8 bits.

        Args:
            recipe: The recipe in force.
            training: Whether the model trains.
        """
        return contextlib.nullcontext()

    def wrap_forward(self, model: nn.Module, recipe: Any) -> None:
        """Let the forward of a converted model enter ``forward_context`` by itself, in place."""


def new_models(accelerator: "Accelerator", objects: Sequence[Any]) -> Iterator[nn.Module]:
    """Yield the models among some objects that this Accelerator has not prepared and no engine has converted."""
    for item in objects:
        if isinstance(item, nn.Module) and accelerator._registry.find(item) is None:
            yield item


def count(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> int:
    """Return how many modules of a model are wanted ones."""
    return sum(1 for module in model.modules() if wanted(module))
