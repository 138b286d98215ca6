"""Sizes of models; the Hub is never asked."""

import sys
import types

import pytest
import torch

from accelerate.commands import estimate
from accelerate.launch.errors import LaunchError


@pytest.fixture
def model(monkeypatch):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    monkeypatch.setattr(estimate, "create_empty_model", lambda *args: model)
    return model


def test_command_prints_a_table(accelerate, model):
    status, out, _ = accelerate("estimate-memory", "some-model", "--dtypes", "float32", "float16", "int8")
    assert status == 0
    assert "Memory Usage for loading `some-model`" in out
    float32, float16, int8 = [line for line in out.splitlines() if "bytes" in line]
    assert [part.strip() for part in float32.strip("│").split("│")] == [
        "float32",
        "64.0 bytes",
        "96.0 bytes",
        "384 bytes",
    ]
    assert "48.0 bytes" in float16
    assert "N/A" in int8


def test_training_usage():
    assert estimate.estimate_training_usage(100, "float32")["step"] == 400
    assert estimate.estimate_training_usage(100, "float16") == {
        "model": 100,
        "optimizer": 200,
        "gradients": 150,
        "step": 200,
    }
    assert set(estimate.estimate_training_usage(100, "int8").values()) == {-1}
    assert set(estimate.estimate_training_usage(100, "fp8", "O1").values()) == {-1}


def test_table_is_rectangular():
    lines = estimate.create_ascii_table(["a", "b"], [["1", "22"], ["333", "4"]], "A long title").splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "A long title" in lines[1]


def test_hub_names():
    assert estimate.add_timm_hub_prefix("resnet50") == "resnet50"
    assert estimate.add_timm_hub_prefix("timm/resnet50") == "hf-hub:timm/resnet50"


@pytest.mark.parametrize(
    ("text", "kind"), [("Unknown model (x)", "timm"), ("x model type y", "transformers"), ("z", "unknown")]
)
def test_check_has_model(text, kind):
    assert estimate.check_has_model(ValueError(text)) == kind


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("gated", "is gated"),
        ("repo", "has no model"),
        (False, "cannot be reached"),
        (types.SimpleNamespace(library_name=None), "give --library_name"),
        (types.SimpleNamespace(library_name="keras"), "'keras'"),
    ],
)
def test_models_that_cannot_be_built(monkeypatch, answer, message):
    monkeypatch.setattr(estimate, "verify_on_hub", lambda repo, token=None: answer)
    with pytest.raises(LaunchError, match=message):
        estimate.create_empty_model("owner/name", None)


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_library_that_is_not_installed(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(LaunchError, match=f"{library} is not installed"):
        estimate.create_empty_model("x", library)
