"""Trainable 16-bit parameters become float32 in place, and the user hears what it costs."""

import pytest
import torch
from torch import nn

from accelerate.precision.master import upcast


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(3))

    def forward(self, tokens):
        return self.head(self.frozen(self.embed(tokens)))


def test_only_trainable_parameters_change_and_ties_and_objects_stay():
    model = Tied().to(torch.bfloat16)
    weight = model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.warns(UserWarning, match=r"1 trainable parameters of Tied.*bfloat16.*float32.*\+64 B"):
        added = upcast(model)
    assert added == 8 * 4 * 2
    assert model.embed.weight is weight is model.head.weight is optimizer.param_groups[0]["params"][0]
    assert weight.dtype is torch.float32
    assert model.frozen.weight.dtype is torch.bfloat16 and model.table.dtype is torch.bfloat16
    assert model._accelerate_upcast.before == {"embed.weight": torch.bfloat16}
    assert model._accelerate_upcast.added == added


def test_nothing_to_do_says_nothing(recwarn):
    model = nn.Linear(2, 2)
    assert upcast(model) == 0 and not recwarn.list and not hasattr(model, "_accelerate_upcast")
    low = nn.Linear(2, 2).half()
    with pytest.warns(UserWarning):
        assert upcast(low) == 6 * 2
    with torch.device("meta"):
        empty = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with pytest.warns(UserWarning):
        assert upcast(empty) == 32
    assert empty.weight.dtype is torch.float32 and empty.weight.is_meta
    recwarn.clear()
    assert upcast(low) == 0 and not recwarn.list


def test_a_gradient_follows_and_training_goes_on():
    model = nn.Linear(2, 2).to(torch.bfloat16)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    with pytest.warns(UserWarning):
        upcast(model)
    assert model.weight.grad.dtype is torch.float32
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_spread_parameter_changes_inside_and_outside(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    weight = model.weight
    with pytest.warns(UserWarning):
        assert upcast(model) == 32
    assert model.weight is weight and weight.dtype is torch.float32
    assert weight.to_local().dtype is torch.float32 and weight._spec.tensor_meta.dtype is torch.float32
    (weight * 2).sum().backward()
    assert weight.grad.full_tensor().dtype is torch.float32


def test_only_the_main_process_warns(recwarn):
    from accelerate.runtime import storage

    with storage.process.kept():
        storage.process.bind({"process_index": 1})
        assert upcast(nn.Linear(2, 2).half()) == 12
    assert not [item for item in recwarn.list if "trainable parameters" in str(item.message)]
