"""The two classes that keep the state without a patch of what is installed."""

import pickle

import pytest
import transformers

import transformers_patch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

CLASSES = [transformers_patch.TrainingArguments, transformers_patch.Seq2SeqTrainingArguments]


@pytest.mark.parametrize("cls", CLASSES)
def test_they_keep_the_state_and_leave_transformers_alone(build, cls):
    accelerator = Accelerator(cpu=True)
    arguments = build(cls)
    assert arguments.distributed_state.__dict__ is PartialState().__dict__ and AcceleratorState._shared_state
    assert accelerator.num_processes == 1 and arguments.preserve_accelerator_state is True
    assert "preserve_accelerator_state" not in transformers.TrainingArguments.__dataclass_fields__


@pytest.mark.parametrize("cls", CLASSES)
def test_the_flag_resets(build, cls):
    Accelerator(cpu=True)
    assert build(cls, preserve_accelerator_state=False).to_dict()["preserve_accelerator_state"] is False
    assert not AcceleratorState._shared_state


@pytest.mark.parametrize("cls", CLASSES)
def test_they_are_transformers_classes(build, cls):
    assert isinstance(build(cls), getattr(transformers, cls.__name__))
    parsed = transformers.HfArgumentParser(cls).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "--report_to", "none", "--no_preserve_accelerator_state"]
    )
    assert parsed[0].preserve_accelerator_state is False


@pytest.mark.parametrize("cls", CLASSES)
def test_they_pickle(build, cls):
    arguments = build(cls, preserve_accelerator_state=False)
    again = pickle.loads(pickle.dumps(arguments))
    assert type(again) is cls and again.preserve_accelerator_state is False and again.device == arguments.device


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


def test_disagreement_raises_here_too(build):
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="'bf16'.*'no'"):
        build(transformers_patch.TrainingArguments, bf16=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Arguments'"):
        _ = transformers_patch.Arguments
    assert set(transformers_patch.__all__) <= set(dir(transformers_patch))
