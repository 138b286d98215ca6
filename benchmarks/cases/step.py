"""One training step of a tiny model: what the package adds to plain torch, with and without `accumulate`."""

import json
import statistics
import time
import warnings

import torch
from device import CPU, DEVICE, finish
from torch import nn

from accelerate import Accelerator

STEPS, REPEATS = 2000, 5
warnings.simplefilter("ignore")
torch.set_num_threads(1)


def parts():
    model = nn.Linear(8, 1, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader(torch.randn(4 * STEPS, 8), batch_size=4)
    return model, optimizer, scheduler, loader


def plain(model, optimizer, scheduler, loader):
    for batch in loader:
        loss = model(batch.to(DEVICE)).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def prepared(accelerator):
    def run(model, optimizer, scheduler, loader):
        for batch in loader:
            loss = model(batch).sum()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def accumulated(accelerator):
    def run(model, optimizer, scheduler, loader):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).sum()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def plain_window(model, optimizer, scheduler, loader):
    for number, batch in enumerate(loader, 1):
        loss = model(batch.to(DEVICE)).sum() / 4
        loss.backward()
        if number % 4 == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def microseconds(run, objects):
    start = time.perf_counter()
    run(*objects)
    finish()
    return (time.perf_counter() - start) / STEPS * 1e6


def main():
    step, window = Accelerator(cpu=CPU), None
    loops = {"plain": (plain, parts()), "prepared": (prepared(step), step.prepare(*parts()))}
    figures = {name: [] for name in loops}
    for _ in range(REPEATS):
        for name, (run, objects) in loops.items():
            figures[name].append(microseconds(run, objects))
    step.free_memory()
    step.gradient_accumulation_steps = 4
    window = step
    loops = {
        "plain_window": (plain_window, parts()),
        "accumulate": (accumulated(window), window.prepare(*parts())),
    }
    figures.update({name: [] for name in loops})
    for _ in range(REPEATS):
        for name, (run, objects) in loops.items():
            figures[name].append(microseconds(run, objects))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    print(
        json.dumps(
            {
                "plain torch step (us)": medians["plain"],
                "step (us)": medians["prepared"],
                "step overhead (us)": medians["prepared"] - medians["plain"],
                "plain torch, accumulation step of 4 (us)": medians["plain_window"],
                "accumulate, accumulation step of 4 (us)": medians["accumulate"],
                "accumulate overhead (us)": medians["accumulate"] - medians["plain_window"],
            }
        )
    )


if __name__ == "__main__":
    main()
