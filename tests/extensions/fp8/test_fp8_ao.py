"""torchao's float8 on a CPU, where it is emulated."""

import dataclasses
import pickle
import warnings

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.config.enums import FP8BackendType
from accelerate.extensions.fp8 import fp8
from accelerate.extensions.fp8.ao import torchao_required
from accelerate.state import AcceleratorState
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


def test_torchao_is_asked_for_when_the_function_is_called(machine):
    convert = torchao_required(lambda model: model)
    with pytest.raises(ImportError, match="needs torchao.*pip install torchao"):
        convert(3)
    machine.install("torchao", version="0.7")
    assert convert(3) == 3


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


def train(precision, steps=12):
    AcceleratorState._reset_state(True)
    model = net()
    run = Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 16, generator=generator)
        loss = (model(inputs) - inputs).pow(2).mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return run, model, losses


@real
def test_training_in_float8_stays_near_bfloat16_and_pickles(tmp_path):
    with pytest.warns(UserWarning, match="emulated"):
        run, model, losses = train("fp8")
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    assert names == ["2"]  # neither first nor last, nor those with a side of 24
    before, untrained = model[2].weight, net()[2].weight
    assert not torch.equal(before, untrained), "converted layers are trained"
    run.save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert run.fp8_backend is FP8BackendType.AO and run.has_fp8_handler
    assert pickle.loads(pickle.dumps(run)).fp8_backend is FP8BackendType.AO
    reference = train("bf16")[2]
    assert losses[-1] < losses[0] * 0.97 and losses != reference
    assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) < 0.02
