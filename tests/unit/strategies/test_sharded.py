"""What the sharding strategies share: training that equals plain torch, preparing in any order, and whose optimizer it is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accelerate import Accelerator, ParallelismConfig
from accelerate.checkpoint.model_io import io_of
from accelerate.extension import specs
from accelerate.modules.optimizer_remap import MovedParameters
from accelerate.strategies.shard import is_sharded
from accelerate.strategies.sharded_io import model_of
from accelerate.utils import GradientAccumulationPlugin
from sharded_samples import batch, loss, net, sharding

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
# Version 1 is an extension.
both = pytest.mark.parametrize("version", [*([1] if "fsdp1" in {spec.name for spec in specs()} else []), 2])


def test_an_optimizer_finds_its_model():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert model_of(torch.optim.SGD(models[1].parameters()), models)[0] is models[1]
    with pytest.raises(
        ValueError, match=r"No prepared model has all parameters of the optimizer \(SGD\).*separate optimizer"
    ):
        model_of(torch.optim.SGD([*models[0].parameters(), *models[1].parameters()]), models)


@both
def test_what_has_no_effect_is_said_once(process_group, caplog, version):
    from torch.distributed.fsdp import FullStateDictConfig

    config = FullStateDictConfig(rank0_only=False)
    accelerator = sharding(version, state_dict_type="FULL_STATE_DICT", state_dict_config=config, cpu_offload=True)
    accelerator.prepare(net())
    accelerator.prepare(net())
    assert caplog.text.count("state_dict_config=FullStateDictConfig") == 1
    assert caplog.text.count("cpu_offload=True has no effect on the CPU") == 1


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.mark.parametrize(
    ("version", "options"), [(1, {"use_orig_params": False}), (1, {"use_orig_params": True}), (2, {})]
)
@pytest.mark.parametrize("window", [{}, {"sync_each_batch": True}, {"exact": True}, {"num_items": 20}])
def test_windows_give_the_weights_of_plain_torch(process_group, version, options, window):
    counted = {name: value for name, value in window.items() if name == "num_items"}
    plugin = GradientAccumulationPlugin(num_steps=2, **{} if counted else window)
    accelerator = sharding(version, {"gradient_accumulation_plugin": plugin}, **options)
    model, reference = net(), net()
    seeds = range(5 if "exact" in window else 4)  # the last window may be short
    loader = torch.utils.data.DataLoader(torch.cat([batch(seed) for seed in seeds]), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for tokens in loader:
        with accelerator.accumulate(model, **counted):
            accelerator.backward(loss(model, tokens))
            optimizer.step()
            optimizer.zero_grad()
    for part in (seeds[start : start + 2] for start in seeds[::2]):
        for seed in part:
            (loss(reference, batch(seed)) / len(part)).backward()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(accelerator.get_state_dict(model), reference.state_dict())


def test_no_sync_of_shards_is_left_again_after_an_error(process_group, monkeypatch):
    accelerator = sharding(2)
    model = accelerator.prepare(net())
    calls = []
    monkeypatch.setattr(model, "set_requires_gradient_sync", calls.append)
    with pytest.raises(KeyError), accelerator.no_sync(model):
        raise KeyError
    assert calls == [False, True] and not accelerator._window.held


@both
def test_items_inside_no_sync_are_refused(process_group, version):
    accelerator = sharding(version, {"gradient_accumulation_steps": 2})
    model = accelerator.prepare(net())
    with accelerator.no_sync(model), pytest.raises(ValueError, match="num_items=4 was given inside no_sync"):
        accelerator.backward(loss(model, batch()), num_items=4)


@both
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_two_models_and_a_plain_parameter_are_clipped_to_one_norm(process_group, version, norm_type):
    accelerator = sharding(version, **{"use_orig_params": True} if version == 1 else {})
    models, references = [net(seed) for seed in (0, 1)], [net(seed) for seed in (0, 1)]
    prepared = [accelerator.prepare(model) for model in models]
    extra = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for group, parameter in zip((prepared, references), extra, strict=True):
        sum((loss(model, batch()) for model in group), parameter.square().sum()).backward()
    given = [p for model in prepared for p in model.parameters()] + extra[:1]
    norm = accelerator.clip_grad_norm_(given, 0.01, norm_type)
    plain = [p for model in references for p in model.parameters()] + extra[1:]
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain, 0.01, norm_type))
    torch.testing.assert_close(extra[0].grad, extra[1].grad)
    gradient = whole(models[1].blocks[0].a.weight.grad)
    torch.testing.assert_close(gradient.view(16, 8), references[1].blocks[0].a.weight.grad)


@both
@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_activations_draw_the_same_dropout(process_group, version, offload):
    gradients, flops = [], []
    for checkpointing in (False, True, "selective"):
        accelerator = sharding(
            version,
            activation_checkpointing=checkpointing,
            activation_checkpointing_offload=bool(checkpointing and offload),
            **{"use_orig_params": True} if version == 1 else {},
        )
        model = accelerator.prepare(net(dropout=0.5))
        torch.manual_seed(7)
        with FlopCounterMode(display=False) as counted:
            loss(model, batch()).backward()
        flops.append(counted.get_total_flops())
        gradients.append([whole(parameter.grad).flatten() for parameter in model.parameters()])
        kinds = [type(part).__name__ for part in model.modules()]
        assert kinds.count("CheckpointWrapper") == (2 if checkpointing else 0)
        accelerator.free_memory()
        Accelerator(cpu=True).state._reset_state(True)
    for plain, *recomputed in zip(*gradients, strict=True):
        assert all(torch.equal(plain, each) for each in recomputed)
    plain, full, selective = flops
    assert plain == selective < full  # matrix products are not computed again


@both
def test_a_param_init_fn_gives_memory_and_keeps_ties(process_group, version):
    def initialise(module):
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 0.5)

    with torch.device("meta"):
        model = net()
    model = sharding(version, param_init_fn=initialise).prepare(model)
    assert all(bool((whole(tensor) == 0.5).all()) for tensor in (*model.parameters(), *model.buffers()))
    assert {tuple(sorted(names)) for names in io_of(model).tied_names(model)} == {("emb.weight", "head.weight")}


@both
def test_checkpointing_without_a_policy_warns(process_group, caplog, version):
    options = {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None}
    sharding(version, activation_checkpointing=True, **options).prepare(net())
    assert "activation_checkpointing has no effect without an auto_wrap_policy" in caplog.text


def _is_wrapped(model):
    return isinstance(model, torch.distributed.fsdp.FullyShardedDataParallel)


@both
def test_a_model_for_evaluation_stays_whole_and_can_train_later(process_group, version):
    accelerator = sharding(version)
    model = accelerator.prepare_model(net(), evaluation_mode=True)
    assert not _is_wrapped(model) and not is_sharded(model)
    with accelerator.no_sync(model):
        loss(model, batch())
    again = accelerator.prepare(model)
    assert _is_wrapped(again) if version == 1 else again is model and is_sharded(model)


@both
def test_optimizers_follow_before_and_after(process_group, version):
    accelerator, model = sharding(version), net()
    old = list(model.parameters())
    before = accelerator.prepare(torch.optim.SGD(old, lr=0.1))
    model = accelerator.prepare(model)
    after = accelerator.prepare(torch.optim.SGD(old, lr=0.1))
    wanted = {id(parameter) for parameter in model.parameters()}
    for optimizer in (before, after):
        assert {id(parameter) for parameter in optimizer.param_groups[0]["params"]} == wanted


@both
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models(process_group, version, when):
    options = {"use_orig_params": True} if version == 1 else {}
    accelerator = sharding(version, {"dynamo_backend": "eager"} if when == "after" else None, **options)
    model, wanted = net(), net()
    given = torch.compile(model, backend="eager") if when == "before" else model
    prepared, optimizer = accelerator.prepare(given, torch.optim.SGD(model.parameters(), lr=0.1))
    assert type(prepared).__name__ == "OptimizedModule"
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    accelerator.backward(loss(prepared, batch()))
    optimizer.step()
    loss(wanted, batch()).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    torch.testing.assert_close(accelerator.get_state_dict(prepared), wanted.state_dict())
    with accelerator.no_sync(prepared):
        pass


@both
def test_bf16_keeps_float32_weights_also_beside_frozen_ones(process_group, version):
    accelerator = sharding(version, {"mixed_precision": "bf16"}, **{"use_orig_params": True} if version == 1 else {})
    model = net().bfloat16()
    model.blocks[0].a.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    with pytest.warns(UserWarning, match="bfloat16 and are kept in float32"):
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained))
    assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32}
    accelerator.backward(loss(model, batch()))
    optimizer.step()
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


@both
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


@both
def test_prepare_model_alone_builds_the_mesh_first(process_group, monkeypatch, version):
    accelerator = sharding(version)
    accelerator.state.parallelism_config = ParallelismConfig()
    built = []
    monkeypatch.setattr(type(accelerator), "_prepare_device_mesh", lambda self: built.append(self))
    accelerator.prepare_model(net())
    assert built[:1] == [accelerator]


@both
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
        old, new = (nn.Parameter(torch.ones(2)) for _ in range(2))
        moved.record("weight", old, new)
        assert moved.follow(torch.optim.SGD([old]))
        del old, new


def test_parallel_parameters_can_be_moved_afterwards():
    """Torch swaps them, and refuses where weak references point to them."""
    moved = MovedParameters()
    old, new = (nn.Parameter(torch.ones(2)) for _ in range(2))
    moved.record("weight", old, new)
    torch.utils.swap_tensors(new, nn.Parameter(torch.zeros(2)))
