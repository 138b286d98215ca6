"""How models are compiled."""

from dataclasses import dataclass
from typing import Any

from accelerate.config.enums import DynamoBackend, at_public_path
from accelerate.config.handlers import KwargsHandler, from_environment
from accelerate.config.values import to_bool

PREFIX = "ACCELERATE_DYNAMO_"


@at_public_path
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """What `torch.compile` is told when `Accelerator.prepare` compiles a model.

    Each field left at None is read from the environment variable in brackets, which the launcher sets.

    Args:
        backend: the compiler, as a `DynamoBackend` or its name in any case; "no" compiles nothing
            (ACCELERATE_DYNAMO_BACKEND).
        mode: "default", "reduce-overhead" or "max-autotune" (ACCELERATE_DYNAMO_MODE).
        fullgraph: fail where the model does not compile as one graph (ACCELERATE_DYNAMO_USE_FULLGRAPH).
        dynamic: compile for any shape; None lets torch find out (ACCELERATE_DYNAMO_USE_DYNAMIC).
        options: what the backend itself is told; torch takes no `mode` then.
        disable: make `torch.compile` return the model unchanged.
        use_regional_compilation: compile the repeated blocks of the model one by one, which starts much faster
            (ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION).

    Raises:
        ValueError: `backend` is unknown.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode="reduce-overhead"))

    Source: https://pytorch.org/docs/stable/generated/torch.compile.html
    """

    backend: DynamoBackend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        if self.backend is None:
            self.backend = from_environment(PREFIX + "BACKEND", "no")
        self.backend = DynamoBackend(str(self.backend).upper())
        if self.mode is None:
            self.mode = from_environment(PREFIX + "MODE", "default")
        if self.fullgraph is None:
            self.fullgraph = from_environment(PREFIX + "USE_FULLGRAPH", False, to_bool)
        if self.dynamic is None:
            self.dynamic = from_environment(PREFIX + "USE_DYNAMIC", None, to_bool)
        if self.use_regional_compilation is None:
            self.use_regional_compilation = from_environment(PREFIX + "USE_REGIONAL_COMPILATION", False, to_bool)

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, deep-copied, with the backend written as `torch.compile` reads it."""
        return super().to_dict() | {"backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that differ from a plugin built without arguments or variables."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)  # for us, not for torch
        return kwargs
