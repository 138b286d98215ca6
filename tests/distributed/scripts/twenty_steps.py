"""Twenty steps with what people do on shards, equal to plain torch in one process, and gone on with on other numbers of ranks.

twenty_steps.py FOLDER train|resume[,...] FROM [FEATURE ...]: `train` saves after step 10 into FOLDER/NUMBER OF RANKS, `resume` continues from
FOLDER/FROM. Each feature says `ok train NAME` or how far it is from plain torch; that is an error when all have run.
"""

import functools
import importlib.util
import itertools
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from expect import full
from harness import fresh_accelerator, say, world
from models import tiny
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from accelerate import ParallelismConfig
from accelerate.data_loader import PackingCollator, TokenBudgetSampler
from accelerate.extensions.sequence.sequence import aggregate_loss, shift_labels
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

STEPS, HALF, DECAY = 20, 10, 0.8
WIDTH, WORDS, ROWS, LENGTH = 8, 40, 8, 32


def drawn(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rate(step):
    """The factor of the learning rate, which rises and falls."""
    return min(1, (step + 1) / 5) * (1 - step / 40)


def sharding(**options):
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options)


class Block(nn.Module):
    def __init__(self, biased=True):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=biased)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=biased), nn.Linear(2 * WIDTH, WIDTH, bias=biased)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, biased=True):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=biased), nn.Linear(WIDTH, WIDTH, bias=biased)
        self.blocks = nn.ModuleList(Block(biased) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Feature:
    """Rows that the ranks divide, two batches a step, under FSDP2: what a feature has unless it overrides it."""

    needs = ""  # a library
    batches = 2  # of a step
    whole_batches = False  # whether a rank reads whole batches, or its rows of each
    loss_bound = norm_bound = weight_bound = 1e-5
    clip = 0.25  # smaller than most norms of gradients

    def options(self):
        return {"fsdp_plugin": sharding(transformer_cls_names_to_wrap=["Block"])}

    def readers(self):
        """Return how many ranks read something else."""
        return world()

    def model(self):
        return Net()

    def optimizer(self, parameters):
        return torch.optim.AdamW(
            parameters, lr=0.02, eps=1e-3, weight_decay=0.1
        )  # smaller gradients than that are noise

    def loader(self):
        return DataLoader(drawn(STEPS * self.batches * ROWS, WIDTH), batch_size=ROWS)

    def loss(self, model, batch, accelerator=None):
        return (model(batch) - batch.roll(1, dims=1)).square().mean()

    def items(self, batch):
        """Return of how many items the loss is the mean, if batches have different numbers of them."""

    def declare(self, accelerator, model):
        """Say of a model what is said before it is prepared."""

    def region(self, accelerator, batch):
        """Return the context of a batch."""
        return nullcontext()

    def watched(self, accelerator, model):
        """Return a function that gives what was trained, by name; accelerator is None in plain torch."""
        return functools.partial(weights, model)

    def stepped(self):
        """Follow a step of plain torch."""

    def alone(self, model):
        """Return how plain torch calls the model."""
        return model


def weights(model):
    """Return what is trained of a model, whole, by name."""
    named = ((name, value) for name, value in model.named_parameters() if value.requires_grad)
    return {name.removeprefix("module."): full(value.detach()).clone() for name, value in named}


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class TwoWays(Net):
    """Has a part for pictures, that some rows come with."""

    def __init__(self):
        super().__init__()
        self.pictures = Block()

    def forward(self, x, at, pictures=None):
        x = self.first(x)
        if pictures is not None and len(pictures):
            x = x.index_add(0, at, self.pictures(pictures))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Conditional(Feature):
    """Of each rank's rows some have pictures, or none: both halves, one, none in turn."""

    def loader(self):
        rows = super().loader().dataset
        batch, row = torch.arange(len(rows)) // ROWS, torch.arange(len(rows)) % ROWS
        has = (batch >> (2 * row // ROWS)) % 2 == 0
        return DataLoader(list(zip(rows, has & (row % 2 == 0), strict=True)), batch_size=ROWS)

    def model(self):
        return TwoWays()

    def declare(self, accelerator, model):
        accelerator.conditional(model.pictures, given="pictures", inputs=torch.zeros(1, WIDTH))

    def loss(self, model, batch, accelerator=None):
        rows, has = batch
        return (model(rows, has.nonzero().flatten(), rows[has] * 2) - rows.roll(1, dims=1)).square().mean()


class ConditionalReplicas(Conditional):
    def options(self):
        return {}


class Language(Feature):
    """A language model of transformers on whole batches of tokens."""

    needs = "transformers"

    def options(self):
        return {"fsdp_plugin": sharding(transformer_cls_names_to_wrap=["LlamaDecoderLayer"])}

    def model(self):
        sizes = {"vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
        return tiny("Llama", attn_implementation="sdpa", **sizes).train()

    def loader(self):
        tokens = torch.randint(1, WORDS, (STEPS * 2 * 4, 8), generator=torch.Generator().manual_seed(3))
        return DataLoader(tokens, batch_size=4)

    def loss(self, model, batch, accelerator=None):
        return model(input_ids=batch, labels=batch, use_cache=False).loss


class Adapters(Language):
    needs, clip = "peft", 0.1

    def model(self):
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "o_proj", "up_proj", "down_proj"]  # those whose columns are cut, and those whose rows
        model = super().model()
        return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False))


class SplitAdapters(Adapters):
    """Two ranks share a layer, and four are two shards of that."""

    def options(self):
        if world() < 4:
            return {"parallelism_config": ParallelismConfig(tp_size=world())}
        return {**super().options(), "parallelism_config": ParallelismConfig(tp_size=2, dp_shard_size=world() // 2)}

    def readers(self):
        return max(1, world() // 2)


class Packed(Language):
    """Documents in rows that two ranks share; four read two rows at a time."""

    axis, whole_batches = {"cp_size": 2}, True

    def options(self):
        if world() == 1:
            return super().options()
        return {**super().options(), "parallelism_config": ParallelismConfig(dp_shard_size=world() // 2, **self.axis)}

    def readers(self):
        return max(1, world() // 2)

    def loader(self):
        maker = torch.Generator().manual_seed(3)
        documents, batches = [], STEPS * self.batches
        lengths = [length for _ in range(batches) for length in (9, 12, 11)]  # they fill each row, parts begin within
        for length in lengths:
            documents.append({"input_ids": torch.randint(1, WORDS, (length,), generator=maker)})
        sampler = TokenBudgetSampler(lengths, LENGTH, ranks=self.batches, seed=1, packed=True)
        assert len(sampler) >= batches, len(sampler)
        return DataLoader(documents, batch_sampler=sampler, collate_fn=pack)

    def region(self, accelerator, batch):
        return accelerator.maybe_context_parallel(list(batch.values()), [1] * len(batch))

    def loss(self, model, batch, accelerator=None):
        shifted = batch["labels"]
        # With a cache transformers does not look for documents.
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), shifted.flatten())
        if accelerator is None or world() == 1:
            return loss
        mesh = accelerator.torch_device_mesh[next(iter(self.axis)).removesuffix("_size")]
        return aggregate_loss(loss, (shifted != -100).sum(), group=mesh)

    def alone(self, model):
        """Each document separately."""

        def call(input_ids, position_ids, use_cache):
            starts = (position_ids[0] == 0).nonzero().flatten().tolist()
            documents = input_ids.tensor_split(starts[1:], dim=1)
            return SimpleNamespace(logits=torch.cat([model(input_ids=one).logits for one in documents], dim=1))

        return call


class PackedHeads(Packed):
    axis = {"sp_size": 2, "sp_backend": "torch"}


def pack(documents):
    row = PackingCollator(LENGTH)(documents)
    return {**row, "labels": shift_labels(row["labels"])}


class Muon(Feature):
    """Torch computes in bfloat16, where a bit of a gradient more or less rounds to another step: up to some hundredths of its length."""

    lr = 0.02
    loss_bound, norm_bound, weight_bound = 5e-3, 5e-3, 0.05 * lr * sum(map(rate, range(STEPS)))

    def model(self):
        return Net(biased=False)

    def optimizer(self, parameters):
        return torch.optim.Muon(parameters, lr=self.lr)


class EightBits(Feature):
    """Values are rounded in blocks of 256 that begin with a rank's shard, so they are rounded to other codes on other numbers of ranks."""

    needs, lr = "torchao", 0.005
    # Some hundredths of what a weight moves at most.
    loss_bound, norm_bound, weight_bound = 2e-3, 2e-3, 0.05 * lr * sum(map(rate, range(STEPS)))

    def options(self):
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}

    def model(self):
        # Shards of whole blocks on two ranks and four; of whole blocks on none; too small for blocks.
        sizes = [(WIDTH, 64), (64, 96), (96, 67), (67, WIDTH)]
        return nn.Sequential(*itertools.chain(*((nn.Linear(*size), nn.Tanh()) for size in sizes)))[:-1]

    def optimizer(self, parameters):
        from torchao.optim import AdamW8bit

        torch.compile = lambda function, **_: function  # of its step, which takes a minute
        return AdamW8bit(parameters, lr=self.lr, eps=1e-3)


class Precision(Feature):
    """Norms in float32, all else in bfloat16; plain torch computes each rank's batch separately, too.

    Another last bit of a weight may be another bfloat16; norms in bfloat16 would be 6e-4 away.
    """

    batches, whole_batches = 4, True
    loss_bound = norm_bound = weight_bound = 1e-4
    rules = {"*norm": "fp32"}

    def options(self):
        policy = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
        names = {"transformer_cls_names_to_wrap": ["Block"], "mixed_precision_policy": policy}
        return {"fsdp_plugin": sharding(module_precision=self.rules, **names)}

    def loss(self, model, batch, accelerator=None):
        return (model(batch).float() - batch.roll(1, dims=1)).square().mean()

    def alone(self, model):
        def call(batch):
            low = {name: value.bfloat16() for name, value in model.named_parameters() if "norm" not in name}
            return torch.func.functional_call(model, low, batch.bfloat16())

        for block in model.blocks:
            block.norm.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
            block.norm.register_forward_hook(lambda *of: of[-1].bfloat16())
        return call


class Average(Feature):
    """A moving average next to the weights."""

    def watched(self, accelerator, model):
        if accelerator is None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            self.stepped = lambda: self.average.update_parameters(model)
            averages = functools.partial(weights, self.average.module)
            return lambda: weights(model) | {f"average of {name}": value for name, value in averages().items()}
        ema = accelerator.ema(model, DECAY)

        def both():
            with ema.applied():
                averages = weights(model)
            return weights(model) | {f"average of {name}": value for name, value in averages.items()}

        return both


class Contrast(Feature):
    """Each row against the rows of all ranks."""

    def options(self):
        return {}

    def loss(self, model, batch, accelerator=None):
        found = nn.functional.normalize(model(batch), dim=1)
        if accelerator is not None:
            found, batch = accelerator.gather((found, batch), differentiable=True)
        other = nn.functional.normalize(batch.roll(1, dims=1), dim=1)
        return cross_entropy(found @ other.T / 0.2, torch.arange(len(found)))


class Budget(Language):
    """Batches of other numbers of rows and tokens, padded; the loss is the mean over the tokens of a step."""

    batches, whole_batches = 4, True

    def loader(self):
        maker = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, LENGTH, (STEPS * 16,), generator=maker).tolist()
        rows = [torch.randint(1, WORDS, (length,), generator=maker) for length in lengths]
        sampler = TokenBudgetSampler(lengths, 2 * LENGTH, ranks=self.batches, seed=1, steps_in_bucket=2)
        assert len(sampler) >= STEPS * self.batches, len(sampler)
        pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
        return DataLoader(rows, batch_sampler=sampler, collate_fn=pad)

    def items(self, batch):
        return int((batch[:, 1:] != 0).sum())

    def loss(self, model, batch, accelerator=None):
        labels = batch.masked_fill(batch == 0, -100)
        return model(input_ids=batch, attention_mask=(batch != 0).long(), labels=labels, use_cache=False).loss


FEATURES = {
    "conditional, DDP": ConditionalReplicas(),
    "conditional, FSDP2": Conditional(),
    "LoRA, FSDP2": Adapters(),
    "LoRA, tensor parallelism": SplitAdapters(),
    "packed rows, context parallelism": Packed(),
    "packed rows, sequence parallelism": PackedHeads(),
    "Muon": Muon(),
    "8-bit AdamW": EightBits(),
    "module_precision": Precision(),
    "EMA": Average(),
    "contrastive loss": Contrast(),
    "TokenBudgetSampler": Budget(),
}


def built(feature):
    torch.manual_seed(0)
    model = feature.model()
    optimizer = feature.optimizer(trained(model))
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def by_plain_torch(feature):
    """Return the loss and the norm of gradients of each step, and what was trained, of one process that takes the batches of all ranks."""
    model, optimizer, scheduler = built(feature)
    watched, call, batches = feature.watched(None, model), feature.alone(model), iter(feature.loader())
    losses, norms = [], []
    for _ in range(STEPS):
        mine = list(itertools.islice(batches, feature.batches))
        counts = [feature.items(batch) or 1 for batch in mine]
        parts = []
        for batch, count in zip(mine, counts, strict=True):
            parts.append(feature.loss(call, batch) * count / sum(counts))
            parts[-1].backward()
        losses.append(sum(parts).item())
        norms.append(nn.utils.clip_grad_norm_(trained(model), feature.clip).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        feature.stepped()
    return losses, norms, watched()


def by_ranks(feature, start, save_to=None, load_from=None):
    """Return the same from step `start` on, of all ranks."""
    many = feature.batches // feature.readers() if feature.whole_batches else feature.batches
    accelerator = fresh_accelerator(
        gradient_accumulation_steps=many,
        dataloader_config=DataLoaderConfiguration(split_batches=not feature.whole_batches),
        step_scheduler_with_optimizer=not feature.whole_batches,
        **feature.options(),
    )
    model, *tools = built(feature)
    feature.declare(accelerator, model)
    model, optimizer, scheduler, loader = accelerator.prepare(model, *tools, feature.loader())
    watched, step, seen = feature.watched(accelerator, model), start, torch.zeros(2)
    losses, norms = [], []
    if load_from:
        accelerator.load_state(load_from)
    for batch in loader:
        items = feature.items(batch)
        with accelerator.accumulate(model, num_items=items), feature.region(accelerator, batch):
            loss = feature.loss(model, batch, accelerator)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), feature.clip)))
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        seen += torch.tensor([loss.item(), 1]) * (items or 1)
        if accelerator.sync_gradients:
            total, count = accelerator.reduce(seen, "sum").tolist()
            losses.append(total / count)
            step, seen = step + 1, torch.zeros(2)
            if step == HALF and save_to:
                accelerator.save_state(save_to)
            if step == STEPS:
                break
    found = watched()
    accelerator.free_memory()
    return losses, norms, found


def distances(feature, start, found, wanted):
    """Return how far losses, norms (of large ones relatively) and weights are from plain torch, and how far they may be."""
    (losses, norms, values), (all_losses, all_norms, expected) = found, wanted
    assert values.keys() == expected.keys(), values.keys() ^ expected.keys()
    of_losses = max(abs(one - two) for one, two in zip(losses, all_losses[start:], strict=True))
    of_norms = max(abs(one - two) / max(two, 1) for one, two in zip(norms, all_norms[start:], strict=True))
    of_weights = max((value - expected[name]).abs().max().item() for name, value in values.items())
    bounds = feature.loss_bound, feature.norm_bound, feature.weight_bound
    return dict(
        zip(("losses", "norms", "weights"), zip((of_losses, of_norms, of_weights), bounds, strict=True), strict=True)
    )


def main():
    folder, phases, source, *chosen = sys.argv[1:]
    failed = []
    for name in chosen or FEATURES:
        feature = FEATURES[name]
        if feature.needs and importlib.util.find_spec(feature.needs) is None:
            say(f"omitted {name}: {feature.needs} is not installed")
            continue
        begun, wanted, place = time.monotonic(), by_plain_torch(feature), name.replace(" ", "_").replace(",", "")
        for phase in phases.split(","):
            start = 0 if phase == "train" else HALF
            paths = (
                {"load_from": f"{folder}/{source}/{place}"} if start else {"save_to": f"{folder}/{world()}/{place}"}
            )
            away = distances(feature, start, by_ranks(feature, start, **paths), wanted)
            bad = not all(far <= bound for far, bound in away.values())  # not a number is bad, too
            failed += [f"{phase} {name}: {away}"] * bad
            told = ", ".join(f"{what} {far:.1g} of {bound:.1g}" for what, (far, bound) in away.items())
            say(f"{'far' if bad else 'ok'} {phase} {name}: {told}")
        say(f"took {name}: {time.monotonic() - begun:.1f} s")
    if failed:
        raise AssertionError("\n".join(["further from plain torch than is allowed:", *failed]))


if __name__ == "__main__":
    main()
