"""The prepared scheduler."""

import warnings

import pytest
import torch

from accelerate import Accelerator, ParallelismConfig


def build(accelerator, make=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)):
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return accelerator.prepare(inner, make(inner))


@pytest.mark.parametrize(("adjust", "counted"), [(True, 2), (False, 1)])
def test_it_waits_while_gradients_accumulate(adjust, counted):
    accelerator = Accelerator(cpu=True)
    optimizer, scheduler = build(accelerator)
    accelerator.gradient_state.plugin_kwargs["adjust_scheduler"] = adjust
    accelerator.sync_gradients = False
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0] and scheduler.scheduler._step_count == counted


@pytest.mark.parametrize(("split", "expected"), [(False, 0.5**4), (True, 0.5)])
def test_it_advances_once_per_data_parallel_replica(split, expected, monkeypatch):
    accelerator = Accelerator(cpu=True)
    optimizer, scheduler = build(accelerator)
    scheduler.split_batches = split
    monkeypatch.setitem(accelerator.state.__dict__, "num_processes", 4)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [expected]
    scheduler.split_batches = False
    monkeypatch.setitem(
        accelerator.state.__dict__, "parallelism_config", ParallelismConfig(dp_shard_size=2, tp_size=2)
    )
    assert scheduler.steps_per_update == 2, "with a mesh, ranks that share a batch are one replica"
    shared = ParallelismConfig(sp_size=2)
    monkeypatch.setitem(accelerator.state.__dict__, "parallelism_config", shared)
    assert scheduler.steps_per_update == 2, "so are ranks that share sequences by DeepSpeed, which has no mesh"


def one_cycle(total):
    return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total)


@pytest.mark.parametrize(("total", "replicas", "warns"), [(20, 2, 0), (10, 2, 1), (30, 2, 1), (40, 2, 0), (5, 1, 1)])
def test_total_steps_that_contradict_the_loader_are_named_once(total, replicas, warns, monkeypatch):
    accelerator = Accelerator(cpu=True)
    _, scheduler = build(accelerator, one_cycle(total))
    monkeypatch.setitem(accelerator.state.__dict__, "num_processes", replicas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.check_length(updates_per_epoch=10)
    assert len([item for item in caught if f"total_steps={total}" in str(item.message)]) == warns


def test_prepare_checks_against_the_prepared_loader():
    accelerator = Accelerator(cpu=True)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    loader = torch.utils.data.DataLoader(torch.arange(20), batch_size=2)
    with pytest.warns(UserWarning, match="total_steps=3"):
        optimizer, _, scheduler = accelerator.prepare(inner, loader, one_cycle(3)(inner))
    for _ in range(5):
        optimizer.step()
        scheduler.step()  # an exhausted schedule does not raise
