"""Configuration files in terms of options."""

import json
from pathlib import Path

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
    assert "num_processes" not in read(distributed_type="MULTI_GPU").values
    assert read(distributed_type="NO").values["num_processes"] == 1


def test_unknown_keys(read):
    with pytest.raises(LaunchError, match="line 2: num_proceses is unknown; did you mean num_processes"):
        read(distributed_type="NO", num_proceses=2)
    with pytest.raises(LaunchError, match="zero_stage belongs under deepspeed_config"):
        read(distributed_type="NO", zero_stage=2)
    with pytest.raises(LaunchError, match="zzz is unknown.*known are .*num_processes"):
        read(distributed_type="NO", zzz=2)
    unused = read(distributed_type="NO", fsdp_config={"fsdp_offload_parms": 1}).unused
    assert unused[0].startswith(
        "fsdp_config.fsdp_offload_parms is unknown and has no effect; did you mean fsdp_offload_params? (in "
    )
    assert read(compute_environment="AMAZON_SAGEMAKER", ec2_instance_type="x").unused == ()


def test_all_faults_are_named_up_to_five(read):
    with pytest.raises(LaunchError) as caught:
        read(**{f"unknown_{number}": 1 for number in range(7)})
    assert str(caught.value).count("is unknown") == 5
    assert "And 2 more; `accelerate config validate " in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"distributed_type": "MULTI"}, "distributed_type is 'MULTI'; choose one of NO, MULTI_CPU"),
        ({"distributed_type": ["NO"]}, "distributed_type is \\['NO'\\]"),
        ({"compute_environment": "MOON"}, "compute_environment is 'MOON'; choose one of LOCAL_MACHINE"),
        ({"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "FSDP"}, "choose one of NO, DATA_PARALLEL"),
        ({"mixed_precision": "fp17"}, "mixed_precision is 'fp17'"),
        ({"fsdp_config": 3}, "fsdp_config is 3; it must hold keys and values"),
        ({"num_processes": "two"}, "num_processes is 'two'; it must be an integer"),
        ({"num_processes": True}, "num_processes is true; it must be a number"),
        ({"num_processes": 0}, "num_processes is 0; it must be at least 1"),
        ({"num_processes": float("inf")}, "num_processes is inf; it must be an integer"),
        ({"num_processes": [2]}, "num_processes is \\[2\\]; it must be a single value"),
        ({"main_process_ip": {"a": 1}}, "main_process_ip is .*; it must be a single value"),
        ({"tpu_env": {"A": 1}}, "tpu_env is .*; it must be a list"),
        ({"commands": ["ls", {"a": 1}]}, "commands holds \\{'a': 1\\}; it must be a list of single values"),
        ({"compute_environment": ["LOCAL_MACHINE"]}, "compute_environment is \\['LOCAL_MACHINE'\\]"),
        ({"max_restarts": 3}, "max_restarts is an option of `accelerate launch` alone; .* Write --max_restarts"),
        ({"use_cpu": "perhaps"}, "use_cpu is 'perhaps'; write true or false"),
    ],
)
def test_bad_values_name_key_line_and_file(read, content, message):
    with pytest.raises(LaunchError, match=f"config.yaml is not accepted: line .*{message}|{message}"):
        read(**content)


def test_a_key_cannot_talk_to_the_terminal(place):
    (place / "a.yaml").write_text('"\\e[2Jx": 1')
    with pytest.raises(LaunchError) as caught:
        config_file.read(place / "a.yaml")
    assert "\x1b" not in str(caught.value)


def test_lists_where_the_table_has_commas(read):
    values = read(
        distributed_type="MULTI_GPU", gpu_ids=[0, 1], fsdp_config={"transformer_layer_cls_to_wrap": ["A", "B"]}
    ).values
    assert (values["gpu_ids"], values["fsdp_transformer_layer_cls_to_wrap"]) == ("0,1", "A,B")


def test_what_the_file_says_knows_its_line(place):
    path = place / "c.yaml"
    path.write_text("# first\ndistributed_type: FSDP\nfsdp_config:\n\n  offload_params: true\nnum_processes: 2\n")
    lines = config_file.read(path).lines
    assert (lines["use_fsdp"], lines["fsdp_offload_params"], lines["num_processes"]) == (2, 5, 6)


def test_a_repeated_key_is_told(place):
    path = place / "c.yaml"
    path.write_text("distributed_type: NO\nnum_processes: 1\nnum_processes: 2\n")
    settings = config_file.read(path)
    assert settings.values["num_processes"] == 2
    assert "num_processes stands there 2 times, in lines 2 and 3" in settings.unused[0]


def test_json(place):
    path = place / "config.json"
    path.write_text(json.dumps({"distributed_type": "NO", "num_processes": 3}))
    assert config_file.read(path).values["num_processes"] == 3


FIXTURES = sorted(p for p in (Path(__file__).parents[2] / "fixtures" / "configs").iterdir() if p.suffix != ".md")


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_files_of_every_release_since_0_11(path):
    found = config_file.inspect(path)
    assert found.problems == ()
    settings = config_file.read(path)
    assert settings.unused == ()
    content = yaml.safe_load(path.read_text())
    for key in ("num_processes", "num_machines", "main_process_ip", "gpu_ids", "mixed_precision"):
        if content.get(key) is not None:
            assert str(settings.values[key]) == str(content[key]).lower()  # some wrote `No`
    kind = path.stem.split("-")[-1]
    switch = {"fsdp": "use_fsdp", "fsdp1": "use_fsdp", "fsdp2": "use_fsdp", "parallel": "use_fsdp", "tpu": "tpu",
              "deepspeed": "use_deepspeed", "megatron": "use_megatron_lm", "machines": "multi_gpu",
              "zero3": "use_deepspeed"}.get(kind)  # fmt: skip
    assert switch is None or settings.values[switch] is True


def test_every_setting_of_an_old_section_arrives(place):
    fixtures = {path.name: path for path in FIXTURES}
    values = config_file.read(fixtures["accelerate-0.11.0-fsdp.yaml"]).values
    assert values["fsdp_offload_params"] == "false"
    assert values["fsdp_sharding_strategy"] == "1"
    assert values["fsdp_backward_prefetch"] == "BACKWARD_PRE"
    assert values["fsdp_transformer_layer_cls_to_wrap"] == "BertLayer"
    found = config_file.inspect(fixtures["accelerate-0.15.0-fsdp.yaml"])
    assert found.settings.values["dynamo_backend"] == "inductor"
    assert found.settings.lines["dynamo_backend"] == 7
    assert len(found.notes) == 2


def test_what_was_given_up(read):
    assert read(distributed_type="NO", ipex_config={"ipex": False}).unused == ()
    assert "ipex_config has no effect" in read(distributed_type="NO", ipex_config={"ipex": True}).unused[0]
    assert read(distributed_type="MPS").values == {"num_processes": 1}
    assert read(distributed_type="NO", dynamo_backend="AOT_CUDAGRAPHS").values["dynamo_backend"] == "cudagraphs"
    with pytest.raises(LaunchError, match="dynamo_backend is 'NVFUSER'; choose one of"):
        read(distributed_type="NO", dynamo_backend="NVFUSER")


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
    (place / "folder").mkdir()
    with pytest.raises(LaunchError, match="'folder': that is a folder; name the file in it"):
        config_file.find("folder", environ)
    (place / "folder" / "default_config.yaml").touch()
    with pytest.raises(LaunchError, match="did you mean folder.default_config.yaml"):
        config_file.find("folder", environ)


@pytest.mark.parametrize("word", ["MOON", "local_machine", 3])
def test_one_fault_is_told_once(place, word):
    (place / "config.yaml").write_text(yaml.safe_dump({"compute_environment": word}))
    assert len(config_file.inspect(place / "config.yaml").problems) == 1


def test_auto_of_deepspeed_sets_nothing(read):
    values = read(
        deepspeed_config={"gradient_clipping": "auto", "gradient_accumulation_steps": "auto", "zero_stage": 2}
    ).values
    assert (values["zero_stage"], "gradient_clipping" in values, "gradient_accumulation_steps" in values) == (
        2,
        False,
        False,
    )
    with pytest.raises(LaunchError, match="zero_stage is 'auto'"):
        read(deepspeed_config={"zero_stage": "auto"})
