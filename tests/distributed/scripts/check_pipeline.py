"""Pipelines train as one process does: schedules, replicas, shards, accumulation, clipping, ties, checkpoints of other layouts."""

import copy

import torch
from expect import raised
from harness import CPU, everywhere, fresh_accelerator, rank, shared_folder, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
)

WIDTH, WORDS = 8, 12
ROWS = 8  # of a batch of all data-parallel ranks
CLIP = 0.25
STEPS = 10
MIDWAY = 4  # steps of a run before it is saved


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

    def __init__(self, tied=False, dropout=0.0, own_loss=False, scaled=True):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else 0.9
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
            middle = x.mean(-1, keepdim=True)
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


def tools(model):
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-3)  # smaller gradients than that are noise
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def reference(model, steps=STEPS, every=1, skip=0, state=None):
    """Train a copy in this process, on the batches of all ranks; return losses, norms, and the parts to continue with."""
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
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}"
    )


def assert_equal_models(accelerator, pipeline, model, what):
    state = accelerator.get_state_dict(pipeline)
    if accelerator.is_main_process:
        wanted = model.state_dict()
        assert state.keys() == wanted.keys(), (what, state.keys() ^ wanted.keys())
        for name, value in wanted.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{what}, {name}: {text}"
            )


def compare(what, model, schedule="1F1B", microbatches=4, every=1, steps=STEPS, **options):
    accelerator = accelerator_for(every, **options)
    pipeline, optimizer, scheduler = made(accelerator, model, schedule, microbatches)
    losses, norms = trained(accelerator, model, pipeline, optimizer, scheduler, steps, every)
    single, wanted, wanted_norms = reference(model, steps, every)
    assert_near(losses, wanted, f"losses of {what}")
    assert_near(norms, wanted_norms, f"norms of {what}")
    assert_equal_models(accelerator, pipeline, single, what)
    return accelerator, pipeline


def check_schedules():
    for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        compare(f"{schedule}, tied", Net(True), schedule, every=2, steps=4)
    compare("GPipe, own loss", Net(own_loss=True), "GPipe", every=3, steps=4)


def slow_schedules():
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        for tied in (False, True):
            compare(f"{schedule}, tied={tied}", Net(tied), schedule, every=2)


def slow_short_batches_and_evaluation():
    """Batches of any number of samples, and dropout that ends with evaluation, in which a pipeline returns losses or outputs."""
    model = Net(True, dropout=0.5)
    for schedule in ("1F1B", "ZBVZeroBubble"):
        accelerator = accelerator_for()
        pipeline, _, _ = made(accelerator, model, schedule)
        pipeline.eval()
        model.eval()
        for rows in (8, 7, 5, 1):
            tokens, labels = data(1, rows).tensors
            outputs, loss = pipeline(tokens), pipeline(tokens, target=labels)
            assert_near(outputs.tolist(), model(tokens).tolist(), f"outputs of {rows}")
            assert_near(loss.item(), cross_entropy(model(tokens), labels).item(), f"loss of {rows}")
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        pipeline.train()
        with torch.no_grad():
            first, second = pipeline(tokens), pipeline(tokens)
        assert not torch.equal(first, second), "dropout is back"
    model = Net(True)
    pipeline, _, _ = made(accelerator_for(), model)
    for rows in (7, 3):
        tokens, labels = data(1, rows).tensors
        loss = pipeline(tokens, target=labels)
        wanted = cross_entropy(model(tokens), labels)
        wanted.backward()
        assert_near(loss.item(), wanted.item(), f"loss of {rows}")
        own = dict(model.named_parameters())
        for name, parameter in pipeline.named_parameters():
            if name.startswith("unused"):
                assert not parameter.grad.any() if parameter.grad is not None else True
            else:  # of both batches, without `zero_grad`: what is summed over stages already counts once
                assert_near(parameter.grad.tolist(), own[name].grad.tolist(), f"{name} of {rows}")


def check_micro_batches_without_samples_count_for_nothing():
    """Also where the row that stands in for them has a target that the loss ignores."""
    model, (tokens, labels) = Net(), data(1, 4).tensors
    pipeline, _, _ = made(accelerator_for(), model)
    labels = torch.where(torch.arange(4) == 3, -100, labels)
    loss = pipeline(tokens, target=labels)
    assert loss.isfinite(), loss
    assert all(parameter.grad.isfinite().all() for parameter in pipeline.parameters() if parameter.grad is not None)


def slow_items_and_precision():
    """Micro-batches weighed by their items, and bfloat16 within its own rounding."""
    model = Net(True)
    accelerator = accelerator_for(2)
    pipeline, _, _ = made(accelerator, model)
    for rows in (8, 3):
        tokens, labels = data(1, rows).tensors
        with accelerator.accumulate(pipeline, num_items=rows):
            pipeline(tokens, target=labels)
        (cross_entropy(model(tokens), labels) * rows / 11).backward()
    for name, parameter in pipeline.named_parameters():
        if not name.startswith("unused"):
            assert_near(parameter.grad.tolist(), model.get_parameter(name).grad.tolist(), name)
    accelerator = accelerator_for(mixed_precision="bf16")
    pipeline, optimizer, scheduler = made(accelerator, model)
    losses, _ = trained(accelerator, model, pipeline, optimizer, scheduler, 4)
    _, wanted, _ = reference(model, 4)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=3e-2, atol=3e-2)
    assert losses != wanted and all(parameter.dtype == torch.float32 for parameter in pipeline.parameters())


def slow_average():
    """A moving average of the weights, and `trigger_sync_in_backward` within `no_sync`."""
    model, averaged = Net(True), None
    accelerator = accelerator_for()
    pipeline, optimizer, _ = made(accelerator, model)
    average = accelerator.ema(pipeline, decay=0.5)
    reference_optimizer, _ = tools(model)
    tokens, labels = data(1, 8).tensors
    for _ in range(3):
        with accelerator.no_sync(pipeline), accelerator.trigger_sync_in_backward(pipeline):
            pipeline(tokens, target=labels)
        cross_entropy(model(tokens), labels).backward()
        for one in (optimizer, reference_optimizer):
            one.step()
            one.zero_grad()
        weight = model.embed.weight.detach().clone()
        averaged = weight if averaged is None else averaged.lerp(weight, 0.5)
    with average.applied():
        state = accelerator.get_state_dict(pipeline)
    if accelerator.is_main_process:
        assert_near(state["head.weight"].tolist(), averaged.tolist(), "average")
    assert_equal_models(accelerator, pipeline, model, "after the average")


def resumes(folder, accelerator, model, run, what, split=None, schedule="1F1B"):
    """Load a checkpoint, and require the second half of a run of one process."""
    single, losses, norms = run
    pipeline, *others = made(accelerator, Net(True), schedule, split=split)
    accelerator.load_state(folder)
    accelerator.save_state(f"{folder}-{what}")
    found = trained(accelerator, model, pipeline, *others, every=2, skip=2 * MIDWAY)
    assert_near(found[0], losses[2 * MIDWAY :], f"losses {what}")
    assert_near(found[1], norms[MIDWAY:], f"norms {what}")
    assert_equal_models(accelerator, pipeline, single, what)
    return f"{folder}-{what}"


def saved_midway(folder, accelerator, model, split=None):
    pipeline, *others = made(accelerator, model, split=split)
    trained(accelerator, model, pipeline, *others, MIDWAY, 2)
    accelerator.save_state(f"{folder}/midway")
    return f"{folder}/midway"


def check_checkpoints():
    """A run continues with another schedule and number of stages, without a pipeline, and from one."""
    model = Net(True)
    run = reference(model, every=2)
    with shared_folder() as folder:
        saved = saved_midway(folder, accelerator_for(2), model)
        again = resumes(saved, accelerator_for(2), model, run, "resumed", schedule="ZBVZeroBubble")
        # Without a pipeline: replicas, which read the same batches here; and back.
        handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = accelerator_for(2, sizes={}, kwargs_handlers=[handler])
        plain = Net(True)
        plain, *others = accelerator.prepare(plain, *tools(plain))
        accelerator.load_state(again)
        accelerator.save_state(f"{folder}/plain")
        found = reference_on(accelerator, plain, *others, 2 * MIDWAY)
        assert_near(found, run[1][2 * MIDWAY :], "losses resumed without a pipeline")
        resumes(f"{folder}/plain", accelerator_for(2), model, run, "resumed", schedule="Interleaved1F1B")
        # What does not fit leaves everything as it was.
        other = Net(True)
        other.head = nn.Linear(WIDTH, WORDS)
        accelerator = accelerator_for(2)
        made(accelerator, other)
        with raised(RuntimeError, ""):
            accelerator.load_state(saved)


def reference_on(accelerator, model, optimizer, scheduler, skip):
    losses = []
    for number, (tokens, labels) in enumerate(DataLoader(data(STEPS * 2), batch_size=ROWS)):
        if number < skip:
            continue
        with accelerator.accumulate(model):
            loss = cross_entropy(model(tokens), labels)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
    return losses


def slow_auto_and_refusals():
    """The measured split, what `prepare` and `prepare_pipeline` refuse, and what loaders and metrics give."""
    model = Net()
    accelerator = accelerator_for()
    pipeline, optimizer, _ = made(accelerator, model, split="auto")
    assert accelerator.pipeline_parallel_rank == rank() // (world() // 2)
    held = everywhere(sorted(name for name in pipeline.state_dict() if name.endswith("up.weight")))
    assert held[0] == ["blocks.0.up.weight", "blocks.1.up.weight"] and held[-1] == [
        "blocks.2.up.weight",
        "blocks.3.up.weight",
    ], held
    loader = accelerator.prepare(DataLoader(data(1, 6), batch_size=4 // (world() // 2)))
    seen = torch.cat([accelerator.gather_for_metrics(tokens) for tokens, _ in loader])
    assert seen.tolist() == data(1, 6).tensors[0].tolist(), seen
    tokens, labels = data(1, 8).tensors
    for call, text in (
        (lambda: pipeline(torch.cat([tokens, tokens]), target=labels), "has 16 samples"),
        (lambda: pipeline(tokens), "trains on a target"),
        (lambda: pipeline(tokens, target=labels[:3]), "target has [3] samples"),
        (lambda: pipeline(tokens.float(), target=labels), "traced with"),
        (lambda: accelerator.prepare(Net()), "prepare_pipeline"),
        (lambda: accelerator.prepare(torch.optim.SGD(model.parameters())), "pipeline.parameters"),
        (lambda: made(accelerator, model, split=["head", "blocks.1"]), "name 2 modules"),
        (lambda: made(accelerator, model, split=["nothing"]), "no module 'nothing'"),
        (lambda: made(accelerator, model, "1F2B"), "schedule='1F2B'"),
        (lambda: made(accelerator, model, microbatches=1), "at least 2"),
        (lambda: made(accelerator, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), "normalises over the batch"),
    ):
        if text.startswith("normalises"):
            with raised(ValueError, text):
                accelerator.prepare_pipeline(
                    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), split=["1"], example_args=(torch.ones(2, 2),)
                )
            continue
        with raised(ValueError, text):
            call()
    own = Net(own_loss=True)
    pipeline, _, _ = made(accelerator_for(), own)
    with raised(ValueError, "no multiple"):
        pipeline(tokens[:5], labels=labels[:5])
    with raised(ValueError, "without a loss"):
        accelerator_for().prepare_pipeline(Net(), split=["blocks.2"], example_args=(tokens[:2],))


def slow_an_axis_of_one():
    """A model that comes sharded over a mesh with pipelines of one stage is taken as if these were not there."""
    mesh = init_device_mesh("cpu" if CPU else "cuda", (1, world()), mesh_dim_names=("pp", "fsdp"))
    model = Net().to(mesh.device_type)
    fully_shard(model, mesh=mesh["fsdp"])
    accelerator = fresh_accelerator()
    assert accelerator.prepare(model) is model
    assert accelerator.is_fsdp2 and accelerator.parallelism_config.dp_shard_size == world()
    assert accelerator.parallelism_config.pp_size == 1


def four_replicas_and_shards():
    """Two pipelines of two stages: replicas, and stages that FSDP shards over two ranks."""
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        compare(f"replicas, {schedule}", Net(True), schedule, every=2, steps=8)
    for schedule in ("GPipe", "1F1B"):
        for tied in (False, True):
            compare(f"shards, {schedule}, tied={tied}", Net(tied), schedule, every=2, steps=8, fsdp=True)
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        compare(f"shards, {schedule}", Net(scaled=False), schedule, every=2, steps=8, fsdp=True)
        with raised(ValueError, "which two stages of one rank use"):
            made(accelerator_for(fsdp=True), Net(), schedule)
    # Evaluation in the middle of training: the next forward sees the weights after the step.
    model = Net(True)
    accelerator = accelerator_for(fsdp=True)
    pipeline, optimizer, _ = made(accelerator, model)
    tokens, labels = data(1, ROWS).tensors
    mine = slice(ROWS // 2) if rank() % 2 == 0 else slice(ROWS // 2, ROWS)
    reference_optimizer, _ = tools(model)
    for _ in range(2):
        pipeline.eval()
        assert_near(pipeline(tokens[mine]).tolist(), model(tokens[mine]).tolist(), "outputs of shards")
        pipeline.train()
        pipeline(tokens[mine], target=labels[mine])
        cross_entropy(model(tokens), labels).backward()
        for one in (optimizer, reference_optimizer):
            one.step()
            one.zero_grad()


def four_stages_and_checkpoints():
    """Four stages, a checkpoint of which two stages of shards load, and that of these four stages."""
    model = Net(True)
    run = reference(model, every=2)
    points = ["blocks.1", "blocks.2", "blocks.3"]
    with shared_folder() as folder:
        saved = saved_midway(folder, accelerator_for(2, sizes={"pp_size": 4}), model, split=points)
        shards = resumes(saved, accelerator_for(2, fsdp=True), model, run, "shards")
        resumes(shards, accelerator_for(2, sizes={"pp_size": 4}), model, run, "stages", split=points)
