"""Keyword handlers: what reaches torch, and what is refused."""

from datetime import timedelta
from unittest.mock import Mock

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accelerate.config.enums import DDPCommunicationHookType
from accelerate.config.handlers import DistributedDataParallelKwargs as DDPKwargs
from accelerate.config.handlers import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from cases import cases

Hook = DDPCommunicationHookType


def test_timeouts_are_those_of_torchs_backends():
    assert InitProcessGroupKwargs(timeout=90).to_kwargs() == {"timeout": timedelta(seconds=90)}
    assert InitProcessGroupKwargs("gloo").to_kwargs()["timeout"] == timedelta(minutes=30)


def hook_of(**kwargs):
    model = Mock()
    DDPKwargs(**kwargs).register_comm_hook(model)
    return model.register_comm_hook.call_args.kwargs["hook"]


@cases(
    "chosen, expected",
    (Hook.FP16, default_hooks.fp16_compress_hook),
    (Hook.BF16, default_hooks.bf16_compress_hook),
    (Hook.POWER_SGD, powerSGD_hook.powerSGD_hook),
    (Hook.BATCHED_POWER_SGD, powerSGD_hook.batched_powerSGD_hook),
)
def test_each_hook_registers_torchs_function(chosen, expected):
    assert hook_of(comm_hook=chosen) is hook_of(comm_hook=chosen.value) is expected
    for wrapper in (Hook.FP16, Hook.BF16):
        wrapped = hook_of(comm_hook=chosen, comm_wrapper=wrapper)
        assert wrapped.__qualname__.startswith(f"{wrapper}_compress_wrapper.")
        assert wrapped.__closure__[0].cell_contents is expected


@cases(
    "kind, given, message",
    (DDPKwargs, {"comm_hook": "gzip"}, "'gzip'.*'power_sgd'"),
    (DDPKwargs, {"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "comm_wrapper is power_sgd.*no, fp16, bf16"),
    (GradientAccumulationPlugin, {"num_steps": 0}, "num_steps is 0"),
    (GradientAccumulationPlugin, {"sync_with_dataloader": False, "exact": True}, "exact=True needs sync_with_data"),
    (TorchDynamoPlugin, {"backend": "gcc"}, "'GCC' is not a valid DynamoBackend.*'INDUCTOR'"),
)
def test_wrong_values_are_named(kind, given, message):
    with pytest.raises(ValueError, match=message):
        kind(**given)


def test_a_hook_that_is_set_later_and_settings_without_effect():
    handler = DDPKwargs()
    handler.register_comm_hook(object())
    handler.comm_hook = "gzip"
    with pytest.raises(ValueError, match="gzip"):
        handler.register_comm_hook(Mock())
    with pytest.warns(UserWarning, match="comm_wrapper=bf16 has no effect"):
        DDPKwargs(comm_wrapper="bf16")
    with pytest.warns(UserWarning, match="comm_state_option has no effect with comm_hook=fp16"):
        DDPKwargs(comm_hook="fp16", comm_state_option={"random_seed": 1})
