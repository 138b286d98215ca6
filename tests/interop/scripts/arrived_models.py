"""Models that transformers shards as it loads them, and mixtures of experts: they train as on one process, and what is saved loads again.

accelerate launch --cpu --num_processes N arrived_models.py FOLDER [train | load] LAYOUT ...

`train` leaves a checkpoint of each layout in the folder, with what comes next; `load` continues with it on other processes.
"""

import gc
import sys
from contextlib import contextmanager
from functools import cache

import torch
import transformers
from pytest import raises
from sharded_models import BATCH, EXACT, LENGTH, WORDS, adam, close, llama, same
from tiny import report
from torch import nn
from torch.utils.data import DataLoader
from transformers.distributed import DistributedConfig

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object

STEPS, WINDOW, MAX_NORM = 20, 2, 0.5
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
# The loss that spreads tokens over experts is a part of the loss.
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02}


def qwen():
    sizes = {"head_dim": 8, "moe_intermediate_size": 16, "intermediate_size": 32, "num_experts": 4}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, **sizes, pad_token_id=0))


def dense():
    """A model with norms of heads. In float64, because its steps enlarge what float32 rounds."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, head_dim=8, intermediate_size=32, pad_token_id=0)
    ).double()


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **EXPERTS, intermediate_size=32, num_local_experts=4, pad_token_id=0)
    )


# The model, how many different batches a step has, and who shards: transformers by its sizes, or `prepare` by a mesh's.
LAYOUTS = {
    "fsdp": (llama, 2, {"fsdp_size": 2}), "tp": (llama, 1, {"tp_size": 2}),
    "ep-fsdp": (qwen, 2, {"fsdp_size": 2, "ep_size": 2}), "ep-tp": (mixtral, 1, {"tp_size": 2, "ep_size": 2}),
    # Norms of heads are complete on each rank, and see the rank's heads alone.
    "norms-tp": (dense, 1, {"tp_size": 2}), "norms-fsdp-tp": (dense, 2, {"fsdp_size": 2, "tp_size": 2}),
    "own-ep": (mixtral, 2, {"dp_shard_size": 2, "ep_size": 2}),
    "fsdp-tp": (llama, 2, {"fsdp_size": 2, "tp_size": 2}), "hsdp": (llama, 4, {"dp_replicate_size": 2, "fsdp_size": 2}),
    "ep-in-fsdp": (qwen, 4, {"fsdp_size": 4, "ep_size": 2}),
    "ep-fsdp-tp": (qwen, 2, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}),
    "own-ep-in-fsdp": (qwen, 4, {"dp_shard_size": 4, "ep_size": 2}),
    "own-ep-hsdp": (qwen, 4, {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}),
}  # fmt: skip


@cache
def source(folder, make):
    place = f"{folder}/{make.__name__}"
    with PartialState(cpu=True).main_process_first():
        if PartialState().is_main_process:
            transformers.set_seed(5)
            make().save_pretrained(place)
    return place


def rows(count):
    return torch.randint(3, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(7))


def rate(step):
    return 0.95**step


@cache
def alone(place, replicas):
    model = transformers.AutoModelForCausalLM.from_pretrained(place).train()
    optimizer, losses, norms = adam(model.parameters()), [], []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for window in rows(STEPS * WINDOW * BATCH).split(WINDOW * BATCH):
        parts = window.split(BATCH // replicas)
        found = [model(input_ids=ids, labels=ids).loss for ids in parts]
        (sum(found) / len(parts)).backward()
        losses.append((sum(found) / len(parts)).item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


@contextmanager
def built(place, replicas, sizes, **options):
    own = "dp_shard_size" in sizes
    if own:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
        )
        options |= {"parallelism_config": ParallelismConfig(**sizes), "fsdp_plugin": plugin}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, **options)
    arriving = {} if own else {"distributed_config": DistributedConfig(**sizes)}
    model = transformers.AutoModelForCausalLM.from_pretrained(place, **arriving).train()
    optimizer = adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: rate(count / replicas))
    loader = DataLoader(rows(STEPS * WINDOW * BATCH), batch_size=BATCH // replicas)
    try:
        yield (accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))
    finally:
        accelerator.free_memory()
        GradientState._reset_state()
        AcceleratorState._reset_state()


def train(accelerator, model, optimizer, loader, scheduler):
    losses, norms = [], []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [sum(pair) / WINDOW for pair in zip(losses[::2], losses[1::2], strict=True)], norms


def next_losses(accelerator, model, optimizer):
    """Two steps on batches that all ranks share, so that any number of them computes the same."""
    losses = []
    for ids in rows(2 * BATCH).split(BATCH):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad()
    return losses


def trains(folder, name):
    make, replicas, sizes = LAYOUTS[name]
    place = source(folder, make)
    losses, norms, weights = alone(place, replicas)
    with built(place, replicas, sizes) as (accelerator, model, optimizer, loader, scheduler):
        assert len(loader) == STEPS * WINDOW, (name, len(loader))
        assert accelerator.prepare(model) is model
        found = train(accelerator, model, optimizer, loader, scheduler)
        close([*found[0], *found[1]], [*losses, *norms], name)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            same(state, weights, 5 * EXACT, name)
        streamed = {key: value for bucket in accelerator.stream_weights(model) for key, value in bucket.items()}
        whole = gather_object([state])[0]
        same(streamed, whole, 0.0, name)
        seen = torch.cat([accelerator.gather_for_metrics(ids) for ids in loader])
        assert len(seen) == len(rows(STEPS * WINDOW * BATCH)), (name, len(seen))
        accelerator.save_state(f"{folder}/{name}-state")
        accelerator.save_model(model, f"{folder}/{name}-weights")
        after = next_losses(accelerator, model, optimizer)
        if accelerator.is_main_process:
            torch.save(after, f"{folder}/{name}-next.pt")
        accelerator.wait_for_everyone()


def loads(folder, name, saved):
    make, replicas, sizes = LAYOUTS[name]
    with built(source(folder, make), replicas, sizes) as (accelerator, model, optimizer, _, _):
        accelerator.load_state(f"{folder}/{saved}-state")
        close(
            next_losses(accelerator, model, optimizer), torch.load(f"{folder}/{saved}-next.pt"), f"{saved} in {name}"
        )


def adapted(folder, name):
    """Adapters of PEFT in a model that arrived sharded, in place and around it; each rank draws its own, and rank 0's count."""
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    make, replicas, sizes = LAYOUTS[name]
    place = source(folder, make)
    layers = {"target_modules": ["q_proj", "o_proj"], "init_lora_weights": False}

    def adapt(add, config=layers, **arriving):
        model = transformers.AutoModelForCausalLM.from_pretrained(place, **arriving)
        torch.manual_seed(3 + (PartialState().process_index if arriving else 0))
        return add(LoraConfig(r=2, **config), model).train()

    for add in (inject_adapter_in_model, lambda config, model: get_peft_model(model, config)):
        whole = adapt(add)
        optimizer = adam(p for p in whole.parameters() if p.requires_grad)
        norms = []
        for ids in rows(4 * BATCH).split(BATCH):
            for part in ids.chunk(replicas):
                (whole(input_ids=part, labels=part).loss / replicas).backward()
            norms.append(nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        accelerator = Accelerator(cpu=True)
        model = adapt(add, distributed_config=DistributedConfig(**sizes))
        optimizer = adam(p for p in model.parameters() if p.requires_grad)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        for window in rows(4 * BATCH).split(BATCH):
            ids = window.chunk(replicas)[accelerator.process_index % replicas]
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            found.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        close(found, norms, name)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            same(state, whole.state_dict(), 5 * EXACT, name)
        accelerator.save_state(f"{folder}/{name}-adapted")
        accelerator.load_state(f"{folder}/{name}-adapted")
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(value, state[key]) for key, value in after.items())
        if "ep_size" in sizes:
            experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
            with raises(ValueError, match="lora_A.default.weight. of .* adapts experts that ranks share out"):
                accelerator.prepare(adapt(add, experts, distributed_config=DistributedConfig(**sizes)))
        accelerator.free_memory()
        GradientState._reset_state()
        AcceleratorState._reset_state()


def main():
    folder, what, *names = sys.argv[1:]
    gc.freeze()  # collections are many, and pass over what imports have left
    for name in names:
        if what == "adapt":
            adapted(folder, name)
        elif what == "train":
            trains(folder, name)
            loads(folder, name, name)
        else:
            loads(folder, *name.split("<"))
        if PartialState().is_main_process:
            print("ok", what, name, flush=True)
    report(passed=len(names))


if __name__ == "__main__":
    main()
