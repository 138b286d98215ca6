"""What needs a GPU: run with `make test-gpu`; some of it needs one, some two."""

import os
import sys

import pytest
import torch

from distributed.conftest import SCRIPTS, done

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@one_gpu
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_one_gpu_trains_in_every_precision(precision):
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=precision)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.device.type == "cuda" and (accelerator.scaler is not None) is (precision == "fp16")
    losses = []
    for _ in range(5):
        for batch in loader:
            assert batch.device.type == "cuda"
            output = model(batch)
            assert output.dtype is torch.float32
            loss = (output - 1).pow(2).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


@one_gpu
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_one_gpu_shards(version, offload):
    """A lone rank shards over itself, with everything on the device, or in host memory between steps."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_offload=offload)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(20):
        loss = (model(torch.ones(4, 8, device=accelerator.device)).float() - 1).pow(2).mean()
        accelerator.backward(loss)
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0).isfinite()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and "bfloat16" in str(accelerator.precision_report(model))
    assert accelerator.get_state_dict(model)["0.weight"].shape == (8, 8)
    accelerator.end_training()


@one_gpu
def test_one_gpu_says_what_holds_its_memory_and_writes_a_snapshot(tmp_path):
    """The report of an error that ends a program needs no memory of the GPU; a snapshot is written after an error, too."""
    from accelerate import Accelerator, ProfileKwargs
    from accelerate.extensions.reports import memory

    accelerator = Accelerator()
    model = torch.nn.Linear(1024, 1024, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(torch.OutOfMemoryError) as caught, accelerator.profile(ProfileKwargs(memory_snapshot=tmp_path)):
        accelerator.backward(model(torch.ones(8, 1024, device=accelerator.device)).sum())
        optimizer.step()
        torch.empty(1 << 50, device=accelerator.device)
    assert (tmp_path / "memory_0.pickle").stat().st_size > 0
    text = memory.explain(caught.value)
    assert "Memory on cuda" in text and "4.0 MiB      0 B    4.0 MiB    8.0 MiB" in text
    assert "8-bit optimizer" in text and "cache: " in text


def by_torchrun(*words, **environment):
    """Start a script on two processes of one GPU, which our launcher refuses: torch's does not count devices."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1", **environment}
    return done([*command, str(SCRIPTS / words[0]), *words[1:]], env=variables)


@one_gpu
def test_two_processes_share_one_gpu_over_gloo():
    ended = by_torchrun("share_gpu.py")
    assert ended.returncode == 0 and "ok shared" in ended.stdout, ended.stderr[-3000:]


@one_gpu
def test_two_ranks_of_one_gpu_train_load_and_save():
    """What gloo moves between tensors of a GPU: replicas, batches, objects, checkpoints. It crashes on gathers of shards."""
    names = "prepare operations loaders streams saving estimator watching wrappers active_loader collective_errors preemption training"
    scripts = [f"check_{name}.py" for name in names.split()]
    ended = by_torchrun("several.py", *scripts, BACKEND="gloo", PYTHONPATH=os.pathsep.join(sys.path))
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    assert ended.stdout.count("\ndone check_") == len(scripts), ended.stdout


@one_gpu
def test_two_processes_on_one_gpu_over_nccl_are_errors_that_name_the_way_out(launch):
    how = {"processes": 2, "cpu": False, "succeeds": False, "environment": {"CUDA_VISIBLE_DEVICES": "0"}}
    assert "Ask for at most 1" in launch("share_gpu.py", **how).stderr
    ended = by_torchrun("share_gpu.py", BACKEND="nccl")
    assert ended.returncode != 0 and "gloo" in ended.stderr + ended.stdout


@two_gpus
@pytest.mark.parametrize(
    "script", ["check_prepare.py", "check_training.py", "check_uneven_inputs.py", "check_operations.py"]
)
def test_two_gpus_over_nccl(launch, script):
    assert "ok" in launch("several.py", script, processes=2, cpu=False).stdout
