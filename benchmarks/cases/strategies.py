"""What a strategy costs beside plain torch written by hand: a step, prepare, the gathered state, a checkpoint, memory at its peak.

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

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def made():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def ranks():
    return int(os.environ.get("WORLD_SIZE", 1))


class Ours:
    """The model through the Accelerator."""

    def __init__(self, strategy):
        options = {"cpu": not CUDA, "mixed_precision": "bf16" if CUDA else "no"}
        if strategy in ("fsdp1", "fsdp2", "hsdp"):
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                fsdp_version=1 if strategy == "fsdp1" else 2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Layer"],
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
        elif strategy == "tp":
            handler = TorchTensorParallelConfig(plan=PLAN)
            options["parallelism_config"] = ParallelismConfig(tp_size=ranks(), tp_handler=handler)
        self.accelerator = Accelerator(**options)

    def prepare(self):
        self.model, self.optimizer = self.accelerator.prepare(*made())

    def step(self, tokens):
        with self.accelerator.accumulate(self.model):
            loss = self.model(tokens)
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
    """The same by hand, with DeepSpeed's engine."""

    def __init__(self, strategy):
        import deepspeed

        deepspeed.init_distributed(auto_mpi_discovery=False)
        self.stage = int(strategy[-1])

    def prepare(self):
        import deepspeed

        model, optimizer = made()
        # As the Accelerator's plugin has it.
        zero = {"stage": self.stage, "stage3_gather_16bit_weights_on_model_save": True}
        zero |= {f"offload_{part}": {"device": "none"} for part in ("optimizer", "param")}
        config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0, "zero_optimization": zero}
        config |= {"zero_allow_untested_optimizer": True, "bf16": {"enabled": CUDA}, "steps_per_print": 10**9}
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(self, tokens):
        self.engine.backward(self.engine(tokens))
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
    """The same by hand."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.cast = torch.autocast("cuda", torch.bfloat16) if CUDA else contextlib.nullcontext()
        if not dist.is_initialized():
            backend = "nccl" if CUDA else "gloo"
            alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group(backend, **alone)

    def prepare(self):
        model = made()[0]
        strategy = self.strategy
        if strategy in ("ddp", "tp"):
            model.to(DEVICE)
        if strategy == "ddp" and ranks() > 1:
            model = nn.parallel.DistributedDataParallel(model, device_ids=[DEVICE.index] if CUDA else None)
        elif strategy == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel
            from torch.distributed.fsdp.wrap import ModuleWrapPolicy

            policy = ModuleWrapPolicy({Layer})
            model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=DEVICE)
        elif strategy in ("fsdp2", "hsdp"):
            from torch.distributed.fsdp import fully_shard

            sizes = {"replicas": 2, "shards": ranks() // 2} if strategy == "hsdp" else {"shards": ranks()}
            mesh = dist.init_device_mesh(DEVICE.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif strategy == "tp":
            from torch.distributed.tensor import parallel

            styles = {"colwise": parallel.ColwiseParallel, "rowwise": parallel.RowwiseParallel}
            plan = {name: styles[style]() for name, style in PLAN.items()}
            parallel.parallelize_module(model, dist.init_device_mesh(DEVICE.type, (ranks(),)), plan)
        self.model = model
        # `foreach` and `fused`, which are GPUs' default, refuse plain tensors beside split ones, which this plan leaves.
        one_by_one = {"foreach": False} if strategy == "tp" and CUDA else {}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **one_by_one)

    def step(self, tokens):
        with self.cast:
            loss = self.model(tokens)
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


def tokens_of(strategy):
    rank = 0 if strategy == "tp" else int(os.environ.get("RANK", 0))  # all ranks work on the same sequences
    generator = torch.Generator().manual_seed(rank)
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
        copies = 1 if strategy == "tp" else ranks()
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
    parser.add_argument("--strategy", choices=["ddp", "fsdp1", "fsdp2", "hsdp", "tp", "zero2", "zero3"], required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--folder", default="")
    arguments = parser.parse_args()
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
