"""The plugin for torch.compile."""

import pytest
import torch

from accelerate.config.dynamo import TorchDynamoPlugin
from accelerate.config.enums import DynamoBackend


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION"):
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}", raising=False)


def test_defaults():
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("default", False, None)
    assert (plugin.options, plugin.disable, plugin.use_regional_compilation) == (None, False, False)
    assert plugin.to_kwargs() == {}
    assert plugin.to_dict()["backend"] == "no"


def test_variables_fill_what_was_not_given(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "0")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "yes")
    plugin = TorchDynamoPlugin()
    assert plugin.use_regional_compilation is True
    assert plugin.to_kwargs() == {"backend": "eager", "mode": "max-autotune", "fullgraph": True, "dynamic": False}
    given = TorchDynamoPlugin(
        backend="inductor", mode="default", fullgraph=False, dynamic=True, use_regional_compilation=False
    )
    assert given.to_kwargs() == {"backend": "inductor", "dynamic": True}
    assert given.use_regional_compilation is False


@pytest.mark.parametrize("backend", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_a_backend_may_be_written_in_any_case(backend):
    assert TorchDynamoPlugin(backend=backend).backend is DynamoBackend.INDUCTOR


def test_an_unknown_backend_lists_the_known_ones(monkeypatch):
    with pytest.raises(ValueError, match="'GCC' is not a valid DynamoBackend.*'INDUCTOR'"):
        TorchDynamoPlugin(backend="gcc")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "perhaps")
    with pytest.raises(ValueError, match="ACCELERATE_DYNAMO_USE_DYNAMIC is 'perhaps'"):
        TorchDynamoPlugin()


def test_the_arguments_are_those_of_torch_compile():
    plugin = TorchDynamoPlugin(backend="eager", fullgraph=True, dynamic=False)
    compiled = torch.compile(torch.nn.Linear(2, 2), **plugin.to_kwargs())
    assert compiled(torch.ones(1, 2)).shape == (1, 2)


def test_disable_and_options_reach_torch():
    options = {"a": [1]}
    kwargs = TorchDynamoPlugin(backend="inductor", options=options, disable=True).to_kwargs()
    assert kwargs == {"backend": "inductor", "options": {"a": [1]}, "disable": True}
    assert kwargs["options"] is not options
