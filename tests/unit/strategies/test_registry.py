"""The strategy registry: matching, loading, and strategies that are not there."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate import Accelerator, ParallelismConfig
from accelerate.config import strategies
from accelerate.config.enums import DistributedType
from accelerate.strategies import registry
from accelerate.strategies.base import Strategy
from accelerate.strategies.state_io import StateIO
from cases import cases


@cases(
    "kind, settings, name",
    (DistributedType.NO, {}, "single"),
    (DistributedType.MULTI_CPU, {}, "ddp"),
    (DistributedType.MULTI_NPU, {}, "ddp"),
    (DistributedType.FSDP, {"is_fsdp2": True, "parallelism_config": ParallelismConfig(2, 2, 2)}, "fsdp2"),
    (DistributedType.MULTI_CPU, {"parallelism_config": ParallelismConfig(2)}, "ddp"),
    (DistributedType.MULTI_GPU, {"parallelism_config": ParallelismConfig(tp_size=2)}, "tensor_parallel"),
)
def test_a_state_finds_its_strategy(kind, settings, name):
    assert registry.resolve(SimpleNamespace(distributed_type=kind, **settings)).name == name


@pytest.mark.parametrize(
    "first", [{"matches": lambda state: True}, {"kinds": (DistributedType.FSDP,)}], ids=["looks", "serves the type"]
)
def test_a_strategy_in_front_of_the_one_that_was_asked_for_is_meant(monkeypatch, first):
    """As pipelines are, whose stages FSDP2 shards."""
    refined = strategies.StrategySpec("refined", "m:Refined", **first)
    monkeypatch.setattr(strategies, "specs", lambda: [refined, *strategies._CORE])
    state = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True)
    assert strategies.serving(state) is refined


def test_a_strategy_that_was_asked_for_and_comes_too_late_is_no_silent_ddp(monkeypatch):
    late = strategies.StrategySpec("late", "m:Late", matches=lambda state: True, switch="use_late")
    monkeypatch.setattr(strategies, "specs", lambda: [*strategies._CORE, late])
    with pytest.raises(ValueError, match="--use_late asks for the strategy 'late', but the run gets 'ddp'.*below 50"):
        registry.resolve(SimpleNamespace(distributed_type=DistributedType.MULTI_CPU))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="single.*ddp"):
        registry.load("horovod")


class Wrapped(nn.Module):
    """A wrapper that only the strategy of another package knows."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, batch):
        return self.inside(batch)


class Wrapping(Strategy):
    """The strategy of another package, which puts a separate wrapper around models."""

    def wrap_model(self, accelerator, model):
        return Wrapped(model)

    def unwrap_model(self, model, keep_fp32_wrapper=True, keep_torch_compile=True):
        return model.inside if isinstance(model, Wrapped) else model


def test_states_have_the_names_of_the_model_inside_a_third_partys_wrapper(monkeypatch, tmp_path):
    records = list(strategies.specs())
    monkeypatch.setattr(strategies, "specs", lambda: records)
    monkeypatch.setattr(registry, "imported", lambda address: Wrapping if address == "m:Wrapping" else StateIO)
    strategies.register(strategies.StrategySpec("wrapping", "m:Wrapping", matches=lambda state: True))
    accelerator = Accelerator(cpu=True)
    try:
        model = accelerator.prepare(nn.Linear(2, 1))
        assert isinstance(model, Wrapped) and accelerator._strategy.name == "wrapping"
        assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]
        assert [name for bucket in accelerator.stream_weights(model) for name in bucket] == ["weight", "bias"]
        accelerator.save_state(tmp_path / "checkpoint")
        kept = model.inside.weight.detach().clone()
        nn.init.zeros_(model.inside.weight)
        accelerator.load_state(tmp_path / "checkpoint")
        assert torch.equal(model.inside.weight, kept)
    finally:
        for cached in (registry.load, registry.load_state_io, strategies.wrappers, strategies.traits_of):
            cached.cache_clear()


def test_clipping_takes_one_parameter_or_many():
    backend = registry.load("tensor_parallel")
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert backend.clip_grad_norm(None, first, 10.0, 2.0).item() == pytest.approx(3)
    assert backend.clip_grad_norm(None, (p for p in (first, second)), 1.0, 2.0).item() == pytest.approx(5)
    torch.testing.assert_close(second.grad, torch.tensor([0.8]), atol=1e-5, rtol=0)
    backend.clip_grad_value(None, second, 0.5)
    assert second.grad.item() == 0.5
    backend.clip_grad_value(None, [first], 0.25)
    assert first.grad.item() == 0.25
