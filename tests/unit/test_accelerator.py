"""The facade: construction, settings, and one-process behaviour of its methods."""

import builtins
import copy
import dis
import inspect
import logging
import pickle
import textwrap
from collections import OrderedDict
from unittest import mock

import pytest
import torch
from torch import nn

import accelerate.accelerator as home
from accelerate import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState, is_initialized
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
    operations,
)
from cases import cases

TWO_STEPS = GradientAccumulationPlugin(num_steps=2)
MESH_RANKS = ("data_parallel_rank", "data_parallel_shard_rank", "tensor_parallel_rank", "context_parallel_rank")


@pytest.mark.parametrize("arguments", [(), ("text",), (b"text",), (3,)])
def test_what_cannot_be_prepared_is_refused(arguments):
    accelerator = Accelerator(cpu=True)
    with pytest.raises((ValueError, TypeError), match="Pass (the )?model"):
        accelerator.prepare(*arguments)
    with pytest.raises(ValueError, match="1 elements"):
        accelerator.prepare(nn.Linear(1, 1), device_placement=[True, False])


@cases(
    "options, error, text",
    ({"mixed_precision": "fp17"}, ValueError, "fp17.*bf16"),
    ({"gradient_accumulation_steps": 0}, ValueError, "0 is not a positive"),
    ({"rng_types": ["dice"]}, ValueError, "dice.*generator"),
    ({"kwargs_handlers": [3]}, TypeError, "got 3 .int.*GradScalerKwargs"),
    ({"kwargs_handlers": [KwargsHandler()]}, TypeError, "KwargsHandler.*a plugin has its own argument"),
    ({"kwargs_handlers": [GradScalerKwargs(), GradScalerKwargs()]}, ValueError, "two GradScalerKwargs"),
    ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin()}, ValueError, "not both"),
    ({"fsdp_plugin": 3}, TypeError, "fsdp_plugin=3"),
    ({"log_with": "abacus"}, ValueError, "abacus"),
    ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": TWO_STEPS}, ValueError, "not both"),
    ({"parallelism_config": "tp"}, TypeError, "parallelism_config='tp' is a str; pass a ParallelismConfig"),
)
def test_bad_settings_name_argument_value_and_way_out(options, error, text):
    with pytest.raises(error, match=text):
        Accelerator(cpu=True, **options)
    assert not is_initialized(), "the next one may ask for something else"


def test_float16_scales_on_the_cpu_too():
    handlers = [GradScalerKwargs(init_scale=4.0), DistributedDataParallelKwargs()]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    assert accelerator.ddp_handler is handlers[1] and accelerator.autocast_handler is None
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    accelerator.backward(weight.sum())
    assert weight.grad.item() == 4.0
    assert accelerator.clip_grad_norm_([weight], 0.5).item() == 1.0
    assert weight.grad.item() == pytest.approx(0.5)
    accelerator.clip_grad_value_([weight], 0.75)
    assert weight.grad.item() == pytest.approx(0.5), "unscaled once"
    optimizer.step()
    assert weight.item() == pytest.approx(0.5)


def test_backward_divides_by_the_steps_and_refuses_what_means_nothing():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    weight = nn.Parameter(torch.ones(1))
    accelerator.backward(weight.sum())
    assert weight.grad.item() == 0.25
    accelerator.gradient_accumulation_steps = 2
    accelerator.backward(weight.sum())
    assert weight.grad.item() == 0.75
    loss = weight.sum()
    for count, text in ((-0.5, "negative"), (0, "0 on every rank")):
        with pytest.raises(ValueError, match=text):
            accelerator.backward(loss, num_items=count)
    with pytest.raises(TypeError, match="1.5"):
        accelerator.backward(1.5)


def test_it_pickles_and_still_knows_what_it_prepared():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader([1, 2]))
    restored = pickle.loads(pickle.dumps(accelerator))
    assert restored.state.__dict__ == accelerator.state.__dict__
    with pytest.warns(UserWarning, match="already prepared"):
        assert restored.prepare(restored._models[0]) is restored._models[0]
    with pytest.warns(UserWarning, match="inner object"):
        assert restored.prepare(restored._optimizers[0].optimizer) is restored._optimizers[0]
    assert len(restored._models) == len(restored._optimizers) == 1


def test_replaced_methods_are_used_and_their_results_registered(monkeypatch):
    accelerator = Accelerator(cpu=True)
    twin = nn.Linear(1, 1)
    accelerator.prepare_model = lambda model, device_placement=None, evaluation_mode=False: twin
    model = nn.Linear(1, 1)
    assert accelerator.prepare(model) is twin
    with pytest.warns(UserWarning, match="already prepared"):
        assert accelerator.prepare(model) is twin
    calls = []
    original = home.prepare_data_loader
    monkeypatch.setattr(home, "prepare_data_loader", lambda *a, **k: calls.append(k) or original(*a, **k))
    accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
    assert len(calls) == 1


def test_adoption_warns_when_settings_differ():
    first = Accelerator(cpu=True)
    model = first.prepare(nn.Linear(1, 1))
    AcceleratorState._reset_state()
    second = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.warns(UserWarning, match="mixed_precision: 'no' then, 'bf16' now"):
        assert second.prepare(model) is model


def test_the_process_state_is_there_again_after_its_own_reset():
    first = Accelerator(cpu=True, mixed_precision="bf16")
    before = first.state.__dict__
    PartialState._reset_state()
    second = Accelerator()
    assert PartialState._shared_state["num_processes"] == 1 and PartialState._shared_state["device"].type == "cpu"
    assert first.state.__dict__ is second.state.__dict__ is before
    PartialState._reset_state()
    assert AcceleratorState().mixed_precision == "bf16" and PartialState._shared_state


def test_ranks_in_a_mesh_need_a_configuration_and_follow_its_sizes():
    accelerator = Accelerator(cpu=True)
    for name in MESH_RANKS:
        with pytest.raises(RuntimeError, match="parallelism_config"):
            getattr(accelerator, name)
    for name in ("context_parallel_rank", "pipeline_parallel_rank"):
        with pytest.raises(NotImplementedError):
            getattr(accelerator, name)
    accelerator.state.parallelism_config = ParallelismConfig()
    assert [getattr(accelerator, name) for name in MESH_RANKS] == [0, 0, 0, 0]
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2, "tp_size": 3}
    accelerator.state.parallelism_config = ParallelismConfig(**sizes)
    accelerator.state.process_index = 16
    assert [getattr(accelerator, name) for name in MESH_RANKS] == [1, 0, 1, 1]


def test_a_second_project_folder_is_named():
    with pytest.warns(UserWarning, match="'b' is not used.*'a'"):
        Accelerator(cpu=True, project_dir="b", project_config=ProjectConfiguration(project_dir="a"))


def test_the_superseded_tensor_parallel_plugin_becomes_a_mesh():
    with pytest.warns(FutureWarning, match="ParallelismConfig.tp_size=2"):
        accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert accelerator.parallelism_config.tp_size == 2
    AcceleratorState._reset_state()
    with pytest.warns(FutureWarning, match="ParallelismConfig.tp_size=1"):
        alone = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin())
    assert alone.parallelism_config == ParallelismConfig() and alone.tensor_parallel_rank == 0
    plugin, mesh = TorchTensorParallelPlugin(tp_size=2), ParallelismConfig(tp_size=4)
    with pytest.raises(ValueError, match="tp_size=2 and parallelism_config.tp_size=4 disagree"):
        Accelerator(cpu=True, torch_tp_plugin=plugin, parallelism_config=mesh)


def test_settings_that_come_too_late_are_named(caplog):
    Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING):
        assert Accelerator(cpu=True, deepspeed_plugins={}).state.deepspeed_plugins is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        Accelerator(cpu=True, dynamo_backend="eager", parallelism_config=ParallelismConfig())
    assert [record.args[0] for record in caplog.records] == ["dynamo_plugin", "parallelism_config"]


def test_the_cpu_is_not_ignored_when_the_process_has_another_device():
    PartialState().device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="cpu=True cannot take effect.*cuda:0"):
        Accelerator(cpu=True)


# What libraries do with the class ----------------------------------------------------------------------------------------


class WithoutConstructor(Accelerator):
    """Sets what the constructor of the public class sets, as some libraries do, and does not call it."""

    def __init__(self, steps):
        self.trackers, self.log_with = [], []
        self.project_configuration = ProjectConfiguration(project_dir=None)
        for name in (
            "ddp",
            "scaler",
            "init",
            "autocast",
            "profile",
            "fp8_recipe",
            "ao_recipe",
            "te_recipe",
            "msamp_recipe",
        ):
            setattr(self, f"{name}_handler", None)
        self.state = AcceleratorState(mixed_precision=None, cpu=True, _from_accelerator=True)
        self.gradient_state = GradientState(GradientAccumulationPlugin(num_steps=steps))
        self.dataloader_config = DataLoaderConfiguration()
        self.device_placement = self.step_scheduler_with_optimizer = True
        self.has_lomo_optimizer = self.delayed_fp8_autocast = self.native_amp = False
        self.scaler, self.step, self.rng_types, self.flag_tensor = None, 0, ["generator"], None
        self._models, self._optimizers, self._schedulers, self._dataloaders, self._custom_objects = [], [], [], [], []
        self._load_model_state_pre_hook, self._save_model_state_pre_hook = OrderedDict(), OrderedDict()


def test_subclass_that_does_not_call_the_constructor_trains_and_saves(tmp_path):
    accelerator = WithoutConstructor(steps=2)
    model, data = nn.Linear(2, 2), torch.utils.data.TensorDataset(torch.ones(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            steps += accelerator.sync_gradients
    accelerator.save_state(tmp_path / "saved")
    weight = model.weight.detach().clone()
    model.weight.data.zero_()
    accelerator.load_state(tmp_path / "saved")
    assert steps == 2 and torch.equal(model.weight, weight)
    accelerator.free_memory()
    accelerator.end_training()
    assert accelerator._models == [] and isinstance(accelerator.prepare(nn.Linear(1, 1)), nn.Module)


@pytest.mark.parametrize(
    "name", ["_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "_cp_context"]
)
def test_registries_are_attributes_of_one_accelerator(name):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    former = getattr(accelerator, name)
    with mock.patch.object(accelerator, name, ["patched"]):
        assert getattr(accelerator, name) == ["patched"]
    assert getattr(accelerator, name) is former
    twin = copy.copy(accelerator)
    setattr(twin, name, ["other"])
    assert getattr(accelerator, name) is former
    if name != "_cp_context":  # which most runs do not have
        assert vars(accelerator)[name] is former
        delattr(accelerator, name)
        assert name not in vars(accelerator)


def test_copy_does_not_release_what_the_original_has_prepared():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    twin = copy.copy(accelerator)
    with pytest.warns(UserWarning, match="already prepared by this Accelerator"):
        assert twin.prepare(model) is model
    twin.free_memory()
    assert accelerator._models == [model] and twin._models == []
    with pytest.warns(UserWarning, match="already prepared by this Accelerator"):
        assert accelerator.prepare(model) is model


def recompiled(functions, namespace):
    """Compile the source of functions in one namespace, as libraries do that change a line in it; return the names they miss."""
    missing = {}
    for function in functions:
        code = compile(textwrap.dedent(inspect.getsource(function)), function.__name__, "exec")
        exec(code, namespace)
        codes = [code]
        for part in codes:
            codes += [constant for constant in part.co_consts if isinstance(constant, type(code))]
        used = {name.argval for part in codes for name in dis.get_instructions(part) if name.opname == "LOAD_GLOBAL"}
        missing[function.__name__] = [name for name in used if name not in namespace and not hasattr(builtins, name)]
    return {name: names for name, names in missing.items() if names}


def test_source_of_methods_can_be_compiled_again(monkeypatch):
    methods = {}
    for name, member in vars(Accelerator).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if inspect.isfunction(function) and function.__name__ == name and name != "__init__":
            methods[name] = member
    namespace = dict(vars(home))
    functions = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in methods.values()]
    assert len(functions) > 40 and recompiled(functions, namespace) == {}
    for name, member in methods.items():
        if inspect.isfunction(member):
            monkeypatch.setattr(Accelerator, name, namespace[name])
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    for batch in accelerator.skip_first_batches(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    accelerator.conditional(nn.Linear(1, 1), given="x", inputs=torch.ones(1, 1))
    accelerator.log({"loss": 1.0})
    accelerator.free_memory()


@pytest.mark.parametrize(
    "name", ["send_to_device", "recursively_apply", "gather", "convert_to_fp32", "find_batch_size"]
)
def test_source_of_operations_can_be_compiled_again(name):
    namespace = dict(vars(operations))
    assert recompiled([getattr(operations, name)], namespace) == {}
