"""Autocast, the wrapped forward and the gradient scaler."""

import copy
import inspect
import pickle
import types

import pytest
import torch
from torch import nn

from accelerate.precision import amp
from accelerate.precision.amp import precision


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs, scale=1.0):
        output = self.layer(inputs) * scale
        return {"logits": output, "raw_dtype": output.dtype}


def test_wrapping_twice_wraps_once_and_a_deep_copy_is_its_own():
    model = Named()
    before = set(model.__dict__)
    amp.wrap_forward(model, "cpu", precision("bf16"))
    amp.wrap_forward(model, "cpu", precision("bf16"))
    assert model.forward.__wrapped__ is Named.forward
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layer.weight.zero_(), twin.layer.bias.zero_()
    assert twin(torch.ones(1, 2))["logits"].abs().sum() == 0
    output = model(torch.ones(1, 2))
    assert output["raw_dtype"] is torch.bfloat16 and output["logits"].dtype is torch.float32
    assert output["logits"].abs().sum() != 0
    assert list(inspect.signature(model.forward).parameters) == ["inputs", "scale"]
    amp.unwrap_forward(model)
    assert set(model.__dict__) == before
    assert model(torch.ones(1, 2))["raw_dtype"] is torch.float32


def test_a_forward_replaced_on_the_instance_is_put_back():
    model = Named()
    replaced = lambda inputs: inputs * 2  # noqa: E731
    model.forward = replaced
    amp.wrap_forward(model, "cpu", precision("bf16"))
    amp.unwrap_forward(model)
    assert model.forward is replaced


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_wrapped_model_is_copied_and_pickles(again):
    model = Named()
    amp.wrap_forward(model, "cpu", precision("bf16"))
    for _ in range(2):
        restored = again(model)
        assert restored.forward.__self__ is restored
        assert torch.equal(restored(torch.ones(1, 2))["logits"], model(torch.ones(1, 2))["logits"])
        assert restored(torch.ones(1, 2))["raw_dtype"] is torch.bfloat16
        model = restored
    amp.unwrap_forward(restored)
    assert restored.forward == types.MethodType(Named.forward, restored)
    assert restored(torch.ones(1, 2))["raw_dtype"] is torch.float32


def test_float16_weights_are_refused_by_name():
    scaler = amp.make_scaler("cpu", precision("fp16"))
    with pytest.raises(ValueError, match="'weight'.*bf16"):
        amp.check_weights(nn.Linear(1, 1).half(), scaler)
    amp.check_weights(nn.Linear(1, 1).half().requires_grad_(False), scaler)
    amp.check_weights(nn.Linear(1, 1).half(), None)
