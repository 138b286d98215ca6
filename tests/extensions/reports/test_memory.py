"""What a program that runs out of memory says as it ends."""

import json
import os
import subprocess
import sys

import pytest
import torch

from accelerate.extensions.reports import out_of_memory
from accelerate.runtime import failure

PROGRAM = """
import torch
from torch.distributed import fsdp
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(512, 1024, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(256, 512)).sum())
optimizer.step()
{how}
torch.empty(1 << 50)
"""
SAID = """
rank  parameters  buffers  gradients  optimizer   activations
   0     2.0 MiB      0 B    2.0 MiB    4.0 MiB  not measured
gradient_accumulation_steps, mixed_precision='bf16', an 8-bit optimizer, and on a GPU offload to the host.
"""
HOOK = "import sys; sys.excepthook = lambda kind, error, trace: print('mine', file=sys.stderr)"
FAILS = "accelerator._models = 3"


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
    assert text.count("not measured") == 2 and "accumulation_steps" in text  # in the report, and its note
    assert accelerator.num_processes == 1
