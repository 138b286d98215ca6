"""Operations between processes, for other programs."""

import pickle

import pytest
import torch
from torch import nn

from accelerate.comm import operations as core
from accelerate.extensions.compat import operations


def test_a_decorated_collective_compares_its_argument(monkeypatch):
    compared = []
    monkeypatch.setattr(
        operations, "compare_arguments", lambda communicator, name, data, module: compared.append(name)
    )
    operations.verify_operation(core.gather)(tensor=torch.ones(1))
    assert compared == ["gather"]
    with pytest.raises(TypeError, match="tensor"):
        operations.verify_operation(lambda tensor: tensor)()


def test_nothing_is_gathered_without_zero_stage_3():
    weight = nn.Parameter(torch.ones(1))
    with (
        operations.GatheredParameters(weight),
        operations.GatheredParameters([weight], enabled=False),
        operations.GatheredParameters(None),
    ):
        assert weight.item() == 1


def test_strided_nested_tensors_have_no_shape():
    rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for call in (
        operations.get_shape,
        operations.get_data_structure,
        lambda data: operations.pad_input_tensors(data, 2, 3),
    ):
        with pytest.raises(TypeError, match="to_padded_tensor"):
            call({"x": rows})


class Half(nn.Module):
    def forward(self, x):
        return {"out": x.half(), "rest": (x.bfloat16(), 3)}


def test_converted_forward():
    model = Half()
    forward = operations.convert_outputs_to_fp32(model.forward)
    result = forward(torch.ones(1))
    assert result["out"].dtype is result["rest"][0].dtype is torch.float32
    assert forward.__name__ == "forward" and isinstance(forward.__wrapped__, operations.ConvertOutputsToFp32)
    assert forward.__wrapped__.__wrapped__ == model.forward
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(forward.__wrapped__)
    model.forward = forward
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(model)
