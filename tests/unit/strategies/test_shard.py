"""Which modules become units of `fully_shard`, what is put on which mesh, and where weights come from; one process or a fake group."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.strategies import shard
from cases import cases
from sharded_samples import Block, Machine, batch, fake_group, loss, net, sharding


def twice(*classes):
    part = nn.Linear(2, 2)
    return nn.Sequential(*(make(part) for make in classes))


def tied():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[1].weight = inner[0].weight
    return nn.Sequential(inner, nn.Linear(2, 2))


def nested(*parts):
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), *parts), nn.Linear(2, 2))


@cases(
    "model, kinds, names",
    (nested(nn.LayerNorm(2)), (nn.Linear, nn.Sequential), ["1", "0.0", "0"]),  # never the model itself
    (nested(), nn.Module, ["1", "0.0"]),  # all parameters of "0" are in a unit
    (twice(*[lambda part: nn.Sequential(part, nn.LayerNorm(2))] * 2), nn.Sequential, []),  # under two parents
    (twice(*[lambda part: part] * 2), nn.Linear, ["0"]),
    (net(tied=False), (nn.ModuleList, nn.ModuleDict, Block), ["blocks.1", "blocks.0"]),
    (nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Module, ["1"]),
    (tied(), nn.Sequential, ["0"]),
    (tied(), nn.Linear, ["1"]),
)
def test_units(model, kinds, names):
    name_of = {module: name for name, module in model.named_modules()}
    assert [name_of[unit] for unit in shard.units(model, lambda module: isinstance(module, kinds))] == names
    assert shard.units(model, None) == []


def test_no_unit_at_all_is_said(process_group, caplog):
    accelerator = sharding(2, auto_wrap_policy=lambda module: False, transformer_cls_names_to_wrap=None)
    model = accelerator.prepare(net())
    assert "chooses no module of Net, so the full model is one unit" in caplog.text
    assert shard.is_sharded(model) and not shard.is_sharded(model.blocks[0])


@cases(
    "sizes, names, shape",
    ({}, ("dp_shard",), (16,)),
    ({"dp_replicate_size": 4, "dp_shard_size": 4}, ("dp_replicate", "dp_shard"), (4, 4)),
    ({"dp_shard_size": 8, "tp_size": 2}, ("dp_shard",), (8,)),
    ({"dp_shard_size": 4, "cp_size": 4}, ("dp_shard_cp",), (16,)),
    (
        {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2, "tp_size": 2},
        ("dp_replicate", "dp_shard_cp"),
        (2, 4),
    ),
)
def test_the_mesh_of_shards(sizes, names, shape):
    with fake_group(5, 16), warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = shard.mesh_of(Machine(**sizes))
        assert mesh.mesh_dim_names == names
        assert tuple(mesh.mesh.shape) == shape


@pytest.mark.parametrize("resharded", [True, False])
def test_the_plugins_options_reach_torch(process_group, monkeypatch, resharded):
    from torch.distributed import fsdp

    seen, original = [], fsdp.fully_shard
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **given: seen.append(given) or original(module, **given))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    accelerator = sharding(2, reshard_after_forward=resharded, mixed_precision_policy=policy)
    accelerator.prepare(net())
    assert len(seen) == 3 and all(options == seen[0] for options in seen)
    # By default torch reshards all but the model's own part, which backward needs first.
    assert seen[0].pop("reshard_after_forward", True) is resharded
    assert seen[0].keys() == {"mesh", "mp_policy", "offload_policy"} and seen[0]["mp_policy"] is policy
    assert isinstance(seen[0]["offload_policy"], fsdp.OffloadPolicy)


@pytest.mark.parametrize("ignored", [r"blocks\.0\.b", None])
@pytest.mark.parametrize("efficient", [False, True])
def test_ignored_modules_stay_whole(process_group, ignored, efficient):
    model, wanted = net(), net().state_dict()
    accelerator = sharding(2, ignored_modules=ignored or [model.blocks[0].b], cpu_ram_efficient_loading=efficient)
    accelerator.prepare(model)
    assert all(torch.equal(value, wanted[name]) for name, value in accelerator.get_state_dict(model).items())
    whole = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    assert whole == {"blocks.0.b.weight", "blocks.0.b.bias"}
    loss(model, batch()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@cases(
    "efficient, said",
    (False, r"10 tensors are on the meta device, 'emb.weight' for one.*param_init_fn"),
    (True, r"10 of them are on the meta device there, 'emb.weight' for one"),
)
def test_weights_that_no_rank_has_are_refused(process_group, efficient, said):
    with torch.device("meta"):
        model = net()
    with pytest.raises(ValueError, match=said):
        sharding(2, cpu_ram_efficient_loading=efficient).prepare(model)


def test_weights_of_another_shape_are_refused_before_anything_changes(process_group):
    accelerator = sharding(2)
    model = accelerator.prepare(net())
    before = accelerator.get_state_dict(model)
    wrong = {**dict(net(1).named_parameters()), "head.weight": torch.ones(1), "scale": torch.ones(2)}
    del wrong["blocks.1.b.bias"]
    with pytest.raises(
        RuntimeError, match=r"blocks.1.b.bias is missing there.*; scale is \(2,\) there and \(1,\) in the model"
    ):
        shard.distribute(accelerator, model, wrong)
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(before[name], value) for name, value in after.items())
