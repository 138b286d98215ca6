"""FSDP2 through the Accelerator, in one process: a step, accumulation, evaluation, compilation, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.parallel.shard import is_sharded
from sharded_samples import batch, loss, net, sharding

pytestmark = pytest.mark.usefixtures("process_group")


def test_no_sync_is_left_again_after_an_error(monkeypatch):
    accelerator = sharding(2)
    model = accelerator.prepare(net())
    calls = []
    monkeypatch.setattr(model, "set_requires_gradient_sync", calls.append)
    with pytest.raises(KeyError), accelerator.no_sync(model):
        raise KeyError
    assert calls == [False, True]
    assert accelerator._window.apart is False


def test_what_no_sync_costs_is_said_once(caplog):
    caplog.set_level("INFO")
    accelerator = sharding(2)
    model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False))
    model[1].requires_grad_(False)  # has no gradients to keep
    accelerator.state.fsdp_plugin.auto_wrap_policy = None
    model = accelerator.prepare(model)
    for _ in range(2):
        with accelerator.no_sync(model):
            pass
    said = [record.getMessage() for record in caplog.records if "without synchronisation" in record.getMessage()]
    assert len(said) == 1
    assert "those of 262144 trainable parameters are 1.0 MiB, where this rank's shards are 1.0 MiB" in said[0]
    assert "sync_each_batch=True" in said[0]


def test_a_norm_of_all_and_of_a_part_is_that_of_plain_torch():
    accelerator, reference = sharding(2), net()
    model = accelerator.prepare(net())
    for part in ("", "blocks.0"):
        for each in (model, reference):
            each.zero_grad()
            loss(each, batch()).backward()
        norm = accelerator.clip_grad_norm_(model.get_submodule(part).parameters(), 0.01)
        wanted = nn.utils.clip_grad_norm_(reference.get_submodule(part).parameters(), 0.01)
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(model.blocks[0].a.weight.grad.full_tensor(), reference.blocks[0].a.weight.grad)


def test_models_for_evaluation_and_batches_go_to_the_device():
    accelerator = sharding(2)
    accelerator.state.device = torch.device("meta")  # stands for one that is not the host
    model = accelerator.prepare_model(net(), evaluation_mode=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(2, 2)))
    assert next(iter(loader)).device.type == "meta"


def test_the_optimizer_may_come_first_and_groups_stay():
    accelerator, model = sharding(2), net()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    optimizer = accelerator.prepare(
        torch.optim.SGD([{"params": weights}, {"params": biases, "weight_decay": 0.5}], lr=0.1)
    )
    accelerator.prepare(model)
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    now = dict(model.named_parameters())
    assert held[1] == [id(p) for name, p in now.items() if name.endswith("bias")]
    assert [group.get("weight_decay") for group in optimizer.param_groups] == [0, 0.5]


def test_an_optimizer_that_has_stepped_is_refused():
    accelerator, model = sharding(2), net()
    optimizer = torch.optim.Adam(model.parameters())
    loss(model, batch()).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"has a state for 'emb.weight' as it was before the model was sharded"):
        accelerator.prepare(model, optimizer)


def test_a_frozen_model_is_sharded_as_well():
    model = net().requires_grad_(False)
    assert is_sharded(sharding(2).prepare(model))
    assert all(isinstance(p, DTensor) and not p.requires_grad for p in model.parameters())
