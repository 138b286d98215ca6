"""What a strategy costs next to plain torch written manually: a step, prepare, the gathered state, a checkpoint, memory at its peak.

Run by itself, or under torchrun. `steps` has both in one process and takes turns, step by step; `life` has one of them.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import TorchTensorParallelConfig

warnings.simplefilter("ignore")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")
# About 20 million parameters and 0.2 s a step on one core; on a GPU about 300 million.
WIDTH, HIDDEN, LAYERS, HEADS, WORDS = (1024, 2816, 20, 16, 32000) if CUDA else (384, 1024, 8, 6, 8192)
BATCH, LENGTH = (8, 1024) if CUDA else (2, 32)
PLAN = {
    **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value", "gate", "up")},
    **{f"layers.*.{name}": "rowwise" for name in ("out", "down")},
}


class Layer(nn.Module):
    """A block as Llama has it, without rotary positions."""

    def __init__(self):
        super().__init__()
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x):
        seen = self.first(x)
        # Under tensor parallelism a rank has some of the heads.
        parts = [
            layer(seen).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        seen = self.second(x)
        return x + self.down(functional.silu(self.gate(seen)) * self.up(seen))


class Model(nn.Module):
    """A small Llama."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens, labels):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def ranks():
    return int(os.environ.get("WORLD_SIZE", 1))


def made(strategy, **options):
    """Return a model and its optimizer; the options are those of transformers' `from_pretrained`."""
    torch.manual_seed(0)
    model = experts(**options) if strategy == "ep" else Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def experts(**options):
    """Return a small mixture of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": WORDS}
    sizes |= {"num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS, "moe_intermediate_size": HIDDEN // 4}
    config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2)
    weights = Qwen3MoeForCausalLM(config).state_dict()
    return Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=weights, **options).train()


def sharded(strategy):
    """Return a model that torch, or transformers as it loads it, has sharded, and its optimizer."""
    strategy = strategy.removeprefix("arrived-")
    if strategy == "ep":
        from transformers.distributed import DistributedConfig

        return made(strategy, distributed_config=DistributedConfig(fsdp_size=ranks(), ep_size=2))
    model = made(strategy)[0]
    if strategy in ("ddp", "tp"):
        model.to(DEVICE)
    if strategy == "ddp" and ranks() > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[DEVICE.index] if CUDA else None)
    elif strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({Layer})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=DEVICE)
    elif strategy != "ddp":
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import parallel

        sizes = {
            "fsdp2": {"dp_shard": ranks()},
            "hsdp": {"dp_replicate": 2, "dp_shard": ranks() // 2},
            "tp": {"tp": ranks()},
            "fsdp2-tp": {"dp_shard": ranks() // 2, "tp": 2},
        }[strategy]
        mesh = dist.init_device_mesh(DEVICE.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if "tp" in sizes:
            styles = {"colwise": parallel.ColwiseParallel, "rowwise": parallel.RowwiseParallel}
            parallel.parallelize_module(model, mesh["tp"], {name: styles[style]() for name, style in PLAN.items()})
        shards = tuple(name for name in sizes if name != "tp")
        for part in (*model.layers, model) if shards else ():
            fully_shard(part, mesh=mesh[shards])
    # `foreach` and `fused`, which are GPUs' default, refuse plain tensors next to split ones, which this plan leaves.
    one_by_one = {"foreach": False} if "tp" in strategy and CUDA else {}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **one_by_one)


def loss_of(model, tokens):
    found = model(tokens, labels=tokens)
    return getattr(found, "loss", found)  # transformers' models return more than the loss


class Ours:
    """The model through the Accelerator."""

    def __init__(self, strategy):
        self.strategy = strategy
        options = {"cpu": not CUDA, "mixed_precision": "bf16" if CUDA else "no"}
        if strategy in ("fsdp1", "fsdp2", "hsdp", "ep"):
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                fsdp_version=1 if strategy == "fsdp1" else 2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer" if strategy == "ep" else "Layer"],
                state_dict_type="SHARDED_STATE_DICT",
                # As torch has it by default; that of the plugin is not to prefetch.
                backward_prefetch="BACKWARD_PRE" if strategy == "fsdp1" else None,
            )
        if strategy.startswith("zero"):
            plugin = DeepSpeedPlugin(zero_stage=int(strategy[-1]), zero3_save_16bit_model=True)
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = BATCH
            options["deepspeed_plugin"] = plugin
        elif strategy == "hsdp":
            options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=ranks() // 2)
        elif strategy == "ep":
            options["parallelism_config"] = ParallelismConfig(dp_shard_size=ranks(), ep_size=2)
        elif strategy == "tp":
            handler = TorchTensorParallelConfig(plan=PLAN)
            options["parallelism_config"] = ParallelismConfig(tp_size=ranks(), tp_handler=handler)
        self.accelerator = Accelerator(**options)

    def prepare(self):
        given = (sharded if self.strategy.startswith("arrived-") else made)(self.strategy)
        self.model, self.optimizer = self.accelerator.prepare(*given)

    def step(self, tokens):
        with self.accelerator.accumulate(self.model):
            loss = loss_of(self.model, tokens)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gather(self):
        return self.accelerator.get_state_dict(self.model)

    def save(self, folder):
        self.accelerator.save_state(folder)

    def load(self, folder):
        self.accelerator.load_state(folder)


class PlainEngine:
    """The same manually, with DeepSpeed's engine."""

    def __init__(self, strategy):
        import deepspeed

        deepspeed.init_distributed(auto_mpi_discovery=False)
        self.strategy, self.stage = strategy, int(strategy[-1])

    def prepare(self):
        import deepspeed

        model, optimizer = made(self.strategy)
        # As the Accelerator's plugin has it.
        zero = {"stage": self.stage, "stage3_gather_16bit_weights_on_model_save": True}
        zero |= {f"offload_{part}": {"device": "none"} for part in ("optimizer", "param")}
        config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0, "zero_optimization": zero}
        config |= {"zero_allow_untested_optimizer": True, "bf16": {"enabled": CUDA}, "steps_per_print": 10**9}
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(self, tokens):
        self.engine.backward(loss_of(self.engine, tokens))
        self.engine.step()

    def gather(self):
        if self.stage == 3:
            return self.engine._zero3_consolidated_16bit_state_dict()
        return self.engine.module.state_dict()

    def save(self, folder):
        self.engine.save_checkpoint(folder)

    def load(self, folder):
        self.engine.load_checkpoint(folder)


class Plain:
    """The same manually."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.cast = torch.autocast("cuda", torch.bfloat16) if CUDA else contextlib.nullcontext()
        if not dist.is_initialized():
            backend = "nccl" if CUDA else "gloo"
            alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group(backend, **alone)

    def prepare(self):
        self.model, self.optimizer = sharded(self.strategy)

    def step(self, tokens):
        with self.cast:
            loss = loss_of(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _states(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def gather(self):
        if self.strategy == "fsdp1" and not CUDA:
            from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

            # Torch's option to copy to host memory crashes where the shards are there.
            with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
                return self.model.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def save(self, folder):
        if self.strategy == "ddp":
            if not dist.get_rank():
                Path(folder).mkdir(exist_ok=True)
                states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save(states, Path(folder, "states.pt"))
            dist.barrier()
            return
        import torch.distributed.checkpoint as dcp

        dcp.save(self._states(), checkpoint_id=folder)

    def load(self, folder):
        if self.strategy == "ddp":
            states = torch.load(Path(folder, "states.pt"), map_location=DEVICE, weights_only=True)
            self.model.load_state_dict(states["model"])
            self.optimizer.load_state_dict(states["optimizer"])
            return
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        states = self._states()
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )


def by_hand(strategy):
    return PlainEngine(strategy) if strategy.startswith("zero") else Plain(strategy)


def clock(work, *arguments):
    """Return how long all ranks needed, in seconds."""
    settle()
    start = time.perf_counter()
    work(*arguments)
    settle()
    return time.perf_counter() - start


def settle():
    if CUDA:
        torch.cuda.synchronize()
    if dist.is_initialized() and ranks() > 1:
        dist.barrier()


def largest(value):
    """Return the largest figure of all ranks."""
    told = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    if dist.is_initialized() and ranks() > 1:
        dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def sharing(strategy):
    """Return how many ranks share layers."""
    return 2 if strategy.endswith("fsdp2-tp") else ranks() if strategy.endswith("tp") else 1


def tokens_of(strategy):
    # Ranks that share layers work on the same sequences.
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)) // sharing(strategy))
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator).to(DEVICE)


def steps(strategy, count, folder):
    """Take turns, so that a slow moment of the machine hits both; the ratio is the median of those of neighbours."""
    both = {"ours": Ours(strategy), "plain torch": by_hand(strategy)}
    for run in both.values():
        run.prepare()
    tokens, times = tokens_of(strategy), {name: [] for name in both}
    for number in range(count + 2):
        order = list(both.items())
        for name, run in order if number % 2 == 0 else reversed(order):
            spent = clock(run.step, tokens)
            if number >= 2:  # the first ones get memory and streams
                times[name].append(spent)
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    spent = {name: statistics.median(values) for name, values in times.items()}
    figures = {f"step, {name} (ms)": 1000 * value for name, value in spent.items()} | {"step, ratio": ratio}
    if CUDA:
        copies = ranks() // sharing(strategy)
        figures |= {f"tokens per second, {name}": BATCH * LENGTH * copies / value for name, value in spent.items()}
    return figures


def life(strategy, count, folder, kind):
    """Return what one of the two takes from prepare to a loaded checkpoint, and its memory at the peak of training."""
    run, tokens = kind(strategy), tokens_of(strategy)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    figures = {"prepare (s)": clock(run.prepare)}
    for _ in range(count):
        run.step(tokens)
    settle()
    if CUDA:
        figures["peak memory of the device (MB)"] = largest(torch.cuda.max_memory_allocated() / 2**20)
    else:
        figures["peak memory (MB)"] = largest(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - base)
    figures["state dict, gathered (s)"] = statistics.median(clock(run.gather) for _ in range(3))
    figures["save (s)"] = clock(run.save, folder)
    figures["load (s)"] = clock(run.load, folder)
    return figures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=["steps", "ours", "plain"])
    arrived = [f"arrived-{name}" for name in ("fsdp2", "hsdp", "tp", "fsdp2-tp")]
    known = ["ddp", "fsdp1", "fsdp2", "hsdp", "tp", "zero2", "zero3", "ep", *arrived]
    parser.add_argument("--strategy", choices=known, required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--folder", default="")
    arguments = parser.parse_args()
    if arguments.strategy == "ep":
        from transformers import Qwen3MoeForCausalLM  # noqa: F401 (its import is no part of `prepare`)
    told = (arguments.strategy, arguments.count, arguments.folder)
    if arguments.phase == "steps":
        figures = steps(*told)
    else:
        figures = life(*told, Ours if arguments.phase == "ours" else by_hand)
    if not int(os.environ.get("RANK", 0)):
        print(json.dumps(figures), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
