"""Which modules become units of `fully_shard`, what is put on which mesh, and where weights come from; one process or a fake group."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from accelerate.parallel import shard
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules
from sharded_samples import Block, Machine, batch, fake_group, loss, net, sharding


def chosen(model, is_unit):
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in shard.units(model, is_unit)]


# -- units ---------------------------------------------------------------------------------------------------------------


def twice(*classes):
    part = nn.Linear(2, 2)
    return nn.Sequential(*(make(part) for make in classes))


def tied():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[1].weight = inner[0].weight
    return nn.Sequential(inner, nn.Linear(2, 2))


def nested(*parts):
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), *parts), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model", "kinds", "names"),
    [
        (nested(nn.LayerNorm(2)), (nn.Linear, nn.Sequential), ["1", "0.0", "0"]),  # never the model itself
        (nested(), nn.Module, ["1", "0.0"]),  # all parameters of "0" are in a unit
        (twice(*[lambda part: nn.Sequential(part, nn.LayerNorm(2))] * 2), nn.Sequential, []),  # under two parents
        (twice(*[lambda part: part] * 2), nn.Linear, ["0"]),
        (net(tied=False), (nn.ModuleList, nn.ModuleDict, Block), ["blocks.1", "blocks.0"]),
        (nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Module, ["1"]),
        (tied(), nn.Sequential, ["0"]),
        (tied(), nn.Linear, ["1"]),
    ],
)
def test_units(model, kinds, names):
    assert chosen(model, lambda module: isinstance(module, kinds)) == names
    assert shard.units(model, None) == []


def test_a_tie_that_crosses_a_unit_keeps_it_with_its_partner(caplog):
    model = net()
    with caplog.at_level(logging.INFO, logger="accelerate.parallel.shard"):
        found = chosen(model, lambda module: isinstance(module, (nn.Embedding, nn.Linear)))
    assert "emb" not in found and "head" not in found
    assert set(found) == {f"blocks.{block}.{part}" for block in (0, 1) for part in "ab"}
    assert "head shares a parameter with another part of the model" in caplog.text


def test_units_by_size():
    accelerator = sharding(
        2, auto_wrap_policy="size_based_wrap", transformer_cls_names_to_wrap=None, min_num_params=150
    )
    policy = fsdp2_prepare_auto_wrap_policy(accelerator.state.fsdp_plugin, net())
    # 280 parameters; the largest part of one has 144.
    assert chosen(net(tied=False), policy) == ["blocks.1", "blocks.0"]


def test_no_unit_at_all_is_said(process_group, caplog):
    accelerator = sharding(2, auto_wrap_policy=lambda module: False, transformer_cls_names_to_wrap=None)
    model = accelerator.prepare(net())
    assert "chooses no module of Net, so the whole model is one unit" in caplog.text
    assert shard.is_sharded(model) and not shard.is_sharded(model.blocks[0])


# -- meshes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sixteen():
    with fake_group(5, 16):
        yield


@pytest.mark.parametrize(
    ("sizes", "names", "shape"),
    [
        ({}, ("dp_shard",), (16,)),
        ({"dp_shard_size": 16}, ("dp_shard",), (16,)),
        ({"dp_replicate_size": 4, "dp_shard_size": 4}, ("dp_replicate", "dp_shard"), (4, 4)),
        ({"dp_shard_size": 8, "tp_size": 2}, ("dp_shard",), (8,)),
        ({"dp_shard_size": 4, "cp_size": 4}, ("dp_shard_cp",), (16,)),
        ({"dp_shard_size": 4, "sp_size": 4, "sp_backend": "torch"}, ("dp_shard_cp",), (16,)),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2, "tp_size": 2},
            ("dp_replicate", "dp_shard_cp"),
            (2, 4),
        ),
    ],
)
def test_the_mesh_of_shards(sixteen, sizes, names, shape):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = shard.mesh_of(Machine(**sizes))
    assert mesh.mesh_dim_names == names
    assert tuple(mesh.mesh.shape) == shape


# -- sharding ------------------------------------------------------------------------------------------------------------


def test_parameters_are_sharded_in_place_and_an_optimizer_follows(process_group):
    accelerator, model = sharding(2), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, stepper = accelerator.prepare(model, optimizer)
    assert prepared is model
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.head.weight is model.emb.weight
    assert [id(p) for p in stepper.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert shard.is_sharded(model.blocks[0]) and not shard.is_sharded(model.emb)
    assert not isinstance(model.scale, DTensor)


@pytest.mark.parametrize("resharded", [True, False])
def test_the_plugins_options_reach_torch(process_group, monkeypatch, resharded):
    from torch.distributed import fsdp

    seen, shard_ = [], fsdp.fully_shard
    monkeypatch.setattr(
        fsdp, "fully_shard", lambda module, **options: seen.append(options) or shard_(module, **options)
    )
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


# -- the meta device -----------------------------------------------------------------------------------------------------


def on_meta(**options):
    with torch.device("meta"):
        return net(**options)


@pytest.mark.parametrize(
    ("efficient", "said"),
    [
        (False, r"9 parameters are on the meta device, 'emb.weight' for one.*param_init_fn"),
        (True, r"10 of them are on the meta device there, 'emb.weight' for one"),
    ],
)
def test_weights_that_no_rank_has_are_refused(process_group, efficient, said):
    with pytest.raises(ValueError, match=said):
        sharding(2, cpu_ram_efficient_loading=efficient).prepare(on_meta())


def test_a_param_init_fn_gives_them_memory_and_values(process_group):
    def initialise(module):
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    model = sharding(2, param_init_fn=initialise).prepare(on_meta())
    assert model.head.weight is model.emb.weight
    assert all(bool((parameter.full_tensor() == 0.5).all()) for parameter in model.parameters())


def test_efficient_loading_gives_weights_buffers_and_ties_back(process_group):
    model, wanted = net(), net().state_dict()
    model.register_buffer("unsaved", torch.full((2,), 3.0), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = sharding(2, cpu_ram_efficient_loading=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model.head.weight is model.emb.weight
    assert model.unsaved.tolist() == [3.0, 3.0]
    state = accelerator.get_state_dict(model)
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    accelerator.backward(loss(model, batch()))
    optimizer.step()
    assert not torch.equal(accelerator.get_state_dict(model)["emb.weight"], wanted["emb.weight"])


def test_with_offload_only_shards_stay_on_the_host(process_group, monkeypatch):
    offload = CPUOffloadPolicy(pin_memory=False)
    accelerator = sharding(2, cpu_offload=offload, cpu_ram_efficient_loading=True, ignored_modules=r"blocks\.0\.b")
    host, elsewhere = shard.mesh_of(accelerator), torch.device("meta")
    # No device but the host's is here: only the memory is asked for, nothing is sent.
    monkeypatch.setattr(shard, "mesh_of", lambda accelerator: host)
    monkeypatch.setattr(shard, "distribute", lambda *arguments: None)
    accelerator.state.device = elsewhere
    model = net()
    parameters = get_parameters_from_modules(r"blocks\.0\.b", model, torch.device("cpu"))
    shard.shard(accelerator, model, lambda module: isinstance(module, Block), parameters)
    whole = {name: value.device for name, value in model.named_parameters() if not isinstance(value, DTensor)}
    assert whole == {"blocks.0.b.weight": elsewhere, "blocks.0.b.bias": elsewhere}
    assert {p.device.type for p in model.parameters() if isinstance(p, DTensor)} == {"cpu"}
    assert model.scale.device == elsewhere
    assert model.head.weight is model.emb.weight


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


def test_boxes_of_every_rank_cover_the_whole(sixteen):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import empty as empty_dtensor

    mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("dp_replicate", "dp_shard"))
    placed = empty_dtensor(11, 3, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    assert shard._box(placed) == (slice(10, 11), slice(0, 3))  # rank 5 of 8: two rows each, and one is left
    assert shard._box(torch.ones(2, 3)) == ()
