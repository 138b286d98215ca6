"""How objects are prepared: with the Accelerator's own states, and never unsynchronised or in another precision."""

import copy
import warnings

import pytest
import torch
from torch import nn

from accelerate import Accelerator, ParallelismConfig
from accelerate.precision.amp import autocast_of
from accelerate.runtime import storage
from accelerate.state import AcceleratorState, GradientState
from accelerate.strategies.base import Strategy
from accelerate.training.prepared import PreparedObjects
from accelerate.utils import TorchDynamoPlugin
from cases import cases


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class Synchronising(Strategy):
    def needs_wrapper(self, accelerator, model):
        return any(parameter.requires_grad for parameter in model.parameters())

    def wrap_model(self, accelerator, model):
        return Wrapper(model) if self.needs_wrapper(accelerator, model) else model


def parts():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return model, optimizer, scheduler, torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)


def test_objects_prepared_after_a_reset_follow_their_accelerator():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    for item in (optimizer, scheduler, loader):
        assert item.gradient_state.__dict__ is accelerator.gradient_state.__dict__
    assert optimizer.accelerator_state.__dict__ is accelerator.state.__dict__
    assert scheduler.accelerator_state.__dict__ is accelerator.state.__dict__
    before = model.weight.clone()
    changed = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        changed.append(not torch.equal(before, model.weight))
    assert changed == [False, True]
    assert not storage.accelerator.current and not storage.gradient.current, "the reset stays in force for others"


def test_a_frozen_model_that_is_trained_later_gets_its_wrapper():
    accelerator = Accelerator(cpu=True)
    accelerator._strategy = Synchronising()
    model = nn.Linear(1, 1).requires_grad_(False)
    accelerator.prepare(nn.Linear(1, 1), model)
    with pytest.warns(UserWarning, match="already prepared"):
        assert accelerator.prepare(model) is model
    model.requires_grad_(True)
    wrapped = accelerator.prepare(model)
    assert isinstance(wrapped, Wrapper) and wrapped.module is model
    assert [type(item) for item in accelerator._models] == [Wrapper, Wrapper] and accelerator._models[1] is wrapped
    with pytest.warns(UserWarning, match="inner object"):
        assert accelerator.prepare(model) is wrapped


def test_a_model_from_a_run_in_another_precision_loses_its_autocast():
    first = Accelerator(cpu=True, mixed_precision="bf16")
    model = first.prepare(nn.Linear(1, 1))
    assert autocast_of(model.forward) is not None
    first.free_memory()
    AcceleratorState._reset_state()
    second = Accelerator(cpu=True, mixed_precision="no")
    assert autocast_of(second.prepare(model).forward) is None


def test_prepared_objects_come_back_without_warning_after_free_memory():
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    accelerator.sync_gradients = False
    assert accelerator.free_memory(1, 2) == [None, None] and accelerator.sync_gradients, "an open window ends"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = accelerator.prepare(model, optimizer, scheduler, loader)
    assert again[0] is model and again[1].optimizer is optimizer.optimizer and again[3] is loader
    assert again[2].scheduler is scheduler.scheduler and again[2].optimizers == [again[1]]
    assert len(accelerator._dataloaders) == 1


def test_regional_compilation_without_its_extension_is_refused(monkeypatch):
    monkeypatch.delattr(Accelerator, "_compile_regions", raising=False)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    with pytest.raises(ValueError, match="use_regional_compilation=True needs an extension.*Set it to False"):
        accelerator.prepare(nn.Linear(1, 1))


@cases(
    "sizes, error, text",
    ({"sp_size": 2}, ValueError, "sp_size=2.*deepspeed_plugin"),
    ({"dp_shard_size": 2}, ValueError, "dp_shard_size=2.*FSDP"),
    ({"tp_size": 2, "cp_size": 4}, ValueError, "cp_size=4.* without FSDP.*average gradients"),
    ({"tp_size": 2, "sp_size": 2, "sp_backend": "torch"}, ValueError, "sp_size=2.* without FSDP"),
)
def test_a_mesh_that_nothing_would_use_is_refused(sizes, error, text):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    with pytest.raises(error, match=text):
        accelerator.prepare(nn.Linear(1, 1))


def test_fp8_does_not_replace_layers_that_are_cut():
    pytest.importorskip("torchao")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ValueError, match="'fp8' with tp_size=2.*'bf16'"):
        accelerator.prepare(nn.Linear(32, 32))


@pytest.mark.parametrize("holder", [lambda *items: list(items), lambda *items: tuple(items), lambda *i: {"a": i[0]}])
def test_a_container_is_not_passed_through_in_silence(holder):
    accelerator = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="Linear in it is not prepared.*\\*objects"):
        accelerator.prepare(holder(nn.Linear(1, 1), 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(holder(1, 2), None)


@pytest.fixture
def replacing():
    """Models get new parameters when they are moved, as on torch_xla."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def trains(model, optimizer):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


ORDERS = ["together", "model first", "optimizer first", "two accelerators", "optimizer elsewhere"]


@pytest.mark.parametrize("order", ORDERS)
def test_an_optimizer_follows_a_model_that_a_move_gives_new_parameters(replacing, order):
    accelerator, other = Accelerator(cpu=True), Accelerator(cpu=True)
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = model[0].weight
    if order == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order in ("model first", "two accelerators"):
        model = accelerator.prepare(model)
        optimizer = (accelerator if order == "model first" else other).prepare(optimizer)
    else:
        optimizer = (accelerator if order == "optimizer first" else other).prepare(optimizer)
        model = accelerator.prepare(model)
    assert model[0].weight is not old and model[1].weight is model[0].weight
    assert trains(model, optimizer)


def test_the_state_of_an_optimizer_moves_along(replacing):
    accelerator, model = Accelerator(cpu=True), tied()
    optimizer = torch.optim.Adam(model.parameters())
    assert trains(model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert set(optimizer.state) == set(model.parameters())
    assert trains(model, optimizer) and optimizer.state[model[0].weight]["step"] == 2


def test_an_optimizer_may_come_before_its_model_and_after_one_of_the_same_shapes():
    accelerator, first, second = Accelerator(cpu=True), nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    first, *optimizers = accelerator.prepare(first, *optimizers)
    second = accelerator.prepare(second)
    assert trains(second, optimizers[1])


@pytest.mark.parametrize("model_first", [False, True])
def test_an_optimizer_whose_parameters_are_gone_is_refused(model_first):
    class Packing(nn.Linear):
        def _apply(self, fn, recurse=True):
            self.packed = nn.Parameter(torch.cat([self.weight.flatten(), self.bias]))
            self.weight = self.bias = None
            return self

    accelerator, model = Accelerator(cpu=True), Packing(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"SGD\) has 2 parameters .*'weight'.*a step would change nothing"):
        accelerator.prepare(*((model, optimizer) if model_first else (optimizer, model)))


def test_an_optimizer_of_a_model_before_it_was_moved_by_hand_is_refused(replacing):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    model.to(torch.device("cpu"))
    with pytest.raises(ValueError, match="holds none of the prepared models' parameters, but 2 of the same shapes"):
        Accelerator(cpu=True).prepare(model, optimizer)


class AlwaysEqual(nn.Module):
    """A module whose ``==`` says yes to everything, as a tensor-like or mock object may."""

    def __eq__(self, other):
        return True

    __hash__ = nn.Module.__hash__


class Slotted:
    __slots__ = ()


def test_outer_and_inner_objects_are_found_by_identity():
    inner, outer, slotted = AlwaysEqual(), nn.Sequential(), Slotted()
    registry = PreparedObjects()
    entry = registry.record("model", outer, [inner])
    assert registry.find(outer) is entry and registry.find(inner) is entry
    assert registry.find(copy.deepcopy(inner)) is None
    assert registry.record("scheduler", slotted) is registry.find(slotted)
    registry.clear()
    assert registry.find(outer) is registry.find(inner) is None and list(registry.alive("model")) == []
