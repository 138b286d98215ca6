"""`accelerate config show`: every value with its source; `validate`: every problem of a file, with its line."""

import pytest

from cases import cases


@pytest.fixture
def file(place):
    (place / "c.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: fp16\nfsdp_config:\n  fsdp_version: 2\n"
    )
    return "c.yaml"


@pytest.fixture
def show(accelerate):
    def run(*words):
        status, out, err = accelerate("config", "show", *words)
        assert status == 0, err
        rows = [line.split(maxsplit=2) for line in out.splitlines()[2:]]
        return {name: rest for name, *rest in rows}

    return run


def test_one_setting_from_each_layer(show, file, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    rows = show("--config_file", file, "--num_machines", "3", "--all")
    typed = show("--config_file", file, "--fsdp_version", "1")["fsdp_version"]
    assert typed == ["1", "command line"], "a default that was typed is a choice"
    assert {
        "num_machines": ["3", "command line"],
        "mixed_precision": ["bf16", "environment variable ACCELERATE_MIXED_PRECISION"],
        "num_processes": ["2", "configuration file c.yaml:2"],
        "fsdp_version": ["2", "configuration file c.yaml:5"],
        "use_fsdp": ["yes", "configuration file c.yaml:1"],
        "rdzv_backend": ["static", "default"],
    }.items() <= rows.items()
    assert "rdzv_backend" not in show("--config_file", file)


def test_secrets_are_not_printed(accelerate, place):
    (place / "c.yaml").write_text("distributed_type: XLA\ncommands: [export WANDB_API_KEY=hunter2]\n")
    words = ["--config_file", "c.yaml", "--env", "HF_TOKEN=hunter2", "--aws_secret_access_key", "hunter3"]
    out = accelerate("config", "show", *words)[1]
    assert "HF_TOKEN=(hidden)" in out and "WANDB_API_KEY=(hidden)" in out
    assert out.count("(hidden)") == 3 and "hunter" not in out


def test_what_a_higher_layer_rules_out_is_not_used(show, accelerate, place):
    (place / "c.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    rows = show("--config_file", "c.yaml", "--cpu")
    assert rows["cpu"] == ["yes", "command line"]
    assert rows["multi_gpu"] == ["no", "--cpu was chosen"]
    status, _, err = accelerate("config", "show", "--cpu", "--multi_gpu")
    assert status == 2 and "exclude each other" in err


def test_what_stands_around_the_table(accelerate, refused, place):
    assert "none (" in accelerate("config", "show")[1]
    (place / "c.yaml").write_text("fsdp_config:\n  fsdp_versoin: 2\n")
    out = accelerate("config", "show", "--config_file", "c.yaml")[1]
    assert "note: fsdp_config.fsdp_versoin is unknown and has no effect" in out
    (place / "c.yaml").write_text("num_proceses: 2")
    said = refused("config", "show", "--config_file", "c.yaml")
    assert "line 1: num_proceses is unknown; did you mean num_processes?" in said


@pytest.fixture
def validate(accelerate, place):
    def run(text):
        (place / "c.yaml").write_text(text)
        return accelerate("config", "validate", "c.yaml")

    return run


def test_everything_at_once(validate):
    lines = [
        "distributed_type: MULTI_GPU",
        "use_cpu: true",
        "num_proceses: 1",
        "mixed_precision: fp17",
        "fsdp_config:",
    ]
    lines += ["  fsdp_sharding_strategy: FULL_SHRAD", "  nonsense: 1", "num_machines: 2", "machine_rank: 2"]
    lines += ["main_training_function: main", "main_process_port: 70000", "num_processes: 5", "gpu_ids: 0,0"]
    status, _, err = validate("\n".join(lines))
    assert status == 2
    places = [f"c.yaml:{line}" for line in (2, 3, 4, 6, 7, 8, 9, 11, 12, 13)]
    assert [line.partition(": ")[0] for line in err.splitlines()] == [*places, "c.yaml"]
    for part in [
        "use_cpu is true, and distributed_type asks for GPUs; MULTI_CPU",
        "num_proceses is unknown; did you mean num_processes?",
        "mixed_precision is 'fp17'",
        "fsdp_config.fsdp_sharding_strategy is 'FULL_SHRAD'; did you mean FULL_SHARD?",
        "fsdp_config.nonsense is unknown and has no effect",
        "main_process_ip, the address of machine 0, is missing",
        "machine_rank is 2, and num_machines is 2",
        "ports are numbers from 0 to 65535",
        "num_processes is 5, which 2 machines cannot share evenly",
        "names a device twice",
        "10 problems found",
    ]:
        assert part in err, part


@cases(
    "text, message",
    ("num_processes: 3\nparallelism_config: {tp_size: 2}", "need 2"),
    ("distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: '0,1'", "names 2 devices for 4 processes"),
    ("deepspeed_config: {deepspeed_config_file: none.json}", "there is no such file (seen from"),
    ("deepspeed_config: {zero_stage: 4}", "deepspeed_config.zero_stage is '4'; choose one of 0, 1, 2, 3"),
    ("fsdp_config: {fsdp_offload_params: perhaps}", "write true or false"),
    ("distributed_type: XLA\nuse_cpu: yes", "asks for TPUs"),
    # What cannot be read at all.
    ("", "is empty"),
)
def test_problems(validate, text, message):
    status, _, err = validate(text)
    assert status == 2 and message in err and len(err.splitlines()) <= 2


def test_which_file(accelerate, refused, default_file):
    assert "There is no file" in refused("config", "validate")
    assert "is 'none.yaml': there is no such file" in refused("config", "validate", "none.yaml")
    assert "Name one file" in refused("config", "validate", "a.yaml", "--config_file", "b.yaml")
    default_file("distributed_type: 'NO'")
    assert accelerate("config", "validate")[0] == 0
