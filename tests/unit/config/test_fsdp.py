import os

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from cases import cases


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the plugin may set it; monkeypatch restores it


@cases(
    "options, message",
    ({"sharding_strategy": "bogus"}, "sharding_strategy is 'bogus'.*FULL_SHARD"),
    ({"reshard_after_forward": True}, "reshard_after_forward"),
    ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "reshard_after_forward"),
    ({"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD"}, "HYBRID_SHARD.*ParallelismConfig"),
    ({"fsdp_version": 2, "reshard_after_forward": 1}, "reshard_after_forward is 1; .*two at least"),
    ({"fsdp_version": 3}, "fsdp_version"),
    ({"fsdp_version": 2, "forward_prefetch": False}, "forward_prefetch is False"),
    ({"fsdp_version": 2, "forward_prefetch": 0}, "forward_prefetch is 0; .*at least one"),
    ({"fsdp_version": 2, "backward_prefetch": -1}, "backward_prefetch is -1; .*at least one"),
    ({"forward_prefetch": 2}, "forward_prefetch is 2"),
    ({"cpu_offload": fsdp.OffloadPolicy()}, "cpu_offload"),
    ({"fsdp_version": 2, "cpu_offload": fsdp.CPUOffload(True)}, "cpu_offload"),
    ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "LOCAL_STATE_DICT"),
    ({"auto_wrap_policy": "bogus"}, "auto_wrap_policy is 'bogus'"),
    ({"activation_checkpointing_offload": True}, "activation_checkpointing_offload"),
    *(
        ({"fsdp_version": 2, "mixed_precision_policy": policy}, "mixed_precision|param_dtype")
        for policy in ({"buffer_dtype": "bf16"}, "no", {"param_dtype": "nothing"}, fsdp.MixedPrecision())
    ),
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        Plugin(**options)


def test_units_that_are_gathered_ahead_are_counted(monkeypatch, caplog):
    plugin = Plugin(fsdp_version=2, forward_prefetch=2, backward_prefetch="3")
    assert (plugin.forward_prefetch, plugin.backward_prefetch) == (2, 3) and not caplog.text
    monkeypatch.setenv("FSDP_FORWARD_PREFETCH", "false")  # what the launcher says by default
    assert Plugin(fsdp_version=2).forward_prefetch is None
    monkeypatch.setenv("FSDP_FORWARD_PREFETCH", "4")
    assert Plugin(fsdp_version=2).forward_prefetch == 4
    Plugin(fsdp_version=2, backward_prefetch=2, reshard_after_forward=False)
    assert "backward_prefetch=2 has no effect" in caplog.text


def test_contradicting_strategies_warn():
    with pytest.warns(UserWarning, match="SHARD_GRAD_OP disagrees"):
        plugin = Plugin(sharding_strategy="FULL_SHARD", reshard_after_forward="SHARD_GRAD_OP")
    assert plugin.sharding_strategy is fsdp.ShardingStrategy.FULL_SHARD


def test_a_state_dict_config_that_does_not_fit_the_type_is_replaced_and_said(caplog):
    mine = fsdp.FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    assert Plugin(state_dict_config=mine).state_dict_config is mine and not caplog.text
    plugin = Plugin(state_dict_type="SHARDED_STATE_DICT", state_dict_config=mine)
    assert isinstance(plugin.state_dict_config, fsdp.ShardedStateDictConfig) and "state_dict_config" in caplog.text


@cases(
    "options, field, value, said",
    ({"sharding_strategy": "FULL_SHARD"}, "reshard_after_forward", True, "sharding_strategy"),
    ({"backward_prefetch": "BACKWARD_PRE"}, "backward_prefetch", None, "backward_prefetch"),
    ({"sync_module_states": True}, "sync_module_states", None, "sync_module_states"),
    ({"transformer_cls_names_to_wrap": "A,B"}, "transformer_cls_names_to_wrap", ["A", "B"], "auto_wrap_policy"),
)
def test_what_version_2_translates_or_ignores_is_said(options, field, value, said, caplog):
    assert getattr(Plugin(fsdp_version=2, **options), field) == value
    assert said in caplog.text


def test_layers_that_the_model_lacks_and_a_size_that_is_not_given(caplog):
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"])
    with pytest.raises(ValueError, match="holds Block.*Linear, Sequential"):
        plugin.set_auto_wrap_policy(nn.Sequential(nn.Linear(1, 1)))
    Plugin(auto_wrap_policy="transformer_based_wrap").set_auto_wrap_policy(nn.Linear(1, 1))
    assert "_no_split_modules" in caplog.text
    plugin = Plugin(auto_wrap_policy="size_based_wrap", min_num_params="5")
    plugin.set_auto_wrap_policy(nn.Linear(1, 1))
    assert plugin.auto_wrap_policy.keywords == {"min_num_params": 5}
    plugin = Plugin(auto_wrap_policy=wrap.size_based_auto_wrap_policy)  # without a size
    plugin.set_auto_wrap_policy(nn.Sequential(nn.Linear(1, 1)))
    assert plugin.auto_wrap_policy is None
    assert "min_num_params" in caplog.text


def test_efficient_loading_synchronises_and_tells_transformers(monkeypatch):
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING")
    Plugin()
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ, "nothing was requested"
    with pytest.warns(UserWarning, match="sync_module_states is set to True"):
        plugin = Plugin(cpu_ram_efficient_loading="true")
    assert plugin.sync_module_states is plugin.cpu_ram_efficient_loading is True
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    plugin.param_init_fn(module)
    assert not module.weight.is_meta


def test_a_policy_is_replaced_only_on_request():
    plugin = Plugin()
    plugin.set_mixed_precision("fp16", buffer_autocast=True)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy == fsdp.MixedPrecision(torch.float16, torch.float16, torch.float32)
    plugin.set_mixed_precision("bf16", override=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
    given = {"param_dtype": "bf16", "reduce_dtype": torch.float32}
    policy = Plugin(fsdp_version=2, mixed_precision_policy=given).mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
