"""Twenty steps with what people do on shards, equal to plain torch in one process, and gone on with on other numbers of ranks.

twenty_steps.py FOLDER train|resume[,...] FROM [FEATURE ...]: `train` saves after step 10 into FOLDER/NUMBER OF RANKS, `resume` goes on from
FOLDER/FROM. Each feature says `ok train NAME` or how far it is from plain torch; that is an error when all have run.
"""

import functools
import importlib.util
import itertools
import sys
import time

import torch
from expect import full
from harness import fresh_accelerator, say, world
from models import Blocks, tiny
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from accelerate import ParallelismConfig
from accelerate.data_loader import TokenBudgetSampler
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

STEPS, HALF, DECAY = 20, 10, 0.8
WIDTH, WORDS, ROWS, LENGTH = 8, 40, 8, 32


def rate(step):
    """The factor of the learning rate, which rises and falls."""
    return min(1, (step + 1) / 5) * (1 - step / 40)


def sharding(**options):
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options)


def net(biased=True):
    return Blocks(WIDTH, WIDTH, WIDTH, [2 * WIDTH] * 2, biased)


class Feature:
    """Rows that the ranks divide, two batches a step, under FSDP2: what a feature has unless it says something else."""

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
        return net()

    def optimizer(self, parameters):
        # Smaller gradients than `eps` are noise.
        return torch.optim.AdamW(parameters, lr=0.02, eps=1e-3, weight_decay=0.1)

    def loader(self):
        rows = STEPS * self.batches * ROWS
        return DataLoader(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)), batch_size=ROWS)

    def loss(self, model, batch):
        return (model(batch) - batch.roll(1, dims=1)).square().mean()

    def items(self, batch):
        """Return of how many items the loss is the mean, if batches have different numbers of them."""

    def watched(self, accelerator, model):
        """Return a function that gives what was trained, by name; accelerator is None in plain torch."""
        return functools.partial(weights, model)

    def stepped(self):
        """Follow a step of plain torch."""


def weights(model):
    named = ((name, value) for name, value in model.named_parameters() if value.requires_grad)
    return {name.removeprefix("module."): full(value.detach()).clone() for name, value in named}


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


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

    def loss(self, model, batch):
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


class Muon(Feature):
    """Torch computes in bfloat16, where a bit of a gradient more or less rounds to another step: up to some hundredths of its length."""

    lr = 0.02
    loss_bound, norm_bound, weight_bound = 5e-3, 5e-3, 0.05 * lr * sum(map(rate, range(STEPS)))

    def model(self):
        return net(biased=False)

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


class Average(Feature):
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

    def loss(self, model, batch):
        labels = batch.masked_fill(batch == 0, -100)
        return model(input_ids=batch, attention_mask=(batch != 0).long(), labels=labels, use_cache=False).loss


FEATURES = {
    "LoRA, FSDP2": Adapters(),
    "LoRA, tensor parallelism": SplitAdapters(),
    "Muon": Muon(),
    "8-bit AdamW": EightBits(),
    "EMA": Average(),
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
    watched, batches = feature.watched(None, model), iter(feature.loader())
    losses, norms = [], []
    for _ in range(STEPS):
        mine = list(itertools.islice(batches, feature.batches))
        counts = [feature.items(batch) or 1 for batch in mine]
        parts = []
        for batch, count in zip(mine, counts, strict=True):
            parts.append(feature.loss(model, batch) * count / sum(counts))
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
    model, optimizer, scheduler, loader = accelerator.prepare(model, *tools, feature.loader())
    watched, step, seen = feature.watched(accelerator, model), start, torch.zeros(2)
    losses, norms = [], []
    if load_from:
        accelerator.load_state(load_from)
    for batch in loader:
        items = feature.items(batch)
        with accelerator.accumulate(model, num_items=items):
            loss = feature.loss(model, batch)
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
    ways = zip((of_losses, of_norms, of_weights), bounds, strict=True)
    return dict(zip(("losses", "norms", "weights"), ways, strict=True))


def main():
    folder, phases, source, *chosen = sys.argv[1:]
    failed = []
    for name in chosen or FEATURES:
        feature = FEATURES[name]
        if feature.needs and importlib.util.find_spec(feature.needs) is None:
            say(f"left out {name}: {feature.needs} is not installed")
            continue
        begun, wanted, place = time.monotonic(), by_plain_torch(feature), name.replace(" ", "_").replace(",", "")
        for phase in phases.split(","):
            start = 0 if phase == "train" else HALF
            key, ranks = ("load_from", source) if start else ("save_to", world())
            paths = {key: f"{folder}/{ranks}/{place}"}
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
