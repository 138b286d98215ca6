import copy
import functools
import os
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.fsdp import get_module_class_from_name


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Model(nn.Module):
    _no_split_modules = ("Layer", "VisionLayer")

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("FSDP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the plugin may set it; monkeypatch restores it


def test_defaults_of_version_1():
    plugin = Plugin()
    assert (plugin.fsdp_version, plugin.sharding_strategy) == (1, fsdp.ShardingStrategy.FULL_SHARD)
    assert plugin.cpu_offload == fsdp.CPUOffload(offload_params=False)
    assert plugin.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config == fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert plugin.optim_state_dict_config == fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert (plugin.use_orig_params, plugin.sync_module_states, plugin.forward_prefetch) == (False, False, False)
    assert plugin.auto_wrap_policy is plugin.backward_prefetch is plugin.reshard_after_forward is None


def test_defaults_of_version_2():
    plugin = Plugin(fsdp_version=2)
    assert plugin.reshard_after_forward is True
    assert plugin.sharding_strategy is None
    assert type(plugin.cpu_offload) is fsdp.OffloadPolicy
    assert plugin.state_dict_type is fsdp.StateDictType.SHARDED_STATE_DICT
    assert plugin.use_orig_params is plugin.sync_module_states is plugin.forward_prefetch is None


def test_version_1_from_the_environment(monkeypatch):
    for name, value in {
        "SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "BACKWARD_PREFETCH": "BACKWARD_PRE",
        "OFFLOAD_PARAMS": "true",
        "STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "TRANSFORMER_CLS_TO_WRAP": "Layer,Linear",
        "USE_ORIG_PARAMS": "1",
        "FORWARD_PREFETCH": "yes",
        "ACTIVATION_CHECKPOINTING": "True",
        "ACTIVATION_CHECKPOINTING_OFFLOAD": "True",
        "IGNORED_MODULES": ".*norm",
    }.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    plugin = Plugin()
    assert plugin.sharding_strategy is fsdp.ShardingStrategy.SHARD_GRAD_OP
    assert plugin.backward_prefetch is fsdp.BackwardPrefetch.BACKWARD_PRE
    assert plugin.cpu_offload.offload_params
    assert isinstance(plugin.state_dict_config, fsdp.ShardedStateDictConfig)
    assert plugin.auto_wrap_policy is wrap.transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap == ["Layer", "Linear"]
    assert plugin.use_orig_params is plugin.forward_prefetch is plugin.activation_checkpointing is True
    assert plugin.activation_checkpointing_offload is True
    assert plugin.ignored_modules == ".*norm"


def test_version_2_from_the_environment(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_USE_ORIG_PARAMS", "true")  # of version 1: the launcher exports it regardless
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "77")
    plugin = Plugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is False
    assert isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy)
    assert plugin.use_orig_params is None
    assert plugin.min_num_params == 77


@pytest.mark.parametrize("value", ["hybrid_shard", "4", 4, fsdp.ShardingStrategy.HYBRID_SHARD])
def test_spellings_of_a_strategy(value):
    assert Plugin(sharding_strategy=value).sharding_strategy is fsdp.ShardingStrategy.HYBRID_SHARD


def test_unknown_strategy_lists_the_known():
    with pytest.raises(ValueError, match="sharding_strategy is 'bogus'.*FULL_SHARD"):
        Plugin(sharding_strategy="bogus")


def test_resharding_names_the_strategy_in_version_1():
    plugin = Plugin(reshard_after_forward="SHARD_GRAD_OP")
    assert plugin.sharding_strategy is plugin.reshard_after_forward is fsdp.ShardingStrategy.SHARD_GRAD_OP


def test_contradicting_strategies_warn():
    with pytest.warns(UserWarning, match="SHARD_GRAD_OP disagrees"):
        plugin = Plugin(sharding_strategy="FULL_SHARD", reshard_after_forward="SHARD_GRAD_OP")
    assert plugin.sharding_strategy is fsdp.ShardingStrategy.FULL_SHARD


@pytest.mark.parametrize(("value", "expected"), [(True, True), ("false", False), ("yes", True)])
def test_spellings_of_resharding(value, expected):
    assert Plugin(fsdp_version=2, reshard_after_forward=value).reshard_after_forward is expected


@pytest.mark.parametrize(("version", "value"), [(1, True), (2, "FULL_SHARD"), (2, 1)])
def test_resharding_of_the_other_version_is_refused(version, value):
    with pytest.raises(ValueError, match="reshard_after_forward"):
        Plugin(fsdp_version=version, reshard_after_forward=value)


@pytest.mark.parametrize(("strategy", "reshards"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False)])
def test_strategy_is_translated_for_version_2(strategy, reshards, caplog):
    assert Plugin(fsdp_version=2, sharding_strategy=strategy).reshard_after_forward is reshards
    assert "sharding_strategy" in caplog.text


def test_strategy_without_translation_is_refused():
    with pytest.raises(ValueError, match="HYBRID_SHARD.*ParallelismConfig"):
        Plugin(fsdp_version=2, sharding_strategy="HYBRID_SHARD")


@pytest.mark.parametrize("version", [0, 3, "two"])
def test_unknown_version(version):
    with pytest.raises(ValueError, match="two|fsdp_version"):
        Plugin(fsdp_version=version)


def test_version_may_be_text():
    assert Plugin(fsdp_version="2").reshard_after_forward is True


@pytest.mark.parametrize("value", ["backward_post", 2, fsdp.BackwardPrefetch.BACKWARD_POST])
def test_spellings_of_prefetch(value):
    assert Plugin(backward_prefetch=value).backward_prefetch is fsdp.BackwardPrefetch.BACKWARD_POST


@pytest.mark.parametrize("value", ["NO_PREFETCH", "no_prefetch", None])
def test_no_prefetch(value):
    assert Plugin(backward_prefetch=value).backward_prefetch is None


@pytest.mark.parametrize("field", ["backward_prefetch", "use_orig_params", "sync_module_states"])
def test_what_version_2_ignores_is_said(field, caplog):
    value = "BACKWARD_PRE" if field == "backward_prefetch" else True
    plugin = Plugin(fsdp_version=2, **{field: value})
    assert getattr(plugin, field) is None
    assert field in caplog.text


def test_version_2_knows_the_words_that_it_ignores():
    with pytest.raises(ValueError, match="backward_prefetch is 'sometimes'"):
        Plugin(fsdp_version=2, backward_prefetch="sometimes")


def test_forward_prefetch_is_refused_by_version_2():
    with pytest.raises(ValueError, match="forward_prefetch is False"):
        Plugin(fsdp_version=2, forward_prefetch=False)


@pytest.mark.parametrize(("version", "kind"), [(1, fsdp.CPUOffload), (2, fsdp.CPUOffloadPolicy)])
@pytest.mark.parametrize("value", [True, "true"])
def test_offload(version, kind, value):
    assert type(Plugin(fsdp_version=version, cpu_offload=value).cpu_offload) is kind


@pytest.mark.parametrize(("version", "value"), [(1, fsdp.OffloadPolicy()), (2, fsdp.CPUOffload(True)), (1, [])])
def test_offload_object_of_the_other_version(version, value):
    with pytest.raises(ValueError, match="cpu_offload"):
        Plugin(fsdp_version=version, cpu_offload=value)


def test_offload_set_later():
    plugin = Plugin(fsdp_version=2)
    plugin.cpu_offload = True
    plugin.set_cpu_offload()
    plugin.validate_cpu_offload()
    assert isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy)


@pytest.mark.parametrize("value", ["sharded_state_dict", "3", 3, fsdp.StateDictType.SHARDED_STATE_DICT])
def test_spellings_of_state_dict_type(value):
    plugin = Plugin(state_dict_type=value)
    assert plugin.state_dict_type is fsdp.StateDictType.SHARDED_STATE_DICT
    assert isinstance(plugin.optim_state_dict_config, fsdp.ShardedOptimStateDictConfig)


def test_state_dict_type_set_later_brings_its_configs():
    plugin = Plugin()
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert isinstance(plugin.state_dict_config, fsdp.ShardedStateDictConfig)
    plugin.set_state_dict_type(fsdp.StateDictType.LOCAL_STATE_DICT)
    assert plugin.state_dict_config is plugin.optim_state_dict_config is None


def test_own_config_stays_and_a_foreign_one_is_said(caplog):
    mine = fsdp.FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    assert Plugin(state_dict_config=mine).state_dict_config is mine
    assert not caplog.text
    plugin = Plugin(state_dict_type="SHARDED_STATE_DICT", state_dict_config=mine)
    assert isinstance(plugin.state_dict_config, fsdp.ShardedStateDictConfig)
    assert "state_dict_config" in caplog.text


def test_local_state_dict_is_of_version_1():
    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        Plugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")


def test_unknown_wrap_policy():
    with pytest.raises(ValueError, match="auto_wrap_policy is 'bogus'"):
        Plugin(auto_wrap_policy="bogus")


def test_wrap_settings_without_a_policy_are_said(caplog):
    plugin = Plugin(transformer_cls_names_to_wrap="A,B")
    assert plugin.transformer_cls_names_to_wrap == ["A", "B"]
    assert "auto_wrap_policy" in caplog.text


def test_layers_are_those_the_model_declares_and_has():
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(Model())
    assert isinstance(plugin.auto_wrap_policy, functools.partial)
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Layer}}


def test_named_layers():
    plugin = Plugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap="Linear")
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {nn.Linear}}


def test_missing_layer_lists_what_there_is():
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"])
    with pytest.raises(ValueError, match="holds Block.*Layer, Linear, Model, ModuleList"):
        plugin.set_auto_wrap_policy(Model())


def test_no_layers_is_said(caplog):
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(nn.Linear(1, 1))
    assert "_no_split_modules" in caplog.text


def test_size_policy():
    plugin = Plugin(auto_wrap_policy="size_based_wrap", min_num_params="5")
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy.keywords == {"min_num_params": 5}


def test_size_policy_without_a_size_is_no_policy(caplog):
    plugin = Plugin(auto_wrap_policy=wrap.size_based_auto_wrap_policy)
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy is None
    assert "min_num_params" in caplog.text


def test_own_policy_stays():
    policy = wrap.ModuleWrapPolicy([Layer])
    plugin = Plugin(auto_wrap_policy=policy)
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy is policy


def test_offloaded_activations_need_checkpointing():
    with pytest.raises(ValueError, match="activation_checkpointing_offload"):
        Plugin(activation_checkpointing_offload=True)


def test_efficient_loading_synchronises_and_tells_transformers():
    with pytest.warns(UserWarning, match="sync_module_states is set to True"):
        plugin = Plugin(cpu_ram_efficient_loading="true")
    assert plugin.sync_module_states is plugin.cpu_ram_efficient_loading is True
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    plugin.param_init_fn(module)
    assert not module.weight.is_meta


def test_efficient_loading_of_version_2_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin = Plugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    assert plugin.sync_module_states is plugin.param_init_fn is None


def test_the_variable_is_left_alone_without_the_argument(monkeypatch):
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING")
    Plugin()
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ


def test_own_init_function_stays():
    def mine(module):
        return None

    assert Plugin(sync_module_states=True, param_init_fn=mine).param_init_fn is mine


@pytest.mark.parametrize("precision", ["bf16", "fp8", torch.bfloat16])
def test_precision(precision):
    first, second = Plugin(), Plugin(fsdp_version=2)
    for plugin in (first, second):
        plugin.set_mixed_precision(precision)
        plugin.validate_mixed_precision_policy()
    half = torch.bfloat16
    assert first.mixed_precision_policy == fsdp.MixedPrecision(half, half, half)
    assert second.mixed_precision_policy == fsdp.MixedPrecisionPolicy(half, half, half)


def test_buffers_may_stay_in_float32():
    plugin = Plugin()
    plugin.set_mixed_precision("fp16", buffer_autocast=True)
    assert plugin.mixed_precision_policy.buffer_dtype is torch.float32


def test_a_policy_is_replaced_only_on_request():
    plugin = Plugin(mixed_precision_policy="fp16")
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.param_dtype is torch.float16
    plugin.set_mixed_precision("bf16", override=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16


def test_policy_as_a_dictionary():
    plugin = Plugin(fsdp_version=2, mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": torch.float32})
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)


@pytest.mark.parametrize("policy", [{"buffer_dtype": "bf16"}, "no", {"param_dtype": "nothing"}, fsdp.MixedPrecision()])
def test_policies_that_version_2_refuses(policy):
    with pytest.raises(ValueError, match="mixed_precision|param_dtype"):
        Plugin(fsdp_version=2, mixed_precision_policy=policy)


def test_copies():
    with pytest.warns(UserWarning):
        plugin = Plugin(
            cpu_ram_efficient_loading=True, mixed_precision_policy="bf16", auto_wrap_policy="size_based_wrap"
        )
    assert pickle.loads(pickle.dumps(plugin)) == plugin
    assert copy.deepcopy(plugin) == plugin


def test_class_by_name():
    assert get_module_class_from_name(Model(), "Layer") is Layer
    assert get_module_class_from_name(Model(), "Model") is Model
    assert get_module_class_from_name(Model(), "Conv2d") is None
