"""Units of FSDP2 beyond the wrapping policy: their precision by name, how far they gather ahead, and how they compile."""

import warnings
from functools import partial

import torch
from harness import fresh_accelerator, learn, rank, world
from models import Block, Blocks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin, fsdp2_canonicalize_names

BF16, FP32 = torch.bfloat16, torch.float32


def build(blocks=2):
    torch.manual_seed(0)
    model = Blocks(4, 8, 3, [16 + 8 * number for number in range(blocks)])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sharding(**options):
    usual = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **{**usual, **options})


def batch(number, size=4):
    generator = torch.Generator().manual_seed(number * world() + rank())
    return torch.randn(size, 4, generator=generator)


def local(model):
    named = fsdp2_canonicalize_names(dict(model.named_parameters()))
    return {name: parameter.to_local().clone() for name, parameter in named.items()}


def require_equal(found, expected, what=""):
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])], what


def seen_in(model):
    """Note, by module, the dtypes of the weight and of the output inside its forward."""
    dtypes = {}

    def note(name):
        def hook(module, args, output):
            dtypes[name] = (module.weight.dtype, output.dtype)

        return hook

    for name, module in model.named_modules():
        if hasattr(module, "weight"):
            module.register_forward_hook(note(name))
    return dtypes


def steps(accelerator, model, optimizer):
    return [learn(accelerator, model(batch(number)).float().square().mean(), optimizer) for number in range(3)]


def by_hand(policies, around):
    """Shard with torch alone, train, and return losses and weights."""
    model, _ = build()
    mesh = init_device_mesh("cpu", (world(),))
    for name in ("blocks.1.norm", "blocks.1", "blocks.0.norm", "blocks.0", "last", ""):
        if name in policies or "." in name or not name:
            fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policies.get(name, around))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(3):
        loss = model(batch(number)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, local(model)


def check_modules_compute_in_the_precision_of_their_names():
    low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, output_dtype=BF16)
    norm = MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32, output_dtype=BF16)
    exact = MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32)
    rules = {"*norm": "fp32", "last": {"param_dtype": "fp32", "reduce_dtype": "fp32"}}
    accelerator = fresh_accelerator(mixed_precision="bf16", fsdp_plugin=sharding(module_precision=rules))
    model, optimizer = build()
    dtypes = seen_in(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = steps(accelerator, model, optimizer)
    high, usual = {"blocks.0.norm", "blocks.1.norm", "last"}, (BF16, BF16)
    assert len(dtypes) == 8
    assert all(seen == ((FP32, FP32) if name in high else usual) for name, seen in dtypes.items()), dtypes
    expected, weights = by_hand({"blocks.0.norm": norm, "blocks.1.norm": norm, "last": exact}, low)
    assert losses == expected, (losses, expected)
    require_equal(local(model), weights)
    report = accelerator.precision_report(model)
    assert report.dtype_of("*norm: 2 modules") == "float32, reduced in float32, outputs bfloat16", str(report)
    assert report.dtype_of("last: 1 modules") == "float32, reduced in float32" and not report.warnings
    assert report.dtype_of("gradients exchanged") == "bfloat16, float32"
    # Without rules the norms are in bfloat16, and the losses others.
    assert by_hand({}, low)[0] != losses


def check_precision_by_name_is_refused_where_it_cannot_be():
    for rules, words in (
        ({"*nrom": "fp32"}, "holds. Correct it; near names: blocks.0.norm"),
        (
            {"*": "fp32", "last": "bf16"},
            "pattern 'last', which holds for no module of Blocks: none has such a name, or an earlier",
        ),
        ({"first": "fp32"}, "'first', which shares a parameter with another part"),
    ):
        model, _ = build()
        model.blocks[0].up.weight = model.first.weight = nn.Parameter(torch.ones(8, 8))
        before = dict(model.named_parameters())
        try:
            fresh_accelerator(fsdp_plugin=sharding(module_precision=rules)).prepare(model)
            raise AssertionError(f"{rules} passed")
        except ValueError as error:
            assert words in str(error), error
        assert dict(model.named_parameters()).keys() == before.keys() and type(model) is Blocks


class Gathers(TorchDispatchMode):
    """Note which units are gathered, by their sizes, between the forwards and backwards of blocks."""

    def __init__(self, model):
        super().__init__()
        self.events, self.sizes = [], {}
        for name in ("blocks.0", "blocks.1", "blocks.2", "blocks.3", ""):
            unit = model.get_submodule(name)
            own = [p for p in unit.parameters() if name or not any(p is q for q in model.blocks.parameters())]
            # Torch fills shards up to equal sizes.
            self.sizes[sum(-(-len(p) // world()) * world() * p[0].numel() for p in own)] = name[-1:] or "root"
            if name:
                unit.register_forward_pre_hook(lambda *_, name=name[-1]: self.events.append(f"forward {name}"))
                unit.register_forward_hook(partial(self.mark_backward, name[-1]))

    def mark_backward(self, name, module, args, output):
        output.register_hook(lambda _: self.events.append(f"backward {name}"))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "allgather_base" in func.__name__:
            self.events.append(self.sizes[args[0].numel()])
        return func(*args, **(kwargs or {}))


def check_units_are_gathered_ahead():
    def trained(**options):
        accelerator = fresh_accelerator(fsdp_plugin=sharding(**options))
        model, optimizer = build(blocks=4)
        gathers = Gathers(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        steps(accelerator, model, optimizer)
        gathers.events.clear()
        with gathers:
            loss = model(batch(3)).square().mean()
            forward = list(gathers.events)
            gathers.events.clear()
            accelerator.backward(loss)  # in this thread, on a CPU
        return " ".join(forward), " ".join(gathers.events), local(model)

    forward, backward, weights = trained()
    if world() > 1:
        assert forward == "root 0 forward 0 1 forward 1 2 forward 2 3 forward 3", forward
        assert backward == "3 backward 3 2 backward 2 1 backward 1 0 backward 0", backward
    forward, backward, same = trained(forward_prefetch=2, backward_prefetch=3)
    if world() > 1:
        assert forward == "root 0 1 2 forward 0 3 forward 1 forward 2 forward 3", forward
        assert backward == "3 2 1 backward 3 0 backward 2 backward 1 backward 0", backward
    require_equal(same, weights)


def check_blocks_are_compiled_one_by_one():
    def trained(backend, blocks=10, fullgraph=True, **options):
        dynamo = TorchDynamoPlugin(backend=backend, use_regional_compilation=True, fullgraph=fullgraph)
        accelerator = fresh_accelerator(fsdp_plugin=sharding(**options), dynamo_plugin=dynamo)
        model, _ = build()
        model.blocks = nn.ModuleList(Block(8, 16) for _ in range(blocks))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return steps(accelerator, model, optimizer), local(model)

    expected, weights = trained("no", fullgraph=False)
    for backend, options in (
        ("eager", {}),
        ("eager", {"activation_checkpointing": True}),
        ("aot_eager", {}),
        ("eager", {"module_precision": {"*norm": "fp32"}, "fullgraph": False}),
    ):
        torch.compiler.reset()
        found, same = trained(backend, **options)
        require_equal(same, weights, (backend, options, found, expected))
        assert found == expected


def check_units_are_blocks_wherever_they_are():
    """Units in a Sequential, with a small list of layers inside, are compiled too; a model without blocks is told of."""

    class Unit(Block):
        def __init__(self):
            super().__init__(8, 16)
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))

        def forward(self, x):
            return super().forward(self.norms[0](x))

    def compiled(model, unit):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=True, fullgraph=True)
        plugin = sharding(transformer_cls_names_to_wrap=[unit])
        accelerator = fresh_accelerator(fsdp_plugin=plugin, dynamo_plugin=dynamo)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = accelerator.prepare_model(model)
        accelerator.backward(model(batch(0)).sum())
        told = [str(item.message) for item in caught if "compiled nothing of" in str(item.message)]
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], told

    found = compiled(nn.Sequential(nn.Linear(4, 8), Unit(), Unit()), "Unit")
    assert found == (1, []), found
    graphs, told = compiled(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), "Linear")
    assert graphs == 0 and "compiled nothing of FSDPSequential" in told[0], told


def four_precision_by_name_where_layers_are_split():
    """Tensor parallelism follows: what FSDP2 gathers and casts is each rank's part of a layer."""

    def trained(rules):
        layout = ParallelismConfig(tp_size=2, dp_shard_size=2)
        accelerator = fresh_accelerator(fsdp_plugin=sharding(module_precision=rules), parallelism_config=layout)
        model, _ = build()
        model._tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        dtypes = seen_in(model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        same = torch.Generator().manual_seed(rank() // 2)
        return learn(accelerator, model(torch.randn(4, 4, generator=same)).square().mean(), optimizer), dtypes

    loss, dtypes = trained({"blocks.*.up": "bf16"})
    assert {name for name, seen in dtypes.items() if seen[0] is BF16} == {"blocks.0.up", "blocks.1.up"}, dtypes
    exact, _ = trained({})
    assert 0 < abs(loss - exact) < 0.05 * exact, (loss, exact)
