"""What works without `prepare`, or before it, under the sharding strategies; and optimizers that come too late."""

import pytest
import torch
import torch.distributed as dist

from accelerate import ParallelismConfig
from accelerate.modules.repoint import MovedParameters
from sharded_samples import batch, loss, net, sharding


@pytest.mark.parametrize("version", [1, 2])
def test_prepare_model_alone_makes_the_group_it_needs(process_group, version):
    dist.destroy_process_group()
    accelerator, model = sharding(version), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare_model(model)
    optimizer = accelerator.prepare_optimizer(optimizer)
    before = {name: value.clone() for name, value in accelerator.get_state_dict(prepared).items()}
    accelerator.backward(loss(prepared, batch()))
    optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in accelerator.get_state_dict(prepared).items())


@pytest.mark.parametrize("version", [1, 2])
def test_a_state_dict_may_be_taken_before_anything_is_prepared(process_group, version):
    dist.destroy_process_group()
    model = net()
    assert sharding(version).get_state_dict(model).keys() == model.state_dict().keys()


@pytest.mark.parametrize("version", [1, 2])
def test_prepare_model_alone_builds_the_mesh_first(process_group, monkeypatch, version):
    accelerator = sharding(version)
    accelerator.state.parallelism_config = ParallelismConfig()
    built = []
    monkeypatch.setattr(type(accelerator), "_prepare_device_mesh", lambda self: built.append(self))
    accelerator.prepare_model(net())
    assert built == [accelerator]


@pytest.mark.parametrize("version", [1, 2])
def test_an_optimizer_of_parameters_that_are_forgotten_is_refused(process_group, version):
    accelerator, model = sharding(version), net()
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model)
    accelerator.free_memory()
    with pytest.raises(ValueError, match=r"SGD\) has .* parameters as they were .*would change nothing"):
        accelerator.prepare(late)


def test_a_new_parameter_at_the_place_of_an_old_one_has_its_own_count():
    moved = MovedParameters()
    for _ in range(20):
        old, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        moved.record("weight", old, new)
        assert moved.follow(torch.optim.SGD([old]))
        del old, new


def test_parallel_parameters_can_be_moved_afterwards():
    """Torch swaps them, and refuses where weak references point to them."""
    moved = MovedParameters()
    old, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    moved.record("weight", old, new)
    torch.utils.swap_tensors(new, torch.nn.Parameter(torch.zeros(2)))
