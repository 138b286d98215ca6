"""Pipelines train as one process does: schedules, replicas, shards, accumulation, clipping, ties, checkpoints of other layouts."""

import copy

import torch
from harness import fresh_accelerator, world
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, ParallelismConfig, set_seed

WIDTH, WORDS = 8, 12
ROWS = 8  # of a batch of all data-parallel ranks
CLIP = 0.25
STEPS = 20


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, scale):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x))))) * scale


class Net(nn.Module):
    """Blocks that a value of the first stage scales, and skips over; a head that may be the embedding; a part that never runs."""

    def __init__(self, tied=False, dropout=0.0, own_loss=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(4)])
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.own_loss = own_loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, labels=None):
        start = self.embed(tokens) + self.shift
        x = start
        with torch.no_grad():
            middle = x.mean()
        for block in self.blocks:
            x = block(x, self.scale)
        logits = self.head(x + start - middle + x.detach() * 0.1)
        if self.own_loss:
            return {"loss": cross_entropy(logits, labels), "logits": logits}
        return logits


def data(batches, rows=ROWS):
    maker = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (batches * rows,), generator=maker)
    return TensorDataset(tokens, (tokens * 5 + 1) % WORDS)


def groups(model):
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def tools(model):
    optimizer = torch.optim.AdamW(groups(model), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def reference(model, steps=STEPS, every=1, skip=0, state=None):
    """Train a copy in this process, on the batches of all ranks; return losses, norms, and the parts to go on with."""
    model = copy.deepcopy(model)
    optimizer, scheduler = state or tools(model)
    losses, norms = [], []
    for number, (tokens, labels) in enumerate(DataLoader(data(steps * every), batch_size=ROWS)):
        if number < skip:
            continue
        output = model(tokens, labels)
        loss = output["loss"] if isinstance(output, dict) else cross_entropy(output, labels)
        (loss / every).backward()
        losses.append(loss.item())
        if (number + 1) % every == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, losses, norms


def accelerator_for(every=1, fsdp=False, **options):
    replicas = world() // 2
    sizes = {"dp_shard_size" if fsdp else "dp_replicate_size": replicas, "pp_size": 2}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    sizes = options.pop("sizes", sizes)
    return fresh_accelerator(
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        fsdp_plugin=plugin,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=every, adjust_scheduler=False),
        step_scheduler_with_optimizer=False,
        **options,
    )


def made(accelerator, model, schedule="1F1B", microbatches=4, split=None, **options):
    """Return a pipeline, whose micro-batches have one sample, or two where one rank reads all rows; and what trains it."""
    count = 4 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 2
    points = [f"blocks.{n}" for n in range(1, 4)] if count == 4 else ["blocks.2"]
    replicas = world() // accelerator.parallelism_config.pp_size
    each = ROWS // replicas // microbatches
    tokens = torch.zeros(each, dtype=torch.long)
    kwargs = {"labels": tokens} if model.own_loss else {}
    pipeline = accelerator.prepare_pipeline(
        copy.deepcopy(model),
        schedule,
        microbatches,
        split or points,
        (tokens,),
        kwargs,
        loss=None if model.own_loss else cross_entropy,
        **options,
    )
    optimizer, scheduler = tools(pipeline)
    return pipeline, *accelerator.prepare(optimizer, scheduler)


def trained(accelerator, model, pipeline, optimizer, scheduler, steps=STEPS, every=1, skip=0):
    replicas = world() // accelerator.parallelism_config.pp_size
    loader = accelerator.prepare(DataLoader(data(steps * every), batch_size=ROWS // replicas))
    losses, norms = [], []
    for number, (tokens, labels) in enumerate(loader):
        if number < skip:
            continue
        with accelerator.accumulate(pipeline):
            loss = pipeline(tokens, labels=labels) if model.own_loss else pipeline(tokens, target=labels)
            losses.append(accelerator.reduce(loss, "mean").item())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(pipeline.parameters(), CLIP).item())
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
    return losses, norms


def assert_near(found, wanted, what):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def assert_equal_models(accelerator, pipeline, model, what):
    state = accelerator.get_state_dict(pipeline)
    if accelerator.is_main_process:
        wanted = model.state_dict()
        assert state.keys() == wanted.keys(), (what, state.keys() ^ wanted.keys())
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{what}, {name}: {text}")


def compare(what, model, schedule="1F1B", microbatches=4, every=1, steps=STEPS, **options):
    accelerator = accelerator_for(every, **options)
    pipeline, optimizer, scheduler = made(accelerator, model, schedule, microbatches)
    losses, norms = trained(accelerator, model, pipeline, optimizer, scheduler, steps, every)
    single, wanted, wanted_norms = reference(model, steps, every)
    assert_near(losses, wanted, f"losses of {what}")
    assert_near(norms, wanted_norms, f"norms of {what}")
    assert_equal_models(accelerator, pipeline, single, what)
    return accelerator, pipeline


def check_gpipe_and_1f1b():
    set_seed(0)
    for schedule in ("GPipe", "1F1B"):
        for tied in (False, True):
            compare(f"{schedule}, tied={tied}", Net(tied), schedule, every=2)
    compare("own loss", Net(True, own_loss=True), every=3)

