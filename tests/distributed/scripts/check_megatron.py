"""Megatron core on this machine's processors: it trains as plain torch does, gives weights back, saves and continues."""

import copy
import os
import warnings

import cuda_on_cpu  # noqa: F401  first: core asks for its device when it is imported
import torch
from expect import raised
from harness import everywhere, fresh_engine, rank, say, shared_folder, world
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from accelerate.utils import GPTTrainStep, GradScalerKwargs, MegatronLMDummyScheduler, MegatronLMPlugin

USUAL = ("check_",)
STEPS, MICRO, LENGTH, VOCABULARY = 4, 2, 16, 61
warnings.filterwarnings("ignore", module="megatron")


def llama(**options):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return made(LlamaForCausalLM, LlamaConfig(**sizes | heads | options))


def gpt2(**options):
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return made(
        GPT2LMHeadModel,
        GPT2Config(**sizes | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) | options),
    )


def made(kind, config):
    torch.manual_seed(3 + rank())  # each rank has other weights: those of rank 0 count
    model = kind(config)
    for one in model.parameters():  # norms and biases that are no ones and zeros
        one.data.add_(0.02 * torch.randn_like(one))
    return model


def rows():
    """Return the data set; the labels of some tokens do not count."""
    draw = torch.Generator().manual_seed(11)
    ids = torch.randint(0, VOCABULARY, (64, LENGTH), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.2, -100)
    return [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


def adamw(model):
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=5e-3, weight_decay=0.1)


def alike(model):
    """Two groups of equal sizes, with one rate and one decay."""
    attention = [one for name, one in model.named_parameters() if "attn" in name]
    others = [one for name, one in model.named_parameters() if "attn" not in name]
    return torch.optim.AdamW([{"params": others}, {"params": attention}], lr=5e-3, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def whole_loss(model, batch, count):
    return model(**batch).loss


def doubled_loss(model, batch, count):
    """What `Doubled` computes: twice the mean of the means of micro-batches."""
    cut = zip(*(value.split(MICRO) for value in batch.values()), strict=True)
    return 2 * torch.stack([model(**dict(zip(batch, part, strict=True))).loss for part in cut]).mean()


def plain(model, steps=STEPS, *, replicas, rate=lambda step: 1.0, count=2, make_optimizer=adamw, loss_of=whole_loss):
    """Train rank 0's model in plain torch, on the batches of all replicas; the losses, and the weights."""
    for one in model.state_dict().values():
        torch.distributed.broadcast(one, 0)
    optimizer, data = make_optimizer(model), rows()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    size, losses = MICRO * count * replicas, []
    for step in range(steps):
        batch = torch.utils.data.default_collate(data[size * step : size * (step + 1)])
        loss = loss_of(model, batch, count)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def prepared(model, schedule=None, mixed_precision="no", make_optimizer=adamw, handlers=(), **plugin):
    settings = {"gradient_clipping": 1.0, "num_micro_batches": 2, **plugin}
    accelerator = fresh_engine(
        megatron_lm_plugin=MegatronLMPlugin(**settings), mixed_precision=mixed_precision, kwargs_handlers=[*handlers]
    )
    optimizer = make_optimizer(model)
    given = [schedule(optimizer)] if schedule else []
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=MICRO), *given)


def train(accelerator, model, optimizer, loader, scheduler=None, steps=STEPS):
    model.train()
    losses = []
    for _, batch in zip(range(steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def near(found, wanted, within=1e-4):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), set(found) ^ set(wanted)
        found, wanted = (torch.cat([value.flatten().float() for value in one.values()]) for one in (found, wanted))
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted), atol=within, rtol=within)


def equal_to_plain(build, replicas=1, make_optimizer=adamw, loss_of=whole_loss, **plugin):
    count = plugin.get("num_micro_batches", 2)
    losses, weights = plain(build(), replicas=replicas, count=count, make_optimizer=make_optimizer, loss_of=loss_of)
    model = build()
    accelerator, *objects = prepared(model, make_optimizer=make_optimizer, **plugin)
    found = train(accelerator, *objects)
    near(found, losses)
    state = accelerator.get_state_dict(objects[0])
    near(state, weights)
    assert everywhere([round(one, 6) for one in found]) == [[round(one, 6) for one in found]] * world()
    assert accelerator.unwrap_model(objects[0]) is model


# Core starts reductions and gathers while it computes; what is read afterwards is complete.
OVERLAP = {"use_distributed_optimizer": True}
OVERLAP |= {"other_megatron_args": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
ROPE = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def check_it_trains_as_plain_torch():
    for build, options in (
        (llama, {"tp_degree": 2}),
        (lambda: llama(tie_word_embeddings=True), {"tp_degree": 2, "sequence_parallelism": True}),
        (lambda: llama(rope_parameters=ROPE | {"original_max_position_embeddings": 8192}), {"tp_degree": 2}),
        (llama, {"tp_degree": 2, "sequence_parallelism": True, "recompute_granularity": "full"}),
        (llama, {"tp_degree": 2, "make_optimizer": sgd}),
        (gpt2, {"tp_degree": 2, "use_distributed_optimizer": True}),
        (llama, {"pp_degree": 2, "num_micro_batches": 4}),
        (gpt2, {"pp_degree": 2}),  # its embeddings are on the first stage and on the last
        (gpt2, {"pp_degree": 2, "recompute_granularity": "full", "recompute_method": "block"}),
        (llama, {"replicas": 2}),
        (llama, {"replicas": 2, "use_distributed_optimizer": True, "recompute_activations": True}),
        (llama, {"replicas": 2, **OVERLAP}),
    ):
        say(f"{build.__name__}, {options}")
        equal_to_plain(build, **options)


def four_ranks():
    equal_to_plain(llama, tp_degree=2, pp_degree=2, sequence_parallelism=True)
    equal_to_plain(llama, replicas=2, pp_degree=2, use_distributed_optimizer=True)
    resumes(tp_degree=2, pp_degree=2, use_distributed_optimizer=True)


class Doubled(GPTTrainStep):
    def __init__(self, accelerator, args, factor):
        super().__init__(accelerator, args)
        self.factor = factor

    def get_loss_func(self, accelerator):
        def mean(loss_mask, output_tensor):
            loss = self.factor * (output_tensor * loss_mask).sum() / loss_mask.sum()
            return loss, {"mine": loss.detach().clone()}

        return mean


def check_a_step_of_ones_own():
    step = {"custom_train_step_class": Doubled, "custom_train_step_kwargs": {"factor": 2}}
    equal_to_plain(llama, tp_degree=2, loss_of=doubled_loss, **step)
    equal_to_plain(llama, pp_degree=2, loss_of=doubled_loss, **step)

    def twice(loss_mask, output_tensor):
        loss = 2 * (output_tensor * loss_mask).sum() / loss_mask.sum()
        return loss, {"mine": loss.detach().clone()}

    equal_to_plain(llama, replicas=2, loss_of=doubled_loss, custom_loss_function=twice)


def check_evaluation():
    """Of a prepared loader's batches, the last one smaller; nothing is trained."""
    for build, replicas, plugin in ((llama, 1, {"pp_degree": 2}), (gpt2, 2, {})):
        model = build()
        for one in model.state_dict().values():
            torch.distributed.broadcast(one, 0)
        size, data = 2 * MICRO * replicas, rows()[:26]
        with torch.no_grad():
            wanted = [
                model(**torch.utils.data.default_collate(data[at : at + size])).loss.item()
                for at in range(0, len(data) - len(data) % size, size)
            ]
        before = copy.deepcopy(model.state_dict())
        accelerator, engine, _, _ = prepared(model, **plugin)
        loader = accelerator.prepare(DataLoader(data, batch_size=MICRO))
        engine.eval()
        found = [engine(**batch).loss for batch in loader]
        near([one.item() for one in found[: len(wanted)]], wanted)
        assert len(found) == len(wanted) + 1 and accelerator.gather_for_metrics(found[0]).numel() >= 1
        near(accelerator.get_state_dict(engine), before, 0)
        engine.train()
        with torch.no_grad():
            near(engine(**next(iter(loader))).loss.item(), wanted[0])


def check_fp16():
    """A scale that overflows lets steps out and is halved; then it trains as float32 does, nearly."""
    losses, _ = plain(llama(), replicas=1)
    handler = GradScalerKwargs(init_scale=2.0**12, growth_interval=100)
    accelerator, *objects = prepared(llama(), mixed_precision="fp16", handlers=[handler], tp_degree=2)
    near(train(accelerator, *objects), losses, 0.02)
    assert not accelerator.optimizer_step_was_skipped
    scaling = {"mixed_precision": "fp16", "other_megatron_args": {"hysteresis": 1}}
    accelerator, *objects = prepared(llama(), tp_degree=2, **scaling)
    before = accelerator.get_state_dict(objects[0])
    train(accelerator, *objects, steps=1)
    assert accelerator.optimizer_step_was_skipped
    near(accelerator.get_state_dict(objects[0]), before, 0)


def check_schedules():
    """A torch scheduler and Megatron's own: a rise over two steps, then a linear fall to nothing after six."""
    rate = lambda step: min(step / 2, 1 - (step - 2) / 4) if step else 0.0  # noqa: E731
    losses, _ = plain(llama(), replicas=1, rate=rate)
    for schedule in (
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        lambda optimizer: MegatronLMDummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2),
    ):
        accelerator, *objects = prepared(llama(), schedule, tp_degree=2)
        near(train(accelerator, *objects), losses)
        assert all(one == 0.005 * rate(STEPS) for one in objects[-1].get_last_lr()), objects[-1].get_last_lr()


def rising(optimizer):
    return MegatronLMDummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2)


def falling(optimizer):  # each rate is made of the one before
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def resumes(schedule=rising, steps=STEPS, **plugin):
    """A run that continues from a checkpoint is the one that was not interrupted."""
    with shared_folder() as folder:
        accelerator, *objects = prepared(llama(), schedule, **plugin)
        losses = train(accelerator, *objects, steps=steps)
        place = os.path.join(folder, "checkpoint")
        batch = next(iter(objects[2]))
        accelerator.save_state(place)
        losses.append(objects[0](**batch).loss.item())
        wanted = accelerator.get_state_dict(objects[0])
        accelerator, *objects = prepared(llama(initializer_range=0.5), schedule, **plugin)
        accelerator.load_state(place)
        near(objects[0](**batch).loss.item(), losses[-1], 0)
        near(accelerator.get_state_dict(objects[0]), wanted, 0)


def check_it_goes_on_from_a_checkpoint():
    for options in (
        {"tp_degree": 2},
        {"schedule": falling, "pp_degree": 2},
        {"use_distributed_optimizer": True},
        OVERLAP,
        # What has no step behind it is saved, too.
        {"steps": 0, "tp_degree": 2},
        {"steps": 0, "use_distributed_optimizer": True},
        *({"make_optimizer": alike, **kind} for kind in ({"tp_degree": 2}, {"pp_degree": 2})),
        {"make_optimizer": alike, "use_distributed_optimizer": True},
        {"make_optimizer": sgd, "schedule": falling, "tp_degree": 2},
        {"make_optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "pp_degree": 2},
        {"tp_degree": 2, "hidden_dropout": 0.2, "attention_dropout": 0.2},
        {"pp_degree": 2, "hidden_dropout": 0.2, "recompute_granularity": "full"},
    ):
        say(str(options))
        resumes(**options)


def check_the_ranks_of_a_layer_drop_the_same():
    """However the processes were seeded: what they have whole stays equal."""
    accelerator, *objects = prepared(llama(), tp_degree=2, hidden_dropout=0.3)  # which has seeded each rank on its own
    train(accelerator, *objects)
    whole = [float(value.sum()) for name, value in accelerator.get_state_dict(objects[0]).items() if "norm" in name]
    assert everywhere(whole) == [whole] * world()


def check_weights_alone():
    """Saved without the optimizer they are requested as such; a model that is evaluated loads them from any checkpoint."""
    with shared_folder() as folder:
        accelerator, *objects = prepared(llama(), tp_degree=2, no_save_optim=True)
        train(accelerator, *objects, steps=2)
        wanted, place = accelerator.get_state_dict(objects[0]), f"{folder}/checkpoint"
        accelerator.save_state(place)
        accelerator, *objects = prepared(llama(), tp_degree=2)
        with raised(RuntimeError, "no_load_optim=True"):
            accelerator.load_state(place)
        objects[0].plugin.no_load_optim = True
        accelerator.load_state(place)
        near(accelerator.get_state_dict(objects[0]), wanted, 0)
        accelerator = fresh_engine(megatron_lm_plugin=MegatronLMPlugin(pp_degree=2))
        engine = accelerator.prepare(llama())
        accelerator.load_state(place)
        near(accelerator.get_state_dict(engine), wanted, 0)


def check_another_division_goes_on():
    with shared_folder() as folder:
        for number, (distributed, other) in enumerate(
            ((False, {"pp_degree": 2}), (True, {"tp_degree": 2}), (False, {}))
        ):
            place = f"{folder}/{number}"
            plugin = {"tp_degree": 1 if distributed else 2, "use_distributed_optimizer": distributed}
            accelerator, *objects = prepared(llama(), **plugin)
            train(accelerator, *objects, steps=2)
            accelerator.save_state(place)
            wanted, batch = accelerator.get_state_dict(objects[0]), rows_of(4)
            loss = objects[0](**batch).loss.item()
            after = accelerator.get_state_dict(objects[0])
            accelerator, *objects = prepared(llama(), **other)
            if distributed:
                with raised(RuntimeError, "no_load_optim=True"):
                    accelerator.load_state(place)
                objects[0].plugin.no_load_optim = True
            accelerator.load_state(place)
            near(accelerator.get_state_dict(objects[0]), wanted, 0)
            if not distributed:
                near(objects[0](**batch).loss.item(), loss)
                near(accelerator.get_state_dict(objects[0]), after)


def rows_of(count):
    return torch.utils.data.default_collate(rows()[:count])


def check_weights_come_back_bit_for_bit():
    for build, plugin in (
        (llama, {"tp_degree": 2}),
        (gpt2, {"tp_degree": 2}),
        (llama, {"pp_degree": 2}),
        (gpt2, {"pp_degree": 2}),
    ):
        model = build()
        for one in model.state_dict().values():
            torch.distributed.broadcast(one, 0)
        before = copy.deepcopy(model.state_dict())
        accelerator, engine, *_ = prepared(model, **plugin)
        state = accelerator.get_state_dict(engine)
        assert list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in before)
        with shared_folder() as folder:
            bare = accelerator.unwrap_model(engine)
            bare.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=state)
            accelerator.save_model(engine, folder + "/weights")
            accelerator.wait_for_everyone()
            loaded = type(bare).from_pretrained(folder).state_dict()
            assert all(torch.equal(loaded[name], before[name]) for name in before)


def check_bf16_is_near():
    losses, _ = plain(llama(), replicas=1)
    for plugin in ({}, {"use_distributed_optimizer": True, "pp_degree": 1, "tp_degree": 2}):
        accelerator, *objects = prepared(llama(), mixed_precision="bf16", **{"tp_degree": 2, **plugin})
        assert accelerator.scaler is None
        near(train(accelerator, *objects), losses, 0.02)


def check_what_is_refused():
    accelerator, engine, optimizer, loader = prepared(llama(), tp_degree=2)
    with raised(NotImplementedError, "get_state_dict"):
        engine.megatron_generate()
    with raised(ValueError, "labels"):
        engine(input_ids=torch.zeros(2, LENGTH, dtype=torch.long))
    with raised(ValueError, "num_micro_batches"):
        accelerator = fresh_engine(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2), gradient_accumulation_steps=2)
        accelerator.prepare(llama())
    with raised(ValueError, "tp_degree=3"):
        fresh_engine(megatron_lm_plugin=MegatronLMPlugin(tp_degree=3))
    engine = fresh_engine(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2)).prepare(llama())
    whole = plain(llama(), steps=1, replicas=1, count=2)[0][0]
    near(engine.eval()(**rows_of(2 * MICRO)).loss.item(), whole)
