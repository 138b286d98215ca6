"""Optimizer states of few bits in a checkpoint: parts that are plain, values where parts do not fit, and back."""

import pytest
import torch
from torch import nn

from accelerate.extensions.four_bit import low_bit

optim = pytest.importorskip("torchao.optim")
NAMES = ["AdamW8bit", "AdamW4bit"]


def filled(name):
    """An optimizer of a large parameter and a small one, and states with values, as it would have them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64, 96)), nn.Parameter(torch.randn(8))]
    optimizer = getattr(optim, name)(parameters, lr=1e-2)
    for parameter in parameters:
        state = optimizer.state[parameter] = {"step": torch.tensor(3.0)}
        for key, values in (("exp_avg", torch.randn_like(parameter)), ("exp_avg_sq", torch.rand_like(parameter))):
            state[key] = optimizer._new_buffer(parameter, key == "exp_avg")
            state[key].copy_(values)
    return optimizer


def in_checkpoint(optimizer):
    state = optimizer.state_dict()
    return {
        **state,
        "state": {n: {key: low_bit.plain(v) for key, v in values.items()} for n, values in state["state"].items()},
    }


def values_of(value):
    return value.dequantize() if low_bit.is_low_bit(value) else value


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_plain_and_comes_back(name):
    optimizer = filled(name)
    saved = in_checkpoint(optimizer)
    large, small = saved["state"][0], saved["state"][1]
    assert low_bit.is_parts(large["exp_avg"]) is (name == "AdamW8bit") and type(small["exp_avg"]) is torch.Tensor
    parts = large["exp_avg"].values() if name == "AdamW8bit" else [large["exp_avg"]]
    assert {torch.Tensor} == set(map(type, parts))
    fresh = getattr(optim, name)(optimizer.param_groups[0]["params"], lr=1e-2)
    fresh.load_state_dict(low_bit.rebuilt(fresh, saved))
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            again = fresh.state[parameter][key]
            assert type(again) is type(value)
            error = (values_of(again) - values_of(value)).abs().max()
            assert error <= (0 if name == "AdamW8bit" else 0.2) * values_of(value).abs().max()


def test_an_optimizer_of_32_bits_gets_values_and_gives_them():
    optimizer = filled("AdamW8bit")
    parameters = optimizer.param_groups[0]["params"]
    plain = torch.optim.AdamW(parameters)
    plain.load_state_dict(low_bit.rebuilt(plain, in_checkpoint(optimizer)))
    for parameter in parameters:
        assert torch.equal(plain.state[parameter]["exp_avg"], values_of(optimizer.state[parameter]["exp_avg"]))
    plain.state[parameters[0]]["ema"] = average = -torch.ones(64, 96)
    fresh = optim.AdamW8bit(parameters, lr=1e-2)
    fresh.load_state_dict(low_bit.rebuilt(fresh, plain.state_dict()))
    assert torch.equal(fresh.state[parameters[0]]["ema"], average), "no moment"
    for key, bound in (("exp_avg", 0.0072), ("exp_avg_sq", 0.0036)):
        given, kept = plain.state[parameters[0]][key], fresh.state[parameters[0]][key]
        assert low_bit.is_low_bit(kept) and (values_of(kept) - given).abs().max() <= bound * given.abs().max()


def test_other_states_stay_as_they_are():
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    for state in ({"form": "of its own"}, [1], plain.state_dict()):
        assert low_bit.rebuilt(plain, state) == state
    assert not low_bit.makes(plain) and low_bit.makes(filled("AdamW8bit"))
