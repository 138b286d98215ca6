"""Tensor parallelism, alone and under FSDP2, trains as one process does."""

import copy
import sys
from collections import OrderedDict
from types import SimpleNamespace

import torch
import torch.distributed as dist
from harness import CPU, assert_same_everywhere, everywhere, fresh_accelerator, raised, run, shared_folder, warned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils.data import DataLoader

from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.modules.norms import clip_grad_norm
from accelerate.modules.repoint import MovedParameters
from accelerate.parallel import tensor
from accelerate.utils import DataLoaderConfiguration, ParallelismConfig, TorchTensorParallelConfig, set_seed

DEVICE = "cpu" if CPU else "cuda"
STEPS = 3


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
    sizes = {"tp_size": dist.get_world_size(), **sizes}
    handler = TorchTensorParallelConfig(plan=plan)
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(**sizes, tp_handler=handler))
    accelerator._prepare_device_mesh()
    return accelerator


class Described:
    """What `tensor.prepare` and `repoint` ask of an Accelerator, for meshes whose strategies are applied by hand."""

    def __init__(self, mesh, plan=None, is_fsdp2=False):
        self.torch_device_mesh, self.is_fsdp2 = mesh, is_fsdp2
        self.parallelism_config = SimpleNamespace(tp_handler=TorchTensorParallelConfig(plan=plan))
        self.prepared = SimpleNamespace(moved=MovedParameters(), optimizers=[])


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


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
            parameter.add_(dist.get_rank())
    return model


def plan_of_the_user():
    """A plain module: words and objects, tied, frozen and bare parameters, an optimizer made before, foreach."""
    for tied, extra in ((False, {}), (True, {}), (True, {"embed": "embedding_rowwise", "head": "colwise_rep"})):
        for options in ({"foreach": True}, {"fused": True}):
            torch.manual_seed(3)
            model = Mlp(tied)
            reference, expected = reference_of(model)
            accelerator = accelerator_for({**PLAN, **extra})
            unequal(model)
            counter = model.count
            optimizer = adamw(model, **options)
            model, optimizer = accelerator.prepare(model, optimizer)
            assert model.up.weight.placements == (Shard(0),) and model.down.weight.placements == (Shard(1),)
            assert model.norm.weight.placements == model.shift.placements == (Replicate(),)
            assert (model.head.weight is model.embed.weight) is tied
            assert not model.scale.requires_grad and model.up.weight.requires_grad
            assert model.count is counter and not isinstance(counter, DTensor)
            mine = {id(parameter) for parameter in model.parameters()}
            assert {id(p) for group in optimizer.param_groups for p in group["params"]} < mine
            compare(model, reference, train(model, optimizer), expected)


def again():
    """A model that is cut over the mesh is left alone; another mesh is refused."""
    accelerator = accelerator_for(PLAN)
    model = Mlp().to(DEVICE)
    tensor.prepare(accelerator, (model,))
    before = [(id(parameter), len(model.norm._forward_pre_hooks)) for parameter in model.parameters()]
    assert tensor.prepare(accelerator, (model, None)) == (model, None)
    assert before == [(id(parameter), len(model.norm._forward_pre_hooks)) for parameter in model.parameters()]
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    with raised(ValueError, "sharded over", "before it is sharded"):
        tensor.prepare(accelerator, (fully_shard(Mlp().to(DEVICE), mesh=mesh),))
    # As transformers hands over what it sharded while loading: the sizes of its mesh, and no FSDP plugin.
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(dp_shard_size=dist.get_world_size()))
    with raised(ValueError, "needs FSDP", "sharded already"):
        accelerator.prepare(DataLoader(range(4)))
    model = fully_shard(Mlp().to(DEVICE), mesh=mesh)
    for options in ({}, {"device_placement": False, "evaluation_mode": True}):
        with raised(NotImplementedError, "Mlp", "arrives sharded", "Load it whole", "fsdp_version=2"):
            accelerator.prepare_model(model, **options)
    with raised(NotImplementedError, "arrives sharded"):
        accelerator.prepare(adamw(model), model)


def split_sequences():
    """`sequence_parallel` and `replicated_with_grad_allreduce` sum the gradients of what they leave whole."""
    torch.manual_seed(3)
    model = Mlp()
    reference, expected = reference_of(model)
    accelerator = accelerator_for({**PLAN, "norm": "sequence_parallel"})
    model, optimizer = accelerator.prepare(model, adamw(model))
    compare(model, reference, train(model, optimizer), expected)


def refused():
    """Nothing is changed, and every rank hears the same."""
    size = dist.get_world_size()

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = type("Config", (), {"num_attention_heads": 4 * size, "num_key_value_heads": size + 1})()
            self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(4 * size, 4 * size)})

    cases = [
        (Mlp(), None, ("Mlp has no tensor-parallel plan", "tp_handler")),
        (Mlp(), {"upp": "colwise"}, ("'upp'", "matches no module of Mlp", "'up'")),
        (Mlp(), {"up": "columns"}, ("'up': 'columns'", "Known words: colwise")),
        (Mlp(), {"up": 3}, ("3 (int)", "'up'")),
        (Mlp(), {"norm": "colwise"}, ("'norm'", "nn.Linear and nn.Embedding only", "LayerNorm")),
        (Mlp(hidden=4 * size + 1), {"up": "colwise"}, (f"out_features is {4 * size + 1}", f"= 4 x {size} + 1")),
        (Mlp(), {"head": "colwise_rep"}, ("one tied parameter", "head.weight: dimension 0", "embed.weight: whole")),
        (Mlp(), {"*": "colwise", "u*": "rowwise"}, ("Two entries", "'up'")),
        (Attention(), {"self_attn.*": "colwise"}, (f"num_key_value_heads is {size + 1}", f"1 x {size} + 1")),
    ]
    for model, plan, fragments in cases:
        before = list(model.parameters())
        with raised(ValueError, *fragments):
            tensor.prepare(accelerator_for(plan), (model,))
        assert all(one is two for one, two in zip(model.parameters(), before, strict=True))

    class Own(RowwiseParallel):
        """A style of the user's, of which a plan does not say how it cuts."""

    with raised(ValueError, "embed.weight and head.weight are one tied parameter", "Give both the same"):
        tensor.prepare(accelerator_for({"embed": Own()}), (Mlp(),))


def same_work():
    """Ranks that share layers read the same batches and drop the same elements, whatever their generators have drawn."""
    for settings in ({}, {"use_seedable_sampler": True}, {"split_batches": True}, {"dispatch_batches": True}):
        accelerator = fresh_accelerator(
            parallelism_config=ParallelismConfig(tp_size=dist.get_world_size()),
            dataloader_config=DataLoaderConfiguration(**settings),
        )
        torch.manual_seed(dist.get_rank())
        # A direct call: the mesh is not there yet.
        loader = accelerator.prepare_data_loader(DataLoader(range(11), batch_size=4, shuffle=True))
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        epochs.append([batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)])
        assert all(other == epochs for other in everywhere(epochs)), (settings, everywhere(epochs))
        assert all(sorted(sum(epoch, [])) == list(range(11)) for epoch in epochs[:2]), epochs
        assert [len(accelerator.gather_for_metrics(batch)) for batch in loader] == [4, 4, 3]

    with warned(int(dist.get_rank() == 0), "seeded with [3, 4", "dropout", at="accelerator_for(PLAN).prepare("):
        torch.manual_seed(3 + dist.get_rank())
        accelerator_for(PLAN).prepare(
            nn.Sequential(OrderedDict(up=nn.Linear(4, 4), drop=nn.Dropout(), down=nn.Linear(4, 4)))
        )
    accelerator = accelerator_for(PLAN)
    set_seed(0, device_specific=True)
    model = accelerator.prepare_model(Mlp())
    assert model.up.weight.placements == (Shard(0),)  # direct calls cut layers as well
    dropped = nn.functional.dropout(model(batch(0)), 0.5)
    dropped.sum().backward()
    assert_same_everywhere([dropped, model.shift.grad.to_local()])


def unequal_in_group(model, mesh):
    """Change the weights of all ranks of a group but the first."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(mesh.get_local_rank())


def tiny(family, **changes):
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
    sizes |= {"bos_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**sizes | changes, attn_implementation="eager")
    torch.manual_seed(5)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def of_transformers():
    """Models that carry their plan, and models that transformers cut when it loaded them."""
    from transformers import AutoModelForCausalLM

    for family, changes in (("Llama", {}), ("Llama", {"tie_word_embeddings": True}), ("Qwen3", {})):
        model = tiny(family, **changes)
        reference, expected = reference_of(model, 32)
        with shared_folder() as folder:
            if dist.get_rank() == 0:
                model.save_pretrained(folder)
            dist.barrier()
            accelerator = accelerator_for()
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, tp_plan="auto", device_mesh=accelerator.torch_device_mesh["tp"], attn_implementation="eager"
            )
        for number, candidate in enumerate((unequal(model), loaded)):
            ready, optimizer = accelerator.prepare(candidate, adamw(candidate, foreach=True))
            assert all(isinstance(value, DTensor) for value in ready.parameters()), number
            compare(ready, reference, train(ready, optimizer, 32), expected)
    with raised(ValueError, "num_key_value_heads is 3"):
        accelerator_for().prepare(tiny("Llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=24))
    with raised(ValueError, "GPT2LMHeadModel has no tensor-parallel plan"):
        from transformers import GPT2Config, GPT2LMHeadModel

        small = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=12, bos_token_id=0, eos_token_id=1)
        accelerator_for().prepare(GPT2LMHeadModel(small))


def saved():
    """A gathered state dict has the names and values of the model as it was."""
    model = tiny("Llama", tie_word_embeddings=True)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator = accelerator_for()
    ready = accelerator.prepare(model)
    told = accelerator.get_state_dict(ready)
    if accelerator.is_main_process:
        assert told.keys() == wanted.keys()
        assert all(torch.equal(value.cpu(), wanted[name]) for name, value in told.items())


def compiled():
    """torch.compile takes the views of parameters along, in one graph."""
    for make, plan in ((Mlp, {**PLAN, "norm": "sequence_parallel"}), (lambda: tiny("Qwen3"), None)):
        torch.manual_seed(3)
        model, vocabulary = make(), 12 if plan else 32
        reference, expected = reference_of(model, vocabulary)
        ready, optimizer = accelerator_for(plan).prepare(model, adamw(model))
        losses = train(torch.compile(ready, backend="aot_eager", fullgraph=plan is not None), optimizer, vocabulary)
        compare(ready, reference, losses, expected)


def recomputed():
    """Activations that are computed again see the same views of parameters."""
    for reentrant in (False, True):
        model = tiny("Qwen3")
        reference, expected = reference_of(model.train(), 32)
        ready, optimizer = accelerator_for().prepare(model, adamw(model))
        ready.gradient_checkpointing_enable({"use_reentrant": reentrant})
        compare(ready, reference, train(ready, optimizer, 32), expected)


def with_fully_shard():
    """2 x 2: torch's `fully_shard` over what `tensor.prepare` made of our model and of transformers'."""
    from transformers import AutoModelForCausalLM

    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp_shard", "tp"))
    rank = mesh["dp_shard"].get_local_rank()
    makers = [(lambda: tiny("Llama", tie_word_embeddings=True), None), (lambda: tiny("Qwen3"), None), (Mlp, PLAN)]
    for make, plan in makers:
        torch.manual_seed(5)
        model = make()
        vocabulary = 12 if plan else 32
        reference, expected = reference_of(model, vocabulary)
        unequal_in_group(model, mesh["tp"])
        accelerator = Described(mesh, plan, is_fsdp2=True)
        (ready,) = tensor.prepare(accelerator, (model.to(DEVICE),))
        for layer in getattr(getattr(ready, "model", None), "layers", []):
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(ready, mesh=mesh["dp_shard"])
        assert all(isinstance(value, DTensor) for value in ready.parameters())
        optimizer = adamw(ready, foreach=True)
        losses = []
        for step in range(STEPS):
            tokens = batch(step, vocabulary=vocabulary).chunk(2)[rank]
            loss = loss_of(ready, tokens)
            loss.backward()
            clip_grad_norm(ready.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.tensor(everywhere(loss.item())).mean())
        compare(ready, reference, torch.stack(losses).to(DEVICE), expected)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            tiny("Llama").save_pretrained(folder)
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    with raised(ValueError, "tp_size is 2", "spread over 4 processes"):
        tensor.prepare(Described(mesh), (loaded,))


def with_fsdp2():
    """2 x 2 through the Accelerator."""
    for make, plan in ((lambda: tiny("Qwen3", tie_word_embeddings=True), None), (Mlp, PLAN)):
        torch.manual_seed(5)
        model, vocabulary = make(), 12 if plan else 32
        reference, expected = reference_of(model, vocabulary)
        handler = TorchTensorParallelConfig(plan=plan)
        accelerator = fresh_accelerator(
            parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2, tp_handler=handler),
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        )
        ready, optimizer = accelerator.prepare(model, adamw(model, foreach=True))
        rank = accelerator.torch_device_mesh["dp_shard"].get_local_rank()
        losses = []
        for step in range(STEPS):
            loss = loss_of(ready, batch(step, vocabulary=vocabulary).chunk(2)[rank])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(ready.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.tensor(everywhere(loss.item())).mean())
        compare(ready, reference, torch.stack(losses).to(DEVICE), expected)


if __name__ == "__main__":
    PartialState(cpu=CPU)
    if PartialState().num_processes == 4:
        run(with_fully_shard, with_fsdp2)
    else:
        checks = [plan_of_the_user, again, split_sequences, refused, same_work, of_transformers, saved]
        run(*checks, *([compiled, recomputed] if sys.argv[1:] else []))
