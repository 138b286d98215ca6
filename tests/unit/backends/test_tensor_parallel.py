"""The backend of tensor parallelism alone, by what it adds to others; the layers are split in tests of several processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate.backends import registry
from accelerate.config.enums import DistributedType
from accelerate.parallelism_config import ParallelismConfig


@pytest.fixture
def backend():
    return registry.load("tensor_parallel")


def state(kind, **sizes):
    layout = ParallelismConfig(**sizes) if sizes else None
    return SimpleNamespace(distributed_type=kind, parallelism_config=layout, is_fsdp2=True)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (state(DistributedType.MULTI_CPU, tp_size=2), "tensor_parallel"),
        (state(DistributedType.MULTI_GPU, tp_size=2), "tensor_parallel"),
        (state(DistributedType.MULTI_CPU, dp_replicate_size=2), "ddp"),
        (state(DistributedType.FSDP, tp_size=2, dp_shard_size=2), "fsdp2"),
    ],
)
def test_when_it_serves(given, name):
    assert registry.resolve(given).name == name


def test_a_model_is_left_as_it_was_split(backend):
    model = nn.Linear(2, 2)
    assert backend.wrap_model(None, model) is model
    assert not backend.needs_wrapper(None, model)
    assert not backend.synchronises and not backend.saves_shards


def test_clipping_takes_one_parameter_or_many(backend):
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert backend.clip_grad_norm(None, first, 10.0, 2.0).item() == pytest.approx(3)
    assert backend.clip_grad_norm(None, (p for p in (first, second)), 1.0, 2.0).item() == pytest.approx(5)
    torch.testing.assert_close(second.grad, torch.tensor([0.8]), atol=1e-5, rtol=0)
    backend.clip_grad_value(None, second, 0.5)
    assert second.grad.item() == 0.5
    backend.clip_grad_value(None, [first], 0.25)
    assert first.grad.item() == 0.25


def test_checkpoints_are_those_of_a_run_without_it(backend):
    assert backend.layout(None, "model") == backend.layout(None, "optimizer") == "full"
