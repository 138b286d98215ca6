"""The two classes that keep the state without a patch of what is installed."""

import importlib.util
import pickle
import sys

import pytest
import transformers

import transformers_patch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from transformers_patch import arguments, registry

CLASSES = [transformers_patch.TrainingArguments, transformers_patch.Seq2SeqTrainingArguments]


@pytest.mark.parametrize("cls", CLASSES)
def test_they_keep_the_state_or_reset_it_and_leave_transformers_alone(build, cls):
    accelerator = Accelerator(cpu=True)
    built = build(cls)
    assert isinstance(built, getattr(transformers, cls.__name__)) and built.preserve_accelerator_state is True
    assert built.distributed_state.__dict__ is PartialState().__dict__ and AcceleratorState._shared_state
    assert accelerator.num_processes == 1
    assert "preserve_accelerator_state" not in transformers.TrainingArguments.__dataclass_fields__
    words = ["--output_dir", "out", "--use_cpu", "--report_to", "none", "--no_preserve_accelerator_state"]
    (parsed,) = transformers.HfArgumentParser(cls).parse_args_into_dataclasses(words)
    assert parsed.to_dict()["preserve_accelerator_state"] is False and not AcceleratorState._shared_state
    again = pickle.loads(pickle.dumps(parsed))
    assert type(again) is cls and again.preserve_accelerator_state is False and again.device == parsed.device


def test_an_applied_patch_and_the_classes_go_together(build):
    with transformers_patch.applied():
        Accelerator(cpu=True)
        assert build(transformers_patch.TrainingArguments).preserve_accelerator_state
        assert AcceleratorState._shared_state
        with pytest.warns(UserWarning, match='strategy="flag"'):
            build(transformers_patch.TrainingArguments, preserve_accelerator_state=False)
        assert not AcceleratorState._shared_state
    Accelerator(cpu=True)
    build(transformers_patch.TrainingArguments)
    assert AcceleratorState._shared_state


def test_where_nothing_resets_the_flag_says_that_it_does_nothing(build, monkeypatch):
    monkeypatch.setattr(registry.Entry, "check", lambda self: registry.Finding((), needed=False))
    spec = importlib.util.spec_from_file_location("arguments_of_a_later_release", arguments.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for cls in (module.TrainingArguments, module.Seq2SeqTrainingArguments):
        assert build(cls).preserve_accelerator_state is True
        with pytest.warns(UserWarning, match="preserve_accelerator_state=False is not applied") as caught:
            build(cls, preserve_accelerator_state=False)
        assert cls._setup_devices is transformers.TrainingArguments._setup_devices
        assert caught[0].message.args[0].count(transformers.__version__) == 1
