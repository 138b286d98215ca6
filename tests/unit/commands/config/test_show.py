"""`accelerate config show`: every value with its source."""

import json

import pytest


@pytest.fixture
def file(place):
    (place / "c.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: fp16\nfsdp_config:\n  fsdp_version: 2\n"
    )
    return "c.yaml"


@pytest.fixture
def show(accelerate):
    def run(*words):
        status, out, err = accelerate("config", "show", "--json", *words)
        assert status == 0, err
        found = json.loads(out)
        return found, {row["name"]: (row["value"], row["source"], row["where"]) for row in found["settings"]}

    return run


def test_one_setting_from_each_layer(show, file, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found, rows = show("--config_file", file, "--num_machines", "3", "--all")
    assert found["config_file"] == "c.yaml"
    typed = show("--config_file", file, "--fsdp_version", "1")[1]["fsdp_version"]
    assert typed == ("1", "command line", ""), "a default that was typed is a choice"
    assert {
        "num_machines": (3, "command line", ""),
        "mixed_precision": ("bf16", "environment", "environment variable ACCELERATE_MIXED_PRECISION"),
        "num_processes": (2, "file", "c.yaml:2"),
        "fsdp_version": ("2", "file", "c.yaml:5"),
        "use_fsdp": (True, "file", "c.yaml:1"),
        "rdzv_backend": ("static", "default", ""),
    }.items() <= rows.items()
    assert "rdzv_backend" not in show("--config_file", file)[1]


def test_a_table(accelerate, file):
    status, out, _ = accelerate("config", "--config_file", file, "show", "--zero-stage", "2")
    lines = out.splitlines()
    assert (status, lines[0], lines[1].split()) == (0, "configuration file: c.yaml", ["setting", "value", "from"])
    assert "num_processes    2       c.yaml:2" in out
    assert next(line for line in lines if line.startswith("zero_stage")).endswith("(none without --use_deepspeed)")


@pytest.mark.parametrize("more", [[], ["--json"]], ids=str)
def test_secrets_are_not_printed(accelerate, place, more):
    (place / "c.yaml").write_text("distributed_type: XLA\ncommands: [export WANDB_API_KEY=hunter2]\n")
    words = ["--config_file", "c.yaml", "--env", "HF_TOKEN=hunter2", "--aws_secret_access_key", "hunter3", *more]
    status, out, _ = accelerate("config", "show", *words)
    assert status == 0 and "hunter" not in out
    assert "HF_TOKEN=(hidden)" in out and "WANDB_API_KEY=(hidden)" in out
    assert out.count("(hidden)") == 3


def test_what_a_higher_layer_rules_out_is_not_used(show, accelerate, place):
    (place / "c.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    rows = show("--config_file", "c.yaml", "--cpu")[1]
    assert rows["cpu"] == (True, "command line", "")
    assert rows["multi_gpu"] == (False, "command line", "--cpu was chosen")
    status, _, err = accelerate("config", "show", "--cpu", "--multi_gpu")
    assert status == 2 and "exclude each other" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config_file", "bad.yaml"], "line 1: num_proceses is unknown; did you mean num_processes?"),
        (["--num_processes", "two"], "two"),
    ],
)
def test_bad_input(accelerate, place, words, message):
    (place / "bad.yaml").write_text("num_proceses: 2")
    status, _, err = accelerate("config", "show", *words)
    assert status == 2 and message in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["none (", "every setting has its default"]),
        ("fsdp_config:\n  fsdp_versoin: 2\n", ["note: fsdp_config.fsdp_versoin is unknown and has no effect"]),
    ],
)
def test_what_stands_around_the_table(accelerate, place, text, words):
    (place / "c.yaml").write_text(text)
    status, out, _ = accelerate("config", "show", *(["--config_file", "c.yaml"] if text else []))
    assert status == 0
    assert all(word in out for word in words)
