"""Single prompts that programs import from the modules of `accelerate config`."""

import pytest

from accelerate.config.enums import DistributedType, PrecisionType
from accelerate.extensions.configure import cluster, config_utils


def answer(monkeypatch, *answers):
    lines = iter(answers)
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))


def test_a_field_is_asked_until_its_answer_can_be_used(monkeypatch, capsys):
    answer(monkeypatch, "many", "7")
    assert config_utils._ask_field("How many? ", int, error_message="Type a number.") == 7
    assert capsys.readouterr().out == "Type a number.\n"
    answer(monkeypatch, "")
    assert config_utils._ask_field("How many? ", int, default=3) == 3
    answer(monkeypatch, "maybe", "YES")
    assert config_utils._ask_field("Sure? ", config_utils._convert_yes_no_to_bool) is True


def test_a_menu_returns_an_index_or_its_value(monkeypatch):
    answer(monkeypatch, "2")
    assert config_utils.BulletMenu("Which?", ["a", "b"]).run() == 1
    answer(monkeypatch, "3")
    precision = cluster._ask_options("Which?", ["no", "fp16", "bf16"], cluster._convert_mixed_precision)
    assert precision is PrecisionType.BF16
    answer(monkeypatch, "")
    assert config_utils._ask_options("Which?", ["a", "b"], default=1) == 1
    assert config_utils._convert_distributed_mode("4") is DistributedType.MULTI_GPU
    with pytest.raises(IndexError):
        config_utils._convert_fp8_backend(3)
