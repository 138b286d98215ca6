"""Configuration files for FSDP 1 turned into ones for FSDP 2."""

import json

import pytest
import yaml

from accelerate.commands.launch import launch_command_parser
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.options.engines import FSDP_OPTIONS
from accelerate.extensions.to_fsdp2.command import convert_config_to_fsdp2
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import exports
from accelerate.launch.resolve import resolve
from cases import cases

# What each setting of FSDP 1 becomes; None where it has to go.
SETTINGS = {
    "fsdp_version": (1, {"fsdp_version": 2}),
    "fsdp_offload_params": (True, {"fsdp_offload_params": True}),
    "fsdp_min_num_params": (5, {"fsdp_min_num_params": 5}),
    "fsdp_sharding_strategy": ("SHARD_GRAD_OP", {"fsdp_reshard_after_forward": False}),
    "fsdp_reshard_after_forward": ("FULL_SHARD", {"fsdp_reshard_after_forward": True}),
    "fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
    "fsdp_transformer_layer_cls_to_wrap": ("Block", {"fsdp_transformer_layer_cls_to_wrap": "Block"}),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", None),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", {"fsdp_state_dict_type": "FULL_STATE_DICT"}),
    "fsdp_forward_prefetch": (True, None),
    "fsdp_use_orig_params": (True, None),
    "fsdp_cpu_ram_efficient_loading": (False, {"fsdp_cpu_ram_efficient_loading": False}),
    "fsdp_sync_module_states": (True, None),
    "fsdp_module_precision": ({"*": "fp32"}, {"fsdp_module_precision": {"*": "fp32"}}),
    "fsdp_activation_checkpointing": (True, {"fsdp_activation_checkpointing": True}),
    "fsdp_activation_checkpointing_offload": (False, {"fsdp_activation_checkpointing_offload": False}),
}


def converted(**section):
    return convert_config_to_fsdp2({"fsdp_config": section})["fsdp_config"]


@pytest.mark.parametrize("option", [option.name for option in FSDP_OPTIONS if option.section == "fsdp_config"])
def test_every_setting(option, caplog):
    """An option that is added to the table has to be thought of here; the prefix may be omitted."""
    value, expected = SETTINGS[option]
    for name in (option, option.removeprefix("fsdp_")):
        assert converted(**{name: value}) == {"fsdp_version": 2, **(expected or {})}
    assert ("is dropped: " in caplog.text) == (expected is None) and "unknown" not in caplog.text


@cases(
    "section, expected, warning",
    ({"sharding_strategy": "HYBRID_SHARD"}, {"reshard_after_forward": True}, "set dp_replicate_size and dp_shard_size"),
    ({"sharding_strategy": 5}, {"reshard_after_forward": False}, "HYBRID_SHARD_ZERO2 does not exist"),
    ({"sharding_strategy": "no_shard"}, {"reshard_after_forward": False}, "set distributed_type to MULTI_GPU"),
    ({"reshard_after_forward": "false"}, {"reshard_after_forward": False}, ""),
    ({"state_dict_type": "LOCAL_STATE_DICT"}, {"state_dict_type": "SHARDED_STATE_DICT"}, "SHARDED_STATE_DICT cannot read its checkpoints"),
    ({"backward_prefetch_policy": "BACKWARD_POST"}, {}, "backward_prefetch is dropped: version 2 always"),
    ({"forward_prefetch": False}, {}, "fsdp_forward_prefetch is dropped: version 2 takes the number"),
    ({"other": 1}, {"other": 1}, "fsdp_config.fsdp_other is unknown"),
)  # fmt: skip
def test_what_becomes_something_else(section, expected, warning, caplog):
    old = {f"fsdp_{key}": value for key, value in {"offload_params": True, **section}.items()}
    config = {"num_machines": 2, "num_processes": 16, "fsdp_config": dict(old)}
    new = convert_config_to_fsdp2(config)
    expected = {"version": 2, "offload_params": True, **expected}
    assert new == {**config, "fsdp_config": {f"fsdp_{key}": value for key, value in expected.items()}}
    assert warning in caplog.text
    assert config["fsdp_config"] == old


@cases(
    "section, message",
    ({"fsdp_sharding_strategy": "SOME_SHARD"}, "'SOME_SHARD'; FSDP 1 knows FULL_SHARD"),
    ({"fsdp_sharding_strategy": 9}, "is 9"),
    ({"fsdp_version": 3}, "fsdp_version is 3"),
    (["fsdp_version"], "must hold keys and values"),
)
def test_what_means_nothing(section, message):
    with pytest.raises(LaunchError, match=message):
        convert_config_to_fsdp2({"fsdp_config": section})


def test_nothing_to_convert(caplog):
    for config in ({}, {"fsdp_config": {}}, {"fsdp_config": None}, {"fsdp_config": {"fsdp_version": 2}}):
        assert convert_config_to_fsdp2(config) is config
    other = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    assert convert_config_to_fsdp2(other) is other and "is for DEEPSPEED and is not changed" in caplog.text
    assert "ZeRO 3 is fsdp_reshard_after_forward true" in caplog.text


@pytest.mark.parametrize("changed", [{}, {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, {"fsdp_sharding_strategy": 5}])
def test_the_result_is_launched_with(accelerate, place, monkeypatch, changed):
    section = {name: value for name, (value, _) in SETTINGS.items()} | changed
    content = {"distributed_type": "FSDP", "num_processes": 2, "use_cpu": True, "fsdp_config": section}
    (place / "old.yaml").write_text(yaml.safe_dump(content))
    assert accelerate("to-fsdp2", "--config_file", "old.yaml", "--output_file", "new.yaml")[0] == 0
    (place / "train.py").touch()
    plan = resolve(launch_command_parser().parse_args(["--dry_run", "--config_file", "new.yaml", "train.py"]))
    assert (plan["use_fsdp"], plan["fsdp_version"]) == (True, "2")
    for name, value in exports(plan.settings).items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, False, True)


def test_command(accelerate, place):
    def convert(*words):
        return accelerate("to-fsdp2", "--config_file", *words)

    old, new = place / "old.yaml", place / "new.yaml"
    old.write_text("fsdp_config: {fsdp_version: 1}")
    status, _, err = convert("old.yaml")
    assert status == 2 and "--output_file" in err
    assert convert("old.yaml", "--output_file", "new.yaml")[0] == 0
    assert yaml.safe_load(new.read_text()) == {"fsdp_config": {"fsdp_version": 2}}
    new.write_text("mine: 1")
    assert "new.yaml exists already" in convert("old.yaml", "--output_file", "new.yaml")[2]
    assert new.read_text() == "mine: 1"
    assert "saved at new.yaml" in convert("old.yaml", "--output_file", "new.yaml", "--overwrite")[1]
    assert "mine" not in new.read_text() and old.read_text() == "fsdp_config: {fsdp_version: 1}"
    assert convert("old.yaml", "--overwrite")[0] == 0 and old.read_text() == new.read_text()
    (place / "old.json").write_text('{"fsdp_config": {"fsdp_offload_params": true}}')
    assert convert("old.json", "--overwrite")[0] == 0
    assert json.loads((place / "old.json").read_text())["fsdp_config"]["fsdp_version"] == 2


def test_places_that_are_none(refused, place):
    (place / "folder").mkdir()
    (place / "old.yaml").write_text("fsdp_config: {fsdp_version: 1}")
    for words in ("none.yaml", "folder", "old.yaml --output_file folder"):
        assert words.split()[-1] in refused("to-fsdp2", "--overwrite", "--config_file", *words.split())
    assert list((place / "folder").iterdir()) == []
