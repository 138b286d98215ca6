"""Configuration files for FSDP 1 turned into ones for FSDP 2."""

import pytest
import yaml

from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2


def test_conversion(caplog):
    old = {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_sharding_strategy": "SHARD_GRAD_OP",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_forward_prefetch": False,
            "fsdp_offload_params": True,
            "fsdp_other": 1,
        },
    }
    new = convert_config_to_fsdp2(old)
    assert new["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_other": 1,
    }
    assert "fsdp_backward_prefetch does not exist in FSDP 2" in caplog.text
    assert "fsdp_forward_prefetch is not possible yet" in caplog.text
    assert "fsdp_sharding_strategy" in old["fsdp_config"]


@pytest.mark.parametrize(
    ("strategy", "reshards"), [("FULL_SHARD", True), (1, True), ("2", False), ("no_shard", False)]
)
def test_strategies(strategy, reshards):
    new = convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": strategy}})
    assert new["fsdp_config"]["fsdp_reshard_after_forward"] is reshards


@pytest.mark.parametrize("config", [{}, {"fsdp_config": {}}, {"fsdp_config": {"fsdp_version": 2}}])
def test_nothing_to_convert(config):
    assert convert_config_to_fsdp2(config) is config


def test_command(accelerate, place):
    (place / "old.yaml").write_text("fsdp_config: {fsdp_version: 1}")
    status, _, err = accelerate("to-fsdp2", "--config_file", "old.yaml")
    assert status == 2
    assert "--output_file" in err
    assert accelerate("to-fsdp2", "--config_file", "old.yaml", "--output_file", "new.yaml")[0] == 0
    assert yaml.safe_load((place / "new.yaml").read_text()) == {"fsdp_config": {"fsdp_version": 2}}
    assert accelerate("to-fsdp2", "--config_file", "old.yaml", "--output_file", "new.yaml")[0] == 2
    assert accelerate("to-fsdp2", "--config_file", "old.yaml", "--overwrite")[0] == 0
    assert accelerate("to-fsdp2", "--config_file", "none.yaml", "--overwrite")[0] == 2
