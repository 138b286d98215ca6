"""Transformer Engine, of which a stand-in is there: which layers it gets, with which values, and how its context is entered."""

import contextlib
import dataclasses
import sys
import types

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.extensions.fp8 import fp8, recipes
from accelerate.extensions.fp8 import transformer_engine as library


class Linear(nn.Linear):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device=None):
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)
        self.use_bias = bias


class LayerNorm(nn.LayerNorm):
    def __init__(self, size, eps=1e-5, params_dtype=None, device=None):
        super().__init__(size, eps=eps, dtype=params_dtype, device=device)


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    interval: int = 1
    fp8_format: str = "of HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"  # theirs, where ours is most_recent
    override_linear_precision: tuple = (False, False, False)


@dataclasses.dataclass
class MXFP8BlockScaling:
    margin: int = 0


@pytest.fixture
def engine(monkeypatch):
    """The package, as far as it is used; its context notes how it was entered."""
    entered = []

    @contextlib.contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        entered.append((enabled, fp8_recipe))
        yield

    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.LayerNorm, pytorch.fp8_autocast = Linear, LayerNorm, fp8_autocast
    recipe = types.ModuleType("transformer_engine.common.recipe")
    recipe.DelayedScaling, recipe.MXFP8BlockScaling = DelayedScaling, MXFP8BlockScaling
    recipe.Format = types.SimpleNamespace(HYBRID="of HYBRID", E4M3="of E4M3")
    common, root = types.ModuleType("transformer_engine.common"), types.ModuleType("transformer_engine")
    common.recipe, root.pytorch, root.common = recipe, pytorch, common
    for module in (root, pytorch, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(library, "is_transformer_engine_available", lambda: True)
    monkeypatch.setattr(recipes, "is_transformer_engine_available", lambda: True)
    return entered


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Linear(16, 16)
        self.twin = nn.Linear(16, 16)
        self.twin.weight = self.inner.weight
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.twin(self.inner(self.norm(self.embed(tokens)))))


def accelerator(recipe):
    made = Accelerator(cpu=True, mixed_precision="bf16")
    made.te_recipe_handler = recipe
    made.extensions.attach = lambda *_: False  # bf16 stands in for fp8, and would refuse the recipe
    return made


def test_layers_values_ties_and_optimizers(engine):
    run, model = accelerator(recipes.TERecipeKwargs()), Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    embedding = model.embed.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fp8.prepare_te(run, (model, optimizer))
    assert [type(m) for m in (model.norm, model.inner, model.twin, model.head)] == [LayerNorm, Linear, Linear, Linear]
    assert fp8.TransformerEngine().converted(model) == 4
    assert model.head.weight is model.embed.weight is embedding and model.twin.weight is model.inner.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model, optimizer = run.prepare(model, optimizer)
    assert {id(p) for p in model.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
    output = model(torch.arange(8))
    assert output.dtype is torch.float32
    run.backward(output.pow(2).sum())
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [enabled for enabled, _ in engine] == [True]


def test_the_whole_recipe_reaches_the_library_in_training_and_where_wanted_in_evaluation(engine, monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_WGRAD", "true")
    run, model = accelerator(recipes.TERecipeKwargs(fp8_format="E4M3", amax_history_len=16, interval=3)), Tied()
    fp8.prepare_te(run, (model,))
    model(torch.arange(4))
    model.eval()(torch.arange(4))
    wanted = DelayedScaling(2, 3, "of E4M3", 16, "most_recent", (False, False, True))
    assert engine == [(True, wanted), (False, wanted)]


def test_prepared_models_and_those_that_run_in_fp8_stay(engine):
    run, model = accelerator(recipes.TERecipeKwargs()), Tied()
    fp8.prepare_te(run, (model,))
    forward = model.forward
    fp8.prepare_te(run, (model,))
    assert model.forward is forward
    prepared = run.prepare(model)
    inside = prepared.forward
    fp8.prepare_te(run, (prepared,))
    assert prepared.forward is inside


def test_a_model_of_which_nothing_is_converted_is_named(engine):
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="converted no layer of Linear"):
        fp8.prepare_te(accelerator(recipes.TERecipeKwargs()), (model,))
    assert not library.runs_in_fp8(model)


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
    library.convert_model(model)
    kinds = [Linear, LayerNorm, Linear, nn.Linear]  # 3 is no multiple of 16
    assert [type(module) for module in (model[0], model[1], model[2][0], model[3])] == kinds
    assert library.has_transformer_engine_layers(model)
    library.convert_model(model, to_transformer_engine=False)
    assert not library.has_transformer_engine_layers(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), before)
    linear, norm = net(), net()
    library.convert_model(norm, _convert_linear=False)
    library.convert_model(linear, _convert_ln=False)
    assert [type(module) for module in (*norm[:2], *linear[:2])] == [nn.Linear, LayerNorm, Linear, nn.LayerNorm]


def handler(**options):
    return types.SimpleNamespace(to_kwargs=lambda: options, to_dict=lambda: options, **options)


def test_recipe(engine, monkeypatch):
    model = nn.Linear(2, 2)
    settings = handler(fp8_format="E4M3", margin=2, use_autocast_during_eval=True, backend="TE")
    assert library.apply_fp8_autowrap(model, settings) is model
    model.eval()(torch.ones(1, 2))
    with pytest.warns(UserWarning, match="reduce_amax"):  # an option of another version
        library.apply_fp8_autowrap(nn.Linear(2, 2), handler(reduce_amax=3))
    blocks, model = handler(use_mxfp8_block_scaling=True, margin=1), nn.Linear(2, 2)
    monkeypatch.setattr(library, "is_transformer_engine_mxfp8_available", lambda: False)
    with pytest.raises(ValueError, match="use_mxfp8_block_scaling"):
        library.apply_fp8_autowrap(model, blocks)
    monkeypatch.setattr(library, "is_transformer_engine_mxfp8_available", lambda: True)
    library.apply_fp8_autowrap(model, blocks)
    model(torch.ones(1, 2))
    assert engine == [(True, DelayedScaling(margin=2, fp8_format="of E4M3")), (True, MXFP8BlockScaling(margin=1))]
