"""`accelerate config`, without a terminal."""

import io
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
import yaml

from accelerate.commands.config import config_utils
from accelerate.commands.config.config import get_user_input
from accelerate.config.enums import DistributedType, FP8BackendType, PrecisionType


@pytest.fixture
def type_lines(monkeypatch, machine):
    machine()

    def typed(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return typed


def test_a_file_in_the_default_place(accelerate, type_lines, place):
    type_lines("", "2", "", "", "", "", "", "", "")
    status, out, err = accelerate("config")
    assert (status, err) == (0, "")
    path = place / "home" / "accelerate" / "default_config.yaml"
    assert yaml.safe_load(path.read_text())["distributed_type"] == "MULTI_CPU"
    assert f"Wrote {path}. `accelerate launch SCRIPT` runs with it." in out


@pytest.mark.parametrize("text", ["a: [", "num_proceses: 3\ndistributed_type: NO\n"])
def test_a_faulty_file_is_kept(accelerate, type_lines, place, text):
    (place / "c.yaml").write_text(text)
    type_lines(*[""] * 9)
    status, out, _ = accelerate("config", "--config_file", "c.yaml")
    assert status == 0
    assert (place / "c.yaml.bak").read_text() == text
    assert "kept at" in out


def test_a_place_that_cannot_be_written_is_told_first(accelerate, type_lines, place):
    type_lines()
    status, out, err = accelerate("config", "--config_file", str(place))
    assert status == 2
    assert "is a folder; name a file in it" in err
    assert out == ""


@pytest.mark.parametrize(
    ("end", "status", "said"), [(EOFError, 2, "nothing was written"), (KeyboardInterrupt, 130, "interrupted")]
)
def test_an_early_end_writes_nothing(accelerate, monkeypatch, place, end, status, said):
    monkeypatch.setattr("builtins.input", Mock(side_effect=end))
    ended, _, err = accelerate("config", "--config_file", "c.yaml")
    assert (ended, said in err) == (status, True)
    assert os.listdir(place) == []


def test_in_process(type_lines):
    type_lines("1", "", "yes", "", "3", "")
    found = get_user_input()
    assert (found.use_cpu, found.mixed_precision) == (True, "bf16")


def test_subcommands(accelerate):
    status, out, _ = accelerate("config", "--help")
    assert status == 0
    for word in ("default", "update", "show", "validate", "--config_file"):
        assert word in out
    for word in ("default", "update", "show", "validate"):
        status, out, _ = accelerate("config", word, "--help")
        assert status == 0
        assert "<command>" not in out
    status, _, err = accelerate("config", "shwo")
    assert status == 2
    assert "shwo" in err


def test_what_other_questionnaires_use(type_lines, capsys):
    type_lines("x", "3", "", "", "no")
    assert config_utils._ask_field("How many? ", int, error_message="A number, please.") == 3
    assert "A number, please." in capsys.readouterr().out
    assert config_utils._ask_field("How many? ", int, default=5) == 5
    assert config_utils._ask_field("Which name? ") == ""
    assert config_utils._ask_field("Really?", config_utils._convert_yes_no_to_bool, default=True) is False
    assert config_utils._convert_distributed_mode(4) is DistributedType.MULTI_GPU
    assert config_utils._convert_fp8_backend(1) is FP8BackendType.TE
    assert config_utils._convert_mixed_precision("2") is PrecisionType.BF16
    assert config_utils._convert_dynamo_backend(2) == "INDUCTOR"
    assert config_utils._convert_compute_environment(1).value == "AMAZON_SAGEMAKER"
    assert config_utils._convert_sagemaker_distributed_mode(2).value == "MODEL_PARALLEL"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["default"], "saved at c.yaml"),
        (["show"], "configuration file: c.yaml"),
        (["update"], "Updated c.yaml"),
        (["validate"], "c.yaml: no problem found"),
        (["show", "--config_file", "d.yaml"], "configuration file: d.yaml"),
    ],
)
def test_a_file_before_the_subcommand_is_meant(accelerate, place, machine, words, what):
    machine()
    default = place / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("fp16: true\n")
    (place / "d.yaml").write_text("distributed_type: 'NO'\n")
    if words != ["default"]:
        (place / "c.yaml").write_text("distributed_type: 'NO'\n")
    status, out, err = accelerate("config", "--config_file", "c.yaml", *words)
    assert (status, err) == (0, "")
    assert what in out
    assert default.read_text() == "fp16: true\n"


@pytest.mark.parametrize("words", [[], ["default"], ["show"], ["update"], ["validate"]], ids=str)
def test_an_empty_name_is_not_the_default_file(accelerate, type_lines, place, words):
    default = place / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("fp16: true\ndistributed_type: 'NO'\n")
    type_lines(*[""] * 12)
    status, out, err = accelerate("config", *words, "--config_file", "")
    assert (status, out) == (2, "")
    assert "''" in err
    assert default.read_text() == "fp16: true\ndistributed_type: 'NO'\n"


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_streams_that_were_closed_before(place, stream):
    code = f"import sys, os; sys.{stream} = None; sys.argv = ['accelerate', 'config']; import runpy; "
    code += "runpy.run_module('accelerate.commands.accelerate_cli', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "nothing was written" in done.stderr
    assert "Traceback" not in done.stderr
