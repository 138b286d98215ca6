"""The report for bug reports."""

from pathlib import Path
from unittest.mock import Mock

import torch

from accelerate.extensions.env import command
from cases import cases


def test_what_cannot_be_read_or_loaded_is_a_line_of_the_report(accelerate, place, monkeypatch):
    monkeypatch.setattr(command, "_torch", Mock(side_effect=ImportError("libtorch_cpu.so: cannot open")))
    (place / "c.yaml").write_text("num_processes: [1\naws_secret_access_key: hunter2: x\n")
    status, out, err = accelerate("env", "--config_file", "c.yaml")
    assert (status, err) == (0, "") and "- `Accelerate` configs: cannot be read: " in out and "c.yaml" in out
    assert "hunter" not in out and "cannot open" in out
    assert f"- PyTorch version: {torch.__version__.partition('+')[0]}" in out


def test_secrets_stay_secret(accelerate, place, monkeypatch):
    (place / "c.yaml").write_text(
        "tpu_env: ['HF_TOKEN=hunter2 hunter3', 'A=1']\ncommands: ['export WANDB_API_KEY=hunter2', ls]\n"
        "distributed_type: XLA\ntpu_name: name\ntpu_zone: zone\npassword: hunter2\n"
    )
    for name in ("HF_TOKEN", "ACCELERATE_API_KEY", "ACCELERATE_PASSWORD", "SLURM_CREDENTIALS", "TORCH_SECRET_NAME"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("ACCELERATE_STORE", "s3://me:hunter2@host/bucket")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    out = accelerate("env", "--config_file", "c.yaml")[1]
    assert "hunter" not in out
    assert "\t- HF_TOKEN: (hidden)" in out
    assert "\t- ACCELERATE_STORE: s3://(hidden)@host/bucket" in out
    assert "AWS_SECRET" not in out  # says nothing about a run
    assert "A=1" in out


def test_the_first_line_says_which_accelerate_this_is(accelerate, place, monkeypatch):
    first = next(line for line in accelerate("env")[1].splitlines() if line.startswith("- "))
    assert first.startswith("- Which accelerate: the independent fork, imported from ")
    assert first.endswith(str(Path(command.__file__).parents[2]))
    monkeypatch.setattr(command, "_version", lambda name: "1.15.0" if name == "accelerate" else "")
    assert "; pip has accelerate 1.15.0 installed, " in accelerate("env")[1]


@cases(
    "package, version, fault",
    ("deepspeed", "0.18.2", "gradients are too small"),
    ("deepspeed", "0.18.3+local", "called more than once"),
    ("deepspeed", "0.17.5", ""),
    ("deepspeed", "0.19.4", ""),
    ("bitsandbytes", "0.41.0", "round wrongly"),
    ("bitsandbytes", "0.48.0", "wrong results"),
    ("bitsandbytes", "0.48.1", ""),
)
def test_faults_of_installed_releases_are_listed(monkeypatch, package, version, fault):
    monkeypatch.setattr(command, "_version", lambda name: version if name == package else "")
    faults = command._faults()
    assert len(faults) == bool(fault)
    assert all(text.startswith(f"{package} {version}: ") and fault in text and "https://" in text for text in faults)
