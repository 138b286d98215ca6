"""What `--dry-run` prints."""

import pytest

from accelerate.launch import runners
from accelerate.launch.resolve import resolve


@pytest.fixture
def lines(plan):
    return lambda line, environ: runners.describe(plan(line, environ), environ).splitlines()


def row(lines, name):
    return next(line.split(None, 2)[1:] for line in lines if line.startswith(f"{name} "))


def test_every_value_has_its_source(lines, place, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    (place / "c.yaml").write_text("{distributed_type: NO, num_processes: 2, use_cpu: true}")
    told = lines("--config_file c.yaml --debug", {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert told[0] == "2 processes on the CPU would be started by torch's elastic launcher on this machine."
    assert told[1] == "They meet at 127.0.0.1, port chosen by the system (static)."
    assert row(told, "num_processes") == ["2", "configuration file c.yaml"]
    assert row(told, "mixed_precision") == ["bf16", "environment variable ACCELERATE_MIXED_PRECISION"]
    assert row(told, "debug") == ["yes", "command line"]
    assert row(told, "num_cpu_threads_per_process") == ["4", "8 cores"]


def test_arguments_are_quoted_and_secrets_hidden(parse, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    args = parse("--cpu --num_processes 2 train.py")
    args.training_script_args = ["a b", "$HOME", "--hub_token", "hf_very_secret"]
    told = runners.describe(resolve(args), {})
    assert "train.py 'a b' '$HOME' --hub_token '(hidden)'" in told
    assert "hf_very_secret" not in told and "HF_TOKEN='(hidden)'" in told


def test_secrets_within_settings_are_hidden_and_switches_with_such_names_are_not(lines, place):
    (place / "c.yaml").write_text(
        "distributed_type: 'NO'\ntpu_env: [HF_TOKEN=hunter2, A=1]\ncommands: ['git clone https://me:hunter2@host/x']\n"
    )
    text = "\n".join(lines("--cpu --config_file c.yaml", {}))
    assert "hunter" not in text and "['HF_TOKEN=(hidden)', 'A=1']" in text
    told = lines("--dry_run --use_megatron_lm --megatron_lm_calculate_per_token_loss true", {})
    assert row(told, "megatron_lm_calculate_per_token_loss") == ["true", "command line"]
    assert "  MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS=true" in told
    assert any("Megatron-LM" in line and "not available" in line for line in told if line.startswith("note: "))
