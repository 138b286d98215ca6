"""The shape that the patch relies on, and when it keeps a state."""

import dataclasses
import functools
import types

import pytest

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from cases import cases
from transformers_patch import training_args
from transformers_patch.training_args import Finding, examine, keeps_state


@dataclasses.dataclass
class Config:
    use_configured_state: bool = False

    def pop(self, name, default):
        return vars(self).pop(name, default)


def module(setup=None, config=Config, more=(), drop=(), **extra):
    """A module in the shape of transformers.training_args, written here."""

    def usual(self):
        kept = self.accelerator_config.pop("use_configured_state", False)
        if not kept:
            AcceleratorState._reset_state(reset_partial_state=True)
        return PartialState().device

    names = [name for name in (*training_args._READ, *more) if name not in drop]
    setup = usual if setup is None else setup
    spec = [(name, object, None) for name in names]
    made = types.ModuleType("shape")
    cached = functools.cached_property(setup) if callable(setup) else setup
    cls = dataclasses.make_dataclass("TrainingArguments", spec, namespace={"_setup_devices": cached})
    if isinstance(cached, functools.cached_property):
        cached.__set_name__(cls, "_setup_devices")
    for name, value in {"TrainingArguments": cls, "AcceleratorConfig": config, **extra}.items():
        setattr(made, name, value)
    for value in (setup, *extra.values()):
        if isinstance(value, types.FunctionType):
            value.__module__ = "shape"
    return made


def test_the_known_shape_is_patched_where_it_is_needed():
    assert examine(module()) == Finding((), needed=True)
    assert examine(module(lambda self: PartialState().device)) == Finding((), needed=False)
    assert examine(module(more=["preserve_accelerator_state"])) == Finding((), needed=False)


@cases(
    "changed, found",
    ({"setup": 3}, "_setup_devices is int, not a cached property"),
    ({"setup": lambda self, device: AcceleratorState._reset_state("use_configured_state")}, "takes (self, device)"),
    ({"setup": lambda self: AcceleratorState._reset_state()}, "does not read 'use_configured_state'"),
    (
        {"setup": lambda self: None, "prepare": lambda self: AcceleratorState._reset_state(True)},
        "the state is reset in prepare",
    ),
    ({"drop": ["use_cpu", "bf16"]}, "no field use_cpu, bf16"),
    ({"config": dict}, "AcceleratorConfig"),
    ({"config": None}, "AcceleratorConfig (None)"),
    ({"TrainingArguments": None}, "TrainingArguments is None"),
)
def test_another_shape_is_described(changed, found):
    problems = examine(module(**changed)).problems
    assert any(found in problem for problem in problems), problems


def arguments(**values):
    return types.SimpleNamespace(**values)


@pytest.mark.parametrize("strategy", training_args.STRATEGIES)
@pytest.mark.parametrize("made_by_arguments, configured", [(False, False), (True, False), (False, True)])
def test_what_a_strategy_keeps(strategy, made_by_arguments, configured):
    assert not keeps_state(arguments(), strategy, configured=False)  # there is no state
    Accelerator(cpu=True)
    if made_by_arguments:
        PartialState._shared_state[training_args._MADE_HERE] = True
    kept = strategy != "conditional" or not (made_by_arguments or configured)
    assert keeps_state(arguments(), strategy, configured) is kept
    assert keeps_state(arguments(preserve_accelerator_state=True), strategy, configured) is kept


def test_a_reset_against_the_strategy_is_said_aloud():
    Accelerator(cpu=True)
    with pytest.warns(UserWarning, match='reset the accelerator state, although.*strategy="flag"'):
        assert not keeps_state(arguments(preserve_accelerator_state=False), "preserve", configured=False)


def test_a_contradiction_is_refused():
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="preserve_accelerator_state=False.*use_configured_state=True"):
        keeps_state(arguments(preserve_accelerator_state=False), "flag", configured=True)


@pytest.mark.parametrize("flag", ["false", 0, None])
def test_the_flag_is_a_boolean(flag):
    with pytest.raises(TypeError, match="preserve_accelerator_state="):
        keeps_state(arguments(preserve_accelerator_state=flag), "preserve", configured=False)
