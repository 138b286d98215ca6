"""Configuration files as objects."""

import dataclasses

import pytest
import yaml

from accelerate.config.enums import DistributedType
from accelerate.extensions.configure.config_args import ClusterConfig, load_config_from_file
from accelerate.launch.config_file import known_keys, read
from cases import cases

CONFIG = ClusterConfig(
    "LOCAL_MACHINE", "MULTI_CPU", "bf16", True, False, num_processes=2, fsdp_config={"fsdp_version": 2}
)


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_round_trip(place, ending):
    path = place / f"c.{ending}"
    getattr(CONFIG, f"to_{ending}_file")(path)
    content = yaml.safe_load(path.read_text())  # plain values, and JSON is YAML
    assert (content["distributed_type"], content["num_processes"]) == ("MULTI_CPU", 2) and "gpu_ids" not in content
    loaded = load_config_from_file(path)
    assert loaded.to_dict() == CONFIG.to_dict()
    assert (loaded.distributed_type, loaded.dynamo_config) == (DistributedType.MULTI_CPU, {})
    assert getattr(ClusterConfig, f"from_{ending}_file")(str(path)) == loaded
    assert read(path).values["cpu"] is True


def test_default_file(place, default_file):
    for load in (lambda: load_config_from_file(None), ClusterConfig.from_yaml_file, ClusterConfig.from_json_file):
        with pytest.raises(FileNotFoundError, match=r"default_config\.yaml.*accelerate config default"):
            load()
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_config_from_file(place / "none.yaml")
    CONFIG.to_yaml_file(default_file(""))
    assert load_config_from_file(None).num_processes == ClusterConfig.from_yaml_file().num_processes == 2


@cases(
    "text, message",
    ("num_processes: 2", "lacks `distributed_type`"),
    ("distributed_type: NO\nwrong: 1", "unknown keys: wrong"),
    ("distributed_type: WRONG", "WRONG"),
    ("compute_environment: WRONG\ndistributed_type: NO", "WRONG"),
    ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO", "lacks ec2_instance_type, iam_role_name"),
)
def test_faults(place, text, message):
    (place / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config_from_file(place / "c.yaml")


def test_every_key_of_a_file_is_an_option():
    assert set(known_keys()) == {field.name for field in dataclasses.fields(ClusterConfig)}
