"""The bytes that the estimator says a step sends are those that real exchanges have, for every collective, on two and four ranks."""

from collections import Counter

import torch
from harness import CPU, fresh_accelerator, world
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.diagnostics.activations import measure
from accelerate.diagnostics.estimator import Layout, traffic
from accelerate.utils import TorchTensorParallelConfig

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    """Two layers that tensor parallelism cuts; rows do not divide evenly by four."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Blocks between layers of their own, with a buffer."""

    _no_split_modules = ("Block",)
    tp_plan = PLAN

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.last = nn.Linear(16, 6)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale[0]


class Exchanges(TorchDispatchMode):
    """Counts the bytes of the collectives that torch starts, in the words of the estimator."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, first = str(func), args[0] if args else None
        tensors = first if isinstance(first, (list, tuple)) else [first]
        size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        if "allreduce_" in name or name.startswith("_c10d_functional.all_reduce"):
            self.bytes["all_reduce"] += size
        elif "c10d.broadcast_" in name:
            self.bytes["broadcast"] += size
        elif "_allgather_base_" in name:
            self.bytes["all_gather"] += size
        elif "_reduce_scatter_base_" in name:
            self.bytes["reduce_scatter"] += args[1].nbytes
        return out


def counted(accelerator, windows=1):
    """Take three steps, and return what the third exchanges: torch lays DDP's buckets anew in the second."""
    torch.manual_seed(0)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        with Exchanges() as exchanges:
            for _ in range(windows):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 5, 6)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
    return dict(exchanges.bytes)


def foretold(**sizes):
    """Return what the estimator says of the same step."""
    layout = Layout(micro_batch=2, **sizes)
    profile = measure(
        Net, lambda batch, sequence: {"x": torch.ones(batch, sequence, 6)}, 2, 5, cast=layout.shards > 0, tp=layout.tp
    )
    found = Counter()
    for each in traffic(profile, layout):
        found[each.collective] += each.bytes
    return dict(found)


def sharding(**options):
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options)


def check_bytes_of_ddp():
    for windows in (1, 2) if CPU else ():
        accelerator = fresh_accelerator(gradient_accumulation_steps=windows)
        assert counted(accelerator, windows) == foretold(dp_replicate=world(), accumulation=windows)


def check_bytes_of_fsdp2():
    for windows, reshard in ((1, True), (1, False), (2, True)) if CPU else ():
        plugin = sharding(reshard_after_forward=reshard)
        accelerator = fresh_accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=windows)
        said = foretold(dp_shard=world(), fsdp=True, accumulation=windows, reshard=reshard)
        found = counted(accelerator, windows)
        assert found == said, (windows, reshard, found, said)


def check_bytes_of_tensor_parallelism():
    if CPU:
        handler = TorchTensorParallelConfig(plan=PLAN)
        accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=world(), tp_handler=handler))
        found, said = counted(accelerator), foretold(tp=world())
        assert found == said, (found, said)


def four_bytes_of_hsdp():
    if CPU:
        layout = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        accelerator = fresh_accelerator(fsdp_plugin=sharding(), parallelism_config=layout)
        found, said = counted(accelerator), foretold(dp_replicate=2, dp_shard=2, fsdp=True)
        assert found == said, (found, said)
