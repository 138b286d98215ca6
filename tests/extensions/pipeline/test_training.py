"""What a pipeline refuses before it is made; training is compared on real processes by `check_pipeline.py`."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from accelerate import Accelerator, ParallelismConfig, comm
from accelerate.extensions.pipeline.pipeline import Holdings, _Batch, _only_loss, _place
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, is_torch_version
from cases import cases
from sharded_samples import fake_group

OLD = pytest.mark.skipif(is_torch_version("<", "2.10"), reason="pipelines train with torch 2.10 or newer")


@pytest.fixture(autouse=True)
def _fresh(place):
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _two():
    return ParallelismConfig(pp_size=2)


@cases(
    "options, text",
    ({"fsdp_plugin": lambda: FullyShardedDataParallelPlugin(fsdp_version=1)}, "trains without another strategy"),
    ({"mixed_precision": lambda: "fp16"}, "gradient scaler"),
)
def test_settings_that_no_pipeline_has(options, text):
    made = {name: make() for name, make in options.items()}
    with pytest.raises(ValueError, match=text):
        Accelerator(cpu=True, parallelism_config=_two(), **made)
    assert Accelerator(cpu=True).mixed_precision == "no"  # nothing is left of the refused one


def test_models_that_are_not_divided():
    accelerator = Accelerator(cpu=True, parallelism_config=_two())
    for prepare in (accelerator.prepare, accelerator.prepare_model):
        with pytest.raises(ValueError, match=r"prepare_pipeline\(model|pp_size=2 = 2, but 1 process"):
            prepare(nn.Linear(2, 2))
    teacher = nn.Linear(2, 2)
    assert accelerator.prepare_model(teacher, evaluation_mode=True) is teacher
    with pytest.raises(ValueError, match=r"pipeline\.parameters"):
        accelerator.prepare(torch.optim.SGD(teacher.parameters()))


def test_stages_of_transformers_are_refused_for_training(monkeypatch):
    if "transformers" not in sys.modules:  # without it no model is asked whether it is such a stage
        monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    model, accelerator = nn.Linear(2, 2), Accelerator(cpu=True)
    model._pp_stage = SimpleNamespace(pp_size=2)
    for prepare in (accelerator.prepare, accelerator.prepare_model):
        with pytest.raises(
            ValueError, match=r"Linear was loaded as one of 2 pipeline stages.*prepare_pipeline\(model"
        ):
            prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


@cases(
    "options, text",
    ({"schedule": "GPipes"}, "choose one of GPipe, 1F1B"),
    ({"microbatches": 0}, "microbatches=0.*at least 2"),
    ({"microbatches": 3, "schedule": "Interleaved1F1B"}, "a multiple of 2"),
    ({"microbatches": 2, "schedule": "ZBVZeroBubble"}, "at least 3"),
    ({"model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))}, "'1' of Sequential normalises over the batch"),
    ({"model": nn.Linear(2, 2, device="meta")}, "'weight' of Linear is on the meta device"),
    ({"model": nn.Linear(2, 2).requires_grad_(False)}, "no trainable parameter"),
)
@OLD
def test_arguments(options, text):
    accelerator = Accelerator(cpu=True, parallelism_config=_two())
    with pytest.raises(ValueError, match=text):
        accelerator.prepare_pipeline(options.pop("model", nn.Linear(2, 2)), **options)


@OLD
def test_settings_of_the_run(monkeypatch):
    """An fp8 library that the environment names computes nothing without fp8, and refuses nothing; a compiler and whole shards do."""
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    plain = Accelerator(cpu=True, parallelism_config=_two())
    with pytest.raises(ValueError, match="no trainable parameter"):
        plain.prepare_pipeline(nn.Linear(2, 2).requires_grad_(False))
    AcceleratorState._reset_state(reset_partial_state=True)
    shards = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2))
    with pytest.raises(ValueError, match="dp_shard_size=2 shards parameters, which needs FSDP"):
        shards.prepare_pipeline(nn.Linear(2, 2))
    AcceleratorState._reset_state(reset_partial_state=True)
    compiled = Accelerator(cpu=True, parallelism_config=_two(), dynamo_backend="inductor")
    with pytest.raises(ValueError, match="dynamo_backend=INDUCTOR with pp_size=2"):
        compiled.prepare_pipeline(nn.Linear(2, 2))


def test_without_ranks():
    with pytest.raises(ValueError, match=r"ParallelismConfig\(pp_size=2\)"):
        Accelerator(cpu=True).prepare_pipeline(nn.Linear(2, 2))


def test_where_stages_are():
    assert [_place("Interleaved1F1B", stage, 2) for stage in range(4)] == [0, 1, 0, 1]
    assert [_place("ZBVZeroBubble", stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_samples_of_a_short_batch():
    batch = _Batch(5, 2, torch.arange(5), 1.0)
    assert [batch.samples(place) for place in range(4)] == [2, 2, 1, 0]
    assert [batch.target_of(place).tolist() for place in range(4)] == [[0, 1], [2, 3], [4], [4]]


def test_the_loss_of_a_model():
    loss = torch.ones(())
    for output in (loss, {"loss": loss}, (loss, torch.ones(3)), loss.reshape(1)):
        assert torch.equal(_only_loss(output)[0], loss)
    for output in (torch.ones(3), {"scores": loss}, None):
        with pytest.raises(ValueError, match="without a loss"):
            _only_loss(output)


def test_groups_of_what_stages_share_are_as_many_whatever_the_pipelines():
    holders = {"tied": (0, 7), "all": tuple(range(8)), "elsewhere": (1, 2), "alone": (0,)}
    with fake_group(0, 1024):
        everybody = torch.distributed.group.WORLD
        held = Holdings({}, holders, 0, range(0, 1024, 128), everybody, [], frozenset())
        with mock.patch.object(torch.distributed, "new_group", wraps=torch.distributed.new_group) as made:
            groups = held.make_groups()
        assert made.call_count == 1 and groups.keys() == {"tied", "all"} and groups["all"] is everybody
        assert torch.distributed.get_process_group_ranks(groups["tied"]) == [0, 896]
        comm.forget()
