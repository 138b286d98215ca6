"""`TrainingArguments` of transformers next to a live `Accelerator`.

    accelerate launch --cpu --num_processes 1 examples/state_reset.py
    accelerate launch --cpu --num_processes 2 examples/state_reset.py

Every `TrainingArguments` of transformers resets Accelerate's shared state. The first line below is printed before that, the
second after it; they should be the same, and the accelerator should still be able to talk to the other processes.
"""

import torch
from transformers import TrainingArguments

from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
print(hasattr(accelerator.state, "distributed_type"), accelerator.state.distributed_type)
args = TrainingArguments(output_dir="out", use_cpu=True)
print(hasattr(accelerator.state, "distributed_type"), accelerator.state.distributed_type)

ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
accelerator.wait_for_everyone()
accelerator.print(f"gathered from {accelerator.num_processes} process(es): {ranks.tolist()}")
accelerator.end_training()
