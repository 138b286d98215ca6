"""Applying and taking back: in place, exactly, once, from several threads."""

import contextlib
import dataclasses
import inspect
import threading

import pytest
import transformers

import transformers_patch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from transformers_patch import engine, registry
from transformers_patch.registry import Finding


@dataclasses.dataclass
class Early(transformers.TrainingArguments):
    """A subclass that was made before the patch, as TRL's configurations are."""

    extra: int = 3


def picture():
    classes = (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments, Early)
    attributes = [{name: id(value) for name, value in vars(cls).items()} for cls in classes]
    return attributes, [(list(cls.__dataclass_fields__), inspect.signature(cls)) for cls in classes]


def is_kept(build, cls, **options):
    """Build arguments next to a live Accelerator; return whether they share its state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    arguments = build(cls, **options)
    shared = arguments.distributed_state.__dict__ is PartialState().__dict__ and bool(AcceleratorState._shared_state)
    assert accelerator.num_processes == 1
    return shared


@pytest.mark.parametrize("cls", [transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments, Early])
@pytest.mark.parametrize("strategy", ["preserve", "flag", "conditional"])
def test_patched_classes_and_their_subclasses_keep_the_state(build, cls, strategy):
    assert not is_kept(build, cls)
    transformers_patch.apply(strategy)
    assert is_kept(build, cls) and is_kept(build, cls, preserve_accelerator_state=True)
    assert is_kept(build, cls, accelerator_config={"use_configured_state": True})  # transformers' own switch
    with pytest.warns(UserWarning, match="reset") if strategy == "preserve" else contextlib.nullcontext():
        assert not is_kept(build, cls, preserve_accelerator_state=False)


def test_without_a_state_the_arguments_are_upstreams(build):
    usual = build(transformers.TrainingArguments)
    AcceleratorState._reset_state(reset_partial_state=True)
    transformers_patch.apply()
    patched = build(transformers.TrainingArguments)
    assert patched.device == usual.device and patched.n_gpu == usual.n_gpu and patched.world_size == usual.world_size
    known = {**usual.to_dict(), "preserve_accelerator_state": True}
    assert {name for name in known if known[name] != patched.to_dict()[name]} <= {"logging_dir"}  # the time of day
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match="use_configured_state"):
        build(transformers.TrainingArguments, accelerator_config={"use_configured_state": True})


def test_arguments_that_disagree_change_nothing(build):
    transformers_patch.apply()
    accelerator = Accelerator(cpu=True)
    config = transformers.trainer_pt_utils.AcceleratorConfig()
    with pytest.raises(ValueError, match="'bf16'.*'no'"):
        build(transformers.TrainingArguments, bf16=True, accelerator_config=config)
    assert config.use_configured_state is False and accelerator.state.mixed_precision == "no"
    assert AcceleratorState._shared_state


def test_revert_restores_exactly_and_both_are_idempotent():
    before = picture()
    for _ in range(2):
        transformers_patch.apply()
        transformers_patch.apply()
        transformers_patch.apply("flag")
        assert picture() != before
        transformers_patch.revert()
        transformers_patch.revert()
        assert picture() == before


def test_a_block_ends_with_what_held_before():
    before = picture()
    with transformers_patch.applied():
        with transformers_patch.applied("flag"):
            assert transformers_patch.status()[0].applied == "flag"
        assert transformers_patch.status()[0].applied == "preserve"
    assert picture() == before
    transformers_patch.apply("conditional")
    with pytest.raises(KeyError), transformers_patch.applied("flag"):
        raise KeyError
    assert transformers_patch.status()[0].applied == "conditional"
    with transformers_patch.applied():
        transformers_patch.revert()
        assert picture() == before
    assert picture() == before


def test_blocks_of_several_threads_may_overlap(build):
    before = picture()
    entered, leave = threading.Barrier(3), [threading.Event(), threading.Event()]

    def use(event):
        with transformers_patch.applied():
            entered.wait(30)
            event.wait(30)

    threads = [threading.Thread(target=use, args=[event]) for event in leave]
    for thread in threads:
        thread.start()
    entered.wait(30)
    leave[0].set()
    threads[0].join()
    assert picture() != before and is_kept(build, transformers.TrainingArguments)
    leave[1].set()
    threads[1].join()
    assert picture() == before


def test_an_unknown_strategy_is_named():
    before = picture()
    with pytest.raises(ValueError, match="strategy='keep' is not known.*'preserve', 'flag', 'conditional'"):
        transformers_patch.apply("keep")
    with pytest.raises(ValueError, match="'keep'"), transformers_patch.applied("keep"):
        pass
    with pytest.raises(ValueError, match="checkpoints='later' is not known.*True, False or 'async'"):
        transformers_patch.apply(checkpoints="later")
    assert picture() == before


def test_a_patch_that_fails_half_way_is_taken_back(monkeypatch):
    before = picture()

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr("transformers_patch.fields.add", fail)
    with pytest.raises(MemoryError):
        transformers_patch.apply()
    assert picture() == before and transformers_patch.status()[0].applied is None


def test_a_release_that_does_not_reset_is_left_alone(monkeypatch):
    before = picture()
    monkeypatch.setattr("transformers_patch.training_args.examine", lambda module: Finding((), False))
    with pytest.warns(UserWarning, match="not needed any more.*Remove the call") as caught:
        transformers_patch.apply()
    assert caught[0].filename == __file__ and picture() == before
    assert transformers_patch.status()[0].verdict == "not needed"
    absent = dataclasses.replace(registry.ENTRIES[0], target="not_there_at_all:A", package="not_there_at_all")
    monkeypatch.setattr(engine, "ENTRIES", (absent,))
    assert transformers_patch.status()[0].verdict == "not installed"
