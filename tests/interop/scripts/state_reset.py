"""TrainingArguments beside a live Accelerator: it keeps its state, gathers and waits."""

import sys

import torch
from tiny import report
from transformers import TrainingArguments

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

folder = sys.argv[1]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
before = accelerator.state.distributed_type
for _ in range(2):
    arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    assert arguments.device.type == "cpu"
    assert accelerator.state.distributed_type == before
    world, rank = accelerator.num_processes, accelerator.process_index
    gathered = accelerator.gather(torch.tensor([rank]))
    assert gathered.tolist() == list(range(world)), gathered
    accelerator.wait_for_everyone()
    assert PartialState().num_processes == world and arguments.world_size == world
assert not AcceleratorState._shared_state  # the reset did reset: the next Accelerator may choose anew
later = Accelerator(cpu=True, mixed_precision="bf16")
assert later.mixed_precision == "bf16" and accelerator.mixed_precision == "no"
report(worlds=[accelerator.num_processes, later.num_processes])
