"""Where the time of a step goes: a trace per rank with torch's profiler.

The schedule omits one step, warms up for one and records two. Each rank writes `profile_<rank>.json` into `output_trace_dir`; open it
at https://ui.perfetto.dev or chrome://tracing. The program reads its own trace back and sums up the time of matrix products and of the
exchange of gradients.

    accelerate launch --cpu --num_processes 2 examples/by_feature/profile_steps.py

Prints: a trace per rank, with 2 steps, matrix products and the all-reduce of gradients in it: True
"""

import json
import pathlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed


def main() -> None:
    folder = pathlib.Path("out/profile_steps")
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
    profile = ProfileKwargs(
        activities=["cpu"], schedule_option=schedule, output_trace_dir=str(folder)
    )  # "cuda" on GPUs
    accelerator = Accelerator(kwargs_handlers=[profile])
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32)[:128] / 16, torch.tensor(digits.target)[:128])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=16))

    with accelerator.profile() as profiler:
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()  # tells the schedule that a step is over

    events = json.loads((folder / f"profile_{accelerator.process_index}.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    spent = {
        word: sum(event.get("dur", 0) for event in events if word in event["name"]) for word in ("mm", "allreduce")
    }
    accelerator.print(f"rank 0, microseconds in matrix products and all-reduce: {spent}")
    steps = sum(name.startswith("ProfilerStep") for name in names)
    found = steps == 2 and all(any(word in name for name in names) for word in ("aten::addmm", "allreduce"))
    everywhere = accelerator.reduce(torch.tensor(float(found)), "sum").item() == accelerator.num_processes
    accelerator.print(
        f"a trace per rank, with {steps} steps, matrix products and the all-reduce of gradients in it: {everywhere}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
