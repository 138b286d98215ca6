"""Configuration files in terms of options."""

import json

import pytest
import yaml

from accelerate.launch import config_file
from accelerate.launch.errors import LaunchError


@pytest.fixture
def read(place):
    def write_and_read(**content):
        path = place / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return config_file.read(path)

    return write_and_read


def test_what_the_questionnaire_of_others_writes(read):
    settings = read(
        compute_environment="LOCAL_MACHINE",
        debug=True,
        distributed_type="MULTI_GPU",
        downcast_bf16="no",
        gpu_ids="all",
        machine_rank=0,
        main_training_function="main",
        mixed_precision="bf16",
        num_machines=1,
        num_processes=2,
        rdzv_backend="static",
        same_network=True,
        tpu_env=[],
        use_cpu=False,
    )
    assert settings.unused == ()
    assert settings.values["multi_gpu"] is True
    assert settings.values["num_processes"] == 2
    assert settings.values["downcast_bf16"] is False
    assert settings.values["cpu"] is False
    assert settings.values["env"] == []


def test_sections_and_their_short_keys(read):
    values = read(
        distributed_type="FSDP",
        fsdp_config={"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_transformer_layer_cls_to_wrap": "Block"},
        dynamo_config={"dynamo_backend": "INDUCTOR", "mode": "max-autotune"},
        fp8_config={"backend": "TE", "fp8_format": "E4M3", "override_linear_precision": [True, False, False]},
    ).values
    assert values["use_fsdp"] is True
    assert (values["fsdp_version"], values["fsdp_offload_params"]) == ("2", "true")
    assert (values["dynamo_backend"], values["dynamo_mode"]) == ("inductor", "max-autotune")
    assert (values["fp8_backend"], values["fp8_format"]) == ("te", "E4M3")
    assert values["fp8_override_linear_precision"] == (True, False, False)


def test_a_parallelism_section_turns_it_on(read):
    values = read(distributed_type="NO", parallelism_config={"parallelism_config_tp_size": 2}).values
    assert values["use_parallelism_config"] is True
    assert "use_parallelism_config" not in read(distributed_type="NO", parallelism_config={}).values


def test_old_spellings(read):
    assert read(distributed_type="NO", fp16=True).values["mixed_precision"] == "fp16"
    assert read(distributed_type="NO", dynamo_backend="EAGER").values["dynamo_backend"] == "eager"
    assert read(distributed_type=False, mixed_precision=False).values["mixed_precision"] == "no"
    assert "num_processes" not in read(distributed_type="NO", num_processes=-1).values


def test_unknown_keys(read):
    with pytest.raises(LaunchError, match="unknown keys: num_proceses.*known are .*num_processes"):
        read(distributed_type="NO", num_proceses=2)
    assert read(distributed_type="NO", fsdp_config={"fsdp_x": 1}).unused[0].startswith("fsdp_config.fsdp_x in ")
    assert read(compute_environment="AMAZON_SAGEMAKER", ec2_instance_type="x").unused == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"distributed_type": "MULTI"}, "distributed_type in .*choose one of NO, MULTI_CPU"),
        ({"mixed_precision": "fp17"}, "mixed_precision in .*is 'fp17'"),
        ({"fsdp_config": 3}, "fsdp_config in .*must hold keys and values"),
        ({"num_processes": "two"}, "num_processes in .*must be an integer"),
    ],
)
def test_bad_values_name_key_and_file(read, content, message):
    with pytest.raises(LaunchError, match=message):
        read(**content)


def test_json(place):
    path = place / "config.json"
    path.write_text(json.dumps({"distributed_type": "NO", "num_processes": 3}))
    assert config_file.read(path).values["num_processes"] == 3


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "- 1"), ("a.yaml", "a: ["), ("a.json", "a: 1"), ("a.yaml", "")])
def test_unreadable(place, name, text):
    (place / name).write_text(text)
    with pytest.raises(LaunchError, match=name):
        config_file.load_mapping(place / name)


def test_yaml_builds_no_objects(place):
    (place / "a.yaml").write_text("a: !!python/object/apply:os.getcwd []")
    with pytest.raises(LaunchError, match="cannot be read"):
        config_file.load_mapping(place / "a.yaml")


def test_where_the_default_file_is(place):
    assert config_file.cache_dir({"HF_HOME": "/h"}) == "/h/accelerate"
    assert config_file.cache_dir({"XDG_CACHE_HOME": "/x"}) == "/x/huggingface/accelerate"
    environ = {"HF_HOME": str(place)}
    assert config_file.default_path(environ).endswith("default_config.yaml")
    (place / "accelerate").mkdir()
    (place / "accelerate" / "default_config.json").touch()
    assert config_file.default_path(environ).endswith("default_config.json")
    (place / "accelerate" / "default_config.yaml").touch()
    assert config_file.default_path(environ).endswith("default_config.yaml")


def test_find(place):
    environ = {"HF_HOME": str(place / "nowhere")}
    assert config_file.find(None, environ) is None
    (place / "mine.yaml").touch()
    assert config_file.find("mine.yaml", environ).name == "mine.yaml"
    with pytest.raises(FileNotFoundError, match="--config_file is 'other.yaml'"):
        config_file.find("other.yaml", environ)
