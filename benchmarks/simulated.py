"""Simulate one of 16,384 ranks of a Llama of 1.1 billion weights, and write how long it took and what memory into the guide.

    python benchmarks/simulated.py

The launcher runs this file again as the training program, with shapes only. Needs transformers.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from busy import cores_of_others

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/guides/plan.md", ROOT / "benchmarks/results/simulated.json"
BEGIN, END = "<!-- written by benchmarks/simulated.py -->", "<!-- end of it -->"
OPTIONS = (
    "--simulate 2048x8 --simulate_steps 3 --simulate_shapes_only --mixed_precision bf16 --use_fsdp --fsdp_version 2 "
    "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer"
)
SIZES = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
SIZES |= {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048}


def train() -> None:
    """Train, as any program would."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate import Accelerator

    accelerator = Accelerator()
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.zeros(131072, 512, dtype=torch.long), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, ids in enumerate(loader):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        if step == 2:
            accelerator.save_state("runs/checkpoint")
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Run the launcher, and write down what it took."""
    if "ACCELERATE_SIMULATE_STEPS" in os.environ or "RANK" in os.environ:
        train()
        return
    others = cores_of_others()
    began = time.monotonic()
    command = [sys.executable, "-m", "accelerate.commands.launch", *OPTIONS.split(), __file__]
    subprocess.run(command, check=True)
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    RESULTS.write_text(
        json.dumps({"seconds": round(seconds, 1), "MiB": round(peak), "cores_of_others": others}, indent=1) + "\n"
    )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    busy = f", of which other programs used {others:.1f} before" if others else ""
    text = f"The simulation took {seconds:.0f} s and {peak:,.0f} MiB of memory on {os.cpu_count()} cores{busy}."
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
