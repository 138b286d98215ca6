"""Full weights of sharded models: what they take of a process's memory while they come, and what is refused."""

import ctypes
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from check_sharded import sharding
from expect import full, raised
from harness import everywhere, fresh_accelerator, rank, shared_folder
from pytest import raises as pytest_raises
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from accelerate import ParallelismConfig, load_checkpoint_in_model
from accelerate.utils import TorchTensorParallelConfig

MIB = 1 << 20
WIDTH, LAYERS, BUCKET = 512, 14, 2 * MIB
LAYER = 4 * WIDTH * WIDTH
SPLIT = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan={"*.0": "colwise_rep"}))
RUNS = {
    "ddp": {},
    "fsdp1": {"fsdp_plugin": sharding(1)},
    "fsdp1-orig": {"fsdp_plugin": sharding(1, use_orig_params=True)},
    "fsdp2": {"fsdp_plugin": sharding(2)},
    "tp": {"parallelism_config": SPLIT},
}


def of_process(key):
    """Return a figure of this process, in bytes: what it has in memory, or the most it had since the last `growth` began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def growth(work):
    """Return by how much the memory of this process grows at most while it works."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = of_process("VmRSS")
    work()
    return of_process("VmHWM") - before


def streamed(accelerator, model, keep):
    kept = {}
    for bucket in accelerator.stream_weights(model, bucket_bytes=BUCKET):
        assert sum(value.nbytes for value in bucket.values()) <= BUCKET, list(bucket)
        kept |= bucket if keep else {}
    return kept


def check_a_stream_holds_a_bucket():
    ctypes.CDLL(None).mallopt(
        -3, MIB // 4
    )  # M_MMAP_THRESHOLD: a tensor's memory is the system's again when it is freed
    for name, options in RUNS.items():
        accelerator = fresh_accelerator(**options)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)))
        model = accelerator.prepare(model)
        model(torch.ones(1, WIDTH))

        streamed(accelerator, model, keep=False)  # what libraries and allocators keep from the first time on
        found = growth(partial(streamed, accelerator, model, keep=False))
        # A bucket, and of the next tensor its gathered parts, the whole and the copy; under FSDP1 its unit.
        assert found < BUCKET + 4 * LAYER, (name, found / MIB)
        whole = growth(partial(streamed, accelerator, model, keep=True))
        assert whole > (LAYERS - 5) * LAYER, (name, whole / MIB, "the figure does not measure what is held")
        accelerator.free_memory(model)


def check_what_a_stream_refuses():
    accelerator = fresh_accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    with raised(ValueError, "bucket_bytes=0"):
        accelerator.stream_weights(model, bucket_bytes=0)
    with raised(RuntimeError, "'weight' for one", "Load them"):
        list(accelerator.stream_weights(nn.Linear(2, 2, device="meta")))


def check_a_stream_has_buffers_and_leaves_integers():
    class Counted(nn.BatchNorm1d):
        def get_extra_state(self):
            return {"no": "tensor"}

        def set_extra_state(self, state):
            pass

    for name in ("ddp", "fsdp1", "fsdp1-orig", "fsdp2"):
        accelerator = fresh_accelerator(**RUNS[name])
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), Counted(4))
        model.register_buffer("table", torch.ones(3), persistent=False)
        model = accelerator.prepare(model)
        (found,) = [dict(bucket) for bucket in accelerator.stream_weights(model, dtype=torch.float16)]
        kinds = {key: value.dtype for key, value in found.items()}
        floating = ("0.0.weight", "0.0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")
        expected = {**dict.fromkeys(floating, torch.float16), "1.num_batches_tracked": torch.int64}
        assert all(one == expected for one in everywhere(kinds)), (name, kinds)


def check_a_checkpoint_on_the_first_machine_alone_is_loaded_or_refused_by_all():
    accelerator = fresh_accelerator(**RUNS["fsdp2"])
    torch.manual_seed(rank())
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 8)))
    with shared_folder() as folder:
        path = Path(folder, "weights.bin" if rank() == 0 else "absent.bin")
        if rank() == 0:
            torch.save({"0.weight": torch.eye(8), "0.bias": torch.ones(8)}, path)
        load_checkpoint_in_model(accelerator.unwrap_model(model), path, broadcast_from_rank0=True)
        assert torch.equal(full(model[0].weight), torch.eye(8))
        path.write_bytes(b"damaged")
        with raised(Exception):
            load_checkpoint_in_model(accelerator.unwrap_model(model), path, broadcast_from_rank0=True)


def check_whole_parameters_are_lent():
    """Inside they are complete, and what is changed is lost; afterwards each rank has its shards again, and gathers in each forward."""
    for name in ("fsdp1", "fsdp1-orig", "fsdp2"):
        accelerator = fresh_accelerator(**RUNS[name])
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))))

        def here(model=model):
            return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())

        before, rows = here(), torch.ones(2, 8)
        with accelerator.whole_parameters(model) as whole, torch.no_grad():
            assert sum(parameter.numel() for parameter in whole.parameters()) == 3 * 72, name
            wanted = whole(rows)
            for parameter in whole.parameters():
                parameter.zero_()
        assert here() == before < 3 * 72, name
        with pytest_raises(KeyError), accelerator.whole_parameters(model):
            raise KeyError(name)  # what fails inside leaves it whole for no one
        assert here() == before, name
        assert torch.allclose(model(rows), wanted), name
        model(rows).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.numel()), name


def check_adapters_are_gathered_once():
    """FSDP1 gathered all units to learn the names in them, and then all units once more, those without adapters too."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return
    accelerator = fresh_accelerator(**RUNS["fsdp1-orig"])
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(4)))
    model = accelerator.prepare(get_peft_model(layers, LoraConfig(r=2, target_modules=["1.0"])))
    summon = FullyShardedDataParallel.summon_full_params
    with (
        shared_folder() as folder,
        mock.patch.object(FullyShardedDataParallel, summon.__name__, wraps=summon) as gathers,
    ):
        accelerator.save_adapter(model, folder)
        assert Path(folder, "adapter_model.safetensors").stat().st_size > 4 * 2 * 2 * 64
    assert gathers.call_count == 1, gathers.mock_calls
