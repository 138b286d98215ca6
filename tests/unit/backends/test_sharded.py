"""What the sharding strategies share: groups of one, the order of preparing, the note about memory, and whose optimizer it is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate.backends.sharded import model_of
from accelerate.config.enums import DistributedType
from sharded_samples import batch, loss, net, sharding


@pytest.mark.parametrize("version", [1, 2])
def test_a_process_that_is_alone_gets_a_group(process_group, version):
    dist.destroy_process_group()
    accelerator = sharding(version)
    assert accelerator.distributed_type == DistributedType.FSDP
    assert not dist.is_initialized()
    accelerator.prepare(net())
    assert dist.get_world_size() == 1


@pytest.mark.parametrize("version", [1, 2])
def test_results_come_in_the_order_of_the_arguments(process_group, version):
    accelerator, model = sharding(version), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    first, loader, second, third = accelerator.prepare(
        schedule, torch.utils.data.DataLoader(torch.zeros(2, 1)), optimizer, model
    )
    kinds = [type(item).__name__ for item in (first, loader, second)]
    assert kinds == ["AcceleratedScheduler", "DataLoaderShard", "AcceleratedOptimizer"]
    assert accelerator.unwrap_model(third) is model
    now = {id(parameter) for parameter in third.parameters()}
    assert {id(parameter) for parameter in second.param_groups[0]["params"]} == now


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_run_is_saved_and_loaded_into_a_new_one(process_group, tmp_path, version, kind):
    def run():
        accelerator = sharding(version, state_dict_type=kind)
        model = net()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def step(accelerator, model, optimizer):
        accelerator.backward(loss(model, batch()))
        optimizer.step()
        optimizer.zero_grad()

    first = run()
    step(*first)
    first[0].save_state(str(tmp_path / "state"))
    step(*first)
    wanted = first[0].get_state_dict(first[1])
    second = run()
    second[0].load_state(str(tmp_path / "state"))
    step(*second)
    found = second[0].get_state_dict(second[1])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_an_optimizer_finds_its_model():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert model_of(torch.optim.SGD(models[1].parameters()), models) is models[1]
    with pytest.raises(ValueError, match=r"No prepared model has all parameters of the optimizer \(SGD\).*of its own"):
        model_of(torch.optim.SGD([*models[0].parameters(), *models[1].parameters()]), models)


@pytest.mark.parametrize("version", [1, 2])
def test_fp16_scales_and_skips(process_group, version):
    accelerator = sharding(version, {"mixed_precision": "fp16"})
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = accelerator.get_state_dict(model)
    accelerator.backward(loss(model, batch()) * float("inf"))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.step_was_skipped
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert accelerator.scaler.get_scale() == 2**15


@pytest.mark.parametrize("version", [1, 2])
def test_a_configuration_of_states_that_has_no_effect_is_said_once(process_group, caplog, version):
    from torch.distributed.fsdp import FullStateDictConfig

    accelerator = sharding(
        version, state_dict_type="FULL_STATE_DICT", state_dict_config=FullStateDictConfig(rank0_only=False)
    )
    accelerator.prepare(net())
    accelerator.prepare(net())
    assert caplog.text.count("state_dict_config=FullStateDictConfig") == 1


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_of_configurations_that_nobody_gave_nothing_is_said(process_group, caplog, version, kind):
    sharding(version, state_dict_type=kind).prepare(net())
    assert "has no effect" not in caplog.text
