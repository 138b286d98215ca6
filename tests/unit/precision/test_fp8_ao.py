"""torchao's float8 on a CPU, where it is emulated; without torchao installed, the same calls to a recorded stand-in."""

import dataclasses
import pickle
import types
import warnings

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.config.enums import FP8BackendType
from accelerate.config.fp8 import AORecipeKwargs
from accelerate.precision import fp8
from accelerate.utils.ao import convert_model_to_fp8_ao
from accelerate.utils.imports import is_torchao_available

real = pytest.mark.skipif(not is_torchao_available(), reason="needs torchao")


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 16)
    )


@dataclasses.dataclass(frozen=True)
class Config:
    enable_fsdp_float8_all_gather: bool = True
    emulate: bool = False


def accelerator(recipe, **fields):
    """A run in fp8, as the facade sees it once its construction has settled the library."""
    made = Accelerator(cpu=True, mixed_precision="bf16")
    made.ao_recipe_handler = recipe
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_settings_follow_device_and_strategy():
    cuda = torch.device("cuda")
    assert fp8.ao_config(Config(), cuda, sharded=True) == Config()
    assert fp8.ao_config(Config(), cuda, sharded=False) == Config(enable_fsdp_float8_all_gather=False)
    with pytest.warns(UserWarning, match="emulated.*emulate=True"):
        assert fp8.ao_config(Config(), torch.device("cpu"), sharded=True).emulate
    emulated = Config(emulate=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fp8.ao_config(emulated, torch.device("cpu"), sharded=True) == emulated


@pytest.fixture
def recorded(monkeypatch):
    """A converter that notes its calls and puts new parameters in, as torchao does for FSDP2."""
    calls = []

    class Float8(nn.Linear):
        pass

    def convert(model, config=None, module_filter_func=None):
        calls.append((model, config, module_filter_func))
        if module_filter_func is not None:
            return
        made = Float8(32, 32)
        with torch.no_grad():
            made.weight.copy_(model[2].weight)
        model[2] = made

    monkeypatch.setattr(
        fp8.TorchAO, "converted", lambda self, model: sum(isinstance(m, Float8) for m in model.modules())
    )
    convert.calls = calls
    return convert


def test_the_converter_is_called_once_for_each_new_model_and_optimizers_follow(recorded):
    run = accelerator(types.SimpleNamespace(config=Config(emulate=True), module_filter_func=None))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    old = model[2].weight
    objects = (model, optimizer, "something else")
    assert fp8.prepare_ao(run, objects, recorded) == objects
    assert recorded.calls == [(model, Config(emulate=True, enable_fsdp_float8_all_gather=False), None)]
    assert model[2].weight is not old
    model, optimizer = run.prepare(model, optimizer)
    assert {id(p) for p in model.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
    before = model[2].weight.detach().clone()
    run.backward(model(torch.randn(4, 16)).pow(2).sum())
    optimizer.step()
    assert not torch.equal(model[2].weight, before)
    fp8.prepare_ao(run, (model, net()), recorded)
    assert len(recorded.calls) == 2 and recorded.calls[1][0] is not model  # prepared models stay


def test_a_model_of_which_nothing_is_converted_is_named(recorded):
    run = accelerator(types.SimpleNamespace(config=Config(emulate=True), module_filter_func=lambda *args: False))
    with pytest.warns(UserWarning, match=r"converted no layer of Sequential.*5 linear layers, 2 .*module_filter_func"):
        fp8.prepare_ao(run, [net()], recorded)


def train(precision, steps=12):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if precision == "fp8":
        from torchao.float8 import Float8LinearConfig

        run = accelerator(AORecipeKwargs(config=Float8LinearConfig(emulate=True)))
        fp8.prepare_ao(run, (model, optimizer), convert_model_to_fp8_ao)
    else:
        run = Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer = run.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 16, generator=generator)
        loss = (model(inputs) - inputs).pow(2).mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@real
def test_training_in_float8_stays_near_bfloat16():
    model, losses = train("fp8")
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    assert names == ["2"]  # neither first nor last, nor those with a side of 24
    _, reference = train("bf16")
    assert losses[-1] < losses[0] * 0.97
    assert losses != reference
    assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) < 0.02


@real
def test_the_weights_of_converted_layers_are_trained_and_saved(tmp_path):
    recipe = AORecipeKwargs()
    assert (
        recipe.config.enable_fsdp_float8_all_gather
    )  # torchao replaces parameters for it; only FSDP2 has a use for that
    run = accelerator(recipe)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match="emulated"):
        fp8.prepare_ao(run, (model, optimizer), convert_model_to_fp8_ao)
    model, optimizer = run.prepare(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run.backward(model(torch.randn(4, 16)).pow(2).sum())
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    run.save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 0


@real
def test_torchaos_own_parameters_are_followed(process_group):
    """FSDP2's gathering in 8 bits needs a parameter of torchao's own type, which optimizers made before do not have."""
    from torchao.float8 import Float8LinearConfig

    recipe = AORecipeKwargs(config=Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True))
    run = Accelerator(cpu=True)
    stand_in = types.SimpleNamespace(ao_recipe_handler=recipe, device=run.device, is_fsdp2=True, prepared=run.prepared)
    model = net()
    old = model[2].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fp8.prepare_ao(stand_in, (model, optimizer), convert_model_to_fp8_ao)
    assert model[2].weight is not old and run.prepared.moved.now(old) is model[2].weight
    run.prepared.moved.follow(optimizer)
    assert any(held is model[2].weight for held in optimizer.param_groups[0]["params"])


@real
def test_the_facade_converts_at_prepare_and_pickles():
    run = Accelerator(cpu=True, mixed_precision="fp8")
    assert run.fp8_backend is FP8BackendType.AO and run.has_fp8_handler
    model = net()
    with pytest.warns(UserWarning, match="emulated"):
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"] == ["2"]
    assert model(torch.ones(2, 16)).dtype is torch.float32
    assert pickle.loads(pickle.dumps(run)).fp8_backend is FP8BackendType.AO
