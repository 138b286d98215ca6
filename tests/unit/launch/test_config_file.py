"""Configuration files in terms of options. Files of every release: config/test_files.py, dry_run/test_golden.py."""

import tracemalloc

import pytest
import yaml

from accelerate.launch import config_file
from accelerate.launch.errors import LaunchError
from cases import cases


@pytest.fixture
def read(place):
    def write_and_read(**content):
        (place / "config.yaml").write_text(yaml.safe_dump(content))
        return config_file.read(place / "config.yaml")

    return write_and_read


@cases(
    "content, values",
    ({"distributed_type": "MULTI_GPU", "downcast_bf16": "no", "tpu_env": [], "use_cpu": False},
     {"multi_gpu": True, "downcast_bf16": False, "env": [], "cpu": False, "num_processes": None}),
    ({"distributed_type": "FSDP", "gpu_ids": [0, 1],
      "fsdp_config": {"fsdp_version": 2, "offload_params": True, "transformer_layer_cls_to_wrap": ["A", "B"]}},
     {"use_fsdp": True, "fsdp_version": "2", "fsdp_offload_params": "true", "gpu_ids": "0,1",
      "fsdp_transformer_layer_cls_to_wrap": "A,B"}),
    ({"fp8_config": {"backend": "TE", "fp8_format": "E4M3", "override_linear_precision": [True, False, False]}},
     {"fp8_backend": "te", "fp8_format": "E4M3", "fp8_override_linear_precision": (True, False, False)}),
    ({"deepspeed_config": {"gradient_clipping": "auto", "gradient_accumulation_steps": "auto", "zero_stage": 2}},
     {"zero_stage": 2, "gradient_clipping": None, "gradient_accumulation_steps": None}),
    ({"distributed_type": False, "mixed_precision": False}, {"mixed_precision": "no", "num_processes": 1}),
    ids=str,
)  # fmt: skip
def test_values(read, content, values):
    settings = read(**content)
    assert settings.unused == ()
    assert {name: settings.values.get(name) for name in values} == values


@cases(
    "content, message",
    ({"distributed_type": "NO", "num_proceses": 2}, "line 2: num_proceses is unknown; did you mean num_processes"),
    ({"distributed_type": "NO", "numa_affinity": "node"}, "numa_affinity is unknown; did you mean enable_cpu_affinity"),
    ({"zero_stage": 2}, "zero_stage belongs under deepspeed_config"),
    ({"zzz": 2}, "zzz is unknown.*known are .*num_processes"),
    ({"max_restarts": 3}, "max_restarts is an option of `accelerate launch` alone; .* Write --max_restarts"),
    ({"distributed_type": "MULTI"}, "distributed_type is 'MULTI'; choose one of NO, MULTI_CPU"),
    ({"compute_environment": "MOON"}, "compute_environment is 'MOON'; choose one of LOCAL_MACHINE"),
    ({"fsdp_config": 3}, "fsdp_config is 3; it must hold keys and values"),
    ({"num_processes": "two"}, "num_processes is 'two'; it must be an integer"),
    ({"num_processes": 2.5}, "num_processes is 2.5; it must be an integer"),
    ({"fp8_config": {"override_linear_precision": [True, False]}}, "override_linear_precision is .*three"),
    ({"num_processes": True}, "num_processes is true; it must be a number"),
    ({"num_processes": 0}, "num_processes is 0; it must be at least 1"),
    ({"deepspeed_config": {"gradient_clipping": 10**400}}, "gradient_clipping is 10+"),
    ({"main_process_ip": {"a": 1}}, "main_process_ip is .*; it must be a single value"),
    ({"tpu_env": {"A": 1}}, "tpu_env is .*; it must be a list"),
    ({"use_cpu": "perhaps"}, "use_cpu is 'perhaps'; write true or false"),
)  # fmt: skip
def test_faults_name_key_line_and_file(read, place, content, message):
    with pytest.raises(LaunchError, match=f"config.yaml is not accepted: line .*{message}|{message}"):
        read(**content)
    assert len(config_file.inspect(place / "config.yaml").problems) == 1


def test_five_faults_of_many_are_named_and_keys_cannot_talk_to_the_terminal(read):
    with pytest.raises(LaunchError) as caught:
        read(**{"\x1b[2Jx": 1})
    assert "\x1b" not in str(caught.value)
    with pytest.raises(LaunchError, match="And 1995 more; `accelerate config validate ") as caught:
        read(**{f"unknown_key_{number}": 1 for number in range(2_000)})
    assert str(caught.value).count("is unknown") == 5


def test_what_has_no_effect(read):
    (section,) = read(fsdp_config={"fsdp_offload_parms": 1}).unused
    assert section.startswith("fsdp_config.fsdp_offload_parms is unknown and has no effect; did you mean fsdp_")


@pytest.fixture
def load(place):
    def write_and_load(data, name="a.yaml"):
        (place / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return config_file.load_mapping(place / name)

    return write_and_load


@cases(
    "name, data, message",
    ("a.yaml", "", "a.yaml is empty. `accelerate config` writes one"),
    ("a.yaml", "- 1", "holds a list"),
    ("a.yaml", "a: [", "cannot be read: line 1"),
    ("a.yaml", b"\x89PNG\r\n\x1a\n", "cannot be read: unacceptable character"),
    ("a.yaml", "a: 1\n---\nb: 2", "line 2, column 1: expected a single document in the stream"),
    ("a.yaml", "a: " + "9" * 60_000, "cannot be read"),
    ("a.yaml", "a: !!timestamp 2001-99-99", "cannot be read"),
)
def test_one_line_of_error(load, name, data, message):
    with pytest.raises(LaunchError) as caught:
        load(data, name)
    said = str(caught.value)
    assert message in said and "\n" not in said and len(said) < 600


def test_nothing_is_built_or_run(load, place):
    for tag in ("object/apply:os.system", "object/new:os.system", "name:os.system", "module:antigravity"):
        with pytest.raises(LaunchError, match="cannot be read: line 1, .*could not determine a constructor"):
            load(f"a: !!python/{tag} ['touch owned']")
    assert not (place / "owned").exists()


def bomb(value):
    levels = [f"a{n}: &a{n} {value.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 12)]
    return "\n".join(["a0: &a0 {a: 1, b: 2}", *levels])


@cases(
    "text, message",
    (bomb("[{}]"), "more than 10 aliases"),
    (bomb("{{<<: [{}]}}"), "more than 10 aliases"),
    ('{"a": ' * 10_000, "maximum recursion depth"),
    ("a: &a [*a]", "Circular reference"),
    ("x: y\n" * 15_000, "more than 64 KiB"),
    ids=lambda text: text[:20],
)
def test_bounded_in_memory(load, text, message):
    tracemalloc.start()
    try:
        with pytest.raises(LaunchError, match=message):
            load(text, "a.json" if text.startswith('{"') else "a.yaml")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_what_is_meant_well_and_what_is_no_file(load, place):
    assert load("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}")["d"] == {"b": 1, "e": 2}
    assert load("a: &a {b: 1}\nd: {<<: *a, b: 2}")["d"] == {"b": 2}, "a merged key is no duplicate"
    for path, message in ((place, "cannot be read: Is a directory"), (place / "x", "cannot be read: No such file")):
        with pytest.raises(LaunchError, match=message):
            config_file.load_mapping(path)


@cases(
    "name, data, message",
    ("a.yaml", "num_processes: 2\nuse_cpu: true\nnum_processes: 4\n", "'num_processes' is in line 1 and in line 3"),
    ("b.yaml", "fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2\n", "'fsdp_version' is in line 2 and in line 3"),
    ("c.json", '{"num_processes": 2,\n"num_processes": 4}', "'num_processes' is there twice .lines with it: 1, 2"),
)
def test_a_key_that_is_there_twice_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_text(data)
    with pytest.raises(LaunchError, match=message):
        config_file.load_mapping(tmp_path / name)
