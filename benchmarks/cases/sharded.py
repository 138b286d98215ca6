"""A step of the transformer of `precision` under FSDP2 in bfloat16, and with what is requested next to it: time, device memory, the losses."""

import argparse
import json
import statistics
import time
import warnings

import torch
from device import CPU, DEVICE, finish
from precision import LENGTH, ROWS, VOCABULARY, Words
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

warnings.simplefilter("ignore")


def adamw(model):
    return [torch.optim.AdamW(model.parameters(), lr=1e-4)]


def adamw_of_8_bits(model):
    from torchao.optim import AdamW8bit

    return [AdamW8bit(model.parameters(), lr=1e-4)]


def muon(model):
    """Muon for the matrices of blocks, AdamW for the rest, as it is meant."""
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    known = set(map(id, matrices))
    rest = [weight for weight in model.parameters() if id(weight) not in known]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-4)]


def compiled(regional):
    return {"dynamo_plugin": TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)}


# By name: options of the plugin, of the Accelerator, what makes the optimizers.
KINDS = {
    "none": ({}, {}, adamw),
    "norms in float32 by name": ({"module_precision": {"*norms*": "fp32"}}, {}, adamw),
    "checkpointing": ({"activation_checkpointing": True}, {}, adamw),
    "selective checkpointing": ({"activation_checkpointing": "selective"}, {}, adamw),
    "compiled by block": ({}, compiled(True), adamw),
    "complete model compiled": ({}, compiled(False), adamw),
    "an average of the weights": ({}, {}, adamw),
    "AdamW of 8 bits": ({}, {}, adamw_of_8_bits),
    "Muon": ({}, {}, muon),
    "offloaded": ({"cpu_offload": True}, {}, adamw),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    settings, options, optimizers = KINDS[arguments.kind]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], **settings
    )
    accelerator = Accelerator(cpu=CPU, mixed_precision="bf16", fsdp_plugin=plugin, **options)
    torch.manual_seed(0)
    model = Words()
    model, *steppers = accelerator.prepare(model, *optimizers(model))
    if arguments.kind == "an average of the weights":
        accelerator.ema(model, 0.999)
    words = torch.randint(VOCABULARY, (4, ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    warm, times, losses = 10, [], []
    begun = time.perf_counter()
    for step in range(warm + arguments.steps):
        if step == warm and not CPU:
            torch.cuda.reset_peak_memory_stats()
        finish()
        start = time.perf_counter()
        batch = words[step % len(words)]
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(-1, 1).flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        finish()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
        if step == 0:
            first = time.perf_counter() - begun
    figures = {"a step (ms)": statistics.mean(times[warm:]) * 1e3, "the first step (s)": first}
    if not CPU:
        figures["peak memory (MiB)"] = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(figures | {"last loss": losses[-1]}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
