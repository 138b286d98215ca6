"""The table of the guide on precision, and the reports, under the strategies of several processes."""

import warnings

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from harness import everywhere, fresh_accelerator, shared_folder
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate.extensions.reports.footprint import no_sync_memory_note
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.imports import is_torchao_available
from precision_table import Net, check, rows


def accelerator_for(strategy, precision="no"):
    plugin = None
    if strategy != "ddp":
        options = {"use_orig_params": True} if strategy == "fsdp1" else {}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(strategy[-1]), **options)
    return fresh_accelerator(mixed_precision=precision, fsdp_plugin=plugin)


class Exchanges(TorchDispatchMode):
    """Note the dtype of what is exchanged inside, in whatever language the strategy is written."""

    def __init__(self, kind="reduce"):
        super().__init__()
        self.kind = kind
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and self.kind in func.__name__:
            for tensor in pytree.tree_leaves(args):
                if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or self.kind != "reduce"):
                    self.dtypes.add(str(tensor.dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def check_the_table_is_true():
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        for row in rows(strategy):
            accelerator, exchanges = accelerator_for(strategy, row["mixed_precision"]), Exchanges()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                check(accelerator, row, exchanges)
            assert exchanges.dtypes == {row["gradients exchanged"]}, (row, exchanges.dtypes)
            upcast = row["loaded in"] == "bfloat16" and row["trainable parameters"] == "float32"
            told = [item for item in caught if "+1.6 KiB on each rank" in str(item.message)]
            assert len(told) == int(upcast and dist.get_rank() == 0), (row, [str(item.message) for item in caught])


def check_whole_and_local_sizes():
    """Shards of the ranks add up to the whole; every rank has the same memory report."""
    size = dist.get_world_size()
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        accelerator = accelerator_for(strategy)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        accelerator.backward(model(torch.ones(4, 16, device=accelerator.device)).sum())
        optimizer.step()
        report = accelerator.precision_report(model)
        trained = next(row for row in report.rows if row.copy == "trainable parameters")
        assert (trained.count, trained.nbytes) == (816, 816 * 4)
        shares = 1 if strategy != "ddp" else size
        assert sum(everywhere(trained.local)) == 816 * 4 * shares
        found = accelerator.memory_report()
        assert len({str(text) for text in everywhere(str(found))}) == 1
        assert [row.rank for row in found.rows] == list(range(size))
        parts = 1 if strategy == "ddp" else size
        # torch pads shards to equal sizes
        assert all(0 <= row.parameters - (816 + 528) * 4 / parts <= 64 * size for row in found.rows), (strategy, found)
        # FSDP1 cuts where it comes: a rank may have more of the trainable parameters than another one.
        states = sum(row.optimizer for row in found.rows)
        assert 0 <= states - 816 * 8 * size / parts <= 64 * size * size, (strategy, found)


def check_whole_gradients_while_nothing_is_exchanged():
    """The figure of the note is what the memory report then finds, next to what it finds without."""
    size = dist.get_world_size()
    for strategy in ("fsdp1", "fsdp2"):
        accelerator = accelerator_for(strategy)
        net = Net()
        net.frozen.requires_grad_(True)
        model = accelerator.prepare(net)
        whole = (816 + 528) * 4
        note = no_sync_memory_note(model)
        assert f"are {whole / 1024:.1f} KiB, where this rank's shards are {whole / size / 1024:.1f} KiB" in note, note
        inputs = torch.ones(4, 16, device=accelerator.device)
        with accelerator.no_sync(model):
            accelerator.backward(model(inputs).sum())
        kept = [row.gradients for row in accelerator.memory_report().rows]
        assert all(whole <= count <= whole + 64 * size for count in kept), (strategy, kept, whole)
        accelerator.backward(model(inputs).sum())
        kept = [row.gradients for row in accelerator.memory_report().rows]
        assert all(count <= whole / size + 64 * size for count in kept), (strategy, kept, whole)


def check_float8_is_gathered_in_8_bits():
    """FSDP2 with torchao: parameters of torchao's own type, which the optimizer follows and a checkpoint keeps."""
    if not is_torchao_available():
        return
    accelerator = accelerator_for("fsdp2", "fp8")
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    assert type(model[1].weight.to_local()).__name__ == "WeightWithDynamicFloat8CastTensor"
    before = [whole.full_tensor().clone() for whole in model.parameters()]
    gathered = Exchanges("allgather")
    with gathered:
        loss = model(torch.ones(16, 16, device=accelerator.device)).pow(2).mean()
    accelerator.backward(loss)
    assert gathered.dtypes >= {"uint8"} or gathered.dtypes >= {"float8_e4m3fn"}, gathered.dtypes
    optimizer.step()
    after = [whole.full_tensor() for whole in model.parameters()]
    assert all((old != new).any() for old, new in zip(before, after, strict=True))
    report = accelerator.precision_report(model)
    assert report.dtype_of("forward of 1 torchao layers") == "float8" and not report.warnings, str(report)
    with shared_folder() as folder:
        accelerator.save_state(folder)
        accelerator.backward(model(torch.ones(16, 16, device=accelerator.device)).pow(2).mean())
        optimizer.step()
        accelerator.load_state(folder)
        restored = [whole.full_tensor() for whole in model.parameters()]
        assert all(torch.equal(old, new) for old, new in zip(after, restored, strict=True))
