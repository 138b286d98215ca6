"""What a program that runs out of memory says as it ends."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import fsdp

from accelerate.config.enums import DistributedType
from accelerate.diagnostics.memory import MemoryRow
from accelerate.runtime import failure
from accelerate.training import out_of_memory

PROGRAM = """
import torch
from torch.distributed import fsdp
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(512, 1024, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
with accelerator.measure_activations():
    accelerator.backward(model(torch.ones(256, 512)).sum())
optimizer.step()
{how}
torch.empty(1 << 50)
"""
SAID = """
rank  parameters  buffers  gradients  optimizer  activations
   0     2.0 MiB      0 B    2.0 MiB    4.0 MiB    512.0 KiB
activation checkpointing: model.gradient_checkpointing_enable(), or torch.utils.checkpoint      512.0 KiB
half the batch size, and gradient_accumulation_steps=2                                          256.0 KiB
mixed_precision='bf16'                                                                          256.0 KiB
"""
HOOK = "import sys; sys.excepthook = lambda kind, error, trace: print('mine', file=sys.stderr)"
FAILS = "accelerator.prepared.models = 3"


@pytest.mark.parametrize("how, launched", [("", False), (FAILS, False), ("", True), (HOOK, True)])
def test_the_report_follows_the_traceback(tmp_path, how, launched):
    says = "" if how else SAID
    file = tmp_path / "error.json"
    own = {failure.LAUNCHER: str(os.getpid()), failure.ERROR_FILE: str(file), "RANK": "0"} if launched else {}
    command = [sys.executable, "-c", PROGRAM.format(how=how)]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=120)
    record = json.loads(file.read_text())[failure.OURS] if file.exists() else {"traceback": done.stderr}
    assert done.returncode == 1 and file.exists() is (launched and how != HOOK)
    text = record["traceback"]
    assert ("can't allocate memory" in text) is (how != HOOK) and ("mine" in text) is (how == HOOK)
    missing = [line for line in says.split("\n") if line not in text.partition("can't allocate memory")[2]]
    assert not missing and ("Memory on cpu" in text) is bool(says)
    assert "RuntimeError: " in record.get("summary", "RuntimeError: ")


def test_other_errors_are_not_explained():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert out_of_memory.explain(ValueError("x")) == out_of_memory.explain(RuntimeError("x")) == ""
    assert out_of_memory.explain(KeyboardInterrupt()) == ""
    text = out_of_memory.explain(torch.OutOfMemoryError("CUDA out of memory"))
    assert (
        text.count("not measured") == 5 and "accumulation_steps=2 " in text
    )  # in the report, its note, and three times
    assert accelerator.num_processes == 1


ROW = MemoryRow(0, parameters=100, buffers=0, gradients=60, optimizer=200, activations=80, peak=0)
KINDS = DistributedType
SHARDS, EIGHT_BITS = "--use_fsdp --fsdp_version 2", "an 8-bit optimizer"


def engine(stage, offloads):
    return SimpleNamespace(zero_stage=stage, hf_ds_config=SimpleNamespace(is_offload=lambda: offloads))


@pytest.mark.parametrize(
    "kind, device, plugin, expected",
    [
        (KINDS.NO, "cpu", None, {}),
        (KINDS.NO, "cuda", None, {EIGHT_BITS: 120}),
        (KINDS.MULTI_CPU, "cpu", None, {SHARDS: 270}),
        (KINDS.MULTI_GPU, "cuda", None, {SHARDS: 270, EIGHT_BITS: 120}),
        (KINDS.FSDP, "cuda", SimpleNamespace(offload_params=True), {EIGHT_BITS: 120}),
        (KINDS.FSDP, "cuda", SimpleNamespace(offload_params=False), {"cpu_offload=True": 360, EIGHT_BITS: 120}),
        (KINDS.FSDP, "cuda", fsdp.OffloadPolicy(), {"cpu_offload=True": 360, EIGHT_BITS: 120}),
        (KINDS.FSDP, "cuda", fsdp.CPUOffloadPolicy(), {EIGHT_BITS: 120}),
        (KINDS.DEEPSPEED, "cpu", engine(0, False), {"DeepSpeedPlugin(zero_stage=3)": 270}),
        (KINDS.DEEPSPEED, "cpu", engine(1, False), {"DeepSpeedPlugin(zero_stage=3)": 120}),
        (KINDS.DEEPSPEED, "cuda", engine(2, True), {"DeepSpeedPlugin(zero_stage=3)": 75, EIGHT_BITS: 120}),
        (KINDS.DEEPSPEED, "cuda", engine(3, False), {"offload_optimizer_device='cpu'": 200, EIGHT_BITS: 120}),
    ],
)
def test_settings_that_apply_and_what_they_save(kind, device, plugin, expected):
    run = SimpleNamespace(
        distributed_type=kind,
        device=torch.device(device),
        num_processes=1 if kind is KINDS.NO else 4,
        parallelism_config=None,
        deepspeed_plugin=plugin,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(cpu_offload=plugin)),
    )
    found = [saving for saving in out_of_memory._of_states(run, ROW, moments=160) if saving[1]]
    assert [most for _, most in found] == list(expected.values())
    assert all(setting.startswith(words) for (setting, _), words in zip(found, expected, strict=True))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_makes_activations_smaller(checkpoints):
    model = torch.nn.Linear(1, 1)
    model.gradient_checkpointing = checkpoints
    run = SimpleNamespace(state=None, gradient_accumulation_steps=3, mixed_precision="bf16")
    found = list(out_of_memory._of_activations(run, [model], 80))
    assert found[-1] == ("half the batch size, and gradient_accumulation_steps=6", 40)
    assert [most for _, most in found[:-1]] == ([] if checkpoints else [80])
