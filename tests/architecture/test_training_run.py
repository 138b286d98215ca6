"""`training.run.TrainingRun` lists what `training` and extensions use of an Accelerator; mypy reports what it does not list."""

import ast

from accelerate import Accelerator
from accelerate.runtime.run import Run
from accelerate.training.run import TrainingRun
from architecture import source

ROOMS = ("accelerate.training.", "accelerate.extensions.")
TRAINING = [path for name, path in source.modules().items() if name.startswith(ROOMS)]


def members(protocol: type) -> set[str]:
    """Return the names that a protocol declares itself: annotated attributes, properties and methods."""
    methods = {name for name, member in vars(protocol).items() if callable(member) or isinstance(member, property)}
    return {name for name in {*protocol.__annotations__, *methods} if not name.startswith("__")}


def used_attributes() -> set[str]:
    """Return the attributes that these rooms read, call or assign of `accelerator`, `self.accelerator`, `self.run` and the like."""
    return {
        node.attr
        for path in TRAINING
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.Attribute)
        if ast.unparse(node.value).rpartition(".")[2].removeprefix("_") in ("accelerator", "run")
    }


def test_accelerator_has_each_member():
    accelerator = Accelerator(cpu=True)
    declared = members(Run) | members(TrainingRun)
    missing = {name for name in declared - set(Accelerator.__annotations__) if not hasattr(accelerator, name)}
    assert not missing


def test_training_uses_each_member():
    unused = members(TrainingRun) - used_attributes()
    assert not unused


def test_members_of_a_protocol_are_recognised():
    assert {"step", "is_main_process", "save_state"} <= members(TrainingRun)
    assert "device" not in members(TrainingRun)
