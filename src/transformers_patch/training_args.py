"""The patch of `transformers.TrainingArguments._setup_devices`, which resets the shared accelerator state.

transformers has its own setting to keep a state: `accelerator_config={"use_configured_state": True}`. It raises if there is
none, and no library sets it. The patch sets it for the user if a state exists, after checking that the arguments agree with
the state. If the state is not kept, transformers' own code runs unchanged.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, get_args

from transformers_patch import fields
from transformers_patch.registry import Finding

Strategy = Literal["preserve", "flag", "conditional"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
FLAG = "preserve_accelerator_state"
HELP = (
    "Whether to keep an existing accelerator state, made by an `Accelerator` or a `PartialState`. "
    "False resets it and builds a new one, as unpatched transformers does."
)
_PROPERTY = "_setup_devices"
_SWITCH = "use_configured_state"
# Says in the shared state itself that training arguments made it; it vanishes with the state.
_MADE_HERE = "_made_by_training_arguments"
_ORIGINAL = "patched_by_transformers_patch"
_READ = ("accelerator_config", "use_cpu", "fp16", "bf16", "deepspeed", "ddp_backend", "ddp_timeout")


@dataclasses.dataclass
class _Flag:
    preserve_accelerator_state: bool = dataclasses.field(default=True, kw_only=True, metadata={"help": HELP})


def getter_of(descriptor: Any) -> FunctionType | None:
    """Return the function below a property or a cached property, or None for anything else."""
    getter = getattr(descriptor, "func", None) or getattr(descriptor, "fget", None)
    return getter if inspect.isfunction(getter) else None


def examine(module: ModuleType) -> Finding:
    """Compare `transformers.training_args` with the shape that this patch relies on.

    Args:
        module: the module, or one like it.
    """
    cls = getattr(module, "TrainingArguments", None)
    if not (inspect.isclass(cls) and dataclasses.is_dataclass(cls)):
        return Finding((f"TrainingArguments is {cls!r}, not a dataclass",), needed=True)
    problems = []
    names = {field.name for field in dataclasses.fields(cls)}
    descriptor = vars(cls).get(_PROPERTY)
    getter = getter_of(descriptor)
    if missing := [name for name in _READ if name not in names]:
        problems.append(f"TrainingArguments has no field {', '.join(missing)}")
    if FLAG in names and not hasattr(getter, _ORIGINAL):
        return Finding((), needed=False)  # transformers has taken the flag in
    if getter is None:
        problems.append(f"TrainingArguments.{_PROPERTY} is {type(descriptor).__name__}, not a cached property")
        return Finding(tuple(problems), needed=True)
    read = inspect.unwrap(getter)
    if list(inspect.signature(read).parameters) != ["self"]:
        problems.append(f"{_PROPERTY} takes {inspect.signature(read)}, not (self)")
    if "_reset_state" not in names_in(read.__code__):
        if not (elsewhere := _resetting(module)):
            return Finding(tuple(problems), needed=False)
        problems.append(f"the state is reset in {', '.join(elsewhere)}, not in {_PROPERTY}")
    # The keys of a literal dictionary are one constant, so they are looked for in its text.
    if not any(repr(_SWITCH) in repr(part.co_consts) for part in _codes(read.__code__)):
        problems.append(f"{_PROPERTY} does not read {_SWITCH!r}")
    config = getattr(module, "AcceleratorConfig", None)
    if not (inspect.isclass(config) and hasattr(config, _SWITCH) and callable(getattr(config, "pop", None))):
        problems.append(f"AcceleratorConfig ({config!r}) has no {_SWITCH!r} and pop()")
    return Finding(tuple(problems), needed=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def names_in(code: CodeType) -> set[str]:
    """Return the names that a function's code reads, those of functions inside it included."""
    return {name for part in _codes(code) for name in part.co_names}


def _resetting(module: ModuleType) -> list[str]:
    """Return the functions of a module, and those of its classes, that reset the state."""
    owners = [module, *(value for value in vars(module).values() if inspect.isclass(value))]
    members = [(name, getter_of(value) or value) for owner in owners for name, value in vars(owner).items()]
    local = [(name, value) for name, value in members if getattr(value, "__module__", None) == module.__name__]
    return [name for name, value in local if inspect.isfunction(value) and "_reset_state" in names_in(value.__code__)]


def install(module: ModuleType, strategy: Callable[[], Strategy], undo: ExitStack) -> None:
    """Patch `TrainingArguments` in place; every subclass inherits it.

    Args:
        module: `transformers.training_args`, examined before.
        strategy: says which strategy holds at the moment.
        undo: takes what restores the classes exactly.
    """
    cls = module.TrainingArguments
    original = vars(cls)[_PROPERTY]
    undo.callback(setattr, cls, _PROPERTY, original)
    setattr(cls, _PROPERTY, keeping(cls, strategy))
    fields.add(cls, dataclasses.fields(_Flag)[0], undo)


def keeping(cls: type, strategy: Callable[[], Strategy]) -> Any:
    """Return a property of the class's kind that sets up devices and keeps the state if the strategy requires it.

    Args:
        cls: `transformers.TrainingArguments`, patched or not.
        strategy: says which strategy holds at the moment.
    """
    descriptor = vars(cls)[_PROPERTY]
    getter = getter_of(descriptor)
    property_copy = type(descriptor)(device_setup(getattr(getter, _ORIGINAL, getter), strategy))
    if hasattr(property_copy, "__set_name__"):
        property_copy.__set_name__(cls, _PROPERTY)
    return property_copy


def device_setup(original: Any, strategy: Callable[[], Strategy]) -> Callable[[Any], Any]:
    """Return a function that calls the original, and keeps the shared state if the strategy requires it."""

    @functools.wraps(original)
    def _setup_devices(self: Any) -> Any:
        from accelerate.state import PartialState
        from transformers_patch import agreement

        configured = bool(getattr(self.accelerator_config, _SWITCH, False))
        if not keeps_state(self, strategy(), configured):
            device = original(self)
            if PartialState._shared_state and not configured:
                PartialState._shared_state[_MADE_HERE] = True
            return device
        agreement.check(self)
        # A copy, because one configuration may serve several arguments, in several threads.
        config = self.accelerator_config
        self.accelerator_config = copy.copy(config)
        setattr(self.accelerator_config, _SWITCH, True)
        try:
            return original(self)
        finally:
            self.accelerator_config = config
            config.pop(_SWITCH, None)  # as transformers leaves it

    setattr(_setup_devices, _ORIGINAL, original)
    return _setup_devices


def keeps_state(arguments: Any, strategy: Strategy, configured: bool) -> bool:
    """Decide whether training arguments keep the shared state instead of resetting it.

    Args:
        arguments: the arguments, with the flag if they have one.
        strategy: the strategy that holds.
        configured: whether their `accelerator_config` says `use_configured_state`.

    Raises:
        TypeError: the flag is not a boolean.
    """
    from accelerate.state import PartialState
    from transformers_patch import agreement

    flag = getattr(arguments, FLAG, True)
    if not isinstance(flag, bool):
        raise TypeError(f"{FLAG}={flag!r} is of type {type(flag).__name__}. Pass True or False.")
    if not PartialState._shared_state:
        return False
    if not flag:
        if configured:
            raise ValueError(
                f"{FLAG}=False resets the accelerator state, and accelerator_config has {_SWITCH}=True, which keeps it. "
                "Leave one of them out."
            )
        if strategy == "preserve":
            agreement.warn_caller(
                f'{FLAG}=False: these arguments reset the accelerator state, although apply(strategy="preserve") says that '
                'nothing does. Use strategy="flag" where single arguments may.'
            )
        return False
    if strategy == "conditional":
        return not configured and _MADE_HERE not in PartialState._shared_state
    return True
