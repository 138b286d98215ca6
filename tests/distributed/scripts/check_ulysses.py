"""Sequences that DeepSpeed shares: each stage trains as plain torch does on whole sequences, saves, resumes, and says what it cannot do."""

import itertools
import random
from types import MethodType

import torch
from check_deepspeed import near
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, sequence_tiled_compute
from expect import differing, raised
from harness import everywhere, fresh_engine, rank, shared_folder, world
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from accelerate import DeepSpeedPlugin, ParallelismConfig, skip_first_batches
from accelerate.utils import DeepSpeedSequenceParallelConfig, aggregate_loss

SP, LENGTH, ROUNDS, STEPS = 2, 16, 5, 3


def shared(stage=1, accumulation=1, clipping=1.0, settings=None, **layout):
    handler = layout.pop("sp_handler", None)
    layout = {"sp_size": SP, "sp_backend": "deepspeed", "sp_handler": handler} | layout
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=clipping, zero3_save_16bit_model=True)
    return fresh_engine(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=accumulation,
        parallelism_config=ParallelismConfig(**layout),
        **(settings or {}),
    )


def llama(kind=LlamaForCausalLM, attention="sdpa", heads=4, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": heads, "num_key_value_heads": 2}
    return kind(LlamaConfig(**sizes, **heads, attn_implementation=attention, **settings))


class Sequences(Dataset):
    """Sequences whose labels are masked at the beginning, so that ranks count different numbers of tokens."""

    def __init__(self, count, length=LENGTH, drawn=False, without=()):
        self.count, self.length, self.drawn, self.without = count, length, drawn, without

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index + (random.getrandbits(20) if self.drawn else 0))
        ids = torch.randint(0, 64, (self.length,), generator=generator)
        labels = torch.where(torch.arange(self.length) < 1 + index % 9, -100, ids)
        item = {"input_ids": ids, "position_ids": torch.arange(self.length), "labels": labels}
        return {name: value for name, value in item.items() if name not in self.without}


def loader(rounds=ROUNDS, batch=2, **settings):
    shuffle = settings.pop("shuffle", False)
    return DataLoader(Sequences(rounds * batch * world(), **settings), batch_size=batch, shuffle=shuffle)


def prepared(accelerator, model=None, loading=None):
    model = model or llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=20)
    return accelerator.prepare(model, optimizer, scheduler, loading or loader())


def loss_of(model, batch, group=None):
    """The loss as Hugging Face documents it: the mean over the tokens of all ranks that share the sequences."""
    labels = batch["shift_labels"]
    out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    inner = getattr(model, "module", model)
    loss = inner.loss_function(logits=out.logits, labels=None, shift_labels=labels, vocab_size=64)
    if group is None:
        return loss
    if world() > SP:  # over gloo torch's backward pass of all_gather fails in a group that does not begin at rank 0
        return aggregate_loss(loss, (labels != -100).sum(), group=group)
    losses, counts = all_gather(loss, group=group), all_gather((labels != -100).sum(), group=group)
    return sum(one * n for one, n in zip(losses, counts, strict=True) if n > 0) / sum(counts)


def sp_group():
    from deepspeed.utils import groups

    return groups._get_sequence_parallel_group()


def train(accelerator, model, optimizer, scheduler, batches):
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch, sp_group())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def check_the_end_of_a_loop_that_was_left_is_not_that_of_the_next_one():
    """When a generator is collected is undefined: it may be in the middle of the next epoch."""
    accelerator = shared()
    model, _, _, batches = prepared(accelerator)
    left, running = iter(batches), iter(batches)
    next(left), next(running)
    left.close()
    assert loss_of(model, next(running), sp_group()).isfinite()
    running.close()


def plain(accumulation):
    """The same in plain torch on whole sequences: a step takes the batch of one rank of each group that shares sequences."""
    model, clip = llama(), nn.utils.clip_grad_norm_
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=20)
    batches, losses = list(loader()), []
    for step in range(ROUNDS * SP):
        of_round, turn = step // SP * world(), step % SP
        each = []
        for first in range(0, world(), SP):
            batch = dict(batches[of_round + first + turn])
            batch["shift_labels"] = nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
            each.append(loss_of(model, batch))
        loss = torch.stack(each).mean()
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0 or step == ROUNDS * SP - 1:
            norm = clip(model.parameters(), 1.0)
            optimizer.step()
            for _ in range(world() // SP):
                scheduler.step()
            optimizer.zero_grad()
    return losses, norm, model.state_dict(), scheduler.get_last_lr()


def check_each_stage_trains_as_on_whole_sequences():
    losses, norm, weights, rates = plain(STEPS)
    for stage in (0, 1, 2, 3):
        accelerator = shared(stage, STEPS)
        model, optimizer, scheduler, batches = prepared(accelerator)
        near(train(accelerator, model, optimizer, scheduler, batches), losses)
        near(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)), float(norm), 1e-4)
        assert model.global_steps == -(-ROUNDS * SP // STEPS), "the loader's end closes one window"
        assert scheduler.get_last_lr() == rates
        state = accelerator.get_state_dict(model) or {}
        for name in state:
            near(state[name].tolist(), weights[name].tolist())


class Tiled(LlamaForCausalLM):
    """Computes its MLPs and, from the hidden states, the sum of its losses by tiles; `tiles=1` takes everything at once."""

    tiles = 1

    def forward(self, input_ids, position_ids, shift_labels):
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        if self.tiles == 1:
            return self.summed(hidden, shift_labels)
        cut = {"hidden": hidden, "labels": shift_labels}
        return sequence_tiled_compute(
            self.summed, hidden.shape[1], self.tiles, cut, {}, "hidden", [self.lm_head.weight], 0, "sum"
        )

    def summed(self, hidden, labels):
        logits = self.lm_head(hidden).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")

    def cut(self, tiles):
        self.tiles = tiles
        for layer in self.model.layers:
            layer.mlp.forward = MethodType(self.tiled_mlp, layer.mlp)
        return self

    def tiled_mlp(self, mlp, x):
        return TiledMLP.apply(type(mlp).forward, mlp, x, self.tiles, list(mlp.parameters()))


def check_tiles_have_the_losses_of_the_whole():
    for stage in (1, 3):
        found = []
        for tiles in (1, 4):
            accelerator = shared(stage, STEPS)
            model = llama(Tiled) if tiles == 1 else llama(Tiled).cut(tiles)
            model, optimizer, _, batches = prepared(accelerator, model, loader(rounds=3, batch=1))
            losses = []
            for batch in batches:
                with accelerator.accumulate(model):
                    count = (batch["shift_labels"] != -100).sum()
                    loss = aggregate_loss(model(**batch) / count, count, group=sp_group())
                    accelerator.backward(loss)
                losses.append(loss.item())
            found.append([*losses, float(accelerator.clip_grad_norm_(model.parameters(), 1.0))])
        near(found[1], found[0])


def check_bf16_and_compiled_models_are_near():
    wanted = plain(1)[0][:4]
    for settings, within in (({"mixed_precision": "bf16"}, 0.05), ({"dynamo_backend": "eager"}, 1e-5)):
        accelerator = shared(2, settings=settings)
        *trained, batches = prepared(accelerator)
        near(train(accelerator, *trained, itertools.islice(batches, 4)), wanted, within)


def check_parts_are_those_of_each_ranks_batch_in_turn():
    accelerator = shared(accumulation=4)
    raw = loader()
    batches = prepared(accelerator, loading=raw)[3]
    assert type(batches).__name__ == "UlyssesSPDataLoaderAdapter" and not hasattr(batches, "dataset")
    assert len(batches) == ROUNDS * SP
    whole, mine = list(loader()), slice(rank() % SP * LENGTH // SP, (rank() % SP + 1) * LENGTH // SP)
    for _ in range(2):
        found, ends = [], []
        for batch in batches:
            found.append(batch)
            ends.append(accelerator.gradient_state.end_of_dataloader)
        assert ends == [False] * (ROUNDS * SP - 1) + [True]
        for step, batch in enumerate(found):
            wanted = whole[step // SP * world() + rank() // SP * SP + step % SP]
            labels = nn.functional.pad(wanted["labels"], (0, 1), value=-100)[:, 1:]
            assert batch["shift_labels"].is_contiguous() and batch["shift_labels"].equal(labels[:, mine])
            assert list(batch) == ["input_ids", "position_ids", "shift_labels"]
            assert all(batch[name].equal(wanted[name][:, mine]) for name in ("input_ids", "position_ids"))
        for number in (1, SP, 2 * SP + 1):
            view = skip_first_batches(batches, number)
            assert len(view) == ROUNDS * SP - number and not differing(list(view), found[number:])
    plain_loader = accelerator.prepare(loader())
    assert len(accelerator.deepspeed_ulysses_dl_adapter(plain_loader, None)) == ROUNDS * SP
    mixed = accelerator.deepspeed_ulysses_dl_adapter(
        DataLoader([{"input_ids": [1] * 4, "name": str(n)} for n in range(world())], collate_fn=_mixed), None
    )
    parts = list(mixed)
    assert [part["name"] for part in parts] == [f"{rank() // SP * SP + turn}" for turn in range(SP)]
    assert parts[0]["mask"].dtype == torch.bool and parts[0]["wide"].shape == (1, 2, 3)


def _mixed(samples):
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    more = {"mask": ids > 0, "name": samples[0]["name"], "wide": torch.zeros(1, 4, 3, dtype=torch.bfloat16)}
    return {"input_ids": ids, "position_ids": torch.arange(4)[None], **more}


def check_a_run_goes_on_between_the_parts_of_a_batch():
    """With an order and samples that are drawn, and attention that drops out."""

    def begun(stage):
        accelerator = shared(stage, 1)
        random.seed(7 + rank())
        model = llama(attention_dropout=0.1)
        return accelerator, prepared(accelerator, model, loader(shuffle=True, drawn=True))

    for stage, done in ((1, 1), (2, 4), (3, 5)):
        with shared_folder() as folder:
            accelerator, (model, *steppers, batches) = begun(stage)
            model.train()
            running = iter(batches)
            train(accelerator, model, *steppers, (next(running) for _ in range(done)))
            accelerator.save_state(f"{folder}/saved")
            wanted = train(accelerator, model, *steppers, running)
            wanted += train(accelerator, model, *steppers, batches)
            accelerator, (model, *steppers, batches) = begun(stage)
            model.train()
            accelerator.load_state(f"{folder}/saved")
            found = train(accelerator, model, *steppers, batches) + train(accelerator, model, *steppers, batches)
            assert len(found) == 2 * ROUNDS * SP - done and found == wanted, (stage, found, wanted)


def check_whole_batches_are_evaluated_whole():
    accelerator = shared(3)
    model, _, _, batches = prepared(accelerator, loading=loader(batch=1))
    second = prepared(accelerator, llama(heads=8), loader(batch=3))[0]
    whole = accelerator.prepare(loader(rounds=1, batch=3))
    own, other = llama().eval(), llama(heads=8).eval()
    model.eval()
    second.eval()
    with torch.no_grad():
        for batch in whole:
            inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
            near(model(**inputs).logits.tolist(), own(**inputs).logits.tolist())
        cut, one = accelerator.deepspeed_ulysses_dl_adapter(whole, model), list(loader(rounds=1, batch=3))
        for turn, batch in enumerate(cut):
            parts = {name: batch[name] for name in ("input_ids", "position_ids")}
            inputs = {name: one[rank() // SP * SP + turn][name] for name in parts}
            for engine, reference in ((model, own), (second, other)):
                logits = reference(**inputs).logits.chunk(SP, dim=1)[rank() % SP]
                near(engine(**parts).logits.tolist(), logits.tolist())
    model.train()
    with raised(ValueError, "does not cut sequences"):
        for batch in whole:
            model(**batch)
    accelerator.free_memory()
    assert own.train()(**inputs).logits.shape == (3, LENGTH, 64)


def check_what_does_not_fit_is_refused_on_every_rank():
    for layout, words in (
        ({"sp_size": 1, "tp_size": 2}, "tp_size=2 of parallelism_config"),
        ({"sp_size": 1, "dp_shard_size": 2}, "dp_shard_size=2 of parallelism_config"),
        ({"sp_backend": "torch"}, "sp_size=2 of parallelism_config"),
    ):
        with raised(NotImplementedError, words):
            prepared(shared(**layout))
    fixed = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False, sp_seq_length=2 * LENGTH)
    odd = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False, sp_seq_length=7)
    for handler, model, words in (
        (None, nn.Linear(2, 2), "got a Linear"),
        (None, llama(attention="eager"), "attn_implementation='eager'"),
        (None, _three_heads(), "not divisible"),
        (None, GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), "num_key_value_heads"),
        (odd, None, "sp_seq_length=7"),
        (DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2"), None, "does not match"),
    ):
        with raised(ValueError, words):
            prepared(shared(sp_handler=handler), model)
    with raised(ValueError, "prepare the model first"):
        shared().deepspeed_ulysses_dl_adapter(loader(), None)
    accelerator = shared(sp_handler=fixed)
    batches = prepared(accelerator, loading=loader(length=2 * LENGTH))[3]
    assert len(list(batches)) == ROUNDS * SP
    last = world() - 1
    for settings, words in (
        ({"length": LENGTH}, "sp_seq_length=32"),
        ({"length": 2 * LENGTH, "without": ["position_ids"]}, "['position_ids']"),
    ):
        mine = settings if rank() == last else {"length": 2 * LENGTH}
        with raised(ValueError, f"rank {last}", words):
            list(accelerator.deepspeed_ulysses_dl_adapter(loader(**mine), None))
    accelerator = shared()
    accelerator.even_batches = False
    batches = prepared(accelerator, loading=DataLoader(Sequences(2 * world() - 1), batch_size=1))[3]
    with raised(ValueError, "multiple of sp_size=2"):
        list(accelerator.deepspeed_ulysses_dl_adapter(loader(length=LENGTH - 1), None))
    with raised(ValueError, f"[{last}] have no batch left"):
        list(batches)
    assert everywhere(1) == [1] * world()


def _three_heads():
    return LlamaForCausalLM(LlamaConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, vocab_size=64))
