"""Tensor parallelism, alone and under FSDP2, trains as one process does."""

import copy
from collections import OrderedDict

import torch
import torch.distributed as dist
from expect import assert_same_everywhere, full, raised, warned
from harness import CPU, everywhere, fresh_accelerator, rank, shared_folder, world
from models import tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from accelerate.extensions.tensor import experts, tensor
from accelerate.modules.norms import clip_grad_norm
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
    set_seed,
)

DEVICE = "cpu" if CPU else "cuda"
STEPS = 2


class Mlp(nn.Module):
    """Two cut layers between an embedding and a head that are one parameter, a norm, a frozen scale, a bare parameter."""

    def __init__(self, tied=True, width=8, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.shift = nn.Parameter(torch.randn(width))
        self.scale = nn.Parameter(torch.randn(width), requires_grad=False)
        self.head = nn.Linear(width, 12, bias=False)
        self.register_buffer("count", torch.zeros(()))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale + self.shift
        return self.head(x)


PLAN = {"up": "colwise", "down": RowwiseParallel()}


def accelerator_for(plan=None, **sizes):
    sizes = {"tp_size": world(), **sizes}
    handler = TorchTensorParallelConfig(plan=plan)
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(**sizes, tp_handler=handler))
    accelerator._prepare_device_mesh()
    return accelerator


def batch(step, rows=4, vocabulary=12):
    tokens = torch.randint(0, vocabulary, (rows, 6), generator=torch.Generator().manual_seed(step))
    return tokens.to(DEVICE)


def loss_of(model, tokens):
    out = model(tokens)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def train(model, optimizer, vocabulary=12):
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, vocabulary=vocabulary))
        loss.backward()
        clip_grad_norm(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def adamw(model, **options):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def compare(model, reference, losses, expected):
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    found, wanted = dict(model.named_parameters()), dict(reference.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        close = torch.allclose(full(value), wanted[name], rtol=1e-5, atol=1e-5)
        assert close, (name, (full(value) - wanted[name]).abs().max())
    assert_same_everywhere([losses, *(full(value) for value in found.values())])


def reference_of(model, vocabulary=12):
    reference = copy.deepcopy(model).to(DEVICE)
    return reference, train(reference, adamw(reference), vocabulary)


def unequal(model):
    """Change the weights of all ranks but the first: the first rank's win."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank())
    return model


def check_plan_of_the_user():
    """A plain module: words and objects, tied, frozen and bare parameters, split sequences, an optimizer made before."""
    tied_and_cut = {"embed": "embedding_rowwise", "head": "colwise_rep"}
    cases = [(False, {}, "foreach"), (True, {"norm": "sequence_parallel"}, "foreach"), (True, tied_and_cut, "fused")]
    for tied, extra, way in cases:
        torch.manual_seed(3)
        model = Mlp(tied)
        reference, expected = reference_of(model)
        accelerator = accelerator_for({**PLAN, **extra})
        unequal(model)
        counter = model.count
        optimizer = adamw(model, **{way: True})
        model, optimizer = accelerator.prepare(model, optimizer)
        assert model.up.weight.placements == (Shard(0),) and model.down.weight.placements == (Shard(1),)
        assert model.norm.weight.placements == model.shift.placements == (Replicate(),)
        assert (model.head.weight is model.embed.weight) is tied
        assert not model.scale.requires_grad and model.up.weight.requires_grad
        assert model.count is counter and not isinstance(counter, DTensor)
        mine = {id(parameter) for parameter in model.parameters()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} < mine
        compare(model, reference, train(model, optimizer), expected)


def check_again():
    """A model that is cut over the mesh is left alone; another mesh is refused."""
    accelerator = accelerator_for(PLAN)
    model = Mlp().to(DEVICE)
    tensor.prepare(accelerator, (model,))
    before = [(id(parameter), len(model.norm._forward_pre_hooks)) for parameter in model.parameters()]
    assert tensor.prepare(accelerator, (model, None)) == (model, None)
    assert before == [(id(parameter), len(model.norm._forward_pre_hooks)) for parameter in model.parameters()]


def check_arrived_refused():
    """Layouts that are not known, are not those of the Accelerator, or that nothing trains, are refused on every rank."""

    def sharded(*names):
        mesh = init_device_mesh(DEVICE, (world(),), mesh_dim_names=names or ("fsdp",))
        return fully_shard(Mlp().to(DEVICE), mesh=mesh)

    accelerator = fresh_accelerator()
    with raised(ValueError, "spread over 'rows'", "known are the dimensions dp_replicate"):
        accelerator.prepare(sharded(), sharded("rows"))
    assert accelerator.parallelism_config is None and not accelerator.is_fsdp2
    accelerator = fresh_accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare(Mlp())
    with warned(1, "already prepared"):
        assert accelerator.prepare(model) is model
    assert accelerator.parallelism_config is None
    with raised(ValueError, f"arrives sharded over {{'dp_shard': {world()}}}", f"tp_size={world()}"):
        accelerator_for(PLAN).prepare(sharded())
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(dp_shard_size=world() + 1))
    with raised(ValueError, f"but {world()} process(es) are running"):
        accelerator.prepare(sharded())
    assert not accelerator.is_fsdp2
    # Sizes that are not given are the model's.
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig())
    accelerator.prepare(sharded())
    assert accelerator.is_fsdp2 and accelerator.parallelism_config.dp_shard_size == world()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with raised(ValueError, "by fully_shard", "FSDP version 2"):
        fresh_accelerator(fsdp_plugin=plugin).prepare(sharded())
    spread = Mlp().to(DEVICE)
    mesh = init_device_mesh(DEVICE, (world(),), mesh_dim_names=("fsdp",))
    spread.up.weight = nn.Parameter(distribute_tensor(spread.up.weight.detach(), mesh, [Shard(0)]))
    with raised(ValueError, "without fully_shard"):
        fresh_accelerator().prepare(spread)
    mesh = init_device_mesh(DEVICE, (world(),), mesh_dim_names=("tp",))
    cut = parallelize_module(Mlp().to(DEVICE), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    accelerator = fresh_accelerator()
    accelerator.prepare(DataLoader(range(4)))
    with raised(ValueError, "other batches", f"ParallelismConfig(tp_size={world()})"):
        accelerator.prepare(cut)
    whole = {"parallelism_config": ParallelismConfig(dp_shard_size=world())}
    with raised(ValueError, "needs FSDP"):
        fresh_accelerator(**whole).prepare_model(Mlp())
    # The Trainer prepares the loader first, then the model, as for evaluation.
    accelerator = fresh_accelerator(**whole)
    accelerator.prepare(DataLoader(range(4)))
    model = sharded()
    assert accelerator.prepare_model(model, device_placement=False, evaluation_mode=True) is model
    assert accelerator.is_fsdp2
    # Experts want FSDP2, and a model that says which they are.
    sizes = {"parallelism_config": ParallelismConfig(dp_shard_size=world(), ep_size=world())}
    with raised(ValueError, "ep_size=", "takes FSDP version 2"):
        experts.prepare(fresh_accelerator(**sizes), (Mlp(),))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    with raised(ValueError, "cannot split Mlp", "plan for experts is None"):
        fresh_accelerator(**sizes, fsdp_plugin=plugin).prepare(Mlp())
    with raised(ValueError, "ep_size is 3"):
        ParallelismConfig(dp_shard_size=4, ep_size=3)


def check_refused():
    """Nothing is changed, and every rank raises the same."""
    for plan, fragments in (
        (None, ("Mlp has no tensor-parallel plan", "tp_handler")),
        ({"up": "columns"}, ("'up': 'columns'", "Known words: colwise")),
        ({"head": "colwise_rep"}, ("one tied parameter", "along different dimensions")),
    ):
        model = Mlp()
        before = list(model.parameters())
        with raised(ValueError, *fragments):
            tensor.prepare(accelerator_for(plan), (model,))
        assert all(one is two for one, two in zip(model.parameters(), before, strict=True))
    # What the strategy refuses, it refuses before layers are cut, also without `prepare`.
    layout, model = ParallelismConfig(tp_size=world(), tp_handler=TorchTensorParallelConfig(plan=PLAN)), Mlp()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    with raised(ValueError, "cpu_ram_efficient_loading=True with tp_size"):
        fresh_accelerator(parallelism_config=layout, fsdp_plugin=plugin).prepare_model(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    accelerator = accelerator_for({"up": "colwise", "down": "rowwise"})
    model = accelerator.prepare_model(Mlp(), evaluation_mode=True)
    with raised(ValueError, "evaluation_mode=True, and tp_size changes"):  # it would train whole on each rank
        accelerator.prepare(model)


def check_same_work():
    """Ranks that share layers read the same batches and drop the same elements, whatever their generators have drawn."""
    for settings in ({}, {"split_batches": True}, {"dispatch_batches": True}):
        accelerator = fresh_accelerator(
            parallelism_config=ParallelismConfig(tp_size=world()),
            dataloader_config=DataLoaderConfiguration(**settings),
        )
        torch.manual_seed(rank())
        # A direct call: the mesh is not there yet.
        loader = accelerator.prepare_data_loader(DataLoader(range(11), batch_size=4, shuffle=True))
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        epochs.append([batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)])
        assert all(other == epochs for other in everywhere(epochs)), (settings, everywhere(epochs))
        assert all(sorted(sum(epoch, [])) == list(range(11)) for epoch in epochs[:2]), epochs
        assert [len(accelerator.gather_for_metrics(batch)) for batch in loader] == [4, 4, 3]

    with warned(int(rank() == 0), "seeded with [3, 4", "dropout", at="accelerator_for(PLAN).prepare("):
        torch.manual_seed(3 + rank())
        layers = OrderedDict(up=nn.Linear(4, 4), drop=nn.Dropout(), down=nn.Linear(4, 4))
        accelerator_for(PLAN).prepare(nn.Sequential(layers))
    accelerator = accelerator_for(PLAN)
    set_seed(0, device_specific=True)
    model = accelerator.prepare_model(Mlp())
    assert model.up.weight.placements == (Shard(0),)  # direct calls cut layers as well
    dropped = nn.functional.dropout(model(batch(0)), 0.5)
    dropped.sum().backward()
    assert_same_everywhere([dropped, model.shift.grad.to_local()])


def check_of_transformers():
    """Models that carry their plan, and models that transformers cut when it loaded them."""
    from transformers import AutoModelForCausalLM

    for family, changes in (("Llama", {"tie_word_embeddings": True}), ("Qwen3", {})):
        model = tiny(family, **changes)
        reference, expected = reference_of(model, 32)
        with shared_folder() as folder:
            if rank() == 0:
                model.save_pretrained(folder)
            dist.barrier()
            accelerator = accelerator_for()
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, tp_plan="auto", device_mesh=accelerator.torch_device_mesh["tp"], attn_implementation="eager"
            )
        for number, candidate in enumerate((unequal(model), loaded)):
            ready, optimizer = accelerator.prepare(candidate, adamw(candidate, foreach=True))
            assert all(isinstance(value, DTensor) for value in ready.parameters()), number
            wanted = dict(reference.state_dict())
            compare(ready, reference, train(ready, optimizer, 32), expected)
            gathered = accelerator.get_state_dict(ready)
            if accelerator.is_main_process:
                assert gathered.keys() == wanted.keys()
                assert all(torch.allclose(value, wanted[name], atol=1e-5) for name, value in gathered.items())
    with raised(ValueError, "num_key_value_heads is 3"):
        accelerator_for().prepare(tiny("Llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=24))
    with raised(ValueError, "GPT2LMHeadModel has no tensor-parallel plan"):
        from transformers import GPT2Config, GPT2LMHeadModel

        small = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=12, bos_token_id=0, eos_token_id=1)
        accelerator_for().prepare(GPT2LMHeadModel(small))


def slow_compiled():
    """torch.compile takes the views of parameters along, in one graph."""
    for make, plan in ((Mlp, {**PLAN, "norm": "sequence_parallel"}), (lambda: tiny("Qwen3"), None)):
        torch.manual_seed(3)
        model, vocabulary = make(), 12 if plan else 32
        reference, expected = reference_of(model, vocabulary)
        ready, optimizer = accelerator_for(plan).prepare(model, adamw(model))
        losses = train(torch.compile(ready, backend="aot_eager", fullgraph=plan is not None), optimizer, vocabulary)
        compare(ready, reference, losses, expected)


def slow_recomputed():
    """Activations that are computed again see the same views of parameters."""
    for reentrant in (False, True):
        model = tiny("Qwen3")
        reference, expected = reference_of(model.train(), 32)
        ready, optimizer = accelerator_for().prepare(model, adamw(model))
        ready.gradient_checkpointing_enable({"use_reentrant": reentrant})
        compare(ready, reference, train(ready, optimizer, 32), expected)
