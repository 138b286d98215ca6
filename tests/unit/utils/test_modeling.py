"""The public path of placement and loading, and the two helpers that live there."""

import contextlib

import pytest
import torch

import accelerate.utils.modeling as modeling
from accelerate.config.enums import DistributedType
from accelerate.config.handlers import AutocastKwargs


def test_every_name_exists_and_the_logger_takes_filters():
    assert all(hasattr(modeling, name) for name in dir(modeling))
    modeling.logger.addFilter(lambda record: True)
    assert modeling.logger.name == "accelerate.utils.modeling"
    modeling.logger.filters.clear()


def test_without_native_amp_nothing_is_cast():
    assert isinstance(modeling.get_mixed_precision_context_manager(), contextlib.nullcontext)


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_autocast_follows_the_state(precision, monkeypatch):
    class State:
        mixed_precision = precision
        device = torch.device("cpu")

    monkeypatch.setattr(modeling, "AcceleratorState", State)
    context = modeling.get_mixed_precision_context_manager(True)
    assert context.device == "cpu" and context._enabled
    off = modeling.get_mixed_precision_context_manager(True, AutocastKwargs(enabled=False, cache_enabled=False))
    assert not off._enabled and not off._cache_enabled


def test_scalers_fit_the_way_of_training():
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    assert type(modeling.get_grad_scaler(init_scale=2.0)) is torch.amp.GradScaler
    assert type(modeling.get_grad_scaler(DistributedType.NO, enabled=False)) is torch.amp.GradScaler
    assert type(modeling.get_grad_scaler(DistributedType.FSDP)) is ShardedGradScaler
    assert type(modeling.get_grad_scaler("FSDP", enabled=False)) is ShardedGradScaler
