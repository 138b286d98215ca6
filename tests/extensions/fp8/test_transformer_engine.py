import contextlib
import dataclasses
import sys
import types

import pytest
import torch
from torch import nn

from accelerate.extensions.fp8 import transformer_engine as te


class FakeLinear(nn.Linear):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device=None):
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)
        self.use_bias = bias


class FakeNorm(nn.Module):
    def __init__(self, size, eps=1e-5, params_dtype=None, device=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: str = "hybrid"
    amax_history_len: int = 1024


@dataclasses.dataclass
class MXFP8BlockScaling:
    margin: int = 0


@pytest.fixture
def engine(monkeypatch):
    """A Transformer Engine whose layers are plain ones and whose context notes how it was entered."""
    entered = []

    @contextlib.contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        entered.append((enabled, fp8_recipe))
        yield

    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.LayerNorm, pytorch.fp8_autocast = FakeLinear, FakeNorm, fp8_autocast
    recipe = types.ModuleType("transformer_engine.common.recipe")
    recipe.DelayedScaling, recipe.MXFP8BlockScaling = DelayedScaling, MXFP8BlockScaling
    recipe.Format = types.SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    common = types.ModuleType("transformer_engine.common")
    common.recipe = recipe
    root = types.ModuleType("transformer_engine")
    root.pytorch, root.common = pytorch, common
    for module in (root, pytorch, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(te, "is_transformer_engine_available", lambda: True)
    return entered


def net():
    return nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 16, bias=False)), nn.Linear(16, 3)
    )


def test_there_and_back(engine):
    model = net()
    nn.init.normal_(model[1].weight)
    x = torch.randn(2, 16)
    before = model(x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    te.convert_model(model)
    kinds = [FakeLinear, FakeNorm, FakeLinear, nn.Linear]  # 3 is no multiple of 16
    assert [type(module) for module in (model[0], model[1], model[2][0], model[3])] == kinds
    assert te.has_transformer_engine_layers(model)
    te.convert_model(model, to_transformer_engine=False)
    assert not te.has_transformer_engine_layers(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), before)
    linear, norm = net(), net()
    te.convert_model(norm, _convert_linear=False)
    te.convert_model(linear, _convert_ln=False)
    assert [type(module) for module in (*norm[:2], *linear[:2])] == [nn.Linear, FakeNorm, FakeLinear, nn.LayerNorm]


def handler(**options):
    return types.SimpleNamespace(to_kwargs=lambda: options, to_dict=lambda: options, **options)


def test_recipe(engine, monkeypatch):
    model = nn.Linear(2, 2)
    settings = handler(fp8_format="E4M3", margin=2, use_autocast_during_eval=True, backend="TE")
    assert te.apply_fp8_autowrap(model, settings) is model
    model.eval()(torch.ones(1, 2))
    with pytest.warns(UserWarning, match="interval"):  # an option of another version
        te.apply_fp8_autowrap(nn.Linear(2, 2), handler(interval=3))
    blocks, model = handler(use_mxfp8_block_scaling=True, margin=1), nn.Linear(2, 2)
    monkeypatch.setattr(te, "is_transformer_engine_mxfp8_available", lambda: False)
    with pytest.raises(ValueError, match="use_mxfp8_block_scaling"):
        te.apply_fp8_autowrap(model, blocks)
    monkeypatch.setattr(te, "is_transformer_engine_mxfp8_available", lambda: True)
    te.apply_fp8_autowrap(model, blocks)
    model(torch.ones(1, 2))
    assert engine == [(True, DelayedScaling(margin=2, fp8_format="e4m3")), (True, MXFP8BlockScaling(margin=1))]
