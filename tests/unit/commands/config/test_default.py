"""`accelerate config default`: a file without questions."""

import json

import pytest
import yaml

from accelerate.commands.config.default import write_basic_config


@pytest.mark.parametrize(
    ("device", "count", "kind", "processes", "cpu"),
    [
        ("cpu", 0, "NO", 1, True),
        ("cuda", 1, "NO", 1, False),
        ("cuda", 4, "MULTI_GPU", 4, False),
        ("xpu", 2, "MULTI_XPU", 2, False),
    ],
)
def test_file_describes_the_machine(place, machine, device, count, kind, processes, cpu):
    machine(device, count)
    path = write_basic_config("bf16", place / "deep" / "c.yaml")
    wanted = {"distributed_type": kind, "num_processes": processes, "use_cpu": cpu, "mixed_precision": "bf16"}
    assert wanted.items() <= yaml.safe_load(path.read_text()).items()


def test_existing_file_stays(place, capsys):
    (place / "c.yaml").write_text("mine")
    assert write_basic_config(save_location=place / "c.yaml") is False
    assert (place / "c.yaml").read_text() == "mine" and "stays as it is" in capsys.readouterr().out


def test_precision_is_checked(place):
    with pytest.raises(ValueError, match="mixed_precision is 'fp4'; choose one of no, fp16, bf16, fp8"):
        write_basic_config("fp4", place / "c.yaml")
    assert "mixed_precision: fp8" in write_basic_config("fp8", place / "c.yaml").read_text()


def test_command(accelerate, place, machine):
    machine("cpu", 0)
    status, out, _ = accelerate("config", "default", "--config_file", "c.json", "--mixed_precision", "bf16")
    assert (status, "c.json" in out) == (0, True)
    assert json.loads((place / "c.json").read_text())["mixed_precision"] == "bf16"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "folder is a folder or a device; name a file"),
        ("", "is ''; name a file"),
        ("file/c.yaml", "is no folder that you may write to"),
    ],
)
def test_what_is_no_file_is_refused(accelerate, place, name, message):
    (place / "folder").mkdir()
    (place / "file").touch()
    status, out, err = accelerate("config", "default", "--config_file", name)
    assert (status, out) == (2, "") and message in err
