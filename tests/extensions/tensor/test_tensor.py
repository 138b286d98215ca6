"""Plans of tensor parallelism: which style each module gets, and what is refused, before any process takes part."""

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from accelerate.extensions.tensor import tensor
from accelerate.extensions.tensor.extension import TensorParallelism
from accelerate.utils import DistributedType, ParallelismConfig, TorchTensorParallelConfig
from cases import cases


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)


class Model(nn.Module):
    def __init__(self, layers=2, tied=False, rows=12):
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.lm_head = nn.Linear(8, rows, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def kinds(model, plan, size=2):
    return {name: type(style).__name__ for name, style in tensor.resolve(model, plan, size).items()}


UP = {"layers.0.up": "ColwiseParallel", "layers.1.up": "ColwiseParallel"}


@cases(
    "plan, found",
    ({"layers.*.up": "colwise", "embed": "embedding_rowwise"}, {**UP, "embed": "RowwiseParallel"}),
    # A star stays between its dots.
    ({"*": "replicate", "layers.*.norm": "sequence_parallel"}, {f"layers.{n}.norm": "SplitSequence" for n in (0, 1)}),
    # A name comes before a pattern.
    ({"layers.*.up": "rowwise", "layers.1.up": "colwise"}, {**UP, "layers.0.up": "RowwiseParallel"}),
    ({"layers.0.down": "rowwise"}, {"layers.0.down": "RowwiseParallel"}),  # the user's comes before the model's
    (None, UP),
)
def test_plans(plan, found):
    model = Model()
    model._tp_plan = {"layers.*.up": "colwise", "layers.*.absent": "moe_tp_experts"}
    assert kinds(model, plan) == found
    if plan is None:
        wrapper = nn.Module()
        wrapper.base = model
        assert kinds(wrapper, None) == {f"base.{name}": kind for name, kind in UP.items()}


def test_token_numbers_of_an_embedding_are_never_split():
    style = tensor.resolve(Model(), {"embed": "rowwise"}, 2)["embed"]
    assert style.input_layouts == (Replicate(),)


@cases(
    "plan, message",
    (None, r"tp_size is 2, but Model has no tensor-parallel plan.*TorchTensorParallelConfig\(plan="),
    ({"layers.*.upp": "colwise"}, r"'layers\.\*\.upp'.* matches no module of Model\. Near it: 'layers\.\*\.up'"),
    ({"layers.*.up": "columns"}, r"'layers\.\*\.up': 'columns'\. Known words: colwise, "),
    ({"layers.*.up": 1}, r"has 1 \(int\) for the module 'layers\.0\.up'"),
    (
        {"layers.*.norm": "rowwise"},
        r"'layers\.0\.norm' with RowwiseParallel.*nn\.Linear and nn\.Embedding only.*LayerNorm",
    ),
    ({"layers.*.up": "colwise", "layers.0.*": "rowwise"}, r"Two entries .* match the module 'layers\.0\.up'"),
)
def test_a_plan_that_does_not_fit_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        tensor.resolve(Model(), plan, 2)


@cases(
    "plan, size, message",
    ({"layers.*.up": "colwise"}, 3, r"layers\.0\.up\.weight of shape \(16, 8\).*tp_size=3.*16 = 5 x 3 \+ 1"),
    ({"embed": "embedding_rowwise"}, 2, r"13 = 6 x 2 \+ 1\..* pad a vocabulary"),
    ({"lm_head": "colwise_rep"}, 2, r"13 = 6 x 2 \+ 1\..* pad a vocabulary"),
)
def test_what_cannot_be_divided_is_refused_with_the_arithmetic(plan, size, message):
    with pytest.raises(ValueError, match=message):
        tensor.resolve(Model(rows=13), plan, size)


@pytest.mark.parametrize(("field", "heads"), [("num_attention_heads", 3), ("num_key_value_heads", 1)])
def test_heads_that_cannot_be_divided_are_refused(field, heads):
    model = nn.Module()
    model.attention = nn.ModuleDict({"query": nn.Linear(12, 12)})
    model.config = SimpleNamespace(**{"num_attention_heads": 4, "num_key_value_heads": 2, field: heads})
    with pytest.raises(ValueError, match=rf"{field} is {heads}, .*tp_size=2 does not divide: {heads} = "):
        tensor.resolve(model, {"attention.query": "colwise"}, 2)
    tensor.resolve(model, {"attention.query": "colwise_rep"}, 2)  # gathered before it becomes heads


def test_a_tied_parameter_is_cut_in_one_way():
    both = {"embed": "embedding_rowwise", "lm_head": "colwise_rep"}
    assert set(kinds(Model(tied=True), both)) == {"embed", "lm_head"}
    for plan in ({"embed": "embedding_rowwise"}, {**both, "embed": "embedding_colwise"}):
        with pytest.raises(ValueError, match=r"embed\.weight and lm_head\.weight are one tied parameter"):
            tensor.resolve(Model(tied=True), plan, 2)


def test_without_a_mesh_everything_passes_through():
    things = (Model(), None, "text")
    assert tensor.prepare(SimpleNamespace(torch_device_mesh=None), things) == things


def test_the_plan_is_a_setting():
    plan = {"layers.*.up": "colwise"}
    config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
    assert pickle.loads(pickle.dumps(config)).tp_handler.plan == plan
    assert json.loads(json.dumps(config.to_json()))["tp_handler"]["plan"] == plan
    for wrong in ({}, [], {1: "colwise"}):
        with pytest.raises(ValueError, match="plan is "):
            TorchTensorParallelConfig(plan=wrong)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.seen = None

    def forward(self, x, fail=False, again=False):
        self.seen = type(self.weight)
        if fail:
            raise RuntimeError("inside")
        return self(x) if again else x * self.weight


@pytest.fixture
def scaled():
    """A module whose parameter is a DTensor on a mesh of one process, and shown as a plain tensor."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    module = Scaled()
    tensor._place_others(module, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), keep_plain=False)
    yield module
    torch.distributed.destroy_process_group()


def test_a_module_sees_plain_tensors_only_while_it_runs(scaled):
    kept = scaled.weight
    for options in ({}, {"again": True}):
        scaled(torch.tensor([3.0]), **options).sum().backward()
        assert scaled.seen is torch.Tensor and scaled.weight is kept
    assert isinstance(kept.grad, DTensor) and kept.grad.to_local().item() == 6.0
    with pytest.raises(RuntimeError, match="inside"):
        scaled(torch.tensor([3.0]), fail=True)
    assert scaled.weight is kept, "after an error, too"
    other = copy.deepcopy(scaled)
    with torch.no_grad():
        other.weight.to_local().fill_(5.0)
        assert other(torch.tensor([1.0])).item() == 5.0 and scaled(torch.tensor([1.0])).item() == 2.0
    assert isinstance(other.weight, DTensor)


class Run:
    is_fsdp2 = False
    parallelism_config = SimpleNamespace(
        tp_enabled=True, active_mesh_dims=("tp", "pp"), tp_size=2, pp_size=2, ep_size=1
    )

    def __init__(self, kind):
        self.distributed_type = kind


def test_an_engine_averages_gradients_itself():
    ddp, megatron = Run(DistributedType.MULTI_CPU), Run(DistributedType.MEGATRON_LM)
    with pytest.raises(ValueError, match="tp_size=2 and pp_size=2 without FSDP"):
        TensorParallelism(ddp).arrives([], False)
    TensorParallelism(megatron).arrives([], False)
