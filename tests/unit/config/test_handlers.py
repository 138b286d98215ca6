"""Keyword handlers: what reaches torch, and what is refused."""

import os
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accelerate.config import env
from accelerate.config.enums import DDPCommunicationHookType
from accelerate.config.handlers import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from accelerate.config.handlers import DistributedDataParallelKwargs as DDPKwargs

Hook = DDPCommunicationHookType


@dataclass
class Sample(KwargsHandler):
    number: int = 1
    words: list = field(default_factory=list)
    read: str | None = None

    def __post_init__(self):
        env.fill(self, {"read": ("dynamo_mode", "usual")})


def test_to_kwargs_holds_what_differs_from_a_handler_built_without_arguments_and_variables(monkeypatch):
    sample = Sample(words=["a"])
    sample.to_dict()["words"].append("b")
    assert sample.words == ["a"] and sample.to_kwargs() == {"words": ["a"]} and Sample().to_kwargs() == {}
    sample = Sample(number=2)
    sample.extra = None
    assert sample.to_kwargs() == {"number": 2, "extra": None}
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "other")
    before = dict(os.environ)
    assert Sample().to_kwargs() == {"read": "other"}
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (AutocastKwargs(), {}),
        (AutocastKwargs(enabled=False), {"enabled": False}),
        (GradScalerKwargs(init_scale=8.0, growth_interval=3), {"init_scale": 8.0, "growth_interval": 3}),
        (InitProcessGroupKwargs(), {}),
        (InitProcessGroupKwargs("gloo"), {"backend": "gloo", "timeout": timedelta(minutes=30)}),
        (InitProcessGroupKwargs(None), {"backend": None, "timeout": timedelta(minutes=30)}),
        (InitProcessGroupKwargs(timeout=90), {"timeout": timedelta(seconds=90)}),
        (ProfileKwargs(), {}),
        (TorchDynamoPlugin(backend="Inductor", disable=True), {"backend": "inductor", "disable": True}),
        (GradientAccumulationPlugin(), {}),
        (GradientAccumulationPlugin(num_steps=4, exact=True), {"num_steps": 4, "exact": True}),
        (DDPKwargs(dim=1, comm_hook="power_sgd", comm_state_option={"random_seed": 3}), {"dim": 1}),
    ],
    ids=str,
)
def test_arguments_for_torch(handler, expected):
    assert handler.to_kwargs() == expected


class WrappedModel:
    """Stands in for DistributedDataParallel: keeps what is registered on it."""

    def register_comm_hook(self, state, hook):
        self.state, self.hook = state, hook


def registered(**kwargs):
    model = WrappedModel()
    DDPKwargs(**kwargs).register_comm_hook(model)
    return model


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Hook.FP16, default_hooks.fp16_compress_hook),
        (Hook.BF16, default_hooks.bf16_compress_hook),
        (Hook.POWER_SGD, powerSGD_hook.powerSGD_hook),
        (Hook.BATCHED_POWER_SGD, powerSGD_hook.batched_powerSGD_hook),
    ],
)
def test_each_hook_registers_torchs_function(chosen, expected):
    assert registered(comm_hook=chosen).hook is expected
    assert registered(comm_hook=chosen.value).hook is expected
    for wrapper in (Hook.FP16, Hook.BF16):
        wrapped = registered(comm_hook=chosen, comm_wrapper=wrapper).hook
        assert wrapped.__qualname__.startswith(f"{wrapper}_compress_wrapper.")
        assert wrapped.__closure__[0].cell_contents is expected


def test_power_sgd_gets_its_state():
    option = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 7, "warm_start": False}
    state = registered(comm_hook="power_sgd", comm_state_option=option).state
    assert isinstance(state, powerSGD_hook.PowerSGDState)
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter, state.warm_start) == (3, 7, False)
    assert registered(comm_hook="fp16").state is None


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (DDPKwargs, {"comm_hook": "gzip"}, "'gzip'.*'power_sgd'"),
        (DDPKwargs, {"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "comm_wrapper is power_sgd.*no, fp16, bf16"),
        (GradientAccumulationPlugin, {"num_steps": 0}, "num_steps is 0"),
        (
            GradientAccumulationPlugin,
            {"sync_with_dataloader": False, "exact": True},
            "exact=True needs sync_with_data",
        ),
        (TorchDynamoPlugin, {"backend": "gcc"}, "'GCC' is not a valid DynamoBackend.*'INDUCTOR'"),
    ],
)
def test_wrong_values_are_named(kind, given, message):
    with pytest.raises(ValueError, match=message):
        kind(**given)


def test_a_hook_that_is_set_later_and_settings_without_effect():
    handler = DDPKwargs()
    handler.register_comm_hook(object())
    handler.comm_hook = "gzip"
    with pytest.raises(ValueError, match="gzip"):
        handler.register_comm_hook(WrappedModel())
    with pytest.warns(UserWarning, match="comm_wrapper=bf16 has no effect"):
        DDPKwargs(comm_wrapper="bf16")
    with pytest.warns(UserWarning, match="comm_state_option has no effect with comm_hook=fp16"):
        DDPKwargs(comm_hook="fp16", comm_state_option={"random_seed": 1})


def test_profile_builds_torchs_profiler():
    traces = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready=traces.append,
        record_shapes=True,
        with_flops=True,
    )
    profiler = handler.build()
    assert list(profiler.activities) == [torch.profiler.ProfilerActivity.CPU]
    assert (profiler.record_shapes, profiler.with_flops, profiler.with_stack) == (True, True, False)
    assert profiler.on_trace_ready == traces.append
    actions = [profiler.schedule(step) for step in range(4)]
    action = torch.profiler.ProfilerAction
    assert actions == [action.NONE, action.WARMUP, action.RECORD_AND_SAVE, action.NONE]


def test_profile_activities():
    assert set(ProfileKwargs().build().activities) == set(torch.profiler.supported_activities())
    with pytest.raises(ValueError, match="Invalid profiler activity: 'tpu'.*cpu.*cuda"):
        ProfileKwargs(activities=["cpu", "tpu"]).build()
