"""Warnings of schedules whose length does not fit the prepared loader."""

import warnings

import pytest
import torch

from accelerate import Accelerator
from accelerate.extensions.prepare_checks.checks import check_length


def one_cycle(total):
    return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total)


@pytest.mark.parametrize(("total", "replicas", "warns"), [(20, 2, 0), (10, 2, 1), (30, 2, 1), (40, 2, 0), (5, 1, 1)])
def test_total_steps_that_contradict_the_loader_are_named_once(total, replicas, warns, monkeypatch):
    accelerator = Accelerator(cpu=True)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    _, scheduler = accelerator.prepare(inner, one_cycle(total)(inner))
    monkeypatch.setitem(accelerator.state.__dict__, "num_processes", replicas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_length(scheduler, 10)
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


def test_prepare_checks_against_the_loader_that_shuffles():
    accelerator = Accelerator(cpu=True)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    evaluation = torch.utils.data.DataLoader(torch.arange(20), batch_size=2)
    training = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(evaluation, training, inner, one_cycle(4)(inner))
    accelerator = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="total_steps=3.*makes 4 optimizer steps"):
        accelerator.prepare(evaluation, training, inner, one_cycle(3)(inner))
