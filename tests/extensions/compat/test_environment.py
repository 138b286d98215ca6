"""Environment variables and this machine, for other programs."""

import sys
import types

import pytest
import torch

from accelerate.extensions.compat import environment


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("A", value) for value in ("", None, "a b", "1\nB=2", "1\rB=2", "1\0", "1;rm", "a<b", "a>b", "a\tb")),
        *((key, "secret") for key in ("", "A=", "A=B", "A\n", "A;", "A B", "A\0", "9", "A-B", "BASH_FUNC_x%%")),
    ],
)
def test_lines_of_an_environment_file_leave_out_dangerous_ones(key, value, caplog):
    good = {"A": "1", "_b2": "x=y", "C": 3, "D": "$HOME/'x'"}
    lines = ["A=1\n", "_b2=x=y\n", "C=3\n", "D=$HOME/'x'\n"]
    assert environment.convert_dict_to_env_variables(good) == lines and not caplog.records
    assert environment.convert_dict_to_env_variables({key: value, "GOOD": "1"}) == ["GOOD=1\n"]
    assert "not passed on" in caplog.text and "secret" not in caplog.text


def test_current_device_type(monkeypatch):
    usable = types.SimpleNamespace(is_available=lambda: True)
    unusable = types.SimpleNamespace(is_available=lambda: False)
    for kind in ("cuda", "mlu", "sdaa", "musa", "npu", "xpu", "hpu", "neuron"):
        monkeypatch.setattr(torch, kind, unusable, raising=False)
    assert environment.get_current_device_type() == ("cuda", "MULTI_GPU")
    monkeypatch.setattr(torch, "hpu", usable, raising=False)
    assert environment.get_current_device_type() == ("hpu", "MULTI_HPU")
    monkeypatch.setattr(torch, "cuda", usable)
    assert environment.get_current_device_type() == ("cuda", "MULTI_GPU")


def test_deepspeed_required(monkeypatch):
    state = {}
    storage = types.SimpleNamespace(accelerator=types.SimpleNamespace(current=state))
    monkeypatch.setitem(sys.modules, "accelerate.runtime.storage", storage)

    @environment.deepspeed_required
    def engine():
        return 1

    assert engine() == 1
    state["distributed_type"] = "DEEPSPEED"
    assert engine() == 1
    state["distributed_type"] = "MULTI_GPU"
    with pytest.raises(ValueError, match="engine needs DeepSpeed.*MULTI_GPU.*use_deepspeed"):
        engine()
