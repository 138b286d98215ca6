"""FSDP1 through the Accelerator, in one process: which options reach torch's wrapper, steps, clipping, flat parameters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, wrap

from accelerate import ParallelismConfig
from accelerate.config.enums import DistributedType
from accelerate.extensions.fsdp1 import strategy
from accelerate.strategies import registry
from cases import cases
from sharded_samples import Block, Machine, batch, fake_group, loss, net, sharding

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")


@pytest.fixture
def alone(process_group):
    """A group of this process."""


@pytest.fixture
def eight():
    with fake_group(5, 8):
        yield


# -- the options -----------------------------------------------------------------------------------------------------


@pytest.fixture
def options(alone, monkeypatch):
    """The arguments that torch's wrapper got."""
    seen = {}
    real = FullyShardedDataParallel.__init__

    def record(self, module, **given):
        for name, value in given.items():
            seen.setdefault(name, value)  # that of the whole model comes first
        real(self, module, **{**given, "device_id": torch.device("cpu"), "cpu_offload": None})

    monkeypatch.setattr(FullyShardedDataParallel, "__init__", record)
    return seen


def test_every_option_of_the_plugin_arrives(options):
    model = net(tied=False)
    policy = fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    flags = {"forward_prefetch": True, "limit_all_gathers": False, "use_orig_params": True}
    kinds = {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST"}
    sharding(1, ignored_modules=[model.head], mixed_precision_policy=policy, **flags, **kinds).prepare(model)
    assert options["sharding_strategy"] is ShardingStrategy.SHARD_GRAD_OP
    assert options["backward_prefetch"] is fsdp.BackwardPrefetch.BACKWARD_POST
    assert options["mixed_precision"] is policy
    assert options["ignored_modules"] == [model.head]
    assert {name: options[name] for name in flags} == flags
    assert options["auto_wrap_policy"].keywords == {"transformer_layer_cls": {Block}}
    assert options["device_id"] == torch.device("cpu")
    assert options["device_mesh"] is None and options["param_init_fn"] is None
    assert options["sync_module_states"] is False


def test_optimizers_of_few_bits_are_refused(alone):
    ao = pytest.importorskip("torchao.optim")
    model = net()
    with pytest.raises(ValueError, match="AdamW8bit keeps states of few bits.*Set fsdp_version=2"):
        sharding(1).prepare(model, ao.AdamW8bit(model.parameters()))


def test_what_only_devices_can_do_goes_there(options):
    accelerator = sharding(1, cpu_offload=True, sync_module_states=True)
    accelerator.state.device = torch.device("meta", 0)  # stands for one that is not the host
    with pytest.raises((ValueError, RuntimeError)):  # of torch, which sends states between devices only
        accelerator.prepare(net())
    assert options["cpu_offload"].offload_params is True
    assert options["sync_module_states"] is True
    assert options["device_id"] == torch.device("meta", 0)


@pytest.mark.parametrize("given", [r"blocks\.0\.b|head", "list", "one"])
def test_ignored_modules(options, given):
    model = net(tied=False)
    ignored = {"list": [model.blocks[0].b, model.head], "one": model.head}.get(given, given)
    accelerator = sharding(1, ignored_modules=ignored, use_orig_params=True)
    accelerator.state.device = torch.device("meta", 0)
    accelerator.prepare(model)
    wanted = [model.head] if given == "one" else [model.blocks[0].b, model.head]
    assert options["ignored_modules"] == wanted
    assert all(module.weight.is_meta for module in wanted)  # torch leaves them where they are
    assert not model.emb.weight.is_meta


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["ModuleWrapPolicy", "CustomPolicy", "callable"])
def test_policy_objects(alone, version, kind):
    policies = {
        "ModuleWrapPolicy": wrap.ModuleWrapPolicy({Block}),
        "CustomPolicy": wrap.CustomPolicy(lambda module: isinstance(module, Block)),
        "callable": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
    }
    chosen = {"auto_wrap_policy": policies[kind], "transformer_cls_names_to_wrap": None}
    for checkpointing in (False, True):
        accelerator = sharding(version, activation_checkpointing=checkpointing, **chosen)
        model = accelerator.prepare(net())
        units = [part for part in model.modules() if isinstance(part, (FullyShardedDataParallel, fsdp.FSDPModule))]
        assert len(units) == 3
        recomputed = [part for part in model.modules() if type(part).__name__ == "CheckpointWrapper"]
        assert len(recomputed) == (2 if checkpointing else 0)
        loss(model, batch()).backward()
        accelerator.free_memory()
        accelerator.state._reset_state(True)


# -- meshes ----------------------------------------------------------------------------------------------------------


def test_a_hybrid_strategy_keeps_a_copy_on_each_machine(eight, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mesh = strategy._mesh(Machine(), ShardingStrategy.HYBRID_SHARD)
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert strategy._mesh(Machine(), ShardingStrategy.FULL_SHARD) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="the 8 processes are not a multiple of the 3 on this one.*dp_replicate_size"):
        strategy._mesh(Machine(), ShardingStrategy._HYBRID_SHARD_ZERO2)


@pytest.mark.parametrize(("given", "used"), [("FULL_SHARD", "HYBRID_SHARD"), ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")])
def test_replicas_in_the_mesh_make_the_strategy_hybrid(eight, given, used):
    accelerator = sharding(1, sharding_strategy=given)
    machine = Machine(dp_replicate_size=2, dp_shard_size=4)
    machine.state = accelerator.state
    options = strategy._options(machine, net())
    assert options["sharding_strategy"] is getattr(ShardingStrategy, used)
    assert options["device_mesh"].mesh_dim_names == ("dp_replicate", "dp_shard")


@cases(
    "sizes, strategy, text",
    ({"dp_replicate_size": 8}, "FULL_SHARD", "dp_replicate_size=8 and dp_shard_size=1 shard nothing"),
    ({"dp_replicate_size": 2, "dp_shard_size": 4}, "NO_SHARD", "NO_SHARD keeps unsharded .* dp_shard_size=4"),
    ({"dp_shard_size": 4, "tp_size": 2}, "FULL_SHARD", "tp_size=2 with fsdp_version=1.*fsdp_version=2"),
    ({"dp_shard_size": 8}, "HYBRID_SHARD", "HYBRID_SHARD keeps replicas of shards, but dp_replicate_size is 1"),
)
def test_a_mesh_and_a_strategy_that_disagree_are_refused(eight, sizes, strategy, text):
    accelerator = sharding(1, sharding_strategy=strategy)
    accelerator.state.parallelism_config = ParallelismConfig(**sizes)
    with pytest.raises(ValueError, match=text):
        accelerator.prepare(net())


# -- training --------------------------------------------------------------------------------------------------------


def test_the_norm_of_a_part_is_refused(alone):
    accelerator = sharding(1)
    model = accelerator.prepare(net())
    loss(model, batch()).backward()
    with pytest.raises(
        ValueError, match=r"got 1 of the 3 parameters of .*Pass model.parameters\(\), or set fsdp_version=2"
    ):
        accelerator.clip_grad_norm_(accelerator.unwrap_model(model).blocks[0].parameters(), 1.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_norm_of_all_that_is_trained(alone, frozen):
    accelerator, reference, model = sharding(1, use_orig_params=True), net(), net()
    for each in (model, reference):
        each.emb.requires_grad_(not frozen)
    model = accelerator.prepare(model)
    for each in (model, reference):
        loss(each, batch()).backward()
    norm = accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01))


@pytest.mark.parametrize("version", [1, 2])
def test_checkpointing_of_units_by_size(alone, version):
    by_size = {"auto_wrap_policy": "size_based_wrap", "transformer_cls_names_to_wrap": None, "min_num_params": 200}
    model = sharding(version, activation_checkpointing=True, **by_size).prepare(net())
    recomputed = [name for name, part in model.named_modules() if type(part).__name__ == "CheckpointWrapper"]
    found = [name.replace("_fsdp_wrapped_module.", "").split(".")[:2] for name in recomputed]
    assert found == [["blocks", "0"], ["blocks", "1"]]
    loss(model, batch()).backward()


def test_efficient_loading_sends_the_weights_of_the_first_rank(alone):
    wanted = net().state_dict()
    with pytest.warns(UserWarning, match="sync_module_states is set to True"):
        accelerator = sharding(1, cpu_ram_efficient_loading=True)
    model = accelerator.prepare(net())
    torch.testing.assert_close(accelerator.get_state_dict(model), wanted)


@pytest.mark.parametrize("original", [False, True])
def test_groups_within_a_layer(alone, original):
    accelerator, model = sharding(1, use_orig_params=original), net()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)
    if not original:
        with pytest.raises(ValueError, match="use_orig_params=True"):
            accelerator.prepare(model, optimizer)
        return
    model, optimizer = accelerator.prepare(model, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 4]


def test_a_wrap_that_fails_leaves_model_and_optimizer_as_they_were(alone, monkeypatch):
    def refuse(self, *args, **options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(FullyShardedDataParallel, "__init__", refuse)
    model = net()
    before, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no memory"):
        sharding(1, use_orig_params=False).prepare(model, optimizer)
    assert all(now is then and now.numel() for now, then in zip(model.parameters(), before, strict=True))
    assert all(held is then for held, then in zip(optimizer.param_groups[0]["params"], before, strict=True))


def test_a_wrapped_model_stays_as_it_is(alone):
    own = FullyShardedDataParallel(net(1), device_id=torch.device("cpu"))
    assert sharding(1).prepare(own) is own


def test_a_state_finds_the_strategy():
    assert registry.resolve(SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False)).name == "fsdp1"


def test_ties_survive_materialisation():
    def init(module):
        module.to_empty(device="cpu", recurse=False)

    with torch.device("meta"):
        model = net()
    retied = strategy.ensure_weights_retied(init, model, torch.device("cpu"))
    for module in model.modules():
        retied(module)
    assert model.head.weight is model.emb.weight
    assert model.head.weight.device == torch.device("cpu")
    assert strategy.ensure_weights_retied(init, nn.Linear(1, 1), torch.device("cpu")) is init
