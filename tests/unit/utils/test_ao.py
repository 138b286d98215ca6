import sys
import types

import pytest
from torch import nn

from accelerate.utils import ao, imports


def net():
    return nn.Sequential(
        nn.Linear(32, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8)), nn.Linear(48, 32)
    )


@pytest.fixture
def torchao(monkeypatch):
    """A torchao that converts by replacing the class of layers."""

    class Float8Linear(nn.Linear):
        pass

    def convert(model, module_filter_fn, config="default"):
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module_filter_fn(module, name):
                module.__class__ = Float8Linear
        model.config = config

    float8 = types.ModuleType("torchao.float8")
    float8.convert_to_float8_training = convert
    inner = types.ModuleType("torchao.float8.float8_linear")
    inner.Float8Linear = Float8Linear
    for module in (types.ModuleType("torchao"), float8, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(imports, "is_torchao_available", lambda: True)
    return Float8Linear


@pytest.mark.parametrize(
    ("options", "converted"),
    [({}, "2.0"), ({"config": "mine", "module_filter_func": lambda module, name: name == "0"}, "0")],
)
def test_conversion_spares_first_last_and_odd_layers_or_what_a_filter_says(torchao, options, converted):
    model = net()
    assert not ao.has_ao_layers(model)
    ao.convert_model_to_fp8_ao(model, **options)
    assert [name for name, module in model.named_modules() if isinstance(module, torchao)] == [converted]
    assert ao.has_ao_layers(model) and model.config == options.get("config", "default")
