"""Environment variables and what the machine says about itself."""

import pytest

from accelerate.base import environment


def test_flags_and_integers(monkeypatch):
    assert environment.str_to_bool("YES") == 1 and environment.str_to_bool("off", to_bool=True) is False
    monkeypatch.setenv("SAMPLE_A", "-1")
    monkeypatch.setenv("SAMPLE_B", "3")
    assert environment.get_int_from_env(["SAMPLE_C", "SAMPLE_A", "SAMPLE_B"], 7) == 3
    assert environment.get_int_from_env(("SAMPLE_A",), 7) == environment.get_int_from_env([], 7) == 7
    monkeypatch.setenv("SAMPLE_A", "three")
    with pytest.raises(ValueError, match="SAMPLE_A is 'three'"):
        environment.get_int_from_env(["SAMPLE_A", "SAMPLE_B"], 7)
    with pytest.raises(ValueError, match="SAMPLE_A has an invalid truth value 'three'"):
        environment.parse_flag_from_env("SAMPLE_A")
    monkeypatch.setenv("SAMPLE_A", " ")
    assert environment.parse_flag_from_env("SAMPLE_A", True) is True
    assert environment.parse_choice_from_env("SAMPLE_A") == "no"
    assert environment.get_int_from_env(["SAMPLE_A"], 7) == 7
