"""The report for bug reports."""

import torch

from accelerate import __version__


def test_report(accelerate, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    status, out, _ = accelerate("env")
    assert status == 0
    assert f"- PyTorch version: {torch.__version__}" in out
    assert f"- `Accelerate` version: {__version__}" in out
    assert "- ACCELERATE_MIXED_PRECISION: bf16" in out
    assert "Configuration file: none" in out


def test_report_shows_the_configuration(accelerate, place):
    (place / "c.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}")
    out = accelerate("env", "--config_file", "c.yaml")[1]
    assert "\t- distributed_type: FSDP" in out
    assert "\t\t- fsdp_version: 2" in out


def test_configuration_that_is_not_there(accelerate):
    status, _, err = accelerate("env", "--config_file", "none.yaml")
    assert status == 2
    assert "none.yaml" in err
